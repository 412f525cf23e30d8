"""Tests of the golden facts of spec/messaging.md §11 about clients and brokers. The tests use the numbers of the spec.

Facts 1 and 2 are tested in tests/unit/actors/core/rebalance/test_allocation.py.
"""

from __future__ import annotations

from datetime import datetime

import pytest

from raymq.client.consumer.subscription import Subscription
from raymq.client.producer.queue_selector import Destination
from raymq.common.errors import IllegalNameError, InvalidArgumentError
from raymq.common.message import Message, MessageQueue
from raymq.common.names import check_group, check_topic, is_system_topic
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.records.format.hashing import java_hash
from raymq.records.format.message_id import UniqueIdGenerator, offset_message_id

MONTH_START_MS = int(datetime(2026, 3, 1).timestamp() * 1000)


def test_fact_15_the_layout_of_a_unique_id():
    ids = UniqueIdGenerator("10.0.0.1", pid=6699, loader_hash=0x18B4AAC2, clock_ms=lambda: MONTH_START_MS + 10**9)
    assert ids.next_batch(6)[5] == "0A0000011A2B18B4AAC23B9ACA000005"


def test_fact_15_consecutive_ids_differ_by_one_in_their_last_digits():
    first, second = UniqueIdGenerator("127.0.0.1", clock_ms=lambda: MONTH_START_MS).next_batch(2)
    assert int(second[-4:], 16) - int(first[-4:], 16) == 1
    assert first[:-4] == second[:-4]


def test_fact_16_an_offset_message_id():
    assert offset_message_id("127.0.0.1", 10911, 4096) == "7F00000100002A9F0000000000001000"


@pytest.mark.parametrize("name", ["Hello", "%RETRY%Hello", "_%RETRY%Hello", "223-%RETRY%Hello"])
def test_fact_17_legal_names(name):
    assert check_topic(name) == name
    assert check_group(name) == name


@pytest.mark.parametrize("name", ["", "TOPIC&*^", "../TopicTest", "x" * 128])
def test_fact_17_illegal_names(name):
    with pytest.raises(IllegalNameError):
        check_topic(name)


@pytest.mark.parametrize("prefix", ["%RETRY%", "%DLQ%"])
def test_fact_18_lengths(prefix):
    assert check_topic("x" * 127)
    assert check_topic(prefix.ljust(255, "x"))
    with pytest.raises(IllegalNameError):
        check_topic(prefix.ljust(256, "x"))
    assert check_group("g" * 120)
    with pytest.raises(IllegalNameError):
        check_group("g" * 121)


def test_fact_18_the_prefix_of_system_topics():
    assert is_system_topic("rmq_sys_anything")


@pytest.mark.parametrize(
    ("text", "value"),
    [("TagA", 2598919), ("TagB", 2598920), ("TagC", 2598921), ("tag", 114586), ("", 0)]
    + [(text, 2031744) for text in ("AaAa", "BBBB", "AaBB")],
)
def test_fact_20_javas_hash(text, value):
    assert java_hash(text) == value


def test_fact_20_a_tag_with_the_same_code_passes_the_broker_and_not_the_client():
    subscription = Subscription.parse("orders", "AaAa")
    assert subscription.tag_codes is not None
    assert java_hash("BBBB") in subscription.tag_codes
    assert not subscription.matches("BBBB")


@pytest.mark.parametrize(("key", "hashed", "queue_id"), [("order-1001", 708180863, 3), ("1001", 1507424, 0)])
def test_fact_21_a_sharding_key_selects_by_hash(key, hashed, queue_id):
    route = TopicRoute("t", {"a": BrokerData("c", "a", {0: "storage-a-0"})}, (QueueData("a", 4, 4, 6),))
    assert java_hash(key) == hashed
    assert Destination(sharding_key=key).select(route, Message("t", b"x")) == MessageQueue("t", "a", queue_id)


@pytest.mark.parametrize(("key", "queue_id"), [(1001, 1), (-1, 1)])
def test_fact_21_a_number_is_its_own_hash(key, queue_id):
    route = TopicRoute("t", {"a": BrokerData("c", "a", {0: "storage-a-0"})}, (QueueData("a", 4, 4, 6),))
    assert Destination(sharding_key=key).select(route, Message("t", b"x")).queue_id == queue_id


def test_fact_21_a_negative_hash_selects_a_queue_too():
    route = TopicRoute("t", {"a": BrokerData("c", "a", {0: "storage-a-0"})}, (QueueData("a", 4, 4, 6),))
    key = next(f"key-{number}" for number in range(1000) if java_hash(f"key-{number}") % -4 == -3)
    hashed = java_hash(key)
    expected = abs(hashed - int(hashed / 4) * 4)  # Java's integer division truncates towards zero
    assert Destination(sharding_key=key).select(route, Message("t", b"x")).queue_id == expected


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("TAG1 || Tag2 || tag3", {"TAG1", "Tag2", "tag3"}),
        ("A || B", {"A", "B"}),
        ("", set()),
        ("*", set()),
        (None, set()),
        ("a||", {"a"}),
    ],
)
def test_fact_22_tag_expressions(expression, tags):
    assert Subscription.parse("orders", expression).tags == tags


def test_fact_22_an_expression_of_separators_is_an_error():
    with pytest.raises(InvalidArgumentError):
        Subscription.parse("orders", "||")
