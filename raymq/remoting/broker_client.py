"""Calls to brokers: over lanes where possible, else as actor methods of the same meaning.

A change of how clients reach a broker belongs here, or in raymq.remoting.lane_pool if it holds for storage actors, too.
On the broker's node the lane is a Unix socket, from other nodes TCP.

Failures are of two kinds, as those of a storage client: an error that the broker raised says that it refused; a
ServiceNotAvailableError or RequestTimeoutError says that there was no answer, and that the call may have run. All calls
over lanes are safe to repeat.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from raymq.common.closing import shared_lock
from raymq.common.members.questions import Question
from raymq.common.protocol.group import CommitAnswer, GroupConfig, QueueOffset
from raymq.common.protocol.pop import LeasedRange, ReceiveAnswer
from raymq.common.protocol.transactions import TransactionCheck
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import Lane
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
    "leave_transaction_checks": None,
    "start_receiving": None,
    "receive_messages": ReceiveAnswer,
    "ack_messages": int,
    "change_invisible": list[LeasedRange | None],
}
"""The methods that a broker's lane serves, with the types of their results."""


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """The answer of a broker to `describe`: the Ray node it runs on, and the address of its lane."""

    name: str
    node_id: str
    lane: LaneAddress


class BrokerClient:
    """Calls to one broker. Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor = ActorRef(name)
        self._lanes: LanePool[BrokerDescription, Lane] = LanePool(self._actor, name, _open_lane)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the broker. Raises what the method raised; RequestTimeoutError or ServiceNotAvailableError
        without an answer: the call may have run."""
        if method not in LANE_RESULTS:
            return self._actor.call(method, *args, timeout_s=timeout_s)

        def over_lane(lane: Lane, left_s: float) -> tuple[Any]:
            answer = lane.call(FrameKind.CALL, (encode_call(method, args),), left_s)
            return (decode_result(answer.payload, LANE_RESULTS[method]),)

        # In a tuple, because None is a result, too.
        [result] = self._lanes.call(
            method, over_lane, lambda left_s: (self._actor.call(method, *args, timeout_s=left_s),), timeout_s
        )
        return result

    def drop_lanes(self) -> None:
        """Drop the broker's description and the idle lanes. The next call opens new ones."""
        self._lanes.drop()


def _open_lane(description: BrokerDescription, timeout_s: float) -> Lane:
    address = description.lane
    try:
        return Lane(address, timeout_s=timeout_s)
    except ConnectionRefusedError:  # no such socket here: the broker is on another node, or gone
        if not address.port:
            raise
        return Lane(address, remote=True, timeout_s=timeout_s)


_clients: Final[dict[tuple[int, str], BrokerClient]] = {}
"""By process id, since a forked child must not use its parent's lanes, and by name."""
_clients_lock: Final = shared_lock()


def broker_client(name: str) -> BrokerClient:
    """The client of a broker that this process's consumers and administration share."""
    key = os.getpid(), name
    with _clients_lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = BrokerClient(name)
        return client


def close_broker_clients() -> None:
    """Close the idle lanes of all clients. They may be used further, and open new ones."""
    with _clients_lock:
        clients = list(_clients.values())
        _clients.clear()
    for client in clients:
        client.drop_lanes()
