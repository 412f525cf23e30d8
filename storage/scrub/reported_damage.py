"""Checks the records of an open store that readers or replicas report as damaged.

A report is never believed: it names a record, and the store checks the record itself (inspector.py). A false report
costs one check.

    report ─▶ is the record intact now? ─▶ INTACT: read it again
                    │ no
                    ├─ a known hole (damaged range) contains it ─▶ DAMAGED: another replica's bytes repair it
                    └─ waits for the thread `inspect-reports` ─▶ CHECKING: its queue unit is rewritten if it is wrong,
                                                                 and its bytes become a hole if they are damaged

The table of waiting reports is bounded, and reports of one record count once. The thread rests after each check for a
multiple of the check's time, so that many reports cost little.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from raymq.common.errors import DataLossError, RaymqError
from raymq.common.protocol.store import PHYSICAL_QUEUE_ID, Hole, QueuePosition, RepairState
from raymq.records.format.check import check_record
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.dispatch.queue_check import leads_to_own
from storage.parts import StoreParts
from storage.queue.batch_consume_queue import BatchConsumeQueue
from storage.queue.consume_queue import ConsumeQueue
from storage.scrub.inspector import LogInspector

REPORTS_MAX: Final = 1000
"""Maximum number of reports that wait for their check. Further reports are dropped; the reader reports the record
again."""
RANGE_MAX_BYTES: Final = 8 << 20
"""Maximum length in bytes of the part of the log that one report names."""
CHECKED_AGAIN_S: Final = 10.0
"""Minimum time in seconds between two checks of the same record, if the first one found no damage."""
REST_FACTOR: Final = 4
"""The thread rests for this multiple of the time that its last check took."""
REST_MAX_S: Final = 2.0
CHECK_END_TIMEOUT_S: Final = 30.0

logger = logging.getLogger(__name__)


class Verdict(Enum):
    """The store's knowledge about a reported record. INTACT: the record passes all checks now. CHECKING: the record
    waits for its check. DAMAGED: a known damaged range contains the record. NONE: the queue has no record at this
    offset, or a check has just found nothing that can be repaired."""

    INTACT = "INTACT"
    CHECKING = "CHECKING"
    DAMAGED = "DAMAGED"
    NONE = "NONE"


class Reported(NamedTuple):
    """The answer to the report of one record: the verdict, and for DAMAGED the hole (damaged range of the log) that
    contains the record."""

    verdict: Verdict
    hole: Hole | None = None


class _Report(NamedTuple):
    """A reported part of the log, and the queue position of its record if it is known."""

    physical_offset: int
    size: int
    position: QueuePosition | None = None


MendUnits = Callable[[ConsumeQueue, int, int], int]
"""Function that rewrites the wrong units of a queue between two queue offsets, and returns their number."""


class ReportedDamage:
    """The reports of damaged records of one open store. Thread-safe."""

    def __init__(
        self,
        parts: StoreParts,
        inspector: LogInspector,
        mend_units: MendUnits,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._inspector, self._mend_units, self._clock_s = parts, inspector, mend_units, clock_s
        self._checks = {"check_property_crc": parts.settings.force_verify_prop_crc}
        self._changed = threading.Condition()
        """Condition that guards the attributes below."""
        self._waiting: dict[int, _Report] = {}
        """The reports that wait for their check, by the physical offset at which they begin, oldest first."""
        self._checked_s: dict[int, float] = {}
        """The time of the last check by physical offset, for CHECKED_AGAIN_S, oldest first."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self.count = 0
        """Number of reports that were accepted for a check since the store was opened."""

    def report(self, positions: Sequence[QueuePosition]) -> list[Reported]:
        """Note that a reader found the records at these queue positions damaged. Returns one answer per position.

        Reads only the reported records, which are probably in memory. Returns without waiting for checks.
        """
        return [self._report(position) for position in positions]

    def _report(self, position: QueuePosition) -> Reported:
        if position.queue_id == PHYSICAL_QUEUE_ID:
            return self._report_physical(position.queue_offset)
        place = self._place_of(position)
        if place is None:
            return Reported(Verdict.NONE)
        start, size = place
        if self._is_intact(position, start, size):
            return Reported(Verdict.INTACT)
        return self._damaged(_Report(start, size, position))

    def _report_physical(self, start: int) -> Reported:
        """Note that a query found the record at a physical offset damaged."""
        log = self._parts.log
        if not log.min_offset <= start < log.committed_offset:
            return Reported(Verdict.NONE)
        in_hole = any(hole.offset <= start < hole.end_offset for hole in self._parts.holes.holes)
        if not in_hole and self._is_record(start):
            return Reported(Verdict.INTACT)
        return self._damaged(_Report(start, 1))

    def _is_record(self, start: int) -> bool:
        """Return True if a record that passes its checks begins at a physical offset."""
        log = self._parts.log
        end = min(start - start % log.file_size + log.file_size, log.committed_offset)
        try:
            return check_record(self._parts.reader.log_bytes(start, end), 0, **self._checks).ok
        except DataLossError:
            return False

    def _damaged(self, report: _Report) -> Reported:
        """Return the hole that contains a damaged record, or let the record wait for its check."""
        start = report.physical_offset
        for hole in self._parts.holes.holes:
            if hole.offset <= start < hole.end_offset:
                return Reported(Verdict.DAMAGED, hole)
        return Reported(Verdict.CHECKING if self._add(report) else Verdict.NONE)

    def state_of(self, position: QueuePosition) -> RepairState:
        """Note that the store itself could not read the record at a queue position, and return what is known of the
        record. PENDING: it is damaged, and may be repaired soon from another replica."""
        [one] = self.report([position])
        if one.verdict is Verdict.INTACT:
            return RepairState.INTACT
        return RepairState.LOST if one.verdict is Verdict.NONE else RepairState.PENDING

    def note(self, physical_offset: int, size: int) -> None:
        """Note that a part of the log is probably damaged. Does not block, and reads nothing."""
        if not any(hole.offset <= physical_offset < hole.end_offset for hole in self._parts.holes.holes):
            self._add(_Report(physical_offset, size))

    def _place_of(self, position: QueuePosition) -> tuple[int, int] | None:
        """Return the physical offset and the size to which the queue unit at a position points. Returns None if there
        is no unit, or if the unit points to no record."""
        queue = self._parts.queues.get(position.topic, position.queue_id)
        if queue is None or not queue.first_readable_offset <= position.queue_offset < queue.visible_offset:
            return None
        if isinstance(queue, BatchConsumeQueue):
            holder = queue.holder_of(position.queue_offset)
            return None if holder is None else (holder.physical_offset, holder.size)
        try:
            units = queue.units(position.queue_offset, 1)
        except DataLossError:  # retention deletes the queue's file now
            return None
        if not len(units) or units[0]["size"] == PRE_BLANK_SIZE:
            return None
        return int(units[0]["physical_offset"]), int(units[0]["size"])

    def _is_intact(self, position: QueuePosition, start: int, size: int) -> bool:
        """Return True if the record of a queue position passes its checks now."""
        parts = self._parts
        if not parts.log.min_offset <= start < start + size <= parts.log.committed_offset:
            return False
        try:
            if check_record(parts.reader.log_bytes(start, start + size), 0, **self._checks) != (size, True):
                return False
        except DataLossError:  # a wrong unit may name bytes of two files
            return False
        queue = parts.queues.get(position.topic, position.queue_id)
        return not isinstance(queue, ConsumeQueue) or leads_to_own(queue, position.queue_offset, parts.reader)

    def _add(self, report: _Report) -> bool:
        """Let a report wait for its check, unless it already waits. Returns False if the store has just checked it, and
        if the store closes."""
        report = report._replace(size=min(max(report.size, 1), RANGE_MAX_BYTES))
        with self._changed:
            start = report.physical_offset
            if start in self._waiting:
                return True
            checked_s = self._checked_s.get(start)
            if self._closed or (checked_s is not None and self._clock_s() < checked_s + CHECKED_AGAIN_S):
                return False
            if len(self._waiting) >= REPORTS_MAX:
                return True
            self._waiting[start] = report
            self.count += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="inspect-reports", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                report = next(iter(self._waiting.values()))
            began_s, found = self._clock_s(), False
            try:
                found = self._check(report)
            except (RaymqError, OSError) as error:
                logger.warning(
                    "%s: the reported damage at physical offset %d could not be checked: %s",
                    *(self._parts.settings.store_path_root_dir, report.physical_offset, error),
                )
            except Exception:  # catch bugs: if this thread ended, no later report would be checked
                logger.exception(
                    "the check of the reported damage at physical offset %d failed", report.physical_offset
                )
            ended_s = self._clock_s()
            with self._changed:
                self._waiting.pop(report.physical_offset, None)
                self._checked_s = {
                    at: time_s for at, time_s in self._checked_s.items() if ended_s < time_s + CHECKED_AGAIN_S
                }
                if not found:
                    self._checked_s[report.physical_offset] = ended_s
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed, min(REST_FACTOR * (ended_s - began_s), REST_MAX_S))

    def _check(self, report: _Report) -> bool:
        """Check a reported record: its bytes become a hole if they are damaged. If they are intact, the unit is wrong,
        and is rewritten. Returns True if damage was found."""
        start, size, position = report
        found = self._inspector.inspect(start, start + size)
        if position is None:
            return bool(found.holes)
        queue = self._parts.queues.get_plain(position.topic, position.queue_id)
        # A damaged record is no reason to change its unit: a neighbour whose queue offset is damaged could get it.
        if not found.holes and queue is not None:
            self._mend_units(queue, position.queue_offset, position.queue_offset + 1)
            place = self._place_of(position)
            if place is not None and place != (start, size):
                start = place[0]
                found = self._inspector.inspect(start, start + min(place[1], RANGE_MAX_BYTES))
        if found.holes:
            logger.error(
                "%s: the damaged record at physical offset %d is the message at offset %d of queue %s:%d",
                *(self._parts.settings.store_path_root_dir, start, position.queue_offset),
                *(position.topic, position.queue_id),
            )
        return bool(found.holes)

    def settle(self, timeout_s: float) -> bool:
        """Wait until no report waits for its check, at most `timeout_s`. Returns False if the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """Stop checking reports. Waits for the current check to end. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CHECK_END_TIMEOUT_S)
