"""A queue's compacted log: a copy of the messages before an offset, reduced to the newest message of each key.

On disk
    compaction/TOPIC/QUEUE/00000000000000000007.log      records back to back, the same bytes as in the commit log
    compaction/TOPIC/QUEUE/00000000000000000007.units    | end offset 8 | COMPACTED_UNIT … |, ascending by queue offset

The number in the file name is the number of the generation. A generation is written completely while the previous one
still exists. It becomes valid once its units file has its final name; then the previous generation is deleted. So a
crash leaves the old or the new generation; incomplete files are deleted when the store opens. The compacted log stays
when retention deletes the commit log's files.

A damaged record is not copied: its unit has the flag DAMAGED and size 0. The record stays in the commit log, and its
unit stays in the consume queue, so that readers still find the record.

The format is raymq's own: RocketMQ's compactionLog and compactionCq have other formats, and RocketMQ rebuilds them.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import StoreCorruptError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import Boundary, FetchRequest, FetchResult
from raymq.records.filters.columns import matching
from raymq.records.filters.sql import SqlFilter
from raymq.records.logfiles.own_records import with_places_of
from storage.files import disk

COMPACTION_DIR: Final = "compaction"
COMPACTED_UNIT: Final = np.dtype(
    [
        ("queue_offset", "<i8"),
        ("physical_offset", "<i8"),
        ("position", "<i8"),
        ("size", "<i4"),
        ("flags", "<u4"),
        ("tags_code", "<i8"),
        ("store_timestamp", "<i8"),
        ("key_high", "<u8"),
        ("key_low", "<u8"),
    ]
)
"""Layout of an entry (unit) of a compacted log. There is one unit for each message: the message's positions in the
queue, the commit log and the compacted log, and the hash of the message's key."""
TOMBSTONE: Final = 1
KEYLESS: Final = 2
DAMAGED: Final = 4
_HEADER: Final = struct.Struct("<q")
_SCAN_ROWS: Final = 16_384
"""Maximum number of units whose tags codes one fetch compares."""
_SCAN_BYTES: Final = 4 << 20
"""Maximum number of record bytes to which one fetch applies a filter expression."""


class CompactedLog:
    """One generation (complete version) of a queue's compacted log, read through maps. Immutable and
    thread-safe."""

    def __init__(self, directory: Path, generation: int) -> None:
        """Open a generation of a compacted log. Raises StoreCorruptError if its two files do not match."""
        self.directory, self.generation = directory, generation
        head = _mapped(_units_path(directory, generation))
        self._data = _mapped(_log_path(directory, generation))
        if len(head) < _HEADER.size or (len(head) - _HEADER.size) % COMPACTED_UNIT.itemsize:
            raise StoreCorruptError(f"file {_units_path(directory, generation)} is damaged: it has {len(head)} bytes")
        [self.end_offset] = _HEADER.unpack_from(head)
        self.units: NDArray[np.void] = np.frombuffer(head, COMPACTED_UNIT, offset=_HEADER.size)
        self._offsets = np.ascontiguousarray(self.units["queue_offset"])
        self._has_record = self.units["flags"] & DAMAGED == 0
        last = self.units[-1] if len(self.units) else None
        if last is not None and int(last["position"]) + int(last["size"]) > len(self._data):
            raise StoreCorruptError(
                f"file {_log_path(directory, generation)} is damaged: it ends before its last record"
            )

    def fetch(self, request: FetchRequest, min_offset: int, max_offset: int, max_bytes: int) -> FetchResult:
        """Fetch messages of the compacted log, from an offset before `end_offset` (as LogReader.fetch does). Skips
        offsets without a message."""
        first = int(np.searchsorted(self._offsets, request.queue_offset))
        matches, end = self._matches(request, first)
        scanned_to = self.end_offset if end == len(self.units) else int(self._offsets[end])
        if not len(matches):
            return FetchResult(PullStatus.NO_MATCHED_MESSAGE, scanned_to, min_offset, max_offset, b"", 0)
        if max_bytes == 0:
            return FetchResult(PullStatus.FOUND, int(self._offsets[matches[0]]), min_offset, max_offset, b"", 0)
        sizes = self.units["size"][matches].astype(np.int64)
        fitting = max(int(np.searchsorted(np.cumsum(sizes), max_bytes, "right")), 1)
        taken = matches[: min(fitting, request.max_messages)]
        next_offset = scanned_to if len(taken) == len(matches) else int(self._offsets[matches[len(taken)]])
        units = self.units[taken]
        places = units["size"].astype(np.int64), units["physical_offset"], units["queue_offset"]
        records, _ = with_places_of(b"".join(self.records(taken)), *places, request.queue_id)
        return FetchResult(PullStatus.FOUND, next_offset, min_offset, max_offset, records, len(taken))

    def _matches(self, request: FetchRequest, first: int) -> tuple[NDArray[np.int64], int]:
        """Return the indices of the entries (units) that match a request. The search starts at entry `first` and covers
        the range that one fetch searches.

        Also returns the index of the entry at which the next fetch continues.
        """
        if request.tag_codes is None and request.sql is None:
            end = min(len(self.units), first + request.max_messages)
            return first + np.flatnonzero(self._has_record[first:end]), end
        end = min(len(self.units), first + _SCAN_ROWS)
        if request.sql is not None and first < end:
            # A filter expression must read whole records, not only queue units. So limit the number of record bytes
            # that one fetch searches, but search at least one record.
            limit = int(self.units[first]["position"]) + _SCAN_BYTES
            end = max(first + 1, first + int(np.searchsorted(self.units["position"][first:end], limit)))
        wanted = self._has_record[first:end].copy()
        if request.tag_codes is not None:
            codes = np.array(sorted(request.tag_codes), np.int64).astype(np.int32)
            wanted &= np.isin(self.units["tags_code"][first:end].astype(np.int32), codes)
        if request.sql is not None and first < end:
            [data] = self.records(np.arange(first, end))
            rows = first + np.flatnonzero(wanted)
            starts = self.units["position"][rows] - self.units[first]["position"]
            wanted[rows - first] = matching(data, starts, SqlFilter(request.sql))
        return first + np.flatnonzero(wanted), end

    def records(self, rows: NDArray[np.int64]) -> Iterable[memoryview]:
        """Yield the bytes of the records whose units (entries of the queue) have the numbers `rows`, in order. Adjacent
        records are yielded together."""
        if not len(rows):
            return
        edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for start, end in pairwise(edges):
            first, last = self.units[rows[start]], self.units[rows[end - 1]]
            yield self._data[int(first["position"]) : int(last["position"]) + int(last["size"])]

    def offset_by_time(self, time_ms: int, boundary: Boundary) -> int:
        """Return the queue offset for a store time.

        LOWER: the first message stored at `time_ms` or later; `end_offset` if no such message exists. UPPER: the last
        message stored at `time_ms` or before; 0 if no such message exists.
        """
        times = self.units["store_timestamp"]
        if boundary is Boundary.LOWER:
            later = np.flatnonzero((times >= time_ms) & self._has_record)
            return int(self._offsets[later[0]]) if len(later) else self.end_offset
        earlier = np.flatnonzero((times <= time_ms) & self._has_record)
        return int(self._offsets[earlier[-1]]) if len(earlier) else 0

    @property
    def log_path(self) -> Path:
        """Path of the file with the records of this generation."""
        return _log_path(self.directory, self.generation)

    @property
    def data(self) -> memoryview:
        """The bytes of the file with the records, over its memory map."""
        return self._data

    @property
    def used_bytes(self) -> int:
        """The size in bytes of the records."""
        return len(self._data)

    def rows_from(self, row: int, count: int, max_bytes: int) -> NDArray[np.int64]:
        """Return the numbers of at most `count` units from `row` on, whose records have about `max_bytes` together."""
        sizes = np.cumsum(self.units["size"][row : row + count], dtype=np.int64)
        return row + np.arange(min(int(np.searchsorted(sizes, max_bytes)) + 1, len(sizes)))

    def span_of(self, rows: NDArray[np.int64]) -> tuple[int, int]:
        """Return the byte positions in the file between which the records of adjacent units lie."""
        first, last = self.units[rows[0]], self.units[rows[-1]]
        return int(first["position"]), int(last["position"]) + int(last["size"])

    def is_damaged(self, row: int) -> bool:
        """True if the unit stands for a damaged record that was not copied."""
        return not self._has_record[row]

    def damaged_offsets(self) -> NDArray[np.int64]:
        """Return the queue offsets, ascending, of records that are damaged and therefore not copied to the compacted
        log."""
        offsets: NDArray[np.int64] = self._offsets[~self._has_record]
        return offsets

    def delete(self) -> None:
        """Delete the files of this generation of the compacted log. Readers that have mapped the files can still read
        the bytes."""
        disk.unlink(_units_path(self.directory, self.generation))
        disk.unlink(_log_path(self.directory, self.generation))


def newest(directory: Path) -> CompactedLog | None:
    """Return the newest generation of the compacted log in a queue's directory; None if no generation exists. Deletes
    files of other generations that a crash left."""
    numbers = sorted(int(path.stem) for path in directory.glob("*.units") if path.stem.isdecimal())
    found = CompactedLog(directory, numbers[-1]) if numbers else None
    keep = {_units_path(directory, numbers[-1]), _log_path(directory, numbers[-1])} if numbers else set()
    for path in directory.glob("*"):
        if path not in keep:
            disk.unlink(path)
    return found


class NewGeneration:
    """A generation of a compacted log that is being written. It becomes valid with `publish`; `newest` deletes an
    unpublished generation."""

    def __init__(self, directory: Path, generation: int) -> None:
        """Start a new generation of the compacted log. The generation's records must be written in the order of its
        entries (units). Raises OSError if the disk fails or is full."""
        disk.make_directory(directory)
        self._directory, self._generation = directory, generation
        disk.unlink(_log_path(directory, generation))
        self._file = disk.open_file(_log_path(directory, generation), os.O_RDWR | os.O_CREAT)
        self._size = 0

    def write(self, records: Iterable[memoryview]) -> None:
        """Append records to the file of the compacted log's new generation. Raises OSError if the disk fails or is
        full."""
        data = b"".join(records)
        disk.pwrite_all(self._file, self._size, data)
        self._size += len(data)

    def finish(self, units: NDArray[np.void], end_offset: int) -> None:
        """Write the generation's entries (`units`) to disk, each with the position of its record in the new compacted
        log. Also flush the records to disk. Raises OSError if the disk fails or is full."""
        disk.flush(self._file)
        ends = np.cumsum(units["size"], dtype=np.int64)
        units["position"] = ends - units["size"]
        disk.write_file(self._new_units, _HEADER.pack(end_offset) + units.tobytes())

    def publish(self) -> CompactedLog:
        """Make the new generation of the compacted log the valid one, by renaming its units file. The rename survives a
        crash of the process at once, and a power cut after the directory has been flushed to disk. Raises OSError if
        the disk fails."""
        disk.rename(self._new_units, _units_path(self._directory, self._generation))
        return CompactedLog(self._directory, self._generation)

    def close(self) -> None:
        os.close(self._file)

    @property
    def _new_units(self) -> Path:
        return _units_path(self._directory, self._generation).with_suffix(".new")


def _units_path(directory: Path, generation: int) -> Path:
    return directory / f"{generation:020d}.units"


def _log_path(directory: Path, generation: int) -> Path:
    return directory / f"{generation:020d}.log"


def _mapped(path: Path) -> memoryview:
    """Map a file and return its bytes. Raises StoreCorruptError if the file does not exist."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except FileNotFoundError:
        raise StoreCorruptError(
            f"file {path} is missing: restore the file, or delete the directory {path.parent}"
        ) from None
