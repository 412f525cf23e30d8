"""The log as chunks of bytes, for replication: reads and appends chunks, and cuts a log at an offset.

A chunk consists of the bytes between two record boundaries of one log file: whole records, and at the file's end its
BLANK (end-of-file marker) with the bytes after it. So a replica that appends chunk after chunk has the same files, byte
for byte, and after each chunk recovery would accept its log. chunk_appender.py builds queues, dedup table and index
entries from the records, as recovery does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from raymq.common.config.store import StoreSettings
from raymq.common.errors import DataLossError, InvalidArgumentError, StoreCorruptError
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import Hole, HoleCopy, HoleUnit
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.layout import RecordError
from raymq.records.format.walk import is_blank, walk_records
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from storage.append.appender import Appender
from storage.append.write_gate import WriteGate
from storage.files import disk
from storage.files.damage import DamageNotes
from storage.files.lock import DirectoryLock
from storage.index.index_file import drop_files_from
from storage.index.index_service import INDEX_DIR
from storage.log.commit_log import CommitLog
from storage.log.holes import HoleTable
from storage.log.log_paths import LogPaths
from storage.log.log_walk import resume_behind
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.recovery.snapshot import SNAPSHOT_FILE, drop_snapshots
from storage.replication.chunk_appender import ChunkAppender, leading_records
from storage.replication.hole_appender import HoleAppender
from storage.running_flags import AGAINST_REPLICATED_STATE, AGAINST_REPLICATION
from storage.stats import PutKind, StoreStats

CHUNK_MAX_BYTES: Final = 4 << 20
_UNITS_AT_A_TIME: Final = 1024

Bytes = bytes | memoryview

logger = logging.getLogger(__name__)


class LogChunks:
    """Reads and appends the log of one open store in chunks, for replication. Thread-safe."""

    def __init__(self, parts: StoreParts, gate: WriteGate, appender: Appender, stats: StoreStats) -> None:
        self._parts, self._gate, self._stats = parts, gate, stats
        self._appender = ChunkAppender(parts, appender)
        self._holes = HoleAppender(parts, self._appender)
        self.on_damage: Callable[[int, int], None] = lambda physical_offset, size: None
        """Function that is called with the physical offset and the size of new damage in this log. It must not
        block."""

    def read_chunk(self, physical_offset: int, max_bytes: int, limit: int | None = None) -> bytes:
        """Read about `max_bytes` of the log from a record's start: whole records of one log file, at least one record.

        Returns empty bytes at `limit`, by default the end of what consumers see. A chunk ends before a hole (damaged
        range). Raises StoreCorruptError if the offset lies in a hole (use `read_hole`). Raises ServiceNotAvailableError
        if the store is closed or must not be read now. Also raises the errors of the function `read_chunk`.
        """
        self._gate.require_readable()
        limit = self._parts.visibility.visible_offset if limit is None else limit
        hole = self.hole_at(physical_offset)
        if hole is not None:
            raise StoreCorruptError(
                f"the {hole.size} bytes at physical offset {hole.offset} in the log of {self._parts.reader.root} "
                f"are damaged: {hole.reason}; damaged bytes cannot be copied as records"
            )
        limit = min([limit, *(one.offset for one in self._parts.holes.holes if one.offset > physical_offset)])
        try:
            return read_chunk(self._parts.reader, self._parts.log.min_offset, physical_offset, limit, max_bytes)
        except StoreCorruptError:
            self.on_damage(physical_offset, 1)
            raise

    def hole_at(self, physical_offset: int) -> Hole | None:
        """Return the hole (damaged range of the log) that contains a physical offset; None if no hole contains
        it."""
        holes = self._parts.holes.holes
        return next((one for one in holes if one.offset <= physical_offset < one.end_offset), None)

    def read_hole(self, physical_offset: int, limit: int, max_bytes: int = CHUNK_MAX_BYTES) -> tuple[bytes, HoleCopy]:
        """Read damaged bytes of the log, to copy them to a replica. Also returns the data that the replica records
        about these bytes (HoleCopy).

        The bytes begin at a physical offset inside a damaged range (hole), and are at most `max_bytes`. A hole that
        extends past `limit` ends at `limit` for the replica. Raises StoreCorruptError if a queue's units cannot be
        read, and InvalidArgumentError if the offset lies in no hole. Raises ServiceNotAvailableError as `read_chunk`
        does.
        """
        self._gate.require_readable()
        hole = self.hole_at(physical_offset)
        if hole is None:
            raise InvalidArgumentError(f"the log has no damaged range at physical offset {physical_offset}")
        hole_end = min(hole.end_offset, limit)
        end = min(hole_end, physical_offset + min(max(max_bytes, 1), CHUNK_MAX_BYTES))
        units: list[HoleUnit] = []
        # The newest units (entries) of the queues are needed here, although consumers do not see them yet. Reading
        # these units needs the append lock.
        with self._parts.append_lock:
            for queue in self._parts.queues.plain:
                units += units_between(queue, physical_offset, end)
        data = bytes(self._parts.reader.log_bytes(physical_offset, end))
        return data, HoleCopy(hole.reason, tuple(units), hole_end - end)

    @property
    def append_offset(self) -> int:
        """Physical offset at which this replica appends the next log chunk. It is the log's end, or, while a damaged
        range (hole) arrives in parts, the end of the parts that have arrived."""
        return self._parts.log.staged_end

    def append_hole(self, physical_offset: int, data: Bytes, hole: HoleCopy) -> None:
        """Append a part of the damaged bytes of a hole (`HoleAppender.append_hole`). On return the part is on disk.

        With the last part the log's end moves, and the hole is recorded. Raises the errors of `WriteGate.write` and
        `HoleAppender.append_hole`.
        """
        self._gate.write(partial(self._holes.append_hole, physical_offset, data, hole), against=AGAINST_REPLICATION)

    def read_part(self, physical_offset: int, size: int, max_bytes: int = CHUNK_MAX_BYTES) -> tuple[int, bytes] | None:
        """Return the physical offset and the bytes of the first intact records in a range of the log. The records are
        in one log file.

        A record starts at `physical_offset`. Returns about `max_bytes`, and at least one record. Returns None if this
        log has no intact record within the range. Raises ServiceNotAvailableError if the store is closed or must not be
        read now, and OSError if the disk fails.
        """
        self._gate.require_readable()
        log, levels_ms = self._parts.log, self._parts.settings.delay_levels_ms
        file_start = physical_offset - physical_offset % log.file_size
        if size <= 0 or physical_offset + size > file_start + log.file_size or physical_offset < log.min_offset:
            return None
        position, end = physical_offset, min(physical_offset + size, self._gate.stored_offset)
        while position < end:
            ahead = [one for one in self._parts.holes.holes if one.end_offset > position]
            if ahead and ahead[0].offset <= position:
                position = ahead[0].end_offset
                continue
            limit = min([end, *(one.offset for one in ahead)])
            data = self._parts.reader.log_bytes(position, limit)
            length = leading_records(data, position, log.file_size, levels_ms, max_bytes)[1]
            if length:
                return position, bytes(data[:length])
            found = resume_behind(self._parts.reader.log_bytes(file_start, limit), file_start, position - file_start)
            logger.error("%s: the log has new damage at physical offset %d", self._parts.reader.root, position)
            start, position = position, limit if found is None else file_start + found
            self.on_damage(start, position - start)
        return None

    def append_chunk(self, physical_offset: int, data: Bytes, *, wait: bool = True) -> bool:
        """Append a log chunk of another replica at the log's end (`ChunkAppender.append_chunk`). A fenced store accepts
        chunks.

        Returns True if the chunk is as durable as the settings promise. Returns False if the disk was too slow. Without
        `wait`, returns False if a flush was only requested. Raises the errors of `WriteGate.write` and
        `ChunkAppender.append_chunk`.
        """
        write = partial(self._appender.append_chunk, physical_offset, data)
        against = AGAINST_REPLICATION
        if self._gate.is_disk_critical and has_state_only(memoryview(data)):
            against = AGAINST_REPLICATED_STATE
        puts, end_offset = self._gate.write(write, against=against)
        on_disk = self._gate.wait_durable(end_offset) if wait else self._gate.is_durable(end_offset, late=False)
        self._stats.count_puts(puts, None, PutKind.COPIED)
        return on_disk

    def is_durable(self, end_offset: int) -> bool:
        """Return True if all bytes of the log before `end_offset` are as durable as the settings promise. Raises
        StoreFailedError if the disk failed.

        Received parts of a hole (damaged range of the log) that is not complete yet count as durable, because they are
        always on disk.
        """
        return self._gate.is_durable(min(end_offset, self._parts.log.end_offset), late=False)

    def begin_at(self, physical_offset: int) -> None:
        """Begin an empty log at the physical offset at which a log file of another replica begins. Raises
        InvalidArgumentError if the log is not empty, or if no log file may begin at this offset."""
        with self._parts.append_lock:
            self._parts.log.begin_at(physical_offset)


def units_between(queue: ConsumeQueue, physical_offset: int, end_offset: int) -> list[HoleUnit]:
    """Return the units of a queue that point into a range of the log, including units that are not yet visible to
    consumers.

    Called under the append lock. Raises StoreCorruptError if the queue lacks one of the units.
    """
    units: list[HoleUnit] = []
    offset, found = queue.first_placed_at(physical_offset), True
    while found and offset < queue.next_offset:
        block = queue.units(offset, _UNITS_AT_A_TIME)
        points = block["size"] != PRE_BLANK_SIZE
        inside = points & (block["physical_offset"] >= physical_offset) & (block["physical_offset"] < end_offset)
        units += [
            HoleUnit(queue.topic, queue.queue_id, offset + row, *(int(field) for field in block[row]))
            for row in np.flatnonzero(inside).tolist()
        ]
        offset, found = offset + len(block), bool(len(block)) and not (points & ~inside).any()
    return units


def has_state_only(data: memoryview) -> bool:
    """True if every record of a log chunk is a record of a broker's state. False if the chunk is not complete."""
    position = 0
    while position < len(data):
        size, good = check_record(data, position, check_crc=False)
        if not good:
            return False
        if size == 0:  # The BLANK (end-of-file marker) fills the rest of the log file.
            return True
        try:
            if dispatch_view(data, position).topic != STATE_TOPIC:
                return False
        except RecordError:
            return False
        position += size
    return True


def read_chunk(reader: LogReader, min_offset: int, physical_offset: int, limit: int, max_bytes: int) -> bytes:
    """Read about `max_bytes` of the log from `physical_offset` on, at least one record. A record or a log file must
    start at this offset.

    Returns empty bytes at `limit`, the end of what may be read. Raises InvalidArgumentError if the offset is after
    `limit`, and DataLossError if it is before `min_offset`, the log's start. Raises StoreCorruptError if the log is
    damaged at the offset.
    """
    if physical_offset > limit:
        raise InvalidArgumentError(f"the log ends at physical offset {limit}, before {physical_offset}")
    if physical_offset < min_offset:
        raise DataLossError(
            f"the log starts at physical offset {min_offset}; the part at {physical_offset} was deleted"
        )
    if physical_offset == limit:
        return b""
    file_end = physical_offset - physical_offset % reader.commit_log_file_size + reader.commit_log_file_size
    # Read up to the end of the log file at most. The unused bytes at the file's end are included if the log continues
    # in the next file.
    data = reader.log_bytes(physical_offset, min(limit, file_end))
    max_bytes = min(max(max_bytes, 1), CHUNK_MAX_BYTES)
    if len(data) > max_bytes:
        # Check only sizes and magics of the records: the replica that appends the chunk checks the rest.
        data = data[: _records_end(data, max_bytes)]
        if not data:
            raise StoreCorruptError(
                f"the log of {reader.root} has no record at physical offset {physical_offset}: the disk has "
                "damaged the log; the store checks this range, and another replica's intact bytes repair it"
            )
    return bytes(data)


def _records_end(data: memoryview, max_bytes: int) -> int:
    """Return the end of the first record in `data` that ends at or after `max_bytes`, or else of the last record.

    A BLANK (end-of-file marker) counts as a record that fills the rest of `data`. Returns 0 if `data` does not start
    with a record.
    """
    end = walk_records(data, 0, max_bytes).end
    return len(data) if end < max_bytes and is_blank(data, end) else end


def truncate_log(settings: StoreSettings, physical_offset: int) -> int:
    """Cut the log of a closed store at `physical_offset`, and return the number of removed bytes.

    On return the cut is on disk, and index files with removed records are gone. Queues, index and dedup table are
    adjusted when the store is opened. Raises StoreLockedError if the store is open. Raises InvalidArgumentError if
    `physical_offset` is neither the start of a record nor the log's end. Nothing has changed in these cases.
    """
    root = settings.store_path_root_dir
    lock = DirectoryLock(root, settings.log_directories_elsewhere)
    try:
        log = CommitLog(LogPaths.of(settings), settings.mapped_file_size_commit_log_bytes)
        try:
            damage = DamageNotes()
            holes = HoleTable(root, damage)
            _require_boundary(log, physical_offset, holes.holes)
            # Remove the recorded holes (damaged ranges) after `physical_offset`, before the log is cut there. New
            # records will be stored in that range, and no recorded hole may cover them.
            holes.replace([one for one in holes.holes if one.end_offset <= physical_offset], log.file_size)
            drop_snapshots(root / SNAPSHOT_FILE, physical_offset, damage)
            cut_bytes = log.open_for_append(physical_offset)
            drop_files_from(root / INDEX_DIR, physical_offset)
            for start in log.starts[-1:]:
                disk.flush_path(log.path(start))
            return cut_bytes
        finally:
            log.close()
    finally:
        lock.release()


def _require_boundary(log: CommitLog, physical_offset: int, holes: Sequence[Hole]) -> None:
    ends = {hole.offset: hole.end_offset for hole in holes}
    start = physical_offset - physical_offset % log.file_size
    position, file = start, _bytes_of(log.path(start)) if start in log.starts else b""
    while position < physical_offset:
        if position in ends:
            position = ends[position]
            continue
        size, good = check_record(file, position - start, check_crc=False)
        if not good or size <= 0:
            found = resume_behind(memoryview(file), start, position - start)
            if found is None:
                break
            position = start + found
            continue
        position += size
    if position != physical_offset or physical_offset < log.min_offset:
        raise InvalidArgumentError(
            f"no record of the log in {log.paths} starts or ends at physical offset {physical_offset}"
        )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StoreCorruptError(f"log file {path} is missing") from None
