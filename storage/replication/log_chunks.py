"""The log as bytes, for replication: read from an offset, cut at an offset. Appending is in chunk_appender.py.

A chunk is what lies between two record boundaries of one file: whole records, and at the file's end its BLANK with what
follows it. So a replica that appends chunk after chunk has the same files, byte for byte, and each step of the way is a
log that recovery accepts. Queues, dedup table and index follow from the records as they do in recovery.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from raymq.config.store import StoreSettings
from raymq.errors import DataLossError, InvalidArgumentError, StoreCorruptError
from raymq.logfiles.log_reader import LogReader
from raymq.record.check import check_record
from raymq.record.layout import BLANK_MAGIC, MAGIC_V1, MAGIC_V2, MIN_RECORD_SIZE
from storage.files import disk
from storage.files.lock import DirectoryLock
from storage.log.commit_log import CommitLog
from storage.log.log_paths import LogPaths
from storage.recovery.snapshot import SNAPSHOT_FILE, read_snapshot

CHUNK_MAX_BYTES: Final = 4 << 20

_INTS: Final = struct.Struct(">ii")
_MAGICS: Final = (MAGIC_V1, MAGIC_V2)


def read_chunk(reader: LogReader, min_offset: int, physical_offset: int, limit: int, max_bytes: int) -> bytes:
    """The log's bytes from `physical_offset` on, where a record or a file starts: about `max_bytes`, at least a record.

    Empty at `limit`, the end of what may be read. InvalidArgumentError for an offset beyond it, DataLossError for one
    before `min_offset`, where the log starts, StoreCorruptError where it is damaged.
    """
    if physical_offset > limit:
        raise InvalidArgumentError(f"the log ends at {limit}, before {physical_offset}")
    if physical_offset < min_offset:
        raise DataLossError(f"the log starts at {min_offset}; what was at {physical_offset} was deleted")
    if physical_offset == limit:
        return b""
    file_end = physical_offset - physical_offset % reader.commit_log_file_size + reader.commit_log_file_size
    # The rest of a file goes along only where the log goes on behind it.
    data = reader.log_bytes(physical_offset, min(limit, file_end))
    max_bytes = min(max(max_bytes, 1), CHUNK_MAX_BYTES)
    if len(data) > max_bytes:
        # Only sizes and magics are looked at: whoever appends the chunk checks it.
        data = data[: _records_end(data, max_bytes)]
        if not data:
            raise StoreCorruptError(
                f"no record is at {physical_offset} in the log below {reader.root}: its disk has damaged it; have "
                "another replica lead, and this one filled anew"
            )
    return bytes(data)


def _records_end(data: memoryview, max_bytes: int) -> int:
    """Where the record ends that reaches `max_bytes`; a BLANK goes to the end of `data`. 0 if no record is there."""
    position, end, unpack_from = 0, len(data), _INTS.unpack_from
    while position < max_bytes:
        size, magic = unpack_from(data, position) if position <= end - _INTS.size else (0, 0)
        if magic == BLANK_MAGIC:
            return end
        if magic not in _MAGICS or not MIN_RECORD_SIZE <= size <= end - position:
            break
        position += size
    return position


def truncate_log(settings: StoreSettings, physical_offset: int) -> int:
    """Cut the log of a store that is not open at `physical_offset`; returns how many bytes that took away.

    On return it is on disk; queues, index and dedup table follow when the store is opened. StoreLockedError while it is
    open; InvalidArgumentError, and nothing is changed, unless a record starts or the log ends there.
    """
    root = settings.store_path_root_dir
    lock = DirectoryLock(root, settings.log_directories_elsewhere)
    try:
        log = CommitLog(LogPaths.of(settings), settings.mapped_file_size_commit_log_bytes)
        try:
            _require_boundary(log, physical_offset)
            snapshot = read_snapshot(root / SNAPSHOT_FILE)
            if snapshot is not None and snapshot.end > physical_offset:
                disk.unlink(root / SNAPSHOT_FILE)
                disk.sync_directory(root)
            cut_bytes = log.open_for_append(physical_offset)
            for start in log.starts[-1:]:
                disk.flush_path(log.path(start))
            return cut_bytes
        finally:
            log.close()
    finally:
        lock.release()


def _require_boundary(log: CommitLog, physical_offset: int) -> None:
    start = physical_offset - physical_offset % log.file_size
    position, file = start, _bytes_of(log.path(start)) if start in log.starts else b""
    while position < physical_offset:
        size, good = check_record(file, position - start, check_crc=False)
        if not good or size <= 0:
            break
        position += size
    if position != physical_offset or physical_offset < log.min_offset:
        raise InvalidArgumentError(f"no record of the log in {log.paths} starts or ends at {physical_offset}")


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StoreCorruptError(f"{path} is missing") from None
