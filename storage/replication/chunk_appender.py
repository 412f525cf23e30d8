"""Appends log chunks of another replica (log_chunks.py) to the log, the queues, the dedup table and the delivery
progress.

A chunk of many ordinary records is appended as one block (record_blocks.py), a column at a time. If anything is
doubtful, the block path changes nothing, and the chunk is read record by record. The record path has the same result
and is faster for few records. It also does more. It describes errors, puts inner batches into their queues
(batch_dispatch.py) and messages into several queues (multi_dispatch.py), and deletes a topic in the middle of a chunk.
The chunk's records decide which path is used, not this store's settings, because the master may have other settings.

hole_appender.py appends the holes of the master.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from raymq.common.errors import InvalidArgumentError, RecordsDamagedError, StoreNotWritableError
from raymq.common.names import STATE_TOPIC
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.inner_batch import inner_batch
from raymq.records.format.layout import SYS_FLAG_INNER_BATCH, RecordError
from storage.append.appender import Appender
from storage.dispatch.batch_dispatch import belongs_to_batches, is_good_batch, put_batch
from storage.dispatch.block_dedup import producers_of, remember_producer
from storage.dispatch.multi_dispatch import QueueUnit, is_dispatched, light_queue_units, put_elsewhere
from storage.dispatch.record_blocks import is_queued, read_block
from storage.dispatch.record_check import is_implausible
from storage.files.disk_usage import is_want_of_space, no_space_text
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.replication.queue_gaps import PlacedUnit, QueueGaps, QueueUnits

BLOCK_RECORDS_MIN: Final = 32
"""Minimum number of records of a log chunk that is appended as a block. A smaller chunk is read record by
record."""

T = TypeVar("T")


class _Last(NamedTuple):
    """The physical offset of a log chunk's last record, and the newest store time of all its records."""

    physical_offset: int
    store_timestamp_ms: int


def parse_chunk(
    data: memoryview, physical_offset: int, file_size: int, delay_levels_ms: tuple[int, ...]
) -> list[DispatchView]:
    """Parse the records of a log chunk that will be written at `physical_offset`.

    Raises RecordsDamagedError if a record of the chunk is not complete and intact, and InvalidArgumentError if the
    chunk crosses the end of its log file.
    """
    if len(data) > file_size - physical_offset % file_size:
        raise InvalidArgumentError(
            f"a chunk of {len(data)} bytes at physical offset {physical_offset} crosses the end of its log file"
        )
    views, end = leading_records(data, physical_offset, file_size, delay_levels_ms, len(data))
    if end < len(data):
        raise RecordsDamagedError(physical_offset + end, len(data) - end)
    return views


def leading_records(
    data: memoryview, physical_offset: int, file_size: int, delay_levels_ms: tuple[int, ...], max_bytes: int
) -> tuple[list[DispatchView], int]:
    """Return the intact records at the beginning of `data`, and their total length. The first byte of `data` is at
    `physical_offset`.

    Only records that begin before `max_bytes` are returned. If a BLANK (end-of-file marker) follows, the BLANK and the
    rest of its file count towards the length.
    """
    views: list[DispatchView] = []
    position, left = 0, file_size - physical_offset % file_size
    while position < min(len(data), max_bytes):
        size, good = check_record(data, position)
        if good and size == 0 and len(data) == left:
            return views, len(data)
        try:
            view = dispatch_view(data, position, delay_levels_ms=delay_levels_ms) if good and size > 0 else None
        except RecordError:
            view = None
        if view is None or not _fits(view, physical_offset + position):
            break
        views.append(view)
        position += size
    return views, position


def _has_many(data: memoryview) -> bool:
    """True if a log chunk probably has enough records to be appended faster as a block. The estimate uses the size of
    the first record."""
    return len(data) >= BLOCK_RECORDS_MIN * int.from_bytes(data[:4])


def _fits(view: DispatchView, physical_offset: int) -> bool:
    """True if the record contains its own physical offset, and recovery would accept the record."""
    return view.physical_offset == physical_offset and not is_implausible(view, physical_offset)


class ChunkAppender:
    """Appends log chunks of another replica to a log, and their records to the queues and the dedup table."""

    def __init__(self, parts: StoreParts, appender: Appender) -> None:
        self._log, self._queues, self._dedup, self._deliveries = parts.log, parts.queues, parts.dedup, parts.deliveries
        self._halves, self._gaps = parts.halves, QueueGaps(parts)
        self._visibility, self._appender = parts.visibility, appender
        self._delay_levels_ms = parts.settings.delay_levels_ms
        self._root = parts.settings.store_path_root_dir
        self._space = parts.space
        # The messages that the current log chunk added to queues, for the store's statistics. Each item is (topic,
        # number of messages, number of bytes).
        self._puts: list[tuple[str, int, int]] = []

    def append_chunk(self, physical_offset: int, data: bytes | memoryview) -> list[tuple[str, int, int]]:
        """Write a log chunk at the log's end, which must be `physical_offset`. Called under the append lock.

        Returns the messages that were added to queues, as items of topic, number of messages and number of bytes. The
        queues may have gaps if the other replica's queues have the same gaps (QueueGaps).

        Raises InvalidArgumentError if the chunk is not complete, not intact, or does not continue the log. Raises
        StoreNotWritableError if the disk is full. In both cases nothing is written. Raises OSError if the disk fails
        during the write.

        If a record has queue offset 0 and its queue is not empty, the topic was deleted on the other replica and
        created again. This store then also deletes the topic, before it writes the record.
        """
        if physical_offset != self._log.end_offset:
            raise InvalidArgumentError(
                f"the log ends at physical offset {self._log.end_offset}, but the chunk begins at {physical_offset}"
            )
        self._puts = []
        chunk = memoryview(data)
        if not (_has_many(chunk) and self._append_block(physical_offset, chunk)):
            views = parse_chunk(chunk, physical_offset, self._log.file_size, self._delay_levels_ms)
            self._append_views(physical_offset, chunk, views)
        return self._puts

    def _append_block(self, physical_offset: int, data: memoryview) -> bool:
        """Append a log chunk as one block. Returns False, and does nothing, if the records must be read one by
        one."""
        if len(data) > self._log.file_size - physical_offset % self._log.file_size:
            return False
        # Check that the fields of each record are consistent, and that its physical offset is the offset at which it
        # will be written.
        block = read_block(data, 0, physical_offset, check_crc=True, delay_levels_ms=self._delay_levels_ms)
        if block is None or not block.is_ordinary or not self._ends_with(data, block.length, physical_offset):
            return False
        if not np.array_equal(block.physical_offsets, block.starts + physical_offset):
            return False
        counted = block.is_queued()
        producers = producers_of(block, counted)
        if not producers.fits_into(self._dedup):
            return False
        # Build the units of each queue. If the queue offsets of a queue have gaps, it gets no units here. The
        # comparison of unit counts below then fails, and the chunk is appended record by record instead of as a block.
        units = [
            QueueUnits(
                block.queue_of(rows),
                int(block.queue_offsets[rows[0]]),
                block.physical_offsets[rows],
                block.sizes[rows],
                block.tags_codes[rows],
            )
            for rows in block.by_queue(counted)
            if (np.diff(block.queue_offsets[rows]) == 1).all()
        ]
        if sum(len(one.sizes) for one in units) < np.count_nonzero(counted) or not all(map(self._continues, units)):
            return False
        self._write(physical_offset, data, _Last(int(block.physical_offsets[-1]), block.last_store_timestamp_ms), units)
        producers.remember_in(self._dedup, self._deliveries)
        return True

    def _ends_with(self, data: memoryview, position: int, physical_offset: int) -> bool:
        """True if the chunk ends at `position`. Also true if it has a BLANK (end-of-file marker) at `position` and ends
        with its log file."""
        if position == len(data):
            return True
        at_file_end = (physical_offset + len(data)) % self._log.file_size == 0
        return at_file_end and check_record(data, position) == (0, True)

    def _continues(self, units: QueueUnits) -> bool:
        """True if `units` directly follow the last unit of their queue, or begin a new queue. Always False for a queue
        of inner batches."""
        queue = self._queues.get(*units.key)
        if queue is None:
            return True
        follows = not queue.exists or queue.next_offset == units.queue_offset
        return follows and isinstance(queue, ConsumeQueue)

    def _append_views(self, physical_offset: int, data: memoryview, views: Sequence[DispatchView]) -> None:
        """Append a log chunk record by record."""
        anew = self._first_begun_anew(views)
        if anew is not None:
            first, key = anew
            split = first.physical_offset - physical_offset
            before = [view for view in views if view.physical_offset < first.physical_offset]
            self._append_views(physical_offset, data[:split], before)
            self.begin_anew(key)
            self._append_views(first.physical_offset, data[split:], views[len(before) :])
            return
        singles, batches = self._by_kind(views)
        units = self._units_of(singles)
        if not data:
            return
        last = _Last(views[-1].physical_offset, max(view.store_timestamp_ms for view in views)) if views else None
        self._write(physical_offset, data, last, units)
        for view in batches:
            self.put_batch(view)
            if belongs_to_batches(self._queues, view):
                remember_producer(view, self._dedup, self._deliveries)
        for view in views:
            position = view.physical_offset - physical_offset
            self._halves.note(view, data[position : position + view.size])
        for view in singles:
            for key in put_elsewhere(self._queues, view, view.physical_offset):
                self._show_end_of(key)
            remember_producer(view, self._dedup, self._deliveries)

    def begin_anew(self, key: tuple[str, int]) -> None:
        """Delete the old queues of a deleted topic, because a record restarts queue `key` at offset 0
        (QueueTable.begin_anew)."""
        if self._queues.get(*key) is None:
            return
        for queue in self._queues.begin_anew(*key, end_offset=self._log.end_offset, min_offset=self._log.min_offset):
            self._dedup.forget_queue(queue.topic, queue.queue_id)

    def _first_begun_anew(self, views: Sequence[DispatchView]) -> tuple[DispatchView, tuple[str, int]] | None:
        """Return the first record with which a queue begins again at offset 0, and this queue. Return None if there is
        no such record."""
        seen: set[tuple[str, int]] = set()
        for view in views:
            is_batch = bool(view.sys_flag & SYS_FLAG_INNER_BATCH)
            if not is_queued(view.sys_flag) or (is_batch and not is_good_batch(view)):
                continue
            units = [QueueUnit((view.topic, view.queue_id), view.queue_offset)]
            if not is_batch and is_dispatched(view.topic):
                units += light_queue_units(view, view.physical_offset)
            for key, queue_offset in units:
                if queue_offset == 0:
                    queue = self._queues.get(*key)
                    if key in seen or (queue is not None and queue.exists and queue.next_offset > 0):
                        return view, key
                seen.add(key)
        return None

    def _by_kind(self, views: Sequence[DispatchView]) -> tuple[list[DispatchView], list[DispatchView]]:
        """Split records into two lists: records of single messages for queues of single messages, and records for
        `put_batch` (inner batches, and all records for queues of inner batches).

        `put_batch` also logs records that belong into no queue. The first record of a new queue decides the queue's
        kind, as if the records arrived one at a time.
        """
        singles: list[DispatchView] = []
        batches: list[DispatchView] = []
        of_batches: dict[tuple[str, int], bool] = {}
        for view in views:
            if not is_queued(view.sys_flag):
                continue
            key, is_batch = (view.topic, view.queue_id), bool(view.sys_flag & SYS_FLAG_INNER_BATCH)
            if key not in of_batches and self._queues.get(*key) is not None:
                of_batches[key] = self._queues.holds_batches(*key)
            if not is_batch or is_good_batch(view):
                of_batches.setdefault(key, is_batch)
            (batches if is_batch or of_batches[key] else singles).append(view)
        return singles, batches

    def put_batch(self, view: DispatchView) -> None:
        """Put an inner batch into its batch queue. A record that does not belong into a batch queue is only
        logged."""
        if put_batch(self._queues, view, view.physical_offset, may_fill_gaps=True):
            self._show_end_of((view.topic, view.queue_id))
            self._puts.append((view.topic, inner_batch(view)[1], view.size))

    def _show_end_of(self, key: tuple[str, int]) -> None:
        """Record the new end of the queue `key`, together with the log's end after the current chunk. As soon as
        consumers may see the whole chunk, they see the queue up to this new end."""
        queue = self._queues.get(*key)
        assert queue is not None
        self._visibility.add(self._log.end_offset, queue, queue.next_offset)

    def _units_of(self, views: Sequence[DispatchView]) -> list[QueueUnits]:
        """Return the consume-queue entries (units) of the given records, by queue. If a queue has a gap before the
        offset of a record, the result also contains entries that fill the gap (QueueGaps)."""
        by_queue: dict[tuple[str, int], list[PlacedUnit]] = {}
        for view in views:
            unit = PlacedUnit(view.queue_offset, view.physical_offset, view.size, view.tags_code)
            by_queue.setdefault((view.topic, view.queue_id), []).append(unit)
        return self._gaps.units_of(by_queue)

    def _write(self, physical_offset: int, data: memoryview, last: _Last | None, units: Sequence[QueueUnits]) -> None:
        """Write a log chunk, which was already checked, and the consume-queue entries (units) of its records. `last`:
        facts about the chunk's last record; None for a chunk without a record."""
        for_state = all(one.key[0] == STATE_TOPIC for one in units)

        def make_files() -> list[ConsumeQueue]:
            self._log.reserve(physical_offset + len(data), for_state=for_state)
            return self.queues_with_room(units)

        queues = self.make_room(make_files, for_state=for_state)
        if last is not None:
            self._appender.appended_elsewhere(last.physical_offset, last.store_timestamp_ms)
        self._log.write_through(physical_offset, data, self._appender.last_store_timestamp_ms)
        self.put_units(queues, units)

    def make_room(self, make_files: Callable[[], T], *, for_state: bool = False) -> T:
        """Call a function that creates files, and return its result. `for_state`: True if it may use the disk space
        reserved for the broker's state.

        Raises StoreNotWritableError if the disk is full, and OSError if the disk fails.
        """
        try:
            return self._space.write(make_files) if for_state else make_files()
        except OSError as error:
            if not is_want_of_space(error):
                raise
            raise StoreNotWritableError(no_space_text(self._root, self._log.file_size, error)) from error

    def queues_with_room(self, units: Sequence[QueueUnits]) -> list[ConsumeQueue]:
        """Create the queue files that are needed to append the entries (`units`), and return the consume queues of
        these entries. Raises OSError if the disk fails or is full."""
        queues = []
        for one in units:
            queue = self._queues.get_or_create(*one.key)
            if not queue.exists and one.queue_offset:
                queue.start_at(one.queue_offset)
            queue.reserve(len(one.sizes))
            queues.append(queue)
        return queues

    def put_units(self, queues: Sequence[ConsumeQueue], units: Sequence[QueueUnits]) -> None:
        """Put units into their queues. Consumers see the units once they may see the log up to its end."""
        for queue, one in zip(queues, units, strict=True):
            queue.append_scattered(one.physical_offsets, one.sizes, one.tags_codes)
            self._puts.append((one.key[0], len(one.sizes), int(one.sizes.sum(dtype=np.int64))))
            self._visibility.add(self._log.end_offset, queue, queue.next_offset)
