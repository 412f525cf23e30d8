"""Group commit: one thread flushes the log, and each flush completes all appends that waited for it.

With SYNC_FLUSH an append requests a flush up to its end and waits. While the disk works, more appends arrive, and the
next flush covers all of them. With ASYNC_FLUSH appends do not wait; the thread flushes at intervals (spec/storage.md
§6).

Bytes stored into the log's maps are flushed by the file's descriptor (disk.flush), like bytes written by `pwrite`. No
caller has to block: `is_flushed` needs no lock, and `on_progress` is called whenever its result may have changed.

A failed flush stops the thread: it is unknown what is on disk, and the kernel may report success for the same pages at
the next flush. The store is notified of the failure, and accepts no more appends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from raymq.common.config.store import StoreSettings
from storage.files.disk import PAGE_BYTES
from storage.log.commit_log import CommitLog

logger = logging.getLogger(__name__)

FLUSH_STOP_TIMEOUT_S: Final = 60.0


class FlushService:
    """The flush thread of one commit log.

    After each flush the thread calls `on_flushed(end)`, before the waiting appends continue. If a flush fails, the
    thread calls `on_failed(error)` once. After either callback it calls `on_progress()`; `is_flushed` and `failed` then
    already have their new values.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        settings: StoreSettings,
        *,
        on_flushed: Callable[[int], None],
        on_failed: Callable[[OSError], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._commit_log = commit_log
        self._on_flushed, self._on_failed, self._on_progress = on_flushed, on_failed, on_progress
        self._settings = settings
        self._changed = threading.Condition()
        self._requested = commit_log.flushed_offset
        """The highest log offset up to which a flush was requested."""
        self._flushed_before: int | None = None
        """The log offset up to which the log was flushed before the current flush began; None while no flush
        runs."""
        self._stopping = False
        self.failed = False
        """True once a flush of the log has failed."""
        self._thread = threading.Thread(target=self._run, name="raymq-flush", daemon=True)
        self._thread.start()

    def request(self, end_offset: int) -> None:
        """Request a flush of the log up to `end_offset`, without waiting for the flush."""
        with self._changed:
            self._requested = max(self._requested, end_offset)
            self._changed.notify_all()

    def is_flushed(self, end_offset: int) -> bool:
        """Return True if the log is on disk up to `end_offset` and the call of `on_flushed` for this offset has
        returned. Any thread may call this method."""
        # Read `flushed_offset` before `_flushed_before`. In this order, a `_flushed_before` of None proves that
        # `on_flushed` has returned for the `flushed_offset` read here, because no flush is running.
        flushed = self._commit_log.flushed_offset
        before = self._flushed_before
        return (flushed if before is None else before) >= end_offset

    def wait_for(self, end_offset: int, timeout_s: float) -> bool:
        """Request a flush of the log up to `end_offset` and wait for it. Returns False after `timeout_s`, or if a flush
        failed."""
        self.request(end_offset)
        with self._changed:
            self._changed.wait_for(lambda: self.failed or self.is_flushed(end_offset), timeout_s)
            return self.is_flushed(end_offset)

    def close(self) -> None:
        """Stop the flush thread, and flush the rest of the log unless a flush has failed. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(FLUSH_STOP_TIMEOUT_S)
        if not self.failed and not self._thread.is_alive():
            self._flush()

    def _run(self) -> None:
        last_flush_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._settings.flush_interval_commit_log_ms / 1000)
                if self._stopping or self.failed:
                    return
            dirty = self._commit_log.end_offset - self._commit_log.flushed_offset
            thorough_s = self._settings.flush_commit_log_thorough_interval_ms / 1000
            thorough = time.monotonic() - last_flush_s >= thorough_s
            least_bytes = self._settings.flush_commit_log_least_pages * PAGE_BYTES
            if self._has_work() or (dirty and (thorough or dirty >= least_bytes)):
                self._flush()
                last_flush_s = time.monotonic()

    def _has_work(self) -> bool:
        return self._stopping or self._requested > self._commit_log.flushed_offset

    def _flush(self) -> None:
        with self._changed:
            self._flushed_before = self._commit_log.flushed_offset
        try:
            end_offset = self._commit_log.flush()
        except OSError as error:
            logger.error("flushing the log in %s failed: %s", self._commit_log.paths, error)
            self._on_failed(error)
            self.failed = True
        else:
            self._on_flushed(end_offset)
        with self._changed:
            self._flushed_before = None
            self._changed.notify_all()
        self._on_progress()
