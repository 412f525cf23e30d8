"""The consume queues as a section of a store's verification: queues of single messages, and queues of inner batches.

The log's section compares each record with the queue unit that the record names. This section reads the files of the
queues themselves. So it finds units to which no record leads, sectors that cannot be read, units of inner batches, and
units of extensions.

    unit of a message      points into the log, after the unit before it; its extension unit has the record's values
    unit of an inner batch equals the unit that the record would get

A unit is rewritten only from an intact record that names exactly this place. A unit that points into a hole (damaged
range of the log) stays as it is: the record may come back from another replica.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import DataLossError, StoreNotWritableError
from raymq.records.format.check import check_record
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.inner_batch import inner_batch
from raymq.records.format.layout import MIN_RECORD_SIZE, RecordError
from raymq.records.logfiles.ext_units import EXT_ADDRESS_MAX
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.append.write_gate import WriteGate
from storage.dispatch.batch_dispatch import is_good_batch
from storage.dispatch.queue_check import leads_to_own
from storage.files.page_cache import passing_read
from storage.log.log_walk import walk_log
from storage.parts import StoreParts
from storage.queue.batch_consume_queue import BatchConsumeQueue, BatchUnit
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.consume_queue_ext import ExtendedConsumeQueue
from storage.queue.queue_table import AnyQueue
from storage.read.unit_repair import UnitRepair
from storage.scrub.log_section import PART_BYTES, Checked

DOUBTFUL_MAX: Final = 64
"""Maximum number of queue units that one step compares with their records, because they point outside of the log or are
out of order."""
SEARCHED_BYTES_MAX: Final = 64 << 20
"""Maximum number of log bytes in which the record of one unit of an inner batch is searched."""

logger = logging.getLogger(__name__)


class QueueSection:
    """The files of all consume queues, by topic and queue id. A position is a queue and a byte of it, as JSON."""

    name = "queues"

    def __init__(self, parts: StoreParts, gate: WriteGate, repair: UnitRepair) -> None:
        """`repair`: rewrites the units of queues of single messages."""
        self._parts, self._gate, self._repair = parts, gate, repair

    def size(self) -> int:
        return sum(end - begin for queue in self._parts.queues for begin, end in [queue.used_bytes()])

    def step(self, position: str) -> Checked:
        """Check the next units of a queue. Raises StoreNotWritableError if the disk fails."""
        after: tuple[str, int, int] = tuple(json.loads(position)) if position else ("", -1, 0)
        queue = self._queue_from(after[:2])
        if queue is None:
            return Checked(None)
        begin, end = queue.used_bytes()
        if queue.key == after[:2]:
            begin = max(begin, after[2])
        if begin >= end:
            return Checked(json.dumps([queue.topic, queue.queue_id + 1, 0]))
        path, file_start, file_end = queue.file_at(begin)
        until = min(begin + PART_BYTES - PART_BYTES % queue.unit_bytes, file_end, end)
        behind = json.dumps([*queue.key, until])
        try:
            with passing_read(
                path,
                begin - file_start,
                until - file_start,
                mapped=lambda: self._parts.reader.maps.get(str(path), at_random=True),
            ):
                found = self._check(queue, begin // queue.unit_bytes, until // queue.unit_bytes)
        except FileNotFoundError:
            return Checked(behind)  # The topic was deleted, or retention has deleted the file.
        except OSError as error:
            text = f"queue file {path} cannot be read from byte {begin - file_start} on: {error}"
            return Checked(json.dumps([*queue.key, file_end]), found=1, unrepaired=(text,))
        return found._replace(position=behind, read_bytes=until - begin)

    def _queue_from(self, key: tuple[str, int]) -> AnyQueue | None:
        """Return the first queue, by topic and queue id, from `key` on. Returns None after the last queue."""
        return min((one for one in self._parts.queues if one.key >= key), key=lambda one: one.key, default=None)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the append lock while units are rewritten. Raises StoreNotWritableError if the disk fails."""
        with self._parts.append_lock:
            self._gate.require_open()
            try:
                yield
            except OSError as error:
                self._gate.fail(error)
                raise StoreNotWritableError(f"a damaged queue entry cannot be rewritten: {error}") from error

    def _check(self, queue: AnyQueue, first: int, end: int) -> Checked:
        """Check the units with the numbers [`first`, `end`) of a queue, which are in one file."""
        if isinstance(queue, BatchConsumeQueue):
            return self._check_batches(queue, first, end)
        units = queue.units(first, end - first)
        found = repaired = 0
        unrepaired: list[str] = []
        for offset in (first + self._doubtful(units)).tolist():
            if not self._is_wrong(queue, offset):
                continue
            found += 1
            if self._repair.mend(queue, offset, offset + 1) and not self._is_wrong(queue, offset):
                repaired += 1
            elif self._is_wrong(queue, offset):
                name = f"{queue.topic}:{queue.queue_id}"
                unrepaired.append(f"the entry of queue {name} at offset {offset} points to no record of the queue")
        if isinstance(queue, ExtendedConsumeQueue):
            wrong = self._check_extension(queue, first, units)
            found, repaired = found + wrong, repaired + wrong
        return Checked("", 0, found, repaired, (), tuple(unrepaired))

    def _doubtful(self, units: NDArray[np.void]) -> NDArray[np.int64]:
        """Return the rows, at most DOUBTFUL_MAX, of units that may be wrong: they point outside of the log, or they are
        out of order."""
        log = self._parts.log
        begins, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        points = sizes != PRE_BLANK_SIZE
        wrong = points & ((sizes <= 0) | (begins < log.min_offset) | (begins + sizes > log.end_offset))
        rows = np.flatnonzero(points & ~wrong)
        late = np.flatnonzero(begins[rows][1:] < (begins[rows] + sizes[rows])[:-1])
        # Of two units that are out of order, either one may be wrong.
        wrong[rows[late]] = wrong[rows[late + 1]] = True
        doubtful: NDArray[np.int64] = np.flatnonzero(wrong)[:DOUBTFUL_MAX]
        return doubtful

    def _is_wrong(self, queue: ConsumeQueue, offset: int) -> bool:
        """True if a unit of a queue does not point to its record, although the record need not be damaged or lost."""
        with self._parts.append_lock:
            self._gate.require_open()
            if not queue.min_offset <= offset < queue.next_offset or self._parts.queues.get(*queue.key) is not queue:
                return False
            [unit] = queue.units(offset, 1)
            begin, size = int(unit["physical_offset"]), int(unit["size"])
            if size == PRE_BLANK_SIZE or 0 < size < MIN_RECORD_SIZE:
                return False  # The unit stands for a lost or damaged record (share_among_holes).
            if any(hole.offset <= begin < hole.end_offset for hole in self._parts.holes.holes):
                return False
            return not leads_to_own(queue, offset, self._parts.reader)

    def _check_extension(self, queue: ExtendedConsumeQueue, first: int, units: NDArray[np.void]) -> int:
        """Compare the extension units of a queue's units with the records, and rewrite wrong ones. Returns the number
        of wrong extension units."""
        rows = np.flatnonzero((units["tags_code"] <= EXT_ADDRESS_MAX) & (units["size"] != PRE_BLANK_SIZE))
        if not len(rows):
            return 0
        addresses = units["tags_code"][rows].astype(np.int64)
        extended, exist = self._parts.reader.ext_units(*queue.key, addresses)
        wrong = 0
        for index in np.flatnonzero(exist).tolist():
            row = int(rows[index])
            view = self._record_at(int(units[row]["physical_offset"]), int(units[row]["size"]))
            values = int(extended[index]["tags_code"]), int(extended[index]["store_timestamp"])
            if view is None or (view.topic, view.queue_id, view.queue_offset) != (*queue.key, first + row):
                continue
            if values != (view.tags_code, view.store_timestamp_ms):
                with self._writing():
                    queue.rewrite_extension(first + row, view.tags_code, view.store_timestamp_ms)
                logger.error(
                    "an extension entry of queue %s:%d at offset %d was damaged and has been rewritten",
                    *(*queue.key, first + row),
                )
                wrong += 1
        return wrong

    def _check_batches(self, queue: BatchConsumeQueue, first: int, end: int) -> Checked:
        """Compare units of inner batches with their records, and rewrite wrong ones."""
        found = repaired = 0
        unrepaired: list[str] = []
        for number in range(first, end):
            if self._batch_agrees(queue, number):
                continue
            with self._writing():
                if self._batch_agrees(queue, number):
                    continue
                unit = self._find_batch(queue, number)
                if unit is not None:
                    queue.put_unit_at(number, unit)
            found += 1
            if unit is None:
                name = f"{queue.topic}:{queue.queue_id}"
                unrepaired.append(f"entry {number} of batch queue {name} points to no record of the queue")
            else:
                repaired += 1
                logger.error(
                    "entry %d of batch queue %s:%d was damaged and has been rewritten: the record is at physical "
                    "offset %d",
                    *(number, *queue.key, unit.physical_offset),
                )
        return Checked("", 0, found, repaired, (), tuple(unrepaired))

    def _batch_agrees(self, queue: BatchConsumeQueue, number: int) -> bool:
        """True if a unit of a batch queue equals the unit that its record would get, or points into a hole."""
        unit = queue.unit_at(number)
        if unit is None or any(one.offset <= unit.physical_offset < one.end_offset for one in self._parts.holes.holes):
            return True
        return self._batch_at(queue, unit.physical_offset, unit.size) == unit

    def _batch_at(self, queue: BatchConsumeQueue, physical_offset: int, size: int) -> BatchUnit | None:
        """Return the unit of the inner batch at a place of the log. None if no inner batch of the queue is there."""
        view = self._record_at(physical_offset, size)
        if view is None or (view.topic, view.queue_id) != queue.key or not is_good_batch(view):
            return None
        base_offset, messages = inner_batch(view)
        return BatchUnit(physical_offset, size, view.tags_code, view.store_timestamp_ms, base_offset, messages)

    def _find_batch(self, queue: BatchConsumeQueue, number: int) -> BatchUnit | None:
        """Return the unit that the queue should have at a number: of the only inner batch between the records of the
        units before and after. Returns None if no inner batch, or more than one, lies there."""
        before, after = queue.unit_at(number - 1), queue.unit_at(number + 1)
        begin = self._parts.log.min_offset if before is None else before.physical_offset + before.size
        end = self._parts.log.committed_offset if after is None else after.physical_offset
        end = min(end, begin + SEARCHED_BYTES_MAX)
        found: list[BatchUnit] = []
        while begin < end and len(found) < 2:
            try:
                walked = walk_log(self._parts.reader, begin, end, PART_BYTES)
            except DataLossError:
                return None
            edges = [*walked.starts.tolist(), len(walked.data)]
            for at, behind in pairwise(edges):
                unit = self._batch_at(queue, walked.physical_offset + at, behind - at)
                found += [] if unit is None else [unit]
            begin = max(walked.end_offset, begin + 1)
        return found[0] if len(found) == 1 else None

    def _record_at(self, physical_offset: int, size: int) -> DispatchView | None:
        """Return the fields of the intact record of `size` bytes at a physical offset; None if none is there."""
        if size < MIN_RECORD_SIZE or physical_offset < 0:
            return None
        try:
            record = self._parts.reader.log_bytes(physical_offset, physical_offset + size)
            if check_record(record) != (size, True):
                return None
            view = dispatch_view(record, delay_levels_ms=self._parts.settings.delay_levels_ms)
        except (DataLossError, RecordError):
            return None
        return view if view.physical_offset == physical_offset else None
