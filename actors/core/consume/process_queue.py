"""The state of one queue of a push-consumer instance: its fetched, in-flight, finished and committed messages.

    fetch → [waiting records] → tasks in flight → finished
                                  ↑        ↓ failed, or the listener died
                                 [again]  ←┘

State is kept per message (spec/messaging.md §5.5). The offset to commit is the smallest unfinished offset, so one slow
message delays only the commit. This state does not survive the process; committed offsets survive at the broker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from actors.core.consume.records_in_place import TaskRecords, join_parts
from raymq.client.consumer.assignment.assigned_queue import AssignedQueue
from raymq.client.consumer.assignment.unfinished_offsets import UnfinishedOffsets
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import OffsetCommit


@dataclass(slots=True, eq=False)
class ConsumeTask:
    """Messages of one queue that are delivered to the listener together, under one task number."""

    process_queue: ProcessQueue
    messages: TaskRecords
    number: int = 0
    """The number of the task. Assigned in ascending order when the task is delivered."""
    deaths: int = 0
    """Number of times that the listener's process died while it was processing this task."""
    trials: int = 0
    """Number of crashes of the listener's process for which this task was the only suspect (see
    consume_concurrently)."""
    ready_at_s: float = 0.0
    """The earliest time, in seconds, at which the task may be delivered."""
    fetched_s: float | None = None
    """The time, in seconds, at which the first message of the task was fetched; None for a task that is delivered
    again."""
    unfinished: set[int] = field(default_factory=set)
    """The indices, within the task, of the unfinished messages."""
    sending: set[int] = field(default_factory=set)
    """The indices, within the task, of the messages that are being sent back to the broker."""

    def __post_init__(self) -> None:
        self.unfinished = set(range(len(self.messages)))

    @property
    def queue(self) -> MessageQueue:
        return self.process_queue.queue


@dataclass(slots=True, eq=False)
class ProcessQueue(AssignedQueue):
    """One assignment of a queue to a push-consumer instance, from the grant of the queue to its release."""

    fetch_at_s: float = 0.0
    """The earliest time, in seconds, at which the queue may be fetched again."""
    offsets: UnfinishedOffsets = field(default_factory=UnfinishedOffsets)
    waiting: deque[TaskRecords] = field(default_factory=deque)
    """The records of messages that were fetched but not delivered to the listener yet, in order."""
    waiting_since_s: deque[float] = field(default_factory=deque)
    """For each entry of `waiting`, the time at which it was fetched, in seconds."""
    waiting_count: int = 0
    """The number of messages in `waiting`."""
    visible_end: int = 0
    """The visible end offset of the queue, as of the last fetch."""
    again: list[ConsumeTask] = field(default_factory=list)
    """The tasks that wait for redelivery to the listener."""
    flying: set[ConsumeTask] = field(default_factory=set)
    """The tasks that the listener is processing."""
    sending: set[ConsumeTask] = field(default_factory=set)
    """The tasks with messages that are being sent back to the broker."""
    size_bytes: int = 0
    """The total size, in bytes, of the unfinished messages' records."""
    finished_count: int = 0
    """The number of messages finished since the last commit that the broker accepted."""
    asked_count: int = 0
    """The queue's number of finished messages (`finished_count`) at the time of its last commit request
    (`ask`)."""
    trouble: str = ""
    """The reason of the queue's last failure: a failed message, an unreadable message, or the death of the listener's
    process. Empty after a success."""
    skipped: int = 0
    """The number of messages that were skipped because their records are damaged."""
    last_skipped: str = ""
    """The error with which the last damaged message of this queue was skipped; empty if no message was skipped."""

    @property
    def idle(self) -> bool:
        """True if the queue has no message at the listener, and none that is being sent back to the broker."""
        return not self.flying and not self.sending

    @property
    def count(self) -> int:
        """The number of the queue's unfinished messages: not yet delivered, at the listener, or waiting for
        redelivery."""
        return len(self.offsets)

    @property
    def in_flight_count(self) -> int:
        """The number of messages that the listener has received but not finished."""
        return sum(len(task.unfinished) for task in self.flying)

    @property
    def commit_offset(self) -> int:
        """The offset to commit for this queue. Every message before this offset is finished."""
        return self.offsets.first if len(self.offsets) else self.fetch_offset

    def grant(self, generation: int) -> None:
        """Record the new generation of the assignment, and keep the queue.

        Does nothing for a revoked queue: the listener may still have messages of this queue, and all other messages of
        the queue were dropped. A revoked queue can be granted again only after its release.
        """
        if not self.revoked:
            AssignedQueue.grant(self, generation)

    def revoke(self, now_s: float) -> None:
        """Stop fetching and delivering messages of the queue. Undelivered messages stay unfinished, so the commit
        offset stays before them."""
        AssignedQueue.revoke(self, now_s)
        self.waiting.clear()
        self.waiting_since_s.clear()
        self.waiting_count = 0
        self.again.clear()

    def ask(self, offset: int | None) -> OffsetCommit:
        """Return the request to commit `offset` at the broker. If `offset` is None, the request only asks whether the
        group's offset was reset."""
        self.asked_count = self.finished_count
        return AssignedQueue.ask(self, offset)

    def committed_to(self, commit: OffsetCommit) -> None:
        """Record that the broker has accepted a commit of this queue's offset."""
        AssignedQueue.committed_to(self, commit)
        if commit.queue_offset is not None:
            self.finished_count -= self.asked_count
            self.asked_count = 0

    def fetched(self, records: TaskRecords, next_offset: int, now_s: float) -> None:
        """Add fetched messages to the queue. The next fetch starts at `next_offset`, which may be greater than the
        offset after the last of these messages."""
        self.fetch_offset = next_offset
        if len(records):
            self.offsets.add(records.offsets)
            self.waiting.append(records)
            self.waiting_since_s.append(now_s)
            self.waiting_count += len(records)
            self.size_bytes += records.size_bytes

    def take_waiting(self, count: int) -> ConsumeTask:
        """Make a task of the next `count` undelivered messages, or of all if there are fewer. At least one message must
        wait for delivery."""
        parts, fetched_s = [], self.waiting_since_s[0]
        while count and self.waiting:
            records = self.waiting.popleft()
            if len(records) > count:
                self.waiting.appendleft(records.part(count, len(records)))
                records = records.part(0, count)
            else:
                self.waiting_since_s.popleft()
            parts.append(records)
            count -= len(records)
        taken = join_parts(parts)
        self.waiting_count -= len(taken)
        return ConsumeTask(self, taken, fetched_s=fetched_s)

    def finish(self, task: ConsumeTask, indices: Collection[int]) -> None:
        """Mark the messages of a task at `indices` as finished. The other messages of the task stay unfinished."""
        if not indices:
            return
        messages = task.messages
        if len(indices) == len(messages):
            task.unfinished.clear()
            self.offsets.remove(messages.offsets)
            self.size_bytes -= messages.size_bytes
        else:
            task.unfinished.difference_update(indices)
            self.offsets.remove([messages.offsets[index] for index in indices])
            self.size_bytes -= messages.size_of(indices)
        self.finished_count += len(indices)
