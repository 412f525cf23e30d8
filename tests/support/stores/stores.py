"""Makes small stores for tests. A log file has 64 KiB and a queue file 100 entries, so that tests fill several files.
The module also copies a store in the state that a crash leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raymq.client.consumer.pull_once import read_fetched
from raymq.common.config.store import StoreSettings
from raymq.common.message import Message, MessageExt, MessageQueue, PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch, ProducerSequence, encode_batch
from raymq.records.format.layout import RecordError
from storage.message_store import MessageStore

LOG_FILE_BYTES = 65536
QUEUE_FILE_UNITS = 100


PATIENCE = {
    "wait_time_in_send_queue_ms": 60_000,
    "os_page_cache_busy_timeout_ms": 60_000,
    "sync_flush_timeout_ms": 60_000,
    "query_wait_index_ms": 60_000,
}
"""Store settings for tests on a busy machine. However slow the machine is, the store refuses no append, and its answers
to queries include the newest messages."""


def small_settings(root: Path, **changes: Any) -> StoreSettings:
    values = {
        "store_path_root_dir": root,
        "mapped_file_size_commit_log_bytes": LOG_FILE_BYTES,
        "mapped_file_size_consume_queue_bytes": QUEUE_FILE_UNITS * 20,
        "max_hash_slot_num": 100,
        "max_index_num": 400,
        "warm_mapped_file_enable": True,
        **PATIENCE,
        **changes,
    }
    return StoreSettings(**values)


def open_store(root: Path, *, clock_ms: Any = None, **changes: Any) -> MessageStore:
    arguments = {} if clock_ms is None else {"clock_ms": clock_ms}
    if hasattr(clock_ms, "elapsed"):
        arguments["read_elapsed"] = clock_ms.elapsed
    return MessageStore.open(small_settings(root, **changes), broker_name="broker-a", **arguments)


def make_batch(
    bodies: Sequence[bytes],
    *,
    topic: str = "orders",
    queue_id: int = 0,
    tags: str | None = None,
    producer: tuple[str, int, int] | None = None,
    extra_properties: dict[str, str] | None = None,
) -> EncodedBatch:
    """Return a batch with one message per body. `producer`: (id, epoch, first sequence)."""
    return encode_batch(
        [Message(topic, body, tags=tags) for body in bodies],
        queue_id,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=[f"{index:032X}" for index in range(len(bodies))],
        producer=ProducerSequence(*producer) if producer else None,
        extra_properties=extra_properties,
    )


def read_queue(store: MessageStore, topic: str = "orders", queue_id: int = 0) -> list[MessageExt]:
    """Return all messages of a queue that consumers may read. Raises AssertionError if an offset is missing."""
    bounds = store.queues.bounds(topic, queue_id)
    messages: list[MessageExt] = []
    offset = bounds.min_offset
    while offset < bounds.max_offset:
        request = FetchRequest(topic, queue_id, offset, 1000)
        [result] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
        assert result.status is PullStatus.FOUND
        assert result.next_offset > offset
        decoded = decode_records(result.records, broker_name="broker-a")
        assert len(decoded) == result.count
        messages += decoded
        offset = result.next_offset
    assert [message.queue_offset for message in messages] == list(range(bounds.min_offset, bounds.max_offset))
    return messages


def intact_bodies(store: MessageStore, topic: str = "orders", queue_id: int = 0) -> list[bytes | None]:
    """Return the body at each queue offset that consumers may read; None for a damaged record."""
    bounds = store.queues.bounds(topic, queue_id)

    def read(first: int, end: int) -> list[bytes | None]:
        [result] = store.fetch([FetchRequest(topic, queue_id, first, end - first)], max_bytes=1 << 24, wait_s=0)
        assert (result.status, result.count) == (PullStatus.FOUND, result.next_offset - first)
        if result.next_offset < end:
            return read(first, result.next_offset) + read(result.next_offset, end)
        try:
            messages = decode_records(result.records)
        except RecordError:
            middle = (first + end) // 2
            return [None] if end == first + 1 else read(first, middle) + read(middle, end)
        places = [(message.topic, message.queue_id, message.queue_offset) for message in messages]
        assert places == [(topic, queue_id, offset) for offset in range(first, end)]
        return [message.body for message in messages]

    return read(bounds.min_offset, bounds.max_offset) if bounds.max_offset > bounds.min_offset else []


def placed_bodies(store: MessageStore, topic: str = "orders", queue_id: int = 0) -> list[bytes | None]:
    """Return the body at each offset of a queue as a consumer reads it; None if the read fails. The queue must begin at
    offset 0."""
    bounds, queue = store.queues.bounds(topic, queue_id), MessageQueue(topic, "broker-a", queue_id)
    assert bounds.min_offset == 0
    bodies: list[bytes | None] = []
    while len(bodies) < bounds.max_offset:
        [result] = store.fetch([FetchRequest(topic, queue_id, len(bodies), 400)], max_bytes=1 << 24, wait_s=0)
        found = [one.message for one in read_fetched(result.records, queue, len(bodies), result.next_offset)]
        assert found
        bodies += [message.body if message.body_error is None else None for message in found]
    return bodies


def bodies_of(store: MessageStore, topic: str = "orders", queue_id: int = 0) -> list[bytes]:
    return [message.body for message in read_queue(store, topic, queue_id)]


def killed_copy(root: Path, target: Path) -> Path:
    """Copy the directory of the open store at `root` in the state that SIGKILL would leave: every file with its present
    content in the page cache."""
    shutil.copytree(root, target, copy_function=_copy_if_there)
    return target


def closed_copy(store: MessageStore, root: Path, target: Path, *, clean: bool, lost: Sequence[str] = ()) -> Path:
    """Close the store at `root`, and return a copy of its directory without the files and directories named in `lost`.

    If `clean` is True, the copy is made after the close. If not, it is made before the close, in the state that SIGKILL
    would leave.
    """
    if not clean:
        killed_copy(root, target)
    store.close()
    if clean:
        killed_copy(root, target)
    for name in lost:
        if (target / name).is_dir():
            shutil.rmtree(target / name)
        else:
            (target / name).unlink(missing_ok=True)
    return target


def _copy_if_there(source: str, target: str) -> None:
    # Ignore a file that disappears during the copy: the store may remove the scratch file of its file allocator.
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


class PowerCuts:
    """Remembers the content of each file at its last flush, to reproduce the disk after a power cut.

    The object replaces `os.fdatasync`. `copy_after_cut` gives each file the content of its last flush. A file that was
    never flushed is all zeros.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._flushed: dict[Path, bytes] = {}
        self._fdatasync = os.fdatasync

    def fdatasync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            self._flushed[path] = path.read_bytes()
        self._fdatasync(descriptor)

    def copy_after_cut(self, target: Path) -> Path:
        """Copy the store directory to `target`, in the state in which a boot after a power cut would find it: with the
        flushed bytes only. Returns `target`."""
        killed_copy(self._root, target)
        for path in target.rglob("*"):
            original = self._root / path.relative_to(target)
            if path.is_file() and path.name.isdecimal():
                path.write_bytes(self._flushed.get(original, bytes(path.stat().st_size)))
        return target
