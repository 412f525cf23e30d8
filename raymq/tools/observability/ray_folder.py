"""Install the Grafana dashboard in the folder from which Ray's Grafana loads its dashboards.

Ray's web dashboard creates `SESSION/metrics/grafana/` again at each start, so raymq writes its dashboard after each
start. The file `provisioning/dashboards/default.yml` in this folder names the folder of dashboards. An environment
variable of Ray's web dashboard can select another folder. Without Ray's web dashboard, none of these files exists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import ray
import yaml

from raymq.common.errors import InvalidArgumentError
from raymq.tools.observability.board import BOARD_FILE, board_json

METRICS_ROOT_VARIABLE: Final = "RAY_METRICS_OUTPUT_ROOT"
"""Ray's environment variable that names a folder to use instead of `SESSION/metrics`."""
PROVIDER_FILE: Final = "grafana/provisioning/dashboards/default.yml"
BOARDS_FOLDER: Final = "grafana/dashboards"
"""Ray's default folder of Grafana dashboards, relative to the metrics folder."""


def session_folder() -> Path:
    """Return the folder of the Ray session to which this process is connected."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


def metrics_root(session: Path) -> Path:
    """Return the folder with a Ray session's files for Prometheus and Grafana, on the head node."""
    return Path(os.environ.get(METRICS_ROOT_VARIABLE) or session / "metrics")


def watched_folder(root: Path) -> Path | None:
    """Return the folder from which Grafana loads dashboards, as configured in Ray's files below `root`. Return None if
    Ray's files do not exist."""
    try:
        providers = yaml.safe_load((root / PROVIDER_FILE).read_text())["providers"]
        return Path(providers[0]["options"]["path"])
    except (OSError, KeyError, IndexError, TypeError, yaml.YAMLError):
        # Ray's file does not exist or has other content: Ray runs no web dashboard, or this version of Ray has another
        # format.
        return None


def install_board(output: str | None = None) -> dict[str, Any]:
    """Write raymq's dashboard file on this node, which must be the head node. The process must be connected to Ray.

    `output`: absolute path of a folder. The default is the folder of dashboards in Ray's files, or Ray's default folder
    if these files do not exist. Returns `path`, the written file, and `watched`: True if Ray's Grafana shows the file.
    An existing file is replaced atomically. Raises InvalidArgumentError if the file cannot be written.
    """
    if output and not Path(output).is_absolute():
        raise InvalidArgumentError(f"--output {output!r} must be an absolute path of a directory on the head node")
    root = metrics_root(session_folder())
    watched = watched_folder(root)
    folder = Path(output) if output else watched or root / BOARDS_FOLDER
    path = folder / BOARD_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Write to another name and rename the file, because Grafana may be reading the old file.
        beside = path.with_suffix(".new")
        beside.write_text(board_json())
        beside.replace(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write the Grafana dashboard to directory {folder} on the head node: {error.strerror}; "
            "choose another directory with --output"
        ) from None
    return {"path": str(path), "watched": watched is not None and watched == folder}


def has_board() -> bool:
    """Return True if the dashboard file that `install_board` wrote on this node still exists. Ray deletes the file when
    it creates the folder of dashboards again."""
    root = metrics_root(session_folder())
    return ((watched_folder(root) or root / BOARDS_FOLDER) / BOARD_FILE).exists()
