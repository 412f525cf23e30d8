"""Tests of dispatching the log's records again, many records at a time (a block). The result must equal that of
dispatching them one by one. In particular, recovery must still find missing consume-queue entries (units), deleted
topics, and producers that the store must forget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from raymq.common.delay import DELAY_LEVELS_MS
from raymq.common.message import Message
from raymq.records.format.check import record_starts
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import ProducerSequence, encode_batch
from raymq.records.format.layout import encode_host
from raymq.records.kernels.stamp import stamp
from storage.dispatch.batch_dispatch import QueueGapError
from storage.dispatch.dedup import DedupTable
from storage.dispatch.delivery_progress import DeliveryProgress
from storage.dispatch.record_blocks import Block, read_block
from storage.dispatch.redispatch import Redispatch


@dataclass
class Queue:
    next_offset: int = 0
    first_offset: int = 0
    max_physical_offset: int = -1


@dataclass
class Queues:
    """Fake queue table with the methods that a scan of the log calls."""

    queues: dict[tuple[str, int], Queue] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    on_disk: bool = True

    def get_plain(self, topic: str, queue_id: int) -> Queue | None:
        return self.queues.get((topic, queue_id))

    def holds_batches(self, topic: str, queue_id: int) -> bool:
        return False

    def get_or_create(self, topic: str, queue_id: int) -> Queue:
        return self.queues.setdefault((topic, queue_id), Queue())

    def was_deleted_after(self, key: tuple[str, int], physical_offset: int) -> bool:
        return physical_offset < self.deleted.get(key[0], 0)

    def has_deletions_after(self, topic: str, physical_offset: int) -> bool:
        return physical_offset < self.deleted.get(topic, 0)

    def has_topic(self, topic: str) -> bool:
        return self.on_disk


def records(*rows: tuple[str, int, str, int]) -> bytes:
    """Return one record for each row (topic, queue offset, producer, sequence number)."""
    data = bytearray()
    for topic, queue_offset, producer, sequence in rows:
        batch = encode_batch(
            [Message(topic, b"x")], 0, born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=["0" * 32],
            producer=ProducerSequence(producer, 0, sequence),
        )  # fmt: skip
        record = bytearray(batch.records)
        stamp(
            record, batch.sizes, first_queue_offset=queue_offset, first_physical_offset=len(data), store_timestamp_ms=2,
            store_host=encode_host("127.0.0.1", 2),
        )  # fmt: skip
        data += record
    return bytes(data)


def block_of(data: bytes) -> Block:
    # The block starts at 1 MiB of the log, so that every queue offset in these tests is plausible.
    block = read_block(memoryview(data), 0, 1 << 20, check_crc=True, delay_levels_ms=DELAY_LEVELS_MS)
    assert block is not None
    return block


def walk(queues: Any, dedup: DedupTable, *, after_crash: bool = True) -> Redispatch:
    return Redispatch(queues, dedup, DeliveryProgress(), after_crash=after_crash)


def test_a_record_that_does_not_fit_its_queue_is_a_misfit_alone_and_in_a_block() -> None:
    fits = records(("orders", 4, "p", 0), ("orders", 5, "p", 1), ("new", 0, "p", 0))
    misfits = {
        "ahead of its queue": records(("orders", 5, "p", 0)),
        "a new queue that begins in its middle": records(("new", 1, "p", 0)),
        "a repeat": records(("orders", 4, "p", 0), ("orders", 4, "p", 1)),
        "before its queue": records(("orders", 1, "p", 0)),
    }
    for data in (fits, *misfits.values()):
        queues = Queues({("orders", 0): Queue(next_offset=4, first_offset=2)})
        redispatch = walk(queues, DedupTable(10))
        assert redispatch.put_block(block_of(data), 0, may_fill_gaps=True, believes_places=False) == (data == fits)
        redispatch = walk(queues, DedupTable(10))
        *before, last = record_starts(data).tolist()
        for start in before:
            assert not redispatch.places.is_misfit(dispatch_view(data, start), start)
            redispatch.put_record(dispatch_view(data, start), start, may_fill_gaps=True)
        assert redispatch.places.is_misfit(dispatch_view(data, last), last) == (data != fits)


def test_a_record_without_a_unit_is_a_misfit_after_a_clean_stop() -> None:
    data = records(("orders", 4, "p", 0))
    redispatch = walk(Queues({("orders", 0): Queue(next_offset=4)}), DedupTable(10), after_crash=False)
    assert not redispatch.places.is_misfit(dispatch_view(data), 0)
    redispatch.ends.queues_reach(1000)
    assert redispatch.places.is_misfit(dispatch_view(data), 0)
    assert not redispatch.put_block(block_of(data), 0, may_fill_gaps=True, believes_places=False)


def test_a_block_with_an_offset_before_the_queue_s_first_unit_is_left_to_the_careful_way() -> None:
    data = records(("orders", 3, "p", 0), ("orders", 4, "p", 1))
    queues = Queues({("orders", 0): Queue(next_offset=10, first_offset=4)})
    redispatch = walk(queues, DedupTable(10))
    assert not redispatch.put_block(block_of(data), 0, may_fill_gaps=False)
    with pytest.raises(QueueGapError, match="has lost the entry of offset 3"):
        redispatch.put_record(dispatch_view(data), 0, may_fill_gaps=False)
    assert redispatch.put_block(block_of(data), 0, may_fill_gaps=True)


def test_producers_of_a_topic_that_is_gone_after_a_clean_stop_are_not_remembered() -> None:
    dedup = DedupTable(10)
    redispatch = walk(Queues(on_disk=False), dedup, after_crash=False)
    redispatch.ends.queues_reach(1 << 30)
    assert redispatch.put_block(block_of(records(("orders", 0, "p", 0))), 0, may_fill_gaps=True)
    assert (redispatch.queued, dedup.rows()) == (0, [])


def test_producers_of_a_topic_deleted_in_the_middle_of_a_block_are_left_to_the_careful_way() -> None:
    data = records(("orders", 0, "p", 0), ("orders", 1, "p", 1))
    dedup = DedupTable(10)
    redispatch = walk(Queues(deleted={"orders": 1}), dedup)
    assert not redispatch.remember_block(block_of(data), 0)
    assert not redispatch.put_block(block_of(data), 0, may_fill_gaps=True)
    assert not dedup.rows()


@pytest.mark.parametrize("room", [2, 3])
def test_a_producer_is_forgotten_when_it_is_its_turn(room: int) -> None:
    data = records(("a", 0, "p", 0), ("b", 0, "q", 0), ("c", 0, "r", 0), ("a", 1, "p", 1))
    singly, together = DedupTable(room), DedupTable(room)
    for start in record_starts(data).tolist():
        walk(Queues(), singly).remember_record(dispatch_view(data, start), start)
    block = block_of(data)
    redispatch = walk(Queues(), together)
    if redispatch.remember_block(block, 0):
        assert together.rows() == singly.rows()
        assert room == 3
    else:
        assert not together.rows()
        assert room == 2


def test_a_known_run_of_sequences_is_extended() -> None:
    known = DedupTable(10)
    known.record_messages(ProducerSequence("p", 0, 0), "a", 0, 2, 0)
    assert walk(Queues(), known).remember_block(block_of(records(*(("a", n, "p", n) for n in range(5)))), 0)
    assert known.rows()[0].ranges == [(0, 5, 0)]
    assert np.array_equal(known.stored_prefix(ProducerSequence("p", 0, 3), "a", 0, 4), [3, 4])
