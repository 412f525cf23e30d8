"""Tests that a call with an absurd number changes nothing, and that calls accept numbers at the limits and numpy
numbers."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from raymq.client.admin.browse import read_cursor
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.producer.settings import ProducerSettings
from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.common.message import Message, MessageQueue
from raymq.common.numbers import (
    LONGEST_TIME_S,
    NUMBER_MAX,
    NumberRange,
    bounded,
    checked,
    number_of_text,
    real_number,
    seconds,
    whole_number,
)
from raymq.common.places import parse_position, parse_queue
from raymq.common.protocol.group import StartOffsetQuery
from raymq.log_handler import RaymqHandler
from raymq.remoting.lane.client import Lane
from raymq.serve import RaymqTaskProcessorAdapter
from tests.support.clients.fakes import FakeStore
from tests.support.clients.lanes import ECHO, echo_server
from tests.support.clients.producers import producers_of_fakes

DIGITS = 10**5000
"""A number with so many digits that Python refuses to convert it to text, even for the id of a test."""
MANY_DIGITS = pytest.param(DIGITS, id="digits")


def test_an_error_shows_no_number_of_nineteen_digits() -> None:
    @checked
    def create(queues: int) -> None: ...

    for value, text in (
        ("4", "queues must be a whole number, not '4'"),
        (2**63, "queues must be -(2^63 - 1) to 2^63 - 1"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}"):
            create(value)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=re.escape("offset must be a whole number, 0 to 2^63 - 1, not '4'")):
        whole_number("offset", "4", 0, NUMBER_MAX)


def test_numbers_of_numpy_become_plain_numbers() -> None:
    assert [type(whole_number("n", np.int64(3))), type(whole_number("n", np.uint8(3)))] == [int, int]
    assert type(real_number("n", np.float32(0.5))) is float
    assert type(seconds("n", np.int32(5))) is float
    assert type(PullSettings.of("g", threshold_count=np.int64(5)).threshold_count) is int
    assert type(ProducerSettings(max_buffered_messages=np.int64(5)).max_buffered_messages) is int
    assert type(PushSettings("g", (), StartOffsetQuery(), threads=np.int64(2)).threads) is int
    assert type(Message("orders", b"x", flag=np.int64(3)).flag) is int  # type: ignore[arg-type]  # a number of numpy


def test_a_positional_argument_too_many_is_not_taken_for_a_number() -> None:
    with producers_of_fakes() as make:
        producer = make(FakeStore())
        for send in (producer.send, producer.send_batch):
            with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
                send("orders", b"hello")


def test_an_unknown_argument_of_a_send_is_refused_with_the_known_arguments() -> None:
    with producers_of_fakes() as make:
        producer = make(FakeStore())
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(TypeError, match=r"a send has no option 'key'; choose from its options: .*sharding_key"):
                send(Message("orders", b"x"), key="o-1")
            with pytest.raises(MessageIllegalError, match=r"got str: write raymq.Message\(topic, body\)"):
                send("hello")


def test_bounds_are_included() -> None:
    assert whole_number("n", NUMBER_MAX) == NUMBER_MAX
    assert whole_number("n", -NUMBER_MAX) == -NUMBER_MAX
    assert seconds("n", 0) == 0
    assert seconds("n", LONGEST_TIME_S) == LONGEST_TIME_S
    assert NumberRange(1, 5, otherwise=-1).has(-1)
    assert not NumberRange(1, 5, otherwise=-1).has(0)


@pytest.mark.parametrize(
    "value",
    [MANY_DIGITS, "x" * 10_000, pytest.param(Fraction(DIGITS), id="fraction"), np.longdouble("1e4000"), [0] * 10_000],
)
def test_an_error_is_short_whatever_the_value(value: Any) -> None:
    for number_of in (whole_number, real_number, seconds):
        with pytest.raises(InvalidArgumentError, match="count must be") as caught:
            number_of("count", value)
        assert len(str(caught.value)) < 300


@checked
@bounded(sizes=NumberRange(1, 9))
def _call(count: int, wait_s: float = 1.0, *more: Any, sizes: dict[str, int] | None = None, free: Any = None) -> Any:
    return count, wait_s, more, sizes, free


def test_each_argument_of_a_checked_function_is_checked_however_it_is_passed() -> None:
    assert _call(1) == (1, 1.0, (), None, None)
    assert _call(np.int8(1), 2, "x", sizes={"a": 9}, free=math.nan)[:4] == (1, 2, ("x",), {"a": 9})
    for arguments, keywords, name in [
        (("1",), {}, "count"),
        ((None,), {}, "count"),
        ((1, -1), {}, "wait_s"),
        ((1,), {"wait_s": math.nan}, "wait_s"),
        ((1,), {"wait_s": None}, "wait_s"),
        ((1,), {"sizes": {"a": 1, "b": 10}}, "sizes of b must be 1 to 9"),
        ((1,), {"sizes": 5}, "sizes must map names to numbers, 1 to 9"),
    ]:
        with pytest.raises(InvalidArgumentError, match=name):
            _call(*arguments, **keywords)  # type: ignore[arg-type]  # bad input on purpose
    with pytest.raises(TypeError, match="count"):
        _call()  # type: ignore[call-arg]  # bad input on purpose


def test_bounds_of_an_argument_that_does_not_exist_are_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="has no number parameters named counts"):
        checked(bounded(counts=NumberRange(1, 9))(lambda count: count))


# Tests of numbers in messages and sends


@pytest.mark.parametrize("value", ["3", math.nan, -1, True, math.inf, 10**18, MANY_DIGITS])
def test_a_send_with_an_absurd_timeout_leaves_its_queue_free(value: Any) -> None:
    store = FakeStore()
    with producers_of_fakes() as make:
        producer = make(store)
        producer.send(Message("orders", b"one"))
        producer.send(Message("orders", b"two"))
        with pytest.raises(InvalidArgumentError, match="timeout_s"):
            producer.send(Message("orders", b"three"), timeout_s=value)
        with pytest.raises(InvalidArgumentError, match="timeout_s"):
            producer.send_batch([Message("orders", b"three"), Message("orders", b"four")], timeout_s=value)
        producer.send(Message("orders", b"five"), timeout_s=np.float64(3))
        producer.send(Message("orders", b"six"), timeout_s=np.int32(3))
    assert store.everything() == [b"one", b"two", b"five", b"six"]


@pytest.mark.parametrize("value", [math.nan, True, 1.5, 2**63, -(2**63) - 1, MANY_DIGITS, b"k", [1]])
def test_a_send_with_an_absurd_key_or_queue_leaves_its_queue_free(value: Any) -> None:
    store = FakeStore()
    with producers_of_fakes() as make:
        producer = make(store)
        queue = producer.send(Message("orders", b"one")).queue
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(InvalidArgumentError, match="sharding_key must be"):
                send(Message("orders", b"two"), sharding_key=value)
            with pytest.raises(InvalidArgumentError, match="queue_id must be"):
                send(Message("orders", b"two"), queue=MessageQueue("orders", queue.broker_name, value))
        own = MessageQueue("orders", queue.broker_name, np.int64(queue.queue_id))  # type: ignore[arg-type]
        assert producer.send(Message("orders", b"three"), queue=own).queue == queue
        producer.send(Message("orders", b"four"), sharding_key=2**63 - 1)
        producer.send(Message("orders", b"five"), sharding_key=np.int64(-5))  # type: ignore[arg-type]
    assert store.everything() == [b"one", b"three", b"four", b"five"]


def test_the_longest_times_take_effect() -> None:
    store = FakeStore()
    with producers_of_fakes() as make:
        producer = make(store, send_timeout_s=LONGEST_TIME_S, attempt_timeout_s=LONGEST_TIME_S)
        producer.send(Message("orders", b"one"), timeout_s=LONGEST_TIME_S)
        producer.send_async(Message("orders", b"two")).result(LONGEST_TIME_S)
        producer.flush(LONGEST_TIME_S)
    assert store.everything() == [b"one", b"two"]
    server = echo_server()
    try:
        lane = Lane(server.address)
        assert bytes(lane.call(ECHO, (b"x",), LONGEST_TIME_S).payload) == b"x"
        lane.close()
    finally:
        server.close()


@pytest.mark.parametrize("value", ["1", -1, math.nan, True, 2**63, MANY_DIGITS, 1.5])
def test_a_message_has_no_absurd_number(value: Any) -> None:
    for name in ("flag", "delay_level", "deliver_at_ms"):
        if (name, value) == ("flag", -1):
            continue  # -1 is a valid flag of a message
        with pytest.raises(MessageIllegalError, match=name):
            Message("orders", b"x", **{name: value})


def test_a_message_of_the_far_future_is_refused_with_the_bound_in_days() -> None:
    for at_ms in (NUMBER_MAX, time.time_ns() // 1_000_000 + 41 * 86_400_000):
        with pytest.raises(MessageIllegalError, match=r"deliver_at_ms \d+ is .* at most 40 days are allowed"):
            Message("orders", b"x", deliver_at_ms=at_ms)


# Tests of numbers in texts that people type


def test_a_typed_number_is_written_in_digits() -> None:
    assert [number_of_text("n", text) for text in ("0", "007", str(NUMBER_MAX))] == [0, 7, NUMBER_MAX]
    for text in ("", "-1", "+1", "1.0", "²", "٣", " 1", "1_0", "x", str(NUMBER_MAX + 1), "9" * 5000):
        with pytest.raises(InvalidArgumentError, match="n must be") as caught:
            number_of_text("n", text)
        assert len(str(caught.value)) < 300


def test_a_typed_queue_or_place_with_an_absurd_number_is_refused() -> None:
    assert parse_queue("t", "a:b:3") == MessageQueue("t", "a:b", 3)
    assert parse_position("t", f"a:3:{NUMBER_MAX}") == (MessageQueue("t", "a", 3), NUMBER_MAX)
    for text in ("", "3", ":3", "a:", "a:x", "a:-1", "a:²", f"a:{2**31}", f"a:{'9' * 5000}"):
        with pytest.raises(InvalidArgumentError, match="is not a queue; write BROKER:QUEUE"):
            parse_queue("t", text)
        with pytest.raises(InvalidArgumentError, match="is not an offset of a queue; write BROKER:QUEUE:OFFSET"):
            parse_position("t", f"{text}:17")
    for offset in ("", "x", "-1", "²", str(NUMBER_MAX + 1), "9" * 5000):
        with pytest.raises(InvalidArgumentError, match="is not an offset of a queue"):
            parse_position("t", f"a:3:{offset}")


# Tests of numbers in cursors, log levels and task delays


@pytest.mark.parametrize("number", ["Infinity", "NaN", "-1", str(2**63), "1" * 5000, "true", '"7"', "1.5", "null"])
def test_a_cursor_with_an_absurd_number_is_refused(number: str) -> None:
    good = json.dumps([1, [["broker-a", 0, 3, 7]]])
    assert read_cursor("orders", base64.urlsafe_b64encode(good.encode()).decode())[1]
    for bad in (good.replace("3", number), good.replace("7", number), good.replace(" 0", f" {number}")):
        with pytest.raises(InvalidArgumentError):
            read_cursor("orders", base64.urlsafe_b64encode(bad.encode()).decode())


@pytest.mark.parametrize("level", ["LOUD", math.nan, 1.5, None, [1]])
def test_a_log_handler_takes_no_absurd_level(level: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="level must be a logging level"):
        RaymqHandler("logs", client=object(), level=level)  # type: ignore[arg-type]  # it is not used


@pytest.mark.parametrize("value", ["3", math.nan, -1, True, math.inf, MANY_DIGITS])
def test_a_task_has_no_absurd_delay(value: Any) -> None:
    # The adapter is not initialised. So the expected error occurs only if the method checks `delay_s` before it uses
    # the adapter's attributes.
    adapter = RaymqTaskProcessorAdapter.__new__(RaymqTaskProcessorAdapter)
    with pytest.raises(InvalidArgumentError, match="delay_s must be"):
        adapter.enqueue_task_sync("resize", delay_s=value)
