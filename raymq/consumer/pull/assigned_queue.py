"""AssignedMessageQueue is one queue of a pull consumer: its state, its offsets, and the records that wait for a poll.

    granted → STARTING → STARTED ⇄ REVOKED → RELEASED        ASSIGNMENT_TRANSITIONS has every step

No threads, no clock, no calls: raymq.consumer.pull.subscription_state has all queues of a consumer, and applies what
the group, the brokers, the stores and the program do to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from raymq.consumer.pull.fetched_records import FetchedRecords, PolledRecords
from raymq.message import MessageQueue
from raymq.protocol.group import OffsetCommit, QueueOffset


class AssignmentState(Enum):
    """How far the assignment of a queue to this consumer is."""

    STARTING = "starting"
    """Granted by the group; its start offset is not known yet. Others must not get it meanwhile."""
    STARTED = "started"
    """Fetched from, and returned by polls."""
    REVOKED = "revoked"
    """Neither fetched from nor returned; kept until the program has finished with what polls returned of it."""
    RELEASED = "released"
    """Not this consumer's any more; a new grant makes a new assignment."""


class AssignmentEvent(Enum):
    """The events that change an assignment."""

    GRANT = "grant"
    """The group's answer to a heartbeat names the queue."""
    START = "start"
    """The broker has told the start offset."""
    REVOKE = "revoke"
    """The group's answer does not name the queue, or its topic was unsubscribed."""
    RELEASE = "release"
    """The program has finished with the queue, and its offset is committed where it is to be."""
    LOSE = "lose"
    """The queue is another's, may be soon, or is deleted: nothing of it may be returned or committed any more."""


ASSIGNMENT_TRANSITIONS: Final[Mapping[AssignmentState, Mapping[AssignmentEvent, AssignmentState]]] = {
    AssignmentState.STARTING: {
        AssignmentEvent.GRANT: AssignmentState.STARTING,
        AssignmentEvent.START: AssignmentState.STARTED,
        AssignmentEvent.REVOKE: AssignmentState.RELEASED,  # nothing was read of it: nobody has to finish anything
        AssignmentEvent.LOSE: AssignmentState.RELEASED,
    },
    AssignmentState.STARTED: {
        AssignmentEvent.GRANT: AssignmentState.STARTED,
        AssignmentEvent.REVOKE: AssignmentState.REVOKED,
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


@dataclass(slots=True)
class Noted:
    """The state of one queue as SubscriptionState's tables have it."""

    tables: tuple[bool, ...] = ()
    """The tables that have the queue."""
    hungry_at: int = -1
    """The offset to fetch; -1 if it is not to be fetched."""
    news_at: int = -1
    """The offset to wait behind; -1 if it is not read in place."""
    count: int = 0
    """The `buffered_count` and `buffered_bytes` that the totals have."""
    size_bytes: int = 0


@dataclass(slots=True)
class AssignedMessageQueue:
    """One assignment of a queue, from its grant to its release. Its offsets: done ≤ position ≤ fetch_offset."""

    queue: MessageQueue
    generation: int
    """The group's generation that granted the queue, which goes with each commit; 0 without a group."""
    state: AssignmentState = AssignmentState.STARTING
    reset_version: int = 0
    """The number of the last offset reset that is known; it goes with each commit, too."""
    fetch_offset: int = 0
    """The next offset to fetch."""
    position: int = 0
    """The next offset that a poll returns."""
    done: int = 0
    """The program has finished with every message before it."""
    committed: int | None = None
    """The offset the brokers have; None while that is not known."""
    buffered: deque[FetchedRecords] = field(default_factory=deque)
    """The records that wait for a poll; none while the queue is paused or revoked."""
    buffered_count: int = 0
    buffered_bytes: int = 0
    noted: Noted = field(default_factory=Noted)
    """The state of this queue that the consumer's tables show."""
    mapped: bool = False
    """The queue is read in place, from mapped files of a storage actor on this node; else by fetches."""
    known_end: int = 0
    """The visible end of the queue, as last heard; for a queue that is read in place."""
    fetching: bool = False
    """A fetch from `fetch_offset` is under way, and its result is wanted."""
    settled: bool = True
    """The program has finished with everything that polls returned."""
    backwards: bool = False
    """The program has sought back behind `done` or `committed`: the next commit goes back, and says so."""
    paused: bool = False

    def change(self, event: AssignmentEvent) -> None:
        """Go to the state that ASSIGNMENT_TRANSITIONS says; AssertionError for an event that cannot happen now."""
        following = ASSIGNMENT_TRANSITIONS[self.state].get(event)
        assert following is not None, f"{self.queue}: {event} cannot happen while the queue is {self.state}"
        self.state = following

    def start(self, start: QueueOffset) -> None:
        """Fetch from the start offset. It counts as committed for a member of a group, whose broker has noted it."""
        self.change(AssignmentEvent.START)
        self.reset_version = start.reset_version
        self.fetch_offset = self.position = self.done = start.queue_offset
        self.committed = start.queue_offset if self.generation else None

    def grant(self, generation: int) -> None:
        """Keep the queue in this generation; a revoked one is fetched from and returned again."""
        self.change(AssignmentEvent.GRANT)
        self.generation = generation

    def revoke(self) -> None:
        """Neither fetch nor return anything of the queue any more."""
        self.change(AssignmentEvent.REVOKE)
        self.refetch_from(self.position)

    @property
    def revoked(self) -> bool:
        """True if the queue is kept only until the program has finished with it."""
        return self.state is AssignmentState.REVOKED

    @property
    def silent(self) -> bool:
        """True if the queue is neither fetched from nor returned."""
        return self.paused or self.revoked

    @property
    def dirty(self) -> bool:
        """True if there is something to commit."""
        return self.committed is None or self.done > self.committed or (self.backwards and self.done != self.committed)

    @property
    def unread(self) -> bool:
        """True if the mapped files have more of the queue than was found."""
        return self.mapped and not self.silent and self.fetch_offset < self.known_end

    @property
    def releasable(self) -> bool:
        """True if the queue is revoked and the program has finished with everything that polls returned of it."""
        return self.revoked and self.settled

    def refetch_from(self, offset: int) -> None:
        """Drop the buffered records and the fetch under way, and fetch from `offset`, which polls return next."""
        self.fetch_offset = self.position = offset
        self.fetching = False
        self.buffered.clear()
        self.buffered_count = self.buffered_bytes = 0

    def seek(self, offset: int) -> None:
        """Go on at `offset`: messages before it count as finished, those behind it as not finished."""
        self.refetch_from(offset)
        self.done = offset

    def finish(self) -> None:
        """Count everything that polls returned as finished."""
        self.done = self.position
        self.settled = True

    def fetched(self, fetched: FetchedRecords) -> None:
        """Buffer the records that the fetch under way found; it may have found none, and skipped some."""
        self.fetching = False
        self.fetch_offset = fetched.next_offset
        if fetched.count:
            self.buffered.append(fetched)
            self.buffered_count += fetched.count
            self.buffered_bytes += fetched.size_bytes
        elif self.buffered:
            self.buffered[-1].next_offset = fetched.next_offset
        else:
            self.position = fetched.next_offset

    def returned(self, part: PolledRecords) -> None:
        """Take the records that a poll returns from the buffer, where they are the first."""
        fetched = self.buffered[0]
        self.position = part.next_offset
        self.buffered_count -= part.count
        self.buffered_bytes -= part.size_bytes
        self.settled = False
        fetched.first += part.count
        if not fetched.count:
            self.buffered.popleft()

    def offset_commit(self, offset: int | None) -> OffsetCommit:
        """A commit of `offset` as the broker wants it; None only asks whether the group's offset was reset."""
        return OffsetCommit(offset, self.generation, self.reset_version, self.backwards)
