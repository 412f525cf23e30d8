"""The extension of one consume queue: what RocketMQ keeps of a message besides its unit (spec/storage.md §2).

On disk
    consumequeue_ext/TOPIC/QUEUE/00000000000000000000      48 MiB each, named after the offset of the first byte

    unit    | size 2 = 20 + bitmap | tags_code 8 | store_time 8 | bitmap_size 2 | bitmap |
    end     | -1 2 | what no unit fits in any more

RocketMQ writes it with `enableConsumeQueueExt`, which is off by default. The unit in the consume queue then holds, in
the place of a tag code, the address of an extension unit: its offset, counted from the smallest long. raymq keeps no
bitmaps, so its store writes no extension; consumers of a queue that has one get every message whose unit holds an
address, and look at the tag itself (raymq.log_reader).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

from raymq.errors import InvalidArgumentError
from raymq.log_reader import EXT_ADDRESS_MAX, file_name
from storage import disk
from storage.mapped_file import allocate
from storage.mapped_file_queue import list_starts

CONSUME_QUEUE_EXT_DIR: Final = "consumequeue_ext"
FILE_BYTES: Final = 48 << 20
UNIT_MAX_BYTES: Final = 32767

_UNIT: Final = struct.Struct(">hqqh")
_SIZE: Final = struct.Struct(">h")
_END_MARK: Final = -1
_ROOM_LEFT_BYTES: Final = 4
_FIRST_ADDRESS: Final = -(2**63)
_REMEDY: Final = "delete the directory, and the bitmaps in it are lost"


class ExtUnit(NamedTuple):
    """What the extension holds of one message."""

    tags_code: int
    store_timestamp_ms: int
    bitmap: bytes = b""

    @property
    def size(self) -> int:
        return _UNIT.size + len(self.bitmap)

    def encode(self) -> bytes:
        """InvalidArgumentError for a bitmap that is too long."""
        if self.size > UNIT_MAX_BYTES:
            raise InvalidArgumentError(f"an extension unit of {self.size} bytes exceeds {UNIT_MAX_BYTES}")
        return _UNIT.pack(self.size, self.tags_code, self.store_timestamp_ms, len(self.bitmap)) + self.bitmap


def is_ext_address(tags_code: int) -> bool:
    """Whether what a consume-queue unit holds as its tag code is the address of an extension unit: no hash is."""
    return tags_code <= EXT_ADDRESS_MAX


def address_of(offset: int) -> int:
    """The address of the extension unit at `offset`."""
    return offset + _FIRST_ADDRESS


def offset_of(address: int) -> int:
    """The opposite of `address_of`. InvalidArgumentError for what is no address."""
    if not is_ext_address(address):
        raise InvalidArgumentError(f"{address} is a tag code, not an address in a queue's extension")
    return address - _FIRST_ADDRESS


class ConsumeQueueExt:
    """The extension units of one queue. For one thread at a time. `end_offset` is where the next unit goes."""

    def __init__(self, root: Path, topic: str, queue_id: int, file_size: int = FILE_BYTES) -> None:
        """Find the files and the end of what is in them. StoreCorruptError when they do not form a row."""
        self.directory = root / CONSUME_QUEUE_EXT_DIR / topic / str(queue_id)
        self._scratch = root / "consumequeue_ext.new"
        self._file_size = file_size
        self._starts = list_starts(self.directory, file_size, remedy=_REMEDY)
        self.end_offset = self._end_of_last_file() if self._starts else 0

    @property
    def min_offset(self) -> int:
        """The offset of the first byte that is still on disk."""
        return self._starts[0] if self._starts else 0

    def put(self, unit: ExtUnit) -> int:
        """Append a unit; returns its address. On return it outlives this process, not a power cut.

        InvalidArgumentError for a unit that is too long for a file, OSError when the disk fails.
        """
        data = unit.encode()
        if len(data) + _ROOM_LEFT_BYTES > self._file_size:
            raise InvalidArgumentError(f"an extension unit of {len(data)} bytes does not fit in {self._file_size}")
        file_end = self._starts[-1] + self._file_size if self._starts else self.end_offset
        if self.end_offset < file_end < self.end_offset + len(data) + _ROOM_LEFT_BYTES:
            self._write(self.end_offset, _SIZE.pack(_END_MARK))
            self.end_offset = file_end
        if self.end_offset == file_end:
            self._add_file(self.end_offset)
        self._write(self.end_offset, data)
        address = address_of(self.end_offset)
        self.end_offset += len(data)
        return address

    def get(self, address: int) -> ExtUnit | None:
        """The unit at an address; None if none is there (any more). InvalidArgumentError for what is no address."""
        offset = offset_of(address)
        if not self.min_offset <= offset < self.end_offset:
            return None
        return self._unit_at(offset)

    def truncate_from(self, address: int) -> None:
        """Remove the unit at `address` and those behind it: the consume queue ends before the unit that names it."""
        offset = offset_of(address)
        if offset >= self.end_offset:
            return
        while self._starts and self._starts[-1] > offset:
            disk.unlink(self._path(self._starts.pop()))
        if self._starts:
            self._write(offset, bytes(self._starts[-1] + self._file_size - offset))
        self.end_offset = max(offset, self.min_offset)

    def delete_before(self, address: int) -> int:
        """Delete the files all of whose units are before `address`, which is still needed; returns how many."""
        offset, count = offset_of(address), len(self._starts)
        while len(self._starts) > 1 and self._starts[0] + self._file_size <= offset:
            disk.unlink(self._path(self._starts.pop(0)))
        return count - len(self._starts)

    def flush(self) -> None:
        """Wait until all that was put is on disk."""
        for start in self._starts[-2:]:
            disk.flush_path(self._path(start))
        if self._starts:
            disk.sync_directory(self.directory)

    def _path(self, start: int) -> Path:
        return self.directory / file_name(start)

    def _add_file(self, start: int) -> None:
        disk.make_directory(self.directory)
        allocate(self._scratch, self._file_size)
        disk.rename(self._scratch, self._path(start))
        self._starts.append(start)

    def _write(self, offset: int, data: bytes) -> None:
        start = offset - offset % self._file_size
        descriptor = disk.open_file(self._path(start), os.O_WRONLY)
        try:
            disk.pwrite_all(descriptor, offset - start, data)
        finally:
            os.close(descriptor)

    def _unit_at(self, offset: int) -> ExtUnit | None:
        start = offset - offset % self._file_size
        descriptor = disk.open_file(self._path(start), os.O_RDONLY)
        try:
            return _parse(os.pread(descriptor, UNIT_MAX_BYTES, offset - start))
        finally:
            os.close(descriptor)

    def _end_of_last_file(self) -> int:
        """Behind the last good unit of the last file; at its end if the end is marked."""
        data, position = self._path(self._starts[-1]).read_bytes(), 0
        while (unit := _parse(data[position : position + UNIT_MAX_BYTES])) is not None:
            position += unit.size
        if data[position : position + _SIZE.size] == _SIZE.pack(_END_MARK):
            position = self._file_size
        return self._starts[-1] + position


def _parse(data: bytes) -> ExtUnit | None:
    """The unit that `data` begins with; None if it begins with none, or with one cut short."""
    if len(data) < _UNIT.size:
        return None
    size, tags_code, store_timestamp_ms, bitmap_size = _UNIT.unpack_from(data)
    if size != _UNIT.size + bitmap_size or bitmap_size < 0 or size > len(data):
        return None
    return ExtUnit(tags_code, store_timestamp_ms, data[_UNIT.size : size])
