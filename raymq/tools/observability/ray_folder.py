"""The folder where Ray's Grafana provider looks for boards: the one place that knows how Ray lays out its session.

Ray's dashboard makes `SESSION/metrics/grafana/` anew at each start, so a board is put there afterwards, each time.
`provisioning/dashboards/default.yml` there names the folder of the boards, which an environment variable of the
dashboard's process may have moved. A Ray without a dashboard has none of it.
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
"""Ray's environment variable for a folder to use in place of `SESSION/metrics`."""
PROVIDER_FILE: Final = "grafana/provisioning/dashboards/default.yml"
BOARDS_FOLDER: Final = "grafana/dashboards"
"""Ray's own choice, below the folder of metrics."""


def session_folder() -> Path:
    """The folder of the Ray session that this process is connected to."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


def metrics_root(session: Path) -> Path:
    """The folder of a Ray session's files for Prometheus and Grafana, on the head node."""
    return Path(os.environ.get(METRICS_ROOT_VARIABLE) or session / "metrics")


def watched_folder(root: Path) -> Path | None:
    """The folder whose boards Grafana shows when it is started with Ray's files below `root`; None if Ray has not
    written them."""
    try:
        providers = yaml.safe_load((root / PROVIDER_FILE).read_text())["providers"]
        return Path(providers[0]["options"]["path"])
    except (OSError, KeyError, IndexError, TypeError, yaml.YAMLError):
        return None  # no dashboard in this Ray, or files of another layout: the caller says where the board is


def install_board(output: str | None = None) -> dict[str, Any]:
    """Write the board on this node, the head, in a process that is connected to Ray.

    `output`: the folder to write to; default: where Ray's Grafana provider looks or, without one, where it would.
    Returns `path`, the file, and `watched`: True if Ray's provider shows it. Writing again replaces the file whole.
    InvalidArgumentError when it cannot be written.
    """
    if output and not Path(output).is_absolute():
        raise InvalidArgumentError(f"--output {output!r} is no absolute path: it is a folder of the head node")
    root = metrics_root(session_folder())
    watched = watched_folder(root)
    folder = Path(output) if output else watched or root / BOARDS_FOLDER
    path = folder / BOARD_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")  # Grafana may be reading
        beside.write_text(board_json())
        beside.replace(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write Grafana's board to {folder} on the head node: {error.strerror}; name another with --output"
        ) from None
    return {"path": str(path), "watched": watched is not None and watched == folder}


def has_board() -> bool:
    """True if the board is where `install_board` puts it, on this node: Ray has not emptied the folder since."""
    root = metrics_root(session_folder())
    return ((watched_folder(root) or root / BOARDS_FOLDER) / BOARD_FILE).exists()
