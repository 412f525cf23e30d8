"""Makes consume tasks, as a Pull actor sends them to a listener's process, for tests of push consumers. A task contains
its messages, or references to records in the files of a small store."""

from __future__ import annotations

import contextlib
from pathlib import Path

from actors.core.consume.records_in_place import RecordsInPlace
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import ShippedTask
from raymq.common.protocol.store import FetchRequest
from raymq.records.logfiles.log_reader import LogReader, StoreFiles
from tests.support.stores.stores import LOG_FILE_BYTES, QUEUE_FILE_UNITS, make_batch, open_store

STORED_QUEUE = MessageQueue("orders", "broker-a", 0)


def task_of(
    *bodies: bytes, tags: str | None = None, topic: str = "orders", number: int = 1, queue_id: int = 0, **more
) -> ShippedTask:
    """Return a serialised consume task with one message per body."""
    records = bytes(make_batch(bodies, tags=tags, topic=topic, **more).records)
    return ShippedTask(number, MessageQueue(topic, "broker-b", queue_id), len(bodies), records)


def store_records(root: Path, count: int, size: int = 1000, first: int = 0) -> None:
    """Append `count` messages to queue 0 of a store at `root`. Each body begins with a number; the numbers are
    consecutive, from `first` on."""
    with contextlib.closing(open_store(root)) as store:
        for number in range(first, first + count):
            store.append([make_batch([b"%d " % number + bytes(size)])])


def located(root: Path, first: int, count: int) -> RecordsInPlace:
    """Return references to `count` records from queue offset `first` on, in the store that `store_records` wrote in
    `root`."""
    files = StoreFiles(str(root), LOG_FILE_BYTES, QUEUE_FILE_UNITS * 20)
    reader = LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=QUEUE_FILE_UNITS * 20)
    parts, _ = reader.find(FetchRequest("orders", 0, first, count), first + count, 1 << 30)
    return RecordsInPlace.of(files, parts)
