"""AssignedQueue is one assignment of a queue to a consumer: its state, the offset to fetch, and the state of commits.

    granted → STARTING → STARTED → REVOKED → RELEASED        ASSIGNMENT_TRANSITIONS has every step

For the pull consumer, the subclass AssignedMessageQueue adds the records that wait for a poll. For the push consumer,
the subclass ProcessQueue adds the messages at the listener. This module uses no threads, no clock and no calls.
raymq.client.consumer.assignment.assigned_queues holds all queues of a consumer, and applies the answers of the group
and of the brokers to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from raymq.common.errors import NoPermissionError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import OffsetCommit, QueueOffset


class AssignmentState(Enum):
    """State of a queue's assignment to this consumer."""

    STARTING = "starting"
    """The group has granted the queue, but its start offset is not known yet. No other member may get the
    queue."""
    STARTED = "started"
    """The consumer fetches and delivers the queue's messages."""
    WITHDRAWN = "withdrawn"
    """The queue was revoked before its start offset was known: the consumer has read nothing from the queue."""
    REVOKED = "revoked"
    """The queue is neither fetched from nor delivered. The consumer keeps it until the program has finished with the
    messages that were delivered."""
    RELEASED = "released"
    """This consumer no longer holds the queue. A new grant of the queue creates a new assignment."""


class AssignmentEvent(Enum):
    """The events that change an assignment."""

    GRANT = "grant"
    """The group's answer to a heartbeat includes the queue in the member's assignment."""
    START = "start"
    """The broker has returned the start offset."""
    REVOKE = "revoke"
    """The group's answer no longer names the queue, the queue's topic was unsubscribed, or the consumer stops."""
    RELEASE = "release"
    """The program has finished with the queue, and the queue's offset is committed if a commit is required."""
    LOSE = "lose"
    """Another member has the queue or may get it soon, or the queue is deleted: the consumer delivers and commits
    nothing more of the queue."""


ASSIGNMENT_TRANSITIONS: Final[Mapping[AssignmentState, Mapping[AssignmentEvent, AssignmentState]]] = {
    AssignmentState.STARTING: {
        AssignmentEvent.GRANT: AssignmentState.STARTING,
        AssignmentEvent.START: AssignmentState.STARTED,
        AssignmentEvent.REVOKE: AssignmentState.WITHDRAWN,
        AssignmentEvent.LOSE: AssignmentState.RELEASED,
    },
    AssignmentState.STARTED: {
        AssignmentEvent.GRANT: AssignmentState.STARTED,
        AssignmentEvent.REVOKE: AssignmentState.REVOKED,
        AssignmentEvent.LOSE: AssignmentState.RELEASED,
    },
    AssignmentState.WITHDRAWN: {
        AssignmentEvent.GRANT: AssignmentState.STARTING,
        AssignmentEvent.REVOKE: AssignmentState.WITHDRAWN,
        AssignmentEvent.RELEASE: AssignmentState.RELEASED,
        AssignmentEvent.LOSE: AssignmentState.RELEASED,
    },
    AssignmentState.REVOKED: {
        AssignmentEvent.GRANT: AssignmentState.STARTED,
        AssignmentEvent.REVOKE: AssignmentState.REVOKED,
        AssignmentEvent.RELEASE: AssignmentState.RELEASED,
        AssignmentEvent.LOSE: AssignmentState.RELEASED,
    },
    AssignmentState.RELEASED: {},
}
"""State of an assignment after each event. If a state has no entry for an event, that event is a broken
invariant."""


@dataclass(slots=True, eq=False)
class AssignedQueue(ABC):
    """One assignment of a queue to a consumer, from the queue's grant to its release."""

    queue: MessageQueue
    generation: int = 0
    """Generation of the group that granted the queue; each commit carries it. 0 without a group."""
    state: AssignmentState = AssignmentState.STARTING
    reset_version: int = 0
    """The number of the last known offset reset; each commit carries it."""
    fetch_offset: int = 0
    """Next offset to fetch; valid after the queue has started."""
    committed: int | None = None
    """The offset that the broker has stored for the group; None if unknown."""
    backwards: bool = False
    """True if the consumer moved to an offset before `committed`. The next commit then lowers the stored offset, and is
    marked as a backward commit."""
    asked: OffsetCommit | None = None
    """The last commit that `ask` made. None after a reset, so that an answer to an earlier commit is ignored."""
    forbidden: NoPermissionError | None = None
    """The reason why the group may not read the queue now; None if the group may. A forbidden queue stays assigned to
    this consumer."""
    revoked_at_s: float | None = None
    """The time of the revocation; None while the queue is granted."""

    def change(self, event: AssignmentEvent) -> None:
        """Change to the state that ASSIGNMENT_TRANSITIONS gives for the event. Raises AssertionError if the event
        cannot happen in the current state."""
        following = ASSIGNMENT_TRANSITIONS[self.state].get(event)
        assert following is not None, f"{self.queue}: {event} cannot happen while the queue is {self.state}"
        self.state = following

    def start(self, start: QueueOffset) -> None:
        """Start to fetch at the start offset, which the broker has stored as the group's committed offset."""
        self.change(AssignmentEvent.START)
        self.forbidden = None
        self.fetch_offset = self.committed = start.queue_offset
        self.reset_version = start.reset_version

    def grant(self, generation: int) -> None:
        """Keep the queue in this generation. A revoked queue is fetched from and delivered again."""
        self.change(AssignmentEvent.GRANT)
        self.generation = generation
        self.revoked_at_s = None

    def revoke(self, now_s: float) -> None:
        """Stop fetching and delivering messages of the queue."""
        self.change(AssignmentEvent.REVOKE)
        if self.revoked_at_s is None:
            self.revoked_at_s = now_s

    def forbid(self, error: NoPermissionError) -> bool:
        """Record why the group may not read the queue now, and hold the queue's messages back. Returns False if the
        queue was already forbidden."""
        is_new = self.forbidden is None
        self.forbidden = error
        if is_new:
            self.hold_back()
        return is_new

    def allow(self) -> None:
        """Record that the group may read the queue again."""
        self.forbidden = None

    def hold_back(self) -> None:  # noqa: B027  # most kinds keep it
        """Drop the fetched messages that are not delivered, because the group may not read the queue now. The messages
        can be fetched again later."""

    @property
    def started(self) -> bool:
        """True if the start offset is known, and the queue is not released."""
        return self.state is AssignmentState.STARTED or self.state is AssignmentState.REVOKED

    @property
    def revoked(self) -> bool:
        """True if the queue is revoked and only waits for its release."""
        return self.state is AssignmentState.REVOKED or self.state is AssignmentState.WITHDRAWN

    @property
    def dropped(self) -> bool:
        """True if the assignment is over: later answers about the queue are ignored."""
        return self.state is AssignmentState.RELEASED

    # Methods that commit the queue's offset

    @property
    @abstractmethod
    def commit_offset(self) -> int:
        """Offset to commit. The program has finished with every message before this offset."""

    @property
    def dirty(self) -> bool:
        """True if the queue has an offset to commit."""
        offset, committed = self.commit_offset, self.committed
        return self.started and (committed is None or offset > committed or (self.backwards and offset != committed))

    def ask(self, offset: int | None) -> OffsetCommit:
        """Create the commit of `offset` to send to the broker. If `offset` is None, the commit only asks the broker
        whether the group's offset was reset."""
        self.asked = OffsetCommit(offset, self.generation, self.reset_version, self.backwards)
        return self.asked

    def committed_to(self, commit: OffsetCommit) -> None:
        """Record that the broker has accepted `commit`."""
        offset = commit.queue_offset
        if offset is not None:
            self.committed = offset if commit.backwards else max(offset, self.committed or 0)
            self.backwards = self.backwards and self.commit_offset < self.committed
