"""The operator's commands: drain a node, balance the masters, close a node's stores, install the Grafana dashboard.

The Controller executes drain and balance. The dashboard is installed on the head node, because Ray's files for Grafana
are on that node.
"""

from __future__ import annotations

import time
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.actor_class import remote_function
from placement.actor_lifecycle import CLOSE_TIMEOUT_S
from placement.inventory import head_node_id, running
from raymq.client.cluster.launcher import ProgressCallback
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.names import CONTROLLER, StorageName
from raymq.remoting.actor_ref import ActorRef, resolve
from raymq.tools.observability.ray_folder import install_board

OPERATION_CALL_TIMEOUT_S: Final = 10.0
DRAIN_WAIT_S: Final = 240.0
BALANCE_WAIT_S: Final = 20.0
POLL_S: Final = 0.3


def placed_replicas() -> tuple[dict[StorageName, str], frozenset[str]]:
    """Return the node id of each replica, and the ids of the nodes that are being drained. Both are empty if no
    Controller runs."""
    if CONTROLLER not in running():
        return {}, frozenset()
    controller = ActorRef(CONTROLLER)
    return controller.call("homes", timeout_s=OPERATION_CALL_TIMEOUT_S), controller.call(
        "draining", timeout_s=OPERATION_CALL_TIMEOUT_S
    )


def drain(node: str, *, drained: bool, progress: ProgressCallback) -> dict[str, Any]:
    """Drain a node: move its replicas to other nodes. `node`: the node's address, or the beginning of its id. With
    `drained` False, allow replicas on the node again.

    Returns when the node has no replica and its replicas are in sync on other nodes, or after DRAIN_WAIT_S. In the
    second case the result's `left` lists the remaining replicas, which the Controller continues to move. Raises
    InvalidArgumentError if `node` names no node or several nodes, or if no broker group has several replicas.
    """
    controller, node_id = _controller(), _find_node(node)
    controller.call("drain", node_id, drained, timeout_s=OPERATION_CALL_TIMEOUT_S)
    deadline_s = time.monotonic() + DRAIN_WAIT_S
    left: list[str] = []
    while drained and time.monotonic() < deadline_s:
        left = _replicas_left(controller, node_id, progress)
        if not left:
            break
        time.sleep(POLL_S)
    return {"node_id": node_id, "drained": drained, "left": left}


def close_stores_here(progress: ProgressCallback) -> list[str]:
    """Close the stores whose actors run on this process's node, before the node is removed. Returns the names of these
    actors.

    A closed store opens without recovery. Its actor stays until the node ends but answers no calls, so another replica
    becomes master. A store that does not close in time stays open, and recovers when it is opened again.
    """
    here = ray.get_runtime_context().get_node_id()
    closed = []
    for name in (name for name in running() if name.startswith("storage-")):
        actor = ActorRef(name)
        try:
            if actor.call("describe", timeout_s=OPERATION_CALL_TIMEOUT_S).node_id == here:
                progress(f"closing {name}")
                actor.call("close", timeout_s=CLOSE_TIMEOUT_S)
                closed.append(name)
        except RaymqError as error:
            progress(f"{name}: {error}")
    return closed


def order_drain(node: str, *, drained: bool) -> None:
    """Request that the Controller drains a node, without waiting until the drain ends. Raises InvalidArgumentError as
    `drain` does."""
    _controller().call("drain", _find_node(node), drained, timeout_s=OPERATION_CALL_TIMEOUT_S)


def order_balance() -> None:
    """Request that the Controller balances the masters, without waiting until the balance ends. Raises
    InvalidArgumentError as `balance` does."""
    _controller().call("balance", timeout_s=OPERATION_CALL_TIMEOUT_S)


def _replicas_left(controller: ActorRef, node_id: str, progress: ProgressCallback) -> list[str]:
    """Return the names of replicas that block the drain of the node `node_id`. These replicas still run on the node,
    have no node, or are not in sync."""
    left = []
    for group in controller.call("status", timeout_s=OPERATION_CALL_TIMEOUT_S)["groups"]:
        for replica in group["replicas"]:
            waits = "; ".join(filter(None, (replica["note"] or replica["error"], group["change"])))
            moving = replica["node_id"] is None or replica["replica"] not in group["in_sync"]
            if replica["node_id"] == node_id or moving:
                left.append(f"{group['broker']}-{replica['replica']}")
                progress(f"moving {left[-1]}" + (f": {waits}" if waits else ""))
    return left


def balance(progress: ProgressCallback) -> dict[str, Any]:
    """Make the first in-sync replica by priority the master of each broker group. No append is lost.

    Returns when these replicas lead, or after BALANCE_WAIT_S. The result has two fields. `wanted`: by broker group, the
    replica that should lead. `left`: the broker groups whose wanted replica does not lead yet.
    """
    controller = _controller()
    wanted: dict[str, int] = controller.call("balance", timeout_s=OPERATION_CALL_TIMEOUT_S)
    left, deadline_s = sorted(wanted), time.monotonic() + BALANCE_WAIT_S
    while left and time.monotonic() < deadline_s:
        progress(f"handing over {', '.join(left)}")
        time.sleep(POLL_S)
        leaders = {group: controller.call("leader", group, timeout_s=OPERATION_CALL_TIMEOUT_S) for group in wanted}
        left = sorted(group for group in wanted if leaders[group].master != wanted[group])
    return {"wanted": wanted, "left": left}


def _controller() -> ActorRef:
    if CONTROLLER not in running():
        raise InvalidArgumentError(
            "no broker group of this cluster has several replicas: see `replication` in raymq.yaml"
        )
    return ActorRef(CONTROLLER)


def _find_node(text: str) -> str:
    """Return the id of the node whose address is `text`, or whose id begins with `text`. Raises InvalidArgumentError if
    no node or several nodes match."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = [node for node in nodes if text and (node["NodeManagerAddress"] == text or node["NodeID"].startswith(text))]
    if len(found) != 1:
        listed = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})" for node in nodes)
        raise InvalidArgumentError(
            f"{text!r} must name exactly one node, but matches {len(found) or 'no'} node of {listed}"
        )
    return str(found[0]["NodeID"])


INSTALL_TIMEOUT_S: Final = 60.0


def install_on_head(output: str | None = None, timeout_s: float = INSTALL_TIMEOUT_S) -> dict[str, Any]:
    """Run a task on the head node that writes the Grafana dashboard
    (raymq.tools.observability.ray_folder.install_board). Returns the task's result.

    The task runs on the head node because only processes of the head node have the environment variables that move
    Ray's folders.
    """
    strategy = NodeAffinitySchedulingStrategy(head_node_id(), soft=False)
    installed: dict[str, Any] = resolve(
        _remote_install.options(scheduling_strategy=strategy).remote(output), "installing Grafana's board", timeout_s
    )
    return installed


def try_to_install(progress: ProgressCallback) -> None:
    """Install the Grafana dashboard as the last step of a start. A failure is reported to `progress`, and the start
    still succeeds."""
    progress("installing Grafana's board")
    try:
        install_on_head()
    except RaymqError as error:
        progress(f"the Grafana dashboard is not installed: {error}")


_remote_install = ray.remote(num_cpus=0, max_retries=0)(remote_function(install_board))
