"""The thread that commits a transient store pool: from its buffers to the log's files (spec/storage.md §6).

It is woken once so much was appended that a commit is worth it, and commits whatever there is in an interval. Consumers
and other replicas see nothing before that, so it is this thread that tells of what is stored.

A commit that fails ends the service, as a flush that fails ends that one: what is in the files is unknown then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from raymq.config.store import StoreSettings
from storage.files.disk import PAGE_BYTES
from storage.log.commit_log import CommitLog
from storage.log.flush_service import FLUSH_STOP_TIMEOUT_S

logger = logging.getLogger(__name__)


class CommitService:
    """The commit thread of one commit log that has a pool.

    `on_committed(end)` is called in that thread after each commit, and in `close`; `on_failed(error)` once, if a commit
    fails. With `at_once` each append wakes the thread, however small: somebody waits for it.
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
        self._interval_s = settings.commit_interval_commit_log_ms / 1000
        self._thorough_interval_s = settings.commit_commit_log_thorough_interval_ms / 1000
        self._least_bytes = 0 if at_once else settings.commit_commit_log_least_pages * PAGE_BYTES
        self._wake = threading.Event()
        self._stopping = self._failed = False
        self._thread = threading.Thread(target=self._run, name="raymq-commit", daemon=True)
        self._thread.start()

    def appended(self) -> None:
        """Something was appended, or written past the pool. Called under the append lock."""
        if not self._wake.is_set() and self._is_worth_it():
            self._wake.set()

    def _is_worth_it(self) -> bool:
        """Whether there is enough to commit, or something that is committed has to be told."""
        pending = self._commit_log.end_offset - self._commit_log.committed_offset
        return pending <= 0 or pending >= self._least_bytes

    def close(self) -> None:
        """Stop the thread, and commit what is left unless a commit has failed. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join(FLUSH_STOP_TIMEOUT_S)
        if not self._failed and not self._thread.is_alive():
            self._commit()

    def _run(self) -> None:
        last_commit_s = time.monotonic()
        while True:
            woken = self._wake.wait(self._interval_s)
            self._wake.clear()
            if self._stopping:
                return
            # Asked again: what was appended during the last commit had this thread woken for what that one took.
            worth_it = woken and self._is_worth_it()
            if worth_it or time.monotonic() - last_commit_s >= self._thorough_interval_s:
                self._commit()
                last_commit_s = time.monotonic()
            if self._failed:
                return

    def _commit(self) -> None:
        try:
            end_offset = self._commit_log.commit()
        except OSError as error:
            logger.error("committing to %s failed: %s", self._commit_log.paths, error)
            self._failed = True
            self._on_failed(error)
        else:
            self._on_committed(end_offset)
