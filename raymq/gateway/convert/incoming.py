"""Converts a message that a client sends to a raymq Message, with RocketMQ's checks.

A raymq Message has no fields for some values of the protocol: the message group, the trace context, and the client's
own host and time. RocketMQ's brokers store these values as properties, and so does this module. The limits are
RocketMQ's; raymq's own Message may allow more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from raymq.client.producer.checks.topic_types import check_type
from raymq.common.errors import MessageIllegalError
from raymq.common.message import (
    PROPERTY_SHARDING_KEY,
    RESERVED_PROPERTIES,
    TIMER_DELAY_MAX_MS,
    Message,
    with_added_properties,
)
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.gateway.convert.bodies import body_of
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import millis
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, MessageType
from raymq.records.format.message_id import checked_message_id

PROPERTY_TRACE_CONTEXT: Final = "TRACE_CONTEXT"
PROPERTY_BORN_HOST: Final = "__BORNHOST"
PROPERTY_BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
CLIENT_PROPERTIES: Final = frozenset((PROPERTY_TRACE_CONTEXT, PROPERTY_BORN_HOST, PROPERTY_BORN_TIMESTAMP))
"""Properties that the gateway adds, and that raymq itself does not reserve."""

USER_PROPERTIES_MAX: Final = 128
"""Maximum number of user properties of a message."""
PROPERTIES_BYTES_MAX: Final = 16 * 1024
"""Maximum size in bytes of a message's user properties, tag, keys, and of the properties that the gateway adds."""
MESSAGE_GROUP_BYTES_MAX: Final = 63
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class IncomingMessage:
    """A checked message of a client. `sharding_key`: the message group, None if the message has no group. `kind`: the
    type by which topics accept or refuse the message. `message_id`: the unique id that the client gave it."""

    message: Message
    sharding_key: str | None
    kind: TopicMessageType
    message_id: str

    def fingerprint(self) -> int:
        """Return a number that is equal for equal messages, and differs for almost all other messages. The times count
        for nothing, because a client may set them again when it repeats a send."""
        one = self.message
        own = frozenset(item for item in one.properties.items() if item[0] not in CLIENT_PROPERTIES)
        return hash((self.message_id, one.topic, one.body, one.tags, one.keys, own, self.sharding_key, self.kind))


def incoming(sent: wire.Message, topic: str, now_ms: int, max_body_bytes: int) -> IncomingMessage:
    """Convert a message that a client sends to the stored topic `topic`.

    `now_ms`: the time in ms since 1970. A delivery time in the past is replaced by `now_ms`. `max_body_bytes`: the
    maximum size of the decompressed body. Raises CallRefusedError if the message breaks a rule.
    """
    properties = sent.system_properties
    if properties.HasField("lite_topic") or properties.message_type == MessageType.LITE:
        raise CallRefusedError(Code.UNSUPPORTED, "messages of the type LITE, with a lite topic, are not supported")
    try:
        message_id = checked_message_id(properties.message_id)
    except MessageIllegalError as error:
        raise CallRefusedError(Code.ILLEGAL_MESSAGE_ID, str(error)) from None
    body = body_of(sent, max_body_bytes)
    tag = _tag(properties)
    keys = [_text("a key", key, Code.ILLEGAL_MESSAGE_KEY) for key in properties.keys]
    if any(" " in key for key in keys):
        raise CallRefusedError(Code.ILLEGAL_MESSAGE_KEY, "a key must not contain a space, which separates keys")
    group = _message_group(properties)
    added = _added(properties, group)
    _check_properties(sent, [tag or "", *keys, *added, *added.values()])
    deliver_at_ms = _deliver_at_ms(properties, now_ms)
    priority = _priority(properties, group, deliver_at_ms)
    own = dict(sent.user_properties)
    try:
        message = Message(topic, body, tag, keys, properties=own, deliver_at_ms=deliver_at_ms, priority=priority)
    except MessageIllegalError as error:
        raise CallRefusedError(Code.BAD_REQUEST, str(error)) from None
    kind = _kind(properties.message_type, group, deliver_at_ms, priority)
    if kind is TopicMessageType.TRANSACTION and deliver_at_ms is not None:
        raise CallRefusedError(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, "a message of a transaction cannot have a delivery time"
        )
    return IncomingMessage(with_added_properties(message, added) if added else message, group, kind, message_id)


def check_kind(topic: str, attributes: TopicAttributes, kind: TopicMessageType) -> None:
    """Raise CallRefusedError unless a topic with these attributes accepts messages of the type `kind`."""
    try:
        check_type(topic, attributes, kind)
    except MessageIllegalError as error:
        raise CallRefusedError(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, str(error)) from None


def _text(what: str, text: str, code: Code) -> str:
    """Return `text` if it is neither blank nor contains control characters. `what`: a name for the error's text."""
    if not text.strip():
        raise CallRefusedError(code, f"{what} must not be blank")
    if _CONTROL.search(text):
        raise CallRefusedError(code, f"{what} must not contain control characters")
    return text


def _tag(properties: wire.SystemProperties) -> str | None:
    if not properties.HasField("tag"):
        return None
    tag = _text("the tag", properties.tag, Code.ILLEGAL_MESSAGE_TAG)
    if "|" in tag or tag == "*" or tag != tag.strip():
        raise CallRefusedError(
            Code.ILLEGAL_MESSAGE_TAG, "a tag must not be '*', contain '|', or begin or end with a space"
        )
    return tag


def _message_group(properties: wire.SystemProperties) -> str | None:
    if not properties.HasField("message_group"):
        return None
    group = _text("the message group", properties.message_group, Code.ILLEGAL_MESSAGE_GROUP)
    if len(group.encode()) > MESSAGE_GROUP_BYTES_MAX:
        raise CallRefusedError(
            Code.ILLEGAL_MESSAGE_GROUP, f"a message group may have at most {MESSAGE_GROUP_BYTES_MAX} bytes"
        )
    return group


def _added(properties: wire.SystemProperties, group: str | None) -> dict[str, str]:
    """Return the properties in which raymq stores values of the protocol."""
    added = {} if group is None else {PROPERTY_SHARDING_KEY: group}
    if properties.HasField("trace_context") and properties.trace_context:
        added[PROPERTY_TRACE_CONTEXT] = _text("the trace context", properties.trace_context, Code.BAD_REQUEST)
    if properties.born_host:
        added[PROPERTY_BORN_HOST] = _text("the born host", properties.born_host, Code.BAD_REQUEST)
    if properties.HasField("born_timestamp"):
        added[PROPERTY_BORN_TIMESTAMP] = str(max(millis(properties.born_timestamp), 0))
    return added


def _check_properties(sent: wire.Message, more: list[str]) -> None:
    """Check the user's properties. `more`: the other texts that count for the size of the properties."""
    properties = sent.user_properties
    if len(properties) > USER_PROPERTIES_MAX:
        raise CallRefusedError(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the message has {len(properties)} properties; at most {USER_PROPERTIES_MAX} are allowed",
        )
    size = sum(len(text.encode()) for text in more)
    for name, value in properties.items():
        size += len(name.encode()) + len(value.encode())
        if size > PROPERTIES_BYTES_MAX:
            break
        _text("the name of a property", name, Code.ILLEGAL_MESSAGE_PROPERTY_KEY)
        _text(f"the value of property {name!r}", value, Code.ILLEGAL_MESSAGE_PROPERTY_KEY)
        if name in RESERVED_PROPERTIES or name in CLIENT_PROPERTIES:
            raise CallRefusedError(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property {name!r} is reserved: use another name"
            )
    if size > PROPERTIES_BYTES_MAX:
        raise CallRefusedError(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the properties, the tag and the keys of a message may have at most {PROPERTIES_BYTES_MAX} bytes",
        )


def _deliver_at_ms(properties: wire.SystemProperties, now_ms: int) -> int | None:
    if not properties.HasField("delivery_timestamp"):
        return None
    at_ms = millis(properties.delivery_timestamp)
    if at_ms - now_ms > TIMER_DELAY_MAX_MS:
        days = TIMER_DELAY_MAX_MS // 86_400_000
        raise CallRefusedError(Code.ILLEGAL_DELIVERY_TIME, f"a message can be delayed by at most {days} days")
    return max(at_ms, now_ms)


def _priority(properties: wire.SystemProperties, group: str | None, deliver_at_ms: int | None) -> int | None:
    if not properties.HasField("priority"):
        return None
    if group is not None or deliver_at_ms is not None or properties.message_type == MessageType.TRANSACTION:
        raise CallRefusedError(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            "a message with a priority has neither message group nor delivery time, and is no part of a transaction",
        )
    return properties.priority


def _kind(message_type: int, group: str | None, deliver_at_ms: int | None, priority: int | None) -> TopicMessageType:
    """Return the type of a message as raymq's producer finds it: a message with a delay and a group is delayed."""
    if message_type == MessageType.TRANSACTION:
        return TopicMessageType.TRANSACTION
    if deliver_at_ms is not None:
        return TopicMessageType.DELAY
    if group is not None:
        return TopicMessageType.FIFO
    return TopicMessageType.NORMAL if priority is None else TopicMessageType.PRIORITY
