"""ConsumePool runs the calls of a user's listener in threads of the listener's process.

A `ConsumeRequest` (RocketMQ's word) holds the listener calls of one task. One thread makes the calls one after another,
and further threads join after JOIN_AFTER_S. So a quick listener costs no thread switch per message, and a slow listener
gets all threads. An orderly request has one thread only, and ends at its first failure.

A listener may be a coroutine function, or return an awaitable. The thread passes the awaitable to an event loop
(raymq.client.consumer.push.async_calls) and waits for its result, so the awaitable counts as a running call.

A call that takes longer than its timeout is given up: the pool reports the call as failed, and its thread no longer
counts. Cancelling a coroutine frees its thread. The pool may replace as many stuck threads as it has threads. If all
replacement threads are stuck too, nothing is consumed until one call returns (`stuck` is the number of stuck threads).

A request is cancelled between two calls if its owner, the Pull actor, has not called for HANDLER_LEASE_S: the owner may
be dead, and another consumer may have its queue. This state is lost when the process ends.

The pool has no thread that watches the other threads: the pool's owner calls `look` when a check is due.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from raymq.client.consumer.push.answers import Replier, judge
from raymq.client.consumer.push.async_calls import AsyncCall, AsyncCalls
from raymq.client.consumer.push.consume_request import ConsumeRequest
from raymq.client.consumer.push.hook import ConsumeContext, ConsumeHook, call_hooks
from raymq.common.errors import BodyUnreadableError
from raymq.common.message import ConsumeStatus, MessageExt
from raymq.common.parallel import start_daemon
from raymq.common.protocol.consume_result import TIMEOUT_DELAY_LEVEL, ConsumeReport, Failure
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, PROCESS_BOUNDS_MS
from raymq.telemetry.trace.contexts import TracedCalls, new_request_id
from raymq.telemetry.trace.deliveries import DeliveryTrace
from raymq.telemetry.trace.records import ContextCode

JOIN_AFTER_S: Final = 0.02
"""Time, in seconds, after which more threads begin to work on a request that is not finished. After each further period
of this length, twice as many threads as before are added."""
HANDLER_LEASE_S: Final = 5.0
"""Time in s after which a request is cancelled if its owner (the Pull actor) has made no call."""
QUICK_CALL_S: Final = PROCESS_BOUNDS_MS[0] / 1000
"""Listener calls that take at most this time, in s, are counted together. It is the upper bound of the first bucket of
the metric of listener calls."""
SETTLE_AFTER_S: Final = 0.05
"""Minimum duration, in s, of a listener call after which the listener's thread checks whether the pool has given up
waiting for this call. The check takes the pool's lock, so quicker calls skip it."""

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Any]


class _Worker:
    """State of one listener thread: its request, the index of its current call, and the start time of this call (0: no
    call). `awaited`: the awaitable for which the thread waits."""

    __slots__ = ("awaited", "given_up", "index", "request", "started_s")

    def __init__(self) -> None:
        self.request: ConsumeRequest | None = None
        self.index = -1
        self.started_s = 0.0
        self.given_up = False
        self.awaited: AsyncCall | None = None


class ConsumePool:
    """Pool that makes up to `threads` calls of the listener `handler` at a time. `timeout_s` applies to calls of
    requests that are not orderly. `shown_group` is the group name that hooks get. `on_done` is called when a request is
    done, with the pool's lock held: it must neither block nor call the pool."""

    def __init__(
        self,
        handler: Handler,
        *,
        threads: int,
        timeout_s: float,
        group: str = "",
        shown_group: str = "",
        hooks: Sequence[ConsumeHook] = (),
        replier: Replier | None = None,
        trace: DeliveryTrace | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._handler = handler
        self._threads = threads
        self._timeout_s = timeout_s
        self._group = group
        self._shown_group = shown_group or group
        self._hooks = tuple(hooks)
        self._replier = replier
        self._trace = trace
        self._on_done = on_done
        self._async_calls = AsyncCalls()
        self._lock = threading.Lock()
        """Lock that guards the pool's requests, threads and counts, and the fields of each request except `ended` and
        `failures`."""
        self._wanted = threading.Condition(self._lock)
        """Condition on which the pool's idle threads wait for a request."""
        self._queue: deque[ConsumeRequest] = deque()
        """Requests that need further threads. A request appears once for each thread that it still needs."""
        self._running: dict[ConsumeRequest, None] = {}
        """Requests that are not done, in the order of their submission."""
        self._workers: set[_Worker] = set()
        self._idle = 0
        """Number of threads that wait for a request."""
        self._stuck = 0
        """Number of threads that are stuck: their listener call took longer than its timeout and was given up, but has
        not returned."""
        self._in_order: dict[str, ConsumeRequest] = {}
        """The most recently submitted request of each queue whose messages are consumed in order, by the request's
        `key`. A later request of the same queue waits for this request."""

    def submit(self, request: ConsumeRequest) -> None:
        """Start a request, which calls the listener for the messages of a task. An orderly request cancels the earlier
        requests of its queue, and begins when their running listener call has ended."""
        now_s = time.monotonic()
        request.lease_until_s, request.join_at_s = now_s + HANDLER_LEASE_S, now_s + JOIN_AFTER_S
        if self._trace is not None and request.calls:
            request.traced = TracedCalls(new_request_id(), request.calls, request.message_count)
            self._trace.begun(request.topic, request.traced)
        with self._lock:
            self._running[request] = None
            if not request.calls:
                self._finish(request)
                return
            if request.key is not None:
                before = self._in_order.get(request.key)
                self._in_order[request.key] = request
                if before is not None and self._is_followed(before, request):
                    return
            self._invite(request)

    def _is_followed(self, before: ConsumeRequest, request: ConsumeRequest) -> bool:
        """Cancel the earlier requests of a queue. Returns True if `request` must wait for a running call of an earlier
        request."""
        self._cancel(before)
        running = before if before.follows is None else before.follows
        self._cancel(running)
        if running.done.is_set():
            return False
        running.follower, request.follows = request, running
        return True

    def cancel(self, request: ConsumeRequest) -> None:
        """Cancel a request: no further listener call of the request begins."""
        with self._lock:
            self._cancel(request)

    def report(self, request: ConsumeRequest) -> ConsumeReport:
        """Return the listener calls of a request that have ended since the last report."""
        with self._lock:
            return request.report(self._stuck)

    def renew_leases(self) -> None:
        """Renew the leases of all requests. Called each time that the owner of the requests (the Pull actor) makes a
        call."""
        until_s = time.monotonic() + HANDLER_LEASE_S
        with self._lock:
            for request in self._running:
                request.lease_until_s = until_s

    def hold(self, request: ConsumeRequest, until_s: float) -> None:
        """Set the lease of one request: after `until_s` no further listener call of the request begins."""
        with self._lock:
            request.lease_until_s = until_s

    def look(self) -> float:
        """Give up listener calls that exceed their timeout, and let more threads help with long requests. Returns the
        time in s until the next check is due; infinity if nothing runs."""
        now_s, next_s = time.monotonic(), float("inf")
        with self._lock:
            for request in list(self._running):
                next_s = min(next_s, self._give_up_late(request))
                if self._has_work_for_more(request):
                    if now_s >= request.join_at_s:
                        for _ in range(min(request.joining, self._threads - request.workers)):
                            self._invite(request)
                        request.joining *= 2
                        request.join_at_s = now_s + JOIN_AFTER_S
                    next_s = min(next_s, request.join_at_s)
                elif request.invited:
                    next_s = min(next_s, now_s + JOIN_AFTER_S)
        return max(next_s - now_s, 0.001)

    def _has_work_for_more(self, request: ConsumeRequest) -> bool:
        """True if further threads could make listener calls of a request. The caller holds the lock."""
        left = len(request.calls) - len(request.ended) - request.workers
        return request.key is None and not request.invited and left > 0 and request.workers < self._threads

    def _invite(self, request: ConsumeRequest) -> None:
        """Let one more thread of the pool work on a request, as soon as a thread is free."""
        self._queue.append(request)
        request.invited += 1
        if self._idle >= len(self._queue):
            self._wanted.notify()
        else:
            self._start_thread()

    def _start_thread(self) -> None:
        """Start a thread if fewer than `threads` threads can make calls. Stuck threads do not count, so they are
        replaced; at most `threads` of them are replaced."""
        if len(self._workers) - min(self._stuck, self._threads) < self._threads:
            worker = _Worker()
            # At the process's exit no thread starts, and the broker delivers the messages to another listener.
            if start_daemon(self._serve, worker, name="listener") is not None:
                self._workers.add(worker)

    def _serve(self, worker: _Worker) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    self._idle += 1
                    self._wanted.wait()
                    self._idle -= 1
                request = self._queue.popleft()
                request.invited -= 1
                if request.done.is_set():
                    continue
                request.workers += 1
                worker.request = request
            self._run(worker, request)
            with self._lock:
                worker.request = None
                if worker.given_up:
                    self._stuck -= 1
                    self._workers.discard(worker)
                    if self._queue and not self._idle:
                        self._start_thread()
                    return
                request.workers -= 1
                self._end_if_through(request)

    def _run(self, worker: _Worker, request: ConsumeRequest) -> None:
        """Make the listener calls of a request one after another, until no call of the request is left. A call gets one
        message or one batch."""
        calls, ended, handler = request.calls, request.ended, self._handler
        plain = not self._hooks and not request.damaged
        begun_s = now_s = time.monotonic()
        for index in request.indices:
            if request.cancelled or now_s > request.lease_until_s:
                request.cancelled = True
                break
            worker.index, worker.started_s = index, now_s
            failure = None
            if plain:
                try:
                    answer = handler(calls[index])
                    if answer is not None:
                        failure = self._judged(request, index, answer, worker)
                # catch all exceptions of user code: an uncaught sys.exit would end only this thread, without a message
                except BaseException:
                    failure = _raised(request, index)
            else:
                failure = self._call(request, index, worker)
            started_s, now_s = now_s, time.monotonic()
            took_s = now_s - started_s
            if (worker.given_up or took_s > SETTLE_AFTER_S) and self._was_given_up(worker):
                return
            worker.started_s = 0.0
            if took_s > QUICK_CALL_S or failure is not None:
                self._count_apart(request, took_s, ok=failure is None)
                if failure is not None:
                    request.failures[index] = failure
                    if request.key is not None:
                        request.cancelled = True
            ended.append(index)
        with self._lock:
            request.consume_s += now_s - begun_s

    def _count_apart(self, request: ConsumeRequest, took_s: float, *, ok: bool) -> None:
        """Count one slow or failed listener call separately in the metrics."""
        with self._lock:
            self._count_apart_locked(request, took_s, ok=ok)

    def _count_apart_locked(self, request: ConsumeRequest, took_s: float, *, ok: bool) -> None:
        request.counted += 1
        request.counted_s += took_s
        CLIENT_FIGURES.processed(request.topic, self._group, took_s * 1000, 1, ok=ok)

    def _count_quick(self, request: ConsumeRequest) -> None:
        """Count the quick listener calls of a finished request in the metrics, all in one step. The caller holds the
        lock."""
        quick = len(request.ended) - request.counted
        if quick > 0:
            each_ms = max(0.0, request.consume_s - request.counted_s) * 1000 / quick
            CLIENT_FIGURES.processed(request.topic, self._group, min(each_ms, QUICK_CALL_S * 1000), quick, ok=True)

    def _note_done(self, request: ConsumeRequest) -> None:
        """Add the end of a finished request's listener calls to the message trace, if their beginning was traced. The
        caller holds the lock."""
        if self._trace is None or request.traced is None:
            return
        failed = {index: _context_code(failure) for index, failure in request.failures.items()}
        self._trace.done(request.topic, request.traced, request.ended, failed, request.consume_s * 1000)

    def call_directly(
        self, call: MessageExt | list[MessageExt], replier: Replier | None = None
    ) -> tuple[str, str, float]:
        """Call the listener once with a message, or a list of messages, because an administrator requested it, or for a
        request that is not stored. The call runs in this thread, with the consume hooks. It belongs to no task and is
        not counted in metrics. A coroutine is cancelled after the consume timeout. A reply that the listener returns is
        passed to `replier`; without it, the reply is stored.

        Returns the status (CONSUME_SUCCESS, RECONSUME_LATER, or EXCEPTION if the listener raised), the reason of a
        failure, and the duration in ms.
        """
        messages = call if isinstance(call, list) else [call]
        request = ConsumeRequest([call], [0], None, topic=messages[0].topic)
        context = ConsumeContext(self._shown_group, messages)
        call_hooks(self._hooks, "before", context)
        begun_s, raised = time.monotonic(), False
        try:
            failure = self._judged(request, 0, self._handler(call), replier=replier)
        except BaseException:  # catch all exceptions of user code, which may raise SystemExit
            failure, raised = _raised(request, 0), True
        took_ms = (time.monotonic() - begun_s) * 1000
        context.success, context.error = failure is None, "" if failure is None else failure.error
        call_hooks(self._hooks, "after", context)
        if failure is None:
            return ConsumeStatus.CONSUME_SUCCESS.name, "", took_ms
        return "EXCEPTION" if raised else ConsumeStatus.RECONSUME_LATER.name, failure.error, took_ms

    def _call(self, request: ConsumeRequest, index: int, worker: _Worker) -> Failure | None:
        """Call the listener for the messages at `index` of the request, with the consume hooks before and after the
        call. A damaged message counts as failed, without a call of the listener or of a hook."""
        call = request.calls[index]
        if isinstance(call, Exception):
            if isinstance(call, BodyUnreadableError):
                how = {"unreadable": call.reason, "record_damaged": call.record_damaged}
                return request.failure(index, str(call), **how)
            return request.failure(index, f"the message cannot be decoded: {call}")
        context = ConsumeContext(self._shown_group, call if isinstance(call, list) else [call])
        call_hooks(self._hooks, "before", context)
        try:
            failure = self._judged(request, index, self._handler(call), worker)
        except BaseException:  # catch all exceptions of user code, which may raise SystemExit
            failure = _raised(request, index)
        context.success, context.error = failure is None, "" if failure is None else failure.error
        call_hooks(self._hooks, "after", context)
        return failure

    def _judged(
        self,
        request: ConsumeRequest,
        index: int,
        answer: Any,
        worker: _Worker | None = None,
        replier: Replier | None = None,
    ) -> Failure | None:
        """Return the failure that the listener's return value means; None if the messages were consumed. If the return
        value is awaitable, it is awaited first, and its exceptions are raised."""
        if not isinstance(answer, ConsumeStatus) and inspect.isawaitable(answer):
            answer = self._awaited(answer, worker)
        failure = judge(answer, request.messages_of(index), request.calls[index], replier or self._replier)
        if failure is not None and failure.unknown:
            logger.error(
                "group %s rejects an answer of its listener for topic %s: %s",
                self._shown_group,
                request.topic,
                failure.error,
            )
        return failure

    def _awaited(self, awaitable: Awaitable[Any], worker: _Worker | None) -> Any:
        """Return the result of an awaitable that a listener returned. Returns None if the awaitable was cancelled
        because its call was given up. If `worker` is None, waits at most for the consume timeout."""
        call = self._async_calls.start(awaitable)
        if worker is None:
            try:
                return call.result(self._timeout_s)
            except TimeoutError:
                if call.done:  # the awaitable has ended, so the awaitable itself raised this TimeoutError
                    raise
                raise TimeoutError(f"the listener has not returned after {self._timeout_s:g} s") from None
            finally:
                call.cancel()
        worker.awaited = call
        if worker.given_up:  # cancel the awaitable, because its listener call was given up before `awaited` was set
            call.cancel()
        try:
            return call.result()
        except asyncio.CancelledError:
            if worker.given_up:
                return None
            raise
        finally:
            worker.awaited = None

    def _was_given_up(self, worker: _Worker) -> bool:
        with self._lock:
            if not worker.given_up:
                worker.started_s = 0.0  # mark the listener call as ended, so that the pool can no longer give it up
            return worker.given_up

    def _give_up_late(self, request: ConsumeRequest) -> float:
        """Give up the listener calls of a request that exceed the timeout. Returns the time at which the next running
        call will exceed the timeout."""
        if request.key is not None:
            return float("inf")
        now_s, earliest_s = time.monotonic(), float("inf")
        for worker in self._workers:
            if worker.request is not request or worker.given_up or not worker.started_s:
                continue
            late_at_s = worker.started_s + self._timeout_s
            if now_s < late_at_s:
                earliest_s = min(earliest_s, late_at_s)
                continue
            worker.given_up = True
            if (awaited := worker.awaited) is not None:
                awaited.cancel()
            self._stuck += 1
            error = f"the listener has not returned after {self._timeout_s:g} s"
            request.failures[worker.index] = request.failure(
                worker.index, error, delay_level=TIMEOUT_DELAY_LEVEL, timed_out=True
            )
            request.ended.append(worker.index)
            self._count_apart_locked(request, now_s - worker.started_s, ok=False)
            request.workers -= 1
            self._end_if_through(request)
            if self._queue and not self._idle:
                self._start_thread()
        return min(earliest_s, now_s + self._timeout_s)

    def _cancel(self, request: ConsumeRequest) -> None:
        request.cancelled = True
        if request.workers == 0:
            self._finish(request)

    def _end_if_through(self, request: ConsumeRequest) -> None:
        if request.workers == 0 and (request.cancelled or len(request.ended) == len(request.calls)):
            self._finish(request)

    def _finish(self, request: ConsumeRequest) -> None:
        if not request.done.is_set():
            self._count_quick(request)
            self._note_done(request)
        request.done.set()
        self._running.pop(request, None)
        self._on_done()
        follower, request.follower = request.follower, None
        if request.key is not None and self._in_order.get(request.key) is request:
            del self._in_order[request.key]
        if follower is not None and not follower.done.is_set():
            follower.follows = None
            self._invite(follower)


def _raised(request: ConsumeRequest, index: int) -> Failure:
    logger.exception("the listener raised an exception")
    return request.failure(index, traceback.format_exc(), raised=True)


def _context_code(failure: Failure) -> ContextCode:
    """Return the code that a message trace uses for this kind of failed call."""
    if failure.timed_out:
        return ContextCode.TIME_OUT
    return ContextCode.EXCEPTION if failure.raised else ContextCode.FAILED
