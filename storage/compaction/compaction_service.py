"""Compacts the queues of topics whose cleanup.policy is COMPACTION, periodically, in its own thread.

Each replica compacts its own queues. Retention keeps a message in the commit log until the message is in its queue's
compacted log. In a broker group of several replicas, retention keeps more of the log, because a new replica is filled
from the log alone. It keeps the log from the first message that is still the newest of its key. If the disk is nearly
full, retention may delete these log files. The messages stay in the compacted logs that already contain them. No
compacted log contains a damaged record. Retention keeps the log from the damaged record on until the record is
repaired.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from raymq.common.errors import RaymqError
from storage.compaction.compactor import Compactor
from storage.files.age_marks import AgeMarks
from storage.parts import StoreParts
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.topic_attributes import StoredAttributes

BUSY_SHARE: Final = 0.2
"""Maximum fraction of the time in which the compaction thread works while it compacts queues. In the remaining time the
thread sleeps."""
PAUSE_MAX_S: Final = 1.0
COMPACTION_STOP_TIMEOUT_S: Final = 30.0

logger = logging.getLogger(__name__)


class CompactionService:
    """Maintains the compacted logs of one store. Thread-safe."""

    def __init__(self, parts: StoreParts, *, clock_ms: Callable[[], int], ages: AgeMarks, replicated: bool) -> None:
        """Open the compacted logs, and start the compaction thread.

        `ages` tells how old the log's bytes are at least. `replicated`: True if other replicas copy this store's log.
        Raises StoreCorruptError if a compacted log is damaged.
        """
        self._parts, self._clock_ms, self._replicated = parts, clock_ms, replicated
        self._attributes, self._attributes_lock = StoredAttributes(parts.config), threading.Lock()
        # Lock that is held during a whole compaction of all queues, so that only one compaction runs at a time.
        self._run_lock = threading.Lock()
        self._stop = threading.Event()
        # Physical offset up to which consumers have been allowed to see messages since the store was opened. In a store
        # without replicas, consumers may see all messages.
        self._shown_offset = 0 if replicated else sys.maxsize
        self._worked_from_s = time.monotonic()
        self._compactor = Compactor(parts, self.settled_offset, self._pause, ages.old_until)
        for queue in parts.queues.plain:
            self._compactor.load(queue)
        self._thread = threading.Thread(target=self._run, name="raymq-compact", daemon=True)
        self._thread.start()

    def run_once(self, now_ms: int) -> int:
        """Compact each queue as far as possible. Returns the number of compaction passes. Raises OSError or RaymqError
        if a pass fails."""
        passes = 0
        with self._run_lock:
            self._worked_from_s = time.monotonic()
            for queue in self._compacted_queues():
                while not self._stop.is_set() and self._compactor.compact(queue, now_ms):
                    passes += 1
        return passes

    def blank_again(self) -> None:
        """Blank (clear) the consume-queue entries (units) of messages that compaction removed. Recovery rebuilds these
        entries from the log, so they must be blanked after each recovery. Raises OSError if the disk fails."""
        with self._run_lock:
            for queue in self._parts.queues.plain:
                if queue.compacted is not None:
                    self._compactor.blank(queue, queue.compacted)

    def note_shown(self, physical_offset: int) -> None:
        """Record that consumers may see all messages before a physical offset. Every later master has these messages in
        its log."""
        self._shown_offset = max(self._shown_offset, physical_offset)

    def settled_offset(self) -> int:
        """Return the physical offset up to which the log is final: it is on disk, and no change of the master can cut
        it."""
        return min(self._parts.log.flushed_offset, self._shown_offset)

    def held_from(self) -> int:
        """Return the physical offset of the first message that is not yet in its queue's compacted log.

        Returns the log's end if every message is in a compacted log.
        """
        return self._first_physical(lambda queue: 0 if queue.compacted is None else queue.compacted.end_offset)

    def reserved_from(self) -> int:
        """Return the physical offset from which the log must be kept although compaction has copied its messages. New
        replicas are filled from the log, and damaged records can be read only in the log.

        Returns the log's end if no part of the log is needed for this, or if no topic is compacted.
        """
        if self._replicated:
            return self._first_physical(lambda queue: 0)
        start = self._parts.log.end_offset
        for queue in self._compacted_queues():
            damaged = () if queue.compacted is None else queue.compacted.damaged_offsets()
            for offset in [offset for offset in damaged if offset >= queue.min_offset][:1]:
                [unit] = queue.units(offset, 1)
                start = min(start, int(unit["physical_offset"]))
        return start

    def close(self) -> None:
        """Stop the compaction thread, and abort a compaction pass in progress. Idempotent."""
        self._stop.set()
        self._thread.join(COMPACTION_STOP_TIMEOUT_S)

    def _compacted_queues(self) -> list[ConsumeQueue]:
        with self._attributes_lock:
            topics = {topic for topic, values in self._attributes.read().items() if values.is_compacted}
        return [queue for queue in self._parts.queues.plain if queue.topic in topics] if topics else []

    def _first_physical(self, first_offset: Callable[[ConsumeQueue], int]) -> int:
        start = self._parts.log.end_offset
        for queue in self._compacted_queues():
            for unit in queue.next_unit(max(first_offset(queue), queue.min_offset), queue.next_offset):
                start = min(start, int(unit["physical_offset"]))
        return start

    def _pause(self) -> bool:
        """Sleep, so that the compaction thread works for at most BUSY_SHARE of the time. Returns False once the store
        closes."""
        worked_s = time.monotonic() - self._worked_from_s
        stopped = self._stop.wait(min(worked_s * (1 / BUSY_SHARE - 1), PAUSE_MAX_S))
        self._worked_from_s = time.monotonic()
        return not stopped

    def _run(self) -> None:
        if self._parts.after_crash:
            self._try(self.blank_again)
        while not self._stop.wait(self._parts.settings.compaction_schedule_interval_ms / 1000):
            self._try(lambda: self.run_once(self._clock_ms()))

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (RaymqError, OSError) as error:
            logger.warning("compacting topics failed; the next run retries: %s", error)
