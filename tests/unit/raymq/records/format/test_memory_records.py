"""Tests of MemoryRecords, which holds encoded records back to back in memory. The records are found, truncated, joined
and marked as failed without being decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from raymq.common.message import Message
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import FLAG_OFFSET, RecordError
from raymq.records.format.memory_records import LocatedRecords, MemoryRecords, join_records
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.columns import decode_columns
from raymq.records.kernels.messages import read_messages
from raymq.records.kernels.stamp import stamp
from tests.support.clients.records import RECORD_BYTES, records_of
from tests.unit.raymq.records.kernels.test_unreadable import QUEUE, flip, stored


def stored_records(*bodies: bytes, ip: str = "127.0.0.1", sealed: bool = False) -> MemoryRecords:
    batch = encode_batch(
        [Message("orders", body) for body in bodies],
        0,
        born_host=(ip, 5000),
        born_timestamp_ms=1,
        message_ids=["A"] * len(bodies),
        append_prop_crc=sealed,
    )
    data = bytearray(batch.records)
    stamp(
        data,
        batch.sizes,
        first_queue_offset=7,
        first_physical_offset=0,
        store_timestamp_ms=1,
        store_host=bytes(8),
    )
    return MemoryRecords.read(bytes(data))


def bodies(records: MemoryRecords) -> list[bytes]:
    return [message.body for message in decode_records(records.data)]


def test_each_record_and_its_offset_is_found():
    records = stored_records(b"a", b"bb", b"ccc")
    assert list(records.offsets) == [7, 8, 9]
    assert [records.starts[i + 1] - records.starts[i] for i in range(3)] == [
        n + records.starts[1] - 1 for n in (1, 2, 3)
    ]
    assert MemoryRecords.read(b"") == MemoryRecords(b"", [0], [])


def test_records_whose_sizes_do_not_add_up_are_refused():
    records = stored_records(b"a", b"bb")
    with pytest.raises(RecordError, match="ends at byte"):
        MemoryRecords.read(records.data[:-1])


def test_a_part_and_a_choice_are_whole_records():
    records = stored_records(b"a", b"bb", b"ccc")
    assert bodies(records.part(1, 3)) == [b"bb", b"ccc"]
    assert records.part(0, 3) is records
    chosen = records.pick({2, 0})
    assert (bodies(chosen), list(chosen.offsets)) == ([b"a", b"ccc"], [7, 9])
    assert MemoryRecords.read(chosen.data) == chosen


def test_records_are_joined_in_order():
    joined = join_records([records_of([1, 2]), records_of([9])])
    assert joined == records_of([1, 2, 9])
    assert joined.size_bytes == 3 * RECORD_BYTES


@pytest.mark.parametrize("sealed", [False, True], ids=["", "property CRC"])
@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_failed_message_has_its_reconsume_times_when_decoded(ip, sealed):
    records = stored_records(b"a", b"bb", ip=ip, sealed=sealed)
    failed = records.failed_once_more([1]).failed_once_more([1])
    assert [message.reconsume_times for message in decode_records(failed.data)] == [0, 2]
    assert [failed.reconsume_times(index) for index in (0, 1)] == [0, 2]


def test_a_damaged_message_that_failed_stays_a_damaged_one():
    records = stored_records(b"a", sealed=True)
    data = bytearray(records.data)
    data[FLAG_OFFSET] ^= 1
    failed = replace(records, data=bytes(data)).failed_once_more([0])
    with pytest.raises(RecordError, match="property CRC"):
        decode_records(failed.data)


def fetched(count: int, damage: dict[int, Callable[[bytearray, int], None]], first: int = 40) -> LocatedRecords:
    """Return a fetch result of `count` records from queue offset `first` on. `damage` maps the index of a record to a
    function that damages the record."""
    located = stored([b"%06d" % number * (1 + number % 3) for number in range(count)])
    data = bytearray(located.data)
    for row, change in damage.items():
        change(data, int(located.starts[row]))
    return LocatedRecords.of_fetch(bytes(data), count, first, first + count)


@pytest.mark.parametrize("offset", [0, 2, 3, 5, 23, 27, 87, 94])
@pytest.mark.parametrize("rows", [[0], [3], [9], [2, 5], [4, 5, 6], [0, 1, 8, 9], list(range(10))])
def test_records_of_a_fetch_have_their_offsets_whatever_is_damaged(offset: int, rows: list[int]) -> None:
    intact = fetched(10, {})
    found = fetched(10, dict.fromkeys(rows, flip(offset)))
    assert found.offsets.tolist() == list(range(40, 50))
    for row in set(range(10)) - set(rows):
        assert (found.starts[row], found.sizes[row]) == (intact.starts[row], intact.sizes[row])
    messages = read_messages(found.data, found.starts, broker_name="a", places=RecordPlaces.of(QUEUE, found))
    assert [message.queue_offset for message in messages] == list(range(40, 50))
    assert {row for row, message in enumerate(messages) if message.body_error is not None} == set(rows)


def test_a_fetch_that_left_messages_out_has_the_intact_ones() -> None:
    """Each intact message in the result of a fetch is found at its own queue offset, even if the fetch left out
    messages of the queue. In this test the fetch returned only the messages at even offsets, and two of these are
    damaged."""
    located = stored([b"%06d" % number for number in range(20)]).pick(np.arange(0, 20, 2))
    data = bytearray(located.joined())
    size = int(located.sizes[0])
    for row in (3, 7):
        flip(3)(data, row * size)
    found = LocatedRecords.of_fetch(bytes(data), 10, 40, 60)
    messages = read_messages(found.data, found.starts, broker_name="a", places=RecordPlaces.of(QUEUE, found))
    intact = [message.queue_offset for message in messages if message.body_error is None]
    assert intact == [40 + row for row in range(0, 20, 2) if row not in (6, 14)]
    assert (np.diff(found.offsets) > 0).all()
    assert len(messages) == 10


def test_messages_that_have_no_bytes_are_damaged_records() -> None:
    located = stored([b"%06d" % number for number in range(3)])
    for data, count in ((bytes(located.data), 20), (b"", 20), (b"", 2)):
        found = LocatedRecords.of_fetch(data, count, 40, 40 + count)
        messages = read_messages(found.data, found.starts, broker_name="a", places=RecordPlaces.of(QUEUE, found))
        assert [message.queue_offset for message in messages] == list(range(40, 40 + count))
        assert sum(message.record_damaged for message in messages) == count - (3 if data else 0)
        table = decode_columns(
            found.data,
            found.starts,
            broker_name="a",
            places=RecordPlaces.of(QUEUE, found),
            columns=["queue_offset", "error"],
        )
        assert table.column("error").null_count == (3 if data else 0)


def test_nothing_fetched_is_nothing() -> None:
    assert len(LocatedRecords.of_fetch(b"", 0, 5, 9).starts) == 0
