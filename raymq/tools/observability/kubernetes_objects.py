"""The objects of Prometheus' operator that watch raymq in Kubernetes: what to scrape, and when to alert."""

from __future__ import annotations

from typing import Any, Final

from raymq.tools.observability.alerts import alert_groups

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
