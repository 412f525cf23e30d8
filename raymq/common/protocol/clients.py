"""The heartbeats of client processes to the brokers, and the connections that administrators see.

A client says every CLIENT_HEARTBEAT_INTERVAL_S, and at once on a change, which producer groups and consumers it has; a
broker that has not heard of it for CLIENT_EXPIRY_S forgets it (spec/messaging.md §2.8). Only displays depend
on them: the owner of a queue is decided by the Rebalance actor (raymq.common.protocol.membership).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from raymq.common.message import ConsumeFromWhere, MessageModel

CLIENT_HEARTBEAT_INTERVAL_S: Final = 30.0
CLIENT_EXPIRY_S: Final = 120.0

ConsumeType = Literal["PUSH", "PULL", "POP"]


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """One consumer of a client. `subscriptions`: topic to tag expression. `member`: its name in its group, empty where
    it has none; `since_ms`: when it began, in ms since 1970 by the client's clock (0: not known)."""

    group: str
    consume_type: ConsumeType
    subscriptions: Mapping[str, str] = field(default_factory=dict)
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    member: str = ""
    since_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ClientHeartbeat:
    """All producer groups and consumers that one client has now: those that are not named are gone. `node`: the Ray
    node that it runs on, by its id; `language` and `version` are those of the client's library."""

    client_id: str
    host: str
    pid: int
    producers: frozenset[str] = frozenset()
    consumers: tuple[ConsumerData, ...] = ()
    node: str = ""
    language: str = "PYTHON"
    version: str = ""


@dataclass(frozen=True, slots=True, order=True)
class ProducerConnection:
    """A client that produces in a group. `silent_s`: since its last heartbeat. The rest is as in ClientHeartbeat."""

    client_id: str
    host: str
    pid: int
    group: str
    silent_s: float
    node: str = ""
    language: str = "PYTHON"
    version: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerConnection:
    """A consumer of a group, and its client. `silent_s`: since the client's last heartbeat. The rest is as in
    ClientHeartbeat."""

    client_id: str
    host: str
    pid: int
    consumer: ConsumerData
    silent_s: float
    node: str = ""
    language: str = "PYTHON"
    version: str = ""
