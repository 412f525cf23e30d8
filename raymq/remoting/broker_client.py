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
from dataclasses import dataclass
from typing import Any, Final

from raymq.common.closing import shared_lock
from raymq.common.members.questions import Question
from raymq.common.protocol.group import CommitAnswer, GroupConfig, QueueOffset
from raymq.common.protocol.pop import LeasedRange, ReceiveAnswer
from raymq.common.protocol.transactions import TransactionCheck
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.async_lane_pool import AsyncLanePool
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane, open_anywhere
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane_pool import LanePool
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
}
"""The methods that a broker serves over lanes (direct socket connections), with their result types."""


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

    def drop_lanes(self) -> None:
        """Drop the cached broker description and close the idle lanes (direct socket connections). The next call opens
        a new lane."""
        self._lanes.drop()


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
        kind = LANE_RESULTS[method]
        answer = await self._lanes.call(method, FrameKind.CALL, (encode_call(method, args),), timeout_s, leave)
        return decode_result(answer.payload, kind)

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
