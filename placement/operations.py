"""The operator's commands to the Controller: empty a node, and have the first replicas by priority lead again; and to
the stores of one node, to close. Installing the Grafana board on the head node, where Ray's files for Grafana are.
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
    """The replicas with the ids of their nodes, and the ids of the nodes being emptied; both empty without a
    Controller."""
    if CONTROLLER not in running():
        return {}, frozenset()
    controller = ActorRef(CONTROLLER)
    return controller.call("homes", timeout_s=OPERATION_CALL_TIMEOUT_S), controller.call(
        "draining", timeout_s=OPERATION_CALL_TIMEOUT_S
    )


def drain(node: str, *, drained: bool, progress: ProgressCallback) -> dict[str, Any]:
    """Empty a node, given by its address or the beginning of its id; with `drained` False, allow replicas there again.

    Returns when no replica is left there, and its replicas are in sync elsewhere, or after DRAIN_WAIT_S with those that
    are `left`: the Controller goes on with them. InvalidArgumentError if no node, or more than one, matches, and if no
    broker group has several replicas.
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
    """Close the stores whose actors run on this process's node, which is about to be taken away; returns their names.

    A closed store opens without recovery. Its actor stays and answers nothing, until it ends with the node: another
    replica leads meanwhile. One that does not answer in time is left as it is, and recovers when it is opened again.
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
    """As `drain`, without waiting: on return it is ordered. Raises as `drain`."""
    _controller().call("drain", _find_node(node), drained, timeout_s=OPERATION_CALL_TIMEOUT_S)


def order_balance() -> None:
    """As `balance`, without waiting: on return it is ordered. Raises as `balance`."""
    _controller().call("balance", timeout_s=OPERATION_CALL_TIMEOUT_S)


def _replicas_left(controller: ActorRef, node_id: str, progress: ProgressCallback) -> list[str]:
    """The replicas that still run on a node, or that are not in sync on their present node."""
    left = []
    for group in controller.call("status", timeout_s=OPERATION_CALL_TIMEOUT_S)["groups"]:
        for replica in group["replicas"]:
            waits = replica["note"] or replica["error"]
            moving = replica["node_id"] is None or replica["replica"] not in group["in_sync"]
            if replica["node_id"] == node_id or moving:
                left.append(f"{group['broker']}-{replica['replica']}")
                progress(f"moving {left[-1]}" + (f": {waits}" if waits else ""))
    return left


def balance(progress: ProgressCallback) -> dict[str, Any]:
    """Have the first replica by priority lead each broker group, where it is in sync; no append is lost by it.

    Returns when they lead, or after BALANCE_WAIT_S. `wanted`: by broker group, the replica that should lead; `left`:
    the groups where it does not lead yet.
    """
    controller = _controller()
    wanted: dict[str, int] = controller.call("balance", timeout_s=OPERATION_CALL_TIMEOUT_S)
    left, deadline_s = sorted(wanted), time.monotonic() + BALANCE_WAIT_S
    while left and time.monotonic() < deadline_s:
        progress(f"handing over {', '.join(left)}")
        time.sleep(POLL_S)
        left = sorted(group for group in wanted if not _leads(controller, group, wanted[group]))
    return {"wanted": wanted, "left": left}


def _leads(controller: ActorRef, group: str, replica: int) -> bool:
    return bool(controller.call("leader", group, timeout_s=OPERATION_CALL_TIMEOUT_S).master == replica)


def _controller() -> ActorRef:
    if CONTROLLER not in running():
        raise InvalidArgumentError("no broker group here has several replicas: see `replication` in raymq.yaml")
    return ActorRef(CONTROLLER)


def _find_node(text: str) -> str:
    """The id of the node with this address, or whose id begins with this text."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = [node for node in nodes if text and (node["NodeManagerAddress"] == text or node["NodeID"].startswith(text))]
    if len(found) != 1:
        listed = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})" for node in nodes)
        raise InvalidArgumentError(f"{text!r} names {len(found) or 'no'} node of {listed}")
    return str(found[0]["NodeID"])


INSTALL_TIMEOUT_S: Final = 60.0


def install_on_head(output: str | None = None, timeout_s: float = INSTALL_TIMEOUT_S) -> dict[str, Any]:
    """Have a task on the head node write the board (raymq.tools.observability.ray_folder.install_board); its result.

    A process of the head node, and not this one, has the environment variables that moved Ray's folders.
    """
    strategy = NodeAffinitySchedulingStrategy(head_node_id(), soft=False)
    installed: dict[str, Any] = resolve(
        _remote_install.options(scheduling_strategy=strategy).remote(output), "installing Grafana's board", timeout_s
    )
    return installed


def try_to_install(progress: ProgressCallback) -> None:
    """Install the board as the last step of a start, which does not fail when this does; `progress` hears of it."""
    progress("installing Grafana's board")
    try:
        install_on_head()
    except RaymqError as error:
        progress(f"Grafana's board is not installed: {error}")


_remote_install = ray.remote(num_cpus=0, max_retries=0)(remote_function(install_board))
