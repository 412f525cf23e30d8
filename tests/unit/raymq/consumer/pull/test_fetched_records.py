"""Polls decode fetched records: messages or columns, partly taken records, damage."""

from __future__ import annotations

import pyarrow as pa
import pytest

from raymq.consumer.pull.fetched_records import (
    FetchedRecords,
    PolledRecords,
    as_messages,
    as_table,
    decode_messages,
    decode_tables,
    found,
)
from raymq.consumer.subscription import Subscription
from raymq.errors import StoreCorruptError
from raymq.kernels.columns import SCHEMA
from raymq.message import MessageQueue
from raymq.protocol.store import FetchRequest
from raymq.record.layout import RecordError
from raymq.record.memory_records import LocatedRecords
from tests.support.stores.stores import make_batch, open_store

QUEUE = MessageQueue("orders", "a", 0)


@pytest.fixture
def fetched(tmp_path, no_flushes) -> FetchedRecords:
    """Ten messages at offsets 0 to 9, the last with the tag BBBB; behind them the queue stands at 12."""
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


def test_columns_say_the_same_as_messages(fetched):
    fetched.first = 1
    parts = [part(fetched, 4)]
    table = as_table(decode_tables(parts))
    messages = as_messages(decode_messages(parts))
    assert table.schema.names == SCHEMA.names
    assert table.schema.field("body").type == pa.binary_view()
    assert as_table(decode_tables(parts, "binary"), "binary").schema.field("body").type == pa.binary()
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


def test_messages_before_a_damaged_one_are_decoded(fetched):
    damage(fetched, b"body-3")
    [(intact, messages)] = decode_messages([part(fetched, 10), part(fetched, 10)])
    assert [message.body for message in messages] == [b"body-0", b"body-1", b"body-2"]
    assert intact.count == 3
    assert intact.next_offset == 3


@pytest.mark.parametrize("decode", [decode_messages, decode_tables])
def test_a_damaged_message_that_comes_first_is_an_error(fetched, decode):
    damage(fetched, b"body-3")
    fetched.first = 3
    with pytest.raises(StoreCorruptError, match=r"orders@a:0.*queue offset 3 is damaged"):
        decode([part(fetched, 2)])


def test_records_whose_sizes_do_not_add_up_are_refused(fetched):
    with pytest.raises(RecordError):
        LocatedRecords.read(bytes(fetched.records.data)[:-1])
