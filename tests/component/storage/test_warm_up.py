"""Tests of a fast writer that writes into prefaulted pages. The bytes are equal, each batch is complete or missing
after a kill, and a failed prefault does no harm."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from raymq.common.config.store import FlushDiskType
from storage.files import disk
from storage.log import warm_up
from storage.log.log_writer import LogWriter
from storage.message_store import MessageStore
from storage.queue.consume_queue import ConsumeQueue
from tests.support.history.waiting import eventually
from tests.support.stores.stores import bodies_of, killed_copy, make_batch, open_store

SEGMENT = 8192


@pytest.fixture(autouse=True)
def small_segments_for_a_fast_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(warm_up, "FAST_S", 60.0)


def open_async(root: Path, **changes: Any) -> MessageStore:
    changes = {"clock_ms": lambda: 1_700_000_000_000, **changes}
    return open_store(
        root, flush_disk_type=FlushDiskType.ASYNC_FLUSH, flush_interval_consume_queue_ms=60_000, **changes
    )


def segments(store: MessageStore) -> set[int]:
    warm_up = getattr(store.log._writer, "warm_up", None)
    return set() if warm_up is None else set(warm_up.segments)


def append_until_warm(store: MessageStore) -> int:
    """Append messages until the log's end is in a prefaulted segment of the log, in the first quarter of this segment.
    Returns the number of appended messages."""
    count = 0

    def append() -> bool:
        nonlocal count
        store.append([make_batch([b"x" * 1000])])
        count += 1
        segment, position = divmod(store.status().max_physical_offset, SEGMENT)
        return segment in segments(store) and position < SEGMENT // 4

    eventually(append, "a warm segment")
    return count


def test_messages_in_prefaulted_pages_are_stored_byte_for_byte(tmp_path):
    stores = [open_async(tmp_path / "warm"), open_async(tmp_path / "cold", warm_mapped_file_enable=False)]
    count = append_until_warm(stores[0])
    for _ in range(count):
        stores[1].append([make_batch([b"x" * 1000])])
    assert segments(stores[0])
    for store in stores:
        for index in range(30):
            store.append([make_batch([b"%d" % index, b"." * (500 * index + 1)], producer=("p", 0, 2 * index))])
    assert not segments(stores[1])
    assert bodies_of(stores[0]) == bodies_of(stores[1])
    for store in stores:
        store.close()
    files = [path.relative_to(tmp_path / "warm") for path in (tmp_path / "warm").glob("*/**/0*") if path.is_file()]
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "warm" / file).read_bytes() == (tmp_path / "cold" / file).read_bytes()


def test_pages_are_not_warmed_for_a_slow_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_up, "FAST_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "make_pages", lambda *arguments: pytest.fail("a page was made"))
        store = open_async(tmp_path / "store")
        for _ in range(40):
            store.append([make_batch([b"x" * 1000])])
        assert not segments(store)
        store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"warm_mapped_file_enable": False},
        {"flush_disk_type": FlushDiskType.SYNC_FLUSH},
        {"mapped_file_size_commit_log_bytes": SEGMENT * 3 // 2},
    ],
)
def test_a_store_that_is_not_warmed(tmp_path, changes):
    store = open_store(tmp_path / "store", **{"flush_disk_type": FlushDiskType.ASYNC_FLUSH, **changes})
    for _ in range(40):
        store.append([make_batch([b"x" * 1000])])
    assert not segments(store)
    assert len(bodies_of(store)) == 40
    store.close()


def test_appends_continue_when_pages_cannot_be_prefaulted(tmp_path, monkeypatch, caplog):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(disk, "make_pages", refuse)
    store = open_async(tmp_path / "store")

    def warned() -> bool:
        store.append([make_batch([b"x" * 1000])])
        return "cannot warm up the log" in caplog.text

    eventually(warned, "the warning")
    assert store.status().writable
    store.close()


@contextmanager
def at_each_line_of(codes: set[CodeType], action: Any) -> Iterator[None]:
    """Inside the `with` block, call `action` before each line that this thread executes in one of the functions
    `codes`."""

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line":
            action()
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def test_a_kill_between_the_stores_leaves_each_batch_as_a_whole_or_not_at_all(tmp_path):
    root = tmp_path / "store"
    store = open_async(root)
    before = append_until_warm(store)
    copies: list[Path] = []
    work = [make_batch([b"%d" % queue_id + b"y" * 500] * 3, queue_id=queue_id) for queue_id in (1, 2)]
    [warm] = {store.status().max_physical_offset // SEGMENT} & segments(store)
    with at_each_line_of(
        {function.__code__ for function in (LogWriter.write, LogWriter.write_record, ConsumeQueue.append_scattered)},
        lambda: copies.append(killed_copy(root, tmp_path / str(len(copies)))),
    ):
        store.append(work)
    assert store.status().max_physical_offset // SEGMENT == warm
    store.close()
    seen = set()
    for copy in copies:
        survivor = open_store(copy)
        assert len(bodies_of(survivor)) == before
        seen.add(tuple(len(bodies_of(survivor, queue_id=queue_id)) for queue_id in (1, 2)))
        survivor.close()
    assert seen == {(0, 0), (3, 0), (3, 3)}
