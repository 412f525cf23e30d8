"""Counts the delayed messages that wait now, by level and by hour, and returns the first due messages. Read-only.

Consume-queue entries (units) of 20 bytes are read for all waiting messages. Records are read only for the messages that
are returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from raymq.common.delay import TIMER_RECALL_QUEUE, TIMER_ROLL_QUEUE, TIMER_TOPIC
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.store import DelayedInStore, QueuePosition
from storage.dispatch.delivery_progress import Source, SourceProgress
from storage.schedule.delay_queues import DelayQueueBounds

HOURS: Final = 24
_HOUR_MS: Final = 3_600_000
WAITING_UNITS_MAX: Final = 2_000_000
"""Maximum number of consume-queue entries (units) that a query for waiting messages reads from one delay queue. The
query starts at the first entry whose message may still wait."""
WAITING_RECORD_BYTES: Final = 2 << 20
"""Maximum size, in bytes, of the records that one query for waiting messages returns. The record that reaches the limit
is the last record in the result."""
WAITING_LIMIT_MAX: Final = 1000

Ints = NDArray[np.int64]


class DelayQueues(Protocol):
    """The methods of DelayQueueReader that are used to count and read waiting delayed messages."""

    def read_bounds(self) -> tuple[int, dict[Source, DelayQueueBounds]]: ...

    def delivery_times(self, source: Source, from_offset: int, count: int) -> Ints: ...

    def progress(self, source: Source) -> SourceProgress: ...

    def read_records(self, source: Source, queue_offsets: list[int]) -> list[memoryview | None]: ...


def waiting(queues: DelayQueues, begin_ms: int, end_ms: int, limit: int) -> DelayedInStore:
    """Count the delayed messages that wait in a store. Also return the records of at most `limit` of them that are due
    in [`begin_ms`, `end_ms`).

    A message that is due in more than a day waits in the roll queue, where its queue entry does not contain its due
    time. Such a message is only counted: it is not returned, and is missing in the counts by hour.
    """
    now_ms, bounds = queues.read_bounds()
    levels: dict[str, int] = {}
    hours = np.zeros(HOURS, np.int64)
    late_ms, complete = 0, True
    listed: list[tuple[int, Source, int]] = []
    for source, held in sorted(bounds.items()):
        if source == (TIMER_TOPIC, TIMER_RECALL_QUEUE):
            continue
        times, offsets, whole = _undelivered(queues, source, held)
        complete = complete and whole
        if not len(times):
            continue
        name = f"level {source[1] + 1}" if source[0] == SCHEDULE_TOPIC else "deliver_at"
        levels[name] = levels.get(name, 0) + len(times)
        if source == (TIMER_TOPIC, TIMER_ROLL_QUEUE):
            continue
        late_ms = max(late_ms, now_ms - int(times.min()))
        hour = np.maximum((times - now_ms) // _HOUR_MS, 0)
        hours += np.bincount(hour[hour < HOURS], minlength=HOURS)
        wanted = np.flatnonzero((times >= begin_ms) & (times < end_ms))
        first = wanted[np.argsort(times[wanted], kind="stable")[: limit + 1]]
        listed += [(time, source, at) for time, at in zip(times[first].tolist(), offsets[first].tolist(), strict=True)]
    listed.sort()
    due, positions, records, all_read = _read(queues, listed[:limit])
    return DelayedInStore(
        levels,
        tuple(hours.tolist()),
        max(late_ms, 0),
        tuple(due),
        tuple(positions),
        b"".join(records),
        tuple(map(len, records)),
        complete and all_read and len(listed) <= limit,
    )


def _undelivered(queues: DelayQueues, source: Source, held: DelayQueueBounds) -> tuple[Ints, Ints, bool]:
    """Return the messages that wait in a delay queue, in the order of their offsets: an array of their due times and an
    array of their queue offsets. The third value is False if the queue has more entries than a query may read, so that
    some messages are missing."""
    progress = queues.progress(source)
    timer = source[0] == TIMER_TOPIC
    begin = min(max(progress.low if timer else progress.next_offset, held.min_offset), held.end)
    end = min(held.end, begin + WAITING_UNITS_MAX)
    parts: list[Ints] = [np.empty(0, np.int64)]
    at = begin
    while at < end:
        times = queues.delivery_times(source, at, end - at)
        if not len(times):
            break
        parts.append(times)
        at += len(times)
    times = np.concatenate(parts)
    offsets = np.arange(begin, begin + len(times))
    if timer:
        done = (times < progress.epoch) | ((times == progress.epoch) & (offsets < progress.next_offset))
        times, offsets = times[~done], offsets[~done]
    return times, offsets, end == held.end


def _read(
    queues: DelayQueues, listed: list[tuple[int, Source, int]]
) -> tuple[list[int], list[QueuePosition], list[bytes], bool]:
    """Read the records of delayed messages. `listed`: each message's due time, delay queue and queue offset. Returns
    the due times, the positions, the records and a flag. The flag is False if records were left out because of the size
    limit (WAITING_RECORD_BYTES)."""
    by_source: dict[Source, list[int]] = {}
    for _, source, at in listed:
        by_source.setdefault(source, []).append(at)
    found: Mapping[tuple[Source, int], memoryview | None] = {
        (source, at): record
        for source, offsets in by_source.items()
        for at, record in zip(offsets, queues.read_records(source, offsets), strict=True)
    }
    due: list[int] = []
    positions: list[QueuePosition] = []
    records: list[bytes] = []
    size = 0
    for time, source, at in listed:
        record = found[source, at]
        if record is None:
            # skip a message whose record is not found: the record was lost, which is logged, or a recall has replaced
            # it
            continue
        if size >= WAITING_RECORD_BYTES:
            return due, positions, records, False
        due.append(time)
        positions.append(QueuePosition(*source, at))
        records.append(bytes(record))
        size += len(record)
    return due, positions, records, True
