"""One queue that a pull consumer holds: where it stands, and what waits of it for the next poll.

No threads, no clock, no calls; raymq.consumer.pull.subscription_state has all of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from raymq.consumer.pull.fetched_records import FetchedRecords, PolledRecords
from raymq.message import MessageQueue
from raymq.protocol.group import OffsetCommit, QueueOffset


@dataclass(slots=True)
class AssignedMessageQueue:
    """Offsets first: `fetch_offset` is read next; `position` is what the next poll returns; `done`, never beyond it, is
    what the program has finished with; `committed` is what of that the brokers have, None while that is not known.

    `runs` wait for the next poll. `asked`: a read from `fetch_offset` is under way, and its answer is wanted.
    `settled`: the program has finished with all that polls returned. `backwards`: it has sought back behind what it had
    finished with, and the brokers are to be told so. Nothing waits of a queue that is `paused` or `revoked`.
    """

    queue: MessageQueue
    generation: int
    reset_version: int
    position: int
    committed: int | None
    fetch_offset: int
    done: int
    runs: deque[FetchedRecords] = field(default_factory=deque)
    buffered_count: int = 0
    buffered_bytes: int = 0
    asked: bool = False
    settled: bool = True
    backwards: bool = False
    paused: bool = False
    revoked: bool = False

    @classmethod
    def at(cls, queue: MessageQueue, start: QueueOffset, generation: int) -> AssignedMessageQueue:
        """A queue to begin with. A member's start is committed already; generation 0 has only asked."""
        offset = start.queue_offset
        return cls(queue, generation, start.reset_version, offset, offset if generation else None, offset, offset)

    def empty(self, offset: int) -> None:
        """Drop what waits here and what is being read, and read from `offset`."""
        self.fetch_offset = self.position = offset
        self.asked = False
        self.runs.clear()
        self.buffered_count = self.buffered_bytes = 0

    def go_to(self, offset: int) -> None:
        """Go on at `offset`, and count what was before as finished, or as not done yet."""
        self.empty(offset)
        self.done = offset

    def finish(self) -> None:
        """The program has finished with what polls returned."""
        self.done = self.position
        self.settled = True

    @property
    def dirty(self) -> bool:
        """Whether there is something to commit."""
        return self.committed is None or self.done > self.committed or (self.backwards and self.done != self.committed)

    @property
    def silent(self) -> bool:
        """Whether it is neither read nor returned."""
        return self.paused or self.revoked

    def take(self, part: PolledRecords) -> None:
        """The records of a slice were returned. They are the first that wait."""
        fetched = self.runs[0]
        self.position = part.next_offset
        self.buffered_count -= part.count
        self.buffered_bytes -= len(part.records)
        self.settled = False
        fetched.first += part.count
        if not fetched.count:
            self.runs.popleft()

    def commit(self, offset: int | None) -> OffsetCommit:
        """A commit of `offset` as the broker is to be told it; None only asks."""
        return OffsetCommit(offset, self.generation, self.reset_version, self.backwards)
