"""Whole records back to back: found, cut, joined and marked as failed without being decoded."""

from __future__ import annotations

import pytest

from raymq.kernels.stamp import stamp
from raymq.message import Message
from raymq.record.decode import decode_records
from raymq.record.encode import encode_batch
from raymq.record.layout import RecordError
from raymq.record.memory_records import MemoryRecords, join_records
from tests.support.clients.records import RECORD_BYTES, records_of


def stored_records(*bodies: bytes, ip: str = "127.0.0.1") -> MemoryRecords:
    batch = encode_batch(
        [Message("orders", body) for body in bodies],
        0,
        born_host=(ip, 5000),
        born_timestamp_ms=1,
        message_ids=["A"] * len(bodies),
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
    with pytest.raises(RecordError, match="end at byte"):
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


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_message_that_failed_says_so_when_it_is_decoded(ip):
    records = stored_records(b"a", b"bb", ip=ip)
    failed = records.failed_once_more([1]).failed_once_more([1])
    assert [message.reconsume_times for message in decode_records(failed.data)] == [0, 2]
    assert [failed.reconsume_times(index) for index in (0, 1)] == [0, 2]
