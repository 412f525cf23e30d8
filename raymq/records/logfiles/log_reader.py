"""Reads the files of a store directory in place, without calls to the process that writes them.

Used by the store itself, by consumers on the same node, and by Spark's Python workers. Read-only: it takes no lock,
changes nothing, and sees new bytes as soon as the store has written them.

    consumequeue/TOPIC/QUEUE/00000000000000000000      units of 20 bytes: physical offset, size, tag code
    consumequeue_ext/TOPIC/QUEUE/                      the units whose addresses a queue holds: ext_units.py
    commitlog/00000000000000000000                     the records that the units point to; or in other directories
    batchconsumequeue/TOPIC/QUEUE/                     queues of inner batches: ext_units.py

A unit or record beyond the queue's visible end may be there already, or half there: ask the store for the end first,
and read below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.config.store import (
    CONSUME_QUEUE_EXT_FILE_BYTES,
    CONSUME_QUEUE_UNIT_BYTES,
    MAX_FILTER_MESSAGE_SIZE_BYTES,
)
from raymq.common.errors import DataLossError
from raymq.common.message import PullStatus
from raymq.common.names import is_light_queue
from raymq.common.protocol.store import FetchRequest, FetchResult
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
"""The size in a unit that only keeps a queue offset occupied and points to no record (spec/storage.md §2)."""
_DEFAULT_MAX_MAPPED_BYTES: Final = 16 << 30
_DEFAULT_MAX_MAPPED_FILES: Final = 256
_SCAN_UNITS: Final = 16_384
"""Units whose tag codes are compared at a time."""
_FILTER_UNITS: Final = 32_768
"""Messages that one fetch looks through for a filter expression."""
_FILTER_BYTES: Final = 32 << 20
"""Bytes of records that it may lie among, though only their properties are read."""
_FILTER_UNITS_FIRST: Final = 256
"""Messages that are looked through first: where most pass, a fetch for a few is not to look at many."""
_SPAN_MAX: Final = 1 << 30
"""The bytes of a log file from the first to the last of LocatedRecords, at most: positions in them fit in 32
bits, which Arrow's views have."""

_AT_ONCE: Final = np.zeros(1, np.int64)
"""The position of a record that begins where its view does."""
_AT_ONCE.setflags(write=False)


class StoreFiles(NamedTuple):
    """A store's files, as a LogReader in another process of the node needs them."""

    root: str
    commit_log_file_size: int
    consume_queue_file_size: int
    commit_log_directories: tuple[str, ...] = ()


class LogReader:
    """A read-only view of a store directory. Thread-safe.

    The file sizes must be those the store was written with; `commit_log_directories` hold the files of its log,
    by default `commitlog` below the root. A fetch that asks for tags looks at the messages of
    `max_filter_message_size` bytes of units, and at `max_messages` at least (spec/storage.md §10). At most
    `max_mapped_bytes` and `max_mapped_files` are mapped at a time. The arrays of `units` and `views` stay readable
    after `close` and after the file is deleted.
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
        """Called by `fetch` with a topic, a queue id, and two offsets between which units do not lead to their records.
        Returns True if it has made some again. None where the files are only read."""

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> NDArray[np.void]:
        """At most `count` units of a queue from queue offset `from_offset` on, as an array over the mapped file.

        Fewer when the file ends (ask again from there), none when there is no such file. Units that were never
        written are zero: the caller keeps below the queue's visible end.
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
        """The tag codes of a queue's `units`, those in its extension too, and a mask of the known ones: the client
        looks at the text of the others, whose code is 0 here."""
        codes = units["tags_code"].astype(np.int64)
        known = codes > EXT_ADDRESS_MAX
        if not known.all():
            leading = np.flatnonzero(~known)
            codes[leading], known[leading] = self._extensions.tags_codes(topic, queue_id, codes[leading])
        return codes, known

    def ext_units(
        self, topic: str, queue_id: int, addresses: NDArray[np.int64]
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """The units of a queue's extension at `addresses`, and a mask of those that are there."""
        return self._extensions.units(topic, queue_id, addresses)

    def store_timestamps(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The store timestamps of the records at these offsets, in ms since 1970. DataLossError if one is gone."""
        times = np.empty(len(physical_offsets), np.int64)
        starts = physical_offsets - physical_offsets % self.commit_log_file_size
        for start in np.unique(starts).tolist():
            rows = np.flatnonzero(starts == start)
            data = self._commit_log_file(start, int(physical_offsets[rows[0]]))
            times[rows] = store_timestamps_at(data, physical_offsets[rows] - start)
        return times

    def views(self, units: NDArray[np.void]) -> list[memoryview]:
        """The records of `units`, in order, as views over the mapped files; neighbours on disk share one view.

        DataLossError if the commit log no longer has, or never had, one of the records.
        """
        if not len(units):
            return []
        # `breaks`: the units behind which the next record does not follow on disk; between them one view is enough.
        starts = units["physical_offset"].astype(np.int64)
        ends = starts + units["size"]
        # breaks: the units that end before the next one starts. first, last: the ends of each range without a break.
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
                raise DataLossError(f"the commit log {self._log_files} does not hold bytes {start} to {end}")
            result.append(data[start - file_start : end - file_start])
        return result

    def log_bytes(self, start: int, end: int) -> memoryview:
        """The log's bytes from physical offset `start` to `end`, which lie in one file. DataLossError if gone."""
        file_start = start - start % self.commit_log_file_size
        data = self._commit_log_file(file_start, start)
        if not start <= end <= file_start + len(data):
            raise DataLossError(f"the commit log {self._log_files} does not hold bytes {start} to {end}")
        return data[start - file_start : end - file_start]

    def fetch(self, request: FetchRequest, min_offset: int, max_offset: int, max_bytes: int) -> FetchResult:
        """Carry out one request on a queue whose readable offsets are [`min_offset`, `max_offset`).

        At most `max_bytes` of records, but one record at least if any matches. With `max_bytes` 0 no record is read:
        FOUND then says that there is a match, and `next_offset` where. NO_MATCHED_MESSAGE: everything up to
        `next_offset` was looked at and excluded; that may be all, or as much as one fetch looks at. DataLossError as
        for `views`.
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
        """The records before `end_offset` that answer a request, where they lie in the mapped files, and the queue
        offset to go on at. The request's offset is one that the queue holds.

        At most `max_bytes` of records, but one at least if any matches; none if the tags exclude all that one call
        looks at. DataLossError if the first of them is not there (any more), or its unit leads elsewhere; also for a
        queue whose records are made for their readers (`makes_records`). The records before a lost one come without it.
        """
        if is_light_queue(request.topic):
            raise DataLossError(f"the records of {request.topic} are in the log as those of other queues")
        if end_offset == request.queue_offset + 1 and not _excludes(request):
            one = self._find_one(request)
            if one is not None:
                return [one], end_offset
        pieces, next_offset = self._choose(request, self._scan_end(request, end_offset, self._filtered_max), max_bytes)
        found: list[LocatedRecords] = []
        for units, offsets in pieces:
            positions, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
            # Records that lie in one file, and near enough to each other, are one part.
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
        """`find` of a single record, which is what a poll that waits most often finds, in fewer steps. None if there is
        something about it that `find` deals with."""
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
        """The records at these physical offsets of one file, up to the first that the file does not hold. DataLossError
        if that is the first of all."""
        file_start = int(positions[0]) - int(positions[0]) % self.commit_log_file_size
        data = self._commit_log_file(file_start, int(positions[0]))
        ends = positions + sizes
        held = (positions >= file_start) & (sizes > 0) & (ends <= file_start + len(data))
        count = len(held) if held.all() else int(np.argmin(held))
        if not count:
            raise DataLossError(
                f"the commit log {self._log_files} does not hold bytes {int(positions[0])} to {int(ends[0])}"
            )
        positions, sizes, ends = positions[:count], sizes[:count], ends[:count]
        low = int(positions.min())
        return LocatedRecords(
            data[low - file_start : int(ends.max()) - file_start], positions - low, sizes, offsets[:count], low
        )

    def _scan_end(self, request: FetchRequest, max_offset: int, filtered_max: int) -> int:
        """The queue offset up to which one fetch looks for matching messages."""
        if not _excludes(request):
            return max_offset
        if request.sql is not None:
            return min(max_offset, request.queue_offset + _FILTER_UNITS)
        return min(max_offset, request.queue_offset + max(filtered_max, request.max_messages))

    def _choose(
        self, request: FetchRequest, end_offset: int, max_bytes: int
    ) -> tuple[list[tuple[NDArray[np.void], NDArray[np.int64]]], int]:
        """The units before `end_offset` that answer a request, with their queue offsets, in pieces, and the queue
        offset to go on at. With a filter expression that may be before `end_offset`, though all was excluded."""
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
            # A copy: compaction may blank units of the map at any moment.
            units = self.units(request.topic, request.queue_id, offset, scanned).copy()
            if not len(units):
                raise DataLossError(f"{self._consume_queue}/{request.topic}/{request.queue_id} lacks offset {offset}")
            wanted = units["size"] != PRE_BLANK_SIZE
            if codes is not None:
                # RocketMQ compares the low 32 bits; the tag's text is compared by the client.
                tags_codes, known = self.tags_codes(request.topic, request.queue_id, units)
                wanted &= np.isin(tags_codes.astype(np.int32), codes) | ~known
            if expression is not None:
                at_once, looked_bytes = at_once * 4, looked_bytes + int(units["size"][wanted].sum(dtype=np.int64))
                wanted &= self._passing(units, wanted, expression)
            # The indices of the matching units, then how many of them the limits admit: by bytes, but one at least in
            # the whole answer, and by messages.
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
                # Full: go on at the first match that was left. What lies between does not match.
                return pieces, offset + int(matches[taken])
            offset += len(units)
            if looked_bytes >= _FILTER_BYTES:
                break
        return pieces, offset

    def _passing(self, units: NDArray[np.void], among: NDArray[np.bool_], expression: SqlFilter) -> NDArray[np.bool_]:
        """Marks the units `among` these whose records pass a filter expression. Of the records only the properties are
        read. One that is not there counts as passing: who reads it finds out."""
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
        """True if the queue's records are made for their readers, by `fetch`: it is a light queue, whose records lie in
        the log as those of other queues, or it has batches."""
        return is_light_queue(topic) or self.has_batches(topic, queue_id)

    def _light_records(self, topic: str, units: NDArray[np.void], offsets: NDArray[np.int64]) -> Iterator[bytes]:
        """The records of a light queue's `units`, as they would be if they had been sent there."""
        for index, queue_offset in enumerate(offsets.tolist()):
            [view] = self.views(units[index : index + 1])
            try:
                yield light_record(view, topic, queue_offset)
            except RecordError:
                yield bytes(view)  # its reader finds out

    def has_batches(self, topic: str, queue_id: int) -> bool:
        """True if the records of the queue hold many messages each (ext_units.py): it has no `units`."""
        return batch_queue_directory(self.root, topic, queue_id).is_dir()

    def _fetch_of_batches(self, request: FetchRequest, min_offset: int, max_offset: int, max_bytes: int) -> FetchResult:
        """`fetch` of a queue that has batches. Its messages come as records of their own."""
        directory = batch_queue_directory(self.root, request.topic, request.queue_id)
        records: list[bytes] = []
        free_bytes, next_offset = max_bytes, max_offset
        # Their tags are in the records, which takes longer.
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
        """Drop the maps that are not in use."""
        self.maps.close()

    def _commit_log_file(self, file_start: int, wanted: int) -> memoryview:
        """The bytes of the log file that starts at `file_start`. DataLossError, which names `wanted`, if it is gone."""
        try:
            return self._log_files.map_file(file_start)
        except FileNotFoundError:
            raise DataLossError(
                f"the commit log {self._log_files} no longer holds physical offset {wanted}: its file was deleted"
            ) from None


def _own(records: LocatedRecords, queue_id: int) -> LocatedRecords:
    """The first of these records, up to one that does not agree with its unit. DataLossError if that is the first of
    all: the store may know better (`mend_units`), and hands a damaged record over in a form that is safe to read."""
    positions = records.starts + records.position
    same = agree(records.data, records.starts, records.sizes, positions, records.offsets, queue_id)
    if same.all():
        return records
    if not same[0]:
        position = int(records.starts[0]) + records.position
        raise DataLossError(
            f"the unit of queue offset {records.offsets[0]} leads to {position} in the log, where its record is not, "
            "or is damaged"
        )
    return records.part(0, int(np.argmin(same)))


def _excludes(request: FetchRequest) -> bool:
    """True if a request does not want all messages."""
    return request.tag_codes is not None or request.sql is not None


def _found(records: list[bytes], next_offset: int, min_offset: int, max_offset: int) -> FetchResult:
    return FetchResult(PullStatus.FOUND, next_offset, min_offset, max_offset, b"".join(records), len(records))
