"""Consumes the messages of a queue one after another (ConsumeOrderly, spec/messaging.md §5.10).

The listener processes only one task of a queue at a time. The task stops at the first message that fails; the messages
before it are finished. After a pause of the queue, the failed message and all later messages of the task are delivered
again. A message that has failed `max_reconsume_times` times is sent back, to the retry topic or the dead-letter topic,
and the queue continues. By default this limit is not set. A message that cannot be read becomes a dead letter at once.

A queue's finished uncommitted messages and its messages in flight are together at most one full task. So at most one
task of the queue is delivered again if this process dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from actors.core.consume.consume_service import (
    DEAD_LETTER,
    MEND_AGAIN_S,
    TASKS_MAX,
    ConsumeService,
    Reaction,
    SendBack,
    sorted_tuple,
)
from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from raymq.client.consumer.push.settings import PushSettings
from raymq.common.protocol.consume_result import SUSPEND_MAX_MS, SUSPEND_MIN_MS, ConsumeReport, Failure

DEATH_PAUSE_MAX_S: Final = 30.0
"""Maximum pause of a queue, in seconds, after the listener's process has died. The pause starts at 1 s and doubles with
each death."""


class ConsumeOrderly(ConsumeService):
    """Makes tasks from queued messages and handles failures for an orderly consumer."""

    def __init__(self, settings: PushSettings) -> None:
        super().__init__(settings)
        self.uncommitted_max = max(settings.pull_batch_size, settings.consume_message_batch_max_size)
        self._flying: set[ConsumeTask] = set()

    def next_tasks(self, queues: Sequence[ProcessQueue], now_s: float) -> list[ConsumeTask]:
        size = self._task_size(1)
        taken = []
        for process_queue in self._in_turn(queues):
            if len(self._flying) >= TASKS_MAX:
                break
            task = self._next(process_queue, size, now_s) if process_queue.idle else None
            if task is not None:
                self._flying.add(task)
                taken.append(task)
        return taken

    def reported(self, task: ConsumeTask, report: ConsumeReport, now_s: float) -> Reaction:
        process_queue = task.process_queue
        ended = self._land(task, report)
        if report.ended:
            self._flying.discard(task)
        if process_queue.dropped:
            return Reaction()
        failed: set[int] = set()
        for failure in report.failures:
            failed |= ended & set(range(failure.first, failure.first + failure.count))
        process_queue.finish(task, ended - failed)
        if failed:
            return self._failed(task, failed, report.failures[0], len(ended) - len(failed), now_s)
        if ended:
            process_queue.trouble = ""
        if report.ended:
            left = task.messages.pick(task.unfinished) if task.unfinished else None
            self._put_back(process_queue, [ConsumeTask(process_queue, left, deaths=task.deaths)] if left else [])
        return Reaction(len(ended))

    def died(self, task: ConsumeTask, now_s: float) -> Reaction:
        process_queue = task.process_queue
        process_queue.flying.discard(task)
        self._flying.discard(task)
        left = sorted_tuple(task.unfinished)
        if not process_queue.dropped and left:
            deaths = 1 if len(left) < len(task.messages) else task.deaths + 1
            pause_s = min(2.0 ** min(deaths - 2, 10), DEATH_PAUSE_MAX_S) if deaths > 1 else 0.0
            rest = ConsumeTask(process_queue, task.messages.pick(left), deaths=deaths, ready_at_s=now_s + pause_s)
            self._put_back(process_queue, [rest])
            process_queue.trouble = (
                f"the listener's process died {deaths} time(s) at or after offset {rest.messages.offsets[0]}; the "
                "messages from this offset on are delivered again"
            )
        return Reaction()

    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        process_queue = sent.task.process_queue
        self._sending_ended(sent)
        if not process_queue.dropped:
            again = sent.task.messages.failed_once_more(range(len(sent.task.messages)))
            self._put_back(process_queue, [ConsumeTask(process_queue, again, ready_at_s=now_s + self._suspend_s(-1))])

    def next_time_s(self, process_queue: ProcessQueue) -> float | None:
        return process_queue.again[0].ready_at_s if process_queue.again else None

    def _next(self, process_queue: ProcessQueue, size: int, now_s: float) -> ConsumeTask | None:
        if process_queue.again:
            return self._fly(process_queue.again.pop(0)) if process_queue.again[0].ready_at_s <= now_s else None
        count = min(size, process_queue.waiting_count)
        if process_queue.finished_count and process_queue.finished_count + count > self.uncommitted_max:
            # too many finished messages of the queue are not committed yet; return no task until a commit has ended
            return None
        return self._fly(process_queue.take_waiting(count))

    def _failed(self, task: ConsumeTask, failed: set[int], failure: Failure, ok: int, now_s: float) -> Reaction:
        process_queue, limit = task.process_queue, self.settings.max_reconsume_times
        process_queue.trouble = failure.error
        process_queue.flying.discard(task)
        self._flying.discard(task)
        if self._mending(task, failure, failed):
            rest = ConsumeTask(process_queue, task.messages.pick(task.unfinished), ready_at_s=now_s + MEND_AGAIN_S)
            self._put_back(process_queue, [rest])
            return Reaction(ok)
        if failure.record_damaged:
            self._skip_damaged(task, failure, failed)
            exhausted: set[int] = set()
        elif failure.unreadable:
            exhausted = failed
        else:
            exhausted = {i for i in failed if limit >= 0 and task.messages.reconsume_times(i) >= limit}
        again = set() if failure.record_damaged else failed - exhausted
        send_backs = []
        if exhausted and not self.clustering:
            process_queue.finish(task, exhausted)
        elif exhausted:
            dead = ConsumeTask(process_queue, task.messages.pick(exhausted))
            level = DEAD_LETTER if failure.unreadable else 0
            places = (sorted_tuple(dead.unfinished), level, limit, failure.error, failure.unreadable)
            send_backs = [self._sending(SendBack(dead, *places))]
        left = task.unfinished - exhausted
        if left:
            messages = task.messages.failed_once_more(again) if again else task.messages
            messages = messages.pick(left)
            pause_s = self._suspend_s(failure.suspend_ms) if again else 0.0
            self._put_back(process_queue, [ConsumeTask(process_queue, messages, ready_at_s=now_s + pause_s)])
        return Reaction(ok, len(failed), send_backs)

    def _put_back(self, process_queue: ProcessQueue, tasks: list[ConsumeTask]) -> None:
        if process_queue.revoked_at_s is None:
            process_queue.again[:0] = tasks

    def _suspend_s(self, suspend_ms: int) -> float:
        if suspend_ms < 0:
            suspend_ms = self.settings.suspend_current_queue_time_ms
        return min(max(suspend_ms, SUSPEND_MIN_MS), SUSPEND_MAX_MS) / 1000
