"""The heartbeats of client processes to the brokers, and the client connections that administrators see.

A client sends its producer groups and consumers to the brokers every CLIENT_HEARTBEAT_INTERVAL_S, and at once after a
change. A broker removes a client after CLIENT_EXPIRY_S without a heartbeat (spec/messaging.md §2.8). These heartbeats
do not decide which consumer owns a queue; the Rebalance actor does (raymq.common.protocol.membership).
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
    """One consumer of a client. `subscriptions`: maps a topic to its tag expression. `member`: the consumer's member
    name in its group, or empty. `since_ms`: the consumer's start, in ms since 1970 by the client's clock (0: unknown).
    `language` and `version`: the library of a consumer that a gateway announces; empty for the client's own library.
    `consume_mode`: "queue" if the members share the group's queues, "share" if they share all messages, under leases.
    """

    group: str
    consume_type: ConsumeType
    subscriptions: Mapping[str, str] = field(default_factory=dict)
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    member: str = ""
    since_ms: int = field(default=0, compare=False)
    language: str = ""
    version: str = ""
    consume_mode: str = "queue"


@dataclass(frozen=True, slots=True)
class ClientHeartbeat:
    """All current producer groups and consumers of one client. A group or consumer that the heartbeat does not list no
    longer exists. `node`: the id of the client's Ray node. `language` and `version`: the client's library."""

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
    """A client that is a producer in a group. `silent_s`: seconds since the client's last heartbeat. The other fields
    have the same meaning as in ClientHeartbeat."""

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
    """A consumer of a group, with its client. `silent_s`: seconds since the client's last heartbeat. `language` and
    `version`: the consumer's library. The other fields have the same meaning as in ClientHeartbeat."""

    client_id: str
    host: str
    pid: int
    consumer: ConsumerData
    silent_s: float
    node: str = ""
    language: str = "PYTHON"
    version: str = ""
