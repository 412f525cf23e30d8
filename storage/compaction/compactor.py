"""Compacts one queue: writes a new generation of its compacted log, with the newest message of each key.

    the generation before, [0, end)  ─┐
                                      ├─▶ survivors ─▶ the next generation, [0, new end) ─▶ units of the others blanked
    the commit log, [end, new end)   ─┘

A message that is not a survivor gets a blank unit in the consume queue. A blank unit keeps its offset and points to no
record, so consumers that read the files themselves skip it, too. Nothing needs the old content of a blank unit. If
recovery rebuilds units from the log, messages that are not the newest of their keys are visible until the next pass.

A damaged record is not copied, replaces no other message of its key, and keeps its unit. The record's bytes stay in the
commit log, where readers get an error for the record (CompactionService.reserved_from). Each pass checks the record
again; once the record is repaired, the pass adds the record to the compacted log.

The rule of compaction: the newest message of each key stays, and every message without a key stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import DataLossError
from raymq.common.message import PROPERTY_KEYS
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.layout import RecordError, read_header
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from raymq.records.logfiles.own_records import is_at
from storage.files import disk
from storage.parts import StoreParts
from storage.queue.compacted_log import (
    COMPACTED_UNIT,
    COMPACTION_DIR,
    DAMAGED,
    KEYLESS,
    TOMBSTONE,
    CompactedLog,
    NewGeneration,
    newest,
)
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.topic_attributes import SETTLED_MS

logger = logging.getLogger(__name__)

TOMBSTONE_KEPT_MS: Final = 86_400_000
"""Time in ms for which a tombstone (the record of a deleted key) is kept. A reader that lags by no more than this time
still receives the tombstone."""


def survivors(units: NDArray[np.void], now_ms: int, old_until: int) -> NDArray[np.bool_]:
    """Return a mask of the messages that stay after compaction, shape (n,).

    `units` (COMPACTED_UNIT) belong to one queue, ascending by queue offset. Of the messages with the same key the last
    stays, unless it is a tombstone older than TOMBSTONE_KEPT_MS. A tombstone at or after physical offset `old_until`
    is younger, whatever its store time.
    """
    high, low = units["key_high"], units["key_low"]
    # lexsort is stable, so records with equal message keys stay ordered by queue offset.
    order = np.lexsort((low, high))
    is_last = np.ones(len(units), np.bool_)
    is_last[:-1] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    newest = np.empty(len(units), np.bool_)
    newest[order] = is_last
    is_over = (units["flags"] & TOMBSTONE != 0) & (units["store_timestamp"] < now_ms - TOMBSTONE_KEPT_MS)
    is_over &= units["physical_offset"] < old_until
    keyless = units["flags"] & KEYLESS != 0
    stays: NDArray[np.bool_] = (newest & ~is_over) | keyless
    return stays


PASS_MESSAGES: Final = 200_000
"""Maximum number of messages of the commit log that one compaction pass reads."""
CHUNK_UNITS: Final = 512
CHUNK_BYTES: Final = 1 << 20
BLANKED_AT_ONCE: Final = 1000
"""Maximum number of consume-queue entries (units) that are blanked (cleared) while the append lock is held once. The
bound keeps appends from waiting long for the lock."""
PROPERTY_TOMBSTONE: Final = "TOMBSTONE"
"""Name of a user property. The value "true" means that the message's key is deleted. RocketMQ marks a deleted key by an
empty body instead."""


class Compactor:
    """Compacts queues of one store, one at a time.

    `settled_offset` returns the physical offset up to which no change of the master can cut the log. `pause` is called
    between chunks of work. It may wait, and returns False if the work must stop. `old_until`: AgeMarks.old_until.
    """

    def __init__(
        self,
        parts: StoreParts,
        settled_offset: Callable[[], int],
        pause: Callable[[], bool],
        old_until: Callable[[int], int],
    ) -> None:
        self._parts, self._queues = parts, parts.queues
        self._settled_offset, self._pause, self._old_until = settled_offset, pause, old_until
        self._root = parts.settings.store_path_root_dir

    def load(self, queue: ConsumeQueue) -> None:
        """Open the queue's compacted log, if it exists. Ignore messages in it that the queue does not contain, or no
        longer contains.

        Called while the store opens. Raises StoreCorruptError if the compacted log is damaged.
        """
        directory = self._directory(queue)
        found = newest(directory) if directory.is_dir() else None
        if found is None:
            return
        if len(found.units) and self._queues.was_deleted_after(queue.key, int(found.units[-1]["physical_offset"])):
            # The compacted log belongs to a deleted topic that had the same name as this topic.
            disk.remove_tree(directory)
            return
        if found.end_offset > queue.next_offset:
            found = self._cut(found, queue.next_offset)
        queue.compacted = found

    def compact(self, queue: ConsumeQueue, now_ms: int) -> bool:
        """Compact the next messages of a queue. The messages must be older than SETTLED_MS, and lie in the part of the
        log that no change of the master can cut.

        Returns False if no such messages exist, or if the work was aborted. Raises OSError if the disk fails.
        """
        before = queue.compacted
        start = max(0 if before is None else before.end_offset, queue.min_offset)
        end = min(
            queue.first_at_or_after(self._settled_offset()),
            queue.first_stored_at(now_ms - SETTLED_MS),
            start + PASS_MESSAGES,
        )
        if end <= start:
            return False
        new = self._read_units(queue, start, end)
        if new is None:
            return False
        old, in_log = (
            (np.zeros(0, COMPACTED_UNIT), np.zeros(0, np.bool_)) if before is None else self._old(queue, before)
        )
        units = np.concatenate((old, new))
        stays = survivors(units, now_ms, self._old_until(TOMBSTONE_KEPT_MS))
        in_log = np.concatenate((in_log, np.ones(len(new), np.bool_)))
        after = self._write(queue, before, units, stays, in_log, end)
        if after is None:
            return False
        if before is not None:
            before.delete()
        return self.blank(queue, after)

    def _directory(self, queue: ConsumeQueue) -> Path:
        return self._root / COMPACTION_DIR / queue.topic / str(queue.queue_id)

    def _cut(self, log: CompactedLog, end_offset: int) -> CompactedLog:
        """Return the compacted log without the messages from queue offset `end_offset` on, because the consume queue
        itself has lost these messages."""
        logger.warning(
            "compacted log %s now ends at offset %d, because its queue has lost the later messages",
            log.directory,
            end_offset,
        )
        rows = np.flatnonzero(log.units["queue_offset"] < end_offset)
        writer = NewGeneration(log.directory, log.generation + 1)
        try:
            for chunk in _chunks(rows, log.units["size"]):
                writer.write(log.records(chunk))
            writer.finish(log.units[rows].copy(), end_offset)
        finally:
            writer.close()
        after = writer.publish()
        disk.sync_directory(log.directory)
        log.delete()
        return after

    def _read_units(self, queue: ConsumeQueue, start: int, end: int) -> NDArray[np.void] | None:
        """Read the units of the records at the offsets [start, end) of a queue, with their keys. Returns None if the
        work was aborted."""
        found: list[NDArray[np.void]] = []
        offset = start
        while offset < end:
            units = queue.units(offset, min(CHUNK_UNITS, end - offset))
            pointing = np.flatnonzero(units["size"] != PRE_BLANK_SIZE)
            here = np.zeros(len(pointing), COMPACTED_UNIT)
            for row, index in enumerate(pointing.tolist()):
                here[row] = self._read_unit(queue, offset + index)
            found.append(here)
            offset += max(len(units), 1)
            if not self._pause():
                return None
        return np.concatenate(found) if found else np.zeros(0, COMPACTED_UNIT)

    def _old(self, queue: ConsumeQueue, before: CompactedLog) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Return the units (entries) of the queue's previous compacted log, and a mask of those units whose records
        must be read from the commit log.

        The mask selects records that were damaged when the previous compacted log was written, and have been repaired
        since then. They are copied into the new compacted log. Damaged records that are no longer in the commit log are
        omitted.
        """
        units = before.units.copy()
        in_log = np.zeros(len(units), np.bool_)
        for row in np.flatnonzero(units["flags"] & DAMAGED).tolist():
            offset = int(units[row]["queue_offset"])
            if offset >= queue.min_offset:
                units[row] = self._read_unit(queue, offset, is_known=True)
                in_log[row] = not units[row]["flags"] & DAMAGED
        left = (units["flags"] & DAMAGED != 0) & (units["queue_offset"] < queue.min_offset)
        return units[~left], in_log[~left]

    def _read_unit(self, queue: ConsumeQueue, offset: int, *, is_known: bool = False) -> np.void:
        """Return the compacted log's unit for the record at an offset of a queue. The unit includes the record's key.

        A damaged record is logged, unless `is_known` is True: the caller then already knows of the damage.
        """
        found = np.zeros(1, COMPACTED_UNIT)
        unit, record = self._record_of(queue, offset)
        mend = self._parts.reader.mend_units
        if record is None and mend is not None and mend(*queue.key, offset, offset + 1):
            unit, record = self._record_of(queue, offset)
        for name in ("physical_offset", "size", "tags_code"):
            found[name] = unit[name]
        found["queue_offset"] = offset
        if record is None:
            found[["size", "flags"]] = 0, KEYLESS | DAMAGED
            if not is_known:
                logger.error(
                    "the record of queue %s:%d at offset %d (physical offset %d) is damaged: compaction skips "
                    "the record and keeps its log file",
                    *(queue.topic, queue.queue_id, offset, unit["physical_offset"]),
                )
        else:
            found[["flags", "store_timestamp", "key_high", "key_low"]] = _key_of(record)
        row: np.void = found[0]
        return row

    def _record_of(self, queue: ConsumeQueue, offset: int) -> tuple[np.void, bytes | None]:
        """Return the consume-queue entry (unit) at an offset of a queue, and the bytes of the record to which it
        points. The bytes are None if the record is damaged."""
        [unit] = units = queue.units(offset, 1)
        try:
            record = bytes(self._parts.reader.views(units)[0])
        except DataLossError:
            return unit, None
        good = is_at(memoryview(record), int(unit["physical_offset"]), offset) and check_record(record).ok
        return unit, record if good else None

    def _write(
        self,
        queue: ConsumeQueue,
        before: CompactedLog | None,
        units: NDArray[np.void],
        stays: NDArray[np.bool_],
        in_log: NDArray[np.bool_],
        end: int,
    ) -> CompactedLog | None:
        """Write the next generation of the compacted log: the records of those `units` (consume-queue entries) for
        which `stays` is true. Then switch readers to the new generation.

        Returns None if the work was aborted, or the topic is deleted. `in_log`: a mask of the units whose records are
        in the commit log. The records of all other units are in the generation `before`.
        """
        rows = np.flatnonzero(stays)
        writer = NewGeneration(self._directory(queue), 1 if before is None else before.generation + 1)
        try:
            for part in np.split(rows, np.flatnonzero(np.diff(in_log[rows])) + 1):
                for chunk in _chunks(part, units["size"]):
                    if in_log[chunk[0]]:
                        copied = units[chunk]
                        writer.write(self._parts.reader.views(copied[copied["size"] > 0]))
                    else:
                        assert before is not None
                        kept = np.searchsorted(before.units["queue_offset"], units[chunk]["queue_offset"])
                        writer.write(before.records(kept))
                    if not self._pause():
                        return None
            writer.finish(units[rows], end)
        finally:
            writer.close()
        with self._parts.append_lock:
            if not self._is_present(queue, end):
                return None
            after = writer.publish()
        disk.sync_directory(after.directory)
        with self._parts.append_lock:
            if not self._is_present(queue, end):
                return None
            queue.compacted = after
        return after

    def _is_present(self, queue: ConsumeQueue, end: int) -> bool:
        """True if the queue was neither deleted nor cut since the compaction pass read it."""
        return self._queues.get(queue.topic, queue.queue_id) is queue and queue.next_offset >= end

    def blank(self, queue: ConsumeQueue, log: CompactedLog) -> bool:
        """Blank the consume-queue units (entries) of messages that the compacted log does not contain: these units keep
        their offsets but point to no record. Returns False if the work stopped early, because the queue was deleted or
        cut, or the store closes."""
        kept = log.units["queue_offset"]
        offset = queue.min_offset
        while offset < log.end_offset:
            units = queue.units(offset, min(BLANKED_AT_ONCE, log.end_offset - offset))
            if not len(units):
                break
            offsets = np.arange(offset, offset + len(units))
            superseded = offsets[(units["size"] != PRE_BLANK_SIZE) & ~np.isin(offsets, kept)]
            with self._parts.append_lock:
                if not self._is_present(queue, log.end_offset):
                    return False
                queue.blank(superseded)
            offset += len(units)
            if not self._pause():
                return False
        return True


def _key_of(record: bytes) -> tuple[int, int, int, int]:
    """Return a record's compaction flags, its store time, and the two halves of the hash of its key.

    For an unreadable record, the result is that of a record without a key.
    """
    try:
        view = dispatch_view(record)
        is_empty = read_header(record).body_size == 0
    except RecordError:
        return KEYLESS, 0, 0, 0
    key = view.properties.get(PROPERTY_KEYS, "").strip()
    if not key:
        return KEYLESS, view.store_timestamp_ms, 0, 0
    hashed = blake2b(key.encode(errors="surrogateescape"), digest_size=16).digest()
    flags = TOMBSTONE if is_empty or view.properties.get(PROPERTY_TOMBSTONE) == "true" else 0
    return flags, view.store_timestamp_ms, int.from_bytes(hashed[:8], "big"), int.from_bytes(hashed[8:], "big")


def _chunks(rows: NDArray[np.int64], sizes: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """Split row indices into chunks. The records of one chunk have about CHUNK_BYTES together."""
    if not len(rows):
        return
    parts = np.cumsum(sizes[rows], dtype=np.int64) // CHUNK_BYTES
    yield from np.split(rows, np.flatnonzero(np.diff(parts)) + 1)
