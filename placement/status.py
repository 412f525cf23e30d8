"""The status of a cluster: every raymq actor that runs, with its own account of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final

import ray

from placement.inventory import running
from placement.replica_nodes import STORE_NAME
from raymq.common.errors import AccessDeniedError, AuthenticationError, RaymqError, StoreError, StoreLockedError
from raymq.common.message import MessageQueue
from raymq.common.names import CONSOLE, CONTROLLER
from raymq.remoting.actor_ref import ActorRef
from raymq.tools.doctor.checks.status_checks import problems_of

STATUS_CALL_TIMEOUT_S: Final = 5.0


def cluster_status() -> dict[str, Any]:
    """Broker groups with their stores and replicas, consumer groups with their members; plain data for tables and JSON.

    An actor that does not answer appears with its error, so the call succeeds also on a cluster with dead actors. A
    storage actor that answers that it cannot open its store has its error and `closed`. `problems` are the findings
    about what is broken or damaged (raymq.tools.doctor.checks.status_checks), failures first.
    Actors that refuse the user of this process are in `refused`, and nowhere else. AuthenticationError if this process
    names no user, or a wrong secret, where access is on.
    """
    names = running()
    brokers, stores, rebalances, pulls, groups, instances, controller = [], [], [], [], [], [], []
    consoles = []
    for name in names:
        kind = name.split("-", 1)[0]
        if kind == "storage":
            stores.append(_ask(name, "status"))
        elif kind == "broker":
            brokers.append(_ask(name, "status"))
        elif kind == "rebalance":
            answer = _ask(name, "status")
            groups += [{"actor": name, "error": "", **group} for group in answer.pop("groups", [])]
            rebalances.append(answer)
        elif kind == "pull":
            answer = _ask(name, "status")
            instances += [{"actor": name, "error": "", **instance} for instance in answer.pop("instances", [])]
            pulls.append(answer)
        elif name == CONSOLE:
            consoles.append(_ask(name, "status"))
        elif name == CONTROLLER:
            controller.append(_replication(name))
    refused = []
    for entries in (brokers, stores, rebalances, pulls, consoles, controller):
        refused += [entry["actor"] for entry in entries if entry.get("refused")]
        entries[:] = [entry for entry in entries if not entry.get("refused")]
    report = {
        "actors": names,
        "brokers": brokers,
        "stores": stores,
        "rebalances": rebalances,
        "pulls": pulls,
        "groups": groups,
        "instances": instances,
        "replication": controller,
        "consoles": consoles,
        "stopped_stores": _stopped_stores(stores),
        "refused": refused,
    }
    report["problems"] = [{**asdict(one), "state": one.state.value} for one in problems_of(report)]
    return report


def _stopped_stores(stores: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stores on disk that do not run anywhere, each with the broker group and the directory that has it.

    A store's own account names the stores in its data directory, so nodes without a store that runs are not seen.
    """
    run = {str(store["actor"]).removeprefix("storage-") for store in stores}
    found = {
        str(Path(store["root"]).parent / name): name
        for store in stores
        for name in store.get("beside", ())
        if name not in run and STORE_NAME.fullmatch(name)
    }
    return [
        {"store": name, "broker": name.rpartition("-")[0], "directory": directory}
        for directory, name in sorted(found.items())
    ]


def _replication(name: str) -> dict[str, Any]:
    """The Controller's account, with the addresses of the replicas' nodes."""
    answer = {"groups": [], **_ask(name, "status")}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for group in answer["groups"]:
        for replica in group["replicas"]:
            replica["node"] = addresses.get(replica["node_id"])
    return answer


def _ask(name: str, method: str) -> dict[str, Any]:
    try:
        answer = dict(ActorRef(name).call(method, timeout_s=STATUS_CALL_TIMEOUT_S))
    except AuthenticationError:
        raise
    except AccessDeniedError as error:
        return {"actor": name, "error": str(error), "refused": True}
    except StoreError as error:
        return {"actor": name, "error": str(error), "closed": not isinstance(error, StoreLockedError)}
    except RaymqError as error:
        return {"actor": name, "error": str(error)}
    return {"actor": name, "error": "", **_plain(answer)}


def _plain(value: Any) -> Any:
    """`value` as JSON can have it: queues as their names, dataclasses as mappings."""
    if isinstance(value, MessageQueue):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value
