"""The files of a raymq in Kubernetes: YAML for `kubectl apply --kustomize`, and the Dockerfile of the image."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from raymq.common.errors import InvalidArgumentError
from raymq.tools.kubernetes.around import claims, console_service, network_policy, settings_map
from raymq.tools.kubernetes.cluster_shape import ClusterShape
from raymq.tools.kubernetes.ray_cluster import ray_cluster
from raymq.tools.observability.kubernetes_objects import pod_monitor, prometheus_rule

DOCKERFILE: Final = "Dockerfile"
KUSTOMIZATION: Final = "kustomization.yaml"
MONITORING: Final = "monitoring.yaml"
"""Left out of the kustomization: it needs the objects of Prometheus' operator."""


def rendered_files(shape: ClusterShape) -> dict[str, str]:
    """The text of each file, by its name. The same shape always gives the same bytes."""
    applied = {
        "claims.yaml": claims(shape),
        "settings.yaml": [settings_map(shape)],
        "raymq.yaml": [ray_cluster(shape)],
        "console.yaml": [console_service(shape)],
        "network.yaml": [network_policy(shape)],
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
    """Write the files, and replace older ones of the same names; returns their paths.

    Makes the folder if it is missing. InvalidArgumentError when something cannot be written; some may be there then.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in rendered_files(shape).items():
            (folder / name).write_text(text)
            paths.append(folder / name)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {folder}: {error.strerror}; name another folder") from None
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
    return "raymq k8s render " + options + "".join(f" --zone {zone}" for zone in shape.zones)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no anchors: Kubernetes' tools and people read them more easily."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(command: str, objects: list[dict[str, Any]]) -> str:
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
    return f"# Made by: {command}\n{text}"
