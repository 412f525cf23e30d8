"""ProcessQueue keeps the account of one queue of a push-consumer instance: fetched, in flight, finished, committed.

    fetch → [waiting records] → tasks in flight → finished
                                  ↑        ↓ failed, or the listener died
                                 [again]  ←┘

The account is kept per message (spec/messaging.md §5.5): the offset to commit is the smallest that is not finished, so
one slow message holds the commit point and nothing else. Nothing here survives the process; committed offsets do, at
the broker.
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
class Task:
    """Messages of one queue that are delivered to the listener together, under one number."""

    process_queue: ProcessQueue
    messages: TaskRecords
    number: int = 0
    """Given when the task is delivered; ascending."""
    deaths: int = 0
    """How often the listener's process died while it had these messages."""
    trials: int = 0
    """How often it died while this task was the only suspect (see consume_concurrently)."""
    ready_at_s: float = 0.0
    """The task is not delivered before this time."""
    fetched_s: float | None = None
    """When the first of the messages was fetched; None for messages that are delivered again."""
    unfinished: set[int] = field(default_factory=set)
    """Indices of the messages that are not finished."""
    sending: set[int] = field(default_factory=set)
    """Indices of the messages that are being sent back to the broker."""

    def __post_init__(self) -> None:
        self.unfinished = set(range(len(self.messages)))

    @property
    def queue(self) -> MessageQueue:
        return self.process_queue.queue


@dataclass(slots=True, eq=False)
class ProcessQueue(AssignedQueue):
    """One assignment of a queue to an instance, from its grant to its release."""

    fetch_at_s: float = 0.0
    """The queue is not fetched from before this time."""
    offsets: UnfinishedOffsets = field(default_factory=UnfinishedOffsets)
    waiting: deque[TaskRecords] = field(default_factory=deque)
    """Records that were fetched and not delivered yet, in order."""
    waiting_since_s: deque[float] = field(default_factory=deque)
    """When each of them was fetched."""
    waiting_count: int = 0
    """Messages in `waiting`."""
    visible_end: int = 0
    """The visible end of the queue, by the last fetch."""
    again: list[Task] = field(default_factory=list)
    """Tasks to be delivered once more."""
    flying: set[Task] = field(default_factory=set)
    """Tasks at the listener."""
    sending: set[Task] = field(default_factory=set)
    """Tasks with messages that are being sent back."""
    size_bytes: int = 0
    """Record bytes of the unfinished messages."""
    finished_count: int = 0
    """Messages finished since the last commit that the broker has answered."""
    asked_count: int = 0
    """The `finished_count` at the time of `asked`."""
    trouble: str = ""
    """The reason why the last message that failed did; empty after a success."""
    skipped: int = 0
    """Messages that were left out because their records are damaged."""
    last_skipped: str = ""
    """The error of the last of those."""

    @property
    def idle(self) -> bool:
        """True if no message is at the listener or on its way back to the broker."""
        return not self.flying and not self.sending

    @property
    def count(self) -> int:
        """The number of unfinished messages: waiting, at the listener, or to be delivered again."""
        return len(self.offsets)

    @property
    def in_flight_count(self) -> int:
        """The number of unfinished messages at the listener."""
        return sum(len(task.unfinished) for task in self.flying)

    @property
    def commit_offset(self) -> int:
        """The offset to commit: every message before it is finished."""
        return self.offsets.first if len(self.offsets) else self.fetch_offset

    def grant(self, generation: int) -> None:
        """Keep the queue in this generation. A revoked one is granted anew once it is released: the listener may still
        have messages of it, and the others are given up."""
        if not self.revoked:
            AssignedQueue.grant(self, generation)

    def revoke(self, now_s: float) -> None:
        """Fetch and deliver nothing more. The messages not delivered stay unfinished, and hold the commit offset
        back."""
        AssignedQueue.revoke(self, now_s)
        self.waiting.clear()
        self.waiting_since_s.clear()
        self.waiting_count = 0
        self.again.clear()

    def ask(self, offset: int | None) -> OffsetCommit:
        """The commit of `offset` for the broker; None only asks whether the group's offset was reset."""
        self.asked_count = self.finished_count
        return AssignedQueue.ask(self, offset)

    def committed_to(self, commit: OffsetCommit) -> None:
        """Note that the broker has taken the last commit handed out."""
        AssignedQueue.committed_to(self, commit)
        if commit.queue_offset is not None:
            self.finished_count -= self.asked_count
            self.asked_count = 0

    def fetched(self, records: TaskRecords, next_offset: int, now_s: float) -> None:
        """Add fetched messages. The next fetch is at `next_offset`, which may lie behind the end of these messages."""
        self.fetch_offset = next_offset
        if len(records):
            self.offsets.add(records.offsets)
            self.waiting.append(records)
            self.waiting_since_s.append(now_s)
            self.waiting_count += len(records)
            self.size_bytes += records.size_bytes

    def take_waiting(self, count: int) -> Task:
        """A task of the next `count` waiting messages, or of all of them if there are fewer. At least one must wait."""
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
        return Task(self, taken, fetched_s=fetched_s)

    def finish(self, task: Task, indices: Collection[int]) -> None:
        """Finish the messages at `indices` of a task; its other messages stay unfinished."""
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
