"""The methods of the Broker actor for direct requests (raymq.remoting.direct_requests), which are never stored.

    requester: ask_listener ──▶ held until the answer        listener's thread: take_requests ──▶ held until a request

Both calls come over the broker's lane (direct socket connection), and need no thread while they wait. All decisions are
in actors.core.members.direct_board. Only the thread of the lane's event loop uses the board, so no lock is needed.

If the connection of a listener's thread ends while the thread works on a request, the requester gets an error at once.
If nobody waits for an answer any more, the request is dropped, or its answer is dropped and counted. Nothing survives
the broker: its death closes both connections, and each side gets an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from actors.core.broker.state import BrokerState
from actors.core.members.direct_board import DirectBoard, DirectRequest, Worker
from raymq.common.errors import (
    InvalidArgumentError,
    NoListenerError,
    NoPermissionError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.protocol.route import PERM_WRITE
from raymq.remoting.direct_requests import TURN_WAIT_MS, AnswerKind, DirectCall, DirectDelivery, DirectTurn
from raymq.remoting.lane.calls import encode_result
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.loop import Loop, Timer

DIRECT_TIMEOUT_MAX_MS: Final = 3_600_000
"""Maximum time in ms for which a broker holds a direct request."""


_NO_REQUEST: Final = encode_result(None)
"""The answer to a turn that ends without a request."""


class _Asked:
    """The requester's side of a direct request: its call, which waits for the answer, and the timer of its deadline."""

    __slots__ = ("lane", "timeout_ms", "timer")

    def __init__(self, lane: LaneRequest, timeout_ms: int) -> None:
        self.lane: LaneRequest | None = lane
        self.timeout_ms = timeout_ms
        self.timer: Timer | None = None


_Request = DirectRequest[_Asked]
_Worker = Worker[_Asked]


class DirectConnection:
    """The state of one connection of the broker's lane: the worker (the listener's thread) at its other end, if there
    is one."""

    __slots__ = ("_end", "lane", "timer", "worker")

    def __init__(self, end: Callable[[_Worker], None]) -> None:
        """`end` is called after the connection of a worker has ended."""
        self._end = end
        self.worker: _Worker | None = None
        self.lane: LaneRequest | None = None
        """The worker's turn that waits for a request."""
        self.timer: Timer | None = None
        """The timer that ends the worker's turn."""

    def close(self) -> None:
        """Note that the connection has ended."""
        if self.worker is not None:
            self._end(self.worker)


class DirectMethods:
    """The Broker's methods for direct requests; the Broker actor inherits from this class. Only the thread of the
    lane's event loop may call its methods, except `_direct_figures`."""

    def __init__(self, loop: Callable[[], Loop], state: Callable[[], BrokerState | None]) -> None:
        """`loop` is a function that returns the event loop of the broker's lane (direct socket connection). It is
        called only after this loop exists. `state` returns the broker's state, without a wait; None before
        the broker has read its state."""
        self._direct_loop, self._direct_state = loop, state
        self._direct_board = DirectBoard[_Asked]()
        self._direct_connections: dict[_Worker, DirectConnection] = {}
        self._direct_ends: Counter[str] = Counter()

    def _direct_figures(self) -> tuple[dict[str, int], int, int]:
        """Return the number of direct requests by their end, the number of open requests, and the number of listener
        threads that answer requests. Any thread may call this method."""
        return dict(self._direct_ends), self._direct_board.open, self._direct_board.workers

    @property
    def _direct_answered_later(self) -> dict[str, Callable[..., None]]:
        """Map method names of the broker's lane (direct socket connection) to methods that do not block, and send their
        answers themselves."""
        return {"ask_listener": self._ask_listener_soon, "take_requests": self._take_requests_soon}

    def _direct_connection(self) -> DirectConnection:
        """Return the state of a new connection of the broker's lane."""
        return DirectConnection(self._worker_has_ended)

    def _ask_listener_soon(self, lane: LaneRequest, call: DirectCall) -> None:
        """Hand a request to a listener's thread, and answer with the listener's answer.

        The answer can be NoListenerError (no listener waits for such requests), SystemBusyError (too many requests are
        open), TopicNotExistError, or NoPermissionError (the topic is not writable): then the request was not executed.
        It can be RequestTimeoutError, whose text tells if a listener got the request, or ServiceNotAvailableError
        (the listener's process ended): then the request may have been executed.
        """
        self._check_direct_topic(call.topic)
        asked = _Asked(lane, min(max(call.timeout_ms, 1), DIRECT_TIMEOUT_MAX_MS))
        try:
            one, worker = self._direct_board.put(call.topic, call.tags, call.request, asked)
        except NoListenerError:
            self._direct_ends["no_listener"] += 1
            raise
        except SystemBusyError:
            self._direct_ends["refused"] += 1
            raise
        deadline_s = time.monotonic() + asked.timeout_ms / 1000
        asked.timer = self._direct_loop().call_at(deadline_s, partial(self._expire_request, one))
        lane.when_gone(partial(self._requester_has_left, one))
        if worker is not None:
            self._hand_over(one, worker)

    def _take_requests_soon(self, lane: LaneRequest, turn: DirectTurn) -> None:
        """Pass a worker's answer to its requester, and answer with the next request for the worker; with None after
        `turn.wait_ms`. If that is negative, the worker takes no further requests, and is removed before the answer.

        An answer that nobody waits for is dropped. The answer can be TopicNotExistError, or NoPermissionError if the
        group may not read a topic.
        """
        connection: DirectConnection = lane.context
        worker = connection.worker
        if worker is None:
            worker = connection.worker = _Worker()
            self._direct_connections[worker] = connection
        if connection.lane is not None:
            raise InvalidArgumentError("this connection already waits for a request")
        self._take_answer(worker, turn)
        if turn.wait_ms < 0:
            self._remove_worker(worker)
            lane.answer(_NO_REQUEST)
            return
        state = self._direct_state()
        if state is None:
            raise ServiceNotAvailableError("the broker has not read its state yet; try again later")
        for topic in turn.topics:
            state.check_readable(turn.group, topic)
        one = self._direct_board.wait(worker, (turn.group, turn.instance), turn.topics)
        connection.lane = lane
        if one is not None:
            self._hand_over(one, worker)
        elif turn.wait_ms <= 0:
            self._end_turn(worker, lane)
        else:
            lane.when_gone(partial(self._end_turn, worker, lane))
            end_s = time.monotonic() + min(turn.wait_ms, TURN_WAIT_MS) / 1000
            connection.timer = self._direct_loop().call_at(end_s, partial(self._end_turn, worker, lane))

    def _check_direct_topic(self, topic: str) -> None:
        """Raise TopicNotExistError or NoPermissionError if nobody may send to a topic. Before the broker has read its
        state, no listener can wait here, so the call gets NoListenerError."""
        state = self._direct_state()
        if state is not None and not state.require_topic(topic).perm & PERM_WRITE:
            raise NoPermissionError(
                f"topic {topic!r} is not writable (its permission has no W); see admin.update_topic"
            )

    def _hand_over(self, one: _Request, worker: _Worker) -> None:
        """End a worker's turn with a request."""
        delivery = encode_result(DirectDelivery(one.ticket, one.topic, one.tags, one.request))
        one.request = b""
        lane = self._turn_of(worker)
        if lane is not None:
            lane.answer(delivery)

    def _end_turn(self, worker: _Worker, lane: LaneRequest) -> None:
        """End a worker's turn without a request, if the turn still waits."""
        connection = self._direct_connections.get(worker)
        if connection is not None and connection.lane is lane:
            self._direct_board.stop_waiting(worker)
            self._turn_of(worker)
            lane.answer(_NO_REQUEST)

    def _turn_of(self, worker: _Worker) -> LaneRequest | None:
        """Return a worker's turn, which ends now, and cancel its timer."""
        connection = self._direct_connections[worker]
        lane, connection.lane = connection.lane, None
        timer, connection.timer = connection.timer, None
        if timer is not None:
            self._direct_loop().cancel(timer)
        return lane

    def _take_answer(self, worker: _Worker, turn: DirectTurn) -> None:
        """Pass the answer in a worker's turn to its requester. Raises InvalidArgumentError if the worker has not
        answered its last request."""
        one = self._direct_board.finish(worker, turn.ticket)
        if one is not None:
            self._end_request(one, "replied" if turn.kind is AnswerKind.REPLY else "failed", turn.answer)
        elif worker.running is not None:
            raise InvalidArgumentError("the thread has not answered its last request")

    def _end_request(self, one: _Request, end: str, answer: bytes | RaymqError) -> None:
        """Answer a requester, unless it has got an answer already, and count the request by its end."""
        asked = one.owner
        lane, asked.lane = asked.lane, None
        if lane is None:
            self._direct_ends["late"] += end == "replied"
            return
        if asked.timer is not None:
            self._direct_loop().cancel(asked.timer)
        self._direct_ends[end] += 1
        if isinstance(answer, RaymqError):
            lane.fail(answer)
        else:
            lane.answer(encode_result(answer))

    def _expire_request(self, one: _Request) -> None:
        """Fail a request whose requester waits no longer than now."""
        waited = self._direct_board.withdraw(one)
        fact = "no thread of a listener was free, so it was not executed" if waited else "its listener may execute it"
        self._end_request(one, "timed_out", RequestTimeoutError(fact, one.owner.timeout_ms / 1000))

    def _requester_has_left(self, one: _Request) -> None:
        """Drop a request whose requester waits no longer, because its connection has ended."""
        self._direct_board.withdraw(one)
        self._end_request(one, "left", ServiceNotAvailableError("the requester waits no longer"))

    def _worker_has_ended(self, worker: _Worker) -> None:
        """Remove a worker whose connection has ended, and fail the request on which it worked."""
        self._turn_of(worker)
        del self._direct_connections[worker]
        one = self._remove_worker(worker)
        if one is not None:
            error = ServiceNotAvailableError(
                "the listener's process ended before it answered the request, which may have been executed"
            )
            self._end_request(one, "lost", error)

    def _remove_worker(self, worker: _Worker) -> _Request | None:
        """Remove a worker, and fail the waiting requests that no other worker wants. Returns the request on which the
        removed worker works."""
        one, left = self._direct_board.leave(worker)
        for other in left:
            self._end_request(other, "no_listener", NoListenerError(other.topic, other.tags or ""))
        return one
