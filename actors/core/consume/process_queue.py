"""The state of one queue of a push-consumer instance: fetched, in flight, finished and committed messages.

    fetch → [waiting records] → tasks in flight → finished
                                  ↑        ↓ failed, or the listener died
                                 [again]  ←┘

State is kept per message (spec/messaging.md §5.5). The offset to commit is the smallest unfinished one, so one slow
message holds back only the commit. Nothing here survives the process; committed offsets survive at the broker.
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
    """Messages of one queue that are delivered to the listener together, under one number."""

    process_queue: ProcessQueue
    messages: TaskRecords
    number: int = 0
    """The number of the task, set at its delivery; ascending."""
    deaths: int = 0
    """How often the listener's process died while it had these messages."""
    trials: int = 0
    """How often the process died while this task was the only suspect (see consume_concurrently)."""
    ready_at_s: float = 0.0
    """The task is not delivered before this time."""
    fetched_s: float | None = None
    """The indices of the unfinished messages."""
    unfinished: set[int] = field(default_factory=set)
    """The indices of the messages that are being sent back to the broker."""
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
    """The records that were fetched and not delivered yet, in order."""
    waiting_since_s: deque[float] = field(default_factory=deque)
    """When each of the `waiting` records was fetched."""
    waiting_count: int = 0
    """Messages in `waiting`."""
    visible_end: int = 0
    """The visible end of the queue, by the last fetch."""
    again: list[ConsumeTask] = field(default_factory=list)
    """The tasks that wait for redelivery."""
    flying: set[ConsumeTask] = field(default_factory=set)
    """The tasks at the listener."""
    sending: set[ConsumeTask] = field(default_factory=set)
    """Tasks with messages that are being sent back."""
    size_bytes: int = 0
    """Record bytes of the unfinished messages."""
    finished_count: int = 0
    """Messages finished since the last commit that the broker has answered."""
    asked_count: int = 0
    """The `finished_count` at the last `ask`."""
    trouble: str = ""
    """The reason of the last failure; empty after a success."""
    skipped: int = 0
    """The number of messages that were skipped because their records are damaged."""
    last_skipped: str = ""
    """The error of the last skipped message."""

    @property
    def idle(self) -> bool:
        """True if no message is at the listener or is being sent back to the broker."""
        return not self.flying and not self.sending

    @property
    def count(self) -> int:
        """The number of unfinished messages: waiting, at the listener, or waiting for redelivery."""
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
        """Keep the queue in this generation.

        A revoked queue is granted again after its release: the listener may still have messages of it, and all others
        are given up.
        """
        if not self.revoked:
            AssignedQueue.grant(self, generation)

    def revoke(self, now_s: float) -> None:
        """Stop fetching and delivering. Undelivered messages stay unfinished, and hold back the commit offset."""
        AssignedQueue.revoke(self, now_s)
        self.waiting.clear()
        self.waiting_since_s.clear()
        self.waiting_count = 0
        self.again.clear()

    def ask(self, offset: int | None) -> OffsetCommit:
        """Return the commit of `offset` for the broker; None only asks whether the group's offset was reset."""
        self.asked_count = self.finished_count
        return AssignedQueue.ask(self, offset)

    def committed_to(self, commit: OffsetCommit) -> None:
        """Record that the broker has accepted the last commit."""
        AssignedQueue.committed_to(self, commit)
        if commit.queue_offset is not None:
            self.finished_count -= self.asked_count
            self.asked_count = 0

    def fetched(self, records: TaskRecords, next_offset: int, now_s: float) -> None:
        """Add fetched messages. The next fetch is at `next_offset`, which may be after the end of these messages."""
        self.fetch_offset = next_offset
        if len(records):
            self.offsets.add(records.offsets)
            self.waiting.append(records)
            self.waiting_since_s.append(now_s)
            self.waiting_count += len(records)
            self.size_bytes += records.size_bytes

    def take_waiting(self, count: int) -> ConsumeTask:
        """Make a task of the next `count` waiting messages, or of all if there are fewer. At least one must wait."""
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
