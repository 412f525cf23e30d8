"""AssignedQueue is one assignment of a queue to a consumer: its state, the offset to fetch next, and its commits.

    granted → STARTING → STARTED → REVOKED → RELEASED        ASSIGNMENT_TRANSITIONS has every step

For the pull consumer, the subclass AssignedMessageQueue adds the records that wait for a poll. For the push consumer,
the subclass ProcessQueue adds the messages that its listener is processing. This module uses no threads, no clock and
no remote calls. raymq.client.consumer.assignment.assigned_queues holds all queues of a consumer, and applies the
answers of the group and of the brokers to them.
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
    """State of a queue that the group has granted to this consumer, but whose start offset is not known yet. No other
    member may get the queue."""
    STARTED = "started"
    """State of a queue whose messages the consumer fetches and delivers."""
    WITHDRAWN = "withdrawn"
    """State of a queue that was revoked before its start offset was known. The consumer has read nothing from the
    queue."""
    REVOKED = "revoked"
    """State of a revoked queue. The consumer neither fetches nor delivers its messages. The consumer keeps the queue
    until the program has finished with the delivered messages."""
    RELEASED = "released"
    """State of a queue that this consumer no longer holds. A new grant of the queue creates a new assignment."""


class AssignmentEvent(Enum):
    """The events that change a queue's assignment to a consumer."""

    GRANT = "grant"
    """Event: the group's answer to a heartbeat includes the queue in the member's assignment."""
    START = "start"
    """Event: the broker has returned the queue's start offset."""
    REVOKE = "revoke"
    """Event: the group's answer no longer names the queue, the queue's topic was unsubscribed, or the consumer
    stops."""
    RELEASE = "release"
    """Event: the consumer can release the queue. The program has finished with the queue's messages, and their offset
    is committed if a commit is required."""
    LOSE = "lose"
    """Event: another member has the queue or may get it soon, or the queue is deleted. The consumer delivers and
    commits nothing more of the queue."""


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
"""For each state of an assignment, the next state after each event. An event that has no entry in a state must not
happen in that state."""


@dataclass(slots=True, eq=False)
class AssignedQueue(ABC):
    """One assignment of a queue to a consumer, from the queue's grant to its release."""

    queue: MessageQueue
    generation: int = 0
    """Number of the group's generation that granted the queue; each commit carries this number. 0 without a
    group."""
    state: AssignmentState = AssignmentState.STARTING
    reset_version: int = 0
    """Number of the queue's last known offset reset. Each commit carries this number."""
    fetch_offset: int = 0
    """Offset in the queue to fetch next; valid after the queue has started."""
    committed: int | None = None
    """The group's committed offset in the queue, as stored by the broker; None if unknown."""
    backwards: bool = False
    """True if the consumer moved to an offset before the committed offset. The next commit then lowers the committed
    offset and is marked as a backward commit."""
    asked: OffsetCommit | None = None
    """The latest commit that was created for this queue. None after an offset reset, so that the answer to an earlier
    commit is ignored."""
    forbidden: NoPermissionError | None = None
    """The reason why the group may not read the queue now; None if the group may read it. A forbidden queue stays
    assigned to this consumer."""
    revoked_at_s: float | None = None
    """Time in s at which the queue was revoked; None while the queue is granted."""

    def change(self, event: AssignmentEvent) -> None:
        """Change the state of this queue's assignment, as ASSIGNMENT_TRANSITIONS defines for `event`. Raises
        AssertionError if the event cannot happen in the current state."""
        following = ASSIGNMENT_TRANSITIONS[self.state].get(event)
        assert following is not None, f"{self.queue}: {event} cannot happen while the queue is {self.state}"
        self.state = following

    def start(self, start: QueueOffset) -> None:
        """Change the assignment to STARTED: fetch the queue from offset `start` on. The broker has stored this offset
        as the group's committed offset."""
        self.change(AssignmentEvent.START)
        self.forbidden = None
        self.fetch_offset = self.committed = start.queue_offset
        self.reset_version = start.reset_version

    def grant(self, generation: int) -> None:
        """Keep the queue for the group's new generation. If the queue was revoked, its messages are fetched and
        delivered again from now on."""
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
        """Drop the messages that were fetched but not yet delivered, because the group may not read the queue now. The
        messages can be fetched again later."""

    @property
    def started(self) -> bool:
        """True if the start offset is known, and the queue is not released."""
        return self.state is AssignmentState.STARTED or self.state is AssignmentState.REVOKED

    @property
    def revoked(self) -> bool:
        """True if the queue is revoked but not released yet."""
        return self.state is AssignmentState.REVOKED or self.state is AssignmentState.WITHDRAWN

    @property
    def dropped(self) -> bool:
        """True if this consumer's assignment of the queue has ended. Later answers about the queue are ignored."""
        return self.state is AssignmentState.RELEASED

    # Methods that commit the queue's offset

    @property
    @abstractmethod
    def commit_offset(self) -> int:
        """The queue's offset to commit. The program has finished with every message before this offset."""

    @property
    def dirty(self) -> bool:
        """True if the queue has an offset that is not committed yet."""
        offset, committed = self.commit_offset, self.committed
        return self.started and (committed is None or offset > committed or (self.backwards and offset != committed))

    def ask(self, offset: int | None) -> OffsetCommit:
        """Create the commit of `offset` to send to the broker. If `offset` is None, the commit only asks the broker
        whether the group's offset was reset."""
        self.asked = OffsetCommit(offset, self.generation, self.reset_version, self.backwards)
        return self.asked

    def committed_to(self, commit: OffsetCommit) -> None:
        """Record that the broker has accepted a commit of the queue's offset."""
        offset = commit.queue_offset
        if offset is not None:
            self.committed = offset if commit.backwards else max(offset, self.committed or 0)
            self.backwards = self.backwards and self.commit_offset < self.committed
