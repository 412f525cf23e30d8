"""Converts the JSON of requests to requests of RocketMQ's protocol. Pure.

The service checks all values again, by the rules of gRPC clients. This module only refuses JSON that has no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import duration, timestamp
from raymq.gateway.http.shapes import AckRequest, ChangeRequest, LeaseRequest, NewMessage
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, FilterType
from raymq.gateway.wire.parsing import SEND_MESSAGES_MAX, RequestTooLargeError

QUERY_LISTS: Final = {"key": "keys", "property": "properties"}
"""Parameters of a raw send that may occur several times, and the fields of a message that they fill."""
QUERY_TEXTS: Final = ("tag", "sharding_key", "message_id", "delay_s", "deliver_at_ms", "priority")
"""Parameters of a raw send that occur once. Each has the name of a message's field."""

_TOKENS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
"""The strings and the brackets of JSON."""


def parsed(body: bytes, kind: Any) -> Any:
    """Return the JSON in `body` as an object of type `kind`. Raises CallRefusedError if it is no such object."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CallRefusedError(Code.BAD_REQUEST, f"the body is not the JSON that this path takes: {error}") from None


def new_messages(body: bytes) -> list[NewMessage]:
    """Return the messages in the JSON of a send: an object is one message, an array has several.

    Raises CallRefusedError if the body is malformed, and RequestTooLargeError if it has too many messages.
    """
    _check_count(body)
    found: NewMessage | list[NewMessage] = parsed(body, NewMessage | list[NewMessage])
    return [found] if isinstance(found, NewMessage) else found


def _check_count(body: bytes) -> None:
    """Raise RequestTooLargeError if JSON is an array of more than SEND_MESSAGES_MAX objects. An object can have two
    bytes, and a message takes hundreds of bytes in memory, so the objects are counted before they are parsed."""
    if body.count(b"{") <= SEND_MESSAGES_MAX:
        return
    depth = count = 0
    for token in _TOKENS.finditer(body):
        sign = token[0]
        if sign in (b"{", b"["):
            count += depth == 1
            depth += 1
        elif sign in (b"}", b"]"):
            depth -= 1
        if count > SEND_MESSAGES_MAX:
            raise RequestTooLargeError(f"the request has more than {SEND_MESSAGES_MAX} messages: send fewer")


def raw_message(body: bytes, query: Sequence[tuple[str, str]]) -> NewMessage:
    """Return the message of a raw send: the whole body, and the fields in the query string.

    Raises CallRefusedError if a parameter is unknown, malformed, or given twice.
    """
    fields: dict[str, Any] = {}
    for name, text in query:
        if name == "raw":
            continue
        if name == "key":
            fields.setdefault("keys", []).append(text)
        elif name == "property":
            key, colon, value = text.partition(":")
            if not colon:
                raise CallRefusedError(Code.BAD_REQUEST, f"the parameter property={text!r:.100} is not NAME:VALUE")
            fields.setdefault("properties", {})[key] = value
        elif name not in QUERY_TEXTS:
            raise CallRefusedError(Code.BAD_REQUEST, f"the parameter {name!r:.100} is unknown")
        elif name in fields:
            raise CallRefusedError(Code.BAD_REQUEST, f"the parameter {name!r} is given twice")
        else:
            fields[name] = text
    try:
        message = msgspec.convert(fields, NewMessage, strict=False)
    except msgspec.ValidationError as error:
        raise CallRefusedError(Code.BAD_REQUEST, f"a parameter is not legal: {error}") from None
    message.body_base64 = body
    return message


def deliver_at(delay_s: float | None, deliver_at_ms: int | None, now_ms: int) -> int | None:
    """Return the delivery time in ms since 1970; None for no delay. Raises CallRefusedError if both values are
    given."""
    if delay_s is None:
        return deliver_at_ms
    if deliver_at_ms is not None:
        raise CallRefusedError(Code.BAD_REQUEST, "delay_s and deliver_at_ms exclude each other: give one of them")
    return now_ms + round(delay_s * 1000)


def send_request(
    topic: str, messages: Sequence[NewMessage], now_ms: int, new_ids: Iterator[str]
) -> wire.SendMessageRequest:
    """Return the request that sends messages to a topic. `new_ids`: the ids of the messages without one."""
    return wire.SendMessageRequest(messages=[_message(topic, one, now_ms, new_ids) for one in messages])


def _message(topic: str, one: NewMessage, now_ms: int, new_ids: Iterator[str]) -> wire.Message:
    if one.body is not None and one.body_base64 is not None:
        raise CallRefusedError(Code.BAD_REQUEST, "body and body_base64 exclude each other: give one of them")
    at_ms = deliver_at(one.delay_s, one.deliver_at_ms, now_ms)
    system = wire.SystemProperties(
        message_id=next(new_ids) if one.message_id is None else one.message_id,
        tag=one.tag,
        keys=one.keys,
        message_group=one.sharding_key,
        delivery_timestamp=None if at_ms is None else timestamp(at_ms),
        priority=one.priority,
    )
    body = one.body.encode() if one.body is not None else one.body_base64 or b""
    return wire.Message(
        topic=wire.Resource(name=topic), body=body, user_properties=one.properties, system_properties=system
    )


def receive_request(group: str, asked: LeaseRequest) -> wire.ReceiveMessageRequest:
    """Return the request that receives messages."""
    if asked.sql and asked.tags != "*":
        raise CallRefusedError(Code.BAD_REQUEST, "tags and sql exclude each other: give one of them")
    wanted = wire.FilterExpression(
        type=FilterType.SQL if asked.sql else FilterType.TAG, expression=asked.sql or asked.tags
    )
    return wire.ReceiveMessageRequest(
        group=wire.Resource(name=group),
        message_queue=wire.MessageQueue(topic=wire.Resource(name=asked.topic)),
        filter_expression=wanted,
        batch_size=asked.max_messages,
        invisible_duration=duration(round(asked.invisible_s * 1000)),
        long_polling_timeout=duration(round(asked.wait_s * 1000)),
    )


def ack_request(group: str, asked: AckRequest) -> wire.AckMessageRequest:
    """Return the request that acknowledges messages."""
    entries = [wire.AckMessageEntry(receipt_handle=receipt) for receipt in asked.receipts]
    return wire.AckMessageRequest(
        group=wire.Resource(name=group), topic=wire.Resource(name=asked.topic), entries=entries
    )


def change_request(group: str, asked: ChangeRequest) -> wire.ChangeInvisibleDurationRequest:
    """Return the request that changes the invisible time of a message."""
    return wire.ChangeInvisibleDurationRequest(
        group=wire.Resource(name=group),
        topic=wire.Resource(name=asked.topic),
        receipt_handle=asked.receipt,
        invisible_duration=duration(round(asked.invisible_s * 1000)),
    )


def only(query: Mapping[str, str], *names: str) -> None:
    """Raise CallRefusedError if a query string has a parameter other than `names`."""
    if unknown := query.keys() - set(names):
        raise CallRefusedError(Code.BAD_REQUEST, f"the parameter {min(unknown)!r:.100} is unknown")
