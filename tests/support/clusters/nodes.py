"""Runs a Ray cluster of several raylets on this computer, in a sandbox. Each raylet has its own data directory.

All processes listen on loopback, with a token. Ray's health checks declare a killed raylet dead within about two
seconds. The first node is the head and belongs to the test's process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._raylet import Config
from ray.cluster_utils import Cluster

from raymq.client.cluster.embedded import STARTING_MAX, _process_token
from raymq.common.config.cluster import DATA_DIR_VARIABLE
from raymq.common.names import NAMESPACE
from tests.support.clusters.cluster import HEALTH_CHECKS, Sandbox

OBJECT_STORE_BYTES = 100 << 20
LOOPBACK = "127.0.0.1"
SYSTEM_CONFIG = {
    **HEALTH_CHECKS,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_maximum_startup_concurrency": STARTING_MAX,
}


class Nodes:
    """The nodes of a test's Ray cluster. A node has the same name as its data directory, a subdirectory of the
    sandbox's data directory."""

    def __init__(self, cluster: Cluster, box: Sandbox) -> None:
        self._cluster, self._box = cluster, box
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """Address that a program passes to Ray to connect to the test's cluster."""
        return str(self._cluster.address)

    def data(self, name: str) -> Path:
        return self._box.data / name

    def runs(self, name: str) -> bool:
        """Return whether the node was started and has not been killed."""
        return name in self._nodes

    def node_id(self, name: str) -> str:
        return str(self._nodes[name].node_id)

    def name_of(self, node_id: str | None) -> str:
        """Return the name of the node with this Ray node id; empty if no such node exists."""
        return next((name for name, node in self._nodes.items() if node.node_id == node_id), "")

    def add(self, name: str, **options: Any) -> None:
        """Start a node. If a node of this name was killed, the new node uses the old node's data and gets a new Ray id.

        `options`: Ray's options, such as `labels`, and the options that a head node needs.
        """
        self._nodes[name] = self._cluster.add_node(
            node_ip_address=LOOPBACK,
            num_cpus=2,
            object_store_memory=OBJECT_STORE_BYTES,
            env_vars={DATA_DIR_VARIABLE: str(self.data(name))},
            **options,
        )

    def kill(self, name: str) -> None:
        """SIGKILL the raylet of a node and all its workers."""
        node = self._nodes.pop(name)
        _kill(_family(node))
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_all(self) -> None:
        """SIGKILL every process of the cluster, including the processes of the head, and disconnect this process from
        Ray. Nothing restarts the killed processes."""
        processes = [process for node in self._nodes.values() for process in _family(node)]
        self._nodes.clear()
        _kill(processes)
        ray.shutdown()


def _family(node: Any) -> list[psutil.Process]:
    """Return the processes of a node, and all descendants of these processes."""
    started = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
    return [one for process in started for one in (process, *process.children(recursive=True))]


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue  # the process already ended, together with the raylet of its node


@contextmanager
def nodes(box: Sandbox, names: tuple[str, ...]) -> Iterator[Nodes]:
    """Start one node per name, with the first name as head. Connects this process to the cluster and yields the
    nodes."""
    directory = box.tmp / "ray"
    directory.mkdir(exist_ok=True)
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(_process_token())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # without this variable Ray listens on all interfaces
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(sys.modules["ray._private.ray_constants"], "ENABLE_RAY_CLUSTER", False)
        # make Ray read its settings from the environment again, because Ray otherwise reads them only at import
        Config.initialize("")
        cluster = Cluster()
        made = Nodes(cluster, box)
        try:
            made.add(names[0], temp_dir=str(directory), include_dashboard=False, _system_config=SYSTEM_CONFIG)
            for name in names[1:]:
                made.add(name)
            ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            yield made
        finally:
            ray.shutdown()
            cluster.shutdown()
