"""Generate the files of a raymq cluster in Kubernetes: YAML for `kubectl apply --kustomize`, and the Dockerfile of the
image.

Besides the RayCluster, the files contain volume claims, settings, the Services of the console and the gateway, a
NetworkPolicy, and PodDisruptionBudgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from raymq.common.errors import InvalidArgumentError
from raymq.tools.kubernetes.cluster_shape import ClusterShape
from raymq.tools.kubernetes.ray_cluster import CONSOLE_PORT, DASHBOARD_PORT, GATEWAY_PORTS, claim_name, ray_cluster
from raymq.tools.observability.export import METRICS_PORT, pod_monitor, prometheus_rule

HEAD_SIZE: Final = "10Gi"
"""Size of the head's volume, which stores the Controller's journal and the NameServer's key/value pairs."""
AGENT_PORT: Final = 52365
"""The port of Ray's agent on each node. KubeRay's operator and the Kubernetes probes connect to it."""

_RAYMQ: Final = {"app.kubernetes.io/name": "raymq"}


def claims(shape: ClusterShape) -> list[dict[str, Any]]:
    """Return the volume claims of the head and of each store. Only one pod at a time can use a volume claim."""
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
    """Return the ConfigMap that contains raymq.yaml."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "raymq-settings", "labels": _RAYMQ},
        "data": {"raymq.yaml": yaml.safe_dump(shape.settings(), sort_keys=False)},
    }


def head_service(shape: ClusterShape, name: str, ports: Mapping[str, int]) -> dict[str, Any]:
    """Return the Service of ports of the head: of the console or of the gateway. It is reachable only from inside the
    Kubernetes cluster. `ports`: the ports by name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{shape.name}-{name}", "labels": _RAYMQ},
        "spec": {
            "type": "ClusterIP",
            "selector": {"ray.io/cluster": shape.name, "ray.io/node-type": "head"},
            "ports": [{"name": one, "port": port, "targetPort": port} for one, port in ports.items()],
        },
    }


def network_policy(shape: ClusterShape) -> dict[str, Any]:
    """Return the NetworkPolicy of the cluster's pods.

    The pods can connect to each other on all ports. KubeRay's operator can connect to the ports of Ray's dashboard and
    agents. Prometheus can connect to the metrics ports, and the pods of the namespace to the console and
    to the gateway. All other incoming connections are refused.
    """
    for_pods = (CONSOLE_PORT, *(GATEWAY_PORTS.values() if shape.gateway else ()))
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
                {"from": [{"podSelector": {}}], "ports": _ports(*for_pods)},
            ],
        },
    }


def disruption_budgets(shape: ClusterShape) -> list[dict[str, Any]]:
    """Return the PodDisruptionBudgets. They limit evictions, for example by `kubectl drain`.

    The head is never evicted, because the Ray cluster ends with it. Of several stores one at a time is evicted; a
    single store never is. Kubernetes allows only a number in `minAvailable` for pods without a StatefulSet or
    Deployment.
    """
    stores = {"ray.io/cluster": shape.name, "app.kubernetes.io/component": "store"}
    head = {"ray.io/cluster": shape.name, "ray.io/node-type": "head"}
    return [
        _budget(f"{shape.name}-stores", max(1, shape.stores - 1), stores),
        _budget(f"{shape.name}-head", 1, head),
    ]


def _budget(name: str, at_least: int, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": _RAYMQ},
        # A pod that is not ready serves nothing, so its eviction does no harm, and may move it to a healthy machine.
        "spec": {
            "minAvailable": at_least,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": dict(labels)},
        },
    }


def _ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": number} for number in numbers]


DOCKERFILE: Final = "Dockerfile"
KUSTOMIZATION: Final = "kustomization.yaml"
MONITORING: Final = "monitoring.yaml"
"""Name of the file with the monitoring objects. The kustomization does not include this file, because the file needs
the object types of Prometheus' operator."""


def rendered_files(shape: ClusterShape) -> dict[str, str]:
    """Return the text of each Kubernetes file, by file name. Equal cluster shapes give identical bytes."""
    applied = {
        "claims.yaml": claims(shape),
        "settings.yaml": [settings_map(shape)],
        "raymq.yaml": [ray_cluster(shape)],
        "console.yaml": [head_service(shape, "console", {"console": CONSOLE_PORT})],
        **({"gateway.yaml": [head_service(shape, "gateway", GATEWAY_PORTS)]} if shape.gateway else {}),
        "network.yaml": [network_policy(shape)],
        "disruption.yaml": disruption_budgets(shape),
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(applied),
    }
    documents = {**applied, MONITORING: [pod_monitor(shape.name), prometheus_rule(shape.name)]}
    command = _command(shape)
    return {
        **{name: _yaml(command, objects) for name, objects in documents.items()},
        KUSTOMIZATION: _yaml(command, [kustomization]),
        DOCKERFILE: (files(__package__) / DOCKERFILE).read_text(),
    }


def render(shape: ClusterShape, folder: Path) -> list[Path]:
    """Write all Kubernetes files of the cluster into `folder` and return their paths. Existing files with the same
    names are replaced.

    Creates the folder if it does not exist. Raises InvalidArgumentError if a file cannot be written. Files before the
    failed file may have been written already.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in rendered_files(shape).items():
            (folder / name).write_text(text)
            paths.append(folder / name)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write to directory {folder}: {error.strerror}; choose another directory"
        ) from None
    return paths


def _command(shape: ClusterShape) -> str:
    options = f"--stores {shape.stores} --size {shape.size}"
    default = ClusterShape()
    if shape.name != default.name:
        options += f" --name {shape.name}"
    if shape.image != default.image:
        options += f" --image {shape.image}"
    if shape.storage_class:
        options += f" --storage-class {shape.storage_class}"
    if shape.gateway:
        options += " --gateway"
    if shape.spark_pods:
        options += f" --spark-pods {shape.spark_pods}"
    return "raymq k8s render " + options + "".join(f" --zone {zone}" for zone in shape.zones)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line texts as blocks and writes no anchors, so that people can read the
    YAML."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _yaml(command: str, objects: list[dict[str, Any]]) -> str:
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
    return f"# Made by: {command}\n{text}"
