"""UnreadableLog counts and logs the messages that a consumer cannot read (raymq.records.format.decode has the
policy)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from raymq.common.errors import BodyUnreadableError
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES

LOG_PAUSE_S: Final = 10.0
"""Minimum time, in seconds, between two log lines of a consumer about unreadable messages. A log line contains the
number of unreadable messages that were not logged since the previous line."""

logger = logging.getLogger(__name__)


class UnreadableLog:
    """Counts and logs the unreadable messages of one consumer of `group`. Thread-safe. `clock` returns monotonic time
    in s."""

    def __init__(self, group: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._group, self._clock = group, clock
        self._lock = threading.Lock()
        """Lock that guards the attributes that `__init__` assigns after it."""
        self.count = 0
        """Number of unreadable messages that were counted so far."""
        self._unlogged = 0
        self._next_s = -float("inf")

    def note(self, error: BodyUnreadableError) -> None:
        """Count one unreadable message. Log it at WARNING, unless another unreadable message was logged within the last
        LOG_PAUSE_S seconds."""
        CLIENT_FIGURES.unreadable(error.queue.partition("@")[0], self._group, 1)
        with self._lock:
            self.count += 1
            now_s = self._clock()
            if now_s < self._next_s:
                self._unlogged += 1
                return
            unlogged, self._unlogged, self._next_s = self._unlogged, 0, now_s + LOG_PAUSE_S
        more = f" (and skipped {unlogged} before it)" if unlogged else ""
        logger.warning("group %s skips an unreadable message%s: %s", self._group, more, error)
