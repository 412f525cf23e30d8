"""AssignedQueues holds all queues of one member of a group: granted, started, revoked, released, and committed.

    heartbeat answered → GRANT, REVOKE      start offset known → START      finished and committed → RELEASE
    no answer for FENCE_AFTER_S, or a commit refused → LOSE
    the group may not read the queue now → the queue is kept, forbidden, until the broker allows it

A member must not use its queues when other members may have them. So each answer of the group renews a lease on the
queues. The lease expires before the member's session in the group expires, and `fence` then gives up all queues. If a
broker refuses the commit of a queue, the queue belongs to another member. This member takes that queue again only in a
newer generation.

SubscriptionState (pull) and ProcessQueues (push) add fetching and delivery. This module uses no threads, no clock and
no remote calls: times are arguments, in s. This state is lost when the process ends; the brokers keep the committed
offsets.
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
"""Time in s for which a member may use its queues after it sent a heartbeat that was answered. The member's session in
the group begins no earlier than this heartbeat and lasts longer. So the member gives the queues up before its session
expires."""

Q = TypeVar("Q", bound=AssignedQueue)


class AssignedQueues(ABC, Generic[Q]):
    """The queues of one member, or of a consumer without a group. Not thread-safe.

    `fence_after_s`: for how many seconds the queues may be used after the last answered heartbeat was sent.
    """

    def __init__(self, *, fence_after_s: float = FENCE_AFTER_S) -> None:
        self._fence_after_s = fence_after_s
        self._queues: dict[MessageQueue, Q] = {}
        """All queues that this member holds, each from its grant to its release or loss."""
        self._starting: dict[MessageQueue, Q] = {}
        """Queues of this member whose start offset is unknown."""
        self._revoked: dict[MessageQueue, Q] = {}
        """Revoked queues of this member that are not released yet."""
        self._fenced: dict[MessageQueue, int] = {}
        """Queues whose offset commits a broker has refused, with the generation of the refused commit. The member takes
        such a queue again only if a newer generation grants it."""
        self._forbidden: dict[MessageQueue, NoPermissionError] = {}
        """Queues that the brokers do not allow the group to read now, with the error that gives the reason. The
        consumer neither fetches nor delivers their messages, but commits their offsets."""
        self._lease_until_s = -math.inf
        """Time in s at which this member's lease of its queues ends. Before this time, the group gives the queues to no
        other member."""
        self._joined = False
        self._offsets_version: int | None = None

    @property
    @abstractmethod
    def topics(self) -> frozenset[str]:
        """The topics that this member wants to consume. In its heartbeats it requests a share of their queues."""

    @property
    def holding(self) -> frozenset[MessageQueue]:
        """This member's queues, in any state. The group must not give them to other members."""
        return frozenset(self._queues)

    @property
    def joined(self) -> bool:
        """True if the group has answered a heartbeat of this member. Also True for a consumer without group membership,
        after its queues were assigned by hand."""
        return self._joined

    @property
    def offsets_version(self) -> int | None:
        """Number of the group's offset resets, from the group's last answer. None without a group."""
        return self._offsets_version

    @property
    def leaving(self) -> bool:
        """True if some revoked queues of this member are not released yet."""
        return bool(self._revoked)

    def starting(self, broker_name: str | None = None, *, forbidden: bool = True) -> list[Q]:
        """Return the queues whose start offset is unknown, of one broker group or of all. `forbidden`: if True, include
        queues that the consumer group may not read now."""
        return [
            assigned
            for queue, assigned in self._starting.items()
            if broker_name in (None, queue.broker_name) and (forbidden or queue not in self._forbidden)
        ]

    @property
    def forbidden(self) -> Mapping[MessageQueue, NoPermissionError]:
        """The queues of this member that the group may not read now, each with the reason. The mapping changes with the
        queues, so a caller that keeps it must copy it."""
        return self._forbidden

    @property
    def all_forbidden(self) -> bool:
        """True if the group may read none of this member's queues."""
        return bool(self._forbidden) and len(self._forbidden) == len(self._queues)

    def _fetched_at(self, queue: MessageQueue, offset: int) -> Q | None:
        """Return the assignment of `queue` if its next fetch is at `offset`. Returns None if the queue was revoked, or
        if its fetch offset has changed."""
        assigned = self._queues.get(queue)
        if assigned is None or assigned.state is not AssignmentState.STARTED or assigned.fetch_offset != offset:
            return None
        return assigned

    # Methods that grant, revoke and release queues

    def assignment_received(self, assignment: GroupAssignment, sent_s: float) -> None:
        """Apply the group's answer to a heartbeat that was sent at `sent_s`. Grants and revokes queues, and renews the
        lease."""
        self._hold(assignment.queues, assignment.generation, sent_s)
        self._lease_until_s = sent_s + self._fence_after_s
        self._offsets_version = assignment.offsets_version

    def hold(self, queues: Collection[MessageQueue], now_s: float) -> None:
        """Assign exactly the given queues to a consumer without a group."""
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
        """Begin to fetch a queue at its start offset. Does nothing if the queue was lost or revoked after `starting`
        returned it."""
        if assigned.state is AssignmentState.STARTING:
            assigned.start(start)
            self._state_changed(assigned)

    def forbid(self, assigned: Q, error: NoPermissionError) -> bool:
        """Stop fetching and delivering a queue until `allow` is called, because the group may not read the queue now.
        This member keeps the queue. Returns False if the queue was already forbidden, or is no longer held."""
        queue = assigned.queue
        if self._queues.get(queue) is not assigned or assigned.revoked:
            return False
        self._forbidden[queue] = error
        is_new = assigned.forbid(error)
        if is_new:
            self._state_changed(assigned)
        return is_new

    def allow(self, assigned: Q) -> None:
        """Allow a forbidden queue again. The consumer continues at the offset at which it stopped."""
        assigned.allow()
        self._state_changed(assigned)

    def revoke(self, queues: Iterable[MessageQueue], now_s: float) -> None:
        """Stop fetching and delivering messages of these queues. After the program has finished with a queue's
        messages, `release` gives up the queue."""
        for queue in queues:
            assigned = self._queues.get(queue)
            if assigned is not None:
                assigned.revoke(now_s)
                self._state_changed(assigned)

    def release(self, now_s: float) -> list[MessageQueue]:
        """Release the revoked queues whose messages are all finished. Returns the released queues. Other members wait
        for these queues."""
        released = [assigned for assigned in self._revoked.values() if self._may_go(assigned, now_s)]
        for assigned in released:
            assigned.change(AssignmentEvent.RELEASE)
            self._state_changed(assigned)
        return [assigned.queue for assigned in released]

    def lose(self, queues: Iterable[MessageQueue]) -> None:
        """Remove these queues from the consumer at once, because other members have them or because they are deleted.
        The consumer no longer delivers or commits their messages."""
        for queue in queues:
            assigned = self._queues.get(queue)
            if assigned is not None:
                assigned.change(AssignmentEvent.LOSE)
                self._state_changed(assigned)

    def lose_all(self) -> bool:
        """Give up all queues at once, because other members may get the queues. The consumer delivers no further
        messages of these queues, and commits no offsets in them. Returns False if no queue was held."""
        lost = list(self._queues)
        self.lose(lost)
        return bool(lost)

    def fence(self, now_s: float) -> bool:
        """Give up all queues if the lease has expired because no answer from the group arrived in time. The group may
        have assigned the queues to other members. Returns True if queues were given up."""
        return now_s > self._lease_until_s and self.lose_all()

    def is_absent(self, now_s: float) -> bool:
        """True if the member is absent, so that it must leave its group for now. A pull consumer is absent while its
        program does not poll."""
        return False

    # Methods that commit offsets

    @property
    def has_uncommitted(self) -> bool:
        """True if some queue of this member has an offset to commit."""
        return any(assigned.dirty for assigned in self._perhaps_dirty())

    @abstractmethod
    def commit_is_urgent(self) -> bool:
        """True if a caller in this process or another member of the group waits for a commit."""

    def waits_for_broker(self) -> bool:
        """True if the broker must be called soon: a queue waits for its start offset, or a commit is urgent. A
        forbidden queue does not count, because the broker is asked about such a queue only at fixed intervals."""
        return not self._starting.keys() <= self._forbidden.keys() or self.commit_is_urgent()

    def uncommitted(self, broker_name: str | None = None) -> dict[MessageQueue, OffsetCommit]:
        """Return a commit for each queue that has finished but uncommitted messages. `broker_name`: return only the
        commits of this broker group; None for all broker groups."""
        return {
            assigned.queue: assigned.ask(assigned.commit_offset)
            for assigned in self._perhaps_dirty()
            if assigned.dirty and broker_name in (None, assigned.queue.broker_name)
        }

    def reset_queries(
        self, broker_name: str | None = None, *, only_forbidden: bool = False
    ) -> dict[MessageQueue, OffsetCommit]:
        """Return a reset query (a commit without an offset) for each queue that the consumer has started to read. With
        `only_forbidden`, return it only for queues that the group was forbidden to read. The broker's answer names the
        queues that were reset and the queues that the group may read."""
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
        queue if the queue was lost or reset after the commit was created. Also ignores it if a newer commit of the
        queue exists."""
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
        """Apply the broker's decision if the group may read a queue. `stopped`: the broker's reason for forbidding the
        queue; None allows a forbidden queue again."""
        if stopped is not None:
            self.forbid(assigned, NoPermissionError(stopped))
        elif assigned.forbidden is not None:
            self.allow(assigned)

    # Methods that each kind of consumer implements

    @abstractmethod
    def _new_queue(self, queue: MessageQueue, generation: int) -> Q:
        """Create the assignment of a queue that the group has just granted."""

    def _is_wanted(self, queue: MessageQueue) -> bool:
        """True if this member still wants the queue from the group."""
        return True

    @abstractmethod
    def _may_go(self, assigned: Q, now_s: float) -> bool:
        """Return True if the member can release a revoked queue to the group now."""

    @abstractmethod
    def _reset(self, assigned: Q, start: QueueOffset) -> None:
        """Move a queue to the offset to which the group's offset was reset. The consumer continues there."""

    def _perhaps_dirty(self) -> Iterable[Q]:
        """Return the queues that may have an offset to commit. No queue with such an offset is missing; other queues
        may be included."""
        return self._queues.values()

    def _committed(self, assigned: Q) -> None:
        """Hook that is called after the broker has accepted a commit of the queue."""

    # Methods that update the tables of queues

    def _take_up(self, assigned: Q) -> Q:
        """Add a queue, which this member did not hold before, to the tables of the member's queues."""
        self._queues[assigned.queue] = assigned
        self._state_changed(assigned)
        return assigned

    def _state_changed(self, assigned: Q) -> None:
        """Update the tables of starting, revoked and forbidden queues after the state of the queue `assigned` has
        changed."""
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
