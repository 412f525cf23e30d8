"""Fetches and long polls: reads queues for consumers, and lets consumers wait for new messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from raymq.common.errors import DataLossError, InvalidArgumentError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult, QueueEnds, QueuePosition
from raymq.records.logfiles.log_reader import LogReader
from storage.queue.consume_queue import ConsumeQueue
from storage.queue.queue_table import QueueTable
from storage.read.long_polls import LongPolls
from storage.stats import StoreStats

FETCH_MAX_BYTES: Final = 128 << 20
"""Maximum number of bytes that one fetch returns, even if the request allows more (spec/storage.md §10)."""
_MENDED_MAX: Final = 10_000
"""Maximum number of remembered queue positions. The fetch service remembers where it has searched for wrong units, so
that it searches there only once."""


class FetchService:
    """Carries out the fetches of one store. Thread-safe. `check` raises an error if the store must not be read."""

    def __init__(
        self,
        queues: QueueTable,
        reader: LogReader,
        polls: LongPolls,
        stats: StoreStats,
        check: Callable[[], None],
        mend: Callable[[ConsumeQueue, int, int], int],
    ) -> None:
        """`mend` rewrites the incorrect entries (units) of a consume queue between two queue offsets, and returns the
        number of these entries."""
        self._queues, self._reader, self._polls, self._stats = queues, reader, polls, stats
        self._check, self._mend = check, mend
        self._mended: set[tuple[tuple[str, int], int]] = set()
        """Positions (queue and queue offset) at which the fetch service has already searched for incorrect
        consume-queue entries (units). If a read at one of these positions still fails, the record itself is damaged."""
        reader.mend_units = self._mend_units

    def fetch(
        self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float, patient: bool = False
    ) -> list[FetchResult]:
        """Read messages from several queues. Return one result per request, in order.

        Returns as soon as one request has a message or an illegal offset, and after `wait_s` at the latest. The results
        contain about `max_bytes` of records in total (128 MiB at most), shared among the queues that have messages. If
        there is a message, at least one is returned. A fetch with a tag filter also returns after searching
        `max_filter_message_size_bytes` of a queue: without a message, but with the offset at which to continue. With
        `max_bytes` 0 only offsets are returned (see `LogReader.fetch`). `patient`: if the queue does not contain the
        requested offset, wait as if the next message will have that offset.

        Raises SystemBusyError if too many fetches wait already, ServiceNotAvailableError if the store closes, and
        DataLossError if a file of the store was deleted.
        """
        if max_bytes < 0 or any(request.max_messages <= 0 for request in requests):
            raise InvalidArgumentError("max_bytes must not be negative, and max_messages must be positive")
        max_bytes = min(max_bytes, FETCH_MAX_BYTES)
        results = self._fetch_now(requests, max_bytes, patient)
        if wait_s <= 0 or has_news(results):
            return results
        deadline_s = time.monotonic() + wait_s
        with self._polls.waiting((request.topic, request.queue_id) for request in requests) as event:
            while True:
                results = self._fetch_now(following(requests, results), max_bytes, patient)
                if has_news(results) or not event.wait(max(deadline_s - time.monotonic(), 0)):
                    break
                event.clear()
        return concluded(requests, results)

    def ends(self, positions: Sequence[QueuePosition], *, patient: bool = False) -> tuple[list[QueueEnds], bool]:
        """Return the first and the visible end offset of several queues, and True if at least one of these queues is
        ready for a fetch.

        A queue is ready if it has a message at or after the requested offset, or does not contain that offset. With
        `patient`, a queue that does not contain the offset is not ready.

        Does not block, and reads no messages. Raises ServiceNotAvailableError if the store closes.
        """
        self._check()
        ends, news = [], False
        for topic, queue_id, offset in positions:
            queue = self._queues.get(topic, queue_id)
            first, end = (0, 0) if queue is None else (queue.first_readable_offset, queue.visible_offset)
            ends.append(QueueEnds(first, end))
            news = news or (first <= offset < end if patient else offset != end)
        return ends, news

    def _fetch_now(self, requests: Sequence[FetchRequest], max_bytes: int, patient: bool) -> list[FetchResult]:
        start_s = time.monotonic()
        results = self._fetch_all(requests, max_bytes, patient)
        found = sum(result.status is PullStatus.FOUND for result in results)
        messages = sum(result.count for result in results)
        # With `max_bytes` 0 the client requests only the ends of the queues. It reads the queue files itself, and
        # reports its gets by `count_reads`.
        got = found if max_bytes else 0
        self._stats.count_gets(got, len(results) - found, messages, time.monotonic() - start_s)
        return results

    def _fetch_all(self, requests: Sequence[FetchRequest], max_bytes: int, patient: bool) -> list[FetchResult]:
        self._check()
        bounds = [self._readable(request) for request in requests]
        ready = sum(end > request.queue_offset for request, (_, end) in zip(requests, bounds, strict=True))
        # The remaining bytes of the answer are divided equally among all queues with messages that come now or later in
        # this loop. Each of these queues gets its share.
        results, left_bytes = [], max_bytes
        for request, (min_offset, max_offset) in zip(requests, bounds, strict=True):
            is_full = max_offset > request.queue_offset >= min_offset and max_bytes and left_bytes <= 0
            if is_full or (patient and not min_offset <= request.queue_offset <= max_offset):
                nothing = FetchResult(PullStatus.NO_NEW_MESSAGE, request.queue_offset, min_offset, max_offset, b"", 0)
                results.append(nothing)
                continue
            share = max(left_bytes // max(ready, 1), 1) if max_bytes else 0
            result = self._fetch_one(request, min_offset, max_offset, share)
            ready -= max_offset > request.queue_offset
            left_bytes -= len(result.records)
            results.append(result)
        return results

    def _fetch_one(self, request: FetchRequest, min_offset: int, max_offset: int, max_bytes: int) -> FetchResult:
        try:
            return self._read(request, min_offset, max_offset, max_bytes)
        except DataLossError:
            end_offset = min(request.queue_offset + request.max_messages, max_offset)
            if self._mend_units(request.topic, request.queue_id, request.queue_offset, end_offset):
                return self._fetch_one(request, min_offset, max_offset, max_bytes)
            # Read the queue's first offset again: it has moved if retention deleted the record during the read.
            min_offset, max_offset = self._readable(request)
            if request.queue_offset >= min_offset:
                # The lost record may belong to a message after the first requested message. So read only one message at
                # a time, so that the messages before the lost record are returned.
                request = replace(request, max_messages=1)
        return self._read(request, min_offset, max_offset, max_bytes)

    def _mend_units(self, topic: str, queue_id: int, from_offset: int, end_offset: int) -> bool:
        """Rewrite the wrong entries (units) between two offsets of a consume queue. Does nothing if an earlier fetch
        has already searched for wrong entries from `from_offset` on. Returns True if any entry was wrong."""
        queue = self._queues.get_plain(topic, queue_id)
        if queue is None or (queue.key, from_offset) in self._mended:
            return False
        if len(self._mended) >= _MENDED_MAX:
            self._mended.clear()
        self._mended.add((queue.key, from_offset))
        return self._mend(queue, from_offset, end_offset) > 0

    def _read(self, request: FetchRequest, min_offset: int, max_offset: int, max_bytes: int) -> FetchResult:
        """Read the messages of a fetch request from the commit log, or from the queue's compacted log if the commit log
        no longer has them."""
        queue = self._queues.get_plain(request.topic, request.queue_id)
        if queue is not None and queue.compacted is not None:
            first_in_log = min(queue.min_offset, queue.compacted.end_offset)
            if min_offset <= request.queue_offset < min(first_in_log, max_offset):
                return queue.compacted.fetch(request, min_offset, max_offset, max_bytes)
        return self._reader.fetch(request, min_offset, max_offset, max_bytes)

    def _readable(self, request: FetchRequest) -> tuple[int, int]:
        """Return the first readable offset and the end of the request's queue; 0 and 0 if the queue does not
        exist."""
        queue = self._queues.get(request.topic, request.queue_id)
        return (0, 0) if queue is None else (queue.first_readable_offset, queue.visible_offset)


def following(requests: Sequence[FetchRequest], results: Sequence[FetchResult]) -> list[FetchRequest]:
    """Return the fetch requests by which a fetch continues after its last read returned `results`. Each request starts
    at the next offset of its result, so messages that the tag filter excluded are not read again."""
    return [
        replace(request, queue_offset=result.next_offset) for request, result in zip(requests, results, strict=True)
    ]


def concluded(requests: Sequence[FetchRequest], results: Sequence[FetchResult]) -> list[FetchResult]:
    """Return the final results of fetch `requests`. `results` are the results of the last read. A request that only
    skipped filtered messages gets the status NO_MATCHED_MESSAGE."""
    return [
        replace(result, status=PullStatus.NO_MATCHED_MESSAGE)
        if result.status is PullStatus.NO_NEW_MESSAGE and result.next_offset > request.queue_offset
        else result
        for request, result in zip(requests, results, strict=True)
    ]


def has_news(results: Sequence[FetchResult]) -> bool:
    """True if any fetch result must be returned to the client now.

    A queue with more messages to search counts too: the client then sends the next request.
    """
    return any(
        result.status in (PullStatus.FOUND, PullStatus.OFFSET_ILLEGAL)
        or (result.status is PullStatus.NO_MATCHED_MESSAGE and result.next_offset < result.max_offset)
        for result in results
    )
