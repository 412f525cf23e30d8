"""The status of a cluster: every running actor of raymq, by its own answer."""

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
    CONTROLLER: "replication",
}
"""The key of the report for the servers whose name begins so."""
_REPORT_KEYS: Final = (*("brokers", "stores", "rebalances", "pulls", "groups", "instances", "replication", "consoles"),)
"""The keys in their order."""


def cluster_status() -> ClusterStatus:
    """Ask every server for its status, and return the answers.

    A server that does not answer has its error, so the call succeeds on a cluster with dead actors, too. A storage
    actor that cannot open its store has its error, and `closed`. `problems` are the findings about what is broken or
    damaged (raymq.tools.doctor.checks.status_checks). Actors that refuse the user of this process are in `refused`, and
    nowhere else. AuthenticationError if access is on and this process names no user, or a wrong secret.
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
        "stopped_stores": _stopped_stores(found["stores"]),
        "refused": [name for kind in _KEYS for name in names if _kind(name) == kind and name in refused],
    }
    problems = problems_of(ClusterStatus.of(report))
    report["problems"] = [{**asdict(one), "state": one.state.value} for one in problems]
    return ClusterStatus.of(report)


def _kind(name: str) -> str:
    """Return the first part of an actor's name, with its dash."""
    return "".join(name.partition("-")[:2])


def _stopped_stores(stores: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stores on disk that do not run, each with its broker group and its directory.

    A store's answer names the stores in its data directory. So the stores of a node without a running store are
    missing.
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
    """Return the Controller's answer, with the addresses of the replicas' nodes."""
    answer = {"groups": [], **_ask(name)}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for group in answer["groups"]:
        for replica in group["replicas"]:
            replica["node"] = addresses.get(replica["node_id"])
    return answer


def _ask(name: str) -> dict[str, Any]:
    """Return the status of a server as plain data, with its actor's name and its error."""
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
    """Return a value as JSON can have it: queues as their names, dataclasses as mappings."""
    if isinstance(value, MessageQueue):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value
