"""Collects facts about every node of the Ray cluster, with one task per node. All tasks run at the same time, with a
common time limit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymq.common.config.cluster import data_dir_here
from raymq.common.errors import RaymqError
from raymq.remoting.actor_ref import ActorRef, resolve
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane_pool import LANE_NOT_OPENED
from raymq.tools.doctor.collect.machine import collect_machine
from raymq.tools.doctor.facts import LaneFacts, MachineFacts, NodeFacts
from raymq.tools.observability.ray_folder import has_board

NODES_TIMEOUT_S: Final = 45.0
"""Time limit in seconds for the tasks on all nodes together. It includes the time to start a worker process for the
first task on a node."""
SERVER_TIMEOUT_S: Final = 5.0
LANE_OPEN_TIMEOUT_S: Final = 3.0
LANES_AT_ONCE: Final = 8
HEAD_NODE: Final = "node:__internal_head__"
"""Name of the Ray resource that only the head node has."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server of the cluster, its node, and the address of its lane (direct socket connection)."""

    name: str
    node_id: str
    lane: LaneAddress


@dataclass(frozen=True, slots=True)
class NodeTask:
    """The arguments of the task that collects facts on a node for `raymq doctor`.

    `directories`: the store directories of all nodes. If none of these directories exists on a node, the task checks
    `data_dir` instead.
    """

    directories: tuple[str, ...]
    data_dir: str
    max_used_ratio: float
    refuse_ratio: float
    servers: tuple[Server, ...]
    nodes: Mapping[str, str]
    """The IP address of each node, by node id."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The result of the task that collects facts on a node, with the node's clock (ms) at the start and the end of the
    task."""

    machine: MachineFacts
    lanes: tuple[LaneFacts, ...]
    board: bool
    started_ms: float
    ended_ms: float


def servers_with_lanes(names: Sequence[str]) -> list[Server]:
    """Return the brokers and stores that answer, with the addresses of their lanes (direct socket connections)."""
    found = []
    for name in names:
        if not name.startswith(("broker-", "storage-")):
            continue
        try:
            described = ActorRef(name).call("describe", timeout_s=SERVER_TIMEOUT_S)
        except RaymqError:
            continue  # Skip this server: it does not answer, which `raymq status` reports.
        found.append(Server(name, described.node_id, described.lane))
    return found


def collect_nodes(task: NodeTask) -> list[NodeFacts]:
    """Collect the facts about each living node of this process's Ray cluster, the head node first.

    If a node does not answer within NODES_TIMEOUT_S, its facts contain an `error`.
    """
    alive = sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: HEAD_NODE not in one["Resources"])
    remote = ray.remote(num_cpus=0, max_retries=0)(collect_on_node)
    started: dict[Any, dict[str, Any]] = {}
    begun_ms: dict[Any, float] = {}
    for node in alive:
        pinned = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        reference = pinned.remote(task)
        started[reference], begun_ms[reference] = node, _now_ms()
    facts: dict[str, NodeFacts] = {}
    waiting, deadline_s = list(started), time.monotonic() + NODES_TIMEOUT_S
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, timeout=left_s)
        for reference in done:
            node = started[reference]
            facts[node["NodeID"]] = _facts(node, reference, begun_ms[reference], _now_ms())
    for reference in waiting:
        ray.cancel(reference, force=True)
        node = started[reference]
        error = f"no answer within {NODES_TIMEOUT_S:g} s"
        facts[node["NodeID"]] = NodeFacts(node["NodeID"], node["NodeManagerAddress"], _is_head(node), error=error)
    return _against_head([facts[node["NodeID"]] for node in alive])


def _now_ms() -> float:
    return time.time_ns() / 1e6


def _is_head(node: Mapping[str, Any]) -> bool:
    return HEAD_NODE in node["Resources"]


def _facts(node: Mapping[str, Any], reference: Any, begun_ms: float, received_ms: float) -> NodeFacts:
    """Return the facts that a node's task has collected, with the difference between the node's clock and this
    process's clock."""
    about = NodeFacts(node["NodeID"], node["NodeManagerAddress"], _is_head(node))
    try:
        answer: NodeAnswer = resolve(reference, f"the task on {about.ip}", SERVER_TIMEOUT_S)
    except RaymqError as error:
        return replace(about, error=str(error).splitlines()[0])
    # The task ran on the node after this process submitted it, and before this process received the result. So the
    # times on both clocks bound the difference between the node's clock and this clock.
    least, most = answer.ended_ms - received_ms, answer.started_ms - begun_ms
    return replace(
        about,
        machine=answer.machine,
        lanes=answer.lanes,
        board=answer.board if about.is_head else None,
        skew_ms=(least + most) / 2,
        skew_error_ms=abs(most - least) / 2,
    )


def _against_head(nodes: list[NodeFacts]) -> list[NodeFacts]:
    """Convert the clock differences of all nodes, which are relative to this process's clock, to differences from the
    head node's clock."""
    head = next((node for node in nodes if node.is_head and node.skew_ms is not None), None)
    if head is None:
        return [replace(node, skew_ms=None) for node in nodes]
    return [
        node
        if node.skew_ms is None
        else replace(node, skew_ms=0.0, skew_error_ms=0.0)
        if node is head
        else replace(
            node,
            skew_ms=node.skew_ms - (head.skew_ms or 0.0),
            skew_error_ms=node.skew_error_ms + head.skew_error_ms,
        )
        for node in nodes
    ]


def collect_on_node(task: NodeTask) -> NodeAnswer:
    """Collect the facts about the node on which this task runs."""
    started_ms = _now_ms()
    here = ray.get_runtime_context().get_node_id()
    known = [Path(text) for text in task.directories if Path(text).is_dir()]
    directories = known or [data_dir_here(Path(task.data_dir))]
    machine = collect_machine(directories, task.max_used_ratio, task.refuse_ratio, in_ray=True)
    with ThreadPoolExecutor(LANES_AT_ONCE) as pool:
        lanes = tuple(pool.map(lambda server: _try_lane(server, here, task.nodes), task.servers))
    return NodeAnswer(machine, lanes, has_board(), started_ms, _now_ms())


def _try_lane(server: Server, here: str, nodes: Mapping[str, str]) -> LaneFacts:
    """Open a lane (direct socket connection) to a server, and close it again. Returns whether this succeeded, or the
    error."""
    place, is_remote = nodes.get(server.node_id, server.node_id[:8]), server.node_id != here
    if is_remote and not server.lane.port:
        return LaneFacts(server.name, place, server.lane.own_node_only, has_tcp=False)
    try:
        Lane(server.lane, remote=is_remote, timeout_s=LANE_OPEN_TIMEOUT_S).close()
    except LANE_NOT_OPENED as error:
        return LaneFacts(server.name, place, str(error) or type(error).__name__)
    return LaneFacts(server.name, place)
