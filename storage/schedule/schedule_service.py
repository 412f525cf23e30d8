"""The thread in which the scheduler of a master works; what it does is in storage.schedule.scheduler.

Only a master may run it, or a message would be delivered by two stores. After a fault of its own it pauses for 10 s, as
RocketMQ's does (spec/storage.md §12).
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from raymq.protocol.store import ScheduleStatus
from storage.schedule.scheduler import Scheduler

FAULT_PAUSE_S: Final = 10.0
SCHEDULE_STOP_TIMEOUT_S: Final = 60.0

logger = logging.getLogger(__name__)


class ScheduleService:
    """Calls the scheduler's rounds from when it is made until `close`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raymq-schedule", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the append under way. Idempotent."""
        self._stop.set()
        self._scheduler.stop()
        self._thread.join(SCHEDULE_STOP_TIMEOUT_S)

    def status(self) -> ScheduleStatus:
        """What waits, by the last round."""
        return self._scheduler.status()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                pause_s = self._scheduler.round()
            except Exception:  # a fault here must not end delivery for good
                logger.exception("the scheduler pauses for %g s", FAULT_PAUSE_S)
                pause_s = FAULT_PAUSE_S
            self._stop.wait(pause_s)
