"""One queue in the hands of a push-consumer instance: what was fetched, what is under way, how far it may be committed.

    fetch → [waiting runs] → tasks in flight → finished
                               ↑        ↓ failed, or the listener died
                              [again]  ←┘

The account is kept per message (spec/messaging.md §5.5): the offset to commit is the smallest that is not finished, so
one slow message holds the commit point and nothing else. Nothing here survives the process; offsets do, at the broker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from raymq.message import MessageQueue
from raymq.protocol.group import OffsetCommit
from raymq.record.memory_records import MemoryRecords, join_records


class UnfinishedOffsets:
    """The offsets of messages that were fetched and are not finished. They arrive in ascending order."""

    def __init__(self) -> None:
        self._left: set[int] = set()
        self._order: deque[int] = deque()
        self._next = -1

    def __len__(self) -> int:
        return len(self._left)

    def add(self, offsets: Sequence[int]) -> None:
        self._left.update(offsets)
        self._order.extend(offsets)
        self._next = offsets[-1] + 1

    def remove(self, offsets: Collection[int]) -> int:
        """Finish messages. The offset to commit: the smallest left, behind the last one if none is, and -1 if there
        was none before."""
        if not self._left:
            return -1
        self._left.difference_update(offsets)
        return self.first

    @property
    def first(self) -> int:
        """The smallest unfinished offset; behind the last message if there is none, -1 if there never was one."""
        order, left = self._order, self._left
        while order and order[0] not in left:
            order.popleft()
        return order[0] if order else self._next

    @property
    def span(self) -> int:
        """How far the last unfinished message is from the first."""
        return self._order[-1] - self.first if self._left else 0


@dataclass(slots=True, eq=False)
class Task:
    """Messages of one queue on their way to the listener, under one number.

    `unfinished` are the indices of those that are not finished. `deaths` counts how often the listener's process died
    over them, `trials` how often while this was the only suspect (see consume_concurrently); not before `ready_at_s` is
    it delivered.
    """

    held: ProcessQueue
    messages: MemoryRecords
    number: int = 0
    deaths: int = 0
    trials: int = 0
    ready_at_s: float = 0.0
    unfinished: set[int] = field(default_factory=set)
    sending: set[int] = field(default_factory=set)
    """Indices that are being sent back."""

    def __post_init__(self) -> None:
        self.unfinished = set(range(len(self.messages)))

    @property
    def queue(self) -> MessageQueue:
        return self.held.queue


@dataclass(slots=True, eq=False)
class ProcessQueue:
    """One tenure of a queue; who gets it again gets a new one.

    `fetch_offset`: read next; None until the broker has said where the group stands. `committed_offset`: what the
    broker has. `generation` and `reset_version` go with each commit (raymq.protocol.group).
    """

    queue: MessageQueue
    generation: int = 0
    reset_version: int = 0
    fetch_offset: int | None = None
    committed_offset: int = 0
    fetch_at_s: float = 0.0
    offsets: UnfinishedOffsets = field(default_factory=UnfinishedOffsets)
    waiting: deque[MemoryRecords] = field(default_factory=deque)
    waiting_count: int = 0
    again: list[Task] = field(default_factory=list)
    flying: set[Task] = field(default_factory=set)
    sending: set[Task] = field(default_factory=set)
    """Tasks with messages that are being sent back."""
    size_bytes: int = 0
    finished_count: int = 0
    """Messages finished since the last commit that the broker has answered."""
    asked: OffsetCommit | None = None
    """The last commit that was handed out; `asked_count` is the `finished_count` of then."""
    asked_count: int = 0
    backwards: bool = False
    """The store has less than was committed: the next commit goes back."""
    revoked_at_s: float | None = None
    dropped: bool = False
    trouble: str = ""
    """Why the last message that failed did."""

    @property
    def idle(self) -> bool:
        """Whether nothing of it is at the listener or on its way back to the broker."""
        return not self.flying and not self.sending

    @property
    def count(self) -> int:
        """Messages held: waiting, at the listener, or to be delivered again."""
        return len(self.offsets)

    @property
    def commit_offset(self) -> int:
        """Everything before it is finished."""
        if len(self.offsets):
            return self.offsets.first
        return self.committed_offset if self.fetch_offset is None else self.fetch_offset

    def begin(self, offset: int, reset_version: int) -> None:
        """The broker has said where the group stands."""
        self.fetch_offset = self.committed_offset = offset
        self.reset_version = reset_version

    def fetched(self, run: MemoryRecords, next_offset: int) -> None:
        """Messages arrived; the queue is read next at `next_offset`, which may be further than their end."""
        self.fetch_offset = next_offset
        if len(run):
            self.offsets.add(run.offsets)
            self.waiting.append(run)
            self.waiting_count += len(run)
            self.size_bytes += run.size_bytes

    def take(self, count: int) -> MemoryRecords:
        """The next `count` waiting messages, or all of them if there are fewer; there is at least one."""
        parts = []
        while count and self.waiting:
            run = self.waiting.popleft()
            if len(run) > count:
                self.waiting.appendleft(run.part(count, len(run)))
                run = run.part(0, count)
            parts.append(run)
            count -= len(run)
        taken = join_records(parts)
        self.waiting_count -= len(taken)
        return taken

    def finish(self, task: Task, indices: Collection[int]) -> None:
        """These messages need nothing more; the others of the task do."""
        if not indices:
            return
        messages = task.messages
        task.unfinished.difference_update(indices)
        self.offsets.remove([messages.offsets[index] for index in indices])
        if len(indices) == len(messages):
            self.size_bytes -= messages.size_bytes
        else:
            self.size_bytes -= sum(messages.starts[index + 1] - messages.starts[index] for index in indices)
        self.finished_count += len(indices)

    def give_up_waiting(self) -> None:
        """Deliver nothing more. What was not delivered stays unfinished, and holds the commit point."""
        self.waiting.clear()
        self.waiting_count = 0
        self.again.clear()
