"""Consumes many messages of a queue in parallel (ConsumeConcurrently, spec/messaging.md §5.8).

The listener processes several tasks of a queue at the same time. Failed messages are sent back to the broker, which
delivers them later through the retry topic. So a slow or failing message delays only the offset commit.

The queues deliver tasks in turn. The queues of a PRIORITY topic deliver by level (raymq.client.consumer.levels).

If a listener's process dies, all its tasks end, and it is unknown which message caused the crash. Each task is
delivered again. After `SUSPECT_DEATHS` deaths a task is split into single messages, its suspects. The suspects are
delivered one by one, so that a harmless message is cleared when it is consumed. If the process dies `TRIALS_MAX` times
while a message is the only suspect at the listener, the message is sent back. If this message has already been
redelivered from the retry topic, it becomes a dead letter at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

from actors.core.consume.consume_service import (
    DEAD_LETTER,
    MEND_AGAIN_S,
    SEND_BACK_RETRY_S,
    TASKS_MAX,
    ConsumeService,
    Reaction,
    SendBack,
    sorted_tuple,
)
from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from raymq.client.consumer.levels import LevelTurns
from raymq.client.consumer.push.settings import PushSettings
from raymq.common.protocol.consume_result import ConsumeReport

TASKS_AHEAD: Final = 4
"""Number of tasks of full size that are in flight to a listener at the same time. So the listener has work while
further tasks are being transferred."""
SUSPECT_DEATHS: Final = 2
"""Number of deaths of the listener's process after which a task's messages are suspected of causing the crash."""
WAYS_MAX: Final = 16
"""Maximum number of parts in which the failed messages of one task are sent back to the broker. Each part has its own
reason and its own durable append."""
MANY_REASONS: Final = "many messages failed together with different errors; the listener's log has the errors"
TRIALS_MAX: Final = 2
"""Maximum number of crashes of the listener's process while one message is the only suspect. The message is then sent
back to the broker."""


class ConsumeConcurrently(ConsumeService):
    """Makes tasks from queued messages and handles failures for a concurrent consumer. `settings.threads` listener
    calls run in parallel."""

    def __init__(self, settings: PushSettings) -> None:
        super().__init__(settings)
        self._levels = LevelTurns()
        """The turns of the PRIORITY topics. Each task is a turn."""
        for topic in settings.leveled:
            self._levels.set(topic, has_levels=True)
        self.uncommitted_max = settings.consume_concurrently_max_span
        self._flying: set[ConsumeTask] = set()
        """The tasks, of all queues, that the listener is processing."""
        self._suspect: ConsumeTask | None = None
        """The task with the only message at the listener that is suspected of causing a crash; None if the listener has
        no such message."""

    def next_tasks(self, queues: Sequence[ProcessQueue], now_s: float) -> list[ConsumeTask]:
        taken: list[ConsumeTask] = []
        batch_max, threads = self.settings.consume_message_batch_max_size, self.settings.threads
        size = self._task_size(threads)
        in_flight_max = max(TASKS_AHEAD * size, 2 * threads * batch_max)
        in_flight = sum(len(task.unfinished) for task in self._flying)
        ready = deque(self._in_turn(queues))
        while ready and in_flight < in_flight_max and len(self._flying) < TASKS_MAX:
            if self._levels:
                ready = deque(self._levels.order(ready, lambda one: one.queue, [one.queue for one in queues]))
            process_queue = ready.popleft()
            task = self._next(process_queue, size, now_s)
            if task is None:
                continue
            self._levels.took([process_queue.queue.topic])
            self._flying.add(task)
            taken.append(task)
            in_flight += len(task.messages)
            ready.append(process_queue)
        return taken

    def reported(self, task: ConsumeTask, report: ConsumeReport, now_s: float) -> Reaction:
        process_queue = task.process_queue
        ended = self._land(task, report)
        if report.ended:
            self._no_longer_flying(task)
        if process_queue.dropped:
            return Reaction()
        failed: set[int] = set()
        # Indices of failed messages, grouped by delay level, by the reason why they cannot be read, and by error.
        # Messages that cannot be read become dead letters at once.
        by_way: dict[tuple[int, str, str], set[int]] = defaultdict(set)
        for failure in report.failures:
            indices = ended & set(range(failure.first, failure.first + failure.count))
            failed |= indices
            process_queue.trouble = failure.error
            for index in sorted_tuple(self._mending(task, failure, indices)):
                # Deliver the message again when another replica's bytes have perhaps replaced the damage.
                self._deliver_again(process_queue, task, (index,), now_s + MEND_AGAIN_S)
                indices.discard(index)
                ended.discard(index)
                failed.discard(index)
            if failure.record_damaged:
                self._skip_damaged(task, failure, indices)
            else:
                level = DEAD_LETTER if failure.unreadable else failure.delay_level
                way = level, failure.unreadable, failure.error
                by_way[way if way in by_way or len(by_way) < WAYS_MAX else (*way[:2], MANY_REASONS)] |= indices
        process_queue.finish(task, ended - failed)
        if len(ended) > len(failed) and not failed:
            process_queue.trouble = ""
        if report.ended:
            self._deliver_again(process_queue, task, sorted_tuple(task.unfinished - task.sending - failed), now_s)
        if not failed:
            return Reaction(len(ended))
        if not self.clustering:
            # drop these failed messages with a log entry, as spec/messaging.md §5.8 requires
            process_queue.finish(task, failed & task.unfinished)
            return Reaction(len(ended) - len(failed), len(failed))
        return Reaction(
            len(ended) - len(failed),
            len(failed),
            [
                self._send_back(task, indices, level, reason, unreadable)
                for (level, unreadable, reason), indices in by_way.items()
                if indices
            ],
        )

    def died(self, task: ConsumeTask, now_s: float) -> Reaction:
        process_queue = task.process_queue
        process_queue.flying.discard(task)
        was_suspect = self._suspect is task
        self._no_longer_flying(task)
        left = sorted_tuple(task.unfinished - task.sending)
        if process_queue.dropped or not left:
            return Reaction()
        task.deaths += 1
        task.trials += was_suspect
        if task.trials >= TRIALS_MAX:
            process_queue.trouble = (
                f"the listener's process died {task.deaths} times while it consumed the message at offset "
                + ", ".join(str(task.messages.offsets[index]) for index in left)
            )
            if not self.clustering:
                process_queue.finish(task, left)
                return Reaction(failed=len(left))
            came_before = any(task.messages.reconsume_times(index) for index in left)
            return Reaction(
                failed=len(left),
                send_backs=[self._send_back(task, set(left), DEAD_LETTER if came_before else 0, process_queue.trouble)],
            )
        process_queue.trouble = "the listener's process died; its unfinished messages are delivered again"
        if task.deaths < SUSPECT_DEATHS:
            self._deliver_again(process_queue, task, left, now_s)
        else:
            for index in left:
                self._deliver_again(process_queue, task, (index,), now_s)
        return Reaction()

    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        task, process_queue = sent.task, sent.task.process_queue
        self._sending_ended(sent)
        task.unfinished.difference_update(sent.indices)
        if process_queue.revoked_at_s is None and not process_queue.dropped:
            messages = sent.messages
            again = messages.failed_once_more(range(len(messages)))
            process_queue.again.append(ConsumeTask(process_queue, again, ready_at_s=now_s + SEND_BACK_RETRY_S))

    def _next(self, process_queue: ProcessQueue, size: int, now_s: float) -> ConsumeTask | None:
        for task in process_queue.again:
            suspect = task.deaths >= SUSPECT_DEATHS
            if task.ready_at_s > now_s or (suspect and self._suspect is not None):
                continue
            process_queue.again.remove(task)
            if suspect:
                self._suspect = task
            return self._fly(task)
        if process_queue.waiting and process_queue.finished_count < self.uncommitted_max:
            return self._fly(process_queue.take_waiting(size))
        return None

    def _no_longer_flying(self, task: ConsumeTask) -> None:
        self._flying.discard(task)
        if self._suspect is task:
            self._suspect = None

    def _deliver_again(
        self, process_queue: ProcessQueue, task: ConsumeTask, indices: tuple[int, ...], now_s: float
    ) -> None:
        """Move unfinished messages of a task to a new task, which is delivered again. The old task no longer counts
        them as unfinished."""
        task.unfinished.difference_update(indices)
        if indices and process_queue.revoked_at_s is None:
            messages = task.messages.pick(indices)
            process_queue.again.append(
                ConsumeTask(process_queue, messages, deaths=task.deaths, trials=task.trials, ready_at_s=now_s)
            )

    def _send_back(
        self, task: ConsumeTask, indices: set[int], delay_level: int, reason: str, unreadable: str = ""
    ) -> SendBack:
        limit = self.settings.max_reconsume_times
        return self._sending(SendBack(task, sorted_tuple(indices), delay_level, limit, reason, unreadable))
