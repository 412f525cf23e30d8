"""Appends a hole of a master to a slave's log, part by part: the same damaged bytes, the same units, the same note.

    part ─▶ written after the log's end, flushed ─▶ … ─▶ last part ─▶ the log's end moves ─▶ units ─▶ file `holes`

A hole may be as long as a log file, so it comes in parts. Nobody knows where records start in it, and its master may
get intact bytes while it is copied. So the log of the slave always ends at a record's end: before the hole or after it.
The parts stay after the log's end until the last one is there. Any other append, and the close of the store, overwrite
them with zeros. After a crash recovery cuts them off. The hole is then copied from its start again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from raymq.common.errors import InvalidArgumentError
from raymq.common.names import HALF_TOPIC, OP_HALF_TOPIC
from raymq.common.protocol.store import Hole, HoleCopy, HoleUnit
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.layout import MIN_RECORD_SIZE
from storage.dispatch.block_dedup import remember_producer
from storage.dispatch.record_blocks import is_queued
from storage.files import disk
from storage.parts import StoreParts
from storage.recovery.log_end import believable_view
from storage.replication.chunk_appender import ChunkAppender, QueueUnits

VIEWED_RECORDS_MAX: Final = 10_000
"""The most damaged records of a hole whose headers are read for their producers: each takes some 20 µs."""
VIEWED_BYTES_MAX: Final = 64 << 20
"""The longest damaged record whose header is read."""

logger = logging.getLogger(__name__)


class HoleAppender:
    """Appends holes to the log of one store. Called under the append lock."""

    def __init__(self, parts: StoreParts, chunks: ChunkAppender) -> None:
        self._log, self._queues, self._dedup, self._deliveries = parts.log, parts.queues, parts.dedup, parts.deliveries
        self._halves, self._holes, self._reader = parts.halves, parts.holes, parts.reader
        self._delay_levels_ms = parts.settings.delay_levels_ms
        self._chunks = chunks
        self._begin = -1
        """The log's end when the staged parts came."""
        self._units: list[QueueUnits] = []
        """The units of the staged parts."""

    def append_hole(self, physical_offset: int, data: bytes | memoryview, hole: HoleCopy) -> None:
        """Take a part of a master's hole, which begins at the log's end, or where the part before it ended. The bytes
        are on disk on return. With the last part the log's end moves, and the hole is noted.

        A part that was staged already changes nothing. InvalidArgumentError, and the parts that were staged may be
        dropped, unless the part continues the log, the hole and its queues. Other errors as of
        `ChunkAppender.append_chunk`.

        All bytes and units are on disk before the file `holes` names the hole, so recovery can rely on them. The
        master's units keep the places of the damaged records in their queues.
        """
        part, end_offset = memoryview(data), physical_offset + len(data)
        log, begin = self._log, self._log.end_offset
        if self._begin != begin or log.staged_end == begin:
            self._begin, self._units = begin, []
        if not begin <= physical_offset <= log.staged_end:
            raise InvalidArgumentError(f"the log ends at {begin}; a part of a hole for {physical_offset} came")
        file_end = begin - begin % log.file_size + log.file_size
        if not part or hole.left < 0 or end_offset + hole.left > file_end:
            raise InvalidArgumentError(
                f"a hole from {begin} to {end_offset + hole.left} is not in one file: a part for {physical_offset} "
                f"has {len(part)} bytes"
            )
        units = self._units_in(physical_offset, end_offset, hole.units)
        if physical_offset < log.staged_end:
            if hole.left and end_offset <= log.staged_end and log.staged_bytes(physical_offset, end_offset) == part:
                return
            log.drop_staged()
            self._units.clear()
            if physical_offset != begin:
                raise InvalidArgumentError(
                    f"the hole at {begin} has changed on the master while it was copied: read it from there again"
                )
        if physical_offset == begin:
            self._chunks.make_room(lambda: log.reserve(end_offset + hole.left))
        log.stage(physical_offset, part)
        self._units += units
        if not hole.left:
            self._finish(hole.reason)

    def _finish(self, reason: str) -> None:
        """Append the hole, all of which is staged. InvalidArgumentError, and nothing is appended, unless its units
        continue their queues."""
        begin, end_offset = self._begin, self._log.staged_end
        try:
            units = _joined(self._units)
            anew = {one.key[0] for one in units if self._begins_anew(one)}
            for one in units:
                if one.key[0] not in anew and not self._chunks.continues(one):
                    raise InvalidArgumentError(f"the hole at {begin} does not continue queue {one.key[0]}:{one.key[1]}")
        except InvalidArgumentError:
            self._log.drop_staged()
            raise
        finally:
            self._units = []
        for topic in anew:
            self._queues.delete_topic(topic, end_offset=begin, min_offset=self._log.min_offset)
            self._dedup.forget_topic(topic)
        queues = self._chunks.make_room(lambda: self._chunks.queues_with_room(units))
        self._log.take_staged()
        self._chunks.put_units(queues, units)
        for path in set[Path]().union(*(queue.take_dirty() for queue in queues)):
            disk.flush_path(path)
        noted = Hole(begin, end_offset - begin, reason)
        self._holes.replace([*self._holes.holes, noted], self._log.file_size)
        for view in self._views(noted, units):
            if is_queued(view.sys_flag):
                remember_producer(view, self._dedup, self._deliveries)
            if view.topic not in (HALF_TOPIC, OP_HALF_TOPIC):
                self._halves.note(view, b"")  # of those two topics the body counts
        logger.error("%d damaged bytes at %d were copied from the master: %s", noted.size, noted.offset, noted.reason)

    def _begins_anew(self, units: QueueUnits) -> bool:
        """True if the units begin a queue that has some: the master's topic was deleted, and created again."""
        queue = self._queues.get(*units.key)
        return units.queue_offset == 0 and queue is not None and queue.exists and queue.next_offset > 0

    def _views(self, hole: Hole, units: Sequence[QueueUnits]) -> Iterator[DispatchView]:
        """The views of the damaged records of a hole whose headers can be believed, in the order of the log: of the
        hole as one record, or of the records to which its units lead."""
        places = {
            (begin, size)
            for one in units
            for begin, size in zip(one.physical_offsets.tolist(), one.sizes.tolist(), strict=True)
            if MIN_RECORD_SIZE < size <= VIEWED_BYTES_MAX and begin + size <= hole.end_offset
        }
        if len(places) <= 1 and hole.size <= VIEWED_BYTES_MAX:
            places = {(hole.offset, hole.size)}
        for begin, size in islice(sorted(places), VIEWED_RECORDS_MAX):
            view = believable_view(self._reader.log_bytes(begin, begin + size), begin, self._delay_levels_ms)
            if view is not None:
                yield view

    def _units_in(self, physical_offset: int, end_offset: int, units: Sequence[HoleUnit]) -> list[QueueUnits]:
        """The units of a part of a hole, by queue. InvalidArgumentError unless they lead into it and follow each
        other."""
        by_queue: dict[tuple[str, int], list[HoleUnit]] = {}
        for unit in units:
            by_queue.setdefault((unit.topic, unit.queue_id), []).append(unit)
        found = []
        for key, rows in by_queue.items():
            first = rows[0].queue_offset
            in_order = [row.queue_offset for row in rows] == list(range(first, first + len(rows)))
            if not in_order or not all(physical_offset <= row.physical_offset < end_offset for row in rows):
                raise InvalidArgumentError(f"the units of {key[0]}:{key[1]} do not lead into {physical_offset}")
            columns = np.array([row[3:] for row in rows], np.int64)
            found.append(QueueUnits(key, first, columns[:, 0], columns[:, 1].astype(np.int32), columns[:, 2]))
        return found


def _joined(units: Sequence[QueueUnits]) -> list[QueueUnits]:
    """The units of all parts, one element per queue. InvalidArgumentError if a queue's units have a gap."""
    by_queue: dict[tuple[str, int], list[QueueUnits]] = {}
    for one in units:
        by_queue.setdefault(one.key, []).append(one)
    joined = []
    for key, rows in by_queue.items():
        first = following = rows[0].queue_offset
        for one in rows:
            if one.queue_offset != following:
                raise InvalidArgumentError(f"the units of {key[0]}:{key[1]} in a hole have a gap at {following}")
            following += len(one.sizes)
        joined.append(QueueUnits(key, first, *(np.concatenate([one[column] for one in rows]) for column in (2, 3, 4))))
    return joined
