"""Consume queues with an extension. The extension stores the tags code and store time of each message in a separate
unit.

On disk: raymq/records/logfiles/ext_units.py. Extensions are written with enable_consume_queue_ext, which is off by
default, and always read. A topic of delayed messages (raymq.common.delay) has no extension, because its queue units
contain times.

raymq writes no bitmaps, so everything in an extension is in the records too, and an extension may be incomplete. If the
disk cannot store a message's extension unit, the consume queue contains the tags code. The extension ends with the unit
at the last address that the consume queue names. Anything that a crash left after that unit is cut when the queue finds
its own end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.store import StoreSettings
from raymq.common.delay import is_waiting_topic
from raymq.common.errors import StoreCorruptError
from raymq.records.logfiles.directory import CONSUME_QUEUE_EXT_DIR
from raymq.records.logfiles.ext_units import EXT_ADDRESS_MAX, EXT_UNIT_DTYPE, addresses_of, offsets_of
from raymq.records.logfiles.log_reader import LogReader
from storage.files.write_handles import WriteHandles
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_files import QueueFiles

logger = logging.getLogger(__name__)

EXT_UNIT_BYTES: Final = EXT_UNIT_DTYPE.itemsize
_END_MARK_SPACE_BYTES: Final = 4
_VALUES_AT: Final = 2
"""Position of the tags code in an extension unit. The store time follows."""
_END_MARK: Final = b"\xff\xff"


class ExtendedConsumeQueue(ConsumeQueue):
    """A consume queue that has an extension, or will get one. `QueueTable` creates consume queues without an extension
    as plain ConsumeQueue."""

    def __init__(
        self,
        root: Path,
        topic: str,
        queue_id: int,
        file_size: int,
        ext: ConsumeQueueExt,
        *,
        reader: LogReader,
        handles: WriteHandles,
        repair: bool,
    ) -> None:
        """Find the files of a queue that has the extension `ext`. Errors and `repair` have the same meaning as for
        `BaseConsumeQueue`."""
        super().__init__(root, topic, queue_id, file_size, reader=reader, handles=handles, repair=repair)
        self._ext = ext

    def append_unit(self, physical_offset: int, size: int, tags_code: int) -> None:
        columns = np.array([physical_offset], np.int64), np.array([size], np.int32), np.array([tags_code], np.int64)
        self.append_scattered(*columns)

    def append_scattered(
        self, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int32], tags_codes: NDArray[np.int64]
    ) -> None:
        super().append_scattered(physical_offsets, sizes, self._ext.put(physical_offsets, tags_codes))

    def truncate_to(self, queue_offset: int) -> None:
        super().truncate_to(queue_offset)
        last_file = next(self._addresses(reversed(self.file_ranges())), None)
        self._ext.end_behind(None if last_file is None else int(last_file[-1]))

    def drop_files_before_min(self) -> list[Path]:
        """Drop the queue files before `min_offset` from the list of files. Returns the dropped queue files, and also
        the queue's extension files that are no longer needed."""
        paths = super().drop_files_before_min()
        if len(self._ext.files.starts) > 1:
            first_file = next(self._addresses(self.file_ranges()), None)
            paths += self._ext.drop_files_before(None if first_file is None else int(first_file[0]))
        return paths

    def rewrite_extension(self, queue_offset: int, tags_code: int, store_timestamp_ms: int) -> None:
        """Replace the tags code and the store time in the extension unit of a queue offset, whose unit has the address
        of an extension unit. Called under the append lock. Raises OSError if the disk fails."""
        [unit] = self.units(queue_offset, 1)
        self._ext.rewrite(int(unit["tags_code"]), tags_code, store_timestamp_ms)

    def take_dirty(self, least_pages: int = 0) -> set[Path]:
        if least_pages and not self._files.is_flush_due(self._end_byte(), least_pages):
            return set()
        return super().take_dirty() | self._ext.files.take_dirty()

    def delete(self) -> None:
        super().delete()
        self._ext.files.delete()

    def _addresses(self, ranges: Iterable[tuple[int, int]]) -> Iterator[NDArray[np.int64]]:
        """Yield the addresses of extension entries (units) that the consume queue's entries contain: one array for each
        queue file that has any."""
        for first, count in ranges:
            from_offset = max(first, self.min_offset)
            codes = self.units(from_offset, first + count - from_offset)["tags_code"].astype(np.int64)
            if len(addresses := codes[codes <= EXT_ADDRESS_MAX]):
                yield addresses


class ConsumeQueueExt:
    """The files of one consume queue's extension. Only one thread at a time may use them, under the store's append
    lock."""

    def __init__(
        self,
        topic: str,
        queue_id: int,
        files: QueueFiles,
        file_size: int,
        *,
        reader: LogReader,
        handles: WriteHandles,
        writes: bool,
    ) -> None:
        self._topic, self._queue_id = topic, queue_id
        self.files = files
        self._file_size = file_size
        self._reader, self._handles = reader, handles
        self.writes = writes
        """True if this queue stores an extension unit for each new message. False once the disk has failed to store an
        extension unit."""
        self._end: int | None = None
        """Byte position at which the next entry (unit) of the extension begins. None for a new queue, or while the end
        is not known yet."""

    @classmethod
    def of_queue(
        cls,
        settings: StoreSettings,
        topic: str,
        queue_id: int,
        *,
        reader: LogReader,
        handles: WriteHandles,
        repair: bool,
    ) -> ConsumeQueueExt | None:
        """Return the extension of a consume queue; None if the queue has no extension and will not get one.

        Raises StoreCorruptError if the extension will be written and its files have a gap, a wrong size or a wrong
        name. With `repair` (after a crash), a gap or a wrong size raises no error. Instead the first file that does not
        fit the earlier files is deleted, with all later files.
        """
        root, file_size = settings.store_path_root_dir, settings.mapped_file_size_consume_queue_ext_bytes
        directory = root / CONSUME_QUEUE_EXT_DIR / topic / str(queue_id)
        writes = settings.enable_consume_queue_ext and not is_waiting_topic(topic)
        if not writes and not directory.is_dir():
            return None
        remedy = (
            "set mapped_file_size_consume_queue_ext_bytes to the size of the files, or delete the directory "
            f"{directory}"
        )
        try:
            files = QueueFiles(root, directory, file_size, handles, repair=repair and writes, remedy=remedy)
        except StoreCorruptError as error:
            if writes:
                raise
            logger.warning("%s; the extension of the consume queue is left unchanged and is not read", error)
            return None
        return cls(topic, queue_id, files, file_size, reader=reader, handles=handles, writes=writes)

    def put(self, physical_offsets: NDArray[np.int64], tags_codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Append an extension unit for each message whose record is at one of `physical_offsets`. Returns the addresses
        of the extension units.

        The consume queue stores these addresses. If extensions are off, or the write fails, the tags codes are returned
        instead.
        """
        if not self.writes:
            return tags_codes
        units = np.zeros(len(tags_codes), EXT_UNIT_DTYPE)
        units["size"] = EXT_UNIT_BYTES
        units["tags_code"] = tags_codes
        units["store_timestamp"] = self._reader.store_timestamps(physical_offsets)
        try:
            if self._end is None:
                self.end_behind(None)
            return addresses_of(self._append(units))
        except OSError as error:
            logger.warning(
                "%s: %s; from now on the entries of the consume queue contain tag codes", self.files.directory, error
            )
            self.writes = False
            return tags_codes

    def _append(self, units: NDArray[np.void]) -> NDArray[np.int64]:
        """Write extension units at the end of the queue's extension files, and return the units' byte offsets."""
        offsets = np.empty(len(units), np.int64)
        assert self._end is not None
        end, done = self._end, 0
        while done < len(units):
            start = end - end % self._file_size
            fitting = (start + self._file_size - _END_MARK_SPACE_BYTES - end) // EXT_UNIT_BYTES
            if fitting <= 0:
                self._write(start, end, _END_MARK)
                end = start + self._file_size
                continue
            if not self.files.starts or self.files.starts[-1] < start:
                self.files.make(start)
            taken = units[done : done + fitting]
            self._write(start, end, taken.view(np.uint8).data)
            offsets[done : done + len(taken)] = np.arange(len(taken)) * EXT_UNIT_BYTES + end
            done += len(taken)
            end += taken.nbytes
        self._end = end
        return offsets

    def _write(self, start: int, offset: int, data: bytes | memoryview) -> None:
        path = self.files.path(start)
        self.files.dirty.add(path)
        self._handles.write(path, offset - start, data)

    def rewrite(self, address: int, tags_code: int, store_timestamp_ms: int) -> None:
        """Replace the tags code and the store time of the extension unit at `address`. Its length fields and its bitmap
        stay. Raises OSError if the disk fails."""
        [offset] = offsets_of(np.array([address])).tolist()
        values = np.array([(tags_code, store_timestamp_ms)], [("tags_code", ">i8"), ("store_timestamp", ">i8")])
        self._write(offset - offset % self._file_size, offset + _VALUES_AT, values.view(np.uint8).data)

    def end_behind(self, address: int | None) -> None:
        """Remove the extension entries (units) after `address`, the last extension address in the consume queue's
        entries. If `address` is None, remove all extension entries.

        The extension entry at `address` may be missing, because its file is missing. In this case all extension entries
        are removed, and new extension entries get addresses that no queue entry contains yet.
        """
        if not self.writes:
            return
        self._end = cut_at = 0
        if address is not None:
            [offset] = offsets_of(np.array([address])).tolist()
            [unit], [is_there] = self._reader.ext_units(self._topic, self._queue_id, np.array([address]))
            if is_there:
                self._end = cut_at = offset + int(unit["size"])
            else:
                self._end = offset - offset % self._file_size + self._file_size
        self.files.cut(cut_at if cut_at else -1)

    def drop_files_before(self, address: int | None) -> list[Path]:
        """Drop the extension files before the file that contains `address`, the first extension address in the queue's
        entries (units). Returns the dropped files.

        The caller then deletes the dropped files from disk. Never drops the last file.
        """
        position = 2**63 - 1 if address is None else int(offsets_of(np.array([address]))[0])
        return self.files.drop_files_before(position)
