"""Runs of whole records: found, cut, joined and marked as failed without being decoded."""

from __future__ import annotations

import pytest

from actors.core.consume.message_run import MessageRun, join
from raymq.message import Message
from raymq.record.decode import decode_records
from raymq.record.encode import encode_batch
from raymq.record.stamp import stamp
from tests.support.clients.records import RECORD_BYTES, run_of


def real_run(*bodies: bytes, ip: str = "127.0.0.1") -> MessageRun:
    batch = encode_batch(
        [Message("orders", body) for body in bodies],
        0,
        born_host=(ip, 5000),
        born_timestamp_ms=1,
        message_ids=["A"] * len(bodies),
    )
    records = bytearray(batch.records)
    stamp(
        records,
        batch.sizes,
        first_queue_offset=7,
        first_physical_offset=0,
        store_timestamp_ms=1,
        store_host=bytes(8),
    )
    return MessageRun.read(bytes(records))


def bodies(run: MessageRun) -> list[bytes]:
    return [message.body for message in decode_records(run.records)]


def test_each_record_and_its_offset_is_found():
    run = real_run(b"a", b"bb", b"ccc")
    assert list(run.offsets) == [7, 8, 9]
    assert [run.starts[i + 1] - run.starts[i] for i in range(3)] == [n + run.starts[1] - 1 for n in (1, 2, 3)]
    assert MessageRun.read(b"").offsets == []


def test_a_part_and_a_choice_are_whole_records():
    run = real_run(b"a", b"bb", b"ccc")
    assert bodies(run.part(1, 3)) == [b"bb", b"ccc"]
    assert run.part(0, 3) is run
    chosen = run.pick({2, 0})
    assert (bodies(chosen), list(chosen.offsets)) == ([b"a", b"ccc"], [7, 9])
    assert MessageRun.read(chosen.records) == chosen


def test_runs_are_joined_in_order():
    joined = join([run_of([1, 2]), run_of([9])])
    assert joined == run_of([1, 2, 9])
    assert joined.size_bytes == 3 * RECORD_BYTES


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_message_that_failed_says_so_when_it_is_decoded(ip):
    run = real_run(b"a", b"bb", ip=ip)
    failed = run.failed_once_more([1]).failed_once_more([1])
    assert [message.reconsume_times for message in decode_records(failed.records)] == [0, 2]
    assert [failed.reconsume_times(index) for index in (0, 1)] == [0, 2]
