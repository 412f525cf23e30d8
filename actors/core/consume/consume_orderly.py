"""Consuming a queue's messages one after another (spec/messaging.md §5.10).

One task of a queue is at the listener at a time. It stops at the first message that fails: what came before is done,
the rest comes again, that message first, after the queue's pause. A message that has failed `max_reconsume_times` times
is sent back, to the retry topic or the dead letters, and the queue goes on; by default there is no such limit.

What is finished and not yet committed, together with what is in flight, is at most one full task, so that no more is
delivered again when this process dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from actors.core.consume.consume_service import TASKS_MAX, ConsumeService, Reaction, SendBack, sorted_tuple
from actors.core.consume.process_queue import ProcessQueue, Task
from raymq.consumer.push.settings import PushSettings
from raymq.protocol.consume_result import ConsumeReport, Failure

SUSPEND_MIN_MS: Final = 10
SUSPEND_MAX_MS: Final = 30_000
DEATH_PAUSE_MAX_S: Final = 30.0


class ConsumeOrderly(ConsumeService):
    """See the module."""

    def __init__(self, settings: PushSettings) -> None:
        super().__init__(settings)
        self.uncommitted_max = max(settings.pull_batch_size, settings.consume_message_batch_max_size)
        self._flying: set[Task] = set()

    def next_tasks(self, queues: Sequence[ProcessQueue], now_s: float) -> list[Task]:
        size = self._task_size(1)
        taken = []
        for held in self._in_turn(queues):
            if len(self._flying) >= TASKS_MAX:
                break
            task = self._next(held, size, now_s) if held.idle else None
            if task is not None:
                self._flying.add(task)
                taken.append(task)
        return taken

    def reported(self, task: Task, report: ConsumeReport, now_s: float) -> Reaction:
        held = task.held
        ended = self._land(task, report)
        if report.ended:
            self._flying.discard(task)
        if held.dropped:
            return Reaction()
        failed: set[int] = set()
        for failure in report.failures:
            failed |= ended & set(range(failure.first, failure.first + failure.count))
        held.finish(task, ended - failed)
        if failed:
            return self._failed(task, failed, report.failures[0], len(ended) - len(failed), now_s)
        if ended:
            held.trouble = ""
        if report.ended:
            left = task.messages.pick(task.unfinished) if task.unfinished else None
            self._put_back(held, [Task(held, left, deaths=task.deaths)] if left else [])
        return Reaction(len(ended))

    def died(self, task: Task, now_s: float) -> Reaction:
        held = task.held
        held.flying.discard(task)
        self._flying.discard(task)
        left = sorted_tuple(task.unfinished)
        if not held.dropped and left:
            deaths = 1 if len(left) < len(task.messages) else task.deaths + 1
            pause_s = min(2.0 ** min(deaths - 2, 10), DEATH_PAUSE_MAX_S) if deaths > 1 else 0.0
            rest = Task(held, task.messages.pick(left), deaths=deaths, ready_at_s=now_s + pause_s)
            self._put_back(held, [rest])
            held.trouble = (
                f"the listener's process died {deaths} time(s) at or behind offset {rest.messages.offsets[0]}; it is "
                "delivered again"
            )
        return Reaction()

    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        held = sent.task.held
        self._sending_ended(sent)
        if not held.dropped:
            again = sent.task.messages.failed_once_more(range(len(sent.task.messages)))
            self._put_back(held, [Task(held, again, ready_at_s=now_s + self._suspend_s(-1))])

    def next_time_s(self, held: ProcessQueue) -> float | None:
        return held.again[0].ready_at_s if held.again else None

    def _next(self, held: ProcessQueue, size: int, now_s: float) -> Task | None:
        if held.again:
            return self._fly(held.again.pop(0)) if held.again[0].ready_at_s <= now_s else None
        count = min(size, held.waiting_count)
        if held.finished_count and held.finished_count + count > self.uncommitted_max:
            return None  # the commit under way makes room
        return self._fly(Task(held, held.take(count)))

    def _failed(self, task: Task, failed: set[int], failure: Failure, ok: int, now_s: float) -> Reaction:
        held, limit = task.held, self.settings.max_reconsume_times
        held.trouble = failure.error
        held.flying.discard(task)
        self._flying.discard(task)
        exhausted = {i for i in failed if limit >= 0 and task.messages.reconsume_times(i) >= limit}
        send_backs = []
        if exhausted and not self.clustering:
            held.finish(task, exhausted)
        elif exhausted:
            dead = Task(held, task.messages.pick(exhausted))
            send_backs = [self._sending(SendBack(dead, sorted_tuple(dead.unfinished), 0, limit, failure.error))]
        left = task.unfinished - exhausted
        if left:
            messages = task.messages.failed_once_more(failed - exhausted).pick(left)
            pause_s = self._suspend_s(failure.suspend_ms) if failed - exhausted else 0.0
            self._put_back(held, [Task(held, messages, ready_at_s=now_s + pause_s)])
        return Reaction(ok, len(failed), send_backs)

    def _put_back(self, held: ProcessQueue, tasks: list[Task]) -> None:
        if held.revoked_at_s is None:
            held.again[:0] = tasks

    def _suspend_s(self, suspend_ms: int) -> float:
        if suspend_ms < 0:
            suspend_ms = self.settings.suspend_current_queue_time_ms
        return min(max(suspend_ms, SUSPEND_MIN_MS), SUSPEND_MAX_MS) / 1000
