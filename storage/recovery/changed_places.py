"""Finds records whose place (queue and queue offset) the disk has changed. It searches near records that do not match
their queues during a log scan.

Each searched part of the log is read (claims.py) and checked (misfits.py) only once. If the scan has already trusted a
record that turns out to be changed, the scan must be repeated: other records of the same queues may have got wrong
offsets.
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
"""A topic whose queues do not exist counts as deleted if at least this number of its records in one queue are in order.
A record is in order if its queue offset directly follows the offset of the previous record of the same queue."""
FRUITLESS_MAX: Final = 16
"""Maximum number of consecutive searches for changed records that find nothing. After that, all records are trusted,
because each search takes about a second."""
_EVERYTHING: Final = 1 << 63


logger = logging.getLogger(__name__)


class WalkAgainError(Exception):
    """Raised if a record that was already scanned and trusted names a wrong queue or queue offset, so that the scan
    must be repeated."""


class ChangedPlaces:
    """The records whose place (queue and queue offset) was changed by the disk, as found by a single recovery."""

    def __init__(self, parts: StoreParts, files: LogFiles, end: LogEnd, redispatch: Redispatch) -> None:
        self._log, self._reader, self._queues = parts.log, parts.reader, parts.queues
        self._after_crash = parts.after_crash
        self._end, self._ends, self._places = end, redispatch.ends, redispatch.places
        self._claims = ClaimReader(parts.log, parts.reader, parts.queues, end, files.checks, files.delay_levels_ms)
        self.changes: dict[int, Change] = {}
        """The records whose place (queue and queue offset) was changed by the disk, by physical offset."""
        self._surveyed: list[tuple[int, int]] = []
        """The parts of the log that have been searched for changed records: records whose queue or queue offset the
        disk has changed."""
        self.bases: dict[QueueKey, int] = {}
        """The next offset of each queue when the log scan began."""
        self._walked_from = 0
        self._fruitless = 0
        """The current number of consecutive searches for changed records that found nothing."""

    def begin(self, walk_from: int) -> None:
        """Prepare the search for changed records for a log scan from physical offset `walk_from`. Before this call,
        each queue must have been truncated to its last record before `walk_from`."""
        self.bases = {queue.key: queue.next_offset for queue in self._queues.plain}
        self.changes.clear()
        self._surveyed.clear()
        self._walked_from, self._fruitless = walk_from, 0

    def believe_the_rest(self) -> None:
        """Trust the queue and queue offset in all records, except records that are already known to be changed.
        Recovery searches no further."""
        self._surveyed.append((0, _EVERYTHING))

    def has_changes_in(self, physical_offset: int, end_offset: int) -> bool:
        """Return True if a record in [`physical_offset`, `end_offset`) is known to name a changed place (queue and
        queue offset)."""
        return any(physical_offset <= offset < end_offset for offset in self.changes)

    def is_surveyed(self, physical_offset: int, end_offset: int | None = None) -> bool:
        """True if recovery has searched a part of the log for records whose queue or queue offset was changed. With
        `end_offset`, the part is the range from `physical_offset` up to `end_offset`. Otherwise it is the surroundings
        of `physical_offset`."""
        return any(start <= physical_offset < end and (end_offset or 0) <= end for start, end in self._surveyed)

    def survey_around(self, marks: Iterable[int], physical_offset: int, walked_to: int) -> None:
        """Search the log for records with changed places near a record that does not match its queue. The search covers
        SURVEY_BYTES on both sides of this record, which is at `physical_offset`.

        `marks`: physical offsets at which records are known to start. `walked_to`: the physical offset up to which the
        scan has trusted records. Raises WalkAgainError if a changed record lies before `walked_to`.
        """
        if self.is_surveyed(physical_offset):
            return
        file_start = physical_offset - physical_offset % self._log.file_size
        starts = [mark for mark in marks if physical_offset - SURVEY_BYTES <= mark <= physical_offset]
        start = min([*starts, physical_offset]) if starts else max(file_start, self._walked_from)
        if physical_offset - start > SURVEY_BYTES:
            # Begin the survey at this record itself. In the SURVEY_BYTES before it, no position is known to be the
            # start of a record.
            start = physical_offset
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
                "%s: many parts of the log have records that do not fit their queues, and none of these records "
                "shows a changed bit; the records after physical offset %d are accepted",
                *(self._reader.root, physical_offset),
            )
            self.believe_the_rest()
        # A survey compares each record with later records, but its last records have too few later records. So only the
        # first half of the bytes after `physical_offset` counts as surveyed. If the survey reaches the log's end, all
        # its bytes count.
        is_whole = survey.end > self._log.starts[-1] + self._log.file_size
        self._surveyed.append((start, survey.end if is_whole else (physical_offset + survey.end) // 2))
        if any(offset < walked_to for offset in new):
            raise WalkAgainError

    def _believe_deleted_topics(self, survey: Survey) -> None:
        """After a clean stop, treat a topic without queues as deleted if several of its records have consecutive
        offsets. Damage would not change so many records in the same way."""
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
        """Return, for each queue, the physical offset of the first surveyed record whose entry (unit) recovery removed
        from the queue and has not added again. Surveyed records are the records in the part of the log that is searched
        for changed records.

        Entries up to the last surveyed queue offset of their queue count as added again. Queues without a lost entry
        are missing in the result.
        """
        last = {claim.place.key: claim.place.queue_offset for claim in survey.claims}
        return self._ends.units_behind(last, survey.start, survey.end)

    def _leads_to(self, place: QueueUnit, physical_offset: int, size: int) -> bool:
        """True if, before this recovery, the given record was at `place` (a queue and a queue offset): the queue's
        entry (unit) for this offset pointed to the record."""
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
        """Return a record's producer, with the sequence number that the producer gave the record in its queue. Returns
        None if the record has no producer. Also returns None if a scheduler delivered the record, because its sequence
        number then belongs to another queue."""
        if not claim.is_movable:  # the record may be damaged, so that it cannot be parsed
            return None
        view = dispatch_view(self._reader.log_bytes(claim.physical_offset, claim.physical_offset + claim.size))
        producer = None if was_moved(view) else view.producer
        return None if producer is None or delivery_source(producer.producer_id) is not None else producer

    def _raw_topic(self, claim: PlaceClaim) -> bytes:
        return raw_topic_of(self._reader.log_bytes(claim.physical_offset, claim.physical_offset + claim.size))
