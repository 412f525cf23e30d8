"""Queries about the queues of one store: bounds, times, sequences, sizes.

This module is for queries that concern queues and change nothing. StoreQueries finds messages in the log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from raymq.common.protocol.bounds import BoundedTopic, TopicBacklog
from raymq.common.protocol.store import Boundary, QueueBounds, QueuePosition, QueueSpan
from raymq.records.logfiles.span_bytes import span_bytes
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.read.queries import StoreQueries

_MEMORY_BYTES: Final = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class QueueQueries:
    """Queries about the queues of one store. Thread-safe. Only `next_sequences` takes the append lock.

    Each method except `in_memory` raises ServiceNotAvailableError if the store is closed, or must not be read now.
    """

    def __init__(self, parts: StoreParts, queries: StoreQueries, check: Callable[[], None]) -> None:
        """`check` raises ServiceNotAvailableError if the store must not be read now."""
        self._settings, self._log, self._queues = parts.settings, parts.log, parts.queues
        self._parts, self._queries, self._check = parts, queries, check

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Return the range of queue offsets that consumers may read; zeros for a queue that does not exist."""
        self._check()
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return QueueBounds(0, 0, 0)
        min_offset, max_offset = queue.first_readable_offset, queue.visible_offset
        first_in_memory = queue.first_at_or_after(max(self._first_in_memory, 0))
        return QueueBounds(min_offset, max_offset, min(max(first_in_memory, min_offset), max_offset))

    def bounds_of_topics(self, topics: Sequence[tuple[str, int]]) -> list[list[tuple[int, int]]]:
        """Return, for several topics, the first and the next visible offset of their queues 0, 1 and so on.

        `topics`: each topic with its number of queues. Returns zeros for a queue that does not exist. The query is
        cheap, because it reads no files.
        """
        self._check()
        get, bounds = self._queues.get, []
        for topic, queues in topics:
            found = [get(topic, queue_id) for queue_id in range(queues)]
            bounds.append([(0, 0) if q is None else (q.first_readable_offset, q.visible_offset) for q in found])
        return bounds

    def backlogs(self, bounds: Sequence[BoundedTopic]) -> list[TopicBacklog]:
        """Measure the backlogs of bounded topics, each for the group with the largest backlog, in messages and bytes.

        Messages that are written and not yet visible count, because they take room. The bytes of a long backlog are
        estimated from samples (span_bytes); without a limit in bytes they are not computed, and are 0.
        """
        self._check()
        return [self._backlog(bound) for bound in bounds]

    def _backlog(self, bound: BoundedTopic) -> TopicBacklog:
        get = self._queues.get
        queues = [get(bound.topic, queue_id) for queue_id in range(bound.queues)]
        firsts = [0 if queue is None else queue.first_readable_offset for queue in queues]
        ends = [0 if queue is None else queue.next_offset for queue in queues]
        visible = [0 if queue is None else queue.visible_offset for queue in queues]
        measured: list[tuple[str, int, int]] = []
        for group, committed in (bound.committed or {"": {}}).items():
            starts = [max(committed.get(queue_id, 0), first) for queue_id, first in enumerate(firsts)]
            messages = sum(max(end - start, 0) for start, end in zip(starts, ends, strict=True))
            size = 0
            if bound.max_bytes is not None:
                for queue_id, (start, end) in enumerate(zip(starts, ends, strict=True)):
                    if start < end:
                        size += sum(span_bytes(self._parts.reader, bound.topic, queue_id, start, end))
            measured.append((group, messages, size))
        largest = max(measured, key=lambda one: one[1:])
        return TopicBacklog(bound.topic, *largest, list(zip(firsts, visible, strict=True)))

    def stored_times(self, positions: Sequence[QueuePosition]) -> list[int]:
        """Return the store time, in ms since 1970, of the message at each queue position.

        If retention has deleted a message, the store time of the queue's first existing message is returned instead.
        The time is 0 if the queue has no message.
        """
        self._check()
        times = []
        for topic, queue_id, offset in positions:
            queue = self._queues.get(topic, queue_id)
            times.append(0 if queue is None else self._queries.stored_ms(queue, offset))
        return times

    def next_sequences(self, producer_id: str, epoch: int, queues: Sequence[tuple[str, int]]) -> list[int]:
        """Return a producer's next sequence number for each queue (topic, queue id): one more than the last sequence
        number that the producer has stored in the queue.

        Counts only messages that consumers may read, because later messages could still be lost
        (`DedupTable.next_sequence`).

        Raises ClientStateError if a producer instance with a newer epoch has written to one of the queues.
        """
        self._check()
        found = []
        with self._parts.append_lock:
            for topic, queue_id in queues:
                queue = self._queues.get(topic, queue_id)
                visible = 0 if queue is None else queue.visible_offset
                found.append(self._parts.dedup.next_sequence(producer_id, epoch, topic, queue_id, visible))
        return found

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """Return the queue offset for a store time, always within the queue's bounds
        (StoreQueries.offset_by_time)."""
        self._check()
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        offset = self._queries.offset_by_time(queue, timestamp_ms, boundary)
        if isinstance(queue, ConsumeQueue) and queue.compacted is not None and offset == queue.min_offset:
            return min(offset, queue.compacted.offset_by_time(timestamp_ms, boundary))
        return offset

    def bytes_of_span(self, span: QueueSpan) -> list[int]:
        """Divide an offset range of a queue into equal parts. Return the number of bytes of the records in each part
        (raymq.records.logfiles.own_records)."""
        self._check()
        return span_bytes(self._parts.reader, *span)

    @property
    def _first_in_memory(self) -> int:
        """Return the physical offset from which the log's records are probably in memory."""
        return self._log.end_offset - _MEMORY_BYTES * self._settings.access_message_in_memory_max_ratio // 100

    def in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """True if a queue's messages from an offset on are probably in memory
        (access_message_in_memory_max_ratio)."""
        if self._first_in_memory <= self._log.min_offset:
            return True
        queue = self._queues.get(topic, queue_id)
        return queue is None or queue_offset >= min(
            queue.first_at_or_after(self._first_in_memory), queue.visible_offset
        )
