"""Converts a raymq message to the message that a client receives.

Each message has an MD5 digest, because Node's client does not accept a message without one. No body is compressed,
because Python's client drops a message whose encoding it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from raymq.common.message import (
    PROPERTY_DELAY,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_PRIORITY,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    MessageExt,
)
from raymq.common.numbers import INT32_MAX
from raymq.gateway.convert.bodies import md5_digest
from raymq.gateway.convert.incoming import (
    CLIENT_PROPERTIES,
    PROPERTY_BORN_HOST,
    PROPERTY_BORN_TIMESTAMP,
    PROPERTY_TRACE_CONTEXT,
)
from raymq.gateway.convert.times import duration, timestamp
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Encoding, MessageType

_DIGITS_MAX: Final = 15


@dataclass(frozen=True, slots=True)
class LeasedDelivery:
    """The lease of a message that a client receives. `handle`: the receipt handle. `attempt`: 1 for the first delivery.
    `invisible_ms`: the time in ms until the message is delivered again."""

    handle: str
    attempt: int
    invisible_ms: int


def outgoing(message: MessageExt, topic: wire.Resource, delivery: LeasedDelivery | None = None) -> wire.Message:
    """Convert a stored message. `topic`: the name as the client's request has it. `delivery`: the message's lease, None
    for a message that is not leased.

    Raises BodyUnreadableError if the body cannot be read.
    """
    body, properties = message.body, {**message.properties, **message.system_properties}
    system = wire.SystemProperties(
        keys=message.keys,
        message_id=message.message_id,
        body_digest=md5_digest(body),
        body_encoding=Encoding.IDENTITY,
        message_type=_message_type(properties),
        born_timestamp=timestamp(_number(properties, PROPERTY_BORN_TIMESTAMP) or message.born_timestamp_ms),
        born_host=properties.get(PROPERTY_BORN_HOST, message.born_host),
        store_timestamp=timestamp(message.store_timestamp_ms),
        store_host=message.store_host,
        queue_id=message.queue_id,
        queue_offset=message.queue_offset,
        tag=message.tags,
        message_group=properties.get(PROPERTY_SHARDING_KEY),
        trace_context=properties.get(PROPERTY_TRACE_CONTEXT),
    )
    if message.priority is not None:
        system.priority = min(message.priority, INT32_MAX)
    if delivery is not None:
        system.receipt_handle, system.delivery_attempt = delivery.handle, delivery.attempt
        system.invisible_duration.CopyFrom(duration(delivery.invisible_ms))
    deliver_at_ms = _number(properties, PROPERTY_TIMER_DELIVER_MS)
    if deliver_at_ms:
        system.delivery_timestamp.CopyFrom(timestamp(deliver_at_ms))
    if PROPERTY_DLQ_ORIGIN_TOPIC in properties:
        system.dead_letter_queue.topic = properties[PROPERTY_DLQ_ORIGIN_TOPIC]
        system.dead_letter_queue.message_id = properties.get(PROPERTY_DLQ_ORIGIN_MESSAGE_ID, "")
    own = {name: value for name, value in message.properties.items() if name not in CLIENT_PROPERTIES}
    return wire.Message(topic=topic, user_properties=own, system_properties=system, body=body)


def _message_type(properties: Mapping[str, str]) -> MessageType:
    if properties.get(PROPERTY_TRANSACTION_PREPARED, "").lower() == "true":
        return MessageType.TRANSACTION
    if PROPERTY_TIMER_DELIVER_MS in properties or PROPERTY_DELAY in properties:
        return MessageType.DELAY
    if PROPERTY_SHARDING_KEY in properties:
        return MessageType.FIFO
    return MessageType.PRIORITY if PROPERTY_PRIORITY in properties else MessageType.NORMAL


def _number(properties: Mapping[str, str], name: str) -> int:
    """Return a property that is a number; 0 if the property is missing or is no number. A native client may write any
    text."""
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX else 0
