"""The common base of ConsumeConcurrently and ConsumeOrderly: decides the size and number of tasks, and tracks messages
that are sent back to the broker."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from actors.core.consume.records_in_place import TaskRecords
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.repair_wait import CHECKSUM_WRONG
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import ConsumeReport, Failure
from raymq.records.format.memory_records import MemoryRecords, join_records

TASKS_MAX: Final = 64
"""Maximum number of tasks that one listener has at the same time."""
TASK_TARGET_S: Final = 0.1
"""Target duration, in seconds, of a task: long compared with the call that delivers the task, but short enough that the
queue does not wait long."""
TASK_FIRST: Final = 32
"""Number of messages in each task until the listener's time per message is known."""
SEND_BACK_RETRY_S: Final = 5.0
"""Time, in seconds, after which a message is redelivered locally because it could not be sent back (spec/messaging.md
§5.8)."""
DEAD_LETTER: Final = -1
"""The delay level that sends a message to the dead-letter topic."""
_PACE_WEIGHT: Final = 0.2
"""The weight of the newest task in the moving average of the listener's time per message."""

MEND_AGAIN_S: Final = 1.0
"""Time in s after which a damaged message is delivered again, if it may be repaired soon."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class SendBack:
    """Messages to send back: to the retry topic, or to the dead-letter topic if `delay_level` is -1 or the retry limit
    is reached.

    The messages are those at `indices` of `task`. `max_reconsume_times` -1 means the group's setting at the broker.
    `reason`: why the messages failed. `unreadable`: why the messages cannot be read, or empty; the dead letters store
    this text.
    """

    task: ConsumeTask
    indices: tuple[int, ...]
    delay_level: int
    max_reconsume_times: int
    reason: str
    unreadable: str = ""

    @property
    def messages(self) -> TaskRecords:
        """Return the records of the messages that are being sent back to the broker."""
        return self.task.messages.pick(self.indices)


@dataclass(frozen=True, slots=True)
class Reaction:
    """The result of applying a listener's report: the numbers of consumed and failed messages, and the messages to send
    back to the broker."""

    ok: int = 0
    failed: int = 0
    send_backs: list[SendBack] = field(default_factory=list)


class ConsumeService(ABC):
    """Makes tasks from the messages in process queues, and applies the listener's reports about these tasks to the
    queues."""

    uncommitted_max: int
    """Maximum number of finished messages of a queue that wait for an offset commit. If this process dies, these
    messages are delivered again."""

    def __init__(self, settings: PushSettings) -> None:
        self.settings = settings
        self.clustering = settings.clustering
        self.is_mending: Callable[[MessageQueue, int], bool] = lambda queue, offset: False
        """Function that returns True if the damaged record at an offset of a queue may be repaired soon. It must not
        block."""
        self._numbers = 0
        """The number of the last task that was delivered to the listener; tasks are numbered in the order of
        delivery."""
        self._turn = 0
        """The number of calls of `next_tasks`. The number selects the first queue of the next call, so that each queue
        comes first in turn."""
        self._pace_s: float | None = None
        """The listener's time per message, in seconds, as a moving average over tasks; None before the first task has
        ended."""

    @abstractmethod
    def next_tasks(self, queues: Sequence[ProcessQueue], now_s: float) -> list[ConsumeTask]:
        """Return the tasks to deliver to the listener now, and mark them as in flight."""

    @abstractmethod
    def reported(self, task: ConsumeTask, report: ConsumeReport, now_s: float) -> Reaction:
        """Update the consume state of `task`, which was in flight, from the listener's report. Returns the numbers of
        consumed and failed messages, and the messages to send back to the broker (Reaction)."""

    @abstractmethod
    def died(self, task: ConsumeTask, now_s: float) -> Reaction:
        """Prepare the unfinished messages of `task` for redelivery, because the listener's process died while the task
        was in flight."""

    @abstractmethod
    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        """Prepare messages for local redelivery, because they could not be sent back to the broker."""

    def sent_back(self, sent: SendBack) -> None:
        """Mark messages of a task as finished, because the broker has now stored copies of them, for a retry or as dead
        letters."""
        process_queue = sent.task.process_queue
        process_queue.finish(sent.task, sent.indices)
        self._sending_ended(sent)

    def _mending(self, task: ConsumeTask, failure: Failure, indices: Collection[int]) -> set[int]:
        """Return the indices of the failed messages whose records are damaged and may be repaired soon."""
        if not failure.record_damaged and failure.unreadable not in CHECKSUM_WRONG:
            return set()
        offsets = task.messages.offsets
        return {index for index in indices if self.is_mending(task.queue, offsets[index])}

    def repaired(self, process_queue: ProcessQueue, queue_offset: int, record: MemoryRecords) -> None:
        """Replace the copy of a damaged record by the repaired record, in the tasks that will be delivered again.
        Records in the store's files need no replacement."""
        for task in process_queue.again:
            messages = task.messages
            if isinstance(messages, MemoryRecords) and queue_offset in messages.offsets:
                index = messages.offsets.index(queue_offset)
                if messages.size_of((index,)) == record.size_bytes:
                    parts = [messages.part(0, index)] if index else []
                    parts.append(record)
                    parts += [messages.part(index + 1, len(messages))] if index + 1 < len(messages) else []
                    task.messages = join_records(parts)

    def _skip_damaged(self, task: ConsumeTask, failure: Failure, indices: Collection[int]) -> None:
        """Skip messages whose records are damaged: mark them as finished, because they can neither be delivered nor
        copied."""
        process_queue = task.process_queue
        process_queue.finish(task, indices)
        process_queue.skipped += len(indices)
        if indices:
            process_queue.last_skipped = failure.error
            logger.error("%d message(s) of queue %s are skipped: %s", len(indices), task.queue, failure.error)

    def next_time_s(self, process_queue: ProcessQueue) -> float | None:
        """Return the earliest time at which a paused delivery of this queue may continue; None if no delivery is
        paused."""
        return min((task.ready_at_s for task in process_queue.again), default=None)

    def _sending(self, sent: SendBack) -> SendBack:
        sent.task.sending.update(sent.indices)
        sent.task.process_queue.sending.add(sent.task)
        return sent

    def _sending_ended(self, sent: SendBack) -> None:
        sent.task.sending.difference_update(sent.indices)
        if not sent.task.sending:
            sent.task.process_queue.sending.discard(sent.task)

    def _fly(self, task: ConsumeTask) -> ConsumeTask:
        self._numbers += 1
        task.number = self._numbers
        task.process_queue.flying.add(task)
        return task

    def _land(self, task: ConsumeTask, report: ConsumeReport) -> set[int]:
        """Record the progress that a listener's report shows for a task. Returns the indices of the task's messages
        that were consumed or failed since the previous report."""
        ended = task.unfinished - task.sending
        if report.unfinished:
            ended -= set(report.unfinished)
        consumed = len(task.messages) - len(report.unfinished)
        if report.ended and report.consume_s and consumed:
            pace_s = report.consume_s / consumed
            known_s = self._pace_s
            self._pace_s = pace_s if known_s is None else known_s + _PACE_WEIGHT * (pace_s - known_s)
        if report.ended:
            task.process_queue.flying.discard(task)
        return ended

    def _task_size(self, workers: int) -> int:
        """Return the size of a task: the number of messages that keep `workers` threads busy for TASK_TARGET_S.

        The number is at most half of `pull_batch_size`, so that one task can be consumed while another task is
        committed.
        """
        batch_max = self.settings.consume_message_batch_max_size
        pace_s = self._pace_s
        size = TASK_FIRST if pace_s is None else int(TASK_TARGET_S * workers / max(pace_s, 1e-9))
        return max(batch_max, min(size, self.settings.pull_batch_size // 2), 1)

    def _in_turn(self, queues: Iterable[ProcessQueue]) -> list[ProcessQueue]:
        """Return the queues that have messages to deliver, starting with a different queue at each call."""
        ready = [
            process_queue
            for process_queue in queues
            if process_queue.revoked_at_s is None and (process_queue.again or process_queue.waiting)
        ]
        self._turn += 1
        start = self._turn % len(ready) if ready else 0
        return ready[start:] + ready[:start]


def sorted_tuple(indices: Iterable[int]) -> tuple[int, ...]:
    """Return the message indices as a tuple in ascending order."""
    return tuple(sorted(indices))
