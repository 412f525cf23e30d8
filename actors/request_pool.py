"""A thread pool for the requests of an actor, with queues that are limited in length and in waiting time.

This module lets requests wait, rejects requests, and collects metrics about waiting and rejected requests. It does not
use Ray.

The pool applies RocketMQ's overload rules (spec/messaging.md §2.4) to each kind of requests. A request beyond a queue's
limit is rejected at once. A request that has waited too long is rejected instead of executed, because its client has
given up or soon will. Both rejections raise SystemBusyError: the request was not executed, and the same request may
succeed later. RocketMQ checks the first request of each queue every 10 ms. raymq sets a timer for the deadline of the
first request, so that no code runs while no request waits. A thread that takes a request checks again how long it has
waited.

All kinds of requests share the threads, in order of arrival. No state survives the process.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

from raymq.common.errors import SystemBusyError
from raymq.common.protocol.stats import RequestFigures
from raymq.telemetry.metrics.reporter import Reporter

logger = logging.getLogger(__name__)

SLOT_S: Final = 10.0
"""Length, in seconds, of a time slot. A maximum is recorded for each slot, to compute the maximum of the last
minute."""
SLOTS: Final = 6
BUSY_RETRY_AFTER_S: Final = 0.2
"""Pause, in seconds, that a client should make after its request was rejected."""

Call = Callable[[], None]
Fail = Callable[[SystemBusyError], None]


class RequestKind(NamedTuple):
    """One kind of requests. It has a name, the maximum number of waiting requests, the longest wait in s, and the names
    of the settings for the two limits.

    The text of a rejection names these settings.
    """

    name: str
    capacity: int
    wait_s: float = math.inf
    capacity_setting: str = ""
    wait_setting: str = ""


class Timers(Protocol):
    """Interface for setting timers in the event loop that serves the lanes (direct socket connections)."""

    @property
    def is_own_thread(self) -> bool: ...
    def call_soon(self, callback: Callable[[], None]) -> None: ...
    def call_at(self, when_s: float, callback: Callable[[], None]) -> object: ...


class WaterMarks:
    """The maximum length of a request queue and the longest wait in it, since the start and in the last minute.
    Thread-safe.

    `now_s` is the current time. A call of `note` costs two comparisons, unless a value is a new maximum of the last 10
    seconds.
    """

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        self._slots: deque[tuple[float, int, float]] = deque([(now_s, 0, 0.0)], maxlen=SLOTS + 1)
        self._length, self._wait_s, self._until_s = 0, 0.0, now_s + SLOT_S
        self._highest, self._longest_s = 0, 0.0

    def note(self, length: int, wait_s: float, now_s: float) -> None:
        """Record the present length of the request queue, or the time `wait_s` for which a request has waited in it.
        The other argument is then 0. Of both figures, the highest value in each period is kept."""
        if length > self._length or wait_s > self._wait_s or now_s >= self._until_s:
            self._note(length, wait_s, now_s)

    def _note(self, length: int, wait_s: float, now_s: float) -> None:
        with self._lock:
            if now_s >= self._until_s:
                self._length, self._wait_s, self._until_s = 0, 0.0, now_s + SLOT_S
                self._slots.append((now_s, 0, 0.0))
            self._length, self._wait_s = max(self._length, length), max(self._wait_s, wait_s)
            self._slots[-1] = (self._slots[-1][0], self._length, self._wait_s)
            self._highest, self._longest_s = max(self._highest, length), max(self._longest_s, wait_s)

    def since_start(self) -> tuple[int, float]:
        """Return two values since the server's start: the maximum length of the request queue, and the longest wait in
        it in s."""
        return self._highest, self._longest_s

    def last_minute(self, now_s: float) -> tuple[int, float]:
        """Return the maximum length of the request queue, and the longest time in s that a request waited in the queue.
        Both are for the last 60 to 70 s."""
        with self._lock:
            recent = [slot for slot in self._slots if slot[0] + SLOT_S + SLOT_S * SLOTS > now_s]
        return max([slot[1] for slot in recent], default=0), max([slot[2] for slot in recent], default=0.0)


class _Waiting(NamedTuple):
    """A request that waits for a thread of the pool."""

    since_s: float
    call: Call
    fail: Fail


class RequestQueue:
    """The requests of one kind that wait for a thread of the pool. Thread-safe. Created by RequestPool."""

    def __init__(self, kind: RequestKind, pool: RequestPool, clock: Callable[[], float]) -> None:
        self.kind = kind
        self._pool, self._clock = pool, clock
        self._waiting: deque[_Waiting] = deque()
        self._marks = WaterMarks(clock())
        self._lock = threading.Lock()
        self._refused_full = self._refused_late = 0
        self._is_timed = False
        """True if a timer is set for the deadline of the first request in the queue."""

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, call: Call, fail: Fail) -> None:
        """Queue `call` for a thread. `call` answers a request and raises no error. Raises SystemBusyError if too many
        requests wait; then neither `call` nor `fail` is called.

        If the request waits too long, a thread calls `fail` instead of `call`.
        """
        waiting = self._waiting
        length = len(waiting)
        if length >= self.kind.capacity:
            with self._lock:
                self._refused_full += 1
            raise SystemBusyError(
                f"{length} requests of kind {self.kind.name!r} already wait, as many as "
                f"{self.kind.capacity_setting} allows; nothing was done, try again later",
                BUSY_RETRY_AFTER_S,
            )
        now_s = self._clock()
        waiting.append(_Waiting(now_s, call, fail))
        self._marks.note(length + 1, 0.0, now_s)
        self._pool.wake(self)
        if not self._is_timed and self.kind.wait_s < math.inf:
            self._is_timed = self._pool.at(now_s + self.kind.wait_s, self._refuse_overdue)

    def take(self) -> Call | None:
        """Remove the oldest request from the queue and return its call. Returns None if the queue is empty, or if the
        request has waited too long; in the latter case the request is rejected."""
        try:
            since_s, call, fail = self._waiting.popleft()
        except IndexError:  # the queue is empty: another thread has just taken or rejected the request
            return None
        now_s = self._clock()
        waited_s = now_s - since_s
        self._marks.note(0, waited_s, now_s)
        if waited_s > self.kind.wait_s:
            self._refuse(fail, waited_s)
            return None
        return call

    def forget(self) -> None:
        """Drop all waiting requests of this queue without answering them."""
        self._waiting.clear()

    def figures(self) -> RequestFigures:
        """Return figures about the waiting requests: the queue's current state, its greatest length so far, and the
        longest wait of a request."""
        now_s, waiting = self._clock(), self._waiting
        try:
            head_s = now_s - waiting[0].since_s
        except IndexError:
            head_s = 0.0
        highest, longest_s = self._marks.since_start()
        highest_recently, longest_recently_s = self._marks.last_minute(now_s)
        return RequestFigures(
            self.kind.name,
            len(waiting),
            _ms(max(head_s, 0.0)),
            max(highest, len(waiting)),
            _ms(max(longest_s, head_s)),
            max(highest_recently, len(waiting)),
            _ms(max(longest_recently_s, head_s)),
            self._refused_full,
            self._refused_late,
        )

    def _refuse_overdue(self) -> None:
        """Reject the requests that have waited too long. Runs in the thread that runs the timers."""
        waiting, wait_s = self._waiting, self.kind.wait_s
        self._is_timed = False
        while True:
            try:
                entry = waiting.popleft()
            except IndexError:
                return
            now_s = self._clock()
            waited_s = now_s - entry.since_s
            if waited_s < wait_s:
                # Put the request back to the front of the queue. Also wake a thread, because a thread may have found
                # the queue empty while the request was not in it.
                waiting.appendleft(entry)
                self._pool.wake(self)
                self._is_timed = self._pool.at(entry.since_s + wait_s, self._refuse_overdue)
                return
            self._marks.note(0, waited_s, now_s)
            self._refuse(entry.fail, waited_s)

    def _refuse(self, fail: Fail, waited_s: float) -> None:
        with self._lock:
            self._refused_late += 1
        error = SystemBusyError(
            f"a request of kind {self.kind.name!r} waited for {waited_s:.1f} s for a thread "
            f"({self.kind.wait_setting} is {self.kind.wait_s * 1000:g}); nothing was done, try again later",
            BUSY_RETRY_AFTER_S,
        )
        try:
            fail(error)
        except Exception:
            logger.exception("a request that waited too long could not be refused")


class RequestPool:
    """A pool of threads that execute requests of several kinds. Waiting requests are in `queues`. Thread-safe. Call
    `close` to stop the threads."""

    def __init__(
        self, name: str, threads: int, kinds: Iterable[RequestKind], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name`: the prefix of the names of the pool's threads. The threads start with the first request."""
        self._name, self._most = name, threads
        self._wakeups: SimpleQueue[RequestQueue | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._timers: Timers | None = None
        self._is_closed = False
        self.queues = {kind.name: RequestQueue(kind, self, clock) for kind in kinds}

    def refuse_by(self, timers: Timers) -> None:
        """Use `timers` to reject a request as soon as it has waited for a thread for too long. Without timers, such a
        request is rejected only when a thread takes it."""
        self._timers = timers

    def limit(self, kinds: Iterable[RequestKind]) -> None:
        """Set how many requests of each of `kinds` may wait for a thread, and how long they may wait.

        The old maximum wait may still apply to requests that are already waiting.
        """
        for kind in kinds:
            self.queues[kind.name].kind = kind

    def figures(self) -> list[RequestFigures]:
        """Return the metrics of the waiting and rejected requests, by kind."""
        return [queue.figures() for queue in self.queues.values()]

    def wake(self, queue: RequestQueue) -> None:
        """Wake a thread of the pool to handle a request that waits in `queue`."""
        if not self._threads:
            self._start()
        self._wakeups.put(queue)

    def at(self, when_s: float, callback: Callable[[], None]) -> bool:
        """Schedule a call of `callback` at the time `when_s`, in the thread that runs the timers. Returns False, and
        does nothing, if the pool has no timers."""
        timers = self._timers
        if timers is None:
            return False
        if timers.is_own_thread:
            timers.call_at(when_s, callback)
        else:

            def set_timer() -> None:
                timers.call_at(when_s, callback)

            timers.call_soon(set_timer)
        return True

    def close(self) -> None:
        """Stop each thread after its current call, and drop the waiting requests. Does not wait for the threads.
        Idempotent."""
        with self._lock:
            self._is_closed = True
            for queue in self.queues.values():
                queue.forget()
            for _ in self._threads:
                self._wakeups.put(None)

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._is_closed:
                return
            self._threads = [
                threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
                for number in range(self._most)
            ]
            for thread in self._threads:
                thread.start()

    def _work(self) -> None:
        while (queue := self._wakeups.get()) is not None:
            call = queue.take()
            if call is not None:
                try:
                    call()
                # a programming error must not end this thread: without threads no request would be served
                except Exception:
                    logger.exception("a request of kind %r failed", queue.kind.name)
            # Delete this reference to the call. The call may refer to an answer, which would otherwise stay in memory
            # while the thread waits for the next call.
            del call


def report_requests(reporter: Reporter, figures: Iterable[RequestFigures]) -> None:
    """Report, for each kind of request to this server: the number of waiting requests, the longest wait of the last
    minute, and the number of rejected requests."""
    for one in figures:
        reporter.gauge("raymq_processor_watermark", one.waiting, processor=one.kind)
        reporter.gauge("raymq_request_wait_milliseconds", one.longest_last_minute_ms, processor=one.kind)
        reporter.count("raymq_requests_refused", one.refused_full, processor=one.kind, reason="full")
        reporter.count("raymq_requests_refused", one.refused_late, processor=one.kind, reason="late")


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
