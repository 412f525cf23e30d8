"""Tests of receipt handles in the format of RocketMQ's clients (spec/features.md §12.5), and of messages with a receipt
handle."""

from __future__ import annotations

import copy
import pickle

import pytest

from raymq.client.consumer.simple.received_message import Receipt, parse_handle, parts_of, received
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageExt

POP_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("receipt", "offset", "handle"),
    [
        pytest.param(
            Receipt("orders", "broker-a", 3, 7, POP_MS, 60_000), 41, "7 1700000000000 60000 0 0 broker-a 3 41", id="103"
        ),
        pytest.param(
            Receipt("%RETRY%g", "broker-a", 0, 7, POP_MS, 60_000),
            41,
            "7 1700000000000 60000 0 1 broker-a 0 41",
            id="104",
        ),
        pytest.param(
            Receipt("orders", "broker-a", 3, 7, POP_MS, 60_000, ordered=True),
            41,
            "7 1700000000000 60000 999 0 broker-a 3 41",
            id="108-order",
        ),
    ],
)
def test_a_handle_is_rocketmqs_and_names_the_lease_and_the_message(receipt: Receipt, offset: int, handle: str) -> None:
    assert receipt.handle(offset) == handle
    assert parse_handle("g", "orders", handle) == (receipt, offset)


@pytest.mark.parametrize(
    "handle",
    [
        pytest.param("7 1700000000000 60000 0 0", id="108"),
        "",
        "a b c d e f g h",
        "7 1 1 0 0 broker-a 3 6",
        "7 1 1 0 0 broker-a 3 8 9",
        # The set of the lease's offsets would be a number of 125 GB.
        "7 1 1 0 0 broker-a 3 1000000000000",
        "7 1 1 0 0 broker-a 3 4103",
        "7 9223372036854775808 1 0 0 broker-a 3 7",
        "7 1 1 0 0 broker-a -1 7",
    ],
)
def test_a_text_that_is_no_handle_is_refused(handle: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not the receipt handle"):
        parse_handle("g", "orders", handle)


def message(offset: int) -> MessageExt:
    hosts = ("10.0.0.1:0", "10.0.0.2:10911", "ID", "OFF")
    return MessageExt(
        *("orders", b"body", None, (), {}, 0, "broker-a", 3, offset, 0, 1, 2),
        *hosts,
        reconsume_times=0,
        sys_flag=0,
        system_properties={},
    )


def test_a_received_message_is_a_message_with_a_receipt_that_survives_pickling_and_copying() -> None:
    receipt = Receipt("orders", "broker-a", 3, 40, POP_MS, 60_000, attempts=2, whole=2)
    messages = received([message(40), message(41)], receipt)
    for one in (messages[1], pickle.loads(pickle.dumps(messages[1])), copy.copy(messages[1])):
        assert (one.body, one.queue_offset, one.attempt) == (b"body", 41, 2)
        assert one.handle == "40 1700000000000 60000 0 0 broker-a 3 41"
        assert one.invisible_until_ms == POP_MS + 60_000
        assert isinstance(one, MessageExt)


def test_all_messages_of_a_lease_are_named_together_and_some_by_their_offsets() -> None:
    receipt = Receipt("orders", "broker-a", 3, 40, POP_MS, 60_000, whole=2)
    first, second = received([message(40), message(41)], receipt)
    assert parts_of([first, second]) == [(receipt, "")]
    assert parts_of([second]) == [(receipt, "2")]
    assert parts_of([first, first]) == [(receipt, "1")], "one message twice is not both"
    assert sorted(bits for _, bits in parts_of([first, copy.copy(first)])) == ["1", "1"]


def test_only_received_messages_are_settled() -> None:
    with pytest.raises(InvalidArgumentError, match="ack_handles"):
        parts_of([message(1)])  # type: ignore[list-item]  # that is the point
