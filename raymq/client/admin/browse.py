"""Administration: reads the messages of a topic page by page, in the order of their store times, without a group.

    stream     one queue, forwards or backwards, a few records ahead of the reader
    merge      of all queues: the next message is the oldest (or newest) of the queues' first messages
    filter     after the merge: each scanned record counts, even if the filter rejects it
    cursor     for each queue, the offset after the last scanned record, and the end offset

A page may therefore end at any record, and the next page continues exactly after that record. The number of scanned
records is limited. One call fetches records for all queues of a broker group, so a topic with many queues needs few
calls.

A page waits a few seconds for the repair of a damaged message. Then it includes the message, with its `body_error`. A
page keeps its messages as they are stored: a body is decompressed each time it is read.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from raymq.client.admin.messages import MessageAdmin
from raymq.client.consumer.pull_once import (
    CheckedFetch,
    FetchedRecord,
    has_text,
    is_wanted,
    read_checked,
    stored_times,
)
from raymq.client.consumer.repair_wait import read_repaired
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, InvalidArgumentError
from raymq.common.message import MessageExt, MessageQueue, checked_queue
from raymq.common.names import check_topic
from raymq.common.numbers import INT32_MAX, NOT_NEGATIVE, POINT_IN_TIME_MS, NumberRange, bounded, whole_number
from raymq.common.protocol.store import BROWSE_MAX_MESSAGES, BROWSE_MAX_SCANNED, FetchRequest, FetchResult, QueueBounds
from raymq.records.format.layout import SYS_FLAG_COMPRESSED
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import call_master

BROWSE_TIMEOUT_S: Final = 20.0
"""Timeout in seconds of each remote call for a page of messages. The page's own time limit `max_ms` is
separate."""
BROWSE_CALL_TIMEOUT_S: Final = 5.0
BROWSE_FETCH_BYTES: Final = 4 * 1024 * 1024
BROWSE_PAGE_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of decompressed bodies on a page. The page ends after the message that exceeds the limit."""
_AHEAD: Final = 32
"""Maximum number of records of one queue that one fetch reads."""

Fetch = Callable[[Sequence[tuple[MessageQueue, int, int]]], Sequence[CheckedFetch]]
"""Function that reads several queues. Each argument is a queue, its first offset, and the maximum number of messages.
The results are in the same order."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of messages of a topic. `scanned`: the number of records that were read to find the messages.

    `cursor` continues after this page; None at the end. `truncated`: True if a limit of records, bytes or time ended
    the search before the page was full.
    """

    messages: tuple[MessageExt, ...]
    cursor: str | None = None
    scanned: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """The offset range of one queue that is not read yet: from `begin` up to, but not including, `end`."""

    queue: MessageQueue
    begin: int
    end: int


class _HeldMessage(NamedTuple):
    """A fetched message, with the time in ms since 1970 at which it was stored. Queues are merged by this time."""

    fetched: FetchedRecord
    stored_ms: int

    @property
    def queue_offset(self) -> int:
        """The message's offset in its queue."""
        return self.fetched.message.queue_offset


class _Stream:
    """Reads the records of one queue in one direction, and buffers a few of them."""

    def __init__(self, span: Span, *, newest_first: bool) -> None:
        self.queue = span.queue
        self._begin, self._end = span.begin, span.end
        """The offset range of the queue's messages that this stream has neither returned nor buffered yet. Buffered
        messages lie directly after this range if messages are read newest first, otherwise directly before it."""
        self._newest_first = newest_first
        self._held: list[_HeldMessage] = []
        """Messages that were read but not returned yet. The last message of this list is returned first."""
        self._part: list[_HeldMessage] = []
        self._window = self._read_from = -1
        """Two offsets, used while a queue is read newest first, in windows of several offsets. They are the first
        offset of the current window, and the offset of the next fetch in this window. Both are -1 between two windows.
        """

    @property
    def wants(self) -> bool:
        """True if no message of the queue is buffered, and some of its records are not read yet."""
        return not self._held and (self._begin < self._end or self._read_from >= 0)

    def request(self, count: int) -> tuple[MessageQueue, int, int]:
        """Return the next fetch of this queue: the queue, the offset, and the maximum number of messages."""
        if not self._newest_first:
            return self.queue, self._begin, min(count, self._end - self._begin)
        if self._read_from < 0:
            self._window = self._read_from = max(self._begin, self._end - count)
        return self.queue, self._read_from, self._end - self._read_from

    def take_in(self, fetched: CheckedFetch) -> None:
        """Buffer the messages that this queue's last fetch (see `request`) has returned."""
        start = self._begin if not self._newest_first else self._read_from
        result, found = fetched.result, self._wanted(fetched.found, start)
        moved = result.next_offset > start
        following = min(result.next_offset, self._end)
        if not self._newest_first:
            self._held = found[::-1]
            self._begin = following if moved else self._begin
            if not moved and result.max_offset <= start:
                # The queue now ends before the offset range that is being read, so nothing is left to read.
                self._begin = self._end
            return
        self._part += found
        self._begin = min(max(self._begin, result.min_offset), self._end)
        if moved:
            self._read_from = following
        if self._read_from >= self._end or (not moved and result.max_offset <= start):
            self._held, self._part = self._part, []
            self._end = max(self._window, self._begin)
            self._window = self._read_from = -1

    def _wanted(self, found: Sequence[FetchedRecord], start: int) -> list[_HeldMessage]:
        """Keep the messages of a fetch from `start` that are before the end of the range."""
        times = stored_times([one.message for one in found])
        held = [_HeldMessage(*pair) for pair in zip(found, times, strict=True)]
        return [one for one in held if start <= one.queue_offset < self._end]

    @property
    def first(self) -> _HeldMessage | None:
        """The next buffered message; None if no message is buffered."""
        return self._held[-1] if self._held else None

    def pop(self) -> FetchedRecord:
        """Remove the next buffered message of the queue, and return it."""
        return self._held.pop().fetched

    def rest(self) -> Span:
        """Return the range of the queue's offsets whose messages `pop` has not returned yet. Some of these messages may
        already be buffered."""
        if self._newest_first:
            end = self._held[-1].queue_offset + 1 if self._held else self._end
            return Span(self.queue, self._begin, max(end, self._begin))
        begin = self._held[-1].queue_offset if self._held else self._begin
        return Span(self.queue, begin, self._end)


def read_page(
    spans: Iterable[Span],
    fetch: Fetch,
    wanted: Callable[[MessageExt], bool],
    *,
    newest_first: bool,
    limit: int,
    max_scanned: int,
    in_time: Callable[[], bool],
    whole_bodies: bool = True,
) -> Page:
    """Read the first `limit` wanted messages of several offset ranges (`spans`), one range per queue. The messages are
    merged by the times at which they were stored.

    The read stops early after `max_scanned` records, after BROWSE_PAGE_BYTES of bodies, or when `in_time()` returns
    False because the time limit has passed. The page is then truncated, and its cursor continues after the last scanned
    record. Without `whole_bodies`, a compressed body counts with its stored size.
    """
    streams = [_Stream(span, newest_first=newest_first) for span in spans]
    ahead = max(1, min(_AHEAD, max_scanned, -(-2 * limit // max(len(streams), 1))))
    found: list[MessageExt] = []
    scanned = size = 0
    truncated = False
    while len(found) < limit:
        dry = [stream for stream in streams if stream.wants]
        is_over = scanned >= max_scanned or size >= BROWSE_PAGE_BYTES or not in_time()
        if is_over and (dry or any(stream.first for stream in streams)):
            truncated = True
            break
        if dry:
            for stream, fetched in zip(dry, fetch([stream.request(ahead) for stream in dry]), strict=True):
                stream.take_in(fetched)
            continue
        following = _next(streams, newest_first=newest_first)
        if following is None:
            break
        one = following.pop()
        scanned += 1
        if wanted(one.message):
            found.append(one.alone())
            size += _cost(one, whole_bodies=whole_bodies)
    left = [span for span in (stream.rest() for stream in streams) if span.begin < span.end]
    return Page(tuple(found), write_cursor(left, newest_first=newest_first) if left else None, scanned, truncated)


def _cost(one: FetchedRecord, *, whole_bodies: bool) -> int:
    """Return the number of bytes that a message adds to the size of a page."""
    if not whole_bodies or one.message.record_damaged or not one.message.sys_flag & SYS_FLAG_COMPRESSED:
        return len(one.record)
    try:
        return len(one.message.body)
    except BodyUnreadableError:
        return len(one.record)


def _next(streams: Iterable[_Stream], *, newest_first: bool) -> _Stream | None:
    """Return the stream from which the merge must take the next message. Return None if no stream has a buffered
    message."""
    firsts = [(stream.first, stream) for stream in streams if stream.first is not None]
    if not firsts:
        return None
    choose = max if newest_first else min
    return choose(firsts, key=lambda pair: (pair[0].stored_ms, pair[1].queue))[1]


def write_cursor(spans: Iterable[Span], *, newest_first: bool) -> str:
    """Encode the offset ranges that are left to read as a URL-safe cursor, which `read_cursor` decodes."""
    table = [[span.queue.broker_name, span.queue.queue_id, span.begin, span.end] for span in spans]
    text = json.dumps([int(newest_first), table], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(topic: str, cursor: str) -> tuple[list[Span], bool]:
    """Decode a cursor. Returns the offset ranges that are left to read, and True if they are read newest first. Raises
    InvalidArgumentError if `cursor` is not a valid cursor."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        newest_first, table = json.loads(text)
        spans = [
            Span(
                MessageQueue(topic, str(name), whole_number("queue id", queue_id, 0, INT32_MAX)),
                whole_number("begin", begin, 0),
                whole_number("end", end, 0),
            )
            for name, queue_id, begin, end in table
        ]
    except (binascii.Error, ValueError, TypeError) as error:
        raise InvalidArgumentError(f"the cursor does not name a page of messages: {error}") from None
    return spans, bool(newest_first)


class BrowseAdmin(MessageAdmin):
    """The administration call `browse`, which reads a topic page by page."""

    @bounded(
        begin_ms=POINT_IN_TIME_MS,
        end_ms=POINT_IN_TIME_MS,
        begin_offset=NOT_NEGATIVE,
        limit=NumberRange(1, BROWSE_MAX_MESSAGES),
        max_scanned=NumberRange(1, BROWSE_MAX_SCANNED),
        max_ms=NumberRange(1, 60_000),
    )
    def browse(
        self,
        topic: str,
        *,
        queue: MessageQueue | None = None,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        begin_offset: int | None = None,
        newest_first: bool = True,
        tags: str = "*",
        contains: str = "",
        limit: int = 50,
        max_scanned: int = 10_000,
        max_ms: int = 5_000,
        cursor: str | None = None,
        whole_bodies: bool = True,
    ) -> Page:
        """Return one page of a topic's messages in the order in which they were stored, newest first or oldest first.
        Reads all queues, or one queue. Joins no group, and changes nothing.

        Returns the messages that match all given filters. `begin_ms`, `end_ms`: stored from `begin_ms` on and before
        `end_ms` (ms since 1970). `begin_offset`: from this offset on, in one `queue`. `tags`: with one of these tags
        (``"a || b"``). `contains`: with this text in the body. A damaged message passes every filter. Returns at most
        `limit` messages, and stops after `max_scanned` records, about `max_ms`, or 64 MiB of bodies. Without
        `whole_bodies`, for callers that read only the beginning of bodies, compressed bodies count with their stored
        size. `cursor`, from an earlier page of the same query, continues after that page. Several queues are merged by
        the store times of their messages.

        Messages that are stored after the first page are not in later pages. Raises TopicNotExistError if the topic
        does not exist; InvalidArgumentError if an argument is invalid; RequestTimeoutError or ServiceNotAvailableError
        while a broker is unreachable.
        """
        deadline_s = time.monotonic() + max_ms / 1000
        subscription, text = Subscription.parse(check_topic(topic), tags), contains.encode()
        if cursor is not None:
            spans, newest_first = read_cursor(topic, cursor)
        else:
            spans = self._spans(topic, queue, begin_ms, end_ms, begin_offset)
        return read_page(
            spans,
            partial(self._fetch_repaired, deadline_s=deadline_s),
            lambda message: is_wanted(message, subscription) and has_text(message, text),
            newest_first=newest_first,
            limit=limit,
            max_scanned=max_scanned,
            in_time=lambda: time.monotonic() < deadline_s,
            whole_bodies=whole_bodies,
        )

    def _spans(
        self, topic: str, queue: MessageQueue | None, begin_ms: int | None, end_ms: int | None, begin_offset: int | None
    ) -> list[Span]:
        """Return the offset range of each queue that a query covers. Raises InvalidArgumentError if the topic lacks
        `queue`."""
        if begin_offset is not None and queue is None:
            raise InvalidArgumentError(
                "begin_offset needs a queue, because offsets count in each queue: pass queue=, too"
            )
        route = self._routes.wait(topic, BROWSE_TIMEOUT_S)
        queues = list(route.subscribe_queues) if queue is None else [checked_queue("queue", queue)]
        if queue is not None and queues[0] not in route.subscribe_queues:
            raise InvalidArgumentError(f"topic {topic!r} has no queue {queue.broker_name}:{queue.queue_id}")
        spans = []
        for one, bounds in self._bounds_of(queues).items():
            begin = bounds.min_offset if begin_ms is None else self.offset_by_time(one, begin_ms)
            end = bounds.max_offset if end_ms is None else min(self.offset_by_time(one, end_ms), bounds.max_offset)
            spans.append(Span(one, max(begin, begin_offset or 0, bounds.min_offset), end))
        return [span for span in spans if span.begin < span.end]

    def _bounds_of(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        """Return the offset ranges that queues hold, with one call for each broker group."""
        found: dict[MessageQueue, QueueBounds] = {}
        for _, group in _by_broker(queues):
            asked = [(one.topic, one.queue_id) for one in group]
            bounds = call_master(
                self._routes,
                self._storages,
                group[0],
                BROWSE_TIMEOUT_S,
                partial(_ask_bounds, asked),
            )
            found |= dict(zip(group, bounds, strict=True))
        return found

    def _fetch_repaired(self, wanted: Sequence[tuple[MessageQueue, int, int]], deadline_s: float) -> list[CheckedFetch]:
        """Read several queues, and wait until `deadline_s` (time.monotonic) for the repair of damaged messages."""

        def damage_of(fetches: list[CheckedFetch]) -> dict[MessageQueue, list[int]]:
            return {queue: one.damaged for (queue, _, _), one in zip(wanted, fetches, strict=True)}

        return read_repaired(lambda: self._fetch_queues(wanted), damage_of, self._repairs, deadline_s)

    def _fetch_queues(self, wanted: Sequence[tuple[MessageQueue, int, int]]) -> list[CheckedFetch]:
        """Read several queues, with one call for each broker group."""
        requests = {one: FetchRequest(one.topic, one.queue_id, offset, count) for one, offset, count in wanted}
        found: Mapping[MessageQueue, FetchResult] = {}
        for _, group in _by_broker(list(requests)):
            asked = [requests[one] for one in group]
            results = call_master(
                self._routes,
                self._storages,
                group[0],
                BROWSE_TIMEOUT_S,
                partial(_ask_records, asked),
            )
            found = {**found, **dict(zip(group, results, strict=True))}
        return [read_checked(found[queue], queue, offset) for queue, offset, _ in wanted]


def _ask_bounds(queues: Sequence[tuple[str, int]], storage: StorageClient, left_s: float) -> list[QueueBounds]:
    return storage.bounds_of_queues(queues, min(left_s, BROWSE_CALL_TIMEOUT_S))


def _ask_records(requests: Sequence[FetchRequest], storage: StorageClient, left_s: float) -> list[FetchResult]:
    return storage.fetch(requests, BROWSE_FETCH_BYTES, 0.0, min(left_s, BROWSE_CALL_TIMEOUT_S))


def _by_broker(queues: Sequence[MessageQueue]) -> Iterator[tuple[str, list[MessageQueue]]]:
    """Group queues by broker group."""
    names: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        names.setdefault(queue.broker_name, []).append(queue)
    yield from names.items()
