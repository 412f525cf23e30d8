"""DirectRequests sends a client's requests with ``durable=False``: over lanes to a broker, and stored nowhere.

    request           the calling thread waits for the answer on a lane of its own
    request_later     a future; one thread with an event loop waits for all answers
    in_loop           for asyncio programs: the program's event loop waits

A client sends all its requests to one broker group of the topic, because a lane that is in use is fast. If this broker
cannot be reached, or no listener waits there, the next broker group gets the request. A request is sent again only if
no listener can have got it. After the loss of a broker or a lane the outcome is unknown, and the caller gets an error.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from raymq.client.request.request_loop import RequestLoop
from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    NoListenerError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
)
from raymq.common.message import Message, MessageExt
from raymq.common.protocol.request_reply import RequestStatistics
from raymq.common.protocol.route import PERM_WRITE, TopicRoute
from raymq.common.retry import Backoff
from raymq.remoting.broker_client import AsyncBrokerClient, broker_client
from raymq.remoting.direct_requests import DirectCall, decode_answer, encode_request, new_request_id
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane_pool import LANE_LOST

ANSWER_GRACE_S: Final = 1.0
"""Time in seconds after a request's deadline. If the broker sends no answer until then, not even that the deadline has
passed, the request ends."""
MIN_PATIENCE_S: Final = 0.05
"""Minimum time in seconds for an attempt to open a lane to a broker."""
_METHOD: Final = "ask_listener"


class _Attempts:
    """The attempts to send one request: which broker is next, and what an error means. Pure, except for the clock.

    `first`: the broker that the client prefers, as an index modulo the number of brokers.
    """

    def __init__(
        self, route: TopicRoute, topic: str, message: Message, timeout_s: float, first: int, host: str
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise InvalidArgumentError(f"timeout_s must be positive, not {timeout_s!r}")
        self._topic, self._message, self.timeout_s = topic, message, timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self._cluster = next(iter(route.brokers.values())).cluster
        self._brokers = sorted([data.broker_name for data in route.queues if data.perm & PERM_WRITE])
        if not self._brokers:
            raise ServiceNotAvailableError(
                f"no broker group takes messages of topic {message.topic!r} now; retry later"
            )
        self._id = new_request_id()
        self._request = encode_request(message, self._id, math.ceil(timeout_s * 1000), host)
        self.index = first
        self._tried, self._nobody = 0, False
        self._backoff = Backoff()

    @property
    def broker(self) -> str:
        """The broker that must get the request now."""
        return self._brokers[self.index % len(self._brokers)]

    @property
    def patience_s(self) -> float:
        """How long to try to reach the broker: a share of the remaining time, so that other brokers get a share."""
        left_s = self.deadline_s - time.monotonic()
        return max(left_s / max(len(self._brokers) - self._tried, 1), MIN_PATIENCE_S)

    @property
    def answer_by_s(self) -> float:
        """The time until which the broker must answer."""
        return self.deadline_s + ANSWER_GRACE_S

    def payload(self) -> bytes:
        """Return the call to the broker, with the remaining time."""
        left_ms = max(1, math.ceil((self.deadline_s - time.monotonic()) * 1000))
        return encode_call(_METHOD, (DirectCall(self._topic, self._message.tags, left_ms, self._request),))

    def reply(self, answer: bytes) -> MessageExt:
        """Return the reply in an answer. Raises like `decode_answer`."""
        return decode_answer(answer, self._message.topic, self._id, self._cluster, self.broker)

    def not_sent(self, error: RaymqError) -> float:
        """Turn to the next broker, because no listener can have got the request: `error` says why. Returns the pause in
        seconds before the next attempt. Raises the error if there is no further attempt: if no broker that can be
        reached has a listener, or if the time is over."""
        self._nobody = self._nobody or isinstance(error, NoListenerError)
        self._tried, self.index = self._tried + 1, self.index + 1
        if self._tried < len(self._brokers):
            if time.monotonic() < self.deadline_s:
                return 0.0
        elif self._nobody:
            raise NoListenerError(self._message.topic, self._message.tags or "") from None
        self._tried, pause_s = 0, self._backoff.next()
        if not error.retryable or time.monotonic() + pause_s >= self.deadline_s:
            raise error
        return pause_s

    def failed(self, error: Exception) -> RaymqError:
        """Return the error to raise for a request that was sent, and that ended with `error`: an error that the broker
        has sent, or an error of the lane."""
        if isinstance(error, BlockingIOError | RequestTimeoutError):
            fact = f"broker {self.broker} is silent"
            if isinstance(error, RequestTimeoutError) and time.monotonic() < self.answer_by_s:
                fact = error.what
            return RequestTimeoutError(
                f"the request with durable=False to topic {self._message.topic!r} ({fact})", self.timeout_s
            )
        if isinstance(error, RaymqError) and not isinstance(error.__cause__, LANE_LOST):
            return error
        return ServiceNotAvailableError(
            f"the connection to broker {self.broker} broke during the request to topic {self._message.topic!r}, so the "
            f"request may have been executed ({error or repr(error)})"
        )


@dataclass(slots=True)
class _DirectCounts:
    waiting: int = 0
    answered: int = 0
    timed_out: int = 0
    failed: int = 0


class DirectRequests:
    """The requests with ``durable=False`` of one client. Thread-safe.

    `client_id` determines the broker that the client prefers, so that clients are spread over the brokers. `host`: this
    node's address, which listeners see as the request's origin.
    """

    def __init__(self, client_id: str, host: str) -> None:
        self._host, self._first = host, zlib.crc32(client_id.encode())
        self._lock = threading.Lock()
        """Lock that guards the counts, and the creation of the thread for futures."""
        self._counts = _DirectCounts()
        self._thread: RequestLoop | None = None
        self._closed = False

    def request(self, route: TopicRoute, topic: str, message: Message, timeout_s: float) -> MessageExt:
        """Send a request, and wait for the reply. `topic`: the topic's stored name. `route`: the topic's route.

        Raises NoListenerError if no listener waits for such requests, RequestTimeoutError if no reply arrives in time,
        ListenerError if the listener fails or returns no reply, ServiceNotAvailableError if the listener's process, the
        broker or the connection is lost, SystemBusyError if too many requests are open, and InvalidArgumentError if
        `timeout_s` is out of range.
        """
        attempts = self._begin(route, topic, message, timeout_s)
        try:
            while True:
                try:
                    reply = attempts.reply(_ask(attempts))
                    break
                except _NotSentError as not_sent:
                    time.sleep(attempts.not_sent(not_sent.error))
        except BaseException as error:
            self._end(attempts, error)
            raise
        self._end(attempts, None)
        return reply

    def request_later(self, route: TopicRoute, topic: str, message: Message, timeout_s: float) -> Future[MessageExt]:
        """Send a request, and return a future of its reply, which cannot be cancelled. Raises ClientStateError after
        `close`; all other errors are in the future."""
        future: Future[MessageExt] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise ClientStateError("this client is closed; call raymq.connect() again")
            if self._thread is None:
                self._thread = RequestLoop(self.in_loop())
            thread = self._thread
        thread.start(lambda loop: loop.request(route, topic, message, timeout_s), future)
        return future

    def in_loop(self) -> AsyncDirectRequests:
        """Return an object that sends this client's requests from one event loop. The caller closes it in this
        loop."""
        return AsyncDirectRequests(self)

    def statistics(self, others: RequestStatistics) -> RequestStatistics:
        """Return `others` with the counts of the requests with ``durable=False`` added."""
        with self._lock:
            one = self._counts
            return RequestStatistics(
                others.waiting + one.waiting,
                others.answered + one.answered,
                others.timed_out + one.timed_out,
                others.failed + one.failed,
                others.late,
            )

    def close(self) -> None:
        """End the requests that have a future with ClientStateError, and stop their thread. A request that another
        thread waits for ends by itself. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _begin(self, route: TopicRoute, topic: str, message: Message, timeout_s: float) -> _Attempts:
        attempts = _Attempts(route, topic, message, timeout_s, self._first, self._host)
        with self._lock:
            self._counts.waiting += 1
        return attempts

    def _end(self, attempts: _Attempts, error: BaseException | None) -> None:
        """Count a request that has ended, and prefer its broker from now on if the broker has passed on the reply."""
        with self._lock:
            self._counts.waiting -= 1
            if error is None:
                self._first = attempts.index
                self._counts.answered += 1
            elif isinstance(error, RequestTimeoutError):
                self._counts.timed_out += 1
            else:
                self._counts.failed += 1


class AsyncDirectRequests:
    """The requests with ``durable=False`` that one event loop sends. All methods must be called in this loop."""

    def __init__(self, requests: DirectRequests) -> None:
        self._requests = requests
        self._brokers: dict[str, AsyncBrokerClient] = {}

    async def request(self, route: TopicRoute, topic: str, message: Message, timeout_s: float) -> MessageExt:
        """Send a request, and await the reply, as `DirectRequests.request`. If the caller is cancelled, the request may
        be executed, and its reply is dropped."""
        attempts = self._requests._begin(route, topic, message, timeout_s)
        try:
            while True:
                try:
                    reply = attempts.reply(await self._ask(attempts))
                    break
                except _NotSentError as not_sent:
                    await asyncio.sleep(attempts.not_sent(not_sent.error))
        except BaseException as error:
            self._requests._end(attempts, error)
            raise
        self._requests._end(attempts, None)
        return reply

    def close(self) -> None:
        """Close the connections, and end all requests with an error. Idempotent."""
        for broker in self._brokers.values():
            broker.close()

    async def _ask(self, attempts: _Attempts) -> bytes:
        """Send the request to one broker, and return the answer. Raises _NotSentError if the request was not sent, or
        if no listener waits there."""
        broker = self._brokers.get(attempts.broker)
        if broker is None:
            broker = self._brokers[attempts.broker] = AsyncBrokerClient(attempts.broker)
        try:
            await broker.ready(_METHOD, attempts.patience_s)
        except RaymqError as error:
            raise _NotSentError(error) from error
        try:
            answer: bytes = await broker.call_encoded(
                _METHOD, attempts.payload(), timeout_s=attempts.answer_by_s - time.monotonic()
            )
            return answer
        except NoListenerError as error:
            raise _NotSentError(error) from error
        except RaymqError as error:
            raise attempts.failed(error) from error


class _NotSentError(Exception):
    """Raised if no listener can have got a request. `error`: the reason."""

    def __init__(self, error: RaymqError) -> None:
        super().__init__(error)
        self.error = error


def _ask(attempts: _Attempts) -> bytes:
    """Send a request to one broker, and wait for the answer in the calling thread. Raises _NotSentError if the request
    was not sent, or if no listener waits there."""
    broker, is_sent = broker_client(attempts.broker), False
    try:
        with broker.lane(_METHOD, attempts.patience_s) as lane:
            lane.send(FrameKind.CALL, (attempts.payload(),), attempts.answer_by_s)
            is_sent = True
            answer: bytes = decode_result(lane.receive(attempts.answer_by_s).payload, bytes)
            return answer
    except NoListenerError as error:
        raise _NotSentError(error) from error
    except RaymqError as error:
        raise attempts.failed(error) if is_sent else _NotSentError(error) from error
    except LANE_LOST as error:
        broker.drop_lanes()
        lost = attempts.failed(error)
        raise lost if is_sent else _NotSentError(lost) from error
