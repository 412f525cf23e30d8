"""Replaces damaged bytes of a log by the intact bytes of another replica, in place.

All replicas have the same bytes at the same physical offsets. So bytes match a part of a damaged range (hole) if they
are whole, intact records, and each record contains its own physical offset. A large hole is repaired part by part. Each
part is checked and on disk before the hole shrinks, so a crash leaves a smaller hole and whole records. The queue units
that point into the part are rewritten from these records, and the index gets the records' keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from raymq.common.errors import InvalidArgumentError, StoreNotWritableError
from raymq.common.protocol.store import DamagedRange, Hole, QueueSpan
from storage.append.write_gate import WriteGate
from storage.dispatch.block_dedup import remember_producer
from storage.dispatch.multi_dispatch import QueueUnit, light_queue_units
from storage.dispatch.place_check import true_place
from storage.dispatch.record_blocks import is_queued
from storage.files import disk
from storage.parts import StoreParts
from storage.replication.chunk_appender import parse_chunk
from storage.replication.log_chunks import units_between

RANGES_MAX: Final = 1000
"""Maximum number of damaged ranges of the log in a list for an operator."""
SPANS_MAX: Final = 100
"""Maximum number of queues of one damaged range in a list for an operator."""
DAMAGED_BYTES_MAX: Final = 4 << 20
"""Maximum number of damaged bytes that one call returns."""

logger = logging.getLogger(__name__)

PutKeys = Callable[[bytes, Sequence[int], int], None]
"""Function that puts the keys of records into the index. Its arguments are the bytes of the records, the start of each
record in these bytes, and the physical offset of the first byte."""


class HoleMender:
    """Repairs the damaged ranges (holes) of one open log. Thread-safe: `mend` takes the append lock."""

    def __init__(
        self, parts: StoreParts, gate: WriteGate, *, put_keys: PutKeys, forget_snapshot: Callable[[], None]
    ) -> None:
        """`forget_snapshot`: a function that makes the next flush write a new snapshot of the store. It must be called
        without the append lock."""
        self._parts, self._gate, self._put_keys, self._forget_snapshot = parts, gate, put_keys, forget_snapshot

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The damaged ranges (holes) of the log that recovery has found, ascending. Each range has intact records after
        it."""
        return self._parts.holes.from_offset(self._parts.log.min_offset)

    def damaged_ranges(self) -> list[DamagedRange]:
        """Return the damaged ranges of the log for an operator, ascending, with the messages that they hold. At most
        RANGES_MAX ranges, with at most SPANS_MAX queues each.

        A range holds the messages whose queue units point into it. Takes the append lock for a short time per range.
        Raises ServiceNotAvailableError if the store is closed.
        """
        self._gate.require_open()
        listed = []
        for hole in self.holes[:RANGES_MAX]:
            spans: list[QueueSpan] = []
            with self._parts.append_lock:
                for queue in self._parts.queues.plain:
                    offsets = [unit.queue_offset for unit in units_between(queue, hole.offset, hole.end_offset)]
                    if offsets and len(spans) < SPANS_MAX:
                        spans.append(QueueSpan(queue.topic, queue.queue_id, min(offsets), max(offsets) + 1))
            listed.append(DamagedRange(hole.offset, hole.size, hole.reason, tuple(spans)))
        return listed

    def damaged_bytes(self, offset: int, size: int) -> bytes:
        """Return bytes of a damaged range as they are on disk, at most DAMAGED_BYTES_MAX.

        Raises InvalidArgumentError if the bytes do not lie in one damaged range, and ServiceNotAvailableError if the
        store is closed.
        """
        self._gate.require_open()
        end = offset + size
        if size <= 0 or not any(one.offset <= offset < end <= one.end_offset for one in self.holes):
            raise InvalidArgumentError(f"the log has no damaged range with the bytes from {offset} to {end}")
        return bytes(self._parts.reader.log_bytes(offset, min(end, offset + DAMAGED_BYTES_MAX)))

    def mend(self, offset: int, data: bytes) -> None:
        """Replace the bytes of a hole (damaged range) from physical offset `offset` on by the intact bytes `data` of
        another replica. The bytes may cover a part of the hole.

        On return the bytes are on disk, the hole is smaller or gone, and the records can be found by their keys.

        Raises InvalidArgumentError, and changes nothing, if the bytes do not lie in one hole. Also raises it if `data`
        does not consist of whole, intact records for exactly this offset, or if a queue unit shows that a record of
        `data` has a changed place (queue and queue offset). Raises StoreNotWritableError if the disk fails; the hole
        stays. Raises ServiceNotAvailableError if the store is closed.
        """
        with self._parts.append_lock:
            self._gate.require_open()
            try:
                self._mend_part(offset, data)
            except OSError as error:
                self._gate.fail(error)
                raise StoreNotWritableError(
                    f"{self._gate.failure}; the damaged range at physical offset {offset} was not repaired"
                ) from error
        self._forget_snapshot()

    def _mend_part(self, offset: int, data: bytes) -> None:
        """Write `data` over a part of a damaged range (hole). Called under the append lock. Raises OSError if the disk
        fails, and the errors of the method `mend`."""
        parts = self._parts
        end = offset + len(data)
        hole = next((one for one in parts.holes.holes if one.offset <= offset < end <= one.end_offset), None)
        if hole is None:
            raise InvalidArgumentError(f"the log has no damaged range from physical offset {offset} to {end}")
        file_size = parts.log.file_size
        views = parse_chunk(memoryview(data), offset, file_size, parts.settings.delay_levels_ms)
        for view in views:
            place = true_place(parts.queues, view, view.physical_offset)
            if place is not None:
                raise InvalidArgumentError(
                    f"the other replica's record at physical offset {view.physical_offset} names "
                    f"{view.topic}:{view.queue_id} at {view.queue_offset}, but it belongs at {place.key[0]}:"
                    f"{place.key[1]} at {place.queue_offset}: the other replica has the same damage"
                )
        disk.overwrite(parts.log.path(offset - offset % file_size), offset % file_size, data)
        for view in views:
            own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
            if not is_queued(view.sys_flag) or parts.queues.was_deleted_after(own.key, view.physical_offset):
                continue
            for unit in (own, *light_queue_units(view, view.physical_offset)):
                queue = parts.queues.get_plain(*unit.key)
                if queue is not None and queue.first_offset <= unit.queue_offset < queue.next_offset:
                    queue.put_unit_at(unit.queue_offset, view.physical_offset, view.size, view.tags_code)
            remember_producer(view, parts.dedup, parts.deliveries)
        if views:
            self._put_keys(data, [view.physical_offset - offset for view in views], offset)
        left = [
            one
            for one in (
                Hole(hole.offset, offset - hole.offset, hole.reason),
                Hole(end, hole.end_offset - end, hole.reason),
            )
            if one.size
        ]
        parts.holes.replace([*(one for one in parts.holes.holes if one is not hole), *left], file_size)
        parts.holes.mended_bytes += len(data)
        parts.holes.mended_holes += not left
        logger.warning(
            "%s: %d damaged bytes at physical offset %d were replaced by intact bytes",
            parts.settings.store_path_root_dir,
            len(data),
            offset,
        )
