"""The consume queues' way to the disk, and the checkpoint that says how far it went.

A thread of its own, not the log's flush thread: a store with thousands of queues needs a flush for each, and nobody who
waits for the log should wait for those.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

QUEUE_FLUSH_STOP_TIMEOUT_S: Final = 60.0


class QueueFlushService:
    """Calls `flush` in its thread every `interval_s`. After an OSError it calls `on_failed` once and stops."""

    def __init__(self, interval_s: float, *, flush: Callable[[], None], on_failed: Callable[[OSError], None]) -> None:
        self._interval_s = interval_s
        self._flush, self._on_failed = flush, on_failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raymq-queue-flush", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; idempotent. What is dirty stays dirty."""
        self._stop.set()
        self._thread.join(QUEUE_FLUSH_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._flush()
            except OSError as error:
                logger.error("flushing the consume queues failed: %s", error)
                self._on_failed(error)
                return
