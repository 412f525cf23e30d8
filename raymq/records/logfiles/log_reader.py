"""Reads the files of a store directory directly, without calls to the process that writes them.

The reader is used by the store itself, by consumers on the same node, and by Spark's Python workers. It takes no lock,
changes nothing, and reads new bytes as soon as the store has written them.

    consumequeue/TOPIC/QUEUE/00000000000000000000      units of 20 bytes: physical offset, size, tag code
    consumequeue_ext/TOPIC/QUEUE/                      the units whose addresses a queue holds: ext_units.py
    commitlog/00000000000000000000                     the records of the units; or in other directories
    batchconsumequeue/TOPIC/QUEUE/                     queues of inner batches: ext_units.py

A consume-queue entry (unit) or a record beyond the queue's visible end may already exist, possibly incomplete. Request
the visible end from the store first, and read only below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.values import (
    CONSUME_QUEUE_EXT_FILE_BYTES,
    CONSUME_QUEUE_UNIT_BYTES,
    MAX_FILTER_MESSAGE_SIZE_BYTES,
)
from raymq.common.errors import DataLossError
from raymq.common.message import PullStatus
from raymq.common.names import is_light_queue
from raymq.common.protocol.store import FetchRequest, FetchResult, QueuePosition, RepairState
from raymq.records.filters.columns import matching
from raymq.records.filters.sql import SqlFilter
from raymq.records.format.layout import UNIT_DTYPE, RecordError
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.format.rewrite import light_record
from raymq.records.kernels.stamp import store_timestamps_at
from raymq.records.logfiles.directory import CONSUME_QUEUE_DIR, CONSUME_QUEUE_EXT_DIR, batch_queue_directory, file_name
from raymq.records.logfiles.ext_units import EXT_ADDRESS_MAX, ExtensionReader, messages_of, units_from
from raymq.records.logfiles.file_maps import FileMaps, open_log_directories
from raymq.records.logfiles.own_records import agree, with_places_of

PRE_BLANK_SIZE: Final = 2**31 - 1
"""Size field of a consume-queue entry that occupies a queue offset but has no record (spec/storage.md §2)."""
_DEFAULT_MAX_MAPPED_BYTES: Final = 16 << 30
_DEFAULT_MAX_MAPPED_FILES: Final = 256
_SCAN_UNITS: Final = 16_384
"""Number of consume-queue entries whose tag codes are compared at a time."""
_FILTER_UNITS: Final = 32_768
"""Maximum number of messages that one fetch checks with a filter expression."""
_FILTER_BYTES: Final = 32 << 20
"""Maximum number of bytes of records that one fetch checks with a filter expression. The fetch ends after the checked
records exceed this limit."""
_FILTER_UNITS_FIRST: Final = 256
"""Minimum number of messages that the first step of a fetch checks with a filter expression; each further step checks
four times as many. The first step is small, because a small fetch needs few messages if most of them match."""
_SPAN_MAX: Final = 1 << 30
"""Maximum distance, in bytes, between the first and the last record in one LocatedRecords object. Positions within this
distance fit in the 32 bits of an Arrow view."""

_AT_ONCE: Final = np.zeros(1, np.int64)
"""Value of `LocatedRecords.starts` for a single record at the beginning of its buffer."""
_AT_ONCE.setflags(write=False)


class StoreFiles(NamedTuple):
    """Paths and file sizes of a store, from which another process on the same node creates a LogReader for the
    store."""

    root: str
    commit_log_file_size: int
    consume_queue_file_size: int
    commit_log_directories: tuple[str, ...] = ()


class LogReader:
    """A read-only view of a store directory. Thread-safe.

    The file sizes must equal the store's settings. `commit_log_directories` contain the log's files; the default is the
    directory `commitlog` below the root. A fetch with tags checks at most as many consume-queue entries as fit in
    `max_filter_message_size` bytes, or `max_messages` entries if that is more (spec/storage.md §10). At most
    `max_mapped_bytes` and `max_mapped_files` are mapped at a time. The arrays from `units` and `views` stay readable
    after `close` and after their file is deleted.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        commit_log_file_size: int,
        consume_queue_file_size: int,
        consume_queue_ext_file_size: int = CONSUME_QUEUE_EXT_FILE_BYTES,
        commit_log_directories: Sequence[Path | str] = (),
        max_filter_message_size: int = MAX_FILTER_MESSAGE_SIZE_BYTES,
        max_mapped_bytes: int = _DEFAULT_MAX_MAPPED_BYTES,
        max_mapped_files: int = _DEFAULT_MAX_MAPPED_FILES,
    ) -> None:
        self.root = Path(root)
        self._consume_queue = f"{root}/{CONSUME_QUEUE_DIR}"
        self.commit_log_file_size = commit_log_file_size
        self._units_per_file = -(-consume_queue_file_size // CONSUME_QUEUE_UNIT_BYTES)
        self._filtered_max = max_filter_message_size // CONSUME_QUEUE_UNIT_BYTES
        self.maps = FileMaps(max_bytes=max_mapped_bytes, max_files=max_mapped_files)
        self._extensions = ExtensionReader(self.maps, f"{root}/{CONSUME_QUEUE_EXT_DIR}", consume_queue_ext_file_size)
        self._log_files = open_log_directories(self.maps, root, commit_log_directories, commit_log_file_size)
        self.mend_units: Callable[[str, int, int, int], bool] | None = None
        """Function that `fetch` calls if consume-queue entries (units) do not match their records. The arguments are a
        topic, a queue id, and an offset range that contains these units. The function returns True if it has rebuilt
        some of the units. None if this reader cannot repair units."""
        self.state_of: Callable[[QueuePosition], RepairState] | None = None
        """Function that returns the state of a record that the store itself could not read. None if no other replica
        can repair this store."""

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> NDArray[np.void]:
        """Return at most `count` entries (units) of a consume queue from queue offset `from_offset` on, as an array
        over the mapped file.

        Returns fewer units at the end of a file (call again for the rest), and none if the file does not exist. Units
        that were never written are zero, so the caller must stay below the queue's visible end.
        """
        file_index, index = divmod(from_offset, self._units_per_file)
        start = file_index * self._units_per_file * CONSUME_QUEUE_UNIT_BYTES
        try:
            data = self.maps.get(f"{self._consume_queue}/{topic}/{queue_id}/{file_name(start)}", at_random=True)
        except FileNotFoundError:
            return np.empty(0, UNIT_DTYPE)
        count = min(count, len(data) // CONSUME_QUEUE_UNIT_BYTES - index)
        if count <= 0:
            return np.empty(0, UNIT_DTYPE)
        return np.frombuffer(data, UNIT_DTYPE, count, index * CONSUME_QUEUE_UNIT_BYTES)

    def tags_codes(
        self, topic: str, queue_id: int, units: NDArray[np.void]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tag code of each consume-queue entry in `units`, and a mask of the entries whose code is known. A
        code may also be stored in the queue's extension. An unknown code is returned as 0; the client then compares the
        text of the message's tag."""
        codes = units["tags_code"].astype(np.int64)
        known = codes > EXT_ADDRESS_MAX
        if not known.all():
            leading = np.flatnonzero(~known)
            codes[leading], known[leading] = self._extensions.tags_codes(topic, queue_id, codes[leading])
        return codes, known

    def ext_units(
        self, topic: str, queue_id: int, addresses: NDArray[np.int64]
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Return the entries (units) at `addresses` in a queue's consume-queue extension, and a mask of the entries
        that exist."""
        return self._extensions.units(topic, queue_id, addresses)

    def store_timestamps(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the store timestamps, in ms since 1970, of the records at the given physical offsets. Raises
        DataLossError if the log file of a record was deleted."""
        times = np.empty(len(physical_offsets), np.int64)
        starts = physical_offsets - physical_offsets % self.commit_log_file_size
        for start in np.unique(starts).tolist():
            rows = np.flatnonzero(starts == start)
            data = self._commit_log_file(start, int(physical_offsets[rows[0]]))
            times[rows] = store_timestamps_at(data, physical_offsets[rows] - start)
        return times

    def views(self, units: NDArray[np.void]) -> list[memoryview]:
        """Return the records of the consume-queue entries in `units`, in order, as views over the mapped files. Records
        that are adjacent on disk share one view.

        Raises DataLossError if the commit log does not contain one of the records.
        """
        if not len(units):
            return []
        # Join records that are adjacent on disk into ranges. The result has one view (memoryview) for each range.
        starts = units["physical_offset"].astype(np.int64)
        ends = starts + units["size"]
        # `breaks`: indices of the records after which the next record is not adjacent in the log. `first`, `last`: the
        # physical offsets at which each range of adjacent records starts and ends.
        breaks = np.flatnonzero(starts[1:] != ends[:-1])
        first = starts[np.concatenate(([0], breaks + 1))].tolist()
        last = ends[np.concatenate((breaks, [len(units) - 1]))].tolist()
        result: list[memoryview] = []
        file_start, data = -1, memoryview(b"")
        for start, end in zip(first, last, strict=True):
            if not 0 <= start - file_start < self.commit_log_file_size or file_start < 0:
                file_start = start - start % self.commit_log_file_size
                data = self._commit_log_file(file_start, start)
            if not start < end <= file_start + len(data):
                raise DataLossError(f"the commit log {self._log_files} lacks bytes {start} to {end}")
            result.append(data[start - file_start : end - file_start])
        return result

    def log_bytes(self, start: int, end: int) -> memoryview:
        """Return the commit log's bytes from physical offset `start` to `end`, which must be in one file. Raises
        DataLossError if these bytes were deleted."""
        file_start = start - start % self.commit_log_file_size
        data = self._commit_log_file(file_start, start)
        if not start <= end <= file_start + len(data):
            raise DataLossError(f"the commit log {self._log_files} lacks bytes {start} to {end}")
        return data[start - file_start : end - file_start]

    def fetch(self, request: FetchRequest, min_offset: int, max_offset: int, max_bytes: int) -> FetchResult:
        """Execute one fetch request on a queue whose readable offsets are [`min_offset`, `max_offset`).

        Returns at most `max_bytes` of records, but at least one record if any matches. If `max_bytes` is 0, no record
        is read: the status FOUND then means that a matching message exists at `next_offset`. NO_MATCHED_MESSAGE means
        that the filter excluded every message before `next_offset`. `next_offset` may be the end of the queue, or the
        end of the offset range that one fetch checks. Raises DataLossError like `views`.
        """
        offset = request.queue_offset
        if not min_offset <= offset <= max_offset:
            nearest = min(max(offset, min_offset), max_offset)
            return FetchResult(PullStatus.OFFSET_ILLEGAL, nearest, min_offset, max_offset, b"", 0)
        if offset == max_offset:
            return FetchResult(PullStatus.NO_NEW_MESSAGE, offset, min_offset, max_offset, b"", 0)
        try:
            pieces, next_offset = self._choose(
                request, self._scan_end(request, max_offset, self._filtered_max), max_bytes
            )
        except DataLossError:
            if not self.has_batches(request.topic, request.queue_id):
                raise
            return self._fetch_of_batches(request, min_offset, max_offset, max_bytes)
        if max_bytes == 0 and pieces:
            return FetchResult(PullStatus.FOUND, next_offset, min_offset, max_offset, b"", 0)
        if not pieces:
            return FetchResult(PullStatus.NO_MATCHED_MESSAGE, next_offset, min_offset, max_offset, b"", 0)
        if is_light_queue(request.topic):
            records = b"".join([record for piece in pieces for record in self._light_records(request.topic, *piece)])
        else:
            records = b"".join([view for units, _ in pieces for view in self.views(units)])
            units, offsets = map(np.concatenate, zip(*pieces, strict=True))
            sizes = units["size"].astype(np.int64)
            places = sizes, units["physical_offset"], offsets
            records, wrong = with_places_of(records, *places, request.queue_id)
            if len(wrong) and self.mend_units is not None:
                first, last = int(offsets[wrong[0]]), int(offsets[wrong[-1]])
                if self.mend_units(request.topic, request.queue_id, first, last + 1):
                    return self.fetch(request, min_offset, max_offset, max_bytes)
        count = sum(len(units) for units, _ in pieces)
        return FetchResult(PullStatus.FOUND, next_offset, min_offset, max_offset, records, count)

    def find(self, request: FetchRequest, end_offset: int, max_bytes: int) -> tuple[list[LocatedRecords], int]:
        """Find the records before `end_offset` that match a fetch request, in the mapped files. Returns the records,
        and the queue offset at which to continue. The queue must contain the request's offset.

        Returns at most `max_bytes` of records, but at least one record if any matches. Returns no records if the filter
        excludes every message that one call checks. Raises DataLossError if the first record does not exist, or if its
        consume-queue entry points to another record. Also raises DataLossError for a queue whose records the store does
        not keep in the log as they are, but creates when it reads them (`makes_records`). If a later record is missing,
        the records before it are returned.
        """
        if is_light_queue(request.topic):
            raise DataLossError(
                f"the log has records of other queues at the physical offsets that queue {request.queue_id} of "
                f"topic {request.topic!r} names"
            )
        if end_offset == request.queue_offset + 1 and not _excludes(request):
            one = self._find_one(request)
            if one is not None:
                return [one], end_offset
        pieces, next_offset = self._choose(request, self._scan_end(request, end_offset, self._filtered_max), max_bytes)
        found: list[LocatedRecords] = []
        for units, offsets in pieces:
            positions, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
            # Group consecutive records that are in one log file and within _SPAN_MAX bytes of each other.
            part = positions // self.commit_log_file_size
            if self.commit_log_file_size > _SPAN_MAX:
                part = positions // _SPAN_MAX + (part << 32)
            edges = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1).tolist(), len(units)]
            for first, last in pairwise(edges):
                try:
                    here = self.records_at(positions[first:last], sizes[first:last], offsets[first:last])
                    here = _own(here, request.queue_id)
                except DataLossError:
                    if not found:
                        raise
                    return found, int(offsets[first])
                found.append(here)
                if len(here.starts) < last - first:
                    return found, int(offsets[first + len(here.starts)])
        return found, next_offset

    def _find_one(self, request: FetchRequest) -> LocatedRecords | None:
        """Find the one record at the request's queue offset, faster than `find`, because most long polls return one
        record. Returns None if this method cannot find the record; the caller must then use `find`."""
        offset = request.queue_offset
        units = self.units(request.topic, request.queue_id, offset, 1)
        if not len(units):
            return None
        position, size, _ = units.item(0)
        if not 0 < size != PRE_BLANK_SIZE or position < 0:
            return None
        start = position % self.commit_log_file_size
        data = self._commit_log_file(position - start, position)
        if start + size > len(data):
            return None
        return _own(
            LocatedRecords(
                *(data[start : start + size], _AT_ONCE, np.array((size,), np.int64)),
                *(np.array((offset,), np.int64), position),
            ),
            request.queue_id,
        )

    def records_at(
        self, positions: NDArray[np.int64], sizes: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> LocatedRecords:
        """Return the records at the physical offsets `positions` of one log file, up to the first record that the file
        does not contain. Raises DataLossError if the file does not contain the first record."""
        file_start = int(positions[0]) - int(positions[0]) % self.commit_log_file_size
        data = self._commit_log_file(file_start, int(positions[0]))
        ends = positions + sizes
        held = (positions >= file_start) & (sizes > 0) & (ends <= file_start + len(data))
        count = len(held) if held.all() else int(np.argmin(held))
        if not count:
            raise DataLossError(f"the commit log {self._log_files} lacks bytes {int(positions[0])} to {int(ends[0])}")
        positions, sizes, ends = positions[:count], sizes[:count], ends[:count]
        low = int(positions.min())
        return LocatedRecords(
            data[low - file_start : int(ends.max()) - file_start], positions - low, sizes, offsets[:count], low
        )

    def _scan_end(self, request: FetchRequest, max_offset: int, filtered_max: int) -> int:
        """Return the queue offset up to which one fetch checks messages against the request's filter."""
        if not _excludes(request):
            return max_offset
        if request.sql is not None:
            return min(max_offset, request.queue_offset + _FILTER_UNITS)
        return min(max_offset, request.queue_offset + max(filtered_max, request.max_messages))

    def _choose(
        self, request: FetchRequest, end_offset: int, max_bytes: int
    ) -> tuple[list[tuple[NDArray[np.void], NDArray[np.int64]]], int]:
        """Choose the consume-queue entries (units) before `end_offset` that match a fetch request. Returns groups of
        units with their queue offsets, and the queue offset at which to continue. One call checks a limited number of
        messages with a filter expression. So the returned offset may be before `end_offset`, even if no checked message
        matches."""
        codes = None
        expression = None if request.sql is None else SqlFilter(request.sql)
        at_once = _SCAN_UNITS if expression is None else max(_FILTER_UNITS_FIRST, 2 * request.max_messages)
        looked_bytes = 0
        if request.tag_codes is not None:
            codes = np.fromiter(request.tag_codes, np.int64, len(request.tag_codes)).astype(np.int32)
        pieces: list[tuple[NDArray[np.void], NDArray[np.int64]]] = []
        offset, messages, free_bytes = request.queue_offset, request.max_messages, max_bytes
        while offset < end_offset and messages > 0:
            scanned = min(at_once if _excludes(request) else messages, _SCAN_UNITS, end_offset - offset)
            # Copy the consume-queue entries: compaction may blank entries of the mapped file at any time.
            units = self.units(request.topic, request.queue_id, offset, scanned).copy()
            if not len(units):
                raise DataLossError(
                    f"consume queue {self._consume_queue}/{request.topic}/{request.queue_id} has no entry for "
                    f"offset {offset}"
                )
            wanted = units["size"] != PRE_BLANK_SIZE
            if codes is not None:
                # RocketMQ compares only the low 32 bits of a tag code. The client compares the tag's text afterwards.
                tags_codes, known = self.tags_codes(request.topic, request.queue_id, units)
                wanted &= np.isin(tags_codes.astype(np.int32), codes) | ~known
            if expression is not None:
                at_once, looked_bytes = at_once * 4, looked_bytes + int(units["size"][wanted].sum(dtype=np.int64))
                wanted &= self._passing(units, wanted, expression)
            # Find the queue entries that match the fetch request, and compute how many of them may be returned. The
            # limits on bytes and messages decide this, but the whole result has at least one message.
            matches = np.flatnonzero(wanted)
            if max_bytes == 0 and len(matches):
                return [(units[:0], matches[:0])], offset + int(matches[0])
            fitting = int(np.searchsorted(np.cumsum(units["size"][matches], dtype=np.int64), free_bytes, "right"))
            taken = min(messages, max(fitting, 0 if pieces else 1), len(matches))
            if taken:
                taken_units = units[:taken] if taken == scanned else units[matches[:taken]]
                pieces.append((taken_units, offset + matches[:taken]))
                free_bytes -= int(taken_units["size"].sum(dtype=np.int64))
                messages -= taken
            if taken < len(matches):
                # The fetch has reached its limit of bytes or messages, so not all matching messages were taken. The
                # next fetch continues at the first matching message that is left.
                return pieces, offset + int(matches[taken])
            offset += len(units)
            if looked_bytes >= _FILTER_BYTES:
                break
        return pieces, offset

    def _passing(self, units: NDArray[np.void], among: NDArray[np.bool_], expression: SqlFilter) -> NDArray[np.bool_]:
        """Return a mask of the consume-queue entries (units) whose records match a filter expression. Only the units
        marked in `among` are checked, and only the records' properties are read. A missing record counts as a match, so
        that its reader reports the damage."""
        passing = np.ones(len(units), np.bool_)
        rows = np.flatnonzero(among)
        positions, sizes = units["physical_offset"][rows].astype(np.int64), units["size"][rows].astype(np.int64)
        file = positions // self.commit_log_file_size
        edges = [0, *(np.flatnonzero(file[1:] != file[:-1]) + 1).tolist(), len(rows)]
        for first, last in pairwise(edges):
            if first == last:
                continue
            try:
                here = self.records_at(positions[first:last], sizes[first:last], rows[first:last])
            except DataLossError:
                continue
            passing[here.offsets] = matching(here.data, here.starts, expression)
        return passing

    def makes_records(self, topic: str, queue_id: int) -> bool:
        """True if `fetch` creates the queue's records instead of returning bytes of the log. `fetch` creates the
        records of two kinds of queues: light queues, whose records are in the log as records of other queues, and
        queues of inner batches."""
        return is_light_queue(topic) or self.has_batches(topic, queue_id)

    def _light_records(self, topic: str, units: NDArray[np.void], offsets: NDArray[np.int64]) -> Iterator[bytes]:
        """Yield the records of the entries (`units`) of a light queue, as if the messages had been sent to the light
        queue."""
        for index, queue_offset in enumerate(offsets.tolist()):
            [view] = self.views(units[index : index + 1])
            try:
                yield light_record(view, topic, queue_offset)
            except RecordError:
                yield bytes(view)  # Yield a damaged record unchanged. The consumer that decodes it reports the damage.

    def has_batches(self, topic: str, queue_id: int) -> bool:
        """True if the records of the queue are inner batches, which hold many messages each (ext_units.py). Such a
        queue has no plain entries (`units`)."""
        return batch_queue_directory(self.root, topic, queue_id).is_dir()

    def _fetch_of_batches(self, request: FetchRequest, min_offset: int, max_offset: int, max_bytes: int) -> FetchResult:
        """Execute a fetch request on a queue with inner batches. Each message is returned as a separate record."""
        directory = batch_queue_directory(self.root, request.topic, request.queue_id)
        records: list[bytes] = []
        free_bytes, next_offset = max_bytes, max_offset
        # The tags of the batched messages are in the records, not in the queue's entries. Reading records takes longer
        # than reading entries, so a fetch from such a queue checks fewer messages than a fetch from a plain queue.
        scan_end = self._scan_end(request, max_offset, min(self._filtered_max, _SCAN_UNITS))
        for units in units_from(self.maps, directory, request.queue_offset):
            if units[0]["base_offset"] >= scan_end:
                next_offset = min(int(units[0]["base_offset"]), max_offset)
                break
            [view] = self.views(units)
            for queue_offset, record in messages_of(view, units[0], request.queue_offset, request.tag_codes):
                if record and request.sql is not None and not matching(record, _AT_ONCE, SqlFilter(request.sql))[0]:
                    continue
                if max_bytes == 0:
                    return FetchResult(PullStatus.FOUND, queue_offset, min_offset, max_offset, b"", 0)
                if records and (len(record) > free_bytes or len(records) == request.max_messages):
                    return _found(records, queue_offset, min_offset, max_offset)
                records.append(record)
                free_bytes -= len(record)
        if records:
            return _found(records, next_offset, min_offset, max_offset)
        return FetchResult(PullStatus.NO_MATCHED_MESSAGE, next_offset, min_offset, max_offset, b"", 0)

    def close(self) -> None:
        """Drop all memory maps of the store's files. Arrays from earlier calls stay readable."""
        self.maps.close()

    def _commit_log_file(self, file_start: int, wanted: int) -> memoryview:
        """Return the bytes of the log file that starts at `file_start`. Raises DataLossError if the file was deleted.
        The error text contains `wanted`, the physical offset that the caller needs."""
        try:
            return self._log_files.map_file(file_start)
        except FileNotFoundError:
            raise DataLossError(
                f"the commit log {self._log_files} no longer holds physical offset {wanted}: its file was deleted"
            ) from None


def _own(records: LocatedRecords, queue_id: int) -> LocatedRecords:
    """Return the records before the first record that does not agree with its consume-queue entry (unit). Raises
    DataLossError if the first record does not agree. The caller then fetches from the store, which may repair the unit
    (`mend_units`) and returns a damaged record in a form that is safe to read."""
    positions = records.starts + records.position
    same = agree(records.data, records.starts, records.sizes, positions, records.offsets, queue_id)
    if same.all():
        return records
    if not same[0]:
        position = int(records.starts[0]) + records.position
        raise DataLossError(
            f"the record of queue offset {records.offsets[0]} is damaged, or is not at physical offset "
            f"{position}, which its consume-queue entry names"
        )
    return records.part(0, int(np.argmin(same)))


def _excludes(request: FetchRequest) -> bool:
    """True if a fetch request has a filter (tags or a filter expression)."""
    return request.tag_codes is not None or request.sql is not None


def _found(records: list[bytes], next_offset: int, min_offset: int, max_offset: int) -> FetchResult:
    return FetchResult(PullStatus.FOUND, next_offset, min_offset, max_offset, b"".join(records), len(records))
