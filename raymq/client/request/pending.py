"""PendingRequests: a client's requests that wait for replies, by correlation id, until their deadlines.

A request completes once: with its reply, with the error of its send, or with RequestTimeoutError. At the same time it
is removed from PendingRequests. A reply that arrives afterwards matches no request; it is dropped and counted. One
thread expires requests. It starts with the first request, and stops with `close`.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from raymq.common.errors import ClientStateError, RequestTimeoutError, SystemBusyError
from raymq.common.message import PROPERTY_CORRELATION_ID, Message, MessageExt, SendResult
from raymq.common.parallel import contained, require_daemon
from raymq.common.protocol.request_reply import RequestStatistics

REQUESTS_MAX: Final = 10_000
"""Maximum number of requests of one client that may wait at the same time."""
_ENDING_S: Final = 5.0
"""Time, in seconds, that a request's caller waits beyond the request's deadline. The thread that expires requests
normally completes the request within this time."""

_CALLBACK_FAILED: Final = "a callback of a request raised an exception"

logger = logging.getLogger(__name__)


class WaitingRequest:
    """A request that a client has registered, and for which no reply has arrived yet."""

    __slots__ = ("_table", "correlation_id", "deadline_s", "future", "message", "timeout_s")

    def __init__(self, table: PendingRequests, correlation_id: str, message: Message, timeout_s: float) -> None:
        self._table = table
        self.correlation_id, self.message, self.timeout_s = correlation_id, message, timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.future: Future[MessageExt] = Future()
        # Make the future uncancellable, because the request may already have been sent.
        self.future.set_running_or_notify_cancel()

    def sent(self, sending: Future[SendResult]) -> None:
        """Fail the request with the error of the send, if the send failed. Does nothing if the send succeeded."""
        error = sending.exception()
        if error is not None and self._table.take(self.correlation_id, failed=True) is not None:
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Stop waiting for the reply. Does nothing if the request has completed."""
        self._table.take(self.correlation_id, failed=True)

    def result(self) -> MessageExt:
        """Wait for the reply to the request, and return the reply. Raises RequestTimeoutError if no reply arrives in
        time, or ClientStateError if the client is closed during the wait."""
        return self.future.result(max(0.0, self.deadline_s - time.monotonic()) + _ENDING_S)

    def time_out(self) -> None:
        """Fail the request with RequestTimeoutError, because no reply arrived in time."""
        what = f"request {self.correlation_id} to topic {self.message.topic!r}"
        self.future.set_exception(RequestTimeoutError(what, self.timeout_s))


class PendingRequests:
    """A client's requests that wait for replies. Thread-safe. `most`: the maximum number of requests that may wait at
    the same time."""

    def __init__(self, most: int = REQUESTS_MAX) -> None:
        self._most = most
        self._changed = threading.Condition()
        """Condition whose lock guards the other attributes of PendingRequests. It is notified if the earliest deadline
        of the requests may have changed."""
        self._waiting: dict[str, WaitingRequest] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._answered = self._timed_out = self._failed = self._late = 0
        self._used_s = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, correlation_id: str, timeout_s: float, make: Callable[[], Message]) -> WaitingRequest:
        """Register and return a request that waits for the reply to the message that `make` returns. Raises
        SystemBusyError if too many requests wait. Raises ClientStateError after `close`, and if this is the first
        request and begins at the interpreter's exit, when Python 3.12 starts no thread."""
        pending = WaitingRequest(self, correlation_id, make(), timeout_s)
        with self._changed:
            if self._closed:
                raise ClientStateError("this client is closed; call raymq.connect() again")
            if len(self._waiting) >= self._most:
                raise SystemBusyError(
                    f"{self._most} requests of this client already wait for a reply; wait until some of them end"
                )
            starts = self._thread is None
            if starts:
                self._thread = require_daemon(self._run, name="requests", what="the first request of a client")
            self._waiting[correlation_id] = pending
            heapq.heappush(self._deadlines, (pending.deadline_s, correlation_id))
            self._used_s = time.monotonic()
            if not starts and self._deadlines[0][1] == correlation_id:
                self._changed.notify()
        return pending

    def take(self, correlation_id: str, *, failed: bool = False) -> WaitingRequest | None:
        """Remove a waiting request and return it. Returns None if no request waits under this correlation id. With
        `failed`, the removed request is counted as a failed request."""
        with self._changed:
            pending = self._waiting.pop(correlation_id, None)
            if failed and pending is not None:
                self._failed += 1
            return pending

    def complete(self, reply: MessageExt) -> None:
        """Complete the request to which `reply` belongs. If that request no longer waits, count a late reply."""
        with self._changed:
            pending = self._waiting.pop(reply.system_properties.get(PROPERTY_CORRELATION_ID, ""), None)
            if pending is None:
                self._late += 1
                return
            self._answered += 1
        # a callback of the future may raise SystemExit, which must not end the thread that reads replies
        contained(logger, _CALLBACK_FAILED, pending.future.set_result, reply)

    def idle_s(self) -> float:
        """Return 0 if a request waits for its reply. Otherwise return the time in seconds since the most recent request
        began."""
        with self._changed:
            return 0.0 if self._waiting else time.monotonic() - self._used_s

    def statistics(self) -> RequestStatistics:
        """Return the numbers of this client's requests (request-reply) so far, by their outcome."""
        with self._changed:
            return RequestStatistics(len(self._waiting), self._answered, self._timed_out, self._failed, self._late)

    def close(self) -> None:
        """Fail all waiting requests with ClientStateError, and stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, {}
            self._changed.notify()
        for pending in left.values():
            closed = ClientStateError("the client was closed before the reply arrived")
            contained(logger, _CALLBACK_FAILED, pending.future.set_exception, closed)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ENDING_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                ended = self._take_ended()
                while not ended and not self._closed:
                    first_s = self._deadlines[0][0] if self._deadlines else None
                    self._changed.wait(None if first_s is None else first_s - time.monotonic())
                    ended = self._take_ended()
                if self._closed:
                    return
            # a callback of a request's future may raise SystemExit, which must not end this thread
            for pending in ended:
                contained(logger, _CALLBACK_FAILED, pending.time_out)

    def _take_ended(self) -> list[WaitingRequest]:
        """Remove and return the requests whose deadline has passed. Also removes the deadlines of requests that
        completed earlier."""
        ended, now_s = [], time.monotonic()
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][1] not in self._waiting):
            pending = self._waiting.pop(heapq.heappop(self._deadlines)[1], None)
            if pending is not None:
                self._timed_out += 1
                ended.append(pending)
        return ended
