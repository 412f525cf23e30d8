"""Looks at every node of the Ray cluster: one task on each, all at once, bounded in time."""

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
from raymq.tools.doctor.collect.machine import look_at_machine
from raymq.tools.doctor.facts import LaneFacts, MachineFacts, NodeFacts
from raymq.tools.observability.ray_folder import has_board

NODES_TIMEOUT_S: Final = 45.0
"""Bounds the tasks on all nodes together; the first one on a node starts a process there."""
SERVER_TIMEOUT_S: Final = 5.0
LANE_OPEN_TIMEOUT_S: Final = 3.0
LANES_AT_ONCE: Final = 8
HEAD_NODE: Final = "node:__internal_head__"
"""The resource that only Ray's head node has."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server with a lane, and the node it runs on."""

    name: str
    node_id: str
    lane: LaneAddress


@dataclass(frozen=True, slots=True)
class NodeTask:
    """The work of the task on a node. `directories` are those of stores on any node; `data_dir` is looked at where none
    of them is."""

    directories: tuple[str, ...]
    data_dir: str
    max_used_ratio: float
    refuse_ratio: float
    servers: tuple[Server, ...]
    nodes: Mapping[str, str]
    """Node id to address."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The answer of the task on a node, with its clock in ms at the beginning and the end."""

    machine: MachineFacts
    lanes: tuple[LaneFacts, ...]
    board: bool
    started_ms: float
    ended_ms: float


def servers_with_lanes(names: Sequence[str]) -> list[Server]:
    """The brokers and stores among the actors that answer, with the addresses of their lanes."""
    found = []
    for name in names:
        if not name.startswith(("broker-", "storage-")):
            continue
        try:
            described = ActorRef(name).call("describe", timeout_s=SERVER_TIMEOUT_S)
        except RaymqError:
            continue  # `raymq status` says that it does not answer
        found.append(Server(name, described.node_id, described.lane))
    return found


def look_at_nodes(task: NodeTask) -> list[NodeFacts]:
    """The facts about each living node of the Ray cluster that this process is connected to, the head first. A node
    that gives no answer within NODES_TIMEOUT_S has an error."""
    alive = sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: HEAD_NODE not in one["Resources"])
    remote = ray.remote(num_cpus=0, max_retries=0)(look_from_node)
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
    """A node's facts, with its clock against this process's."""
    about = NodeFacts(node["NodeID"], node["NodeManagerAddress"], _is_head(node))
    try:
        answer: NodeAnswer = resolve(reference, f"the task on {about.ip}", SERVER_TIMEOUT_S)
    except (RaymqError, ray.exceptions.RayError) as error:
        return replace(about, error=str(error).splitlines()[0])
    # The task began after it was sent and ended before its answer came: the difference is between these two.
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
    """The nodes with their clocks against the head's."""
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


def look_from_node(task: NodeTask) -> NodeAnswer:
    """The task that runs on a node."""
    started_ms = _now_ms()
    here = ray.get_runtime_context().get_node_id()
    known = [Path(text) for text in task.directories if Path(text).is_dir()]
    machine = look_at_machine(known or [data_dir_here(Path(task.data_dir))], task.max_used_ratio, task.refuse_ratio)
    with ThreadPoolExecutor(LANES_AT_ONCE) as pool:
        lanes = tuple(pool.map(lambda server: _try_lane(server, here, task.nodes), task.servers))
    return NodeAnswer(machine, lanes, has_board(), started_ms, _now_ms())


def _try_lane(server: Server, here: str, nodes: Mapping[str, str]) -> LaneFacts:
    """Open a lane to a server and close it again."""
    place, is_remote = nodes.get(server.node_id, server.node_id[:8]), server.node_id != here
    if is_remote and not server.lane.port:
        return LaneFacts(server.name, place, server.lane.own_node_only, has_tcp=False)
    try:
        Lane(server.lane, remote=is_remote, timeout_s=LANE_OPEN_TIMEOUT_S).close()
    except LANE_NOT_OPENED as error:
        return LaneFacts(server.name, place, str(error) or type(error).__name__)
    return LaneFacts(server.name, place)
