"""Tests of failing disk calls: every disk call fails once, or fails permanently from then on, while a store opens,
works, closes and opens again. No acknowledged message is lost."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import storage.index.index_service
import storage.log.log_writer
from raymq.common.config.store import FlushDiskType
from raymq.common.errors import ServiceNotAvailableError, StoreError, StoreNotWritableError
from raymq.common.message import SendStatus
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.stores.failing_disk import KINDS, FailingDisk
from tests.support.stores.stores import bodies_of, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

FILES = {
    "mapped_file_size_commit_log_bytes": 4096,
    "mapped_file_size_consume_queue_bytes": 100,
    "flush_interval_consume_queue_ms": 60_000,
}

WAYS: dict[str, dict[str, Any]] = {
    "maps": {},
    "maps, pages ahead": {"flush_disk_type": FlushDiskType.ASYNC_FLUSH},
    "pwrite": {},
}
"""The methods by which appends write to files, each with the store settings that select it."""
CASES = [*((kind, "maps") for kind in KINDS), ("pwrite_all", "maps, pages ahead"), ("pwrite_all", "pwrite")]
"""Pairs of a failing disk call and a write method. Only `pwrite_all` is tested with several write methods, because only
writes depend on the write method."""

POOL = {
    "flush_disk_type": FlushDiskType.ASYNC_FLUSH,
    "transient_store_pool_enable": True,
    "commit_interval_commit_log_ms": 20,
    "commit_commit_log_thorough_interval_ms": 20,
}


@dataclass
class Script:
    """The steps that a test runs with a store on a failing disk: open, write configuration, append beyond the ends of
    files, delete a topic, close, open again."""

    root: Path
    disk: FailingDisk
    changes: dict[str, Any]
    acknowledged: int = 0
    sent: int = 0
    texts: set[str | None] = field(default_factory=lambda: {None})
    deleted: bool = False
    store: MessageStore | None = None
    failed_before: int = 0

    def run(self) -> None:
        for _ in range(2):
            try:
                self.open()
            except StoreError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                return
            self.write_config()
            for step in range(6):
                self.append()
                if step == 3:
                    self.delete_topic()
                    self.flush_queues()
            self.flush_queues()
            self.store.close()

    def open(self) -> None:
        self.store = open_store(self.root, **FILES, **self.changes)
        self.failed_before = len(self.disk.failed)

    def append(self) -> None:
        assert self.store is not None
        batch = make_batch([b"%d" % self.acknowledged + b"." * 900], producer=("p", 0, self.acknowledged))
        # `sent` is set, not increased: a batch that the store has refused is sent again with the same sequence number.
        self.sent = self.acknowledged + 1
        broken = self.disk.kind == "flush" and any(
            "/commitlog/" in path for path in self.disk.failed[self.failed_before :]
        )
        try:
            [result] = self.store.append([batch])
        except StoreNotWritableError:
            pass
        else:
            assert result.status is SendStatus.SEND_OK
            assert not broken, "acknowledged after a failed flush of the log"
            self.acknowledged += 1
        self.check_reading()

    def check_reading(self) -> None:
        assert self.store is not None
        bodies = bodies_of(self.store)
        assert [body.rstrip(b".") for body in bodies] == [b"%d" % index for index in range(len(bodies))]
        assert self.acknowledged <= len(bodies) <= self.sent

    def delete_topic(self) -> None:
        assert self.store is not None
        self.deleted = False
        try:
            self.store.append([make_batch([b"passing"], topic="passing")])
            self.store.topics.delete("passing")
            self.deleted = True
        except StoreNotWritableError:
            pass

    def write_config(self) -> None:
        assert self.store is not None
        text = f"[{len(self.texts)}]"
        try:
            self.store.write_config("topics.json", text)
        except StoreNotWritableError:
            self.texts.add(text)  # after an error the store's file may contain the old text or the new text
        else:
            self.texts = {text}

    def flush_queues(self) -> None:
        """Flush the consume queues and handle an error, as the store's own flush thread does each second."""
        assert self.store is not None
        try:
            self.store._checkpoints.flush_queues()
        except OSError as error:
            self.store.gate.fail(error)


def counted_calls(tmp_path: Path, way: str) -> dict[str, int]:
    disk = FailingDisk(maps=way != "pwrite")
    with disk.installed():
        script = Script(tmp_path / "counted", disk, WAYS[way])
        script.run()
    assert script.acknowledged == 12
    return dict(disk.calls)


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_no_error_of_the_disk_breaks_a_promise(tmp_path, monkeypatch, kind, way, for_good):
    monkeypatch.setattr(storage.index.index_service, "INDEX_RETRY_S", 0.001)
    monkeypatch.setattr(storage.log.log_writer, "PAGES_AHEAD_BYTES", 1024)
    calls = counted_calls(tmp_path, way)[kind]
    assert calls
    for nth in range(calls):
        error = errno.EIO if nth % 2 else errno.ENOSPC
        where = f"{kind} {nth} of {calls}, {errno.errorcode[error]}"
        disk = FailingDisk(kind, nth, error=error, for_good=for_good, maps=way != "pwrite")
        script = Script(tmp_path / str(nth), disk, WAYS[way])
        try:
            with disk.installed():
                script.run()
            check_after(script)
        except Exception as problem:
            raise AssertionError(f"{where}, {disk.failed[:1]}: {problem!r}") from problem


def check_after(script: Script) -> None:
    """Open the store on a healthy disk. Check that each acknowledged message is stored once, and that the store accepts
    more messages."""
    if script.store is not None:
        script.store.close()
    script.open()
    script.check_reading()
    assert script.store.read_config("topics.json") in script.texts
    assert not script.deleted or "passing" not in script.store.topics.queue_ids()
    for _ in range(3):
        script.append()
    assert script.acknowledged == script.sent
    script.store.close()
    script.open()
    assert script.store.status().cut_bytes == 0
    script.check_reading()
    script.store.close()


@dataclass
class PoolScript:
    """The steps that a test runs with a transient store pool on a failing disk: append, flush a part, close, open
    again."""

    root: Path
    disk: FailingDisk
    flushed: int = 0
    sent: int = 0
    store: MessageStore | None = None

    def run(self) -> None:
        for _ in range(2):
            failed_before = len(self.disk.failed)
            try:
                self.open()
            except StoreError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                return
            for step in range(6):
                self.append()
                if step % 3 == 2:
                    self.flush()
            self.append()
            self.store.close()
            failed = [path for path in self.disk.failed[failed_before:] if "/commitlog/" in path]
            hidden = failed and self.disk.kind == "pwrite_all" and not (self.root / "abort").exists()
            assert not hidden, f"hidden: {failed}"

    def open(self) -> None:
        self.store = open_store(self.root, **FILES, **POOL)
        self.sent = len(bodies_of(self.store))

    def append(self) -> None:
        assert self.store is not None
        batch = make_batch([b"%d" % self.sent + b"." * 900], producer=("p", 0, self.sent))
        try:
            self.store.append([batch])
        except StoreNotWritableError:
            return
        self.sent += 1

    def flush(self) -> None:
        """Flush the whole log. All messages sent so far must survive from now on."""
        assert self.store is not None
        count = self.sent
        try:
            self.store.gate.flush_all()
        except ServiceNotAvailableError:
            status = self.store.status()
            assert not status.writable
            assert os.strerror(self.disk.error) in status.not_writable_reason
        else:
            self.flushed = count


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("kind", ["pwrite_all", "flush"])
def test_a_failed_commit_is_reported_and_keeps_the_first_messages(tmp_path, kind, for_good):
    counting = FailingDisk()
    with counting.installed():
        PoolScript(tmp_path / "counted", counting).run()
    calls = counting.calls[kind]
    assert calls > 10
    for nth in range(calls):
        error = errno.EIO if nth % 2 else errno.ENOSPC
        disk = FailingDisk(kind, nth, error=error, for_good=for_good)
        script = PoolScript(tmp_path / str(nth), disk)
        where = f"{kind} {nth} of {calls}, {errno.errorcode[error]}"
        try:
            with disk.installed():
                script.run()
            if script.store is not None:
                script.store.close()
            script.open()
            bodies = bodies_of(script.store)
            assert [body.rstrip(b".") for body in bodies] == [b"%d" % index for index in range(len(bodies))]
            assert len(bodies) >= script.flushed
            script.append()
            script.flush()
            assert script.flushed == script.sent == len(bodies) + 1
            script.store.close()
        except Exception as problem:
            raise AssertionError(f"{where}, {disk.failed[:1]}: {problem!r}") from problem


def test_a_failed_flush_shows_in_the_status(tmp_path):
    disk = FailingDisk("flush", 10**9)
    with disk.installed():
        store = open_store(tmp_path / "store", **FILES)
        store.append([make_batch([b"before"])])
        # Wait until the next log file exists, because the thread that creates the file also flushes it. After that, no
        # other flush happens, so the test can make the next flush fail.
        eventually((tmp_path / "store" / "commitlog" / f"{4096:020d}").exists, "the next file is made")
        disk.nth = disk.calls["flush"]
        with pytest.raises(StoreNotWritableError, match="this append may or may not be stored"):
            store.append([make_batch([b"in doubt"])])
        status = store.status()
        assert not status.writable
        assert "Input/output error" in status.not_writable_reason
        with pytest.raises(StoreNotWritableError, match="refuses appends until"):
            store.append([make_batch([b"after"])])
        assert bodies_of(store) == [b"before"]
        store.close()
    assert (tmp_path / "store" / "abort").exists()
