"""The laws of a consumer group, and the ledger that checks the laws. The laws hold whatever happens to the group's
processes.

1. Two members never deliver the same queue at the same time. No member delivers a queue while another member may
   deliver the queue or has a batch of the queue in flight. A member that lost a queue
   delivers it only after the group has granted the queue to it again.
2. A committed offset moves back only in a reset, and never passes a message that no member consumed.
3. A member delivers a queue in order, one batch at a time, from the committed offset on. A member may repeat a batch,
   but skips none.
4. At the end every message since the last reset to a lower offset was consumed, except messages that a reset skipped.

`Ledger` records events and raises LawBrokenError. A `Tenure` is the time for which one member has a queue, from grant
to loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from raymq.common.message import MessageQueue


class LawBrokenError(AssertionError):
    """Raised if an event breaks an invariant of consumer groups."""


class Owner(Protocol):
    """The attributes and methods of a group member that the ledger (the checks of the group's laws) uses."""

    name: str

    def leased(self) -> bool:
        """Return whether the member's lease is valid. While the lease is valid, no other member may own the member's
        queues."""

    def may_deliver(self, queue: MessageQueue) -> bool:
        """Return whether the member holds the queue with a valid lease, and the queue was not revoked."""


@dataclass(eq=False)
class Tenure:
    """The time for which one member owns a queue, from grant to loss.

    `next_offset`: offset that the member delivers next. `under_way`: first offset and end offset of the batch that the
    listener processes. `over`: another member has begun to deliver the queue. `fenced`: the owner had to give up the
    queue, even if its listener still runs.
    """

    owner: Owner
    queue: MessageQueue
    next_offset: int
    repeat_from: int | None = None
    under_way: tuple[int, int] | None = None
    over: bool = False
    fenced: bool = False


@dataclass
class _Account:
    """The consumption of one queue. `solid`: the offset before which every message was consumed, or skipped by
    a reset."""

    committed: int = 0
    solid: int = 0
    end: int = 0
    done: set[int] = field(default_factory=set)
    last: Tenure | None = None


class Ledger:
    """Records the events of all queues of a simulated consumer group, and checks the invariants of consumer groups.

    `deliveries`: number of batches that were delivered. `handovers`: number of times that a queue moved from one
    member's process to another member's process.
    """

    def __init__(self, queues: Iterable[MessageQueue]) -> None:
        self.deliveries = self.handovers = 0
        self._accounts = {queue: _Account() for queue in queues}
        self._tenures: dict[MessageQueue, list[Tenure]] = {queue: [] for queue in self._accounts}

    def end(self, queue: MessageQueue) -> int:
        return self._accounts[queue].end

    def produced(self, queue: MessageQueue, count: int) -> None:
        self._accounts[queue].end += count

    def begin(self, owner: Owner, queue: MessageQueue, committed: int) -> Tenure:
        """Begin a member's tenure of a queue. `committed`: the start offset that the broker returned to the
        member."""
        tenure = Tenure(owner, queue, committed)
        self._tenures[queue].append(tenure)
        return tenure

    def forget_member(self, owner: Owner) -> None:
        """Delete the tenures of a dead member. The batches that the member had in flight no longer count."""
        for tenures in self._tenures.values():
            tenures[:] = [tenure for tenure in tenures if tenure.owner is not owner]

    def fenced(self, owner: Owner, queue: MessageQueue) -> None:
        """Record that a member must give up a queue. A tenure is a period in which a member owns a queue. The member
        may have several tenures of the queue, because a reset begins a new tenure. All of them are marked as fenced."""
        for tenure in self._tenures[queue]:
            tenure.fenced = tenure.fenced or tenure.owner is owner

    def deliver(self, tenure: Tenure, first: int, end: int, others: Iterable[Owner]) -> None:
        """Record that a member delivers a batch to its listener. Raises LawBrokenError if the member may not deliver
        the batch now."""
        queue, account = tenure.queue, self._accounts[tenure.queue]
        for other in others:
            if other is not tenure.owner and other.may_deliver(queue):
                raise LawBrokenError(f"{queue}: {tenure.owner.name} delivers while {other.name} may deliver it too")
        for before in self._tenures[queue]:
            busy = before.under_way is not None and not before.fenced and before.owner.leased()
            if busy and before is not tenure:
                raise LawBrokenError(
                    f"{queue}: {tenure.owner.name} delivers while {before.owner.name} has a batch under way"
                )
        if account.last is not tenure:
            if tenure.over:
                raise LawBrokenError(f"{queue}: {tenure.owner.name} delivers again after another has begun")
            if account.last is not None:
                account.last.over = True
                self.handovers += account.last.owner is not tenure.owner
            account.last = tenure
        if tenure.under_way is not None:
            raise LawBrokenError(f"{queue}: {tenure.owner.name} has two batches under way")
        if first not in (tenure.next_offset, tenure.repeat_from):
            raise LawBrokenError(f"{queue}: {tenure.owner.name} delivers {first}, not {tenure.next_offset}")
        tenure.repeat_from, tenure.next_offset, tenure.under_way = first, end, (first, end)
        self.deliveries += 1

    def finish(self, tenure: Tenure, *, consumed: bool) -> None:
        """Record that the listener has finished a batch. `consumed`: whether the listener succeeded."""
        assert tenure.under_way is not None
        first, end = tenure.under_way
        tenure.under_way = None
        if consumed:
            tenure.repeat_from = None
            account = self._accounts[tenure.queue]
            account.done.update(range(max(first, account.solid), end))
            while account.solid in account.done:
                account.done.remove(account.solid)
                account.solid += 1
        else:
            tenure.next_offset = first

    def committed(self, queue: MessageQueue, offset: int) -> None:
        """Record the committed offset of a queue, and check that it is allowed. The broker calls this after each change
        of the offset."""
        account = self._accounts[queue]
        if offset < account.committed:
            raise LawBrokenError(f"{queue}: the committed offset went back from {account.committed} to {offset}")
        if offset > account.solid:
            raise LawBrokenError(f"{queue}: {offset} is committed, but {account.solid} was not consumed")
        account.committed = offset

    def reset(self, queue: MessageQueue, offset: int) -> None:
        """Record a reset of the group's committed offset of a queue. Messages from `offset` on must be consumed;
        earlier messages may be skipped."""
        account = self._accounts[queue]
        account.committed = account.solid = offset
        account.done.clear()

    def unfinished(self) -> list[str]:
        """Return a description of each queue that has a message that was not consumed or not committed."""
        return [
            f"{queue}: {account.committed} committed, {account.solid} consumed of {account.end}"
            for queue, account in self._accounts.items()
            if not account.committed == account.solid == account.end
        ]
