"""All that Prometheus and Grafana elsewhere need to know of raymq, as files in a folder."""

from __future__ import annotations

from pathlib import Path

import yaml

from raymq.common.errors import InvalidArgumentError
from raymq.tools.observability.alerts import alerts_text, relabel_text
from raymq.tools.observability.board import BOARD_FILE, board_json
from raymq.tools.observability.kubernetes_objects import pod_monitor, prometheus_rule


def exported_files() -> dict[str, str]:
    """The files by name: the board, the alerts, the relabel snippet, and the two objects of Prometheus' operator."""
    return {
        BOARD_FILE: board_json(),
        "alerts.yml": alerts_text(),
        "relabel.yml": relabel_text(),
        "pod-monitor.yaml": yaml.safe_dump(pod_monitor(), sort_keys=False),
        "prometheus-rule.yaml": yaml.safe_dump(prometheus_rule(), sort_keys=False),
    }


def export(folder: Path) -> list[Path]:
    """Write the files, and replace older ones of the same names; returns their paths.

    Makes the folder if it is missing. InvalidArgumentError when something cannot be written; some may be there then.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in exported_files().items():
            (folder / name).write_text(text)
            paths.append(folder / name)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {folder}: {error.strerror}; name another folder") from None
    return paths
