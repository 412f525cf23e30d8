"""Reads the claims of the records in a part of the log. A record's claim is the queue and the queue offset that the
record names.

No checksum covers these two fields, so one claim alone proves nothing. storage/recovery/misfits.py compares the claims
of adjacent records. The amount that is read is bounded: SURVEY_BYTES on both sides of a record that does not match its
queue, and SURVEY_RECORDS_MAX records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from raymq.records.format.check import check_record
from raymq.records.format.decode import topic_text
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.layout import (
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    SYS_FLAG_INNER_BATCH,
    find_sections,
    read_header,
)
from raymq.records.logfiles.log_reader import LogReader
from storage.dispatch.multi_dispatch import QueueKey, QueueUnit, light_queue_units
from storage.dispatch.record_blocks import is_queued, read_block
from storage.dispatch.record_check import is_implausible
from storage.log.commit_log import CommitLog
from storage.queue.queue_table import QueueTable
from storage.recovery.log_end import LogEnd

SURVEY_BYTES: Final = 32 << 20
"""Number of log bytes that recovery reads on each side of a record that does not match its queue: before the record and
after it."""
SURVEY_RECORDS_MAX: Final = 1 << 19
"""Maximum number of records whose claims (queue and queue offset) are compared with each other."""
QUEUE_ID_BITS: Final = 31
"""Number of bits of a queue id that recovery tries, one at a time, as the damaged bit: all bits except the sign bit. A
queue id whose sign bit is set is recognized as wrong by `is_implausible`."""


class PlaceClaim(NamedTuple):
    """One record, and the place (queue and queue offset) that the record names."""

    physical_offset: int
    size: int
    place: QueueUnit
    # True if this record's queue offset must follow the queue offset of the queue's previous record by one. This holds
    # in a queue of single messages whose topic was not deleted later.
    is_chained: bool = True
    # True if recovery checks this claim (the queue and queue offset that a record names). False if recovery trusts the
    # claim: the record has other damage, or the claim is on an additional queue (multi-dispatch).
    is_movable: bool = True


class Survey(NamedTuple):
    """The claims (queue and queue offset) of the records in a part of the log, in log order."""

    claims: list[PlaceClaim]
    # The queues that contain inner batches. Each inner batch takes several offsets of its queue.
    batch_keys: set[QueueKey]
    # Physical offsets of damaged records whose headers are unreadable, so that their queues are unknown. If a record is
    # missing in some queue, it may be one of these.
    unknown: list[int]
    # Physical offsets of the start and the end of the part of the log that is searched for changed records.
    start: int
    end: int


class ClaimReader:
    """Reads the claims (the queue and queue offset that each record names) of the records of one log."""

    def __init__(
        self,
        log: CommitLog,
        reader: LogReader,
        queues: QueueTable,
        end: LogEnd,
        checks: dict[str, bool],
        delay_levels_ms: tuple[int, ...],
    ) -> None:
        """`checks`: keyword arguments for `check_record`, which checks each record of this log."""
        self._log, self._reader, self._queues, self._end = log, reader, queues, end
        self._checks, self._delay_levels_ms = checks, delay_levels_ms

    def read(self, start: int, end: int) -> Survey:
        """Read the claims (queue and queue offset) of the records that begin in [`start`, `end`), at most up to the
        log's end. A record must begin at `start`."""
        self._batch_keys: set[QueueKey] = set()
        claims: list[PlaceClaim] = []
        unknown: list[int] = []
        position = start
        while position < end and len(claims) < SURVEY_RECORDS_MAX:
            file_start = position - position % self._log.file_size
            if file_start not in self._log.starts:
                break
            behind = self._read_file(file_start, position, end, claims)
            if behind == file_start + self._log.file_size or behind >= end or len(claims) >= SURVEY_RECORDS_MAX:
                position = behind
                continue
            resume = self._end.resume_offset(behind)
            if resume is None:
                return Survey(claims, self._batch_keys, unknown, start, max(behind, end))
            for hole in self._end.holes_between(behind, resume):
                view = self._end.header_of(hole, self._delay_levels_ms)
                if view is None:
                    unknown.append(hole.offset)
                else:
                    found = self._claims_of(view, hole.offset)
                    claims += [claim._replace(size=hole.size, is_movable=False) for claim in found]
            position = resume
        return Survey(
            claims, self._batch_keys, unknown, start, min(position, end) if len(claims) >= SURVEY_RECORDS_MAX else end
        )

    def _read_file(self, file_start: int, physical_offset: int, end: int, claims: list[PlaceClaim]) -> int:
        """Add the claims (queue and queue offset) of a log file's records, from `physical_offset` on, to `claims`.
        Returns the physical offset at which reading stopped: the first bytes that are no record, or the file's end."""
        data = self._reader.maps.get(str(self._log.path(file_start))).data
        position = physical_offset - file_start
        while file_start + position < end and len(claims) < SURVEY_RECORDS_MAX:
            block = None
            if not self._checks["check_property_crc"]:
                block = read_block(
                    data,
                    position,
                    file_start + position,
                    check_crc=self._checks["check_crc"],
                    delay_levels_ms=self._delay_levels_ms,
                )
            has_batches = block is not None and (block.sys_flags & SYS_FLAG_INNER_BATCH).any()
            if block is not None and not (has_batches or block.has_light_queue_units):
                queued = block.is_queued()
                rows = zip(
                    *(
                        column[queued].tolist()
                        for column in (
                            block.starts,
                            block.sizes,
                            block.topic_codes,
                            block.queue_ids,
                            block.queue_offsets,
                        )
                    ),
                    strict=True,
                )
                begin = file_start + position
                # Look up each queue only once, because a block has many records of few queues.
                plain: dict[tuple[int, int], tuple[QueueKey, bool]] = {}
                for at, size, code, queue_id, queue_offset in rows:
                    known = plain.get((code, queue_id))
                    if known is None:
                        key = block.topics[code], queue_id
                        known = plain[code, queue_id] = key, not self._queues.holds_batches(*key)
                    key, is_plain = known
                    is_chained = is_plain and not self._queues.was_deleted_after(key, begin + at)
                    claims.append(PlaceClaim(begin + at, size, QueueUnit(key, queue_offset), is_chained))
                position += block.length
                continue
            size, good = check_record(data, position, **self._checks)
            if good and size == 0:
                return file_start + len(data) if file_start != self._log.starts[-1] else file_start + position
            view = dispatch_view(data, position, delay_levels_ms=self._delay_levels_ms) if good else None
            if view is None or is_implausible(view, file_start + position):
                return file_start + position
            claims += self._claims_of(view, file_start + position)
            position += size
        return file_start + position

    def _claims_of(self, view: DispatchView, physical_offset: int) -> list[PlaceClaim]:
        """Return the claims (queue and queue offset) of one record. Its claims on additional queues, which its
        multi-dispatch properties name, come first, then the claim on its own queue."""
        if view.sys_flag & SYS_FLAG_INNER_BATCH:
            self._batch_keys.add((view.topic, view.queue_id))
        if not is_queued(view.sys_flag) or view.sys_flag & SYS_FLAG_INNER_BATCH:
            return []
        own = QueueUnit((view.topic, view.queue_id), view.queue_offset)
        others = [
            self._claim(physical_offset, view.size, place)._replace(is_movable=False)
            for place in light_queue_units(view, physical_offset)
        ]
        return [*others, self._claim(physical_offset, view.size, own)]

    def _claim(self, physical_offset: int, size: int, place: QueueUnit) -> PlaceClaim:
        topic, queue_id = place.key
        is_chained = not self._queues.holds_batches(topic, queue_id)
        return PlaceClaim(
            physical_offset, size, place, is_chained and not self._queues.was_deleted_after(place.key, physical_offset)
        )


def one_bit_away(place: QueueUnit, raw_topic: bytes) -> Iterator[QueueUnit]:
    """Yield the places (queue and queue offset) that differ from `place` in one bit of the queue offset, the queue id
    or the topic. If the disk has flipped one bit of a record's place, the original place is among them. `raw_topic`:
    the bytes of the topic, which may no longer be valid text."""
    (topic, queue_id), queue_offset = place
    for bit in range(63):
        yield QueueUnit(place.key, queue_offset ^ 1 << bit)
    for bit in range(QUEUE_ID_BITS):
        yield QueueUnit((topic, queue_id ^ 1 << bit), queue_offset)
    for name in _names_one_bit_away(raw_topic):
        yield QueueUnit((name, queue_id), queue_offset)


def _names_one_bit_away(raw_topic: bytes) -> Iterator[str]:
    name = bytearray(raw_topic)
    for at in range(len(name)):
        for bit in range(8):
            name[at] ^= 1 << bit
            with suppress(UnicodeDecodeError):
                yield name.decode()
            name[at] ^= 1 << bit


def raw_topic_of(record: memoryview) -> bytes:
    """Return the bytes of a record's topic."""
    _, _, topic_at, properties_at, _ = find_sections(record, 0, read_header(record))
    return bytes(record[topic_at : properties_at - 2])


def with_place(record: memoryview, place: QueueUnit) -> bytearray:
    """Return a copy of a record with another place (queue and queue offset). The new topic must be as long as the
    record's own topic."""
    copy = bytearray(record)
    (topic, queue_id), queue_offset = place
    copy[QUEUE_ID_OFFSET : QUEUE_ID_OFFSET + 4] = queue_id.to_bytes(4)
    copy[QUEUE_OFFSET_OFFSET : QUEUE_OFFSET_OFFSET + 8] = queue_offset.to_bytes(8)
    _, _, topic_at, properties_at, _ = find_sections(copy, 0, read_header(copy))
    if topic != topic_text(bytes(copy[topic_at : properties_at - 2])):
        copy[topic_at : properties_at - 2] = topic.encode()
    return copy
