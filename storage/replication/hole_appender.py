"""Appends a hole (damaged range) of a master's log to a slave's log, part by part: the same damaged bytes, units and
table entry.

    part ─▶ written after the log's end, flushed ─▶ … ─▶ last part ─▶ the log's end moves ─▶ units ─▶ file `holes`

A hole may be as long as a log file, so it is copied in parts. The starts of the records in a hole are unknown, and the
master may repair the hole during the copy. So the slave's log never ends inside a hole. Until the last part arrives,
the log's end stays before the hole, and the parts are stored after the log's end. Any other append, and the close of
the store, overwrite the parts with zeros. After a crash, recovery removes the parts. The hole is then copied again from
its start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from raymq.common.errors import InvalidArgumentError
from raymq.common.names import HALF_TOPIC, OP_HALF_TOPIC
from raymq.common.protocol.store import Hole, HoleCopy, HoleUnit
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import MIN_RECORD_SIZE, SYS_FLAG_INNER_BATCH
from storage.dispatch.block_dedup import remember_producer
from storage.dispatch.record_blocks import is_queued
from storage.files import disk
from storage.parts import StoreParts
from storage.recovery.log_end import believable_view
from storage.replication.chunk_appender import ChunkAppender
from storage.replication.queue_gaps import PlacedUnit, QueueGaps, QueueUnits

VIEWED_RECORDS_MAX: Final = 10_000
"""Maximum number of damaged records of a hole (damaged range) whose headers are read to find their producers. Each read
takes about 20 µs."""
VIEWED_BYTES_MAX: Final = 64 << 20
"""Maximum size, in bytes, of a damaged record whose header is read to find the record's producer. The headers of larger
records are not read."""

logger = logging.getLogger(__name__)


class HoleAppender:
    """Appends a master's holes (damaged ranges) to the log of one store. Called under the append lock."""

    def __init__(self, parts: StoreParts, chunks: ChunkAppender) -> None:
        self._log, self._queues, self._dedup, self._deliveries = parts.log, parts.queues, parts.dedup, parts.deliveries
        self._halves, self._holes, self._reader = parts.halves, parts.holes, parts.reader
        self._delay_levels_ms = parts.settings.delay_levels_ms
        self._chunks, self._gaps = chunks, QueueGaps(parts)
        self._begin = -1
        """The offset at which the current hole (damaged range of the log) begins: the log's end at the time when the
        hole's first part was staged (written after the log's end)."""
        self._units: dict[tuple[str, int], list[PlacedUnit]] = {}
        """The queue units (consume-queue entries) that arrived with the staged parts of the current hole, by queue. A
        hole is a damaged range of the master's log."""

    def append_hole(self, physical_offset: int, data: bytes | memoryview, hole: HoleCopy) -> None:
        """Stage a part of a master's hole (damaged range). The part begins at the log's end, or at the end of the
        previous part.

        On return the bytes are on disk. With the last part the log's end moves, and the hole is recorded.

        A part that was staged already changes nothing. Raises InvalidArgumentError if the part does not continue the
        log and the hole; staged parts may then be dropped. Also raises the errors of `ChunkAppender.append_chunk`.

        All bytes and units are on disk before the file `holes` names the hole, so recovery can rely on them. The
        master's units keep the queue offsets of the damaged records occupied.
        """
        part, end_offset = memoryview(data), physical_offset + len(data)
        log, begin = self._log, self._log.end_offset
        if self._begin != begin or log.staged_end == begin:
            self._begin, self._units = begin, {}
        if not begin <= physical_offset <= log.staged_end:
            raise InvalidArgumentError(
                f"the log ends at physical offset {begin}, but the part of a damaged range begins at {physical_offset}"
            )
        file_end = begin - begin % log.file_size + log.file_size
        if not part or hole.left < 0 or end_offset + hole.left > file_end:
            raise InvalidArgumentError(
                f"a damaged range from physical offset {begin} to {end_offset + hole.left} crosses the end of a "
                f"log file: the part at {physical_offset} has {len(part)} bytes"
            )
        if physical_offset < log.staged_end:
            if hole.left and end_offset <= log.staged_end and log.staged_bytes(physical_offset, end_offset) == part:
                return
            log.drop_staged()
            self._units.clear()
            if physical_offset != begin:
                raise InvalidArgumentError(
                    f"the damaged range at physical offset {begin} changed on the master during the copy: "
                    f"copy it again from {begin}"
                )
        if physical_offset == begin:
            self._chunks.make_room(lambda: log.reserve(end_offset + hole.left))
        self._add_units(physical_offset, end_offset, hole.units)
        log.stage(physical_offset, part)
        if not hole.left:
            self._finish(hole.reason)

    def _finish(self, reason: str) -> None:
        """Append the hole (damaged range) to the log after all its parts are staged.

        Raises InvalidArgumentError, and appends nothing, if one of the queue entries (units) that belong to the hole is
        for a queue of inner batches.
        """
        begin, end_offset = self._begin, self._log.staged_end
        by_queue, self._units = self._units, {}
        begun = [key for key, rows in by_queue.items() if self._begins_anew(key, rows[0])]
        anew = frozenset((one.topic, one.queue_id) for key in begun for one in self._queues.queues_before(*key))
        try:
            units = self._gaps.units_of(by_queue, anew)
        except InvalidArgumentError:
            self._log.drop_staged()
            raise
        for key in begun:
            self._chunks.begin_anew(key)
        queues = self._chunks.make_room(lambda: self._chunks.queues_with_room(units))
        self._log.take_staged()
        self._chunks.put_units(queues, units)
        for path in set[Path]().union(*(queue.take_dirty() for queue in queues)):
            disk.flush_path(path)
        noted = Hole(begin, end_offset - begin, reason)
        self._holes.replace([*self._holes.holes, noted], self._log.file_size)
        for view in self._views(noted, units):
            if view.sys_flag & SYS_FLAG_INNER_BATCH:
                self._chunks.put_batch(view)
            if is_queued(view.sys_flag):
                remember_producer(view, self._dedup, self._deliveries)
            if view.topic not in (HALF_TOPIC, OP_HALF_TOPIC):
                # The table of half messages ignores a damaged record of the half topic or the op topic, because the
                # table needs the bodies of these records.
                self._halves.note(view, b"")
        logger.error(
            "%d damaged bytes at physical offset %d were copied from the master: %s",
            noted.size,
            noted.offset,
            noted.reason,
        )

    def _begins_anew(self, key: tuple[str, int], unit: PlacedUnit) -> bool:
        """True if a consume-queue entry (unit) of the master starts an existing queue at offset 0 again. The topic was
        then deleted and created again on the master."""
        queue = self._queues.get(*key)
        return unit.queue_offset == 0 and queue is not None and queue.exists and queue.next_offset > 0

    def _views(self, hole: Hole, units: Sequence[QueueUnits]) -> Iterator[DispatchView]:
        """Yield the views of those damaged records of a hole (damaged range of the log) whose headers are plausible, in
        log order."""
        places = {
            (begin, size)
            for one in units
            for begin, size in zip(one.physical_offsets.tolist(), one.sizes.tolist(), strict=True)
            if MIN_RECORD_SIZE < size <= VIEWED_BYTES_MAX and begin >= hole.offset and begin + size <= hole.end_offset
        }
        for begin, size in islice(sorted(places) if len(places) > 1 else self._by_sizes(hole), VIEWED_RECORDS_MAX):
            view = believable_view(self._reader.log_bytes(begin, begin + size), begin, self._delay_levels_ms)
            # `units`: the known queue units that point into the hole (damaged range). If there are any, skip a record
            # that fits none of them: the disk has changed the record's queue or queue offset.
            if view is not None and (not units or _is_placed(view, units)):
                yield view

    def _by_sizes(self, hole: Hole) -> list[tuple[int, int]]:
        """Return the position and size of each record of a hole (damaged range), if the records' sizes add up to the
        hole.

        Otherwise the hole counts as one record.
        """
        places, at = [], hole.offset
        while at < hole.end_offset:
            size = int.from_bytes(self._reader.log_bytes(at, min(at + 4, hole.end_offset)), signed=True)
            if not MIN_RECORD_SIZE <= size <= hole.end_offset - at:
                places = [(hole.offset, hole.size)]
                break
            places.append((at, size))
            at += size
        return [place for place in places if place[1] <= VIEWED_BYTES_MAX]

    def _add_units(self, physical_offset: int, end_offset: int, units: Sequence[HoleUnit]) -> None:
        """Keep the consume-queue entries (units) of one part of the hole (damaged range) in memory until the hole's
        last part arrives.

        Raises InvalidArgumentError, and keeps nothing, if the entries do not point into the part, or if their queue
        offsets do not ascend.
        """
        last = {key: rows[-1].queue_offset for key, rows in self._units.items()}
        for unit in units:
            key = unit.topic, unit.queue_id
            if not physical_offset <= unit.physical_offset < end_offset or unit.queue_offset <= last.get(key, -1):
                raise InvalidArgumentError(
                    f"the consume-queue entries of queue {key[0]}:{key[1]} do not point into the damaged range at "
                    f"physical offset {physical_offset}"
                )
            last[key] = unit.queue_offset
        for unit in units:
            self._units.setdefault((unit.topic, unit.queue_id), []).append(PlacedUnit(*unit[2:]))


def _is_placed(view: DispatchView, units: Sequence[QueueUnits]) -> bool:
    """True if the record names the place (queue and queue offset) of one of the queue units `units`."""
    key, offset = (view.topic, view.queue_id), view.queue_offset
    return any(one.key == key and one.queue_offset <= offset < one.queue_offset + len(one.sizes) for one in units)
