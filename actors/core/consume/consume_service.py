"""What the concurrent and the orderly way of consuming have in common: how much goes to the listener at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from actors.core.consume.process_queue import ProcessQueue, Task
from raymq.consumer.push.settings import PushSettings
from raymq.protocol.consume_result import ConsumeReport
from raymq.record.memory_records import MemoryRecords

TASKS_MAX: Final = 64
"""Tasks at one listener at a time; each holds a thread of its actor, which waits."""
TASK_TARGET_S: Final = 0.1
"""How long a task should take: long beside the call that carries it, short for who waits for it."""
TASK_FIRST: Final = 32
"""Messages in a task before it is known how long one takes."""
SEND_BACK_RETRY_S: Final = 5.0
"""When a message that could not be sent back is delivered again here (spec/messaging.md §5.8)."""
_PACE_WEIGHT: Final = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class SendBack:
    """Messages for the retry topic, or, with `delay_level` -1 or too many reconsumptions, for the dead-letter topic.

    `max_reconsume_times` -1 is the group's. They are the messages at `indices` of `task`.
    """

    task: Task
    indices: tuple[int, ...]
    delay_level: int
    max_reconsume_times: int
    reason: str

    @property
    def messages(self) -> MemoryRecords:
        return self.task.messages.pick(self.indices)


@dataclass(frozen=True, slots=True)
class Reaction:
    """What follows from a report: messages that ended well and badly, and what is to be sent back."""

    ok: int = 0
    failed: int = 0
    send_backs: list[SendBack] = field(default_factory=list)


class ConsumeService(ABC):
    """Cuts tasks and hears how they went. All changes are in the ProcessQueues it is given."""

    uncommitted_max: int
    """Messages of a queue that may be finished, and come again if this process dies now."""

    def __init__(self, settings: PushSettings) -> None:
        self.settings = settings
        self.clustering = settings.clustering
        self._numbers = 0
        self._turn = 0
        self._pace_s: float | None = None

    @abstractmethod
    def next_tasks(self, queues: Sequence[ProcessQueue], now_s: float) -> list[Task]:
        """What the listener gets now; in flight on return."""

    @abstractmethod
    def reported(self, task: Task, report: ConsumeReport, now_s: float) -> Reaction:
        """The listener has said how far it is with a task that is in flight."""

    @abstractmethod
    def died(self, task: Task, now_s: float) -> Reaction:
        """The listener's process died, with this task in flight."""

    @abstractmethod
    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        """The broker did not take them."""

    def sent_back(self, sent: SendBack) -> None:
        """The broker has them."""
        held = sent.task.held
        held.finish(sent.task, sent.indices)
        self._sending_ended(sent)

    def next_time_s(self, held: ProcessQueue) -> float | None:
        """When a pause of this queue ends; None if it has none."""
        return min((task.ready_at_s for task in held.again), default=None)

    def _sending(self, sent: SendBack) -> SendBack:
        sent.task.sending.update(sent.indices)
        sent.task.held.sending.add(sent.task)
        return sent

    def _sending_ended(self, sent: SendBack) -> None:
        sent.task.sending.difference_update(sent.indices)
        if not sent.task.sending:
            sent.task.held.sending.discard(sent.task)

    def _fly(self, task: Task) -> Task:
        self._numbers += 1
        task.number = self._numbers
        task.held.flying.add(task)
        return task

    def _land(self, task: Task, report: ConsumeReport) -> set[int]:
        """Note the report's progress; the messages that it says the listener has ended with, well or badly."""
        ended = task.unfinished - task.sending - set(report.unfinished)
        consumed = len(task.messages) - len(report.unfinished)
        if report.ended and report.consume_s and consumed:
            pace_s = report.consume_s / consumed
            known_s = self._pace_s
            self._pace_s = pace_s if known_s is None else known_s + _PACE_WEIGHT * (pace_s - known_s)
        if report.ended:
            task.held.flying.discard(task)
        return ended

    def _task_size(self, workers: int) -> int:
        """Messages for one task that `workers` threads work on at a time: what takes them TASK_TARGET_S, and at most
        half of `pull_batch_size`, so that one is consumed while one is committed."""
        batch_max = self.settings.consume_message_batch_max_size
        pace_s = self._pace_s
        size = TASK_FIRST if pace_s is None else int(TASK_TARGET_S * workers / max(pace_s, 1e-9))
        return max(batch_max, min(size, self.settings.pull_batch_size // 2), 1)

    def _in_turn(self, queues: Iterable[ProcessQueue]) -> list[ProcessQueue]:
        """The queues that may be delivered from, another one first each time."""
        ready = [held for held in queues if held.revoked_at_s is None and (held.again or held.waiting)]
        self._turn += 1
        start = self._turn % len(ready) if ready else 0
        return ready[start:] + ready[:start]


def sorted_tuple(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(indices))
