"""Tests of messages as columns."""

from __future__ import annotations

from raymq.common.message import PLAIN_PROPERTIES, Message
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.message_columns import MessageColumns


def test_a_row_with_properties_that_raymq_added_becomes_a_message():
    texts = ByteColumn.of(
        [b"mine\x011\x02TRAN_MSG\x01true\x02TAGS\x01paid\x02KEYS\x01k l\x02", b"", b"TAGS\x01paid\x02"]
    )
    first, second, third = MessageColumns("orders", ByteColumn.of([b"a", b"b", b"c"]), texts)
    assert (first.topic, first.body, first.tags, first.keys) == ("orders", b"a", "paid", ("k", "l"))
    assert first.properties == {"mine": "1", "TRAN_MSG": "true"}
    assert second == Message("orders", b"b")
    assert second.properties is PLAIN_PROPERTIES
    assert third == Message("orders", b"c", "paid")
    assert third.properties is not PLAIN_PROPERTIES
