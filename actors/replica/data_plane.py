"""The data plane of a storage actor over lanes (direct socket connections): appends, fetches, long polls for messages,
and other calls.

This module executes the frames of a lane; raymq.remoting.lane encodes them. It does not use Ray.

    APPEND   written by the lane's thread; answered at once, or when it is on disk and copied
             (actors.core.replica.pending_appends)
    WAIT     answered by the lane's thread, right after the appends of a turn
    FETCH    read by a few threads, because reads may need the disk; a waiting FETCH occupies no thread
    CALL     by the same threads; the end of a transaction as an append
    The frames of the log are served by actors.replica.log_lanes.

No state of this module survives the process.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from actors.core.access.meter import Consumption, weigh_results
from actors.core.replica.append_limit import AppendLimit
from actors.core.replica.deleted_topics import DeletedTopics
from actors.core.replica.pending_appends import EndedAppend, PendingAppends
from actors.core.replica.topic_bounds import TopicBounds
from actors.replica.sole_replica import SoleReplica
from actors.request_pool import RequestKind, RequestPool
from raymq.common.config.store import StoreOptions
from raymq.common.delay import names_real_topic
from raymq.common.errors import RaymqError, SystemBusyError
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.store import AppendResult, QueuePosition
from raymq.common.protocol.transactions import EndTransactionRequest
from raymq.records.format.encode import EncodedBatch
from raymq.remoting.lane.address import LaneAddress, TlsFiles
from raymq.remoting.lane.appends import ServerHandles, decode_append, encode_results
from raymq.remoting.lane.calls import ControlCalls, Guard, encode_result
from raymq.remoting.lane.connection import LaneRequest, Users
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.loop import Timer
from raymq.remoting.lane.reads import (
    Fetch,
    QueueName,
    decode_fetch,
    decode_queues,
    decode_wait,
    encode_ends,
    encode_fetched,
)
from raymq.remoting.lane.server import FRAME_MAX_BYTES, Handler, LaneServer
from storage.append.durability import StartedAppend
from storage.read.fetch_service import concluded, following, has_news
from storage.read.long_polls import LongPolls, LongPollWaiter

READ_THREADS: Final = 4
"""Number of threads of a data plane that read records and execute calls."""
LANE_FETCH_MAX_BYTES: Final = 16 << 20
"""Maximum size, in bytes, of the records in one answer to a fetch, whatever limit the client requests."""
UNSENT_MAX_BYTES: Final = 128 << 20
"""Maximum number of bytes of answers that clients have not read yet. At this limit no further fetch is executed, so
that the memory for answers is bounded."""
WAIT_MAX_S: Final = 30.0
"""Maximum time, in seconds, that a WAIT or FETCH request waits for messages."""
BUSY_RETRY_S: Final = 0.2
CHUNKS_WAITING_MAX: Final = 1000
"""Maximum number of followers' log reads that wait for a server thread. Each follower has at most one such
read."""
DEFAULT_QUEUES: Final = StoreOptions()

_FRAMES_OF_SERVERS: Final[Mapping[int, str]] = {
    FrameKind.READ_LOG: "read_log",
    FrameKind.ACK_LOG: "read_log",
    FrameKind.APPEND_LOG: "append_log",
}
"""The kinds of frames that replicas send to each other, with the names of their access rules
(raymq.remoting.access.requests)."""

logger = logging.getLogger(__name__)


def request_kinds(options: StoreOptions) -> list[RequestKind]:
    """Return the request kinds of a data plane. Requests of each kind have their own limits on the number of waiting
    requests and on the time to wait for a thread."""
    return [
        RequestKind(
            "pull",
            options.pull_queue_capacity,
            options.wait_time_in_pull_queue_ms / 1000,
            "pull_queue_capacity",
            "wait_time_in_pull_queue_ms",
        ),
        RequestKind(
            "admin",
            options.admin_broker_queue_capacity,
            options.wait_time_in_admin_broker_queue_ms / 1000,
            "admin_broker_queue_capacity",
            "wait_time_in_admin_broker_queue_ms",
        ),
        RequestKind("replicate", CHUNKS_WAITING_MAX, capacity_setting="CHUNKS_WAITING_MAX"),
    ]


class Answering(NamedTuple):
    """A request whose append is not complete yet, with the function that will answer it."""

    request: LaneRequest
    answer: Callable[[Sequence[AppendResult]], None]


class LaneContext:
    """The state of one client connection: its queue handles and its long polls."""

    def __init__(self) -> None:
        self.handles = ServerHandles()
        self.waits: set[LongPollRequest] = set()
        self.watched: WatchedQueues | None = None

    def close(self) -> None:
        """End the long polls of the connection, because the connection has closed."""
        for wait in list(self.waits):
            wait.end()
        if self.watched is not None:
            self.watched.end()


class LongPollRequest(ABC):
    """A request that waits a limited time for messages of some queues. Only the thread that serves the lanes (direct
    socket connections) may use it, but any thread may call `wake`. `look` is called when a queue may have changed, and
    finally at the deadline."""

    def __init__(self, plane: DataPlane, request: LaneRequest) -> None:
        self.request = request
        self._plane, self._context = plane, request.context
        self._polls: LongPolls | None = None
        self._waiter: LongPollWaiter | None = None
        self._timer: Timer | None = None
        self.is_woken = self.is_ended = False

    def begin(self, queues: Sequence[tuple[str, int]], deadline_s: float) -> None:
        """Wait for a change of `queues`, but not after the deadline. Raises SystemBusyError if too many
        requests wait."""
        self._polls = self._plane.source.polls
        self._waiter = self._polls.register(queues, self.wake)
        self._timer = self._plane.server.loop.call_at(deadline_s, self._time_is_over)
        self._context.waits.add(self)

    def wake(self) -> None:
        """Schedule a new check of this waiting request, because one of the request's queues has changed."""
        if not self.is_woken:
            self.is_woken = True
            self._plane.server.loop.call_soon(self._look_again)

    def end(self) -> None:
        """Stop this request's wait for new messages in its queues. Idempotent."""
        if self.is_ended:
            return
        self.is_ended = True
        if self._polls is not None and self._waiter is not None:
            self._polls.remove(self._waiter)
        if self._timer is not None:
            self._plane.server.loop.cancel(self._timer)
        self._context.waits.discard(self)

    @abstractmethod
    def look(self, *, last: bool) -> None:
        """Check the request's queues, and answer the request if a queue has messages. `last` is True at the end of the
        request's wait: the request is then answered even without messages."""

    def _look_again(self) -> None:
        if not self.is_ended:
            # Reset the flag before checking the queues, so that a change during the check schedules another check.
            self.is_woken = False
            self.try_look(last=False)

    def _time_is_over(self) -> None:
        if not self.is_ended:
            self.try_look(last=True)

    def try_look(self, *, last: bool) -> None:
        """Check the queues of this long-poll request with `look`. If the check raises an error, answer the request with
        this error."""
        try:
            self.look(last=last)
        except Exception as error:
            self.end()
            self.request.fail(self.request.told(error, type(self).__name__))


class WatchedQueues:
    """The consecutive WAIT requests of one connection for the same queues. Only the thread that serves the lanes
    (direct socket connections) may use it, but any thread may call `wake`. The queues stay registered between the
    requests: a consumer waits again after each message that it gets, usually with other offsets of the same queues."""

    def __init__(self, plane: DataPlane, named: bytes, queues: Sequence[QueueName]) -> None:
        """`named` is the part of the WAIT frame that names its queues, and `queues` are the decoded names."""
        self._plane, self.named, self.queues = plane, named, queues
        self._request: LaneRequest | None = None
        """The WAIT request that is not answered yet; None if the client waits for no answer."""
        self._positions: Sequence[QueuePosition] = ()
        self._deadline_s = 0.0
        self._timer: Timer | None = None
        """The timer for the deadline of the WAIT request. It is replaced only if it would fire too late, not at each
        new WAIT."""
        self._timer_s = 0.0
        self._polls: LongPolls | None = None
        self._waiter: LongPollWaiter | None = None
        self._is_woken = False

    def ask(self, request: LaneRequest, offsets: Sequence[int], wait_s: float) -> None:
        """Answer `request` with the queues' end offsets as soon as one queue's end differs from its offset in
        `offsets`, or after `wait_s`.

        The previous WAIT request gets no answer. Raises SystemBusyError if too many requests wait.
        """
        self.drop()
        self._positions = [
            QueuePosition(topic, queue_id, at) for (topic, queue_id), at in zip(self.queues, offsets, strict=True)
        ]
        # Store this request before its queues are checked. Then a queue that changes during or after the check causes
        # another check.
        self._request = request
        if wait_s > 0 and self._polls is not self._plane.source.polls:
            self._register()
        self._look(last=wait_s <= 0)
        if self._request is not None:
            self._deadline_s = _deadline_s(wait_s)
            if self._timer is None or self._deadline_s < self._timer_s:
                self._set_timer()

    def wake(self) -> None:
        """Schedule a check of the WAIT request, because one of its queues has changed."""
        if self._request is not None and not self._is_woken:
            self._is_woken = True
            self._plane.server.loop.call_soon(self._look_again)

    def drop(self) -> None:
        """Drop the current WAIT request without an answer."""
        request, self._request = self._request, None
        if request is not None:
            request.drop()

    def end(self) -> None:
        """Drop the current WAIT request without an answer, and stop watching the queues for this connection.
        Idempotent."""
        self._request = None
        self._unregister()
        self._cancel_timer()

    def _register(self) -> None:
        self._unregister()
        polls = self._plane.source.polls
        try:
            self._waiter = polls.register(self.queues, self.wake)
        except SystemBusyError:
            self._request = None
            raise
        self._polls = polls

    def _unregister(self) -> None:
        if self._polls is not None and self._waiter is not None:
            self._polls.remove(self._waiter)
        self._polls = self._waiter = None

    def _look_again(self) -> None:
        # Clear the flag before checking the queues. A change of a queue during the check then schedules another check.
        self._is_woken = False
        self._look(last=False)

    def _time_is_over(self) -> None:
        self._timer = None
        if self._request is None:
            return
        if time.monotonic() >= self._deadline_s:
            self._look(last=True)
        else:  # This timer has fired before the deadline of the current WAIT request, so set a new timer.
            self._set_timer()

    def _set_timer(self) -> None:
        self._cancel_timer()
        self._timer_s = self._deadline_s
        self._timer = self._plane.server.loop.call_at(self._timer_s, self._time_is_over)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._plane.server.loop.cancel(self._timer)
            self._timer = None

    def _look(self, *, last: bool) -> None:
        """Answer the WAIT request if a queue has changed, or if this is the last check. If the check fails, answer with
        the error."""
        request = self._request
        if request is None:
            return
        try:
            ends, news = self._plane.source.ends(self._positions)
            if news or last:
                self._request = None
                request.answer(encode_ends(ends), count=len(ends))
        except Exception as error:
            self.end()
            request.fail(request.told(error, "a wait"))


class WaitingFetch(LongPollRequest):
    """A FETCH request that waits for messages. Reading threads check for messages, one check at a time."""

    def __init__(
        self, plane: DataPlane, request: LaneRequest, fetch: Fetch, handed: Callable[[int, int], None] | None = None
    ) -> None:
        """`handed` is called with the number of bytes and messages in the answer, before the answer is sent."""
        super().__init__(plane, request)
        self._fetch, self._requests, self._handed = fetch, list(fetch.requests), handed
        self._is_looking = self._is_last = False
        self._reads_nothing = not fetch.max_bytes and all(
            one.tag_codes is None and one.sql is None for one in fetch.requests
        )

    def look(self, *, last: bool) -> None:
        """Look for messages in the queues of this FETCH request, in a reading thread. If such a check is already
        running, another check follows it. If the request needs only the queues' end offsets, run the check at once, in
        the current thread."""
        self._is_last = self._is_last or last
        if not self._is_looking:
            self._is_looking = True
            if self._reads_nothing:
                self._read(is_last=self._is_last)
            else:
                self._plane.reads.submit(partial(self._read, is_last=self._is_last), self._refuse)
        else:
            # A check of the queues is already running. It may have passed the changed queue before the change, so start
            # another check after it.
            self.is_woken = True

    def _read(self, *, is_last: bool) -> None:
        """Read the queues of a FETCH request. Answer the request if the queues have messages, or if `is_last` is true.
        Runs in a reading thread."""
        try:
            results = self._plane.source.fetch(self._requests, max_bytes=self._fetch.max_bytes, wait_s=0.0)
            if is_last or has_news(results):
                answer = concluded(self._fetch.requests, results)
                parts = encode_fetched(answer)
                if self._handed is not None:
                    self._handed(*weigh_results(answer))
                self._end_first()
                self.request.answer(*parts, count=len(answer))
                return
            self._requests = following(self._requests, results)
        except Exception as error:
            self._end_first()
            self.request.fail(self.request.told(error, "a fetch"))
            return
        self._plane.server.loop.call_soon(self._note_looked)

    def _refuse(self, error: RaymqError) -> None:
        """Fail the FETCH with `error`, because no thread was free in time."""
        self._end_first()
        self.request.fail(error)

    def _end_first(self) -> None:
        """End this request's long poll without waiting for more messages, because the caller answers the FETCH
        next."""
        loop = self._plane.server.loop
        if loop.is_own_thread:
            self.end()
        else:
            loop.call_soon(self.end)

    def _note_looked(self) -> None:
        self._is_looking = False
        if not self.is_ended and (self.is_woken or self._is_last):
            self.is_woken = False
            self.try_look(last=self._is_last)


class DataPlane:
    """Serves the lanes (direct socket connections) of one storage actor. The replica `source` must be open, and is
    never replaced."""

    def __init__(
        self,
        label: str,
        source: SoleReplica,
        *,
        deleted: DeletedTopics,
        limit: AppendLimit,
        methods: Mapping[str, Callable[..., Any]],
        bounds: TopicBounds | None = None,
        frame_max_bytes: int = FRAME_MAX_BYTES,
        queues: StoreOptions = DEFAULT_QUEUES,
        host: str = "",
        tls: TlsFiles | None = None,
        more: Callable[[DataPlane], Mapping[int, Handler]] = lambda plane: {},
        users: Users | None = None,
        guard: Guard | None = None,
        meter: Consumption | None = None,
    ) -> None:
        """`methods`: the methods that clients may call by name. `bounds`: the bounded topics, by
        default none. `more` creates the handlers of further kinds of frames.

        `queues`: how many fetches and calls may wait for a thread, and how long. With `host`, an IP address of this
        node, clients on other nodes are served, too. With `users` and `guard`, every lane belongs to a user, and each
        frame must be allowed for that user; `meter` counts what users consume.
        """
        self.source = source
        self._deleted, self._limit, self._guard, self._meter = deleted, limit, guard, meter
        self._bounds = bounds or TopicBounds(lambda: (), lambda batch: False)
        self._pending: PendingAppends[Answering] = PendingAppends()
        self._under_way = 0
        """The number of started appends that are not answered yet."""
        self._is_settling = False
        """True if a check of the started appends (`_settle`) is scheduled."""
        self._deadline: Timer | None = None
        self._pool = RequestPool(f"lane-read-{label}", READ_THREADS, request_kinds(queues))
        self.reads = self._pool.queues["pull"]
        """The queue of fetches that wait for a reading thread."""
        self._calls, self._chunks = self._pool.queues["admin"], self._pool.queues["replicate"]
        self.server = LaneServer(
            label,
            {
                FrameKind.OPEN: self._open_handle,
                FrameKind.APPEND: self._append,
                FrameKind.FETCH: self._fetch,
                FrameKind.WAIT: self._wait,
                FrameKind.CALL: ControlCalls(
                    methods, self._call_soon, {"end_transaction": self._end_transaction}, guard=guard
                ),
                **self._guarded(more(self)),
            },
            contexts=LaneContext,
            bulk_kinds=frozenset({FrameKind.APPEND, FrameKind.APPEND_LOG}),
            frame_max_bytes=frame_max_bytes,
            host=host,
            tls=tls,
            users=users,
        )
        self._pool.refuse_by(self.server.loop)
        source.add_progress_listener(self._note_progress)

    @property
    def address(self) -> LaneAddress:
        """The address at which clients open lanes (direct socket connections)."""
        return self.server.address

    def requests(self) -> list[RequestFigures]:
        """Return metrics of the requests that wait for a thread, by request kind."""
        return self._pool.figures()

    def limit(self, queues: StoreOptions) -> None:
        """Change how many fetches and calls may wait for a thread of the data plane, and how long."""
        self._pool.limit(request_kinds(queues))

    def submit(self, call: Callable[[], None], fail: Callable[[RaymqError], None]) -> None:
        """Let a thread run `call`, which reads a chunk of the log. Calls `fail` if no thread is free in time. Raises
        SystemBusyError if too many requests wait (RequestQueue)."""
        self._chunks.submit(call, fail)

    def _call_soon(self, method: str, call: Callable[[], None], fail: Callable[[RaymqError], None]) -> None:
        self._calls.submit(call, fail)

    def close(self) -> None:
        """Close all lanes (direct socket connections). Idempotent."""
        self.server.close()
        self._pool.close()

    def _guarded(self, handlers: Mapping[int, Handler]) -> Mapping[int, Handler]:
        """Wrap the handlers of frames that only servers may send. The wrapper checks the user of a frame before it
        calls the frame's handler."""
        guard = self._guard
        if guard is None:
            return handlers

        def ask_first(kind: int, handler: Handler, request: LaneRequest) -> None:
            guard(request, _FRAMES_OF_SERVERS[kind], ())
            handler(request)

        return {kind: partial(ask_first, kind, handler) for kind, handler in handlers.items()}

    # Handlers of the frames that append records

    def _open_handle(self, request: LaneRequest) -> None:
        request.context.handles.open(request.payload)
        request.drop()

    def _append(self, request: LaneRequest) -> None:
        batches = decode_append(request.payload, request.count, request.context.handles)
        if self._guard is not None:
            self._guard(request, "append", (batches,))

        def start() -> StartedAppend:
            self._deleted.check(batches)
            source = self.source
            return self._bounds.append(batches, source.epoch, time.monotonic(), lambda: source.start_append(batches))

        def answer(kept: Sequence[EncodedBatch], results: Sequence[AppendResult]) -> None:
            # check a second time if the topic was deleted: if it was deleted during the append, no consumer will see
            # the messages
            self._deleted.check(kept)
            request.answer(*encode_results(results), count=len(results))

        self._start(request, start, partial(answer, batches), lambda: partial(answer, _kept(batches)))

    def _end_transaction(self, request: LaneRequest, end: EndTransactionRequest) -> None:
        """End a transaction (TransactionService.start_end), without waiting for the disk. Safe to repeat."""

        def start() -> StartedAppend:
            return self.source.start_end(end, require_topic=self._deleted.require)

        def answer(results: Sequence[AppendResult]) -> None:
            request.answer(encode_result(results[0]))

        self._start(request, start, answer, lambda: answer)

    def _start(
        self,
        request: LaneRequest,
        start: Callable[[], StartedAppend],
        answer: Callable[[Sequence[AppendResult]], None],
        later: Callable[[], Callable[[Sequence[AppendResult]], None]],
    ) -> None:
        """Start an append, and answer its request: at once if the append is already complete, otherwise after it has
        completed.

        `answer` sends the answer of an append that is complete at once. `later` is called at once if the append is not
        complete yet. The function that `later` returns sends the answer when the append has completed.
        """
        self._limit.begin()
        # Count the append before it starts. Then each flush or copy from now on causes a check of the appends that are
        # not complete yet.
        self._under_way += 1
        try:
            started = start()
            results = started.settle(time.monotonic())
            if results is not None:
                answer(results)
        except BaseException:
            self._end_append()
            raise
        if results is None:
            self._pending.add(started, Answering(request, later()))
            self._set_deadline()
            return
        self._end_append()

    def _end_append(self) -> None:
        self._limit.end()
        self._under_way -= 1

    def _note_progress(self) -> None:
        """Schedule a check of the started appends, because some may be complete. Any thread may call it."""
        if self._under_way and not self._is_settling:
            self._is_settling = True
            self.server.loop.call_now(self._settle)

    def _settle(self) -> None:
        """Answer the started appends that have completed or failed."""
        # Clear the flag before checking the appends. A flush or a copy that ends during the check then schedules
        # another check.
        self._is_settling = False
        for settled in self._pending.settle(time.monotonic()):
            self._end_append()
            self._answer(settled)
        self._set_deadline()

    def _answer(self, settled: EndedAppend[Answering]) -> None:
        request, answer = settled.token
        try:
            if settled.error is not None:
                raise settled.error
            answer(settled.results)
        except RaymqError as error:
            request.fail(error)

    def _set_deadline(self) -> None:
        if self._deadline is None and self._pending:
            deadline_s = self._pending.next_deadline_s
            assert deadline_s is not None
            self._deadline = self.server.loop.call_at(deadline_s, self._meet_deadline)

    def _meet_deadline(self) -> None:
        self._deadline = None
        self._settle()

    # Handlers of the frames that read records

    def _wait(self, request: LaneRequest) -> None:
        named, offsets, wait_s, reads = decode_wait(request.payload, request.count)
        context: LaneContext = request.context
        watched = context.watched
        if watched is None or watched.named != named or len(watched.queues) != request.count:
            queues = decode_queues(named, request.count)
            if watched is not None:
                watched.drop()
                watched.end()
            watched = context.watched = WatchedQueues(self, named, queues)
        if self._guard is not None:
            self._guard(request, "bounds_of_queues", (watched.queues,))
        if reads.found:
            self.source.count_reads(reads)
        watched.ask(request, offsets, wait_s)

    def _fetch(self, request: LaneRequest) -> None:
        fetch = decode_fetch(request.payload, request.count)
        if self._guard is not None:
            self._guard(request, "fetch", (fetch.requests, fetch.max_bytes, fetch.wait_s))
        if fetch.reads.found:
            self.source.count_reads(fetch.reads)
        if self.server.unsent_bytes > UNSENT_MAX_BYTES:
            text = (
                f"the storage actor is busy: {self.server.unsent_bytes} bytes of answers have not been sent to "
                "clients yet; nothing was read, try again later"
            )
            raise SystemBusyError(text, BUSY_RETRY_S)
        fetch = fetch._replace(max_bytes=min(fetch.max_bytes, LANE_FETCH_MAX_BYTES))
        meter, user, handed = self._meter, request.user, None
        portion = None if meter is None else meter.portion(user)
        if meter is not None and portion is not None:
            fetch = Fetch(portion.requests_of(fetch.requests), portion.bytes_of(fetch.max_bytes), fetch.wait_s)
            handed = partial(meter.consumed, user)
        wait = WaitingFetch(self, request, fetch, handed)
        if fetch.wait_s > 0:
            queues = [(one.topic, one.queue_id) for one in fetch.requests]
            wait.begin(queues, _deadline_s(fetch.wait_s))
        wait.try_look(last=fetch.wait_s <= 0)


def _deadline_s(wait_s: float) -> float:
    return time.monotonic() + min(wait_s, WAIT_MAX_S)


def _kept(batches: Sequence[EncodedBatch]) -> Sequence[EncodedBatch]:
    """Return copies of the batches for an append that completes later: only delayed messages keep their records.

    The records of delayed messages are needed because they name the messages' topics. All other records are dropped:
    when the append completes, their buffer is used by another request.
    """
    return [
        EncodedBatch(
            batch.topic,
            batch.queue_id,
            bytes(batch.records) if names_real_topic(batch.topic) else b"",
            batch.sizes,
            batch.tag_codes,
            batch.producer,
            batch.message_ids,
            batch.wait_store_msg_ok,
        )
        for batch in batches
    ]
