"""Tests of a poll that decodes fetched records into messages or columns. Some polls take only a part of the records,
and some records are damaged."""

from __future__ import annotations

import pyarrow as pa
import pytest

from raymq.client.consumer.pull.fetched_records import (
    FetchedRecords,
    PolledRecords,
    as_messages,
    as_table,
    decode_messages,
    decode_tables,
    found,
)
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.compression import CompressionType, compress
from raymq.records.format.layout import RecordError
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.kernels.columns import SCHEMA
from tests.support.stores.stores import make_batch, open_store
from tests.unit.raymq.records.kernels.test_unreadable import ZSTD, stored

QUEUE = MessageQueue("orders", "a", 0)


@pytest.fixture
def fetched(tmp_path, no_flushes) -> FetchedRecords:
    """Return fetched records of ten messages at offsets 0 to 9. The last message has the tag BBBB. The next offset of
    the queue is 12."""
    store = open_store(tmp_path / "store")
    store.append([make_batch([b"body-%d" % number for number in range(9)]), make_batch([b"body-9"], tags="BBBB")])
    [result] = store.fetch([FetchRequest("orders", 0, 0, 100)], max_bytes=1 << 20, wait_s=0.0)
    store.close()
    return FetchedRecords(LocatedRecords.read(result.records), 12)


def part(fetched: FetchedRecords, count: int, expression: str = "*") -> PolledRecords:
    return PolledRecords(QUEUE, Subscription.parse("orders", expression), fetched, count)


def bodies(*parts: PolledRecords) -> list[bytes]:
    return [message.body for message in as_messages(decode_messages(parts))]


def test_a_slice_is_the_next_records_of_its_fetch(fetched):
    assert fetched.count == 10
    assert part(fetched, 2).next_offset == 2
    assert bodies(part(fetched, 2)) == [b"body-0", b"body-1"]
    fetched.first = 2
    assert fetched.count == 8
    assert bodies(part(fetched, 3)) == [b"body-2", b"body-3", b"body-4"]
    assert part(fetched, 7).next_offset == 9
    assert part(fetched, 8).next_offset == 12, "behind its last record, where the queue stands"


def test_columns_have_the_same_values_as_messages(fetched):
    fetched.first = 1
    parts = [part(fetched, 4)]
    table = as_table(decode_tables(parts))
    messages = as_messages(decode_messages(parts))
    assert table.schema.names == SCHEMA.names
    assert table.schema.field("body").type == pa.binary_view()
    assert as_table(decode_tables(parts, body_type="binary"), "binary").schema.field("body").type == pa.binary()
    assert table.column("body").to_pylist() == [message.body for message in messages]
    assert table.column("queue_offset").to_pylist() == [1, 2, 3, 4]
    assert set(table.column("broker_name").to_pylist()) == {"a"}
    assert as_table([]).num_rows == 0


@pytest.mark.parametrize("decode", [decode_messages, decode_tables])
def test_tags_are_compared_by_their_text(fetched, decode):
    [(_, wanted)] = decode([part(fetched, 10, "AaAa || BBBB")])
    assert len(wanted) == 1
    nothing = decode([part(fetched, 10, "AaAa")])
    assert not found(nothing)
    assert found(nothing + decode([part(fetched, 10)]))


def damage(fetched: FetchedRecords, body: bytes) -> None:
    data = bytes(fetched.records.data)
    assert data.count(body) == 1
    fetched.records = fetched.records._replace(data=data.replace(body, b"X" * len(body)))


@pytest.mark.parametrize("expression", ["*", "AaAa || BBBB"])
def test_a_message_with_a_damaged_body_is_handed_over_in_its_place(fetched, expression):
    damage(fetched, b"body-9")
    [(whole, messages)] = decode_messages([part(fetched, 10, expression)])
    assert whole.count == 10
    assert [message.queue_offset for message in messages if message.body_error is None] == list(
        range(9) if expression == "*" else []
    )
    error = messages[-1].body_error
    assert (error.queue, error.queue_offset, error.record_damaged) == (str(QUEUE), 9, False)
    assert messages[-1].tags == "BBBB"
    table = as_table(
        decode_tables([part(fetched, 10, expression)], columns=["queue_offset", "body", "error"]),
        "binary_view",
        ["queue_offset", "body", "error"],
    )
    assert table.column("queue_offset").to_pylist() == [message.queue_offset for message in messages]
    assert table.column("body").to_pylist()[-1] is None
    assert table.column("error").to_pylist() == [None] * (len(messages) - 1) + [error.reason]


@pytest.mark.parametrize("expression", ["*", "AaAa || BBBB"])
def test_a_damaged_record_is_handed_over_whatever_its_tags_are(fetched, expression):
    data = bytearray(fetched.records.data)
    data[int(fetched.records.starts[3]) + 5] ^= 1  # damage the record's magic code
    fetched.records = fetched.records._replace(data=bytes(data))
    [(_, messages)] = decode_messages([part(fetched, 10, expression)])
    [lost] = [message for message in messages if message.record_damaged]
    assert (lost.queue, lost.queue_offset, lost.tags) == (QUEUE, 3, None)
    table = as_table(decode_tables([part(fetched, 10, expression)]))
    rows = table.to_pylist()
    assert [row["queue_offset"] for row in rows] == [message.queue_offset for message in messages]
    [row] = [row for row in rows if row["queue_offset"] == 3]
    assert (row["topic"], row["broker_name"], row["queue_id"], row["body"]) == ("orders", "a", 0, None)


def test_a_table_that_raises_ends_before_the_unreadable_message(fetched):
    damage(fetched, b"body-3")
    [(some, batch)] = decode_tables([part(fetched, 10)], unreadable="raise")
    assert (some.count, some.next_offset, batch.num_rows) == (3, 3, 3)
    fetched.first = 3
    with pytest.raises(BodyUnreadableError, match=r"offset 3 of queue orders@a:0 .*CRC"):
        decode_tables([part(fetched, 2)], unreadable="raise")


def test_records_whose_sizes_do_not_add_up_are_refused(fetched):
    with pytest.raises(RecordError):
        LocatedRecords.read(bytes(fetched.records.data)[:-1])


def test_unreadable_messages_are_reported(fetched):
    damage(fetched, b"body-3")
    for decode in (decode_messages, decode_tables):
        told: list[BodyUnreadableError] = []
        decode([part(fetched, 10)], on_unreadable=told.append)
        [error] = told
        assert (error.queue, error.queue_offset, error.record_damaged) == (str(QUEUE), 3, False)


def test_a_table_ends_where_its_decompressed_bodies_fill_the_budget(monkeypatch):
    monkeypatch.setattr("raymq.client.consumer.pull.fetched_records.DECOMPRESSED_MAX_BYTES", 3 << 20)
    bodies = [compress(bytes([number]) * (1 << 20), CompressionType.ZSTD) for number in range(8)]
    records, queue = stored(bodies, dict.fromkeys(range(8), ZSTD)), MessageQueue("orders", "a", 5)
    first, counts = 0, []
    while first < 8:
        slices = [
            PolledRecords(queue, Subscription.parse("orders"), FetchedRecords(records, 48, at), min(2, 8 - at))
            for at in range(first, 8, 2)
        ]
        parts = decode_tables(slices)
        assert [part.count for part, _ in parts] == [batch.num_rows for _, batch in parts]
        counts.append(as_table(parts).num_rows)
        first += counts[-1]
    assert counts == [3, 3, 2]
