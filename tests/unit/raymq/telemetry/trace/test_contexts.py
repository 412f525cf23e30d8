"""Tests that trace contexts write the trace records of spec/features.md §6, for any number of messages per
context."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from raymq.common.message import Message, MessageExt, MessageQueue, SendResult, SendStatus, SystemMessage
from raymq.records.format.message_id import offset_message_id
from raymq.telemetry.trace.contexts import Begun, Done, Polled, Sent, TracedCalls, ended_transaction, recalled
from raymq.telemetry.trace.dispatcher import TraceContext
from raymq.telemetry.trace.life import Attempt, life_of
from raymq.telemetry.trace.records import (
    ContextCode,
    EndTransaction,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TracedDelivery,
    TracedType,
    TraceRecord,
    after_texts,
    before_texts,
    decode_records,
    encode_records,
    pub_texts,
    record_keys,
)

QUEUE = MessageQueue("orders", "broker-a", 3)


MESSAGE = MessageExt("orders", b"?", None, (), {}, 0, "broker-a", 0, 7, 0, 0, 0, "", "", "ID", "", 0, 0, {})


def message_ext(**changes: Any) -> MessageExt:
    return replace(MESSAGE, **changes)


def records_of(context: TraceContext) -> list[TraceRecord]:
    """Check that a context has the message keys of all its trace records, and return these records."""
    found = []
    for text, keys in context.lines():
        records, unreadable = decode_records(text)
        assert not unreadable
        assert set(keys) == record_keys(records)
        found += records
    return found


def result(number: int, status: SendStatus = SendStatus.SEND_OK) -> SendResult:
    return SendResult(status, f"ID{number}", offset_message_id("10.0.0.1", 10911, 100 * number), QUEUE, number)


def test_a_send_is_a_pub_per_message() -> None:
    messages = [
        Message("orders", b"first", "A", ("k1", "k2")),
        Message("orders", b"second"),
        Message("orders", b"later", delay_level=3),
        SystemMessage("orders", b"half", properties={"TRAN_MSG": "true"}),
    ]
    results = [result(number) for number in range(4)]
    sent = Sent("g", "orders", messages, lambda: results, 11.2, 1700000000012)
    pubs = records_of(sent)
    assert pubs[0] == Pub(
        1700000000000, "DefaultRegion", "g", "orders", "ID0", "A", "k1 k2", "10.0.0.1:10911", 5, 3,
        TracedType.NORMAL, results[0].offset_message_id, True,
    )  # fmt: skip
    kinds = [pub.message_type for pub in pubs if isinstance(pub, Pub)]
    assert kinds == [TracedType.NORMAL, TracedType.NORMAL, TracedType.DELAY, TracedType.HALF]


def test_a_send_that_is_not_known_to_be_durable_is_no_success() -> None:
    answer = [result(0, SendStatus.FLUSH_DISK_TIMEOUT)]
    [pub] = records_of(Sent("g", "orders", [Message("orders", b"x")], lambda: answer, 1, 10))
    assert isinstance(pub, Pub)
    assert not pub.success


def test_a_transaction_and_a_recall_are_records_of_their_own() -> None:
    offset_id = offset_message_id("10.0.0.1", 10911, 7)
    [end] = records_of(
        ended_transaction(
            "pg", "orders", Message("orders", b"x", "A", ("k",)), "ID1", offset_id, "COMMIT_MESSAGE", from_check=True
        )
    )
    assert isinstance(end, EndTransaction)
    assert (end.state, end.from_check, end.message_type, end.keys) == ("COMMIT_MESSAGE", True, TracedType.COMMIT, "k")
    [recall] = records_of(recalled("pg", "orders", "ID1", success=False))
    assert isinstance(recall, Recall)
    assert not recall.success


def test_a_listeners_calls_are_joined_by_their_request() -> None:
    one, two, three = (
        message_ext(message_id=f"ID{number}", keys=("k",), reconsume_times=number) for number in range(3)
    )
    calls = [[one, two], three, ValueError("damaged")]
    traced = TracedCalls("REQ", calls, 4)
    begun = records_of(Begun("cg", traced, 1000))
    assert begun[1] == SubBefore(1000, "DefaultRegion", "cg", "REQ", "ID1", 1, "k")
    done = records_of(Done("cg", traced, [0, 1], {1: ContextCode.EXCEPTION}, 40, 1040))
    assert [record.message_id for record in done] == ["ID0", "ID1", "ID2"]
    assert done[2] == SubAfter("REQ", "ID2", 10, False, "k", ContextCode.EXCEPTION, 1040, "cg")
    assert life_of("ID2", [*begun, *done]).attempts == (Attempt("cg", 1000, 2, ContextCode.EXCEPTION, 10, 1040),)


def test_a_call_that_was_not_made_has_no_end() -> None:
    calls = TracedCalls("REQ", [message_ext(message_id="ID0")], 1)
    assert records_of(Done("cg", calls, [], {}, 0, 1)) == []
    [attempt] = life_of("ID0", records_of(Begun("cg", calls, 1000))).attempts
    assert (attempt.code, attempt.ended_ms) == (None, None)


def test_a_message_that_is_not_to_be_traced_is_left_out() -> None:
    quiet = message_ext(message_id="ID0", system_properties={"TRACE_ON": "false"})
    assert (
        records_of(Begun("cg", TracedCalls("REQ", [quiet, message_ext(message_id="ID1")], 2), 1))[0].message_id == "ID1"
    )


@pytest.mark.parametrize("as_table", [False, True])
def test_a_poll_is_a_delivery_of_each_message(as_table: bool) -> None:
    messages = [message_ext(message_id="ID0", keys=("k", "l")), message_ext(message_id="ID1")]
    table = pa.table({"message_id": ["ID0", "ID1"], "keys": [["k", "l"], []]})
    records = records_of(Polled("cg", table if as_table else messages, 2, 1000))
    assert len(records) == 4
    [attempt] = life_of("ID0", records).attempts
    assert attempt == Attempt("cg", 1000, 0, ContextCode.SUCCESS, 0, 1000)


TEXT = st.text(max_size=8)
MESSAGES = st.builds(
    lambda tags, keys, body: message_ext(tags=tags, keys=tuple(keys), body=body),
    st.none() | TEXT.filter(lambda text: text != "null"),
    st.lists(TEXT.filter(lambda text: text and text != "null"), max_size=3),
    st.binary(max_size=20),
)


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.booleans(), TEXT)
def test_texts_of_a_batch_equal_the_texts_of_single_records(messages: list[Message], success: bool, group: str) -> None:
    common = Pub(5, "R", group, "t", "", None, None, "h:1", 0, 7, success=success)
    count = range(len(messages))
    expected = [
        encode_records(
            [
                replace(
                    common, message_id=f"ID{i}", tags=message.tags, keys=" ".join(message.keys) or None,
                    body_length=len(message.body), offset_message_id=f"OFF{i}", message_type=TracedType.DELAY,
                )
            ]
        )
        for i, message in enumerate(messages)
    ]  # fmt: skip
    ids, offset_ids = (f"ID{i}" for i in count), (f"OFF{i}" for i in count)
    assert pub_texts(common, ids, messages, offset_ids, (TracedType.DELAY for _ in count)) == expected


@given(st.lists(st.tuples(TEXT, st.integers(0, 16), st.none() | TEXT.filter(bool)), max_size=5))
def test_texts_of_a_call_equal_the_texts_of_single_records(rows: Iterable[tuple[str, int, str | None]]) -> None:
    deliveries = [TracedDelivery(f"ID{text}", times, keys) for text, times, keys in rows]
    before = SubBefore(5, "R", "g", "REQ", "", 0, None)
    singles = [
        replace(before, message_id=one.message_id, retry_times=one.retry_times, keys=one.keys) for one in deliveries
    ]
    assert before_texts(before, deliveries) == [encode_records([single]) for single in singles]
    after = SubAfter("REQ", "", 4, True, None, time_ms=6, group="g")
    ends = [ContextCode.FAILED if one.retry_times else ContextCode.SUCCESS for one in deliveries]
    expected = [
        encode_records(
            [replace(after, message_id=one.message_id, keys=one.keys, code=code, success=code is ContextCode.SUCCESS)]
        )
        for one, code in zip(deliveries, ends, strict=True)
    ]
    assert after_texts(after, list(zip(deliveries, ends, strict=True))) == expected


def test_a_record_that_came_twice_counts_once() -> None:
    pub = Pub(1, "R", "g", "t", "ID", None, None, "h:1", 1, 1)
    life = life_of("ID", [pub, replace(pub, message_id="other"), pub])
    assert life.sends == (pub,)
    assert life.topic == "t"
    assert not life_of("none", [pub])
