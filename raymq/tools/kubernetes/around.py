"""The objects around the RayCluster: volume claims, settings, the console's Service, and who may connect."""

from __future__ import annotations

from typing import Any, Final

import yaml

from raymq.tools.kubernetes.cluster_shape import ClusterShape
from raymq.tools.kubernetes.ray_cluster import CONSOLE_PORT, DASHBOARD_PORT, claim_name
from raymq.tools.observability.kubernetes_objects import METRICS_PORT

HEAD_SIZE: Final = "10Gi"
"""Size of the head's volume: the Controller's journal and the NameServer's key/value pairs."""
AGENT_PORT: Final = 52365
"""The port of Ray's agent on each node, which KubeRay's operator and probes ask."""

_RAYMQ: Final = {"app.kubernetes.io/name": "raymq"}


def claims(shape: ClusterShape) -> list[dict[str, Any]]:
    """The volume claims of the head and of each store. One pod at a time has a claim: a second writer is impossible."""
    sizes = {"head": HEAD_SIZE, **{f"store-{number}": shape.size for number in range(shape.stores)}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim_name(shape, owner), "labels": _RAYMQ},
            "spec": {
                "accessModes": ["ReadWriteOncePod"],
                **({"storageClassName": shape.storage_class} if shape.storage_class else {}),
                "resources": {"requests": {"storage": size}},
            },
        }
        for owner, size in sizes.items()
    ]


def settings_map(shape: ClusterShape) -> dict[str, Any]:
    """The ConfigMap with raymq.yaml."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "raymq-settings", "labels": _RAYMQ},
        "data": {"raymq.yaml": yaml.safe_dump(shape.settings(), sort_keys=False)},
    }


def console_service(shape: ClusterShape) -> dict[str, Any]:
    """The Service of the web console, which runs on the head; reachable inside the Kubernetes cluster only."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{shape.name}-console", "labels": _RAYMQ},
        "spec": {
            "type": "ClusterIP",
            "selector": {"ray.io/cluster": shape.name, "ray.io/node-type": "head"},
            "ports": [{"name": "console", "port": CONSOLE_PORT, "targetPort": CONSOLE_PORT}],
        },
    }


def network_policy(shape: ClusterShape) -> dict[str, Any]:
    """A NetworkPolicy: the cluster's own pods reach each other on all ports, KubeRay's operator and Prometheus what
    they ask, the namespace the console, and nobody else anything."""
    anywhere: dict[str, Any] = {"namespaceSelector": {}}
    operator = {**anywhere, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    prometheus = {**anywhere, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": shape.name, "labels": _RAYMQ},
        "spec": {
            "podSelector": {"matchLabels": {"ray.io/cluster": shape.name}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"ray.io/cluster": shape.name}}}]},
                {"from": [operator], "ports": _ports(DASHBOARD_PORT, AGENT_PORT)},
                {"from": [prometheus], "ports": _ports(METRICS_PORT)},
                {"from": [{"podSelector": {}}], "ports": _ports(CONSOLE_PORT)},
            ],
        },
    }


def _ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
