"""The scheduler stores delayed messages in their target queues once they are due.

In each round the scheduler visits the delay queues (raymq.common.delay), takes the due messages of each queue
(storage.schedule.delay_queues), and appends them as any producer would. A message that is due in more than a day is
stored again each day until then. So no message keeps old log files for longer than about a day after it was last
stored.

The rules are RocketMQ's (spec/storage.md §12). A message that cannot be read, or whose target is the half topic, is
given up and logged. If the store refuses to append a message, the scheduler tries again after 100 ms. Unlike in
RocketMQ, a message that was stored but did not reach the disk in time is not appended again.

The scheduler itself holds no state that must survive: storage.dispatch.delivery_progress stores the delivery progress.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from raymq.common.delay import (
    TIMER_RECALL_QUEUE,
    TIMER_ROLL_MS,
    TIMER_ROLL_QUEUE,
    TIMER_TOPIC,
    delivery_producer_id,
    level_delay_ms,
    timer_queue,
    timer_queue_hours,
)
from raymq.common.errors import IllegalNameError, MessageIllegalError, RaymqError
from raymq.common.names import HALF_TOPIC, SCHEDULE_TOPIC
from raymq.common.protocol.recall import RECALLED_TOPIC
from raymq.common.protocol.store import QueuePosition, RepairState, ScheduleStatus
from raymq.records.format.check import check_record
from raymq.records.format.encode import ProducerSequence
from raymq.records.format.hashing import tags_code
from raymq.records.format.layout import RecordError
from raymq.records.format.rewrite import WaitingRecord, move_record, read_waiting
from raymq.records.kernels.moved_records import MovedRecord, move_waiting_records
from storage.dispatch.delivery_progress import Delivery, Source
from storage.schedule.clock_steps import ClockSteps
from storage.schedule.delay_queue_reader import DelayQueueReader
from storage.schedule.delay_queues import DelayQueueBounds, Due, LevelQueue, TimerQueue
from storage.schedule.recalls import RECALLS, RecallTable, read_recall

DELIVERY_POLL_MS: Final = 100
DELIVERY_RETRY_MS: Final = 100
MENDING_WAIT_S: Final = 15.0
"""Maximum time in seconds that a delay queue waits for the repair of a damaged record from another replica."""
MENDING_PAUSE_S: Final = 45.0
"""Time in seconds after a wait without success in which a delay queue waits for no other repair."""
MENDED_KEPT_S: Final = 600.0
"""Time in seconds for which the scheduler knows since when it waits for the repair of a record."""
DELIVERY_CHUNK_MESSAGES: Final = 256
DELIVERY_CHUNK_BYTES: Final = 1 << 20
LOW_INTERVAL_MS: Final = 1000

_UNREADABLE: Final = (RecordError, MessageIllegalError, IllegalNameError)

logger = logging.getLogger(__name__)


class Scheduler:
    """Delivers the due delayed messages of one store. One thread calls `round` repeatedly; any thread may call
    `status`."""

    def __init__(
        self,
        reader: DelayQueueReader,
        store: Callable[[Source, Sequence[Delivery]], None],
        levels_ms: tuple[int, ...],
        steps: ClockSteps,
    ) -> None:
        self._reader = reader
        self._steps = steps
        self._store = store
        self._levels_ms = levels_ms
        # `_queues`: the delay queues that the scheduler has found so far. `_bounds`: the first and the end offset of
        # each of these queues, as of the scheduler's last round.
        self._queues: dict[Source, LevelQueue | TimerQueue] = {}
        self._bounds: dict[Source, DelayQueueBounds] = {}
        # For each delay queue whose last append was refused: the time in ms at which the scheduler retries it.
        self._retry_at_ms: dict[Source, int] = {}
        # Time in ms at which the scheduler last recorded the lowest waiting offset of each timer queue.
        self._low_at_ms = 0
        # In the scheduler's last round: the longest time in ms that a message waited beyond its due time.
        self._late_ms = 0
        # The number of due messages that the last round tried to deliver.
        self._due = 0
        self._round_ms = 0
        # Numbers of delivered, given up and recalled messages since the scheduler was created.
        self._delivered = self._given_up = self._recalled = 0
        self._recalls = RecallTable(reader)
        # For each damaged record (topic, queue id, queue offset) for whose repair the scheduler waits: since when.
        self._mending_since_s: dict[tuple[str, int, int], float] = {}
        # For each delay queue in which a message was given up after such a wait: the time of the last one.
        self._gave_up_s: dict[Source, float] = {}
        self._stopping = False

    def stop(self) -> None:
        """End the scheduler's current round after the append that is in progress."""
        self._stopping = True

    def status(self) -> ScheduleStatus:
        """Return the number of delayed messages that waited for delivery after the last round, and the counters of the
        scheduler."""
        pending: dict[str, int] = {}
        by_hour: dict[int, int] = {}
        for (topic, queue_id), queue in self._queues.copy().items():
            if (topic, queue_id) == RECALLS:
                continue
            count = queue.pending(self._bounds[topic, queue_id])
            name = f"level {queue_id + 1}" if topic == SCHEDULE_TOPIC else "deliver_at"
            if count:
                pending[name] = pending.get(name, 0) + count
                # messages of a timer queue are due within a day; later messages are in the roll queue
                if isinstance(queue, TimerQueue):
                    by_hour[timer_queue_hours(queue_id, self._round_ms)] = count
        figures = self._delivered, self._given_up, self._recalled, self._due, by_hour
        return ScheduleStatus(pending, self._late_ms, *figures)

    def round(self) -> float:
        """Run one round: deliver the first due messages of each delay queue, up to a limit. Returns the seconds to wait
        before the next round."""
        self._steps.begin()
        now_ms, self._bounds = self._reader.read_bounds()
        self._note_step(now_ms)
        late_ms, wake_ms, settled = 0, now_ms + DELIVERY_POLL_MS, True
        due = 0
        if RECALLS in self._bounds:
            self._recalls.look(self._bounds[RECALLS])
        for source, bounds in self._bounds.items():
            if self._stopping:
                settled = False
                break
            if source == RECALLS:
                continue
            queue = self._queue(source)
            if self._retry_at_ms.get(source, 0) - DELIVERY_RETRY_MS <= now_ms < self._retry_at_ms.get(source, 0):
                settled = False
                continue
            dues = queue.due(bounds, now_ms, DELIVERY_CHUNK_MESSAGES)
            if dues:
                settled = False
                due += len(dues)
                late_ms = max(late_ms, now_ms - dues[0].due_ms)
                wake_ms = now_ms
                if not self._deliver(source, queue, dues, now_ms):
                    self._retry_at_ms[source] = now_ms + DELIVERY_RETRY_MS
                    wake_ms = now_ms + DELIVERY_RETRY_MS
            else:
                wake_ms = min(wake_ms, queue.wake_ms() or wake_ms)
        if settled and RECALLS in self._bounds:
            self._file_recalls_again(self._bounds[RECALLS], now_ms)
        self._late_ms, self._due, self._round_ms = late_ms, due, now_ms
        if not 0 <= now_ms - self._low_at_ms < LOW_INTERVAL_MS:
            self._low_at_ms = now_ms
            for source, queue in self._queues.items():
                if isinstance(queue, TimerQueue):
                    self._reader.raise_low(source, queue.low())
        return max(wake_ms - now_ms, 0) / 1000

    def _note_step(self, now_ms: int) -> None:
        """If the clock was set since the last round, let the messages of each delay level wait for their full
        delay."""
        by_ms = self._steps.step_ms(now_ms)
        if not by_ms:
            return
        logger.warning(
            "the clock of this store was set %s by %.1f s; delay levels keep their durations",
            "forward" if by_ms > 0 else "back",
            abs(by_ms) / 1000,
        )
        for source, bounds in self._bounds.items():
            if source[0] == SCHEDULE_TOPIC:
                queue = self._queue(source)
                assert isinstance(queue, LevelQueue)
                queue.step(bounds.end, by_ms, now_ms)

    def _queue(self, source: Source) -> LevelQueue | TimerQueue:
        queue = self._queues.get(source)
        if queue is None:
            topic, queue_id = source
            codes = partial(self._reader.delivery_times, source)
            progress = self._reader.progress(source)
            if topic == SCHEDULE_TOPIC:
                queue = LevelQueue(codes, level_delay_ms(queue_id + 1, self._levels_ms), progress)
            elif queue_id in (TIMER_ROLL_QUEUE, TIMER_RECALL_QUEUE):
                # A message that is moved on early is not delivered early; a message that is moved late could be late.
                queue = LevelQueue(codes, TIMER_ROLL_MS, progress, may_be_early=True)
            else:
                queue = TimerQueue(codes, progress)
            self._queues[source] = queue
        return queue

    def _deliver(self, source: Source, queue: LevelQueue | TimerQueue, dues: list[Due], now_ms: int) -> bool:
        """Store due messages of a delay queue in order. Returns False if the store refused them, so that the scheduler
        must retry them."""
        deliveries: list[Delivery] = []
        done: list[Due] = []
        size = 0
        views = self._reader.read_records(source, [due.queue_offset for due in dues])
        moved = self._move_together(source, dues, views)
        recalled = self._recalls.among(source, dues, views)
        for index, (due, view, record) in enumerate(zip(dues, views, moved, strict=True)):
            if record is None and view is not None and self._waits_for_repair(source, due.queue_offset, view):
                break
            if record is None or index in recalled:
                delivery = self._prepare_delivery(source, due, view, now_ms, recalled=index in recalled)
            else:
                delivery = Delivery(*record, due.epoch, due.queue_offset)
            if delivery is not None:
                deliveries.append(delivery)
                size += len(delivery.record)
            done.append(due)
            if size >= DELIVERY_CHUNK_BYTES:
                break
        try:
            if deliveries:
                self._store(source, deliveries)
        except MessageIllegalError as error:
            if len(done) > 1:
                return all(self._deliver(source, queue, [due], now_ms) for due in done)
            self._log_given_up(source, done[0], error)
            deliveries = []
        except RaymqError as error:
            logger.warning("queue %s:%d: the delivery of delayed messages was refused, retrying: %s", *source, error)
            return False
        if not done:
            return False
        last = done[-1]
        self._reader.advance(source, last.epoch, last.queue_offset)
        queue.done(done)
        cancelled = sum(delivery.topic == RECALLED_TOPIC for delivery in deliveries)
        self._recalled += cancelled
        self._delivered += len(deliveries) - cancelled
        self._given_up += len(done) - len(deliveries)
        return True

    def _waits_for_repair(self, source: Source, queue_offset: int, view: memoryview) -> bool:
        """Return True if the record at an offset of a delay queue is damaged, and may be repaired soon. The scheduler
        waits up to MENDING_WAIT_S for the repair, and then gives the message up."""
        state = self._reader.state_of(QueuePosition(*source, queue_offset))
        # An intact record may have been repaired since it was read. Then it is read again.
        if state is RepairState.LOST or (state is RepairState.INTACT and check_record(view).ok):
            return False
        place, now_s = (*source, queue_offset), time.monotonic()
        self._mending_since_s = {
            one: at_s for one, at_s in self._mending_since_s.items() if now_s < at_s + MENDED_KEPT_S
        }
        if now_s < self._gave_up_s.get(source, -MENDING_PAUSE_S + now_s) + MENDING_PAUSE_S:
            return False
        if now_s < self._mending_since_s.setdefault(place, now_s) + MENDING_WAIT_S:
            return True
        self._gave_up_s[source] = now_s
        return False

    def _move_together(
        self, source: Source, dues: Sequence[Due], views: Sequence[memoryview | None]
    ) -> list[MovedRecord | None]:
        """Build the records of due messages for their target queues. The list contains None for each message that must
        be handled individually."""
        here = [view for view in views if view is not None]
        if len(here) < len(views) or source == (TIMER_TOPIC, TIMER_ROLL_QUEUE) or self._reader.store_host_ipv6:
            return [None] * len(views)
        producer_id = delivery_producer_id(*source)
        moved = move_waiting_records(here, [ProducerSequence(producer_id, due.epoch, due.queue_offset) for due in dues])
        return [None if record is None or record.topic == HALF_TOPIC else record for record in moved]

    def _file_recalls_again(self, bounds: DelayQueueBounds, now_ms: int) -> None:
        """Store again the recalls that are a day old and whose messages are not due yet. Drop the other recalls that
        are a day old.

        Called when no due message waits in a timer queue.
        """
        queue = self._queue(RECALLS)
        dues = queue.due(bounds, now_ms, DELIVERY_CHUNK_MESSAGES)
        views = self._reader.read_records(RECALLS, [due.queue_offset for due in dues]) if dues else []
        recalls = [read_recall(view) for view in views]
        deliveries = []
        for due, view, recall in zip(dues, views, recalls, strict=True):
            if recall is not None and recall.deliver_at_ms > now_ms:
                delivery = self._prepare_delivery(RECALLS, due, view, now_ms)
                deliveries += [] if delivery is None else [delivery]
        if not dues:
            return
        try:
            if deliveries:
                self._store(RECALLS, deliveries)
        except RaymqError as error:
            logger.warning("queue %s:%d: storing recalls again was refused, retrying: %s", *RECALLS, error)
            return
        self._reader.advance(RECALLS, 0, dues[-1].queue_offset)
        queue.done(dues)
        for recall in recalls:
            if recall is not None and recall.deliver_at_ms <= now_ms:
                self._recalls.forget(recall)

    def _prepare_delivery(
        self, source: Source, due: Due, view: memoryview | None, now_ms: int, *, recalled: bool = False
    ) -> Delivery | None:
        """Build the delivery of a delayed message, whose record is `view`, to its next queue or to the topic of
        recalled messages.

        Returns None, and logs the reason, if the record is missing or the scheduler gives the message up.
        """
        if view is None:
            logger.warning(
                "queue %s:%d: the delayed message at offset %d is missing and cannot be delivered",
                *source,
                due.queue_offset,
            )
            return None
        producer = ProducerSequence(delivery_producer_id(*source), due.epoch, due.queue_offset)
        try:
            record = read_waiting(view)
            topic, queue_id, code = _next_queue(source, record, now_ms)
            if recalled:
                topic, queue_id, code = RECALLED_TOPIC, 0, tags_code(record.tags)
            if topic == HALF_TOPIC:
                raise RecordError(
                    "the message's target is the topic of half messages, to which only the store may write"
                )
            data = move_record(record, topic, queue_id, producer=producer, store_host_ipv6=self._reader.store_host_ipv6)
        except _UNREADABLE as error:
            self._log_given_up(source, due, error)
            return None
        return Delivery(topic, queue_id, data, code, due.epoch, due.queue_offset)

    def _log_given_up(self, source: Source, due: Due, error: Exception) -> None:
        logger.error(
            "queue %s:%d: the delayed message at offset %d cannot be delivered: %s", *source, due.queue_offset, error
        )


def _next_queue(source: Source, record: WaitingRecord, now_ms: int) -> tuple[str, int, int]:
    """Return the topic and queue id of the queue into which a delayed message is put next: its target queue or a timer
    queue. Also return the number for the message's entry in that queue: the due time in ms in a timer queue, otherwise
    the tags code."""
    if source == RECALLS:
        return TIMER_TOPIC, TIMER_RECALL_QUEUE, 0
    if source == (TIMER_TOPIC, TIMER_ROLL_QUEUE) and (record.deliver_at_ms or 0) > now_ms:
        deliver_at_ms = record.deliver_at_ms or 0
        return TIMER_TOPIC, timer_queue(deliver_at_ms, now_ms), deliver_at_ms
    return record.real_topic, record.real_queue_id, tags_code(record.tags)
