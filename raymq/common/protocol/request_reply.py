"""Requests and replies as messages (spec/messaging.md §3.10): their properties, their topic, their queues.

A request is a message of any topic with CORRELATION_ID, REPLY_TO_CLIENT, TTL (ms) and CLUSTER. Its reply is a message
of the topic `<cluster>_REPLY_TOPIC` in the broker group that the request came from, with the same CORRELATION_ID. Its
tag is the id of the client that waits for it, which chooses the queue, too: so the store skips the replies to others
where it reads for that client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol
from zlib import crc32

from raymq.common.errors import CreateReplyMessageError
from raymq.common.message import (
    PROPERTY_CLUSTER,
    PROPERTY_CORRELATION_ID,
    PROPERTY_MESSAGE_TYPE,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
    Message,
    MessageExt,
    MessageQueue,
    SendResult,
    SystemMessage,
)
from raymq.common.names import reply_topic
from raymq.common.protocol.route import TopicRoute

REPLY_QUEUES: Final = 8
"""The queues of the reply topic in each broker group."""
REPLY_TYPE: Final = "reply"
_REQUEST_PROPERTIES: Final = (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, PROPERTY_TTL, PROPERTY_CLUSTER)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request: the body, 1 byte to 4 MiB, and the keys and properties of the reply's message."""

    body: bytes
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)


def reply(body: bytes, *, keys: Sequence[str] = (), properties: Mapping[str, str] | None = None) -> Reply:
    """The answer of a listener to a request: ``return raymq.reply(b"done")``. The message counts as consumed.

    MessageIllegalError, for what a message cannot have.
    """
    made = Reply(body, keys, dict(properties or {}))
    Message("reply", made.body, keys=made.keys, properties=made.properties)  # refused here, where it was made
    return made


@dataclass(frozen=True, slots=True)
class RequestStatistics:
    """The requests of a client since it was made. `waiting`: without a reply so far; `answered`, `timed_out` and
    `failed`: ended so, the last because the request could not be sent; `late`: replies that came when nobody waited
    for them any more, which were dropped."""

    waiting: int
    answered: int
    timed_out: int
    failed: int
    late: int


@dataclass(frozen=True, slots=True)
class ReplyStatistics:
    """The replies of a listener or a producer since it was made. `sent`: stored; `gone`: of these, to clients that are
    gone; `unsent`: could not be stored before their request's time was up; `no_request`: answers to messages that were
    no requests, which were dropped."""

    sent: int = 0
    gone: int = 0
    unsent: int = 0
    no_request: int = 0


class PendingRequest(Protocol):
    """A request that is sent or about to be, as a producer knows it (raymq.client.request.pending)."""

    @property
    def message(self) -> Message:
        """The message to send."""

    @property
    def future(self) -> Future[MessageExt]:
        """Ends with the reply, or its error."""

    def sent(self, sending: Future[SendResult]) -> None:
        """Note the end of the send; if it failed, the request ends with its error."""

    def abandon(self) -> None:
        """Wait for no reply any more: the request was not sent, or nobody asks for the reply."""

    def result(self) -> MessageExt:
        """Wait for the reply; RequestTimeoutError."""


class Requests(Protocol):
    """The requests of a client, as its producers know them (raymq.client.request.requests)."""

    def begin(self, route: TopicRoute, message: Message, timeout_s: float) -> PendingRequest:
        """Wait for the reply to a message from now on. `route`: of its topic."""

    def check_present(self, request: MessageExt) -> None:
        """RequesterGoneError if the broker knows that the sender of a request is gone."""

    def statistics(self) -> RequestStatistics:
        """The requests so far, by how they ended."""


def request_message(message: Message, correlation_id: str, client_id: str, cluster: str, ttl_ms: int) -> SystemMessage:
    """`message` as a request of the client."""
    asked = {
        PROPERTY_CORRELATION_ID: correlation_id,
        PROPERTY_REPLY_TO_CLIENT: client_id,
        PROPERTY_TTL: str(ttl_ms),
        PROPERTY_CLUSTER: cluster,
    }
    return SystemMessage(
        message.topic,
        message.body,
        message.tags,
        message.keys,
        {**message.properties, **asked},
        message.flag,
        message.delay_level,
        message.deliver_at_ms,
        message.wait_store_msg_ok,
    )


def reply_queue(cluster: str, broker_name: str, client_id: str) -> MessageQueue:
    """The queue in which a broker group stores the replies to a client."""
    return MessageQueue(reply_topic(cluster), broker_name, crc32(client_id.encode()) % REPLY_QUEUES)


def is_request(message: MessageExt) -> bool:
    """True if a reply to the message can be made."""
    return all(message.system_properties.get(name) for name in _REQUEST_PROPERTIES)


def reply_message(request: MessageExt, answer: Reply) -> tuple[SystemMessage, MessageQueue]:
    """The message that answers a request, and its queue. CreateReplyMessageError for a message that is no request."""
    asked = request.system_properties
    missing = [name for name in _REQUEST_PROPERTIES if not asked.get(name)]
    if missing:
        raise CreateReplyMessageError(
            f"message {request.message_id} of topic {request.topic!r} is no request: it has no "
            f"{', no '.join(missing)}; nobody waits for a reply, send it with producer.request"
        )
    client_id = asked[PROPERTY_REPLY_TO_CLIENT]
    queue = reply_queue(asked[PROPERTY_CLUSTER], request.broker_name, client_id)
    copied = {name: asked[name] for name in (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, PROPERTY_TTL)}
    properties = {**answer.properties, **copied, PROPERTY_MESSAGE_TYPE: REPLY_TYPE}
    return SystemMessage(queue.topic, answer.body, client_id, answer.keys, properties), queue


def ttl_s(request: MessageExt) -> float:
    """How long the sender of a request waits for the reply, in s."""
    text = request.system_properties.get(PROPERTY_TTL, "")
    return int(text) / 1000 if text.isascii() and text.isdecimal() else 0.0
