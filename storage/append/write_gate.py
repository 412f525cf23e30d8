"""The write gate of a store: admits one writer at a time while writing is allowed, and tracks how much data is durable.

This module decides the order of writers, when a write is refused, and who requests a flush. durability.py decides how
long an append waits for the flush. A disk failure closes the gate until the store is reopened: the content of the disk
is then unknown, so nothing may be acknowledged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from raymq.common.config.store import FlushDiskType
from raymq.common.errors import ServiceNotAvailableError, StoreError, StoreFailedError, SystemBusyError
from storage.append.durability import AppendProgress
from storage.append.put_check import StoreState, refuse_store
from storage.log.commit_service import CommitService
from storage.log.flush_service import FlushService
from storage.parts import StoreParts
from storage.read.long_polls import LongPolls
from storage.running_flags import AGAINST_APPENDS, RunningFlag, RunningFlags

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WriteGate:
    """The write gate of one store, with the threads that flush and commit the store's log. Thread-safe."""

    def __init__(
        self, parts: StoreParts, flags: RunningFlags, polls: LongPolls, on_stored: Callable[[int], None] | None = None
    ) -> None:
        """Start the flush and commit threads.

        `on_stored` is called with the log offset up to which all data is as durable as the settings promise.
        `on_stored` then decides what consumers see, by calling `show`. If `on_stored` is None, consumers see all of
        that data at once. The flush thread calls `on_stored`. With ASYNC_FLUSH the writer calls it under the append
        lock; with a transient store pool, the commit thread calls it.
        """
        settings = parts.settings
        self._root = settings.store_path_root_dir
        self._log, self._visibility, self._append_lock = parts.log, parts.visibility, parts.append_lock
        # The store's running flags, which may forbid writes to the store, and the long polls that wait for new
        # messages.
        self._flags, self._polls = flags, polls
        # True if a write counts as durable only after a flush; False if a write counts as durable as soon as it is in
        # the files.
        self.is_sync = settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        # Settings that may change while the store is open are read from the store's settings object at each use, and
        # never copied.
        self._settings = settings
        # With ASYNC_FLUSH and without a transient store pool, consumers may see everything that is written.
        written_is_stored = not self.is_sync and not parts.log.has_pool
        self._on_stored = on_stored or (self._show_all if written_is_stored else self.show)
        # The time at which the current writer got the append lock (time.monotonic); 0 if no writer holds the lock.
        self._entered_s = 0.0
        # True once the store is closing. The store sets this flag under the append lock.
        self.closed = False
        # Error text of the disk failure, which is final; empty if the disk has not failed.
        self.failure = ""
        # Called once if the disk fails, by the thread that detects the failure, after this thread has set `failure`.
        # The function must not block.
        self.on_failure: Callable[[], None] | None = None
        # A function that each writer calls after it has written something and has released the append lock. It must not
        # block.
        self.on_written: Callable[[], None] | None = None
        # Notifies waiting appends after each flush, and after a disk failure.
        self.progress = AppendProgress()
        self._flush = FlushService(
            parts.log,
            settings,
            on_flushed=self._on_flushed,
            # With SYNC_FLUSH the flush thread notifies waiting appends by `on_progress`, so `on_failed` need not notify
            # them.
            on_failed=self._fail_quietly if self.is_sync else self.fail,
            on_progress=self.progress.notify if self.is_sync else lambda: None,
        )
        self._commit: CommitService | None = None
        if parts.log.has_pool:
            # If `on_stored` is set, appends wait for other replicas, which get only committed data. So commit at once:
            # a late commit would delay the appends.
            self._commit = CommitService(
                parts.log,
                settings,
                on_committed=self._on_stored,
                on_failed=self.fail,
                at_once=on_stored is not None,
            )

    @property
    def timeout_s(self) -> float:
        """Default timeout, in seconds, of an append: the wait for the append lock and the wait for the flush
        together."""
        return self._settings.sync_flush_timeout_ms / 1000

    @property
    def is_disk_critical(self) -> bool:
        """True if the disk is too full for log chunks from the master that contain messages."""
        return self._flags.any_set and bool(self._flags.bits & RunningFlag.DISK_CRITICAL)

    @property
    def stored_offset(self) -> int:
        """The log offset up to which all data is as durable as the settings promise."""
        return self._log.flushed_offset if self.is_sync else self._log.committed_offset

    def write(
        self, write: Callable[[], T], timeout_s: float | None = None, against: RunningFlag = AGAINST_APPENDS
    ) -> tuple[T, int]:
        """Call `write` under the append lock and, with SYNC_FLUSH, request a flush without waiting for the flush.

        Returns the result of `write`, and the end of the log after the write (for `is_durable`, `wait_durable`).
        `timeout_s` (default: sync_flush_timeout_ms) limits the wait for the lock. `against`: the flags that forbid this
        write.

        Errors raised before anything is written: SystemBusyError if the lock takes too long, ServiceNotAvailableError
        if the store is closed, and StoreNotWritableError if the store must not be written. Raises StoreFailedError if
        the disk failed during the write: it is unknown what is stored.
        """
        if not self._append_lock.acquire(blocking=False):
            self._wait_for_turn(timeout_s, against)
        try:
            if self.closed or self.failure or self._flags.any_set:
                self.require_writable(against)
            self._entered_s = time.monotonic()
            try:
                result = write()
            except OSError as error:
                self.fail(error)
                raise self._outcome_unknown() from error
            end_offset = self._log.end_offset
            for queue in self._visibility.take_late():
                self._polls.wake_queue(queue.key)
            if self._commit is not None:
                self._commit.appended()
            elif not self.is_sync:
                self._on_stored(end_offset)
        finally:
            self._entered_s = 0.0
            self._append_lock.release()
        if self.is_sync:
            self._flush.request(end_offset)
        if self.on_written is not None:
            self.on_written()
        return result, end_offset

    def _wait_for_turn(self, timeout_s: float | None, against: RunningFlag) -> None:
        """Wait until no other writer holds the append lock, and then take the lock.

        Raises SystemBusyError if the wait takes too long, or if the other writer has already held the lock for too
        long. The other errors of `require_writable` are raised without a wait.
        """
        self.require_writable(against)
        queue_wait_ms = self._settings.wait_time_in_send_queue_ms
        wait_s = max(min(self.timeout_s if timeout_s is None else timeout_s, queue_wait_ms / 1000), 0)
        if not self._append_lock.acquire(timeout=wait_s):
            raise SystemBusyError(
                f"the store is busy: other appends held the append lock for {wait_s:g} s "
                f"(wait_time_in_send_queue_ms is {queue_wait_ms}); nothing was stored, send again later"
            )

    def is_durable(self, end_offset: int, *, late: bool) -> bool:
        """Return True if everything before `end_offset` is as durable as the flush setting promises (see `DiskState`).
        With ASYNC_FLUSH, written data counts as durable."""
        if not self.is_sync or self._flush.is_flushed(end_offset):
            return True
        if self._flush.failed or (late and self.failure):
            raise self._outcome_unknown()
        return False

    def wait_durable(self, end_offset: int) -> bool:
        """Wait until everything before `end_offset`, which is already written, is as durable as the settings promise.

        Returns False if the disk takes longer than sync_flush_timeout_ms. Raises StoreFailedError if the disk failed.
        """
        if self.is_sync:
            self._flush.wait_for(end_offset, self.timeout_s)
        return self.is_durable(end_offset, late=True)

    def require_writable(self, against: RunningFlag = AGAINST_APPENDS) -> None:
        """Raise the error of RocketMQ's put checks (put_check.py) if the store does not accept the caller's write now.
        `against`: the running flags that forbid this kind of write."""
        if not (self.closed or self.failure or self._entered_s or self._flags.any_set):
            return
        reason = self._flags.reason_against(against)
        if self.failure:
            reason = f"{self.failure}; the store refuses appends until it is opened again"
        entered_s = self._entered_s
        append_ms = int((time.monotonic() - entered_s) * 1000) if entered_s else 0
        # Refuse other writers if one writer holds the append lock for longer than os_page_cache_busy_timeout_ms.
        busy_ms = self._settings.os_page_cache_busy_timeout_ms
        refused = refuse_store(StoreState(str(self._root), self.closed, reason, append_ms, busy_ms))
        if refused is not None:
            raise refused.error

    def require_open(self) -> None:
        """Raise ServiceNotAvailableError if the store is closed."""
        if self.closed:
            raise ServiceNotAvailableError(f"the store {self._root} is closed")

    def require_readable(self) -> None:
        """Raise ServiceNotAvailableError if the store is closed, or if a running flag forbids reading the
        store."""
        self.require_open()
        if not self._flags.readable:
            raise ServiceNotAvailableError(f"the store {self._root} cannot be read now")

    def wait_flushed(self, end_offset: int) -> bool:
        """Wait until the log is on disk up to `end_offset`. Returns False if the disk takes too long or fails."""
        return self._flush.wait_for(end_offset, self.timeout_s)

    def flush_all(self) -> int:
        """Flush everything written so far, and return the log offset up to which the log is flushed.

        Raises ServiceNotAvailableError if the flush takes longer than sync_flush_timeout_ms, or if the disk failed.
        """
        end_offset = self._log.end_offset
        if not self.wait_flushed(end_offset):
            raise ServiceNotAvailableError(f"the disk of {self._root} is too slow, or has failed; nothing was changed")
        return end_offset

    def call_on_failure(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which is called once the disk has failed, from any thread. If the disk has failed
        already, call it now.

        The callback must not block.
        """
        self.on_failure = callback
        if self.failure:
            callback()

    def fail(self, error: OSError | StoreError) -> None:
        """Close the write gate permanently because the disk failed. After that, no write may be acknowledged."""
        self._fail_quietly(error)
        self.progress.notify()

    def _fail_quietly(self, error: OSError | StoreError) -> None:
        """Close the write gate as `fail` does, but do not notify `progress`: the flush thread does that."""
        if not self.failure:
            self.failure = f"the disk of {self._root} failed: {error}"
            logger.error("%s; the store refuses appends until it is opened again", self.failure)
            if self.on_failure is not None:
                self.on_failure()

    def close(self) -> None:
        """Commit and flush the log for the last time, unless the disk has failed, and stop the flush and commit
        threads. Idempotent."""
        if self._commit is not None:
            self._commit.close()
        self._flush.close()

    def _outcome_unknown(self) -> StoreFailedError:
        return StoreFailedError(f"{self.failure}; this append may or may not be stored")

    def _on_flushed(self, end_offset: int) -> None:
        if self.is_sync:
            self._on_stored(end_offset)

    def show(self, end_offset: int) -> None:
        """Let consumers see the stored messages before `end_offset`, and wake the long polls that wait for these
        messages.

        Only one thread at a time may call this method.
        """
        self._show_all(min(end_offset, self.stored_offset))

    def _show_all(self, end_offset: int) -> None:
        for queue in self._visibility.advance(end_offset):
            self._polls.wake_queue(queue.key)
