"""The decisions of the Pull actor about the queues of one push-consumer instance.

A `ProcessQueue` exists for each granted queue. This module decides which queues are fetched (flow control,
spec/messaging.md §5.6), which offsets are committed, and when a queue may be released. A `ConsumeService` decides which
messages are delivered to the listener, in order or concurrently.

    granted → started → fetch, deliver, commit → revoked → released   (raymq.client.consumer.assignment.assigned_queues)

A revoked queue fetches and delivers no new messages. It is released after its messages at the listener have finished.
Only after the release may the instance stop reporting the queue to the group (raymq.common.protocol.membership). A
message that takes longer than RELEASE_PATIENCE_S does not delay the release: the new owner delivers the message again.
An orderly consumer waits for such a message without a limit.

No threads, no clock, no calls: the methods get the current time, in seconds, as an argument. State changes only in the
methods of this package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Final

from actors.core.consume.consume_concurrently import ConsumeConcurrently
from actors.core.consume.consume_orderly import ConsumeOrderly
from actors.core.consume.consume_service import ConsumeService, Reaction, SendBack
from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from actors.core.consume.records_in_place import TaskRecords
from raymq.client.consumer.assignment.assigned_queues import FENCE_AFTER_S, AssignedQueues
from raymq.client.consumer.push.settings import PushSettings
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import ConsumeReport
from raymq.common.protocol.group import QueueOffset
from raymq.records.format.memory_records import MemoryRecords

RELEASE_PATIENCE_S: Final = 10.0
"""Maximum time, in seconds, that a concurrent consumer keeps a revoked queue until the listener has finished the
queue's messages."""

PauseState = tuple[bool, frozenset[MessageQueue]]
"""The pause state of a push-consumer instance: True if the user has suspended it, and the queues that the user has
paused.

This type is a plain tuple, because the listener's process stores it and cannot import this package.
"""


class PullState(Enum):
    """State of the fetches of a queue: PULLING, or the reason that prevents fetching. If there are several reasons, the
    state is the reason that this class lists first (spec/messaging.md §5.6)."""

    REVOKED = "revoked"
    SUSPENDED = "suspended"
    PAUSED = "paused"
    FORBIDDEN = "forbidden"
    """The queue is not fetched, because the group may not read it: see AssignedQueues.forbidden."""
    STARTING = "starting"
    TOO_MANY_MESSAGES = "too many messages"
    TOO_MANY_BYTES = "too many bytes"
    TOO_WIDE_A_SPAN = "too wide a span"
    PULLING = "pulling"


class ProcessQueues(AssignedQueues[ProcessQueue]):
    """All queues of one push-consumer instance. Not thread-safe."""

    def __init__(self, settings: PushSettings, *, fence_after_s: float = FENCE_AFTER_S) -> None:
        super().__init__(fence_after_s=fence_after_s)
        self._settings = settings
        self._ending: dict[MessageQueue, set[ConsumeTask]] = {}
        """For an orderly consumer: tasks of released or lost queues that are still at the listener, by queue."""
        self._per_topic: Counter[str] = Counter()
        """The number of queues of each topic that this push-consumer instance holds. The flow-control limits of a topic
        are divided among its queues."""
        self._stopping = False
        self._paused: set[MessageQueue] = set()
        """The queues that the user has paused. The instance need not hold these queues."""
        self._suspended = False
        self._listener_away = True
        self.service: ConsumeService = ConsumeOrderly(settings) if settings.orderly else ConsumeConcurrently(settings)

    @property
    def topics(self) -> frozenset[str]:
        """The subscribed topics and the group's retry topic."""
        return frozenset(self._settings.topics)

    def process_queues(self) -> list[ProcessQueue]:
        """Return the process queues of this instance, for reports."""
        return list(self._queues.values())

    # Methods that suspend the instance, pause its queues, and track the state of the listener's process

    @property
    def suspended(self) -> bool:
        """True if the user has suspended fetching and delivery for this consumer instance."""
        return self._suspended

    @property
    def paused(self) -> frozenset[MessageQueue]:
        """The queues that the user has paused. The instance need not hold these queues."""
        return frozenset(self._paused)

    @property
    def listener_away(self) -> bool:
        """True if no message can be delivered now, because the listener's process has ended or was replaced. Delivery
        resumes when the listener's process answers."""
        return self._listener_away

    def suspend(self, suspended: bool) -> None:
        """Stop fetching and delivering the messages of all queues if `suspended` is True; continue if it is
        False."""
        self._suspended = suspended

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching and delivering messages of `queues`. A queue may also be paused if it is not assigned to this
        instance."""
        self._paused.update(queues)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Resume fetching and delivering messages of paused queues."""
        self._paused.difference_update(queues)

    def listener_lost(self) -> None:
        """Deliver no more tasks to the listener until `listener_back` is called, because the listener's process has
        ended or was replaced by a new process."""
        self._listener_away = True

    def listener_back(self, kept: PauseState | None = None) -> None:
        """Resume delivery, because the listener's process answers again.

        `kept`: the pause state that the listener's process has stored, if known; it applies from now on.
        """
        if kept is not None:
            self._suspended, paused = kept
            self._paused.update(paused)
        self._listener_away = False

    # Methods for changes of queue ownership: they stop, release and reset queues

    def stop(self, now_s: float) -> None:
        """Accept no more queues, and revoke the queues that the instance holds."""
        self._stopping = True
        self.revoke(self._queues, now_s)

    def _new_queue(self, queue: MessageQueue, generation: int) -> ProcessQueue:
        return ProcessQueue(queue, generation)

    def _is_wanted(self, queue: MessageQueue) -> bool:
        return not self._stopping or queue in self._queues

    def _may_go(self, assigned: ProcessQueue, now_s: float) -> bool:
        """Return True if a queue may be released: none of its tasks is in flight, and every finished message is
        committed.

        A concurrent consumer waits at most RELEASE_PATIENCE_S for the tasks in flight.
        """
        if assigned.dirty:
            return False
        if assigned.idle and assigned.queue not in self._ending:
            return True
        since_s = now_s if assigned.revoked_at_s is None else assigned.revoked_at_s
        return not self._settings.orderly and now_s - since_s > RELEASE_PATIENCE_S

    def _reset(self, assigned: ProcessQueue, start: QueueOffset) -> None:
        """Drop the messages of a queue, and continue at the offset to which the group was reset.

        A revoked queue stays revoked: its next owner waits until the listener has finished the queue's tasks.
        """
        queue, revoked_at_s = assigned.queue, assigned.revoked_at_s
        self.lose([queue])
        self.started(self._take_up(ProcessQueue(queue, assigned.generation)), start)
        if revoked_at_s is not None:
            self.revoke([queue], revoked_at_s)

    def _take_up(self, assigned: ProcessQueue) -> ProcessQueue:
        self._per_topic[assigned.queue.topic] += 1
        return super()._take_up(assigned)

    def _state_changed(self, assigned: ProcessQueue) -> None:
        """Drop a queue that was released or lost. If the listener later reports about the queue's tasks, the reports
        have no effect.

        If an orderly consumer is granted the queue again, delivery waits until these tasks have ended.
        """
        super()._state_changed(assigned)
        if assigned.dropped:
            self._per_topic[assigned.queue.topic] -= 1
            if assigned.flying and self._settings.orderly:
                self._ending.setdefault(assigned.queue, set()).update(assigned.flying)

    # Methods for fetching messages

    def pull_state(self, process_queue: ProcessQueue) -> PullState:
        """Return PULLING if messages of the queue may be fetched, else the first reason that prevents fetching."""
        settings, share = self._settings, max(1, self._per_topic[process_queue.queue.topic])
        too_many = settings.pull_threshold_for_queue
        if settings.pull_threshold_for_topic > 0:
            too_many = max(1, settings.pull_threshold_for_topic // share)
        too_many_mib = settings.pull_threshold_size_for_queue_mib
        if settings.pull_threshold_size_for_topic_mib > 0:
            too_many_mib = max(1, settings.pull_threshold_size_for_topic_mib // share)
        rows = (
            (process_queue.revoked, PullState.REVOKED),
            (self.suspended, PullState.SUSPENDED),
            (process_queue.queue in self._paused, PullState.PAUSED),
            (process_queue.queue in self._forbidden, PullState.FORBIDDEN),
            (not process_queue.started, PullState.STARTING),
            (process_queue.count > too_many, PullState.TOO_MANY_MESSAGES),
            (process_queue.size_bytes > too_many_mib << 20, PullState.TOO_MANY_BYTES),
            (
                not settings.orderly and process_queue.offsets.span > settings.consume_concurrently_max_span,
                PullState.TOO_WIDE_A_SPAN,
            ),
        )
        return next((state for holds, state in rows if holds), PullState.PULLING)

    def wanted(self, now_s: float) -> dict[MessageQueue, int]:
        """Return the queues from which messages may be fetched at present, each with the next offset to fetch."""
        return {
            queue: process_queue.fetch_offset
            for queue, process_queue in self._queues.items()
            if process_queue.fetch_at_s <= now_s and self.pull_state(process_queue) is PullState.PULLING
        }

    def fetched(
        self, queue: MessageQueue, from_offset: int, records: TaskRecords, next_offset: int, now_s: float
    ) -> None:
        """Add the messages that a fetch from `from_offset` returned. The next fetch starts at `next_offset`.

        Does nothing if the queue was revoked during the fetch, or is now being fetched from another offset.
        """
        process_queue = self._fetched_at(queue, from_offset)
        if process_queue is None:
            return
        if next_offset > from_offset:
            process_queue.fetched(records, next_offset, now_s)
            process_queue.fetch_at_s = now_s + self._settings.pull_interval_ms / 1000 if len(records) else 0.0

    def saw_end(self, queue: MessageQueue, visible_end: int) -> None:
        """Record the visible end offset of a queue, as returned by a fetch."""
        process_queue = self._queues.get(queue)
        if process_queue is not None:
            process_queue.visible_end = visible_end

    def jump(self, queue: MessageQueue, from_offset: int, to_offset: int) -> None:
        """Continue fetching a queue at `to_offset`, because the store does not have `from_offset`.

        A jump to a lower offset waits until every fetched message is finished. Does nothing if the queue was revoked
        during the fetch, or is now being fetched from another offset.
        """
        process_queue = self._fetched_at(queue, from_offset)
        if process_queue is None:
            return
        if to_offset > from_offset or not process_queue.count:
            # Continue to fetch the queue at `to_offset`. Messages that were fetched before this jump are delivered
            # first.
            process_queue.fetch_offset = to_offset
            process_queue.backwards = to_offset < (process_queue.committed or 0)

    def unreadable(self, queue: MessageQueue, offset: int, error: Exception) -> None:
        """Record that the store has lost the queue's next message, which has the offset `offset`. The loss becomes the
        queue's last failure."""
        process_queue = self._queues.get(queue)
        if process_queue is not None:
            process_queue.trouble = f"the message at offset {offset} cannot be read: {error}"

    # Methods for delivering messages to the listener

    def deliverable(self, now_s: float) -> list[ConsumeTask]:
        """Return the tasks to deliver to the listener now, and mark them as in flight."""
        if self._suspended or self._listener_away:
            return []
        ready = [
            process_queue
            for queue, process_queue in self._queues.items()
            if queue not in self._paused and queue not in self._ending and queue not in self._forbidden
        ]
        return self.service.next_tasks(ready, now_s)

    def next_time_s(self) -> float | None:
        """Return the earliest time at which a paused queue may be delivered or fetched again; None if no queue is
        paused."""
        times = [
            time_s
            for process_queue in self._queues.values()
            for time_s in (self.service.next_time_s(process_queue), process_queue.fetch_at_s or None)
            if time_s is not None
        ]
        return min(times, default=None)

    def reported(self, task: ConsumeTask, report: ConsumeReport, now_s: float) -> Reaction:
        """Apply the listener's report about a task. Returns the numbers of consumed and failed messages, and the
        messages to send back to the broker."""
        if report.ended:
            self._ended(task)
        reaction = self.service.reported(task, report, now_s)
        if reaction.ok and task.queue.topic == self._settings.retry_topic:
            # Messages that failed earlier were redelivered through the retry topic, and have now been consumed. So
            # clear the last failure of all queues.
            for process_queue in self._queues.values():
                process_queue.trouble = ""
        return reaction

    def repaired(self, queue: MessageQueue, queue_offset: int, record: MemoryRecords) -> None:
        """Replace the copy of a damaged record, because its storage actor has repaired the record."""
        process_queue = self._queues.get(queue)
        if process_queue is not None:
            self.service.repaired(process_queue, queue_offset, record)

    def died(self, task: ConsumeTask, now_s: float) -> Reaction:
        """Prepare the unfinished messages of a task for redelivery, because the listener's process died while it had
        the task."""
        self._ended(task)
        return self.service.died(task, now_s)

    def sent_back(self, sent: SendBack) -> None:
        """Mark messages as finished after they were sent back and the broker has accepted them."""
        self.service.sent_back(sent)

    def send_back_failed(self, sent: SendBack, now_s: float) -> None:
        """Prepare messages for local redelivery, because they could not be sent back to the broker."""
        self.service.send_back_failed(sent, now_s)

    def _ended(self, task: ConsumeTask) -> None:
        ending = self._ending.get(task.queue)
        if ending is not None:
            ending.discard(task)
            if not ending:
                del self._ending[task.queue]

    # Methods for committing offsets

    def commit_is_urgent(self) -> bool:
        """Return True if offsets must be committed now: a revoked queue waits for the commit, or a crash would
        redeliver many finished messages."""
        limit = max(1, self.service.uncommitted_max // 2)
        return any(
            process_queue.finished_count - process_queue.asked_count >= limit
            or (process_queue.revoked and process_queue.idle and process_queue.dirty)
            for process_queue in self._queues.values()
        )
