"""Reserves resources for Spark's executors near the storage actors, and checks the executors' nodes before a session
starts.

The resources are a placement group with one bundle per executor. A preferred bundle may be on any node that has the
master replica of a broker group. Ray spreads the preferred bundles over these nodes, and moves a bundle to another of
them if its node is lost. Executors that do not fit on these nodes get bundles that may be on any node.

A node needs a Java for Spark and a Python that can read a topic. Without the check, Spark would wait for executors
forever, or fail in the middle of the first job.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymq.client.client import connect
from raymq.client.cluster.java import needed_java
from raymq.common.errors import ClientStateError, InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.route import MASTER_ID

NODE_ID_LABEL: Final = "ray.io/node-id"
"""Name of the label that Ray gives every node, with the node's id as value."""
EXECUTOR_RESOURCE_PREFIX: Final = "spark.ray.raydp_spark_executor.actor.resource."
"""Prefix of the Spark settings with which RayDP requests additional Ray resources for an executor. The setting that
ends with `cpu` replaces the executor's number of cores."""
MEMORY_MIN_MIB: Final = 450
"""Minimum heap size, in MiB, of a Spark executor. Spark does not start with a smaller heap."""

_UNITS_MIB: Final = {"": 1.0, "b": 2.0**-20, "k": 2.0**-10, "m": 1.0, "g": 2.0**10, "t": 2.0**20, "p": 2.0**30}
_SETTLE_S: Final = 2.0
_SAY_AFTER_S: Final = 5.0
_POLL_S: Final = 0.05
_NODES_NAMED: Final = 4

Resources = Mapping[str, float]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorSize:
    """The resources of one executor: CPUs, bytes of memory (the heap), and other Ray resources by name."""

    cpus: float
    memory_bytes: int
    others: tuple[tuple[str, float], ...] = ()

    @property
    def bundle(self) -> dict[str, float]:
        """The executor's resources as a bundle of a Ray placement group."""
        wanted = {"CPU": self.cpus, "memory": float(self.memory_bytes), **dict(self.others)}
        return {name: amount for name, amount in wanted.items() if amount}

    def fits(self, resources: Resources) -> int:
        """Return the number of executors of this size that fit on a node. `resources`: the node's resources, as amounts
        by name."""
        return int(min(resources.get(name, 0.0) // amount for name, amount in self.bundle.items()))

    def __str__(self) -> str:
        others = "".join(f", {amount:g} {name}" for name, amount in self.others)
        return f"{self.cpus:g} CPU(s), {self.memory_bytes / 2**20:,.0f} MiB{others}"


def executor_size(cores: int, memory_mib: int, configs: Mapping[str, str]) -> ExecutorSize:
    """Return the resources that RayDP requests from Ray for one executor with the given cores, heap and Spark
    settings."""
    others = {
        key.removeprefix(EXECUTOR_RESOURCE_PREFIX): float(value)
        for key, value in configs.items()
        if key.startswith(EXECUTOR_RESOURCE_PREFIX)
    }
    cpus = [others.pop(name) for name in [*others] if name.lower() == "cpu"]
    return ExecutorSize(cpus[0] if cpus else float(cores), memory_mib << 20, tuple(sorted(others.items())))


def memory_mib(text: str) -> int:
    """Parse a heap size in Spark's notation, ``"512m"`` or ``"2g"``, into MiB. A number without a unit is in MiB.

    Raises InvalidArgumentError if the text is not a size, or if the size is below Spark's minimum.
    """
    found = re.fullmatch(r"\s*(\d+)\s*([bkmgtp]?)b?\s*", text.lower())
    if found is None:
        raise InvalidArgumentError(f'executor_memory={text!r} is not a size; write it as Spark does: "512m", "2g"')
    size = int(int(found[1]) * _UNITS_MIB[found[2]])
    if size < MEMORY_MIN_MIB:
        raise InvalidArgumentError(
            f"executor_memory={text!r} is {size} MiB, but Spark needs at least {MEMORY_MIN_MIB} MiB; request "
            f'"{MEMORY_MIN_MIB}m" or more'
        )
    return size


def check_fits(count: int, size: ExecutorSize) -> None:
    """Raise InvalidArgumentError if the cluster is too small for the executors. The check ignores resources that other
    programs use: it counts them as free."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(size.fits(resources) for resources in nodes)
    if room < count:
        raise InvalidArgumentError(
            f"{count} executor(s) with {size} each do not fit into this Ray cluster, which has room for {room} "
            f"({_described(nodes)}); Spark would wait for ever. Request fewer or smaller executors, or add nodes"
        )


def storage_nodes() -> frozenset[str]:
    """Return the ids of the Ray nodes that hold a master replica of a broker group; empty if the cluster's route
    contains no node ids.

    Raises ClusterNotFoundError if no raymq runs in this Ray cluster.
    """
    with connect() as client:
        brokers = client.admin.brokers().values()
    return frozenset(node for broker in brokers if (node := broker.nodes.get(MASTER_ID, "")))


@contextmanager
def reserved(count: int, size: ExecutorSize, wanted: frozenset[str], timeout_s: float) -> Iterator[PlacementGroup]:
    """Reserve a placement group with one bundle per executor for the duration of a `with` block. `wanted`: ids of
    preferred nodes.

    Executors that do not fit on the preferred nodes get other nodes, with a warning in the log. Raises
    ServiceNotAvailableError if the cluster has no free resources within `timeout_s`. All resources are released at the
    end of the block.
    """
    near = _room_near(count, size, wanted)
    selector = {NODE_ID_LABEL: f"in({','.join(sorted(wanted))})"}
    group = placement_group(
        [size.bundle] * count,
        strategy="SPREAD",
        bundle_label_selector=[selector if index < near else {} for index in range(count)],
    )
    try:
        _await_ready(group, count, size, timeout_s)
        yield group
    finally:
        _remove(group)


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the ids of the nodes that hold a placement group's bundles, without duplicates."""
    return sorted(set(placement_group_table(group)["bundles_to_node_id"].values()))


def _room_near(count: int, size: ExecutorSize, wanted: frozenset[str]) -> int:
    """Return the number of executors that fit on the preferred nodes `wanted`, at most `count`. Logs a warning if fewer
    than `count` fit."""
    if not wanted:
        return 0
    deadline_s = time.monotonic() + _SETTLE_S
    while True:  # Check the free resources repeatedly, because an earlier session may still be releasing its resources.
        free = available_resources_per_node()
        room = sum(size.fits(free.get(node, {})) for node in wanted)
        if room >= count:
            return count
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    logger.warning(
        "%d of %d executors run on nodes without a storage actor and read over the network: the %d node(s) with "
        "a storage actor have room for %d executor(s) with %s (free: %s)",
        *(count - room, count, len(wanted), room, size),
        _described([free.get(node, {}) for node in sorted(wanted)]),
    )
    return room


def _await_ready(group: PlacementGroup, count: int, size: ExecutorSize, timeout_s: float) -> None:
    if group.wait(min(_SAY_AFTER_S, timeout_s)):
        return
    if timeout_s > _SAY_AFTER_S:
        logger.warning("waiting for room for %d executor(s) with %s each, for up to %.0f s", count, size, timeout_s)
        if group.wait(timeout_s - _SAY_AFTER_S):
            return
    free = available_resources_per_node()
    raise ServiceNotAvailableError(
        f"no room for {count} executor(s) with {size} each within {timeout_s:g} s: other programs use the "
        f"cluster; free are {_described(list(free.values()))}. Wait until the other programs end, or request "
        "fewer or smaller executors"
    )


def _remove(group: PlacementGroup) -> None:
    """Remove a placement group and wait until its resources are free. Does nothing if the process is not connected to
    Ray."""
    if not ray.is_initialized():
        return
    remove_placement_group(group)
    deadline_s = time.monotonic() + _SETTLE_S
    while placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _described(nodes: list[Resources]) -> str:
    """Return the CPUs and the memory of nodes as text for an error message."""
    told = [
        f"{node.get('CPU', 0):g} CPU(s) and {node.get('memory', 0) / 2**20:,.0f} MiB" for node in nodes[:_NODES_NAMED]
    ]
    more = f", and {len(nodes) - _NODES_NAMED} more nodes" if len(nodes) > _NODES_NAMED else ""
    return "; ".join(told) + more if told else "nothing"


PACKAGES: Final = ("raymq", "raydp_jobs", "pyspark", "pyarrow", "ray")
"""The modules that a Python worker of Spark imports."""
_SAME_VERSIONS: Final = ("pyspark", "raydp")
_PROBE_TIMEOUT_S: Final = 60.0


def node_needs(python: str, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return what a node needs for the installed Spark, as plain values for the check on the node. `python`: the
    program of Spark's Python workers. `packages`: the modules that this program must find."""
    java = needed_java()
    return {
        "python": python,
        "packages": list(packages),
        "versions": {name: version(name) for name in _SAME_VERSIONS},
        "java": list(java.accepted),
        "module": java.module,
        "need": f"Spark {java.spark} needs {java}",
    }


def check_nodes(node_ids: Collection[str], python: str, directory: str) -> None:
    """Check that each of these nodes has a Java on which Spark runs, and this process's versions of Spark and RayDP.
    Check that `python` on the node can import the modules that Spark's workers need.

    Creates `directory` on each node, for temporary files. Raises ClientStateError if a node fails the check, and
    ServiceNotAvailableError if a node does not answer within a minute.
    """
    probe = ray.remote(num_cpus=0, max_retries=0)(_probe_by_value())
    needs = node_needs(python)
    asked = {
        node_id: probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            needs, directory
        )
        for node_id in node_ids
    }
    problems = []
    for node_id, answer in asked.items():
        try:
            problems += [f"node {node_id[:8]}: {problem}" for problem in ray.get(answer, timeout=_PROBE_TIMEOUT_S)]
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ServiceNotAvailableError(
                f"node {node_id[:8]} does not answer, so Spark cannot start on this node ({reason}); see `raymq status`"
            ) from error
    if problems:
        raise ClientStateError("; ".join(problems))


def _probe_by_value() -> Callable[..., Any]:
    """Return the function that checks a node. The function is pickled by value, because raymq may not be installed on
    the node."""

    def probe(needs: dict[str, Any], directory: str) -> list[str]:
        import os
        import re
        import shutil
        import subprocess
        import sys
        from importlib.metadata import PackageNotFoundError, version

        def told(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30, check=False
            )

        def version_of(package: str) -> str:
            try:
                return version(package)
            except PackageNotFoundError:
                return "none"

        advice = (
            "start Ray on the node with `raymq up`, or put a Java 17 on the PATH of `ray start` "
            "(apt install openjdk-17-jre-headless)"
        )
        os.makedirs(directory, exist_ok=True)
        problems = []
        java = shutil.which("java")
        if java is None:
            problems.append(f"Ray's PATH on this node has no Java, but {needs['need']}; {advice}")
        else:
            found = re.search(r'version "((?:1\.)?(\d+)[^"]*)', told(java, "-version").stdout)
            number = f"Java {found[1]}" if found else "an unknown Java"
            if found is None or int(found[2]) not in needs["java"]:
                problems.append(f"Ray's PATH on this node has {number} in {java}, but {needs['need']}; {advice}")
            elif needs["module"] and told(java, f"--add-modules={needs['module']}", "-version").returncode != 0:
                problems.append(f"{number} in {java} lacks a module, and {needs['need']}; {advice}")
        here = {name: version_of(name) for name in needs["versions"]}
        if here != needs["versions"]:
            shown, wanted = (
                " and ".join(f"{name} {one}" for name, one in versions.items())
                for versions in (here, needs["versions"])
            )
            problems.append(
                f"Ray's Python {sys.executable} on this node has {shown}, but this program has {wanted}; install the "
                "same versions, and start Ray again"
            )
        python = needs["python"]
        if shutil.which(python) is None:
            problems.append(
                f"the node has no Python at {python}; install the same Python on the node, or set PYSPARK_PYTHON "
                "to an existing Python"
            )
        else:
            code = "import sys,importlib.util as u;print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
            missing = told(python, "-c", code, *needs["packages"]).stdout.split()
            if missing:
                problems.append(
                    f"{python} cannot import {', '.join(missing)}; run pip install 'raymq[spark]' on the node"
                )
        return problems

    return probe
