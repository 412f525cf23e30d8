"""One index file: a hash table with chains, from keys to positions in the commit log (spec/storage.md §3).

On disk
    index/20261120180926228        named after the local time of its creation, yyyyMMddHHmmssSSS

    | header 40 | slots, 4 each | entries, 20 each; number 0 is never used |

    header  | begin_timestamp 8 | end_timestamp 8 | begin_physical 8 | end_physical 8 | slots_used 4 | next_entry 4 |
    slot    | number of the slot's newest entry, 0 if empty |
    entry   | key_hash 4 | physical_offset 8 | seconds 4 | number of the previous entry in the slot, 0 if none |

`seconds` count from the file's begin_timestamp. The file does not contain the text of a key, so a search must compare
the key with the records that it finds.

The file is sparse except for header and slots. These are written through a map, because a batch changes slots all over
the file. Their blocks are allocated when the file is created; otherwise a full disk would kill the process. Entries are
written by position, in order, before the slots that point to them. After a crash it is unknown how much of a file
survived. So files whose end_timestamp is not in the checkpoint are deleted and rebuilt (index_service.py).
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.files import disk

logger = logging.getLogger(__name__)

HEADER_BYTES: Final = 40
SLOT_BYTES: Final = 4
ENTRY_BYTES: Final = 20
SECONDS_MAX: Final = 2**31 - 1

_HEADER: Final = struct.Struct(">qqqqii")
_SLOT: Final = struct.Struct(">i")
_ENTRY: Final = struct.Struct(">iqii")
_ENTRY_DTYPE: Final = np.dtype(
    [("key_hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)


class IndexHeader(NamedTuple):
    """The fields of an index file's header. `next_entry` is the number that the next added entry gets."""

    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    slots_used: int = 0
    next_entry: int = 1


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The numbers of slots and entries (entry 0 included) in each index file of a store."""

    slots: int
    entries: int

    @property
    def file_size(self) -> int:
        return self.entry_at(self.entries)

    def slot_at(self, slot: int) -> int:
        return HEADER_BYTES + SLOT_BYTES * slot

    def entry_at(self, number: int) -> int:
        return HEADER_BYTES + SLOT_BYTES * self.slots + ENTRY_BYTES * number


@dataclass(frozen=True, slots=True)
class IndexEntries:
    """Entries to add to an index file, in log order, as columns of equal length."""

    key_hashes: NDArray[np.int32]
    physical_offsets: NDArray[np.int64]
    store_timestamps: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key_hashes)

    def from_entry(self, first: int) -> IndexEntries:
        """Return the index entries from position `first` on."""
        return IndexEntries(self.key_hashes[first:], self.physical_offsets[first:], self.store_timestamps[first:])


def join_entries(parts: Sequence[IndexEntries]) -> IndexEntries:
    """Join lists of index entries (at least one list) in their order."""
    if len(parts) == 1:
        return parts[0]
    return IndexEntries(
        np.concatenate([part.key_hashes for part in parts]),
        np.concatenate([part.physical_offsets for part in parts]),
        np.concatenate([part.store_timestamps for part in parts]),
    )


def read_header(data: bytes | memoryview | mmap.mmap) -> IndexHeader:
    """Read the header from an index file's bytes. A next_entry of 0 (a file that was never written) becomes 1."""
    header = IndexHeader._make(_HEADER.unpack_from(data))
    return header._replace(next_entry=max(header.next_entry, 1))


def drop_files_from(directory: Path, physical_offset: int) -> None:
    """Remove the index files in `directory` that contain records at or after `physical_offset`, where the store's log
    was cut. The store builds them again from its log."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not path.name.isdecimal():
            continue
        with path.open("rb") as file:
            data = file.read(HEADER_BYTES)
        if len(data) == HEADER_BYTES and read_header(data).end_physical_offset >= physical_offset:
            logger.info(
                "index file %s has records after the cut of the log at %d; it is rebuilt", path, physical_offset
            )
            disk.unlink(path)


class IndexFile:
    """One index file open for writing. One thread adds entries; `find_entries` reads the same bytes through another
    map."""

    def __init__(self, path: Path, shape: IndexShape) -> None:
        """Open the existing index file `path`. Its size must be the size of an index file with the numbers of slots and
        entries in `shape`."""
        self.path, self._shape = path, shape
        self._descriptor = disk.open_file(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(self._descriptor, shape.entry_at(0))
        except BaseException:
            os.close(self._descriptor)
            raise
        self._slots = np.frombuffer(self._map, ">i4", shape.slots, HEADER_BYTES)
        self.header = read_header(self._map)

    @classmethod
    def create(cls, path: Path, shape: IndexShape, previous: IndexHeader | None, *, scratch: Path) -> IndexFile:
        """Create an empty index file. Its begin and end fields are set to the end time and the end offset in
        `previous`, the header of the previous file.

        After an OSError (such as a full disk) no file is left. On return the file's name is on disk.
        """
        descriptor = disk.open_file(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            disk.preallocate(descriptor, shape.entry_at(0))
            os.ftruncate(descriptor, shape.file_size)
        except BaseException:
            disk.unlink(scratch)
            raise
        finally:
            os.close(descriptor)
        disk.rename(scratch, path)
        disk.sync_directory(path.parent)
        file = cls(path, shape)
        if previous is not None:
            time_ms, physical_offset = previous.end_timestamp, previous.end_physical_offset
            file._write_header(IndexHeader(time_ms, time_ms, physical_offset, physical_offset))
        return file

    @property
    def is_full(self) -> bool:
        return self.header.next_entry >= self._shape.entries

    def put_entries(self, entries: IndexEntries) -> int:
        """Add as many of `entries` to the index file as fit, in order. Returns the number of added entries (spec §3,
        Put).

        After an OSError the file's entries are unchanged; bytes that no slot points to may have changed.
        """
        header = self.header
        count = min(len(entries), self._shape.entries - header.next_entry)
        if count <= 0:
            return 0
        hashes, times = entries.key_hashes[:count], entries.store_timestamps[:count]
        numbers = np.arange(header.next_entry, header.next_entry + count, dtype=np.int32)
        begin = IndexHeader(header.begin_timestamp, 0, header.begin_physical_offset)
        seconds = _seconds(times, header.begin_timestamp)
        if header.next_entry <= 1:
            # In a new file, `seconds` of the first entry counts from the end time of the previous file. All later
            # entries of the new file count from the store time of its first entry.
            begin = IndexHeader(int(times[0]), 0, int(entries.physical_offsets[0]))
            seconds[1:] = _seconds(times[1:], begin.begin_timestamp)
        # Sort the entries by slot of the hash table; entries of one slot stay in log order.
        slots = hashes % np.int32(self._shape.slots)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        # follows[i]: True if entry i has the same slot as entry i - 1, in the order of the slots. Entry i then follows
        # entry i - 1 in the chain of this slot.
        follows = np.zeros(count, bool)
        follows[1:] = ordered[1:] == ordered[:-1]
        # newest[i]: the number of the entry that precedes entry i in the chain of entry i's slot. This entry is one of
        # the new entries, or the newest entry of the slot in the file. A number in the file that is not plausible
        # counts as 0.
        newest = self._slots[ordered].astype(np.int32)
        newest[(newest < 0) | (newest > numbers[order])] = 0
        newest[1:][follows[1:]] = numbers[order[:-1]][follows[1:]]
        # `order` sorts the arrays above by slot. The file stores entries in log order, so arrange the new entries in
        # log order.
        rows = np.empty(count, _ENTRY_DTYPE)
        rows["key_hash"], rows["physical_offset"], rows["seconds"] = hashes, entries.physical_offsets[:count], seconds
        rows["previous"][order] = newest
        disk.pwrite_all(self._descriptor, self._shape.entry_at(header.next_entry), rows.view(np.uint8).data)
        self._write_header(
            IndexHeader(
                begin.begin_timestamp,
                int(times[-1]),
                begin.begin_physical_offset,
                int(entries.physical_offsets[count - 1]),
                header.slots_used + int((newest == 0).sum()),
                header.next_entry + count,
            )
        )
        # Write the index slots only after the entries are in the file, because each slot points to the newest entry of
        # its chain.
        last = np.ones(count, bool)
        last[:-1] = ~follows[1:]
        self._slots[ordered[last]] = numbers[order[last]]
        return count

    def flush(self) -> None:
        """Flush the index file, and wait until all entries are on disk."""
        disk.flush(self._descriptor)

    def close(self) -> None:
        """Close the index file without a flush. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            del self._slots
            self._map.close()

    def _write_header(self, header: IndexHeader) -> None:
        _HEADER.pack_into(self._map, 0, *header)
        self.header = header


def _seconds(times: NDArray[np.int64], begin_timestamp: int) -> NDArray[np.int32]:
    """Return whole seconds since `begin_timestamp`; 0 for earlier times, and 0 if `begin_timestamp` is not set."""
    if begin_timestamp <= 0:
        return np.zeros(len(times), np.int32)
    return np.clip((times - begin_timestamp) // 1000, 0, SECONDS_MAX).astype(np.int32)


class FoundEntry(NamedTuple):
    """Result of an index search: the physical offset of an entry's record, and the entry's time in whole seconds since
    the begin time of the index file."""

    physical_offset: int
    timestamp_ms: int


def find_entries(
    data: memoryview, shape: IndexShape, key_hash: int, begin_ms: int, end_ms: int
) -> Iterator[FoundEntry]:
    """Yield the index entries with the hash `key_hash` and a time in [`begin_ms`, `end_ms`], newest first (spec §3,
    Query).

    May run while another thread adds entries: entries added during the search are left out. The search terminates for
    any content of the file, even a damaged one.
    """
    header = read_header(data)
    (number,) = _SLOT.unpack_from(data, shape.slot_at(key_hash % shape.slots))
    if number > min(header.next_entry, shape.entries - 1):
        return
    while number > 0:
        found, physical_offset, seconds, previous = _ENTRY.unpack_from(data, shape.entry_at(number))
        time_ms = header.begin_timestamp + seconds * 1000
        if seconds < 0:
            return
        if found == key_hash and begin_ms <= time_ms <= end_ms:
            yield FoundEntry(physical_offset, time_ms)
        if time_ms < begin_ms or previous >= number:
            return
        number = previous
