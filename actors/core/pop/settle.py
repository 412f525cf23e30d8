"""Settles leased messages: acknowledges them, changes when they become visible, or makes them available again unread.
Also extends leases in place.

This module decides what an acknowledgement does, and when it has no effect. An acknowledgement has an effect as long as
its lease exists: even after the lease's time has passed, until the messages are leased again. A later or repeated
acknowledgement has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from actors.core.pop.leases import Lease, PopChange, PopTable, QueueEdit, pop_change
from actors.core.pop.receive import LEASES_MAX, Committed
from raymq.common.errors import InvalidArgumentError, SystemBusyError
from raymq.common.protocol.pop import ALL_OFFSETS, INVISIBLE_MAX_MS, LeasePart

SPLIT_LEASES_MAX: Final = 4 * LEASES_MAX
"""Maximum number of leases that a consumer group may have in one queue after a request has split leases. A lease is
split if a request changes the invisible time of only some of the lease's messages."""


@dataclass(slots=True)
class SettleDecision:
    """The result of a request that acknowledges leased messages, or that changes their invisible time.

    `change`: the record to store; None if nothing changes. `leases`: filled only if the invisible time changes. For
    each lease part in the request, it has the new or extended lease, or None if the lease has ended.
    """

    change: PopChange | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """By topic: the number of messages that the request acknowledges, or whose invisible time it changes."""
    leases: list[Lease | None] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of messages, in all topics, that the request acknowledges, or whose invisible time it
        changes."""
        return self.counts.total()


def decide_ack(table: PopTable, committed: Committed, group: str, parts: Sequence[LeasePart]) -> SettleDecision:
    """Acknowledge leased messages: mark their offsets as settled (acknowledged), and count them. Returns the record to
    store. Raises InvalidArgumentError if an offset is not in its lease."""
    edits = _Edits(table, committed, group)
    settled = SettleDecision()
    for part in parts:
        edit, lease, offsets = edits.find(part)
        if lease is not None and offsets:
            settled.counts[part.topic] += offsets.bit_count()
            edit.put(lease._replace(settled=lease.settled | offsets))
    settled.change = edits.change()
    return settled


def decide_invisible(
    table: PopTable,
    committed: Committed,
    group: str,
    parts: Sequence[LeasePart],
    invisible_ms: int,
    now_ms: int,
    *,
    counted: bool = True,
) -> SettleDecision:
    """Make leased messages visible again `invisible_ms` from now, and return the record to store. Each part of a lease
    in `parts` becomes a new lease, and its old receipt becomes invalid.

    The number of delivery attempts stays the same, or is reduced by one if `counted` is False. Raises
    InvalidArgumentError if `invisible_ms` is out of bounds or an offset is not in its lease. Raises SystemBusyError if
    the group has SPLIT_LEASES_MAX leases in the queue.
    """

    def move(part: LeasePart, edit: QueueEdit, lease: Lease, offsets: int) -> Lease:
        edit.put(lease._replace(settled=lease.settled | offsets))
        if len(edit.queue.leases) >= SPLIT_LEASES_MAX:
            raise SystemBusyError(
                f"group {group!r} has {SPLIT_LEASES_MAX} leases in queue {part.topic}:{part.queue_id}, the "
                "maximum; change the invisible time of several messages in one call"
            )
        new = _moved(lease, offsets, invisible_ms, now_ms, lease.attempts - (not counted))
        edit.put(new)
        return new

    return _change_times(_Edits(table, committed, group), parts, invisible_ms, move)


def decide_extend(
    table: PopTable, committed: Committed, group: str, parts: Sequence[LeasePart], invisible_ms: int, now_ms: int
) -> SettleDecision:
    """Extend leases in place, so that their messages stay invisible until `invisible_ms` from now. Returns the record
    to store. A lease keeps its key, so the receipts of its messages stay valid.

    A lease is extended for all its unsettled messages if the request names at least one of them. No lease becomes
    shorter. Raises InvalidArgumentError if `invisible_ms` is out of bounds or an offset is not in its lease.
    """

    def extend(part: LeasePart, edit: QueueEdit, lease: Lease, offsets: int) -> Lease:
        if now_ms + invisible_ms > lease.visible_ms:
            lease = lease._replace(invisible_ms=now_ms + invisible_ms - lease.pop_ms, extended_ms=now_ms)
            edit.put(lease)
        return lease

    return _change_times(_Edits(table, committed, group), parts, invisible_ms, extend)


def _change_times(
    edits: _Edits,
    parts: Sequence[LeasePart],
    invisible_ms: int,
    change: Callable[[LeasePart, QueueEdit, Lease, int], Lease],
) -> SettleDecision:
    """Change the invisible time of leased messages. `change` makes the edit for a lease that has unsettled messages of
    the request, and returns the changed or new lease. It is not called for a lease that has ended. Raises
    InvalidArgumentError if `invisible_ms` is out of bounds."""
    if not 0 <= invisible_ms <= INVISIBLE_MAX_MS:
        raise InvalidArgumentError(
            f"invisible_s must be 0 to {INVISIBLE_MAX_MS // 1000} s, not {invisible_ms / 1000:g}"
        )
    settled = SettleDecision()
    for part in parts:
        edit, lease, offsets = edits.find(part)
        if lease is None or not offsets:
            settled.leases.append(None)
            continue
        settled.leases.append(change(part, edit, lease, offsets))
        settled.counts[part.topic] += offsets.bit_count()
    settled.change = edits.change()
    return settled


def _moved(old: Lease, offsets: int, invisible_ms: int, now_ms: int, attempts: int) -> Lease:
    """Build a new lease for some messages of the lease `old`. Bit i of `offsets` is set if the new lease contains
    offset `old.start` + i."""
    first = (offsets & -offsets).bit_length() - 1
    count = offsets.bit_length() - first
    pop_ms = old.next_pop_ms(now_ms)
    settled = ~(offsets >> first) & ((1 << count) - 1)
    return Lease(old.start + first, pop_ms, count, invisible_ms + now_ms - pop_ms, attempts, settled)


class _Edits:
    """The lease changes (QueueEdit) of one request, by queue."""

    def __init__(self, table: PopTable, committed: Committed, group: str) -> None:
        self._table, self._committed, self._group = table, committed, group
        self._edits: dict[tuple[str, int], QueueEdit] = {}

    def find(self, part: LeasePart) -> tuple[QueueEdit, Lease | None, int]:
        """Find the lease to which the offsets in `part` belong. Returns three values: the changes that this request
        makes to the queue's leases (QueueEdit); the lease, None if it has ended; and the bit set of the offsets in
        `part` that are not settled yet.

        Raises InvalidArgumentError if an offset is not in the lease.
        """
        queue = part.topic, part.queue_id
        edit = self._edits.get(queue)
        if edit is None:
            edit = self._table.edit(self._group, *queue, self._committed(*queue))
            self._edits[queue] = edit
        lease = edit.queue.leases.get((part.start, part.pop_ms))
        if lease is None:
            return edit, None, 0
        offsets = lease.all if part.offsets == ALL_OFFSETS else _read_offsets(part.offsets)
        if offsets > lease.all:
            raise InvalidArgumentError(
                f"the lease at offset {part.start} of queue {part.topic}:{part.queue_id} has {lease.size} "
                "messages, and the receipt names a message outside of the lease"
            )
        return edit, lease, offsets & ~lease.settled

    def change(self) -> PopChange | None:
        return pop_change(self._group, self._edits.values())


def _read_offsets(text: str) -> int:
    try:
        offsets = int(text, 16)
    except ValueError:
        offsets = -1
    if offsets < 0:
        raise InvalidArgumentError(f"{text[:80]!r} is not a set of offsets")
    return offsets
