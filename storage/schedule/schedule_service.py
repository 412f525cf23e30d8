"""Starts and stops the delivery of delayed messages (RocketMQ's ScheduleMessageService); the scheduler does the work.

This module decides when a store delivers; storage.schedule.scheduler decides what it delivers. Only a master may
deliver: otherwise two stores would deliver the same message. After an internal error the scheduler pauses for 10 s, as
RocketMQ's does (spec/storage.md §12).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.store import DelayedInStore, ScheduleStatus
from storage.append.appender import Appender
from storage.append.write_gate import WriteGate
from storage.dispatch.delivery_progress import Delivery, Source
from storage.files.age_marks import AgeMarks
from storage.parts import StoreParts
from storage.schedule.clock_steps import ClockSteps
from storage.schedule.delay_queue_reader import DelayQueueReader
from storage.schedule.scheduler import Scheduler
from storage.schedule.waiting import WAITING_LIMIT_MAX, waiting
from storage.stats import PutKind, StoreStats

FAULT_PAUSE_S: Final = 10.0
SCHEDULE_STOP_TIMEOUT_S: Final = 60.0

logger = logging.getLogger(__name__)


class ScheduleService:
    """Delivers one store's delayed messages. Thread-safe. Nothing is delivered before `start_delivery`."""

    def __init__(
        self,
        parts: StoreParts,
        gate: WriteGate,
        appender: Appender,
        stats: StoreStats,
        ages: AgeMarks | None,
        clock_ms: Callable[[], int],
    ) -> None:
        """Create the ScheduleService of one store, which delivers the store's delayed messages. It stores due messages
        through `gate` and `appender`, and counts them in `stats`.

        `ages` detects steps of the store's clock `clock_ms`. If `ages` is None, nobody sets this clock.
        """
        self._parts, self._gate, self._appender, self._stats = parts, gate, appender, stats
        self._ages, self._clock_ms = ages, clock_ms
        # This lock is held while delivery starts or stops, but not while waiting for the delivery thread to end.
        self._lock = threading.Lock()
        # The thread that delivers due delayed messages; None while delivery is stopped. A closed store keeps its last
        # thread, for `status`.
        self._thread: DeliveryThread | None = None
        self._closed = False

    def start_delivery(self) -> None:
        """Deliver delayed messages until `stop_delivery` or `close`. Only a master may call this method. Idempotent.

        Raises ServiceNotAvailableError if the store is closed.
        """
        with self._lock:
            if self._closed:
                raise ServiceNotAvailableError(f"the store {self._parts.settings.store_path_root_dir} is closed")
            if self._thread is None:
                self._thread = DeliveryThread(self.new_scheduler())

    def stop_delivery(self) -> None:
        """Stop delivering delayed messages, because this store is no longer a master. Idempotent.

        When this call returns, no append of delayed messages is in progress.
        """
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def close(self) -> None:
        """Stop the delivery of delayed messages permanently. Idempotent."""
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None:
            thread.close()

    def status(self) -> ScheduleStatus | None:
        """Return the status of the scheduler's last round, with the numbers of waiting messages; None while delivery is
        stopped."""
        thread = self._thread
        return None if thread is None else thread.scheduler.status()

    def waiting(self, begin_ms: int, end_ms: int, limit: int) -> DelayedInStore:
        """Count the waiting delayed messages, and return the first `limit` messages that are due in [`begin_ms`,
        `end_ms`).

        See storage.schedule.waiting. Raises InvalidArgumentError if `limit` is out of its bounds.
        """
        if not 1 <= limit <= WAITING_LIMIT_MAX:
            raise InvalidArgumentError(f"limit must be 1 to {WAITING_LIMIT_MAX} messages, not {limit}")
        return waiting(DelayQueueReader(self._parts, self._appender), begin_ms, end_ms, limit)

    def new_scheduler(self) -> Scheduler:
        """Create a scheduler that continues from the store's delivery progress. Only one scheduler may run at a
        time."""
        reader = DelayQueueReader(self._parts, self._appender)
        return Scheduler(reader, self._store_deliveries, self._parts.settings.delay_levels_ms, self._clock_steps())

    def _clock_steps(self) -> ClockSteps:
        ages = self._ages
        if ages is None:
            return ClockSteps(self._clock_ms)
        with self._parts.append_lock:
            newest_ms, log_end = self._appender.last_store_timestamp_ms, self._parts.log.end_offset
        since_ms = ages.since_ms(log_end)
        return ClockSteps(ages.now_ms, None if since_ms is None or newest_ms <= 0 else newest_ms + since_ms)

    def _store_deliveries(self, source: Source, deliveries: Sequence[Delivery]) -> None:
        """Store due messages that waited in the delay queue `source`. Raises the errors of
        `AppendService.append`."""
        start_s = time.monotonic()
        _, end_offset = self._gate.write(partial(self._appender.deliver, source, deliveries))
        self._gate.wait_durable(end_offset)
        took_s = time.monotonic() - start_s
        self._stats.count_puts([(item.topic, 1, len(item.record)) for item in deliveries], took_s, PutKind.DELAY)


class DeliveryThread:
    """Thread that runs the rounds of `scheduler`, from its construction until `close`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raymq-schedule", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the delivery thread after its current append. Idempotent."""
        self._stop.set()
        self.scheduler.stop()
        self._thread.join(SCHEDULE_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                pause_s = self.scheduler.round()
            except Exception:  # catch every error: an internal error must not end delivery permanently
                logger.exception("the scheduler of delayed messages failed and retries in %g s", FAULT_PAUSE_S)
                pause_s = FAULT_PAUSE_S
            self._stop.wait(pause_s)
