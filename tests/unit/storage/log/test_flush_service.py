"""Tests of group commit: one flush serves many waiting callers. A caller continues only after the flush is on disk and
all observers were notified."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.log.flush_service import FlushService
from tests.support.clients.fakes import WAIT_S
from tests.support.stores.stores import small_settings


class Log:
    """Fake commit log: a flush makes all written bytes durable at once."""

    paths = ("log",)

    def __init__(self) -> None:
        self.end_offset = self.flushed_offset = 0

    def flush(self) -> int:
        self.flushed_offset = self.end_offset
        return self.end_offset


def test_waiters_continue_only_after_the_stores_flush_callback(tmp_path: Path) -> None:
    log, told, tell = Log(), threading.Event(), threading.Event()

    def on_flushed(end_offset: int) -> None:
        told.set()
        tell.wait(WAIT_S)

    service = FlushService(log, small_settings(tmp_path), on_flushed=on_flushed, on_failed=lambda error: None)
    log.end_offset = 100
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(service.wait_for, 100, WAIT_S)
        assert told.wait(WAIT_S)
        assert log.flushed_offset == 100
        assert not service.wait_for(100, 0.0)
        tell.set()
        assert first.result(WAIT_S)
    assert service.wait_for(100, 0.0)
    service.close()
