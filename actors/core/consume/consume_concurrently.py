"""Consuming a queue's messages many at a time (spec/messaging.md §5.8).

Several tasks of a queue are at the listener at once, and what fails is sent back to the broker, which delivers it later
through the retry topic; so nothing waits for a slow or a failing message but the offset to commit.

A listener's process that dies takes all its tasks with it, and nobody can say which message killed it. Each task comes
again; one that has seen `SUSPECT_DEATHS` is split into single messages, its suspects, which are delivered one by one,
so that an innocent one is cleared by being consumed. Whichever has seen the process die `TRIALS_MAX` times while it was
the only suspect there is sent back, and to the dead letters at once if it has come back from the retry topic before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from actors.core.consume.consume_service import (
    SEND_BACK_RETRY_S,
    TASKS_MAX,
    ConsumeService,
    Reaction,
    SendBack,
    sorted_tuple,
)
from actors.core.consume.process_queue import ProcessQueue, Task
from raymq.consumer.push.settings import PushSettings
from raymq.protocol.consume_result import ConsumeReport

TASKS_AHEAD: Final = 4
"""Full tasks in flight, so that the listener has work while others are on their way."""
SUSPECT_DEATHS: Final = 2
TRIALS_MAX: Final = 2
DEAD_LETTER: Final = -1


class ConsumeConcurrently(ConsumeService):
    """See the module. `settings.threads` listener calls run at a time."""

    def __init__(self, settings: PushSettings) -> None:
        super().__init__(settings)
        self.uncommitted_max = settings.consume_concurrently_max_span
        self._flying: set[Task] = set()
        self._suspect: Task | None = None

    def next_tasks(self, queues: Sequence[ProcessQueue], now_s: float) -> list[Task]:
        taken: list[Task] = []
        batch_max, threads = self.settings.consume_message_batch_max_size, self.settings.threads
        size = self._task_size(threads)
        in_flight_max = max(TASKS_AHEAD * size, 2 * threads * batch_max)
        in_flight = sum(len(task.unfinished) for task in self._flying)
        ready = self._in_turn(queues)
        while ready and in_flight < in_flight_max and len(self._flying) < TASKS_MAX:
            still_ready = []
            for held in ready:
                task = self._next(held, size, now_s)
                if task is None:
                    continue
                self._flying.add(task)
                taken.append(task)
                in_flight += len(task.messages)
                still_ready.append(held)
                if in_flight >= in_flight_max or len(self._flying) >= TASKS_MAX:
                    break
            ready = still_ready
        return taken

    def reported(self, task: Task, report: ConsumeReport, now_s: float) -> Reaction:
        held = task.held
        ended = self._land(task, report)
        if report.ended:
            self._forget(task)
        if held.dropped:
            return Reaction()
        failed: set[int] = set()
        by_level: dict[int, set[int]] = defaultdict(set)
        for failure in report.failures:
            indices = ended & set(range(failure.first, failure.first + failure.count))
            failed |= indices
            by_level[failure.delay_level] |= indices
            held.trouble = failure.error
        held.finish(task, ended - failed)
        if len(ended) > len(failed) and not failed:
            held.trouble = ""
        if report.ended:
            self._deliver_again(held, task, sorted_tuple(task.unfinished - task.sending - failed), now_s)
        if not self.clustering:
            held.finish(task, failed)  # logged, and lost (spec/messaging.md §5.8)
            return Reaction(len(ended) - len(failed), len(failed))
        return Reaction(
            len(ended) - len(failed),
            len(failed),
            [self._send_back(task, indices, level, held.trouble) for level, indices in by_level.items() if indices],
        )

    def died(self, task: Task, now_s: float) -> Reaction:
        held = task.held
        held.flying.discard(task)
        was_suspect = self._suspect is task
        self._forget(task)
        left = sorted_tuple(task.unfinished - task.sending)
        if held.dropped or not left:
            return Reaction()
        task.deaths += 1
        task.trials += was_suspect
        if task.trials >= TRIALS_MAX:
            held.trouble = f"the listener's process died {task.deaths} times over the message at offset " + ", ".join(
                str(task.messages.offsets[index]) for index in left
            )
            if not self.clustering:
                held.finish(task, left)
                return Reaction(failed=len(left))
            came_before = any(task.messages.reconsume_times(index) for index in left)
            return Reaction(
                failed=len(left),
                send_backs=[self._send_back(task, set(left), DEAD_LETTER if came_before else 0, held.trouble)],
            )
        held.trouble = "the listener's process died; what it had is delivered again"
        if task.deaths < SUSPECT_DEATHS:
            self._deliver_again(held, task, left, now_s)
        else:
            for index in left:
                self._deliver_again(held, task, (index,), now_s)
        return Reaction()

    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        task, held = sent.task, sent.task.held
        self._sending_ended(sent)
        task.unfinished.difference_update(sent.indices)
        if held.revoked_at_s is None and not held.dropped:
            messages = sent.messages
            again = messages.failed_once_more(range(len(messages)))
            held.again.append(Task(held, again, ready_at_s=now_s + SEND_BACK_RETRY_S))

    def _next(self, held: ProcessQueue, size: int, now_s: float) -> Task | None:
        for task in held.again:
            suspect = task.deaths >= SUSPECT_DEATHS
            if task.ready_at_s > now_s or (suspect and self._suspect is not None):
                continue
            held.again.remove(task)
            if suspect:
                self._suspect = task
            return self._fly(task)
        if held.waiting and held.finished_count < self.uncommitted_max:
            return self._fly(Task(held, held.take(size)))
        return None

    def _forget(self, task: Task) -> None:
        self._flying.discard(task)
        if self._suspect is task:
            self._suspect = None

    def _deliver_again(self, held: ProcessQueue, task: Task, indices: tuple[int, ...], now_s: float) -> None:
        """As a new task; the old one has nothing to do with these messages any more."""
        task.unfinished.difference_update(indices)
        if indices and held.revoked_at_s is None:
            messages = task.messages.pick(indices)
            held.again.append(Task(held, messages, deaths=task.deaths, trials=task.trials, ready_at_s=now_s))

    def _send_back(self, task: Task, indices: set[int], delay_level: int, reason: str) -> SendBack:
        limit = self.settings.max_reconsume_times
        return self._sending(SendBack(task, sorted_tuple(indices), delay_level, limit, reason))
