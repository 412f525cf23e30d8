"""An event loop in one thread. The thread waits with epoll for three things: events of sockets, calls from other
threads, and expired timers."""

from __future__ import annotations

import heapq
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

logger = logging.getLogger(__name__)

EVENTS_MAX: Final = 512
"""Maximum number of epoll events that the loop handles in one turn."""
STOP_TIMEOUT_S: Final = 5.0
"""Maximum time in seconds that `Loop.stop` waits for the loop's thread to end."""
CANCELLED_MAX: Final = 1000
"""Maximum number of cancelled timers that stay in the list of timers. If more timers are cancelled, and they are more
than half of the list, the loop removes them."""


class Timer:
    """A call that is scheduled for a time. `Loop.cancel` can cancel it."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback


class Loop:
    """An event loop that waits for events and runs callbacks in one thread.

    Any thread may call `call_soon`, `call_now` and `stop`. Only the loop's thread calls the other methods; before the
    thread starts, any thread may call them. `background` is a queue of callbacks that take longer, such as the handling
    of a large frame. A turn first serves each ready socket once. Then it runs the queued calls, the first callback of
    `background`, and the timers that are due. So no call waits for more than one callback of `background`.
    """

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._callbacks[self._wake] = self._woken
        self._is_woken = False
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._cancelled = 0
        """Number of cancelled timers that are still in the list of timers."""
        self.background: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._turn = threading.Lock()
        """Lock that is held during a turn of the event loop, but not during the wait for events. Only the loop's thread
        blocks on this lock, and that thread then holds no other lock."""
        self._thread_id = 0
        """The id of the thread that runs the current turn of the event loop. This is the loop's thread, or another
        thread in `call_now`."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the event loop's thread."""
        self._thread.start()

    def stop(self, last: Callable[[], None]) -> None:
        """End the event loop's thread, and wait for its end. The thread finishes its current turn and then calls
        `last`. Idempotent.

        If the loop's own thread calls `stop`, the call does not wait.
        """

        def end() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self.call_soon(last)
            self.call_soon(end)
            if not (self.is_own_thread or threading.current_thread() is self._thread):
                self._thread.join(STOP_TIMEOUT_S)

    @property
    def is_own_thread(self) -> bool:
        """True if the caller runs in the event loop's thread, or in a thread that runs a callback through
        `call_now`."""
        return threading.get_ident() == self._thread_id

    def watch(self, descriptor: int, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` whenever the file descriptor `descriptor` is ready."""
        self._epoll.register(descriptor, events)
        self._callbacks[descriptor] = callback

    def change(self, descriptor: int, events: int) -> None:
        """Change the events for which the loop watches a file descriptor."""
        self._epoll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        """Stop watching a file descriptor. Does nothing if the loop does not watch it."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the loop's thread, in the current or the next turn of the event loop. Any thread may call
        this method."""
        self._soon.append(callback)
        if not self._is_woken and threading.get_ident() != self._thread_id:
            self._wake_up()

    def call_now(self, callback: Callable[[], None]) -> None:
        """Run a short callback in the calling thread if the loop's thread is waiting, which saves a wake-up. Otherwise
        queue the callback with `call_soon`.

        Any thread may call this method. The callback must not need a lock that the caller holds.
        """
        if self._is_woken or not self._turn.acquire(blocking=False):
            self.call_soon(callback)
            return
        timers = self._timers
        first, work = timers[0] if timers else None, len(self._soon) + len(self.background)
        own, self._thread_id = self._thread_id, threading.get_ident()
        try:
            if not self._stopping:
                self._call(callback)
        finally:
            self._thread_id = own
            timers = self._timers
            is_more = len(self._soon) + len(self.background) > work or (timers and timers[0] is not first)
            self._turn.release()
        if is_more:
            self._wake_up()

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                self._is_woken = True
                os.eventfd_write(self._wake, 1)

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` at the time `when_s` on the clock of `time.monotonic`."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (when_s, next(self._order), timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Cancel a call that `call_at` has scheduled, unless it has already run."""
        if timer.callback is None:
            return
        timer.callback = None
        self._cancelled += 1
        if self._cancelled > max(CANCELLED_MAX, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run(self) -> None:
        turn = self._turn
        turn.acquire()
        self._thread_id = threading.get_ident()
        poll, callbacks = self._epoll.poll, self._callbacks
        try:
            while not self._stopping:
                nothing_to_do = not (self._soon or self._timers or self.background)
                timeout_s = None if nothing_to_do else self._timeout_s()
                turn.release()
                try:
                    ready = poll(timeout_s, EVENTS_MAX)
                finally:
                    turn.acquire()
                for descriptor, events in ready:
                    callback = callbacks.get(descriptor)
                    # The descriptor has no callback if another callback, earlier in this turn, has stopped watching it.
                    if callback is not None:
                        try:
                            callback(events)
                        # Only a bug raises an exception in `callback`. The loop's thread must survive it, because
                        # otherwise no client would be served any more.
                        except Exception:
                            logger.exception("a callback in the thread of the lane server failed")
                if self._soon:
                    self._call_those_soon()
                if self.background:
                    self._call(self.background.popleft())
                if self._timers:
                    self._call_those_due()
        finally:
            self._stopping = True
            self._epoll.close()
            with self._wake_lock:
                os.close(self._wake)
                self._wake = -1
            turn.release()

    def _timeout_s(self) -> float | None:
        if self._soon or self.background:
            return 0
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
            self._cancelled -= 1
        return max(timers[0][0] - time.monotonic(), 0) if timers else None

    def _woken(self, _events: int) -> None:
        os.eventfd_read(self._wake)
        self._is_woken = False

    def _call_those_soon(self) -> None:
        """Run the queued calls. If a queued call queues a new call, the new call runs in the next turn."""
        for _ in range(len(self._soon)):
            self._call(self._soon.popleft())

    def _call_those_due(self) -> None:
        """Run the timers that are due. If a timer schedules a new call, the new call runs in the next turn, even if it
        is already due."""
        now_s, due = time.monotonic(), []
        while self._timers and self._timers[0][0] <= now_s:
            due.append(heapq.heappop(self._timers)[2])
        for timer in due:
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        # An exception here shows a bug in the callback. The loop's thread must survive it, because otherwise the lane
        # server would serve no client.
        except Exception:
            logger.exception("a callback in the thread of the lane server failed")
