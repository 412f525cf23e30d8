"""AssignedMessageQueue is a queue that a pull consumer holds: its offsets, and the records that wait for a poll.

This module uses no threads, no clock and no remote calls. raymq.client.consumer.pull.subscription_state holds all
queues of a consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from raymq.client.consumer.assignment.assigned_queue import AssignedQueue, AssignmentState
from raymq.client.consumer.assignment.unfinished_offsets import UnfinishedOffsets
from raymq.client.consumer.pull.fetched_records import FetchedRecords, PolledRecords
from raymq.common.protocol.group import QueueOffset


@dataclass(slots=True)
class QueueFlags:
    """Facts about one queue's state that SubscriptionState counts in its tables and totals. The values are from the
    last time that the queue's state was counted."""

    tables: tuple[bool, ...] = ()
    """For each table in `SubscriptionState._tables`: True if the table contains the queue."""
    hungry_at: int = -1
    """The queue's next offset to fetch; -1 if the queue must not be fetched."""
    news_at: int = -1
    """Offset from which the consumer waits for new records, if it reads the queue in place (from mapped files). -1 if
    it does not read the queue in place."""
    count: int = 0
    """The number and the bytes of this queue's buffered messages, as far as they are already counted in the consumer's
    totals."""
    size_bytes: int = 0


@dataclass(slots=True, eq=False)
class AssignedMessageQueue(AssignedQueue):
    """One assignment of a queue to a pull consumer, from its grant to its release. Its offsets satisfy done ≤ position
    ≤ fetch_offset."""

    position: int = 0
    """Offset of the queue's next message that a poll returns."""
    done: int = 0
    """A queue offset: the program has finished with all messages of the queue before this offset."""
    buffered: deque[FetchedRecords] = field(default_factory=deque)
    """Fetched records of the queue that wait for a poll; empty while the queue is paused or revoked."""
    buffered_count: int = 0
    buffered_bytes: int = 0
    noted: QueueFlags = field(default_factory=QueueFlags)
    """A copy of this queue's flags. The consumer's tables and totals contained the queue with these flags after their
    last update."""
    mapped: bool = False
    """True if the queue is read in place, from mapped files of a storage actor on this node; False if it is read by
    fetches."""
    known_end: int = 0
    """Visible end offset of the queue, from the storage actor's last answer. Used if the queue is read in place (from
    mapped files)."""
    fetching: bool = False
    """True if a fetch of the queue from `fetch_offset` is in flight, and its result is still wanted."""
    settled: bool = True
    """True if the program has finished with all messages of the queue that polls returned."""
    paused: bool = False
    mending: bool = False
    """True while the consumer waits for the repair of the record at `position`, which is damaged."""
    unfinished: UnfinishedOffsets | None = None
    """Messages that polls returned and the program has not acknowledged yet. None if the program does not acknowledge
    each message."""

    def start(self, start: QueueOffset) -> None:
        """Begin to fetch the queue at its start offset. A queue that is assigned without a group has the generation 0.
        No broker has stored the start offset of such a queue, so the consumer must still commit this offset."""
        AssignedQueue.start(self, start)
        self.position = self.done = start.queue_offset
        if not self.generation:
            self.committed = None

    def revoke(self, now_s: float) -> None:
        """Stop fetching and returning messages of the queue."""
        AssignedQueue.revoke(self, now_s)
        self.refetch_from(self.position)

    def hold_back(self) -> None:
        """Drop the queue's buffered records, so that polls return no message of the queue for now."""
        self.refetch_from(self.position)

    @property
    def commit_offset(self) -> int:
        """The queue's offset to commit. The program has finished with every message before this offset."""
        return self.done

    @property
    def silent(self) -> bool:
        """True if the queue is paused or forbidden, waits for a repair, or its assignment is not in the state STARTED.
        The consumer then neither fetches the queue's messages nor returns them to the program."""
        return self.paused or self.mending or self.forbidden is not None or self.state is not AssignmentState.STARTED

    @property
    def unread(self) -> bool:
        """True if the mapped files hold messages of the queue that were not read yet."""
        return self.mapped and not self.silent and self.fetch_offset < self.known_end

    def refetch_from(self, offset: int) -> None:
        """Drop the queue's buffered records, and ignore the fetch in flight. The next fetch and the next poll start at
        `offset`."""
        self.fetch_offset = self.position = offset
        self.fetching = False
        self.buffered.clear()
        self.buffered_count = self.buffered_bytes = 0

    def seek(self, offset: int) -> None:
        """Move the queue's position to `offset`. Messages before `offset` count as finished, later messages do
        not."""
        self.refetch_from(offset)
        self.mending = False
        self.done = offset
        self.forget_returned()

    def forget_returned(self) -> None:
        """Forget the messages that polls have returned so far, so that acknowledgements of them are no longer
        expected."""
        if self.unfinished is not None:
            self.unfinished = UnfinishedOffsets()

    def reset(self, start: QueueOffset) -> None:
        """Continue reading this queue at `start`, because an administrator reset the group's offset in the queue to
        `start`."""
        self.seek(start.queue_offset)
        self.committed, self.reset_version = start.queue_offset, start.reset_version
        self.backwards, self.asked = False, None

    def expect(self, offsets: Sequence[int]) -> None:
        """Note that a poll is about to return the messages at `offsets`, which the program must acknowledge. Does
        nothing if the program does not acknowledge each message."""
        if self.unfinished is not None and offsets:
            self.unfinished.add(offsets)

    def acknowledge(self, offsets: Collection[int]) -> None:
        """Mark messages as finished. Ignores messages for which no acknowledgement is expected."""
        if self.unfinished is not None:
            self.unfinished.remove(offsets)

    def follow_acknowledgements(self) -> None:
        """Mark every message before the queue's first unacknowledged message as finished."""
        if self.unfinished is not None:
            self.settled = not len(self.unfinished)
            self.done = self.position if self.settled else self.unfinished.first

    def finish(self) -> None:
        """Mark all messages that polls returned as finished."""
        self.done = self.position
        self.settled = True

    def fetched(self, fetched: FetchedRecords) -> None:
        """Buffer the records of a completed fetch. The fetch may have found no records, and may have skipped
        messages."""
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
        """Remove from the front of the buffer the records that a poll returns."""
        fetched = self.buffered[0]
        self.position = part.next_offset
        self.buffered_count -= part.count
        self.buffered_bytes -= part.size_bytes
        self.settled = False
        fetched.first += part.count
        if not fetched.count:
            self.buffered.popleft()
