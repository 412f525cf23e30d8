"""Finds the records with a changed place in the parts of a log in which a walk meets a record that does not fit.

Each part is read (claims.py) and searched (misfits.py) once. If the walk has believed a record that is found to be
changed, the walk has to be undone: other records of the same queues may have got wrong offsets.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

from raymq.common.delay import delivery_source
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import ProducerSequence
from storage.dispatch.multi_dispatch import QueueKey, QueueUnit
from storage.dispatch.record_blocks import was_moved
from storage.dispatch.redispatch import Redispatch
from storage.parts import StoreParts
from storage.recovery.claims import SURVEY_BYTES, ClaimReader, PlaceClaim, Survey, raw_topic_of
from storage.recovery.log_end import LogEnd
from storage.recovery.log_files import LogFiles
from storage.recovery.misfits import Change, Misfits

DELETED_RECORDS_MIN: Final = 3
"""If so many records of a queue that does not exist follow the ones before them, the topic was deleted."""
FRUITLESS_MAX: Final = 16
"""After so many searches in a row that find nothing, all records are believed: each one takes a second or so."""
_EVERYTHING: Final = 1 << 63


logger = logging.getLogger(__name__)


class WalkAgainError(Exception):
    """A record that was walked and believed names a wrong place."""


class ChangedPlaces:
    """The changed places that one recovery knows of."""

    def __init__(self, parts: StoreParts, files: LogFiles, end: LogEnd, redispatch: Redispatch) -> None:
        self._log, self._reader, self._queues = parts.log, parts.reader, parts.queues
        self._after_crash = parts.after_crash
        self._end, self._ends, self._places = end, redispatch.ends, redispatch.places
        self._claims = ClaimReader(parts.log, parts.reader, parts.queues, end, files.checks, files.delay_levels_ms)
        self.changes: dict[int, Change] = {}
        """The records with a changed place, by physical offset."""
        self._surveyed: list[tuple[int, int]] = []
        """The parts of the log in which all changed places are found."""
        self.bases: dict[QueueKey, int] = {}
        """The next offsets of the queues when the walk began."""
        self._walked_from = 0
        self._fruitless = 0
        """The number of the last searches that found nothing."""

    def begin(self, walk_from: int) -> None:
        """Forget everything: a walk begins at a physical offset, and the queues are at their ends before it."""
        self.bases = {queue.key: queue.next_offset for queue in self._queues.plain}
        self.changes.clear()
        self._surveyed.clear()
        self._walked_from, self._fruitless = walk_from, 0

    def believe_the_rest(self) -> None:
        """Take all records for right that are not known to be changed."""
        self._surveyed.append((0, _EVERYTHING))

    def has_changes_in(self, physical_offset: int, end_offset: int) -> bool:
        """True if a record in a range is known to be changed."""
        return any(physical_offset <= offset < end_offset for offset in self.changes)

    def is_surveyed(self, physical_offset: int, end_offset: int | None = None) -> bool:
        """True if all changed places at an offset, or up to `end_offset`, are known."""
        return any(start <= physical_offset < end and (end_offset or 0) <= end for start, end in self._surveyed)

    def survey_around(self, marks: Iterable[int], physical_offset: int, walked_to: int) -> None:
        """Find the changed places near a record that does not fit its queue, in SURVEY_BYTES on both sides.

        `marks`: physical offsets at which records are known to start. WalkAgainError if a changed record is before
        `walked_to`.
        """
        if self.is_surveyed(physical_offset):
            return
        file_start = physical_offset - physical_offset % self._log.file_size
        starts = [mark for mark in marks if physical_offset - SURVEY_BYTES <= mark <= physical_offset]
        start = min([*starts, physical_offset]) if starts else max(file_start, self._walked_from)
        if physical_offset - start > SURVEY_BYTES:
            start = physical_offset  # no record's start is known in the SURVEY_BYTES before
        survey = self._claims.read(start, physical_offset + SURVEY_BYTES)
        is_first = start == self._walked_from
        bases = {}
        if is_first and self._after_crash:
            bases = {key: base for key, base in self.bases.items() if base or not start}
        default_base = 0 if is_first and self._after_crash and not start else None
        misfits = Misfits(survey, bases, default_base, self._leads_to, self._raw_topic, self._sequence_of)
        found = misfits.find([physical_offset, *self._lost_ends(survey)], self._end.is_named)
        new = {offset: change for offset, change in found.items() if offset not in self.changes}
        self.changes.update(new)
        self._believe_deleted_topics(survey)
        self._fruitless = 0 if new else self._fruitless + 1
        if self._fruitless == FRUITLESS_MAX:
            logger.warning(
                "%s: records that do not fit their queues are in many parts of the log, and no changed one is among "
                "them; those behind physical offset %d are believed",
                *(self._reader.root, physical_offset),
            )
            self.believe_the_rest()
        # Records near the survey's end have no neighbours behind them there.
        is_whole = survey.end > self._log.starts[-1] + self._log.file_size
        self._surveyed.append((start, survey.end if is_whole else (physical_offset + survey.end) // 2))
        if any(offset < walked_to for offset in new):
            raise WalkAgainError

    def _believe_deleted_topics(self, survey: Survey) -> None:
        """After a clean stop, take topics for deleted that have no queue, but several records in a row: so many do not
        change alike."""
        if self._after_crash:
            return
        followers: Counter[QueueKey] = Counter()
        last: dict[QueueKey, int] = {}
        for claim in survey.claims:
            key, offset = claim.place
            followers[key] += offset == last.get(key, offset) + 1
            last[key] = offset
        self._places.believe_deleted(
            topic
            for (topic, _), count in followers.items()
            if count >= DELETED_RECORDS_MIN and not self._queues.has_topic(topic)
        )

    def _lost_ends(self, survey: Survey) -> list[int]:
        """The physical offsets of records whose units the crash left behind the last offset of a queue that a record
        in a survey names; of each queue only the first."""
        last = {claim.place.key: claim.place.queue_offset for claim in survey.claims}
        return self._ends.units_behind(last, survey.start, survey.end)

    def _leads_to(self, place: QueueUnit, physical_offset: int, size: int) -> bool:
        """True if a queue had a unit at a place, before this recovery, that leads to a record."""
        queue = self._queues.get_plain(*place.key)
        if queue is None:
            return False
        units = queue.lost_units[max(place.queue_offset - queue.lost_units_from, 0) :][:1]
        if place.queue_offset < queue.lost_units_from or not len(units):
            if self._after_crash or not queue.first_offset <= place.queue_offset < self.bases.get(queue.key, 0):
                return False
            units = queue.units(place.queue_offset, 1)
        return [(int(unit["physical_offset"]), int(unit["size"])) for unit in units] == [(physical_offset, size)]

    def _sequence_of(self, claim: PlaceClaim) -> ProducerSequence | None:
        """The producer of a record and its sequence in the record's queue; None if the record has none. What a
        scheduler delivered has the sequence of another queue."""
        view = dispatch_view(self._reader.log_bytes(claim.physical_offset, claim.physical_offset + claim.size))
        producer = view.producer if claim.is_movable and not was_moved(view) else None
        return None if producer is None or delivery_source(producer.producer_id) is not None else producer

    def _raw_topic(self, claim: PlaceClaim) -> bytes:
        return raw_topic_of(self._reader.log_bytes(claim.physical_offset, claim.physical_offset + claim.size))
