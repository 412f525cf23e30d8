"""Selects the messages that a receive of a simple consumer leases, how long they are leased, and their attempt number.

This module decides which consumer gets which message, and when. Messages whose lease has passed without an
acknowledgement come first. They are read from their own queue by their offsets; no message is copied to another topic.
New messages come next. Several consumers may receive from one queue, so a group may have more consumers than queues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from actors.core.pop.leases import Lease, PopChange, PopQueue, PopTable, QueueEdit, pop_change
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.pop import (
    INVISIBLE_MAX_MS,
    INVISIBLE_MIN_MS,
    RECEIVE_MAX_MESSAGES,
    RECEIVE_MAX_WAIT_S,
    LeasedRange,
    ReceiveRequest,
)
from raymq.common.protocol.store import QueueEnds

LEASES_MAX: Final = 1024
"""Maximum number of leases that a group may have in a queue before the group gets no new messages of the queue.
Messages whose lease ended without an acknowledgement are still leased again."""
UNSETTLED_MAX: Final = 65_536
"""If a group has this many unsettled (leased but unacknowledged) messages in a queue, no new messages of the queue are
leased."""

TopicQueue = tuple[str, int]
"""The key of a queue: its topic and its queue id."""
Committed = Callable[[str, int], int]
"""Function that returns the group's committed offset in a topic's queue; 0 if the group has committed none."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The result of leasing messages for a receive.

    `change`: the record to store; None if nothing changes. `ranges`: the leased offset ranges. `gone`: the number of
    unsettled messages that retention had deleted.
    """

    change: PopChange | None
    ranges: tuple[LeasedRange, ...]
    gone: int


def check_receive(request: ReceiveRequest) -> None:
    """Raise InvalidArgumentError if a number in a receive request is out of its bounds."""
    if not 1 <= request.max_messages <= RECEIVE_MAX_MESSAGES:
        raise InvalidArgumentError(
            f"max_messages of a receive must be 1 to {RECEIVE_MAX_MESSAGES}, not {request.max_messages!r}"
        )
    if not INVISIBLE_MIN_MS <= request.invisible_ms <= INVISIBLE_MAX_MS:
        raise InvalidArgumentError(
            f"invisible_s of a receive must be {INVISIBLE_MIN_MS / 1000:g} to {INVISIBLE_MAX_MS // 1000} s, not "
            f"{request.invisible_ms / 1000:g}"
        )
    if not 0 <= request.wait_s <= RECEIVE_MAX_WAIT_S:
        raise InvalidArgumentError(f"wait_s of a receive must be 0 to {RECEIVE_MAX_WAIT_S:g} s, not {request.wait_s!r}")


def decide_receive(
    table: PopTable,
    committed: Committed,
    queues: Sequence[TopicQueue],
    ends: Mapping[TopicQueue, QueueEnds],
    request: ReceiveRequest,
    now_ms: int,
    ordered: Collection[str] = (),
) -> LeaseGrant:
    """Lease up to `request.max_messages` messages of `queues`, in the order of the queues.

    Skips a queue whose end offset is not in `ends`. In order mode, also skips a queue with leased messages that are
    still invisible. `ordered`: the topics in order mode, for a request that does not choose the mode. If a request is
    repeated with its attempt id, it gets its previous leases as long as they are valid.
    """
    group = request.group
    if request.attempt_id:
        again = _repeated(table, queues, request, now_ms)
        if again:
            return LeaseGrant(None, again, 0)
    edits: list[QueueEdit] = []
    ranges: list[LeasedRange] = []
    room, gone = request.max_messages, 0
    for topic, queue_id in queues:
        known = ends.get((topic, queue_id))
        if known is None:
            continue
        edit = table.edit(group, topic, queue_id, committed(topic, queue_id))
        gone += _drop_deleted(edit, known.min_offset)
        in_order = in_order_mode(request, topic, ordered)
        leases = _lease(edit, known.max_offset, request, room, now_ms, in_order=in_order)
        edits.append(edit)
        ranges += [lease_range(topic, queue_id, lease) for lease in leases]
        room -= sum([lease.unsettled for lease in leases])
        if not room:
            break
    return LeaseGrant(pop_change(group, edits), tuple(ranges), gone)


def available(
    table: PopTable,
    committed: Committed,
    queues: Sequence[TopicQueue],
    ends: Mapping[TopicQueue, QueueEnds],
    request: ReceiveRequest,
    now_ms: int,
    ordered: Collection[str] = (),
) -> int:
    """Estimate how many messages `decide_receive` could lease now. If the request repeats an earlier request, return
    the requested number."""
    if request.attempt_id and _repeated(table, queues, request, now_ms):
        return request.max_messages
    count = 0
    for topic, queue_id in queues:
        known, queue = ends.get((topic, queue_id)), table.get(request.group, topic, queue_id)
        offset = committed(topic, queue_id)
        if queue is not None:
            in_order = in_order_mode(request, topic, ordered)
            if in_order and any(lease.visible_ms > now_ms for lease in queue.leases.values()):
                continue
            count += queue.due(now_ms)
            offset = max(offset, queue.next_offset)
            if not _may_hand_out(queue):
                continue
        if known is not None:
            count += max(0, known.max_offset - max(offset, known.min_offset))
    return count


def in_order_mode(request: ReceiveRequest, topic: str, ordered: Collection[str]) -> bool:
    """True if a request receives a topic in order mode. `ordered`: the topics in order mode, for a request that does
    not choose the mode."""
    return topic in ordered if request.ordered is None else request.ordered


def next_due_ms(table: PopTable, group: str, queues: Sequence[TopicQueue], now_ms: int) -> int | None:
    """Return the earliest future time, in ms, at which a lease in `queues` ends; None if no lease is in force."""
    times = [
        lease.visible_ms
        for topic, queue_id in queues
        if (queue := table.get(group, topic, queue_id)) is not None
        for lease in queue.leases.values()
        if lease.visible_ms > now_ms
    ]
    return min(times, default=None)


def _repeated(
    table: PopTable, queues: Sequence[TopicQueue], request: ReceiveRequest, now_ms: int
) -> tuple[LeasedRange, ...]:
    return tuple(
        lease_range(topic, queue_id, lease)
        for topic, queue_id in queues
        if (queue := table.get(request.group, topic, queue_id)) is not None
        for lease in queue.leases.values()
        if lease.attempt_id == request.attempt_id and lease.visible_ms > now_ms
    )


def lease_range(topic: str, queue_id: int, lease: Lease) -> LeasedRange:
    """Convert a lease to the form that a consumer receives."""
    places = (topic, queue_id, lease.start, lease.size, lease.pop_ms, lease.invisible_ms, lease.attempts)
    return LeasedRange(*places, f"{lease.settled:x}")


def _may_hand_out(queue: PopQueue) -> bool:
    """Return True if new messages of the queue may be leased: the numbers of leases and of unsettled (not yet
    acknowledged) messages are below their limits."""
    leases = queue.leases
    return len(leases) < LEASES_MAX and (
        len(leases) * RECEIVE_MAX_MESSAGES <= UNSETTLED_MAX
        or sum([lease.unsettled for lease in leases.values()]) < UNSETTLED_MAX
    )


def _drop_deleted(edit: QueueEdit, min_offset: int) -> int:
    """Mark the leased messages that retention has deleted from the queue as settled, as if they were acknowledged.
    Returns the number of messages that were not settled before."""
    queue, gone = edit.queue, 0
    queue.next_offset = max(queue.next_offset, min_offset)
    for lease in [lease for lease in queue.leases.values() if lease.first_unsettled < min_offset]:
        deleted = (1 << min(lease.size, min_offset - lease.start)) - 1
        gone += (deleted & ~lease.settled).bit_count()
        edit.put(lease._replace(settled=lease.settled | deleted))
    return gone


def _lease(
    edit: QueueEdit, max_offset: int, request: ReceiveRequest, room: int, now_ms: int, *, in_order: bool
) -> list[Lease]:
    """Lease up to `room` messages of one queue: first the unsettled messages of leases that have ended, in order, then
    new messages."""
    queue = edit.queue
    due = sorted([lease for lease in queue.leases.values() if lease.visible_ms <= now_ms])
    if in_order and len(due) < len(queue.leases):
        return []
    end = _end_of_first(due, room)
    leased = [_again(edit, old, request, end, now_ms) for old in due if old.first_unsettled < end]
    room -= sum([lease.unsettled for lease in leased])
    count = min(room, max_offset - queue.next_offset)
    if count > 0 and _may_hand_out(queue):
        start, queue.next_offset = queue.next_offset, queue.next_offset + count
        new = _new(start, count, request, now_ms)
        edit.put(new)
        leased.append(new)
    return leased


def _again(edit: QueueEdit, old: Lease, request: ReceiveRequest, end: int, now_ms: int) -> Lease:
    """Make a new lease for the unsettled messages (neither acknowledged nor part of another lease) before offset `end`
    of a lease that has ended. The other messages stay in the old lease."""
    unsettled = ~old.settled & old.all
    taken = unsettled & _below(old, end)
    rest = unsettled & ~taken
    first = (taken & -taken).bit_length() - 1
    count = taken.bit_length() - first
    if rest:
        edit.put(old._replace(settled=old.all & ~rest))
    else:
        edit.drop(old.key)
    new = _new(old.start + first, count, request, old.next_pop_ms(now_ms))
    new = new._replace(attempts=old.attempts + 1, settled=~(taken >> first) & ((1 << count) - 1))
    edit.put(new)
    return new


def _new(start: int, count: int, request: ReceiveRequest, pop_ms: int) -> Lease:
    return Lease(start, pop_ms, count, request.invisible_ms, 1, 0, request.attempt_id)


def _end_of_first(leases: Sequence[Lease], number: int) -> int:
    """Return the lowest offset before which the leases have `number` unsettled messages together. Unsettled messages
    are neither acknowledged nor part of another lease. The offsets of the leases may interleave.

    If the leases have at most `number` unsettled messages, return the end of the last lease.
    """
    low = min([lease.start for lease in leases], default=0)
    high = max([lease.start + lease.size for lease in leases], default=0)
    if sum([lease.unsettled for lease in leases]) <= number:
        return high
    while low < high:
        middle = (low + high) // 2
        before = sum([(~lease.settled & _below(lease, middle)).bit_count() for lease in leases])
        if before < number:
            low = middle + 1
        else:
            high = middle
    return low


def _below(lease: Lease, offset: int) -> int:
    """Return a bit set of the offsets of a lease that are lower than `offset`. Bit i stands for the offset
    `lease.start` + i."""
    return (1 << max(0, min(lease.size, offset - lease.start))) - 1
