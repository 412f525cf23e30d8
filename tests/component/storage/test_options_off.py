"""Tests that an option costs nothing while it is off: a working store calls no function of the option's module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import pytest

from raymq.common.config.store import FlushDiskType
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.hashing import tags_code
from storage.log.log_writer import LogWriter
from storage.log.pool_writer import PoolWriter
from storage.log.warm_up import WarmWriter
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.consume_queue_ext import ExtendedConsumeQueue
from tests.support.clients.fakes import WAIT_S
from tests.support.stores.stores import make_batch, open_store

ROOT = Path(__file__).parents[3]
OPTIONS = {
    "raymq/records/logfiles/ext_units.py",
    "raymq/records/format/inner_batch.py",
    "storage/append/fit_batch.py",
    "storage/append/multi_dispatch_appender.py",
    "storage/dispatch/batch_dispatch.py",
    "storage/dispatch/held_units.py",
    "storage/log/commit_service.py",
    "storage/log/pool_writer.py",
    "storage/log/transient_store_pool.py",
    "storage/log/warm_up.py",
    "storage/queue/batch_consume_queue.py",
    "storage/queue/consume_queue_ext.py",
}
"""Modules that only optional features of a store use: transient store pool, warm-up, queue extension, inner batches,
fitted batches, multi-dispatch."""


@contextmanager
def called_modules() -> Iterator[set[str]]:
    """Record the modules of this repository whose functions any thread calls during a `with` block. Yields a set; after
    the block, the set holds the names of these modules."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    def with_profile(profile: Callable[..., None] | None) -> None:
        threading.setprofile(profile)
        sys.setprofile(profile)

    names: set[str] = set()
    with_profile(note)
    try:
        yield names
    finally:
        with_profile(None)
        names |= {path.removeprefix(f"{ROOT}/") for path in called}


@pytest.mark.parametrize("flush", FlushDiskType)
def test_no_function_of_an_option_that_is_off_is_called(tmp_path, flush):
    assert all((ROOT / name).is_file() for name in OPTIONS)
    store = open_store(tmp_path, flush_disk_type=flush, warm_mapped_file_enable=False)
    store.append([make_batch([b"the queue is made, of the class that it shall have"], queue_id=id_) for id_ in (0, 1)])
    with closing(store), called_modules() as used:
        store.append([make_batch([b"one"], tags="t")])
        store.append([make_batch([b"one"]), make_batch([b"two"], queue_id=1)])
        store.append([make_batch([b"two" * 100] * 400, producer=("p", 0, 0))])
        assert store.gate._flush.wait_for(store.log.end_offset, WAIT_S)  # only the flush thread may flush the log
        tagged = FetchRequest("orders", 0, 0, 10, frozenset([tags_code("t")]))
        for request in (FetchRequest("orders", 0, 0, 10), tagged):
            [result] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
            assert result.status is PullStatus.FOUND
    assert {
        "storage/log/log_writer.py",
        "storage/queue/consume_queue.py",
        "raymq/records/logfiles/log_reader.py",
    } <= used
    assert used & OPTIONS == set()


@pytest.mark.parametrize(
    ("settings", "writer", "queue"),
    [
        ({"warm_mapped_file_enable": False}, LogWriter, ConsumeQueue),
        ({"warm_mapped_file_enable": True}, LogWriter, ConsumeQueue),
        ({"transient_store_pool_enable": True}, PoolWriter, ConsumeQueue),
        ({"mapped_file_size_commit_log_bytes": 8 << 20}, WarmWriter, ConsumeQueue),
        ({"enable_consume_queue_ext": True}, LogWriter, ExtendedConsumeQueue),
    ],
)
def test_the_settings_choose_the_writer_and_the_queue_once(tmp_path, settings, writer, queue):
    """The settings of a store select the classes of its log writer and its consume queues. WarmWriter, which prefaults
    pages, is selected only if the log files are larger than these tests' default of 64 KiB."""
    with closing(open_store(tmp_path, flush_disk_type=FlushDiskType.ASYNC_FLUSH, **settings)) as store:
        store.append([make_batch([b"one"])])
        assert type(store.log._writer) is writer
        assert type(store._parts.queues.get("orders", 0)) is queue
