"""The thread that commits the transient store pool: it writes the pool's buffers to the log's files (spec/storage.md
§6).

An append wakes the thread when enough bytes are buffered. Otherwise the thread commits at intervals. Consumers and
other replicas see only committed bytes, so this thread reports up to which offset the log is stored.

A failed commit stops the thread, because the content of the files is then unknown. In the same way, a failed flush
stops the flush thread (flush_service.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from raymq.common.config.store import StoreSettings
from storage.files.disk import PAGE_BYTES
from storage.log.commit_log import CommitLog
from storage.log.flush_service import FLUSH_STOP_TIMEOUT_S

logger = logging.getLogger(__name__)


class CommitService:
    """The commit thread of one commit log that has a transient store pool.

    The thread calls `on_committed(end)` after each commit, and `close` does so after the last commit.
    `on_failed(error)` is called once, if a commit fails. With `at_once` each append wakes the thread, even for few
    bytes, because a caller waits for the commit.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        settings: StoreSettings,
        *,
        on_committed: Callable[[int], None],
        on_failed: Callable[[OSError], None],
        at_once: bool,
    ) -> None:
        self._commit_log = commit_log
        self._on_committed, self._on_failed = on_committed, on_failed
        self._settings = settings
        self._least_bytes = 0 if at_once else settings.commit_commit_log_least_pages * PAGE_BYTES
        self._wake = threading.Event()
        self._stopping = self._failed = False
        self._thread = threading.Thread(target=self._run, name="raymq-commit", daemon=True)
        self._thread.start()

    def appended(self) -> None:
        """Wake the commit thread after an append, if enough bytes are buffered or if bytes were written directly to the
        log files. Called under the append lock."""
        if not self._wake.is_set() and self._is_worth_it():
            self._wake.set()

    def _is_worth_it(self) -> bool:
        """Return True if the commit thread has something to do. Either enough bytes are buffered for a commit; or no
        bytes are buffered, so the log files are complete, but `on_committed` may not have been called yet for their
        end."""
        pending = self._commit_log.end_offset - self._commit_log.committed_offset
        return pending <= 0 or pending >= self._least_bytes

    def close(self) -> None:
        """Stop the commit thread, and commit the bytes that are still uncommitted, unless a commit has failed.
        Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join(FLUSH_STOP_TIMEOUT_S)
        if not self._failed and not self._thread.is_alive():
            self._commit()

    def _run(self) -> None:
        last_commit_s = time.monotonic()
        while True:
            woken = self._wake.wait(self._settings.commit_interval_commit_log_ms / 1000)
            self._wake.clear()
            if self._stopping:
                return
            # Decide anew if a commit is worthwhile: the last commit may already have written the bytes of the append
            # that woke this thread.
            worth_it = woken and self._is_worth_it()
            thorough_s = self._settings.commit_commit_log_thorough_interval_ms / 1000
            if worth_it or time.monotonic() - last_commit_s >= thorough_s:
                self._commit()
                last_commit_s = time.monotonic()
            if self._failed:
                return

    def _commit(self) -> None:
        try:
            end_offset = self._commit_log.commit()
        except OSError as error:
            logger.error("committing to the log in %s failed: %s", self._commit_log.paths, error)
            self._failed = True
            self._on_failed(error)
        else:
            self._on_committed(end_offset)
