"""The status of a cluster: the report of every running raymq actor about itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final

import ray

from placement.inventory import running
from placement.replica_nodes import STORE_NAME
from raymq.common.errors import AccessDeniedError, AuthenticationError, RaymqError, StoreError, StoreLockedError
from raymq.common.message import MessageQueue
from raymq.common.names import CONSOLE, CONTROLLER, GATEWAY_PREFIX
from raymq.common.protocol.status import ClusterStatus
from raymq.remoting.actor_ref import ActorRef
from raymq.tools.doctor.checks.status_checks import problems_of

STATUS_CALL_TIMEOUT_S: Final = 5.0
_KEYS: Final = {
    "broker-": "brokers",
    "storage-": "stores",
    "rebalance-": "rebalances",
    "pull-": "pulls",
    CONSOLE: "consoles",
    GATEWAY_PREFIX: "gateways",
    CONTROLLER: "replication",
}
"""Maps each kind of server to the key under which the status report lists the servers of this kind. The kind is the
first part of the actor's name."""
_REPORT_KEYS: Final = (
    *("brokers", "stores", "rebalances", "pulls", "groups", "instances", "replication", "consoles"),
    "gateways",
)
"""The keys of the status report that list servers, groups and instances, in the order in which the report has
them."""


def cluster_status() -> ClusterStatus:
    """Request the status of every server, and return the answers.

    If a server does not answer, its entry has the error, so the call also succeeds on a cluster with dead actors. If a
    storage actor cannot open its store, its entry has the error and `closed`. `problems` lists what is broken or
    damaged (raymq.tools.doctor.checks.status_checks). Actors that refuse this process's user are only in `refused`.
    Raises AuthenticationError if access control is on and this process has no user, or has a wrong secret.
    """
    names = running()
    answers = [_replication(name) if name == CONTROLLER else _ask(name) for name in names if _kind(name) in _KEYS]
    found: dict[str, list[dict[str, Any]]] = {key: [] for key in (*_KEYS.values(), "groups", "instances")}
    for answer in answers:
        name, kind = answer["actor"], _kind(answer["actor"])
        for part in ("groups", "instances") if kind in ("rebalance-", "pull-") else ():
            found[part] += [{"actor": name, "error": "", **one} for one in answer.pop(part, [])]
        if not answer.get("refused"):
            found[_KEYS[kind]].append(answer)
    refused = {answer["actor"] for answer in answers if answer.get("refused")}
    report = {
        "actors": names,
        **{key: found[key] for key in _REPORT_KEYS},
        "stopped_stores": _stopped_stores(found["stores"], _removed_stores(found["replication"])),
        "refused": [name for kind in _KEYS for name in names if _kind(name) == kind and name in refused],
    }
    problems = problems_of(ClusterStatus.of(report))
    report["problems"] = [{**asdict(one), "state": one.state.value} for one in problems]
    return ClusterStatus.of(report)


def _kind(name: str) -> str:
    """Return the kind of an actor: its name up to and including the first dash."""
    return "".join(name.partition("-")[:2])


def _removed_stores(controllers: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of the store directories whose replicas have left their broker groups (placement.membership)."""
    return {
        f"{group['broker']}-{replica}"
        for controller in controllers
        for group in controller["groups"]
        for replica in group.get("members", {}).get("removed", ())
    }


def _stopped_stores(stores: Sequence[dict[str, Any]], removed: Collection[str]) -> list[dict[str, Any]]:
    """Return the stores on disk whose storage actors do not run, each with its broker group and its directory. Stores
    in `removed` are omitted: they are not needed any more.

    Each running store reports the other stores in its data directory. So stores on a node without any running store are
    not found.
    """
    run = {str(store["actor"]).removeprefix("storage-") for store in stores}
    found = {
        str(Path(store["root"]).parent / name): name
        for store in stores
        for name in store.get("beside", ())
        if name not in run and name not in removed and STORE_NAME.fullmatch(name)
    }
    return [
        {"store": name, "broker": name.rpartition("-")[0], "directory": directory}
        for directory, name in sorted(found.items())
    ]


def _replication(name: str) -> dict[str, Any]:
    """Return the Controller's status, with the addresses of the replicas' nodes added."""
    answer = {"groups": [], **_ask(name)}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for group in answer["groups"]:
        for replica in group["replicas"]:
            replica["node"] = addresses.get(replica["node_id"])
    return answer


def _ask(name: str) -> dict[str, Any]:
    """Request the status of a server. Returns the status as plain data, with the actor's name, and the error if the
    request failed."""
    try:
        answer = dict(ActorRef(name).call("status", timeout_s=STATUS_CALL_TIMEOUT_S))
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
    """Convert a value into JSON types: queues become their names, dataclasses become mappings."""
    if isinstance(value, MessageQueue):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value
