"""Calls to brokers. Frequent calls use lanes (direct socket connections); all other calls are actor calls.

To change how clients reach a broker, change this module, or raymq.remoting.lane_pool if the change also applies to
storage actors. On the broker's node the lane is a Unix socket; from other nodes it uses TCP.

A call fails in one of two ways. If the broker raised the error, the broker refused the call. ServiceNotAvailableError
or RequestTimeoutError means that no answer arrived, and that the call may have run. All calls over lanes are safe to
repeat.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from raymq.common.closing import shared_lock
from raymq.common.errors import RaymqError, RequestTimeoutError
from raymq.common.members.questions import Question
from raymq.common.protocol.group import CommitAnswer, GroupConfig, QueueOffset
from raymq.common.protocol.pop import LeasedRange, ReceiveAnswer
from raymq.common.protocol.transactions import TransactionCheck
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.async_lane_pool import AsyncLanePool
from raymq.remoting.direct_requests import DirectDelivery
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane, open_anywhere
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane_pool import LANE_LOST, LanePool, lane_broken
from raymq.telemetry.metrics.client_figures import ClientMetrics

LANE_RESULTS: Final[dict[str, Any]] = {
    "commit_offsets": CommitAnswer,
    "committed_offsets": dict[int, int],
    "start_offset": QueueOffset,
    "start_offsets": dict[str, dict[int, QueueOffset]],
    "ensure_group": None,
    "check_broadcast": None,
    "group_config": GroupConfig,
    "update_group": None,
    "update_groups": list[str],
    "create_topics": bool,
    "auto_create_topic": None,
    "heartbeat": ClientMetrics,
    "unregister_client": None,
    "take_questions": list[Question],
    "answer_question": None,
    "take_transaction_checks": list[TransactionCheck],
    "take_group_checks": list[TransactionCheck],
    "leave_transaction_checks": None,
    "start_receiving": None,
    "receive_messages": ReceiveAnswer,
    "ack_messages": int,
    "change_invisible": list[LeasedRange | None],
    "extend_invisible": list[bool],
    "ask_listener": bytes,
    "take_requests": DirectDelivery | None,
}
"""The methods that a broker serves over lanes (direct socket connections), with their result types."""
LAST_ANSWER_S: Final = 5.0
"""Time in seconds in which a broker must answer a call that was asked to end."""


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker's description of itself: its name, its Ray node, and the address of its lane (direct socket
    connection)."""

    name: str
    node_id: str
    lane: LaneAddress


class BrokerClient:
    """A client of one broker. Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor = ActorRef(name)
        self._lanes: LanePool[BrokerDescription, Lane] = LanePool(
            self._actor, name, lambda description, timeout_s: open_anywhere(description.lane, timeout_s)
        )

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the broker: over a lane (direct socket connection) if the method is in LANE_RESULTS, else as
        an actor method.

        Raises the method's error. Raises RequestTimeoutError or ServiceNotAvailableError if no answer arrives; the call
        may have run.
        """
        if method not in LANE_RESULTS:
            return self._actor.call(method, *args, timeout_s=timeout_s)

        def over_lane(lane: Lane, left_s: float) -> Any:
            answer = lane.call(FrameKind.CALL, (encode_call(method, args),), left_s)
            return decode_result(answer.payload, LANE_RESULTS[method])

        return self._lanes.call(method, over_lane, timeout_s)

    def lane(self, method: str, timeout_s: float) -> AbstractContextManager[Lane]:
        """Lend a lane of this broker for the call of a method (`LanePool.lane`)."""
        return self._lanes.lane(method, timeout_s)

    def drop_lanes(self) -> None:
        """Drop the cached broker description and close the idle lanes (direct socket connections). The next call opens
        a new lane."""
        self._lanes.drop()


def call_until_first(
    brokers: Sequence[BrokerClient], method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float
) -> list[Any]:
    """Call a method in LANE_RESULTS at several brokers at the same time, in the caller's thread, until one broker has
    answered. The other brokers are then asked to answer at once, usually with an empty result.

    `arguments`: the arguments for each broker. Returns for each broker its result, or the RaymqError of its call. So no
    result is lost, also if several brokers answer at the same time. A broker that does not answer within `timeout_s`,
    or within LAST_ANSWER_S after it was asked, has a RequestTimeoutError; its call may have run.
    """
    lanes: dict[int, Lane] = {}
    unreachable: dict[int, RaymqError] = {}

    with ExitStack() as stack:
        for index, broker in enumerate(brokers):
            try:
                lanes[index] = stack.enter_context(broker.lane(method, timeout_s))
            except RaymqError as error:
                unreachable[index] = error
        return _CallsAtOnce(brokers, lanes, unreachable, method, timeout_s).run(arguments)


class _CallsAtOnce:
    """The calls of a method over one lane of each broker that can be reached. Used once, in one thread. Brokers are
    named by their index. `unreachable`: the errors of the other brokers."""

    def __init__(
        self,
        brokers: Sequence[BrokerClient],
        lanes: Mapping[int, Lane],
        unreachable: Mapping[int, RaymqError],
        method: str,
        timeout_s: float,
    ) -> None:
        self._brokers, self._lanes, self._method, self._timeout_s = brokers, lanes, method, timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._waiting = list(lanes)
        """The brokers that have not answered."""
        self._results: dict[int, Any] = dict(unreachable)
        self._is_ending = False

    def run(self, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            for index in list(self._waiting):
                self._use_lane(index, partial(self._send, arguments[index]))
            while self._waiting:
                ready = self._ready()
                for index in ready:
                    self._use_lane(index, partial(self._take, index))
                if ready:
                    self._end()
                else:
                    self._give_up()
            return [self._results[index] for index in range(len(self._brokers))]
        except BaseException:
            # an answer that is still on its way must not become the answer to a later call
            for index in self._waiting:
                self._lanes[index].close()
            raise

    def _use_lane(self, index: int, use: Callable[[Lane], None]) -> None:
        """Use the lane of a broker. An error is the result of the broker's call."""
        try:
            use(self._lanes[index])
        except BlockingIOError:
            self._note(index, RequestTimeoutError(f"the call {self._method}", self._timeout_s))
        except RaymqError as error:
            self._note(index, error)
        except LANE_LOST as error:
            self._brokers[index].drop_lanes()
            self._note(index, lane_broken(self._method, self._brokers[index].name, error))

    def _send(self, arguments: tuple[Any, ...], lane: Lane) -> None:
        lane.send(FrameKind.CALL, (encode_call(self._method, arguments),), self._deadline_s)

    def _take(self, index: int, lane: Lane) -> None:
        """Receive an answer, whose first bytes have arrived."""
        self._note(index, decode_result(lane.receive(self._deadline_s).payload, LANE_RESULTS[self._method]))

    def _note(self, index: int, result: Any) -> None:
        self._results[index] = result
        self._waiting.remove(index)

    def _ready(self) -> list[int]:
        """Wait until brokers have answered, and return them; an empty list if the time is over."""
        buffered = [index for index in self._waiting if self._lanes[index].has_received]
        if buffered:
            return buffered
        poll, by_file = select.poll(), {self._lanes[index].fileno(): index for index in self._waiting}
        for file in by_file:
            poll.register(file, select.POLLIN)
        left_ms = max(0.0, self._deadline_s - time.monotonic()) * 1000
        return [by_file[file] for file, _ in poll.poll(left_ms)]

    def _end(self) -> None:
        """Ask the brokers that have not answered to answer at once."""
        if self._is_ending:
            return
        self._is_ending = True
        self._deadline_s = min(self._deadline_s, time.monotonic() + LAST_ANSWER_S)
        for index in list(self._waiting):
            self._use_lane(index, lambda lane: lane.leave(self._deadline_s))

    def _give_up(self) -> None:
        """End the calls of the brokers that have not answered in time. Their lanes close, so a broker that is late
        gives nothing to a call that still waits."""
        for index in list(self._waiting):
            self._lanes[index].close()
            self._note(index, RequestTimeoutError(f"the call {self._method}", self._timeout_s))


class AsyncBrokerClient:
    """A client of one broker in one event loop. Any number of tasks may call at the same time, up to
    ASYNC_CALLS_MAX (raymq.remoting.async_lane_pool); a call that waits holds no thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lanes = AsyncLanePool(ActorRef(name), name)

    async def call(self, method: str, *args: Any, timeout_s: float, leave: asyncio.Future[None] | None = None) -> Any:
        """Call a method in LANE_RESULTS over a lane (direct socket connection), and return its result. `leave`: when
        this future is done, a receive that waits at the broker is answered at once, usually without messages.

        If the caller is cancelled, the call may run all the same. Raises the method's error. Raises RequestTimeoutError
        or ServiceNotAvailableError if no answer arrives; the call may have run. Raises SystemBusyError if too many
        calls are unanswered.
        """
        return await self.call_encoded(method, encode_call(method, args), timeout_s=timeout_s, leave=leave)

    async def call_encoded(
        self, method: str, call: bytes, *, timeout_s: float, leave: asyncio.Future[None] | None = None
    ) -> Any:
        """Make the call of a method in LANE_RESULTS that is encoded already. Otherwise as `call`."""
        answer = await self._lanes.call(method, FrameKind.CALL, (call,), timeout_s, leave)
        return decode_result(answer.payload, LANE_RESULTS[method])

    async def ready(self, method: str, timeout_s: float) -> None:
        """Wait until a lane to the broker is free for the call of a method, which must follow without an await. Raises
        ServiceNotAvailableError or RequestTimeoutError if no lane can be opened; nothing was sent then."""
        await self._lanes.ready(method, timeout_s)

    def close(self) -> None:
        """Close the connections, and end all calls with an error. Idempotent."""
        self._lanes.close()


_clients: Final[dict[tuple[int, str], BrokerClient]] = {}
"""The broker clients by process id and broker name. The process id is in the key because a forked child must not use
its parent's connections."""
_clients_lock: Final = shared_lock()


def broker_client(name: str) -> BrokerClient:
    """Return the client of a broker. All consumers and Admins of this process share this client."""
    key = os.getpid(), name
    with _clients_lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = BrokerClient(name)
        return client


def close_broker_clients() -> None:
    """Close the idle lanes (direct socket connections) of all shared broker clients. If a client is used again, it
    opens new lanes."""
    with _clients_lock:
        clients = list(_clients.values())
        _clients.clear()
    for client in clients:
        client.drop_lanes()
