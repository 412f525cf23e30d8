"""Rewrites consume-queue entries (units) that the disk has damaged, from the records in the log. The repair runs when a
reader finds the damage.

A unit is correct if it points to a record that has the unit's size and names the unit's queue and offset. The record of
an incorrect unit lies between the records of the adjacent units, so only that part of the log is scanned. During a log
scan, recovery itself checks the units of the scanned records (redispatch.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from raymq.common.errors import DataLossError
from raymq.common.names import is_light_queue
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.layout import RecordError
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from storage.dispatch.place_check import true_place
from storage.dispatch.queue_check import leads_to_own
from storage.log.log_walk import walk_log
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue

WALK_MAX_BYTES: Final = 64 << 20
"""Maximum number of log bytes that a repair scans to find the record of one queue unit."""
_WALK_BYTES: Final = 4 << 20
MISSED_MAX: Final = 4
"""Maximum number of queue units for which a repair searches the log without finding the record. Then the repair stops,
because the search blocks appends. The remaining units stay unchanged."""
NEIGHBOURS_MAX: Final = 16

logger = logging.getLogger(__name__)


class UnitRepair:
    """Rewrites queue units of one store that do not point to their records. Thread-safe: takes the append lock."""

    def __init__(self, parts: StoreParts, on_failed: Callable[[OSError], None]) -> None:
        """`on_failed` is called, under the append lock, if the disk fails."""
        self._parts, self._on_failed = parts, on_failed

    def mend(self, queue: ConsumeQueue, from_offset: int, end_offset: int) -> int:
        """Rewrite the units of a queue, from `from_offset` up to before `end_offset`, that do not point to their
        records.

        Returns the number of wrong units; 0 if the disk failed. A unit whose record is damaged stays unchanged.
        """
        with self._parts.append_lock:
            try:
                return _mend_units(self._parts, queue, from_offset, end_offset)
            except OSError as error:
                self._on_failed(error)
                return 0


def _mend_units(parts: StoreParts, queue: ConsumeQueue, from_offset: int, end_offset: int) -> int:
    """Rewrite the wrong entries (units) of a consume queue, as `UnitRepair.mend` does. Called under the append lock.
    Raises OSError if the disk fails."""
    if is_light_queue(queue.topic):
        return 0
    mended = missed = 0
    for offset in range(max(from_offset, queue.min_offset), min(end_offset, queue.next_offset)):
        units = queue.units(offset, 1)
        if not len(units) or units[0]["size"] == PRE_BLANK_SIZE or leads_to_own(queue, offset, parts.reader):
            continue
        if any(hole.offset <= units[0]["physical_offset"] < hole.end_offset for hole in parts.holes.holes):
            continue
        view = _find_record(parts, queue, offset)
        missed += view is None
        if missed == MISSED_MAX:
            break
        if view is not None and queue.put_unit_at(offset, view.physical_offset, view.size, view.tags_code):
            mended += 1
            logger.error(
                "the consume-queue entry of queue %s:%d at offset %d was damaged and has been rewritten: the "
                "record is at physical offset %d",
                *(queue.topic, queue.queue_id, offset, view.physical_offset),
            )
    return mended


def _find_record(parts: StoreParts, queue: ConsumeQueue, queue_offset: int) -> DispatchView | None:
    """Find the record that belongs to a queue offset whose entry (unit) is wrong. Searches the log between the records
    of the nearest correct entries before and after. Returns None if the record is not found."""
    start, end = parts.log.min_offset, parts.log.end_offset
    before = _neighbour(
        queue, range(queue_offset - 1, max(queue_offset - NEIGHBOURS_MAX, queue.min_offset) - 1, -1), parts.reader
    )
    after = _neighbour(
        queue, range(queue_offset + 1, min(queue_offset + NEIGHBOURS_MAX, queue.next_offset)), parts.reader
    )
    if before is not None:
        start = before[0] + before[1]
    elif after is not None:
        # No correct entry (unit) was found at a lower queue offset, for example because this is the queue's first
        # message. Search for the record in two log files: the file with the record of the next correct entry, and the
        # file before it.
        start = max(after[0] - after[0] % parts.log.file_size - parts.log.file_size, start)
    if after is not None:
        end = after[0]
    levels_ms, limit = parts.settings.delay_levels_ms, start + WALK_MAX_BYTES
    while start < min(end, limit):
        try:
            walked = walk_log(parts.reader, start, end, _WALK_BYTES)
        except DataLossError:
            return None
        data = parts.reader.log_bytes(walked.physical_offset, walked.physical_offset + len(walked.data))
        for at in walked.starts.tolist():
            try:
                view = dispatch_view(data, at, delay_levels_ms=levels_ms)
            except RecordError:
                continue
            if (view.topic, view.queue_id) == queue.key and view.queue_offset == queue_offset:
                physical_offset = walked.physical_offset + at
                if view.physical_offset != physical_offset:
                    return None
                # A record whose own queue offset is damaged may name this offset, although it belongs to another.
                return view if true_place(parts.queues, view, physical_offset) is None else None
        start = max(walked.end_offset, start + 1)
    return None


def _neighbour(queue: ConsumeQueue, offsets: range, reader: LogReader) -> tuple[int, int] | None:
    """Find the first offset in `offsets` whose queue unit is correct. Return the position and size of the unit's
    record, or None if no unit is correct."""
    for offset in offsets:
        units = queue.units(offset, 1)
        if len(units) and units[0]["size"] != PRE_BLANK_SIZE and leads_to_own(queue, offset, reader):
            return int(units[0]["physical_offset"]), int(units[0]["size"])
    return None
