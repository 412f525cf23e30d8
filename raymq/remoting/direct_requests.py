"""Direct requests: requests with ``durable=False``, which travel over lanes only and are never stored.

    requester ── DirectCall ──▶ broker ── DirectDelivery ──▶ a thread of a listener's process
              ◀── answer ─────         ◀── DirectTurn ──────

A lane is a direct socket connection to an actor. The broker passes the encoded request and the encoded answer on, and
decodes neither. A DirectTurn brings the answer to the last request of its thread, and asks for the next request. So a
request takes four messages: two of the requester, two of the listener.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import msgspec

from raymq.common.errors import InvalidArgumentError, ListenerError, ServiceNotAvailableError
from raymq.common.message import (
    PROPERTY_CORRELATION_ID,
    PROPERTY_MESSAGE_TYPE,
    PROPERTY_TTL,
    Message,
    MessageExt,
)
from raymq.common.names import reply_topic
from raymq.common.protocol.request_reply import REPLY_TYPE, Reply

TURN_WAIT_MS: Final = 10_000
"""Time in ms for which a broker holds the turn of a listener's thread that waits for a request. Then the thread asks
again. If a listener's node is lost, the broker may hand requests to the lost listener for this time."""
NO_QUEUE: Final = -1
"""The queue id and the offsets of a message that is not stored."""
ERROR_MAX: Final = 500
"""Maximum number of characters of a listener's failure that the requester gets."""


class DirectCall(msgspec.Struct, frozen=True, array_like=True):
    """A requester's call to a broker. `topic`: the stored name, with its namespace. `timeout_ms`: how long the
    requester waits. `request`: the encoded request."""

    topic: str
    tags: str | None
    timeout_ms: int
    request: bytes


class AnswerKind(IntEnum):
    """The outcomes of a listener call for a direct request: it returned a reply, returned no reply, or failed."""

    REPLY = 0
    NO_REPLY = 1
    FAILED = 2


class DirectTurn(msgspec.Struct, frozen=True, array_like=True):
    """A call of a listener's thread to a broker: the answer to the thread's last request, and the wait for its next
    request.

    `topics`: the tags that the listener wants, by topic; no tags means all messages. `instance`: the name of the
    push-consumer instance. `wait_ms`: how long to wait for a request, at most TURN_WAIT_MS; negative in the last
    turn of a thread, which takes no request. `ticket`: the ticket of the answered request; 0 if the thread has answered
    none. `answer` and `kind`: the encoded answer, and its kind for the broker's metrics.
    """

    group: str
    instance: str
    topics: Mapping[str, tuple[str, ...]]
    wait_ms: int
    ticket: int = 0
    answer: bytes = b""
    kind: AnswerKind = AnswerKind.REPLY


class DirectDelivery(msgspec.Struct, frozen=True, array_like=True):
    """A request that a broker hands to a listener's thread. `ticket`: the number that the thread's next DirectTurn
    must have."""

    ticket: int
    topic: str
    tags: str | None
    request: bytes


class _RequestParts(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a request that the broker does not read."""

    body: bytes
    keys: tuple[str, ...]
    properties: dict[str, str]
    flag: int
    born_ms: int
    born_host: str
    message_id: str
    ttl_ms: int


class _AnswerParts(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a listener: a reply, or the reason why there is no reply."""

    kind: AnswerKind
    body: bytes = b""
    keys: tuple[str, ...] = ()
    properties: dict[str, str] = {}
    born_ms: int = 0
    error: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(_RequestParts)
_answers: Final = msgspec.msgpack.Decoder(_AnswerParts)


def check_direct(message: Message, where: Mapping[str, object]) -> None:
    """Raise InvalidArgumentError if a message cannot be a direct request: it has a delay or light queues, or the caller
    chose a queue (`where`). Only stored messages have these."""
    wrong = [name for name, value in where.items() if value is not None]
    if message.delay_level or message.deliver_at_ms is not None:
        wrong.append("a delay")
    if message.light_queues:
        wrong.append("light queues")
    if wrong:
        raise InvalidArgumentError(
            f"a request with durable=False is stored in no queue, so it cannot have {', '.join(wrong)}: leave it out, "
            "or send a durable request"
        )


def new_request_id() -> str:
    """Return the unique id of a new direct request: the message id and the correlation id."""
    return uuid.uuid4().hex.upper()


def encode_request(message: Message, request_id: str, ttl_ms: int, born_host: str) -> bytes:
    """Encode a direct request for its listener."""
    born_ms = time.time_ns() // 1_000_000
    keys, properties = tuple(message.keys), dict(message.properties)
    return _encoder.encode(
        _RequestParts(message.body, keys, properties, message.flag, born_ms, born_host, request_id, ttl_ms)
    )


def decode_request(delivery: DirectDelivery, topic: str, broker_name: str) -> MessageExt:
    """Return a delivered request as the message that the listener gets. `topic`: the topic's name for the listener.
    Raises ServiceNotAvailableError if the bytes are not a request."""
    try:
        one = _requests.decode(delivery.request)
    except msgspec.DecodeError as error:
        raise ServiceNotAvailableError(f"cannot decode a request: {error}") from None
    system = {PROPERTY_CORRELATION_ID: one.message_id, PROPERTY_TTL: str(one.ttl_ms)}
    return MessageExt.decoded(
        (
            *(topic, one.body, delivery.tags, one.keys, one.properties, one.flag, broker_name),
            *(NO_QUEUE, NO_QUEUE, NO_QUEUE, one.born_ms, 0, one.born_host, "", one.message_id, one.message_id, 0, 0),
            system,
        )
    )


def encode_reply(reply: Reply) -> bytes:
    """Encode a listener's reply for the requester."""
    born_ms = time.time_ns() // 1_000_000
    keys, properties = tuple(reply.keys), dict(reply.properties)
    return _encoder.encode(_AnswerParts(AnswerKind.REPLY, reply.body, keys, properties, born_ms))


def encode_no_reply() -> bytes:
    """Encode the answer of a listener that returned no reply."""
    return _encoder.encode(_AnswerParts(AnswerKind.NO_REPLY))


def encode_failure(error: str) -> bytes:
    """Encode the failure of a listener call. Of a traceback, the requester gets the last line: the exception."""
    lines = error.strip().splitlines()
    return _encoder.encode(_AnswerParts(AnswerKind.FAILED, error=lines[-1][:ERROR_MAX] if lines else "unknown"))


def decode_answer(answer: bytes, topic: str, request_id: str, cluster: str, broker_name: str) -> MessageExt:
    """Return the reply in a listener's answer, as the message that the requester gets.

    Raises ListenerError if the listener failed or returned no reply, and ServiceNotAvailableError if the bytes are not
    an answer.
    """
    try:
        one = _answers.decode(answer)
    except msgspec.DecodeError as error:
        raise ServiceNotAvailableError(f"cannot decode the answer to a request: {error}") from None
    if one.kind is AnswerKind.FAILED:
        raise ListenerError(f"the listener of topic {topic!r} failed on request {request_id}: {one.error}")
    if one.kind is AnswerKind.NO_REPLY:
        raise ListenerError(
            f"the listener of topic {topic!r} consumed request {request_id} and returned no reply; "
            "it must return raymq.reply(...)"
        )
    system = {PROPERTY_CORRELATION_ID: request_id, PROPERTY_MESSAGE_TYPE: REPLY_TYPE}
    return MessageExt.decoded(
        (
            *(reply_topic(cluster), one.body, None, one.keys, one.properties, 0, broker_name),
            *(NO_QUEUE, NO_QUEUE, NO_QUEUE, one.born_ms, 0, "", "", request_id, request_id, 0, 0),
            system,
        )
    )
