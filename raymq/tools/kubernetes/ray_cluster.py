"""Generate the RayCluster object: a head, a worker group for each store, and worker groups without a volume: one for
computing, and one for Spark's executors.

The pod of store 0 runs `raymq up` each time Kubernetes creates the pod. In a cluster with several replicas, the
Controller starts missing servers; a cluster with one store has no Controller. If the head is lost, a new Ray cluster
starts. All worker containers then restart too, so `raymq up` runs again.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any, Final

from raymq.tools.kubernetes.cluster_shape import (
    DATA_MOUNT,
    GATEWAY_HTTP_PORT,
    SETTINGS_MOUNT,
    STORE_LABEL,
    ClusterShape,
)
from raymq.tools.observability.export import METRICS_PORT, METRICS_PORT_NAME

RAY_VERSION: Final = "2.60.0"
GCS_PORT: Final = 6379
DASHBOARD_PORT: Final = 8265
CONSOLE_PORT: Final = 8270
GATEWAY_PORT: Final = 8081
GATEWAY_PORTS: Final = {"gateway": GATEWAY_PORT, "gateway-http": GATEWAY_HTTP_PORT}
"""The ports of the gateway by name: for RocketMQ's clients, and for HTTP."""

GRACE_PERIOD_S: Final = 60
"""Grace period of a pod in seconds: the pod's stores must close within this time, because Kubernetes then kills the
pod."""
COMPUTE_NODES_MAX: Final = 10
USERS_GROUP: Final = 100
"""Group id of the user `ray` in Ray's images. The volumes get this group, because the user `ray` must be able to write
to them."""
RESOURCES: Final = {"cpu": "2", "memory": "8Gi"}
SPARK_GROUP: Final = "spark"
"""Name of the worker group for Spark's executors, and of the Ray resource that only its pods have."""
SPARK_RESOURCES: Final = {"cpu": "4", "memory": "16Gi"}
"""CPUs and memory of a pod for one executor of Spark. The memory is more than the executor's heap, because the pod also
has Ray's object store and Spark's Python workers."""

HEALTH_CHECKS: Final = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Ray's health-check settings: a node that answers no check for about 2 s counts as dead, and its broker groups get new
masters."""


def ray_cluster(shape: ClusterShape) -> dict[str, Any]:
    """Return the RayCluster object. Its volume claims are separate objects, so deleting the RayCluster keeps the
    volumes."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": shape.name, "labels": {"app.kubernetes.io/name": "raymq"}},
        "spec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "headGroupSpec": _head(shape),
            "workerGroupSpecs": [
                *(_store(shape, number) for number in range(shape.stores)),
                _without_volume(shape, "compute", RESOURCES, 0, COMPUTE_NODES_MAX),
                *([_spark(shape)] if shape.spark_pods else []),
            ],
        },
    }


def claim_name(shape: ClusterShape, owner: str) -> str:
    """Return the name of the volume claim of the head ("head") or of a store ("store-0")."""
    return f"{shape.name}-{owner}"


def _head(shape: ClusterShape) -> dict[str, Any]:
    container = _container(shape, "ray-head") | {
        "ports": [
            {"name": "gcs-server", "containerPort": GCS_PORT},
            {"name": "dashboard", "containerPort": DASHBOARD_PORT},
            {"name": "console", "containerPort": CONSOLE_PORT},
            *({"name": name, "containerPort": port} for name, port in GATEWAY_PORTS.items() if shape.gateway),
            {"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT},
        ],
    }
    return {
        "serviceType": "ClusterIP",
        "resources": {"CPU": "0"},  # The head runs the Controller and the NameServer, but no user tasks.
        "rayStartParams": {
            "dashboard-host": "0.0.0.0",
            # Quote the JSON text, because KubeRay inserts it into a shell command.
            "system-config": f"'{json.dumps(HEALTH_CHECKS)}'",
        },
        "template": _pod(container, "head", volume=claim_name(shape, "head")),
    }


def _store(shape: ClusterShape, number: int) -> dict[str, Any]:
    lifecycle: dict[str, Any] = {"preStop": _shell(f"raymq store close --address {_ADDRESS}")}
    if number == 0:
        # Run the command in the background: Kubernetes waits until this hook (postStart) returns, and only then KubeRay
        # starts Ray, which the command needs. The command's output is in the pod's log.
        up = f"raymq up --config {SETTINGS_MOUNT}/raymq.yaml --address {_ADDRESS} --wait-nodes {shape.stores}"
        lifecycle["postStart"] = _shell(f"(until {up}; do sleep 5; done) > /proc/1/fd/1 2>&1 &")
    container = _container(shape, "ray-worker") | {
        "ports": [{"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT}],
        "lifecycle": lifecycle,
    }
    labels = {STORE_LABEL: str(number)}
    pod = _pod(container, "store", volume=claim_name(shape, f"store-{number}"))
    pod["spec"]["affinity"] = _one_per_machine(shape)
    if shape.zones:
        zone = shape.zones[number % len(shape.zones)]
        labels["ray.io/availability-zone"] = zone
        pod["spec"]["nodeSelector"] = {"topology.kubernetes.io/zone": zone}
    return {
        "groupName": f"store-{number}",
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "labels": labels,
        "rayStartParams": {},
        "template": pod,
    }


def _spark(shape: ClusterShape) -> dict[str, Any]:
    """Return the worker group for Spark's executors. Each pod has one unit of the Ray resource SPARK_GROUP: an
    executor that requests this unit runs in a pod of its own, and never in the pod of a store."""
    group = _without_volume(shape, SPARK_GROUP, SPARK_RESOURCES, shape.spark_pods, shape.spark_pods)
    return {**group, "resources": {SPARK_GROUP: "1"}}


def _without_volume(
    shape: ClusterShape, name: str, resources: dict[str, str], pods_min: int, pods_max: int
) -> dict[str, Any]:
    container = _container(shape, "ray-worker") | {
        "resources": {"requests": resources.copy(), "limits": resources.copy()},
        "ports": [{"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT}],
        "volumeMounts": [],
    }
    del container["env"]
    return {
        "groupName": name,
        "replicas": pods_min,
        "minReplicas": pods_min,
        "maxReplicas": pods_max,
        "rayStartParams": {},
        "template": _pod(container, name, volume=None),
    }


_ADDRESS: Final = '"$RAY_ADDRESS"'
"""Shell expression for the address of the Ray cluster. KubeRay sets the variable RAY_ADDRESS in every
container."""


def _shell(command: str) -> dict[str, Any]:
    return {"exec": {"command": ["/bin/bash", "-c", command]}}


def _container(shape: ClusterShape, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": shape.image,
        "env": [{"name": "RAYMQ_DATA_DIR", "value": str(DATA_MOUNT)}],
        "resources": {"requests": RESOURCES.copy(), "limits": RESOURCES.copy()},
        "volumeMounts": [_mount("data", DATA_MOUNT), _mount("settings", SETTINGS_MOUNT, read_only=True)],
    }


def _mount(name: str, path: PurePosixPath, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": name, "mountPath": str(path)} | ({"readOnly": True} if read_only else {})


def _pod(container: dict[str, Any], component: str, volume: str | None) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = []
    if volume is not None:
        volumes = [
            {"name": "data", "persistentVolumeClaim": {"claimName": volume}},
            {"name": "settings", "configMap": {"name": "raymq-settings"}},
        ]
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "raymq", "app.kubernetes.io/component": component}},
        "spec": {
            "terminationGracePeriodSeconds": GRACE_PERIOD_S,
            "securityContext": {"fsGroup": USERS_GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [container],
            "volumes": volumes,
        },
    }


def _one_per_machine(shape: ClusterShape) -> dict[str, Any]:
    """Return the rule that puts the stores of a cluster on different machines. The loss of one machine then affects
    only one copy of each message."""
    return {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {
                        "matchLabels": {"ray.io/cluster": shape.name, "app.kubernetes.io/component": "store"}
                    },
                }
            ]
        }
    }
