"""Requests and replies as messages (spec/messaging.md §3.10): their properties, topic and queues.

A request is a message of any topic with the properties CORRELATION_ID, REPLY_TO_CLIENT, TTL (ms) and CLUSTER. The reply
is a message of the topic `<cluster>_REPLY_TOPIC` in the request's broker group, with the same CORRELATION_ID. The
reply's tag is the id of the waiting client. This id also determines the reply's queue. So a store that reads replies
for one client skips the replies to other clients.
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
"""Number of queues of the reply topic in each broker group."""
REPLY_TYPE: Final = "reply"
_REQUEST_PROPERTIES: Final = (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, PROPERTY_TTL, PROPERTY_CLUSTER)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a request: a body of 1 byte to 4 MiB, and the keys and properties of the reply message.

    The rules for the body, keys and properties are the rules of `raymq.Message`. The constructor raises
    MessageIllegalError if a field breaks a rule.
    """

    body: bytes
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Check the values of the reply with the constructor of Message, because no other code checks a user's values.
        # `reply_message` cannot check them: it makes a SystemMessage, in which reserved properties are allowed.
        checked = Message("reply", self.body, keys=self.keys, properties=self.properties)
        for name in ("body", "keys", "properties"):
            object.__setattr__(self, name, getattr(checked, name))


def reply(body: bytes, *, keys: Sequence[str] = (), properties: Mapping[str, str] | None = None) -> Reply:
    """Create the reply that a listener returns for a request: ``return raymq.reply(b"done")``. The request counts as
    consumed.

    Raises MessageIllegalError if a message cannot have this body, these keys or these properties.
    """
    return Reply(body, keys, properties or {})


@dataclass(frozen=True, slots=True)
class RequestStatistics:
    """Counts of a client's requests since the client was created. `waiting`: requests without a reply so far.
    `answered`, `timed_out` and `failed`: finished requests; a failed request could not be sent. `late`: replies that
    were dropped because they arrived after their request had stopped waiting."""

    waiting: int
    answered: int
    timed_out: int
    failed: int
    late: int


@dataclass(frozen=True, slots=True)
class ReplyStatistics:
    """Counts of the replies of a listener or a producer since its creation. `sent`: stored replies, and replies to
    requests with ``durable=False`` that a broker has got. `gone`: stored replies to clients that no longer exist.
    `unsent`: replies that could not be stored within their request's time limit, or that no broker has got.
    `no_request`: replies that were dropped, because the message was not a request."""

    sent: int = 0
    gone: int = 0
    unsent: int = 0
    no_request: int = 0


class PendingRequest(Protocol):
    """A request of a producer that waits for the reply (raymq.client.request.pending). The object is created before the
    request is sent."""

    @property
    def message(self) -> Message:
        """The request message, which the producer sends."""

    @property
    def future(self) -> Future[MessageExt]:
        """Future that completes with the reply to the request, or with the request's error."""

    def sent(self, sending: Future[SendResult]) -> None:
        """Record the result of sending the request. If the send failed, the request fails with the same error."""

    def abandon(self) -> None:
        """Stop waiting for the reply, because the request was not sent or the program no longer needs the
        reply."""

    def result(self) -> MessageExt:
        """Wait for the reply to the request, and return the reply. Raises RequestTimeoutError if the reply does not
        arrive in time."""


class DirectRequestsInLoop(Protocol):
    """The requests with ``durable=False`` that one event loop sends (raymq.client.request.direct)."""

    async def request(self, route: TopicRoute, topic: str, message: Message, timeout_s: float) -> MessageExt:
        """Send a request, and await the reply. `topic`: the topic's stored name."""

    def close(self) -> None:
        """Close the connections of this event loop."""


class DirectRequester(Protocol):
    """The requests with ``durable=False`` of a client, which are never stored (raymq.client.request.direct)."""

    def request(self, route: TopicRoute, topic: str, message: Message, timeout_s: float) -> MessageExt:
        """Send a request, and wait for the reply. `topic`: the topic's stored name."""

    def request_later(self, route: TopicRoute, topic: str, message: Message, timeout_s: float) -> Future[MessageExt]:
        """Send a request, and return a future of the reply."""

    def in_loop(self) -> DirectRequestsInLoop:
        """Return an object that sends requests from the running event loop."""


class Requests(Protocol):
    """Protocol of a client's open requests, for the client's producers (raymq.client.request.requests)."""

    def begin(self, route: TopicRoute, message: Message, timeout_s: float) -> PendingRequest:
        """Start waiting for the reply to a message. `route`: the route of the message's topic."""

    @property
    def direct(self) -> DirectRequester:
        """The client's requests that are not stored."""

    def check_present(self, request: MessageExt) -> None:
        """Raise RequesterGoneError if the broker reports that the client that sent the request no longer
        exists."""

    def statistics(self) -> RequestStatistics:
        """Return the counts of this client's requests by outcome."""


def request_message(message: Message, correlation_id: str, client_id: str, cluster: str, ttl_ms: int) -> SystemMessage:
    """Return `message` as a request message. The added properties contain the client's id, and the time for which the
    client waits for the reply."""
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
        message.light_queues,
    )


def reply_queue(cluster: str, broker_name: str, client_id: str) -> MessageQueue:
    """Return the queue in which a broker group stores the replies to the client `client_id`."""
    return MessageQueue(reply_topic(cluster), broker_name, crc32(client_id.encode()) % REPLY_QUEUES)


def reply_message(request: MessageExt, answer: Reply) -> tuple[SystemMessage, MessageQueue]:
    """Return the reply message to a request, and the queue for the reply message. Raises CreateReplyMessageError if
    `request` is not a request."""
    asked = request.system_properties
    missing = [name for name in _REQUEST_PROPERTIES if not asked.get(name)]
    if missing:
        raise CreateReplyMessageError(
            f"message {request.message_id} of topic {request.topic!r} is not a request, because it lacks "
            f"{', '.join(missing)}: no client waits for a reply. Send requests with producer.request"
        )
    client_id = asked[PROPERTY_REPLY_TO_CLIENT]
    queue = reply_queue(asked[PROPERTY_CLUSTER], request.broker_name, client_id)
    copied = {name: asked[name] for name in (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, PROPERTY_TTL)}
    properties = {**answer.properties, **copied, PROPERTY_MESSAGE_TYPE: REPLY_TYPE}
    return SystemMessage(queue.topic, answer.body, client_id, answer.keys, properties), queue


def ttl_s(request: MessageExt) -> float:
    """Return the time in seconds for which the sender of a request waits for the reply."""
    text = request.system_properties.get(PROPERTY_TTL, "")
    return int(text) / 1000 if text.isascii() and text.isdecimal() else 0.0
