"""RangeReader reads a fixed offset range of a queue for a batch job: record bytes, and the position of each record.

On the storage actor's node the bytes are the mapped files themselves, without a copy; on other nodes they are fetched.
The chunks are arguments for `raymq.records.kernels.columns.decode_columns`. A range has only messages that were visible
to consumers when the range was planned. Every replica that may become master has these messages. After a failover the
rest of the range is therefore read from the new master.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import DataLossError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.check import find_starts
from raymq.records.format.layout import QUEUE_OFFSET_OFFSET
from raymq.records.format.places import RecordPlaces
from raymq.records.logfiles.log_reader import LogReader
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

RANGE_CHUNK_MESSAGES: Final = 16_384
RANGE_CHUNK_BYTES: Final = 64 * 1024 * 1024
"""Maximum number of record bytes in one chunk that is read from mapped files."""
RANGE_FETCH_MAX_BYTES: Final = 8 * 1024 * 1024
RANGE_READ_TIMEOUT_S: Final = 30.0
_FETCH_WAIT_S: Final = 1.0

logger = logging.getLogger(__name__)


class RecordsChunk(NamedTuple):
    """A chunk of records of a range. `data`: the bytes of the records. `starts`: the position of each record in `data`,
    shape (records,). `sizes`: the bytes of each record. `next_offset`: the queue offset after the records. `offsets`:
    the records' queue offsets, shape (records,). `position`: the physical offset of `data`, -1 if the records are
    copies."""

    data: memoryview | bytes
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    next_offset: int
    offsets: NDArray[np.int64]
    position: int = -1

    def places(self, queue: MessageQueue) -> RecordPlaces:
        """Return the expected places (queue, offsets and sizes) of the chunk's records. All records belong to `queue`.
        The error for a damaged record names the record's place."""
        physical = None if self.position < 0 else self.starts + self.position
        return RecordPlaces(queue, self.offsets, physical, self.sizes)


class RangeReader:
    """Reads offset ranges of queues. `routes`: returns the master storage actor of a broker group. `storages`: connects
    to storage actors."""

    def __init__(self, routes: RouteSource, storages: StorageClients) -> None:
        self._routes, self._storages = routes, storages

    def read(
        self, queue: MessageQueue, start: int, end: int, tag_codes: frozenset[int] | None = None, sql: str | None = None
    ) -> Iterator[RecordsChunk]:
        """Yield the messages of `queue` from offset `start` up to, not including, `end`, in order, in chunks.

        With `tag_codes`, yields only messages with these tag codes; a few other messages whose tags share a code may be
        included. With `sql`, yields only messages that pass this filter expression (raymq.records.filters.sql). When
        the range was planned, the queue must already have been readable up to `end`. Raises DataLossError if a part of
        the range was deleted or lost. Waits up to RANGE_READ_TIMEOUT_S for a storage actor that restarts, or for a new
        master.
        """
        reader = call_master(
            self._routes, self._storages, queue, RANGE_READ_TIMEOUT_S, lambda storage, left_s: storage.reader()
        )
        if reader is not None and not reader.makes_records(queue.topic, queue.queue_id):
            try:
                for chunk in _map(reader, queue, start, end, tag_codes, sql):
                    yield chunk
                    start = chunk.next_offset
                return
            except DataLossError as error:
                # The mapped files belong to the replica that was the master when the read began, and they lack
                # messages. Only the present master can tell if the messages are really lost, so continue the read
                # there.
                logger.info(
                    "queue %s from offset %d on is read through the storage actor, not from its files: %s",
                    queue,
                    start,
                    error,
                )
                self._routes.invalidate(queue.topic)
        yield from self._fetch(queue, start, end, tag_codes, sql)

    def _fetch(
        self, queue: MessageQueue, start: int, end: int, tag_codes: frozenset[int] | None, sql: str | None
    ) -> Iterator[RecordsChunk]:
        while start < end:
            result = self._fetch_patiently(queue, start, min(RANGE_CHUNK_MESSAGES, end - start), tag_codes, sql)
            if result.next_offset <= start or result.status is PullStatus.OFFSET_ILLEGAL:
                raise DataLossError(
                    f"offsets {start} to {end - 1} of queue {queue} no longer exist; the queue has offsets "
                    f"{result.min_offset} to {result.max_offset}"
                )
            first, start = start, result.next_offset
            if result.count:
                yield _wanted_part(result, first, end)

    def _fetch_patiently(
        self, queue: MessageQueue, start: int, max_messages: int, tag_codes: frozenset[int] | None, sql: str | None
    ) -> FetchResult:
        """Fetch messages from offset `start` on, and wait if that offset is not visible yet. The wait is necessary
        after a failover: a new master at first shows fewer messages than the queue has."""
        deadline_s = time.monotonic() + RANGE_READ_TIMEOUT_S
        wait_s = 0.0
        while True:
            result = self._fetch_once(queue, start, max_messages, tag_codes, sql, wait_s)
            if start < result.max_offset or time.monotonic() >= deadline_s:
                return result
            wait_s = _FETCH_WAIT_S
            # the store answers a request with an illegal offset at once, without a long poll, so wait here
            if result.status is PullStatus.OFFSET_ILLEGAL:
                time.sleep(_FETCH_WAIT_S / 10)

    def _fetch_once(
        self,
        queue: MessageQueue,
        start: int,
        max_messages: int,
        tag_codes: frozenset[int] | None,
        sql: str | None,
        wait_s: float,
    ) -> FetchResult:
        request = FetchRequest(queue.topic, queue.queue_id, start, max_messages, tag_codes, sql)

        def fetch(storage: StorageClient, left_s: float) -> list[FetchResult]:
            return storage.fetch([request], RANGE_FETCH_MAX_BYTES, wait_s, min(left_s, 10.0))

        [result] = call_master(self._routes, self._storages, queue, RANGE_READ_TIMEOUT_S, fetch)
        return result


def _map(
    reader: LogReader, queue: MessageQueue, start: int, end: int, tag_codes: frozenset[int] | None, sql: str | None
) -> Iterator[RecordsChunk]:
    """Yield chunks that are views of the mapped log files."""
    while start < end:
        request = FetchRequest(
            queue.topic, queue.queue_id, start, min(RANGE_CHUNK_MESSAGES, end - start), tag_codes, sql
        )
        parts, next_offset = reader.find(request, end, RANGE_CHUNK_BYTES)
        for part in parts:
            behind = int(part.offsets[-1]) + 1
            yield RecordsChunk(part.data, part.starts, part.sizes, behind, part.offsets, part.position)
        start = next_offset


def _wanted_part(result: FetchResult, start: int, end: int) -> RecordsChunk:
    """Return the records of a fetch from `start` that are before offset `end`. A fetch may return records after `end`,
    because some offsets hold no record (spec/storage.md §2)."""
    starts = find_starts(result.records)
    sizes = np.diff(starts, append=len(result.records))
    offsets = _offsets_of(result, starts, start)
    if result.next_offset > end:
        wanted = offsets < end
        starts, sizes, offsets = starts[wanted], sizes[wanted], offsets[wanted]
    return RecordsChunk(result.records, starts, sizes, min(result.next_offset, end), offsets)


def _offsets_of(result: FetchResult, starts: NDArray[np.int64], start: int) -> NDArray[np.int64]:
    """Return the ascending queue offsets of the records that a fetch from `start` returned. A damaged record without a
    plausible offset gets the next free offset."""
    if len(starts) == result.count == result.next_offset - start:
        return np.arange(start, result.next_offset)
    offsets, following = [], start
    for position in starts.tolist():
        at = position + QUEUE_OFFSET_OFFSET
        told = int.from_bytes(result.records[at : at + 8], "big")
        following = (told if following <= told < result.next_offset else following) + 1
        offsets.append(following - 1)
    return np.array(offsets, np.int64)
