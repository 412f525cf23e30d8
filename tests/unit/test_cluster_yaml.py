"""Tests of the file cluster.yaml that raymq ships. They need no machines: Ray accepts the file, and the file copies
everything that the nodes need."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from raymq.common.config.cluster import ClusterSettings

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "cluster.yaml").read_text()


@pytest.fixture
def shipped() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(TEXT)
    return config


@pytest.fixture
def in_a_cloud(shipped: dict[str, Any]) -> dict[str, Any]:
    """Return cluster.yaml, changed to its variant for a cloud. A comment at the end of the file contains the
    variant."""
    _, _, variant = TEXT.partition("#\n# provider:")
    lines = ["provider:", *(line.removeprefix("# ") for line in variant.splitlines()[1:])]
    return shipped | yaml.safe_load("\n".join(lines))


def test_ray_takes_it(shipped: dict[str, Any]) -> None:
    config = prepare_config(shipped)
    validate_config(config)
    workers = config["available_node_types"]["local.cluster.node"]
    assert (workers["min_workers"], workers["max_workers"]) == (2, 2)


def test_ray_takes_the_cloud_variant(in_a_cloud: dict[str, Any]) -> None:
    assert in_a_cloud["provider"]["type"] == "aws"
    config = prepare_config(in_a_cloud)
    validate_config(config)
    assert config["available_node_types"]["worker"]["min_workers"] == config["max_workers"]


def test_every_package_and_the_token_are_carried_to_the_nodes(shipped: dict[str, Any]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    mounts = shipped["file_mounts"]
    # The package `examples` is not copied, because the examples run on the user's machine, not on the nodes.
    packages = set(project["tool"]["mypy"]["packages"]) - {"examples"}
    assert packages == {path for path in mounts.values() if (REPOSITORY / path).is_dir()}
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "setup.py"}
    files.add("requirements.lock")
    assert set(mounts.values()) - packages == {*files, "~/.ray/auth_token"}
    assert all(remote == f"~/raymq/{local}" for remote, local in mounts.items() if not local.startswith("~"))


def test_the_settings_it_writes_are_raymqs_and_fit_the_nodes(shipped: dict[str, Any]) -> None:
    [command] = shipped["head_setup_commands"]
    settings = ClusterSettings(**yaml.safe_load("\n".join(command.splitlines()[1:-1])))
    nodes = 1 + len(shipped["provider"]["worker_ips"])
    assert settings.replication.replicas <= nodes
    assert shipped["head_start_ray_commands"][-1].endswith(f"--wait-nodes {nodes}")
