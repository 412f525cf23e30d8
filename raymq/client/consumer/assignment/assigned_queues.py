"""AssignedQueues are all queues of one member of a group: granted, started, revoked, released, and committed.

    heartbeat answered → GRANT, REVOKE      start offset known → START      finished and committed → RELEASE
    no answer for FENCE_AFTER_S, or a commit refused → LOSE
    the group may not read the queue now → the queue is kept, forbidden, until the broker allows it

A member must not use its queues when other members may have them. So each answer of the group renews a lease, which
ends before the group's own session does; `fence` then gives up all queues. A queue whose commit a broker has refused
belongs to another member: it is taken again only in a newer generation.

SubscriptionState (pull) and ProcessQueues (push) add fetching and delivery. No threads, no clock, no calls: times are
arguments, in s. Nothing here survives the process; the brokers keep the committed offsets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Generic, TypeVar

from raymq.client.consumer.assignment.assigned_queue import AssignedQueue, AssignmentEvent, AssignmentState
from raymq.common.errors import NoPermissionError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.membership import SESSION_TIMEOUT_S, GroupAssignment

FENCE_AFTER_S: Final = SESSION_TIMEOUT_S * 0.6
"""How long a member may use its queues after it has sent a heartbeat that was answered. The group's own session begins
no earlier, so it is still running when the member gives the queues up."""

Q = TypeVar("Q", bound=AssignedQueue)


class AssignedQueues(ABC, Generic[Q]):
    """The queues of one member, or of a consumer without a group. Not thread-safe.

    `fence_after_s`: how long they may be used after a heartbeat was sent that was answered.
    """

    def __init__(self, *, fence_after_s: float = FENCE_AFTER_S) -> None:
        self._fence_after_s = fence_after_s
        self._queues: dict[MessageQueue, Q] = {}
        """The queues held, from their grant to their release or loss."""
        self._starting: dict[MessageQueue, Q] = {}
        """Queues whose start offset is unknown."""
        self._revoked: dict[MessageQueue, Q] = {}
        """Revoked queues that wait for their release."""
        self._fenced: dict[MessageQueue, int] = {}
        """Queues that a broker has refused to commit, with the generation it refused: only a newer grant counts."""
        self._forbidden: dict[MessageQueue, NoPermissionError] = {}
        """Queues that the brokers do not let the group read now, with the error that says why. Neither fetched from nor
        delivered, but committed."""
        self._lease_until_s = -math.inf
        """The time until which the group gives the queues to no other member."""
        self._joined = False
        self._offsets_version: int | None = None

    @property
    @abstractmethod
    def topics(self) -> frozenset[str]:
        """The topics whose queues are wanted from the group."""

    @property
    def holding(self) -> frozenset[MessageQueue]:
        """The queues that the group must not give to others, in whatever state."""
        return frozenset(self._queues)

    @property
    def joined(self) -> bool:
        """True if the group has ever answered, or queues were assigned without a group."""
        return self._joined

    @property
    def offsets_version(self) -> int | None:
        """The group's count of offset resets, as last heard. None without a group."""
        return self._offsets_version

    @property
    def leaving(self) -> bool:
        """True if revoked queues are not released yet."""
        return bool(self._revoked)

    def starting(self, broker_name: str | None = None, *, forbidden: bool = True) -> list[Q]:
        """Queues whose start offset is unknown, of one broker group or of all groups. `forbidden`: include queues that
        this group may not read now."""
        return [
            assigned
            for queue, assigned in self._starting.items()
            if broker_name in (None, queue.broker_name) and (forbidden or queue not in self._forbidden)
        ]

    @property
    def forbidden(self) -> Mapping[MessageQueue, NoPermissionError]:
        """The queues held that the group may not read now, with the reason. Not to be kept: it changes."""
        return self._forbidden

    @property
    def all_forbidden(self) -> bool:
        """True if the group may read none of the queues held."""
        return bool(self._forbidden) and len(self._forbidden) == len(self._queues)

    def _fetched_at(self, queue: MessageQueue, offset: int) -> Q | None:
        """Return the queue if its next fetch is at `offset`; None if the queue was revoked or moved."""
        assigned = self._queues.get(queue)
        if assigned is None or assigned.state is not AssignmentState.STARTED or assigned.fetch_offset != offset:
            return None
        return assigned

    # Ownership

    def assignment_received(self, assignment: GroupAssignment, sent_s: float) -> None:
        """Take up the group's answer to a heartbeat that was sent at `sent_s`."""
        self._hold(assignment.queues, assignment.generation, sent_s)
        self._lease_until_s = sent_s + self._fence_after_s
        self._offsets_version = assignment.offsets_version

    def hold(self, queues: Collection[MessageQueue], now_s: float) -> None:
        """Have exactly these queues, without a group."""
        self._fenced.clear()
        self._hold(queues, 0, now_s)
        self._lease_until_s = math.inf

    def _hold(self, queues: Collection[MessageQueue], generation: int, now_s: float) -> None:
        granted = {queue for queue in queues if self._is_wanted(queue)}
        for assigned in list(self._queues.values()):
            before = assigned.state
            if assigned.queue in granted:
                assigned.grant(generation)
            else:
                assigned.revoke(now_s)
            if assigned.state is not before:
                self._state_changed(assigned)
        for queue in sorted(granted - self._queues.keys()):
            if self._fenced.get(queue, -1) < generation:
                self._take_up(self._new_queue(queue, generation))
        self._fenced = {queue: fenced for queue, fenced in self._fenced.items() if queue in granted}
        self._joined = True

    def started(self, assigned: Q, start: QueueOffset) -> None:
        """Fetch a queue of `starting` from its start offset. Ignored if the queue was lost or revoked since."""
        if assigned.state is AssignmentState.STARTING:
            assigned.start(start)
            self._state_changed(assigned)

    def forbid(self, assigned: Q, error: NoPermissionError) -> bool:
        """Fetch and deliver no messages of a queue until `allow`, because the group may not read it now. This member
        keeps the queue. Returns False if the queue was forbidden before, or was lost or revoked since."""
        queue = assigned.queue
        if self._queues.get(queue) is not assigned or assigned.revoked:
            return False
        self._forbidden[queue] = error
        is_new = assigned.forbid(error)
        if is_new:
            self._state_changed(assigned)
        return is_new

    def allow(self, assigned: Q) -> None:
        """Continue with a queue that was forbidden, where it stopped."""
        assigned.allow()
        self._state_changed(assigned)

    def revoke(self, queues: Iterable[MessageQueue], now_s: float) -> None:
        """Fetch and deliver nothing more of these queues; `release` gives them up once they are finished with."""
        for queue in queues:
            assigned = self._queues.get(queue)
            if assigned is not None:
                assigned.revoke(now_s)
                self._state_changed(assigned)

    def release(self, now_s: float) -> list[MessageQueue]:
        """Release the revoked queues that may go, and return them: other members wait for them."""
        released = [assigned for assigned in self._revoked.values() if self._may_go(assigned, now_s)]
        for assigned in released:
            assigned.change(AssignmentEvent.RELEASE)
            self._state_changed(assigned)
        return [assigned.queue for assigned in released]

    def lose(self, queues: Iterable[MessageQueue]) -> None:
        """Deliver and commit nothing more of these queues: others have them, or they are deleted."""
        for queue in queues:
            assigned = self._queues.get(queue)
            if assigned is not None:
                assigned.change(AssignmentEvent.LOSE)
                self._state_changed(assigned)

    def lose_all(self) -> bool:
        """Deliver and commit nothing more of any queue: others may get them. False if there were none."""
        lost = list(self._queues)
        self.lose(lost)
        return bool(lost)

    def fence(self, now_s: float) -> bool:
        """Lose all queues if the group was silent for too long: others may have them. True if so."""
        return now_s > self._lease_until_s and self.lose_all()

    def is_absent(self, now_s: float) -> bool:
        """True if the member is to leave its group until it is back."""
        return False

    # Committing

    @property
    def has_uncommitted(self) -> bool:
        """True if there is something to commit."""
        return any(assigned.dirty for assigned in self._perhaps_dirty())

    @abstractmethod
    def commit_is_urgent(self) -> bool:
        """True if a caller or a member waits for a commit."""

    def waits_for_broker(self) -> bool:
        """True if a queue waits for its start offset, or a member for a commit. A forbidden queue waits for its next
        turn."""
        return not self._starting.keys() <= self._forbidden.keys() or self.commit_is_urgent()

    def uncommitted(self, broker_name: str | None = None) -> dict[MessageQueue, OffsetCommit]:
        """The commits of everything that is finished and not committed, for one broker group or for all."""
        return {
            assigned.queue: assigned.ask(assigned.commit_offset)
            for assigned in self._perhaps_dirty()
            if assigned.dirty and broker_name in (None, assigned.queue.broker_name)
        }

    def reset_queries(
        self, broker_name: str | None = None, *, only_forbidden: bool = False
    ) -> dict[MessageQueue, OffsetCommit]:
        """Make commits without an offset, whose answer names the queues that were reset and the queues that may be
        read. Includes all queues that have started, or only the forbidden ones."""
        return {
            assigned.queue: assigned.ask(None)
            for assigned in self._queues.values()
            if assigned.started
            and broker_name in (None, assigned.queue.broker_name)
            and (assigned.forbidden is not None or not only_forbidden)
        }

    def commit_answered(
        self, commits: Mapping[MessageQueue, OffsetCommit], answer: CommitAnswer
    ) -> dict[MessageQueue, int]:
        """Apply the brokers' answer to commits, and return the offsets that are now committed. Ignores the answer for a
        queue that was lost, reset or asked about again since."""
        committed = {}
        for queue, commit in commits.items():
            refused = queue in answer.fenced or queue in answer.gone or queue in answer.reset
            if commit.queue_offset is not None and not refused:
                committed[queue] = commit.queue_offset
            assigned = self._queues.get(queue)
            if assigned is None or assigned.asked is not commit:
                continue
            if queue in answer.fenced or queue in answer.gone:
                if queue in answer.fenced:
                    self._fenced[queue] = commit.generation
                self.lose([queue])
                continue
            if queue in answer.reset:
                self._reset(assigned, answer.reset[queue])
            else:
                assigned.committed_to(commit)
                self._committed(assigned)
            self._judge_permission(self._queues[queue], answer.stopped.get(queue))
        return committed

    def _judge_permission(self, assigned: Q, stopped: str | None) -> None:
        """Go on with a queue, or stop, as a broker's answer says."""
        if stopped is not None:
            self.forbid(assigned, NoPermissionError(stopped))
        elif assigned.forbidden is not None:
            self.allow(assigned)

    # Decided by each kind of consumer

    @abstractmethod
    def _new_queue(self, queue: MessageQueue, generation: int) -> Q:
        """A queue of this kind, just granted."""

    def _is_wanted(self, queue: MessageQueue) -> bool:
        """True if the group may grant this queue."""
        return True

    @abstractmethod
    def _may_go(self, assigned: Q, now_s: float) -> bool:
        """True if a revoked queue may be released."""

    @abstractmethod
    def _reset(self, assigned: Q, start: QueueOffset) -> None:
        """Continue at the offset to which a queue was reset."""

    def _perhaps_dirty(self) -> Iterable[Q]:
        """Queues among which are all that have something to commit."""
        return self._queues.values()

    def _committed(self, assigned: Q) -> None:
        """Take note that a commit of a queue was answered."""

    # The tables of queues

    def _take_up(self, assigned: Q) -> Q:
        """Hold a queue that was not held."""
        self._queues[assigned.queue] = assigned
        self._state_changed(assigned)
        return assigned

    def _state_changed(self, assigned: Q) -> None:
        """Bring the tables of queues up to date for one whose state has changed."""
        queue, state = assigned.queue, assigned.state
        for table, has in ((self._starting, state is AssignmentState.STARTING), (self._revoked, assigned.revoked)):
            if has:
                table[queue] = assigned
            else:
                table.pop(queue, None)
        if assigned.forbidden is None or assigned.dropped or assigned.revoked:
            assigned.allow()
            self._forbidden.pop(queue, None)
        if assigned.dropped and self._queues.get(queue) is assigned:
            del self._queues[queue]
