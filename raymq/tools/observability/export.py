"""All that Prometheus and Grafana elsewhere need to know of raymq, as files in a folder.

The alert rules are in the file alerts.yml beside this module, as Prometheus loads it. The objects of Prometheus'
operator say what to scrape in Kubernetes, and when to alert.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from raymq.common.errors import InvalidArgumentError
from raymq.tools.observability.board import BOARD_FILE, board_json

METRICS_PORT_NAME: Final = "metrics"
"""The name that the port of a Ray node's metrics has in pods."""
METRICS_PORT: Final = 8080
SCRAPE_INTERVAL: Final = "10s"
"""Not longer than raymq reports gauges; shorter brings nothing."""


def pod_monitor(name: str = "raymq") -> dict[str, Any]:
    """A PodMonitor for the pods of all RayClusters of its namespace; `ray_io_cluster` is on each series then."""
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
    """A PrometheusRule with the rules of alerts.yml."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "raymq"}},
        "spec": {"groups": alert_groups()},
    }


def alerts_text() -> str:
    """The file of rules."""
    return (files(__package__) / "alerts.yml").read_text()


def alert_groups() -> list[dict[str, Any]]:
    """The groups of rules, as PrometheusRule takes them, too."""
    return list(yaml.safe_load(alerts_text())["groups"])


def alert_rules() -> list[dict[str, Any]]:
    """All rules, in the file's order."""
    return [rule for group in alert_groups() for rule in group["rules"]]


def relabel_text() -> str:
    """The snippet for a scrape config that gives raymq's series RocketMQ's names."""
    return (files(__package__) / "relabel.yml").read_text()


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
