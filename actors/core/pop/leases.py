"""The leases of a consumer group: which offsets of a queue are leased to simple consumers, and until when.

This module defines a lease, its record and its clock. An offset of a lease is settled if it was acknowledged, or moved
to another lease.

    settled          leased, some settled            not leased yet
    ───────────────┬────────────────────────────────┬─────────────────────→ offsets
                   committed = first unsettled      next_offset

The table has no entry for a queue without leases: the next offset of such a queue is the group's committed offset. Each
record of a change sets and drops whole leases by their keys, so applying a record again changes nothing
(actors.core.broker.state).

The clock of leases starts with the wall clock's time, and then advances at the rate of the monotonic clock. A step of
the wall clock, forward or back, changes no lease of a running broker.

A new broker process reads the leases from the log, but cannot tell how much time has passed since then. A wall clock
that is a day ahead would end all leases at once, and two consumers would hold the same message. So the clock of a new
process continues from the newest time in the log at which a lease was made or extended (`LeaseClock.resume`). After a
restart of the broker, a lease can therefore last longer, at most by its own invisible time, or by its last extension.
If the wall clock is more than CLOCK_ERROR_MS later than the newest of these times, all old leases end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

CLOCK_ERROR_MS: Final = 3 * 24 * 3_600_000
"""Time in ms after the newest lease or extension at which all leases have certainly expired, even if the wall clock is
two days ahead. From then on, a lease lasts at most 12 hours (INVISIBLE_MAX_MS)."""


class LeaseClock:
    """A clock for leases, which no step of the wall clock moves. Thread-safe.

    `wall_ms` returns the time in ms since 1970; it is read at the start of the process. `monotonic_ms` returns a time
    in ms that never goes back.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._lock = threading.Lock()
        # The difference between the time of this clock and the time of the monotonic clock, in ms.
        self._ahead_ms = wall_ms() - monotonic_ms()

    def now_ms(self) -> int:
        """Return the time in ms since 1970. Only `resume` lets the time go back."""
        with self._lock:
            return self._monotonic_ms() + self._ahead_ms

    def resume(self, newest_ms: int) -> None:
        """Continue the clock of the process that issued the leases in the log, from the newest lease or extension on
        (PopTable.newest_ms).

        Call this only before this process issues leases: the time may go back. Does nothing if the clock is more than
        CLOCK_ERROR_MS later.
        """
        with self._lock:
            ahead_ms = newest_ms - self._monotonic_ms()
            if self._ahead_ms - ahead_ms <= CLOCK_ERROR_MS:
                self._ahead_ms = ahead_ms

    def not_before(self, time_ms: int) -> None:
        """Advance the clock of leases to `time_ms`, the time of the newest lease or extension in the log, unless the
        clock is already later."""
        with self._lock:
            self._ahead_ms = max(self._ahead_ms, time_ms - self._monotonic_ms())


PopChange = dict[str, Any]
POP: Final = "pop"
"""The kind of the records that change leases: {"kind": "pop", "group": G, "queues": [[topic, queue id, next offset,
committed offset, [set leases], [keys of dropped leases]], …]}. A lease is [start, pop time in ms, size, invisible time
in ms, attempts, settled offsets as a hexadecimal number, attempt id, and, of an extended lease only, the time of the
last extension in ms]."""

LeaseKey = tuple[int, int]
"""The key of a lease: its first offset and its pop time in ms. The key is unique among all present and past leases of
the queue."""


class Lease(NamedTuple):
    """A lease of `size` queue offsets from `start` on. It was made at `pop_ms` for `invisible_ms`, as delivery attempt
    number `attempts`.

    Bit i of `settled` is set if the offset `start + i` is acknowledged or belongs to another lease. `extended_ms`: when
    the lease was last extended; 0 if never.
    """

    start: int
    pop_ms: int
    size: int
    invisible_ms: int
    attempts: int
    settled: int = 0
    attempt_id: str = ""
    extended_ms: int = 0

    @property
    def key(self) -> LeaseKey:
        return self.start, self.pop_ms

    @property
    def visible_ms(self) -> int:
        """The time in ms from which the unsettled messages of the lease may be leased again."""
        return self.pop_ms + self.invisible_ms

    @property
    def all(self) -> int:
        """The bit mask with one set bit for each offset of the lease."""
        return (1 << self.size) - 1

    @property
    def unsettled(self) -> int:
        """The number of the lease's unsettled offsets: their messages are neither acknowledged nor part of another
        lease."""
        return self.size - self.settled.bit_count()

    @property
    def first_unsettled(self) -> int:
        """The first unsettled offset of the lease: its message is neither acknowledged nor part of another lease. If
        all offsets are settled, the end of the lease."""
        return self.start + (~self.settled & (self.settled + 1)).bit_length() - 1

    def next_pop_ms(self, now_ms: int) -> int:
        """Return the pop time for a new lease that takes over offsets of this lease.

        The new pop time is always later than this lease's pop time, by one millisecond if necessary. So no two leases
        with the same first offset have the same key. A late receipt therefore identifies exactly the lease for which it
        was issued, or no lease.
        """
        return max(now_ms, self.pop_ms + 1)

    def record(self) -> list[int | str]:
        """Return the fields of the lease as a list, for a "pop" record."""
        extended = (self.extended_ms,) if self.extended_ms else ()
        return [*self[:5], f"{self.settled:x}", self.attempt_id, *extended]

    @classmethod
    def of_record(cls, record: Sequence[Any]) -> Lease:
        start, pop_ms, size, invisible_ms, attempts, settled, attempt_id, *extended = record
        return cls(start, pop_ms, size, invisible_ms, attempts, int(settled, 16), attempt_id, *extended)


@dataclass(slots=True)
class PopQueue:
    """The leases of one group in one queue, by lease key."""

    next_offset: int
    leases: dict[LeaseKey, Lease] = field(default_factory=dict)

    def in_flight(self, now_ms: int) -> int:
        """Return the number of leased messages of the queue that are still invisible."""
        return sum([lease.unsettled for lease in self.leases.values() if lease.visible_ms > now_ms])

    def due(self, now_ms: int) -> int:
        """Return the number of messages of the queue whose lease has expired before they were acknowledged."""
        return sum([lease.unsettled for lease in self.leases.values() if lease.visible_ms <= now_ms])

    def first_unsettled(self) -> int:
        """Return the queue's first offset that is not settled. The message at this offset is not acknowledged, so the
        committed offset cannot move past this offset."""
        return min([self.next_offset, *[lease.first_unsettled for lease in self.leases.values()]])


class QueueEdit:
    """Collects the lease changes that one request makes in one queue, for the request's "pop" record."""

    def __init__(self, topic: str, queue_id: int, known: PopQueue | None, committed: int) -> None:
        self.topic, self.queue_id = topic, queue_id
        self.queue = PopQueue(committed)
        if known is not None:
            # New leases begin after the last leased offset, or at the committed offset if it is larger: a consumer that
            # uses no leases may have committed further.
            self.queue = PopQueue(max(known.next_offset, committed), dict(known.leases))
        self._before, self._committed = self.queue.next_offset, committed
        self._set: dict[LeaseKey, Lease] = {}
        self._dropped: set[LeaseKey] = set()

    def put(self, lease: Lease) -> None:
        """Add or replace a lease of the queue. If all offsets of the lease are settled, drop it instead."""
        if lease.settled == lease.all:
            self.drop(lease.key)
            return
        self.queue.leases[lease.key] = self._set[lease.key] = lease
        self._dropped.discard(lease.key)

    def drop(self, key: LeaseKey) -> None:
        """Drop an existing lease of the queue."""
        del self.queue.leases[key]
        self._set.pop(key, None)
        self._dropped.add(key)

    def record(self) -> list[Any] | None:
        """Return this queue's entry in a "pop" record of the state log; None if no lease of the queue has
        changed."""
        if not self._set and not self._dropped and self.queue.next_offset == self._before:
            return None
        committed = max(self._committed, self.queue.first_unsettled())
        leases = [lease.record() for lease in self._set.values()]
        dropped = [list(key) for key in sorted(self._dropped)]
        return [self.topic, self.queue_id, self.queue.next_offset, committed, leases, dropped]


def pop_change(group: str, edits: Iterable[QueueEdit]) -> PopChange | None:
    """Build the "pop" record with the changed leases of several queues; None if no lease has changed."""
    queues = [record for edit in edits if (record := edit.record()) is not None]
    return {"kind": POP, "group": group, "queues": queues} if queues else None


@dataclass(slots=True)
class PopTable:
    """All leases in a broker group, by group and topic, then queue id. Contains only queues with leases."""

    tables: dict[tuple[str, str], dict[int, PopQueue]] = field(default_factory=dict)

    def copy(self) -> PopTable:
        """Return an independent copy of the table of leases."""
        return PopTable(
            {
                key: {queue_id: PopQueue(queue.next_offset, dict(queue.leases)) for queue_id, queue in table.items()}
                for key, table in self.tables.items()
            }
        )

    def get(self, group: str, topic: str, queue_id: int) -> PopQueue | None:
        """Return a group's leases in a queue; None if the queue has no leases. Use the result only at once: later
        records change it."""
        return self.tables.get((group, topic), {}).get(queue_id)

    def newest_ms(self) -> int:
        """Return the newest time in ms at which a lease was made or extended; 0 without leases."""
        queues = [queue for table in self.tables.values() for queue in table.values()]
        return max([max(one.pop_ms, one.extended_ms) for queue in queues for one in queue.leases.values()], default=0)

    def in_flight(self, group: str, topic: str, now_ms: int) -> dict[int, int]:
        """Return the number of leased messages that are still invisible, for each queue of a topic, by queue
        id."""
        return {q: queue.in_flight(now_ms) for q, queue in self.tables.get((group, topic), {}).items()}

    def edit(self, group: str, topic: str, queue_id: int, committed: int) -> QueueEdit:
        """Return an object that collects the changes of a queue's leases (QueueEdit). `committed`: the offset that the
        group has committed in the queue."""
        return QueueEdit(topic, queue_id, self.get(group, topic, queue_id), committed)

    def apply(self, change: PopChange) -> dict[str, dict[int, int]]:
        """Apply a "pop" record to the leases. Returns the committed offsets that the record sets, by topic and queue
        id."""
        group = change["group"]
        commits: dict[str, dict[int, int]] = {}
        for topic, queue_id, next_offset, committed, leases, dropped in change["queues"]:
            table = self.tables.setdefault((group, topic), {})
            queue = table.setdefault(queue_id, PopQueue(next_offset))
            queue.next_offset = next_offset
            for start, pop_ms in dropped:
                queue.leases.pop((start, pop_ms), None)
            for record in leases:
                lease = Lease.of_record(record)
                queue.leases[lease.key] = lease
            commits.setdefault(topic, {})[queue_id] = committed
            if not queue.leases:
                self.forget_queues(group, topic, (queue_id,))
        return commits

    def forget_queues(self, group: str, topic: str, queue_ids: Iterable[int]) -> None:
        """Drop a group's leases in queues whose offsets were reset."""
        table = self.tables.get((group, topic), {})
        for queue_id in queue_ids:
            table.pop(queue_id, None)
        if not table:
            self.tables.pop((group, topic), None)

    def drop_topic(self, topic: str) -> None:
        """Drop all groups' leases in a topic."""
        for key in [key for key in self.tables if key[1] == topic]:
            del self.tables[key]

    def drop_group(self, group: str) -> None:
        """Drop all leases of a group."""
        for key in [key for key in self.tables if key[0] == group]:
            del self.tables[key]

    def dump(self) -> dict[str, dict[str, list[Any]]]:
        """Return the table of leases as JSON values: "topic@group" → queue id → [next offset, leases]."""
        return {
            f"{topic}@{group}": {
                str(queue_id): [queue.next_offset, [lease.record() for lease in queue.leases.values()]]
                for queue_id, queue in table.items()
            }
            for (group, topic), table in self.tables.items()
        }

    @classmethod
    def load(cls, dumped: dict[str, dict[str, list[Any]]]) -> PopTable:
        """Load a table of leases from the JSON values that `dump` returned."""
        tables = {}
        for name, table in dumped.items():
            topic, _, group = name.partition("@")
            tables[group, topic] = {
                int(queue_id): PopQueue(next_offset, {(one := Lease.of_record(record)).key: one for record in leases})
                for queue_id, (next_offset, leases) in table.items()
            }
        return cls(tables)
