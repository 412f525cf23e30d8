"""Export files for other Prometheus and Grafana servers: the dashboard, the alert rules, and Kubernetes objects.

The alert rules are in alerts.yml in this folder, in Prometheus' format. The two objects are for Prometheus' operator:
one selects the pods that Prometheus scrapes in Kubernetes, the other defines the alerts.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from raymq.common.errors import InvalidArgumentError
from raymq.tools.observability.board import BOARD_FILE, board_json

METRICS_PORT_NAME: Final = "metrics"
"""Name of a pod's port that serves the metrics of its Ray node."""
METRICS_PORT: Final = 8080
SCRAPE_INTERVAL: Final = "10s"
"""Interval at which Prometheus scrapes the metrics. raymq updates its metrics at the same interval."""


def pod_monitor(name: str = "raymq") -> dict[str, Any]:
    """Return a PodMonitor object for the pods of all RayClusters in its namespace. The PodMonitor adds the label
    `ray_io_cluster`."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "raymq"}},
        "spec": {
            "selector": {"matchLabels": {"ray.io/is-ray-node": "yes"}},
            "podMetricsEndpoints": [
                {
                    "port": METRICS_PORT_NAME,
                    "interval": SCRAPE_INTERVAL,
                    "relabelings": [
                        {
                            "action": "replace",
                            "sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"],
                            "targetLabel": "ray_io_cluster",
                        }
                    ],
                }
            ],
        },
    }


def prometheus_rule(name: str = "raymq") -> dict[str, Any]:
    """Return a PrometheusRule object with the rules of alerts.yml."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "raymq"}},
        "spec": {"groups": alert_groups()},
    }


def alerts_text() -> str:
    """Return the text of alerts.yml."""
    return (files(__package__) / "alerts.yml").read_text()


def alert_groups() -> list[dict[str, Any]]:
    """Return the groups of alert rules in alerts.yml."""
    return list(yaml.safe_load(alerts_text())["groups"])


def alert_rules() -> list[dict[str, Any]]:
    """Return all alert rules, in the order of alerts.yml."""
    return [rule for group in alert_groups() for rule in group["rules"]]


def relabel_text() -> str:
    """Return the snippet of a scrape configuration that renames raymq's series to RocketMQ's names."""
    return (files(__package__) / "relabel.yml").read_text()


def exported_files() -> dict[str, str]:
    """Return the texts of the exported monitoring files, by file name."""
    return {
        BOARD_FILE: board_json(),
        "alerts.yml": alerts_text(),
        "relabel.yml": relabel_text(),
        "pod-monitor.yaml": yaml.safe_dump(pod_monitor(), sort_keys=False),
        "prometheus-rule.yaml": yaml.safe_dump(prometheus_rule(), sort_keys=False),
    }


def export(folder: Path) -> list[Path]:
    """Write all exported monitoring files into `folder` and return their paths. Existing files with the same names are
    replaced.

    Creates the folder if it does not exist. Raises InvalidArgumentError if a file cannot be written. Files before the
    failed file may have been written already.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in exported_files().items():
            (folder / name).write_text(text)
            paths.append(folder / name)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write to directory {folder}: {error.strerror}; choose another directory"
        ) from None
    return paths
