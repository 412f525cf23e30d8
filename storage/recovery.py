"""What a store does to its files before it serves: find the good end of the log, and make the queues agree with it.

spec/storage.md §5, with a shorter walk where a snapshot allows it (snapshot.py). The consume queues are read up to
their first unit that was never written. Then a newest part of the
log is walked, record by record: after a clean stop from the newest file whose first record is in a queue, after a crash
from the newest file whose first record is older than the checkpoint. The log ends before the first record that fails
its checks. Records that are missing in their queue are put there; units that point behind the log's end are removed.

Where RocketMQ guesses, this does not:

- A record whose queue offset is beyond its queue's end shows that units are lost which the walk does not reach (a queue
  directory was deleted). RocketMQ appends the unit at the wrong queue offset; here the walk starts again at the first
  file.
- A record's CRC covers its body only. A record is not good either whose properties end in a zero byte (a power failure
  between two sectors cut it), whose topic cannot be a directory, or whose queue offset is more than the records that
  fit in the log before it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from raymq.delay import delivery_source
from raymq.log_reader import LogReader
from raymq.record import DispatchView, RecordError, check_record, dispatch_view
from raymq.record_layout import (
    HEADERS,
    MIN_RECORD_SIZE,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from storage import disk
from storage.checkpoint import Checkpoint
from storage.commit_log import CommitLog
from storage.consume_queue import ConsumeQueue
from storage.dedup import DedupTable
from storage.deliveries import Deliveries
from storage.queue_table import QueueTable
from storage.snapshot import Snapshot

logger = logging.getLogger(__name__)

_UNITS_HELD: Final = 4096
_NOT_QUEUED: Final = (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)


_INNER_BATCH: Final = 0x80
"""Such a record is in a batch consume queue, which this store leaves alone."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery found and did. `text` says it in words; the store logs it and shows it in its status."""

    text: str
    cut_bytes: int
    last_store_timestamp_ms: int
    last_record_offset: int


class _QueueGapError(Exception):
    """Units are missing that the walk does not reach."""


@dataclass(slots=True)
class _Missing:
    """Units found to be missing at the end of one queue, in order, not written yet."""

    queue: ConsumeQueue
    physical_offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    tags_codes: list[int] = field(default_factory=list)

    def write(self) -> None:
        if self.sizes:
            self.queue.reserve(len(self.sizes))
            self.queue.append_scattered(
                np.array(self.physical_offsets, np.int64),
                np.array(self.sizes, np.int32),
                np.array(self.tags_codes, np.int64),
            )
            for column in (self.physical_offsets, self.sizes, self.tags_codes):
                column.clear()


class Recovery:
    """One recovery of one store. `run` leaves the log open for appending and the queues at their ends."""

    def __init__(
        self,
        commit_log: CommitLog,
        queues: QueueTable,
        dedup: DedupTable,
        reader: LogReader,
        checkpoint: Checkpoint,
        snapshot: Snapshot | None,
        *,
        after_crash: bool,
        check_crc: bool,
        check_property_crc: bool,
        deliveries: Deliveries,
        delay_levels_ms: tuple[int, ...],
    ) -> None:
        self._log, self._queues, self._dedup, self._reader = commit_log, queues, dedup, reader
        self._checkpoint, self._snapshot = checkpoint, snapshot
        self._after_crash = after_crash
        # The property CRC covers the whole record: with it, the body's own says nothing more.
        self._checks = {"check_crc": check_crc and not check_property_crc, "check_property_crc": check_property_crc}
        self._deliveries, self._delay_levels_ms = deliveries, delay_levels_ms
        self._missing: dict[tuple[str, int], _Missing] = {}
        self._dispatched_end = -1
        self._last_store_timestamp_ms = 0
        self._last_record_offset = -1
        self._queues_were_lost = False
        self._walked_from = 0
        self._walked = 0
        self._queued = 0

    def run(self) -> Recovered:
        """Recover. Nothing is lost but what is behind the first bad record of the part that is walked."""
        if not self._log.starts:
            return self._without_log()
        try:
            end_offset = self._walk_from(self._start_of_walk())
        except _QueueGapError as gap:
            logger.warning("%s; walking the whole log to make its queues again", gap)
            self._missing.clear()
            if self._after_crash:
                self._cut_queues_at(self._log.min_offset)
            end_offset = self._walk_from(self._log.min_offset)
        units_cut = sum(queue.truncate_from(end_offset) for queue in self._queues)
        cut_bytes = self._log.open_for_append(end_offset)
        self._queues.end_deletions_at(end_offset)
        for start in self._log.starts:
            if start + self._log.file_size > self._walked_from:
                # What the process before wrote may still be in memory only, and counts as flushed from here on.
                disk.flush_path(self._log.path(start))
        for queue in self._queues:
            queue.correct_min_offset(self._log.min_offset)
            queue.visible_offset = queue.next_offset
        text = self._describe(end_offset, cut_bytes, units_cut)
        logger.log(
            logging.WARNING if cut_bytes or units_cut else logging.INFO, "%s: %s", self._log.directory.parent, text
        )
        return Recovered(text, cut_bytes, self._last_store_timestamp_ms, self._last_record_offset)

    def _without_log(self) -> Recovered:
        text = "new and empty"
        if len(self._queues):
            text = f"no commit log: {len(self._queues)} queues deleted"
            logger.warning("%s: %s", self._log.directory.parent, text)
            self._queues.delete_all()
        self._log.open_for_append(0)
        return Recovered(text, 0, 0, -1)

    def _describe(self, end_offset: int, cut_bytes: int, units_cut: int) -> str:
        text = f"opened after {'a crash' if self._after_crash else 'a clean stop'}: {self._walked} records checked"
        if self._queued:
            text += f", {self._queued} put into their queues again"
        if units_cut:
            text += f", {units_cut} queue units behind the log's end removed"
        if cut_bytes:
            text += f", {cut_bytes} bytes cut behind physical offset {end_offset}, the end of the last good record"
        return text

    def _start_of_walk(self) -> int:
        """The physical offset to walk from. Also finds the ends of the queues, and fills the dedup table with what is
        known before that offset."""
        snapshot = self._snapshot if self._snapshot is not None and self._snapshot.fits(self._reader) else None
        if self._after_crash:
            walk_from = self._log.starts[self._first_file_to_walk()] if snapshot is None else snapshot.end
            self._cut_queues_at(walk_from)
        else:
            for queue in self._queues:
                queue.recover()
                self._dispatched_end = max(self._dispatched_end, queue.max_physical_offset)
        self._queues.finish_deletions()
        if snapshot is not None:
            self._use_snapshot(snapshot)
            return snapshot.end
        index = self._first_file_to_walk()
        if index > 0:
            # Not checked and not dispatched: it only tells which messages producers may send again.
            self._remember_producers(self._log.starts[index - 1])
        return self._log.starts[index]

    def _cut_queues_at(self, physical_offset: int) -> None:
        """Take from the queues what the walk from `physical_offset` on will put there again."""
        for queue in self._queues:
            queue.recover_until(physical_offset)

    def _use_snapshot(self, snapshot: Snapshot) -> None:
        """Take over what the snapshot knows of the log before its end."""

        def is_deleted(topic: str) -> bool:
            return self._queues.was_deleted_after(topic, snapshot.end - 1)

        for topic, queue_id, next_offset in snapshot.queues:
            queue = self._queues.get(topic, queue_id)
            found = 0 if queue is None else queue.next_offset
            if found < next_offset and not is_deleted(topic):
                self._queues_were_lost = True
                raise _QueueGapError(
                    f"queue {topic}:{queue_id} ends at offset {found}, but it had reached {next_offset}"
                )
        for row in snapshot.producers:
            if not is_deleted(row.topic):
                self._dedup.load(row)
        self._last_record_offset = snapshot.last
        last = dispatch_view(self._reader.log_bytes(snapshot.last, snapshot.end))
        self._last_store_timestamp_ms = last.store_timestamp_ms

    def _first_file_to_walk(self) -> int:
        """The index of the newest file whose first record matches (spec §5, file match test), else 0."""
        for index in range(len(self._log.starts) - 1, 0, -1):
            data = self._data(self._log.starts[index])
            size, good = check_record(data, 0, **self._checks)
            if not good or size <= 0:
                continue
            try:
                first = dispatch_view(data, 0)
            except RecordError:
                continue
            if first.store_timestamp_ms == 0:
                continue
            if self._after_crash:
                if first.store_timestamp_ms <= self._checkpoint.min_timestamp:
                    return index
            elif first.physical_offset <= self._dispatched_end:
                return index
        return 0

    def _data(self, start: int) -> memoryview:
        return self._reader.maps.get(str(self._log.path(start))).data

    def _walk_from(self, physical_offset: int) -> int:
        """Walk the log from the start of a record on; returns where the last good record ends."""
        self._walked_from = physical_offset
        may_fill_gaps = physical_offset == self._log.min_offset
        end_offset = physical_offset
        for start in self._log.starts:
            if start + self._log.file_size > end_offset:
                end_offset, complete = self._walk_file(start, end_offset - start, may_fill_gaps=may_fill_gaps)
                if not complete:
                    break
        for missing in self._missing.values():
            missing.write()
        return end_offset

    def _remember_producers(self, start: int) -> None:
        data, position = self._data(start), 0
        while True:
            size, good = check_record(data, position, check_crc=False)
            if not good or size <= 0:
                return
            self._remember_producer(dispatch_view(data, position), start + position)
            position += size

    def _walk_file(self, start: int, position: int, *, may_fill_gaps: bool) -> tuple[int, bool]:
        """Walk one file from `position` on: where its last good record ends, and whether the log goes on there."""
        data = self._data(start)
        while True:
            size, good = check_record(data, position, **self._checks)
            if not good:
                return start + position, False
            if size == 0:
                goes_on = start != self._log.starts[-1]
                return (start + len(data), True) if goes_on else (start + position, False)
            view = dispatch_view(data, position, delay_levels_ms=self._delay_levels_ms)
            if _is_implausible(view, start + position) or _properties_are_cut(data, position, view):
                return start + position, False
            self._dispatch(view, start + position, may_fill_gaps=may_fill_gaps)
            self._walked += 1
            self._last_record_offset = start + position
            self._last_store_timestamp_ms = max(self._last_store_timestamp_ms, view.store_timestamp_ms)
            position += size

    def _dispatch(self, view: DispatchView, physical_offset: int, *, may_fill_gaps: bool) -> None:
        """Put a good record where it belongs, if it is not there: the queue, and the dedup table."""
        if view.sys_flag & SYS_FLAG_TRANSACTION_MASK in _NOT_QUEUED or view.sys_flag & _INNER_BATCH:
            return
        missing = self._missing.get((view.topic, view.queue_id))
        if missing is None:
            if self._was_deleted(view.topic, physical_offset):
                return
            missing = _Missing(self._queues.get_or_create(view.topic, view.queue_id))
            self._missing[view.topic, view.queue_id] = missing
        gap = view.queue_offset - missing.queue.next_offset - len(missing.sizes)
        if view.queue_offset < missing.queue.first_offset and not may_fill_gaps:
            raise _QueueGapError(f"queue {view.topic}:{view.queue_id} has lost its offset {view.queue_offset}")
        if gap >= 0:
            if gap > 0:
                self._skip_lost_units(missing, view, may_fill_gaps=may_fill_gaps)
            missing.physical_offsets.append(physical_offset)
            missing.sizes.append(view.size)
            missing.tags_codes.append(view.tags_code)
            self._queued += 1
            if len(missing.sizes) >= _UNITS_HELD:
                missing.write()
        self._remember_producer(view, physical_offset)

    def _was_deleted(self, topic: str, physical_offset: int) -> bool:
        if self._queues.was_deleted_after(topic, physical_offset):
            return True
        if self._after_crash or self._queues_were_lost or physical_offset >= self._dispatched_end:
            return False
        # A clean stop, other queues are complete, this topic has none: RocketMQ deleted it, and left no other trace.
        return not self._queues.has_topic(topic)

    def _skip_lost_units(self, missing: _Missing, view: DispatchView, *, may_fill_gaps: bool) -> None:
        queue = f"{view.topic}:{view.queue_id}"
        end = missing.queue.next_offset + len(missing.sizes)
        if not may_fill_gaps:
            raise _QueueGapError(f"queue {queue} ends at offset {end}, but the log has its offset {view.queue_offset}")
        missing.write()
        if end:
            logger.error("the records of %s from offset %d to %d are lost", queue, end, view.queue_offset - 1)
        missing.queue.start_at(view.queue_offset)

    def _remember_producer(self, view: DispatchView, physical_offset: int) -> None:
        producer = view.producer
        source = None if producer is None else delivery_source(producer.producer_id)
        if producer is not None and source is not None:
            self._deliveries.advance(source, producer.epoch, producer.first_sequence + 1)
        elif producer is not None and not self._queues.was_deleted_after(view.topic, physical_offset):
            self._dedup.record(producer, view.topic, view.queue_id, 1, view.queue_offset)


def _is_implausible(view: DispatchView, physical_offset: int) -> bool:
    """Whether the record asks for a queue that cannot exist, or for a place in it that it cannot have."""
    return (
        not view.topic
        or view.topic in (".", "..")
        or not {"/", "\0"}.isdisjoint(view.topic)
        or view.queue_id < 0
        or not 0 <= view.queue_offset <= physical_offset // MIN_RECORD_SIZE
    )


def _properties_are_cut(data: memoryview, position: int, view: DispatchView) -> bool:
    """Whether a record that has properties ends in a zero byte, which no writer of properties leaves there."""
    if data[position + view.size - 1]:
        return False
    header = HEADERS[(view.sys_flag >> 4) & 3].size
    body_size = int.from_bytes(data[position + header - 4 : position + header])
    topic_size_at = position + header + body_size
    width = 1 if data[position + 7] == 0xA7 else 2
    topic_size = int.from_bytes(data[topic_size_at : topic_size_at + width])
    return topic_size_at + width + topic_size + 2 < position + view.size
