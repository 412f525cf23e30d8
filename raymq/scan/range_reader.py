"""RangeReader reads a fixed range of a queue, as a batch job does: record bytes and the position of each record.

On the storage actor's node the bytes are the mapped files themselves, without a copy; elsewhere they are fetched. Its
chunks are arguments for `raymq.kernels.columns.decode_columns`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.errors import DataLossError
from raymq.logfiles.log_reader import PRE_BLANK_SIZE, LogReader
from raymq.message import MessageQueue, PullStatus
from raymq.protocol.store import FetchRequest, FetchResult
from raymq.record.check import record_starts
from raymq.record.layout import QUEUE_OFFSET_OFFSET
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master
from raymq.retry import persist_until

RANGE_CHUNK_MESSAGES: Final = 16_384
RANGE_FETCH_MAX_BYTES: Final = 8 * 1024 * 1024
RANGE_READ_TIMEOUT_S: Final = 30.0

RecordsChunk = tuple[memoryview | bytes, NDArray[np.int64]]
"""Record bytes, and the position in them of each wanted record, shape (records,)."""


class RangeReader:
    """Reads ranges of queues: `routes` name the storage actor that leads a broker group, `storages` connect to it."""

    def __init__(self, routes: RouteSource, storages: StorageClients) -> None:
        self._routes, self._storages = routes, storages

    def read(self, queue: MessageQueue, start: int, end: int) -> Iterator[RecordsChunk]:
        """Yield the messages of `queue` from offset `start` up to, not including, `end`, in order, in chunks.

        `end` must not be beyond the queue's visible end. DataLossError when some of the range is gone; a storage actor
        that is being restarted is waited for, up to RANGE_READ_TIMEOUT_S.
        """
        name = self._routes.get(queue.topic).master_storage(queue.broker_name)
        storage = self._storages.get(name)
        reader = persist_until(time.monotonic() + RANGE_READ_TIMEOUT_S, lambda left_s: storage.reader())
        if reader is None or reader.has_batches(queue.topic, queue.queue_id):
            return self._fetch(queue, start, end)
        return _map(reader, queue, start, end)

    def _fetch(self, queue: MessageQueue, start: int, end: int) -> Iterator[RecordsChunk]:
        while start < end:
            result = self._fetch_once(queue, start, min(RANGE_CHUNK_MESSAGES, end - start))
            if result.status is PullStatus.OFFSET_ILLEGAL or result.next_offset == start:
                raise DataLossError(
                    f"{queue}: offsets {start} to {end - 1} are gone; it holds {result.min_offset} to "
                    f"{result.max_offset}"
                )
            start = result.next_offset
            if result.count:
                yield _wanted_part(result, end)

    def _fetch_once(self, queue: MessageQueue, start: int, max_messages: int) -> FetchResult:
        request = FetchRequest(queue.topic, queue.queue_id, start, max_messages)

        def fetch(storage: StorageClient, left_s: float) -> list[FetchResult]:
            return storage.fetch([request], RANGE_FETCH_MAX_BYTES, 0.0, min(left_s, 10.0))

        [result] = call_master(self._routes, self._storages, queue, RANGE_READ_TIMEOUT_S, fetch)
        return result


def _map(reader: LogReader, queue: MessageQueue, start: int, end: int) -> Iterator[RecordsChunk]:
    """Yield chunks that are views of the mapped log files."""
    while start < end:
        units = reader.units(queue.topic, queue.queue_id, start, min(RANGE_CHUNK_MESSAGES, end - start))
        if not len(units):
            raise DataLossError(f"{queue}: offsets {start} to {end - 1} are not on disk (any more)")
        start += len(units)
        units = units[units["size"] != PRE_BLANK_SIZE]  # offsets without a record
        # The views hold the units' records back to back, several records each; no record spans two views. `ends` is
        # where each record ends in that series of bytes, shape (units,); `before` are the bytes of earlier views.
        ends = np.cumsum(units["size"], dtype=np.int64)
        first, before = 0, 0
        for view in reader.views(units):
            last = int(np.searchsorted(ends, before + len(view), side="right"))
            starts = ends[first:last] - units["size"][first:last] - before
            yield view, starts
            first, before = last, before + len(view)


def _wanted_part(result: FetchResult, end: int) -> RecordsChunk:
    """The records of a fetch before offset `end`. Offsets that hold no record (spec/storage.md §2) make a fetch of so
    many records go past the end."""
    starts = record_starts(result.records)
    if result.next_offset > end:
        starts = starts[[_queue_offset(result.records, int(position)) < end for position in starts]]
    return result.records, starts


def _queue_offset(records: bytes, position: int) -> int:
    start = position + QUEUE_OFFSET_OFFSET
    return int.from_bytes(records[start : start + 8], "big")
