"""Ends the process of a storage actor whose disk has failed, so that Ray starts the process again.

A change of when the process ends belongs here. What a replica does until then is in actors.replica.replica.

After a write or a flush has failed, the kernel may drop what it could not write and report success the next time. So
the open store is not used again. The next process recovers the store from its directory. Recovery writes the end of the
log once more and flushes it, before anything counts as stored.

    the disk fails ─▶ appends that wait get StoreFailedError ─▶ the Controller gets the account ─▶ the process ends
                                                                └── ANSWER_S ──┘
    Ray starts the process ─▶ the store opens, or each call tries again and raises the reason

A process that ends keeps at least RESTART_INTERVAL_S to its start, so a disk that stays broken costs a process in that
time, and no more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

ANSWER_S: Final = 1.0
"""The time from the failure to the end of the process: waiting callers get their answers, the Controller an account."""
RESTART_INTERVAL_S: Final = 15.0
"""The shortest life of a process that ends itself."""
EXIT_CODE: Final = 74
"""EX_IOERR of sysexits.h. Ray takes any exit that nobody asked for as a death, and starts the actor again."""

logger = logging.getLogger(__name__)


def end_delay_s(age_s: float) -> float:
    """The time in s from a failure of the disk to the end of the process, which is `age_s` old."""
    return max(ANSWER_S, RESTART_INTERVAL_S - age_s)


class FailedDisk:
    """Ends this process some time after `note_failure`.

    `end` ends the process; `clock_s` and the wait are for tests.
    """

    def __init__(
        self,
        name: str,
        *,
        end: Callable[[], None] = lambda: os._exit(EXIT_CODE),
        clock_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name, self._end, self._clock_s, self._wait = name, end, clock_s, wait
        self._started_s = clock_s()
        self._lock = threading.Lock()
        self._is_ending = False

    def note_failure(self) -> None:
        """Have the process end. Does not block; any thread may call it, more than once."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        threading.Thread(target=self._end_later, name="raymq-failed-disk", daemon=True).start()

    def _end_later(self) -> None:
        delay_s = end_delay_s(self._clock_s() - self._started_s)
        logger.error(
            "%s: its process ends in %.1f s and is started again, because its disk failed", self._name, delay_s
        )
        self._wait(delay_s)
        logger.error("%s: its process ends now", self._name)
        self._end()
