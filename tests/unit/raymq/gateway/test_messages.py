"""Tests of the conversion of messages: from a client's message to raymq's and back, and each rule for a message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from raymq.common.message import RESERVED_PROPERTIES, TIMER_DELAY_MAX_MS, MessageExt
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.gateway.convert.incoming import (
    CLIENT_PROPERTIES,
    MESSAGE_GROUP_BYTES_MAX,
    PROPERTIES_BYTES_MAX,
    USER_PROPERTIES_MAX,
    IncomingMessage,
    check_kind,
    incoming,
)
from raymq.gateway.convert.outgoing import LeasedDelivery, outgoing
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import duration, millis, timestamp
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, DigestType, Encoding, MessageType
from tests.support.cases import examples

NOW_MS = 1_795_400_000_000
MAX = 4 << 20
TOPIC = wire.Resource(name="orders", resource_namespace="team-a")
TYPED = [one for one in TopicMessageType if one not in (TopicMessageType.UNSPECIFIED, TopicMessageType.MIXED)]
DELIVERY = LeasedDelivery("handle", 3, 60_000)

words = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20).filter(
    lambda text: text.strip()
)
tags = words.filter(lambda text: "|" not in text and text != "*" and text == text.strip())
keys = words.filter(lambda text: " " not in text)
names = words.filter(lambda text: text not in RESERVED_PROPERTIES | CLIENT_PROPERTIES)


def sent(body: bytes = b"body", user: dict[str, str] | None = None, **fields: Any) -> wire.Message:
    system = wire.SystemProperties(**{"message_id": "01A", **fields})
    return wire.Message(topic=TOPIC, user_properties=user or {}, system_properties=system, body=body)


def convert(message: wire.Message) -> IncomingMessage:
    return incoming(message, "team-a%orders", NOW_MS, MAX)


def stored(found: IncomingMessage, **more: str) -> MessageExt:
    """Return a message as a store would return it: reserved properties are separate."""
    message = found.message
    every = {**message.properties, **more}
    if message.deliver_at_ms is not None:
        every["TIMER_DELIVER_MS"] = str(message.deliver_at_ms)
    own = {name: value for name, value in every.items() if name not in RESERVED_PROPERTIES}
    system = {name: value for name, value in every.items() if name in RESERVED_PROPERTIES}
    places = ("broker-a", 1, 7, 1000, NOW_MS + 1, NOW_MS + 2, "10.0.0.1:5", "10.0.0.2:6", "id", "offset-id", 0, 0)
    return MessageExt(message.topic, message.body, message.tags, tuple(message.keys), own, 0, *places, system)


@settings(max_examples=examples(200), deadline=None)
@given(
    body=st.binary(min_size=1, max_size=50),
    user=st.dictionaries(names, words, max_size=5),
    tag=st.none() | tags,
    keys=st.lists(keys, max_size=4),
    group=st.none() | words.filter(lambda text: len(text.encode()) <= MESSAGE_GROUP_BYTES_MAX),
    at_ms=st.none() | st.integers(NOW_MS, NOW_MS + TIMER_DELAY_MAX_MS),
    born_ms=st.integers(1, 2**40),
    trace=st.none() | words,
    host=st.just("") | words,
)
def test_a_message_comes_back_as_it_was_sent(
    body: bytes,
    user: dict[str, str],
    tag: str | None,
    keys: list[str],
    group: str | None,
    at_ms: int | None,
    born_ms: int,
    trace: str | None,
    host: str,
) -> None:
    message = sent(
        body, user, tag=tag, keys=keys, message_group=group, trace_context=trace, born_host=host,
        delivery_timestamp=None if at_ms is None else timestamp(at_ms), born_timestamp=timestamp(born_ms),
    )  # fmt: skip
    found = convert(message)
    assert found.sharding_key == group
    kind = TopicMessageType.NORMAL if group is None else TopicMessageType.FIFO
    assert found.kind == (kind if at_ms is None else TopicMessageType.DELAY)
    back = outgoing(stored(found), TOPIC, DELIVERY)
    assert (back.topic, back.body, dict(back.user_properties)) == (TOPIC, body, user)
    system, given_system = back.system_properties, message.system_properties
    for name in ("tag", "message_group", "trace_context", "delivery_timestamp"):
        assert system.HasField(name) == given_system.HasField(name)  # type: ignore[arg-type]
        assert getattr(system, name) == getattr(given_system, name)
    assert list(system.keys) == keys
    assert system.born_timestamp == given_system.born_timestamp
    assert system.born_host == (host or "10.0.0.1:5")


def test_a_received_message_has_a_receipt_a_digest_and_its_place() -> None:
    back = outgoing(stored(convert(sent())), TOPIC, DELIVERY).system_properties
    assert (back.receipt_handle, back.delivery_attempt, millis(back.invisible_duration)) == ("handle", 3, 60_000)
    assert (back.body_encoding, back.body_digest.type) == (Encoding.IDENTITY, DigestType.MD5)
    assert (back.queue_id, back.queue_offset, millis(back.store_timestamp)) == (1, 7, NOW_MS + 2)
    assert millis(back.born_timestamp) == NOW_MS + 1
    unleased = outgoing(stored(convert(sent())), TOPIC).system_properties
    assert not unleased.HasField("receipt_handle")
    assert not unleased.HasField("delivery_attempt")


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({}, MessageType.NORMAL),
        ({"__SHARDINGKEY": "k"}, MessageType.FIFO),
        ({"__SHARDINGKEY": "k", "DELAY": "3"}, MessageType.DELAY),
        ({"TRAN_MSG": "true", "__SHARDINGKEY": "k"}, MessageType.TRANSACTION),
        ({"TRAN_MSG": "false"}, MessageType.NORMAL),
    ],
)
def test_the_type_of_a_received_message_follows_its_properties(properties: dict[str, str], kind: MessageType) -> None:
    assert outgoing(stored(convert(sent()), **properties), TOPIC).system_properties.message_type == kind


def test_a_dead_letter_names_its_origin_and_a_number_that_is_none_is_ignored() -> None:
    more = {
        "DLQ_ORIGIN_TOPIC": "orders",
        "DLQ_ORIGIN_MESSAGE_ID": "01B",
        "BORN_TIMESTAMP": "x",
        "TIMER_DELIVER_MS": "²",
    }
    back = outgoing(stored(convert(sent()), **more), TOPIC).system_properties
    assert back.dead_letter_queue == wire.DeadLetterQueue(topic="orders", message_id="01B")
    assert millis(back.born_timestamp) == NOW_MS + 1
    assert not back.HasField("delivery_timestamp")


def test_a_delivery_time_in_the_past_is_now() -> None:
    for at_ms in (0, -5, NOW_MS - 1):
        found = convert(sent(delivery_timestamp=timestamp(at_ms)))
        assert (found.message.deliver_at_ms, found.kind) == (NOW_MS, TopicMessageType.DELAY)


LONG = {f"name-{number}": "x" * 127 for number in range(USER_PROPERTIES_MAX)}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (sent(message_id=" "), Code.ILLEGAL_MESSAGE_ID),
        (sent(b""), Code.MESSAGE_BODY_EMPTY),
        (sent(tag=""), Code.ILLEGAL_MESSAGE_TAG),
        (sent(tag="a|b"), Code.ILLEGAL_MESSAGE_TAG),
        (sent(tag="*"), Code.ILLEGAL_MESSAGE_TAG),
        (sent(tag=" a"), Code.ILLEGAL_MESSAGE_TAG),
        (sent(tag="a\n"), Code.ILLEGAL_MESSAGE_TAG),
        (sent(keys=["a", ""]), Code.ILLEGAL_MESSAGE_KEY),
        (sent(keys=["a b"]), Code.ILLEGAL_MESSAGE_KEY),
        (sent(keys=["a\x01"]), Code.ILLEGAL_MESSAGE_KEY),
        (sent(message_group="\t"), Code.ILLEGAL_MESSAGE_GROUP),
        (sent(message_group="ä" * 32), Code.ILLEGAL_MESSAGE_GROUP),
        (sent(user={"": "a"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (sent(user={"a": "\x02"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (sent(user={"a": "\x85"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (sent(user={"UNIQ_KEY": "a"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (sent(user={"TRACE_CONTEXT": "a"}), Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (sent(user={str(number): "a" for number in range(USER_PROPERTIES_MAX + 1)}), Code.MESSAGE_PROPERTIES_TOO_LARGE),
        (sent(user=LONG), Code.MESSAGE_PROPERTIES_TOO_LARGE),
        (sent(keys=["x" * PROPERTIES_BYTES_MAX], tag="t"), Code.MESSAGE_PROPERTIES_TOO_LARGE),
        (sent(trace_context="\n"), Code.BAD_REQUEST),
        (sent(trace_context="x" * (PROPERTIES_BYTES_MAX + 1)), Code.MESSAGE_PROPERTIES_TOO_LARGE),
        (sent(born_host="a\nb"), Code.BAD_REQUEST),
        (sent(delivery_timestamp=timestamp(NOW_MS + TIMER_DELAY_MAX_MS + 1)), Code.ILLEGAL_DELIVERY_TIME),
        (sent(delivery_timestamp=wire.Timestamp(seconds=2**63 - 1)), Code.ILLEGAL_DELIVERY_TIME),
        (sent(priority=-1), Code.BAD_REQUEST),
        (sent(priority=10), Code.BAD_REQUEST),
        (sent(priority=1, message_group="g"), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (sent(priority=1, delivery_timestamp=timestamp(NOW_MS)), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (sent(priority=1, message_type=MessageType.TRANSACTION), Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (sent(lite_topic="a"), Code.UNSUPPORTED),
        (sent(message_type=MessageType.LITE), Code.UNSUPPORTED),
    ],
    ids=range(32),
)
def test_a_message_that_breaks_a_rule_is_refused(message: wire.Message, code: Code) -> None:
    with pytest.raises(CallRefusedError) as caught:
        convert(message)
    assert caught.value.status == code


@pytest.mark.parametrize("priority", [0, 9])
def test_a_priority_comes_back_as_it_was_sent(priority: int) -> None:
    found = convert(sent(priority=priority, message_type=MessageType.PRIORITY))
    assert (found.message.priority, found.kind) == (priority, TopicMessageType.PRIORITY)
    system = outgoing(stored(found), TOPIC).system_properties
    assert (system.priority, system.message_type) == (priority, MessageType.PRIORITY)
    assert not outgoing(stored(convert(sent())), TOPIC).system_properties.HasField("priority")


def test_a_message_at_the_limits_is_accepted() -> None:
    user = {str(number): "a" for number in range(USER_PROPERTIES_MAX)}
    convert(sent(user=user, message_group="x" * MESSAGE_GROUP_BYTES_MAX))
    convert(sent(keys=["x" * (PROPERTIES_BYTES_MAX - 1)], tag="t"))
    last_ms = NOW_MS + TIMER_DELAY_MAX_MS
    assert convert(sent(delivery_timestamp=timestamp(last_ms))).message.deliver_at_ms == last_ms


@pytest.mark.parametrize("wanted", TopicMessageType)
@pytest.mark.parametrize("kind", TYPED)
def test_a_topic_refuses_messages_of_another_type(wanted: TopicMessageType, kind: TopicMessageType) -> None:
    attributes = TopicAttributes(wanted)
    if wanted in (TopicMessageType.UNSPECIFIED, TopicMessageType.MIXED, kind):
        check_kind("orders", attributes, kind)
        return
    with pytest.raises(CallRefusedError) as caught:
        check_kind("orders", attributes, kind)
    assert caught.value.status == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


@given(st.integers(-(2**62), 2**62))
def test_times_keep_their_milliseconds(at_ms: int) -> None:
    assert millis(timestamp(at_ms)) == at_ms
    if at_ms >= 0:
        assert millis(duration(at_ms)) == at_ms
