"""What runs now: every raymq actor with its node, process and own account of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from placement.launch import running
from raymq.errors import RaymqError
from raymq.message import MessageQueue
from raymq.ray_calls import ActorRef

CALL_TIMEOUT_S: Final = 5.0


def cluster_status() -> dict[str, Any]:
    """Broker groups with their stores, consumer groups with their members; plain data for tables and JSON.

    An actor that does not answer appears with its error, so the call succeeds on a cluster that is half dead.
    """
    names = running()
    brokers, stores, groups, instances = [], [], [], []
    for name in names:
        kind = name.split("-", 1)[0]
        if kind == "storage":
            stores.append(_ask(name, "status"))
        elif kind == "broker":
            brokers.append(_ask(name, "status"))
        elif kind == "rebalance":
            groups.append(_ask(name, "status"))
        elif kind == "pull":
            instances.append(_ask(name, "status"))
    return {"actors": names, "brokers": brokers, "stores": stores, "groups": groups, "instances": instances}


def _ask(name: str, method: str) -> dict[str, Any]:
    try:
        answer = dict(ActorRef(name).call(method, timeout_s=CALL_TIMEOUT_S))
    except RaymqError as error:
        return {"actor": name, "error": str(error)}
    return {"actor": name, "error": "", **_plain(answer)}


def _plain(value: Any) -> Any:
    """`value` as JSON can say it: queues by their names, records as mappings."""
    if isinstance(value, MessageQueue):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value
