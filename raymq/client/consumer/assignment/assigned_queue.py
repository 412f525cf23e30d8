"""AssignedQueue is one assignment of a queue to a consumer: its state, the offset to fetch, and the state of commits.

    granted → STARTING → STARTED → REVOKED → RELEASED        ASSIGNMENT_TRANSITIONS has every step

The pull consumer's AssignedMessageQueue adds the records that wait for a poll, the push consumer's ProcessQueue the
messages at the listener. No threads, no clock, no calls: raymq.client.consumer.assignment.assigned_queues has all
queues of a consumer, and applies the answers of the group and of the brokers to them.
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
    """How far the assignment of a queue to this consumer is."""

    STARTING = "starting"
    """Granted by the group; its start offset is not known yet. No other member may get it."""
    STARTED = "started"
    """Fetched from and delivered."""
    WITHDRAWN = "withdrawn"
    """Revoked while its start offset was not known: nothing was read of it."""
    REVOKED = "revoked"
    """Neither fetched from nor delivered; kept until the program has finished with what it was given."""
    RELEASED = "released"
    """No longer held by this consumer; a new grant makes a new assignment."""


class AssignmentEvent(Enum):
    """The events that change an assignment."""

    GRANT = "grant"
    """The group's answer to a heartbeat names the queue."""
    START = "start"
    """The broker has returned the start offset."""
    REVOKE = "revoke"
    """The group's answer does not name the queue, its topic was unsubscribed, or the consumer stops."""
    RELEASE = "release"
    """The program has finished with the queue, and its offset is committed if it must be."""
    LOSE = "lose"
    """Another member has the queue or may get it soon, or the queue is deleted: deliver and commit nothing more
    of it."""


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
"""The state after each event. An event that a state has no entry for is a broken invariant."""


@dataclass(slots=True, eq=False)
class AssignedQueue(ABC):
    """One assignment of a queue, from its grant to its release."""

    queue: MessageQueue
    generation: int = 0
    """The group's generation that granted the queue; it goes with each commit. 0 without a group."""
    state: AssignmentState = AssignmentState.STARTING
    reset_version: int = 0
    """The number of the last known offset reset; each commit carries it."""
    fetch_offset: int = 0
    """The next offset to fetch, once the queue has started."""
    committed: int | None = None
    """The offset the broker has; None while that is not known."""
    backwards: bool = False
    """True if the consumer goes back before `committed`: the next commit then goes back, too, and says so."""
    asked: OffsetCommit | None = None
    """The last commit that was handed out; None after a reset, so that an answer from before it changes nothing."""
    forbidden: NoPermissionError | None = None
    """The reason why the group may not read the queue now; None if it may. The queue stays this consumer's."""
    revoked_at_s: float | None = None
    """The time of the revocation; None while the queue is granted."""

    def change(self, event: AssignmentEvent) -> None:
        """Go to the state that ASSIGNMENT_TRANSITIONS says; AssertionError for an event that cannot happen now."""
        following = ASSIGNMENT_TRANSITIONS[self.state].get(event)
        assert following is not None, f"{self.queue}: {event} cannot happen while the queue is {self.state}"
        self.state = following

    def start(self, start: QueueOffset) -> None:
        """Fetch from the start offset, which the broker has noted as the group's."""
        self.change(AssignmentEvent.START)
        self.forbidden = None
        self.fetch_offset = self.committed = start.queue_offset
        self.reset_version = start.reset_version

    def grant(self, generation: int) -> None:
        """Keep the queue in this generation; a revoked one is fetched from and delivered again."""
        self.change(AssignmentEvent.GRANT)
        self.generation = generation
        self.revoked_at_s = None

    def revoke(self, now_s: float) -> None:
        """Neither fetch nor deliver messages of the queue."""
        self.change(AssignmentEvent.REVOKE)
        if self.revoked_at_s is None:
            self.revoked_at_s = now_s

    def forbid(self, error: NoPermissionError) -> bool:
        """Note why the group may not read the queue now, and hold its messages back. False if it was forbidden."""
        is_new = self.forbidden is None
        self.forbidden = error
        if is_new:
            self.hold_back()
        return is_new

    def allow(self) -> None:
        """Note that the group may read the queue."""
        self.forbidden = None

    def hold_back(self) -> None:  # noqa: B027  # most kinds keep it
        """Drop what is held and not delivered: the group may not read the queue now. It can be read again later."""

    @property
    def started(self) -> bool:
        """True if the start offset is known, and the queue is not released."""
        return self.state is AssignmentState.STARTED or self.state is AssignmentState.REVOKED

    @property
    def revoked(self) -> bool:
        """True if the queue is kept only until it may be released."""
        return self.state is AssignmentState.REVOKED or self.state is AssignmentState.WITHDRAWN

    @property
    def dropped(self) -> bool:
        """True if the assignment is over: whatever is still heard of it changes nothing."""
        return self.state is AssignmentState.RELEASED

    # Committing

    @property
    @abstractmethod
    def commit_offset(self) -> int:
        """The offset to commit: the program has finished with every message before it."""

    @property
    def dirty(self) -> bool:
        """True if there is something to commit."""
        offset, committed = self.commit_offset, self.committed
        return self.started and (committed is None or offset > committed or (self.backwards and offset != committed))

    def ask(self, offset: int | None) -> OffsetCommit:
        """Make the commit of `offset` for the broker. With None, the commit only asks if the group's offset was
        reset."""
        self.asked = OffsetCommit(offset, self.generation, self.reset_version, self.backwards)
        return self.asked

    def committed_to(self, commit: OffsetCommit) -> None:
        """Note that the broker has taken the last commit handed out."""
        offset = commit.queue_offset
        if offset is not None:
            self.committed = offset if commit.backwards else max(offset, self.committed or 0)
            self.backwards = self.backwards and self.commit_offset < self.committed
