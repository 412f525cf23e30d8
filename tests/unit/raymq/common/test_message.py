"""Tests that the constructor of a message refuses illegal values."""

from __future__ import annotations

import copy
import gc
import pickle
from datetime import timedelta

import cloudpickle
import pytest
from msgspec.structs import replace

from raymq.common.errors import IllegalNameError, MessageIllegalError
from raymq.common.message import (
    MESSAGE_SIZE_LIMIT_BYTES,
    PLAIN_PROPERTIES,
    RESERVED_PROPERTIES,
    Message,
    MessageExt,
    MessageQueue,
    SendResult,
    SendStatus,
    copied_message,
    message_list,
)


def test_a_message_keeps_its_arguments():
    message = Message("orders", b"x", tags="paid", keys=["o-17", "c-1"], properties={"a": "1"}, flag=-5)
    assert (message.topic, message.body, message.tags) == ("orders", b"x", "paid")
    assert message.keys == ("o-17", "c-1")
    assert message.properties == {"a": "1"}
    assert pickle.loads(pickle.dumps(message)) == message


FULL = Message("orders", b"x", "paid", ["k"], {"a": "1"}, -5, 3, None, False)


@pytest.mark.parametrize("message", [Message("orders", b"x"), FULL], ids=["plain", "full"])
def test_a_copy_of_a_message_equals_it_however_it_is_made(message):
    for through in (pickle, cloudpickle):
        assert through.loads(through.dumps(message)) == message
    assert copy.copy(message) == copy.deepcopy(message) == message
    assert message != Message("orders", b"y")


def test_fields_may_be_given_by_position_and_are_shown_by_name():
    assert repr(FULL) == (
        "Message(topic='orders', body=b'x', tags='paid', keys=('k',), properties={'a': '1'}, flag=-5, delay_level=3, "
        "deliver_at_ms=None, wait_store_msg_ok=False, light_queues=(), delay=None, deliver_at=None, "
        "priority=None)"
    )
    assert repr(Message("orders", b"x")).endswith(
        "keys=(), properties={}, flag=0, delay_level=0, deliver_at_ms=None, wait_store_msg_ok=True, light_queues=(), "
        "delay=None, deliver_at=None, priority=None)"
    )


@pytest.mark.parametrize("priority", [0, 9])
def test_a_priority_is_a_property_of_rocketmq_and_of_each_copy(priority):
    message = Message("orders", b"x", properties={"a": "1"}, priority=priority)
    assert message.properties == {"a": "1", "_SYS_MSG_PRIORITY_": str(priority)}
    for same in (pickle.loads(pickle.dumps(message)), copy.copy(message), replace(message)):
        assert same == message
    assert replace(message, priority=5).properties["_SYS_MSG_PRIORITY_"] == "5"
    assert Message("orders", b"x", priority=priority).properties is not PLAIN_PROPERTIES


@pytest.mark.parametrize("more", [{"delay_level": 1}, {"deliver_at_ms": 0}, {"delay": timedelta(seconds=1)}])
def test_a_message_with_a_delay_has_no_priority(more):
    with pytest.raises(MessageIllegalError, match="a priority or a delay, not both"):
        Message("orders", b"x", priority=0, **more)


@pytest.mark.parametrize("priority", [-1, 10, "1", 1.5, True])
def test_a_priority_is_a_number_from_0_to_9(priority):
    with pytest.raises(MessageIllegalError, match="priority"):
        Message("orders", b"x", priority=priority)


@pytest.mark.parametrize(
    ("text", "priority"),
    [("0", 0), ("7", 7), ("2147483647", 2**31 - 1), ("", None), ("-1", None), ("x", None), ("9" * 11, None)],
)
def test_a_received_message_and_its_copy_have_the_stored_priority(text, priority):
    places = ("broker-a", 1, 7, 1000, 1, 2, "10.0.0.1:5", "10.0.0.2:6", "id", "offset-id", 0, 0)
    system = {"_SYS_MSG_PRIORITY_": text} if text else {}
    message = MessageExt("orders", b"x", None, (), {"a": "1"}, 0, *places, system)
    copied = copied_message(message, "others", {"b": "2"})
    assert message.priority == copied.priority == priority
    stored = {} if priority is None else {"_SYS_MSG_PRIORITY_": str(priority)}
    assert copied.properties == {"a": "1", "b": "2", **stored}


@pytest.mark.parametrize(
    "change",
    [
        lambda properties: properties.__setitem__("a", "1"),
        lambda properties: properties.update(a="1"),
        lambda properties: properties.setdefault("a", "1"),
        lambda properties: properties.__ior__({"a": "1"}),
    ],
)
def test_nobody_gives_properties_to_all_messages_that_have_none(change):
    with pytest.raises(TypeError, match="is immutable"):
        change(Message("orders", b"x").properties)
    assert Message("orders", b"x").properties == {}
    first, second = (Message("orders", b"x", tags="t") for _ in range(2))
    assert first.properties is not second.properties


def test_plain_messages_are_recognised_by_their_properties():
    plain = Message("orders", b"x")
    made_otherwise = [
        *(Message("orders", bytearray(b"x"), None, [], {}, 0), Message("orders", b"x", keys=[], properties={})),
        *(pickle.loads(pickle.dumps(plain)), copy.copy(plain), copy.deepcopy(plain)),
        *(replace(plain, body=b"y"), replace(Message("orders", b"x", tags="t"), tags=None)),
    ]
    assert all(message.properties is PLAIN_PROPERTIES for message in (plain, *made_otherwise))
    more = [
        *({"tags": "t"}, {"keys": "k"}, {"properties": {"a": "1"}}, {"flag": 1}, {"delay_level": 1}),
        *(
            {"deliver_at_ms": 0},
            {"delay": timedelta(1)},
            {"wait_store_msg_ok": False},
            {"tags": "t", "properties": PLAIN_PROPERTIES},
        ),
    ]
    for fields in more:
        message = Message("orders", b"x", **fields)
        copies = message, pickle.loads(pickle.dumps(message)), copy.deepcopy(message), replace(plain, **fields)
        assert not any(one.properties is PLAIN_PROPERTIES for one in copies), fields
        assert type(message.properties) is dict
    assert type(pickle.loads(pickle.dumps(plain.properties))) is dict


def test_messages_and_results_cost_the_garbage_collector_nothing():
    result = SendResult(SendStatus.SEND_OK, "M", "O", MessageQueue("orders", "a", 0), 7)
    assert not any(map(gc.is_tracked, (Message("orders", b"x"), FULL, result)))
    assert pickle.loads(pickle.dumps(result)) == result
    assert hash(pickle.loads(pickle.dumps(result))) == hash(result)
    with pytest.raises(AttributeError):
        result.queue_offset = 8


def test_one_key_may_be_given_as_a_text():
    assert Message("orders", b"x", keys="o-17").keys == ("o-17",)


@pytest.mark.parametrize("body", [bytearray(b"abc"), memoryview(b"abc")])
def test_other_bytes_are_copied_so_that_a_later_change_is_not_sent(body):
    message = Message("orders", body)
    assert message.body == b"abc"
    assert type(message.body) is bytes


def test_a_body_may_be_as_long_as_the_limit():
    assert len(Message("orders", bytes(MESSAGE_SIZE_LIMIT_BYTES)).body) == MESSAGE_SIZE_LIMIT_BYTES


@pytest.mark.parametrize(
    "arguments",
    [
        {"body": ""},
        {"body": "text"},
        {"body": None},
        {"body": b""},
        {"tags": ""},
        {"tags": " "},
        {"tags": "a || b"},
        {"tags": "*"},
        {"tags": " a"},
        {"tags": 5},
        {"tags": "a\x01b"},
        {"tags": "\ud800"},
        {"keys": None},
        {"keys": 5},
        {"keys": [""]},
        {"keys": ["a b"]},
        {"keys": [5]},
        {"keys": "a\x02"},
        {"properties": None},
        {"properties": [("a", "b")]},
        {"properties": {"": "x"}},
        {"properties": {"x": ""}},
        {"properties": {"x": 1}},
        {"properties": {1: "x"}},
        {"properties": {"x": "a\x01"}},
        {"properties": {"UNIQ_KEY": "x"}},
        {"properties": {"RMQ_SEQ": "1"}},
        {"wait_store_msg_ok": 0},
        {"flag": 2**31},
        {"flag": -(2**31) - 1},
        {"flag": "1"},
        {"flag": 1.5},
        {"flag": None},
        {"properties": ()},
        {"keys": {}.values},
    ],
    ids=lambda arguments: repr(arguments)[:40],
)
def test_a_message_that_cannot_be_stored_cannot_be_made(arguments):
    with pytest.raises(MessageIllegalError):
        Message(**{"topic": "orders", "body": b"x", **arguments})


def test_a_body_beyond_the_limit_is_refused():
    with pytest.raises(MessageIllegalError):
        Message("orders", bytes(MESSAGE_SIZE_LIMIT_BYTES + 1))


def test_every_reserved_property_is_refused():
    for name in RESERVED_PROPERTIES:
        with pytest.raises(MessageIllegalError, match="reserved"):
            Message("orders", b"x", properties={name: "x"})


@pytest.mark.parametrize("topic", ["", "a.b", None, "x" * 128])
def test_a_message_has_a_legal_topic(topic):
    with pytest.raises(IllegalNameError):
        Message(topic, b"x")


def test_a_message_cannot_be_changed_after_it_was_checked():
    properties = {"a": "1"}
    message = Message("orders", b"x", properties=properties)
    with pytest.raises(AttributeError):
        message.topic = "other"
    properties["UNIQ_KEY"] = "mine"
    assert message.properties == {"a": "1"}


def test_a_list_of_messages_holds_only_messages():
    messages = [Message("orders", b"x"), Message("orders", b"y")]
    assert message_list(iter(messages)) == messages
    with pytest.raises(MessageIllegalError, match="got str"):
        message_list([messages[0], "text"])


def test_queues_sort_by_topic_then_broker_then_number():
    queues = [
        MessageQueue("b", "x", 0),
        MessageQueue("a", "y", 2),
        MessageQueue("a", "x", 10),
        MessageQueue("a", "x", 9),
    ]
    assert [str(queue) for queue in sorted(queues)] == ["a@x:9", "a@x:10", "a@y:2", "b@x:0"]


def test_a_message_may_be_for_light_queues_too():
    assert Message("orders", b"x", light_queues="alice").light_queues == ("alice",)
    message = Message("orders", b"x", light_queues=["alice", "bob", "alice"])
    assert message.light_queues == ("alice", "bob")
    assert message.properties is not PLAIN_PROPERTIES
    assert pickle.loads(pickle.dumps(message)) == message
    assert Message("orders", b"x", light_queues=()).properties is PLAIN_PROPERTIES


@pytest.mark.parametrize(
    "names", [["a b"], ["%LMQ%a"], [""], [5], 5, ["a,b"], ["x" * 251], [str(n) for n in range(501)]]
)
def test_light_queues_that_cannot_be_are_refused(names):
    with pytest.raises((MessageIllegalError, IllegalNameError)):
        Message("orders", b"x", light_queues=names)


def test_the_tag_that_subscribes_to_all_tags_is_refused():
    with pytest.raises(MessageIllegalError, match=r"tag '\*' is not legal"):
        Message("orders", b"x", tags="*")
    assert Message("orders", b"x", tags="**").tags == "**"
