"""Tests of the state of one process queue, message by message (spec/messaging.md §5.5)."""

from __future__ import annotations

from actors.core.consume.process_queue import ProcessQueue
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import QueueOffset
from tests.support.clients.records import RECORD_BYTES, records_of

Q = MessageQueue("orders", "broker-a", 0)


def test_messages_are_taken_across_runs_and_in_order():
    process_queue = ProcessQueue(Q)
    process_queue.start(QueueOffset(0))
    process_queue.fetched(records_of([0, 1]), 2, 1.0)
    process_queue.fetched(records_of([2, 3, 4]), 5, 2.0)
    first = process_queue.take_waiting(3)
    assert (list(first.messages.offsets), first.fetched_s) == ([0, 1, 2], 1.0)
    assert process_queue.waiting_count == 2
    rest = process_queue.take_waiting(99)
    assert (list(rest.messages.offsets), rest.fetched_s) == ([3, 4], 2.0)
    assert not process_queue.waiting_since_s


def test_bytes_and_messages_count_until_they_are_finished():
    process_queue = ProcessQueue(Q)
    process_queue.start(QueueOffset(10))
    process_queue.fetched(records_of([10, 11, 12]), 13, 0.0)
    task = process_queue.take_waiting(3)
    assert (process_queue.count, process_queue.size_bytes) == (3, 3 * RECORD_BYTES)
    process_queue.finish(task, {1})
    assert (process_queue.count, process_queue.size_bytes, process_queue.commit_offset) == (2, 2 * RECORD_BYTES, 10)
    process_queue.finish(task, {0, 2})
    assert (process_queue.count, process_queue.size_bytes, process_queue.commit_offset) == (0, 0, 13)
    assert task.unfinished == set()


def test_without_messages_everything_read_is_committed():
    process_queue = ProcessQueue(Q)
    assert process_queue.commit_offset == 0
    process_queue.start(QueueOffset(10))
    process_queue.fetched(records_of([]), 20, 0.0)
    assert process_queue.commit_offset == 20
