"""Calls to brokers: over lanes where possible, else as actor methods of the same meaning.

A change of how clients reach a broker belongs here. The description of a broker, with the address of its lane, is the
answer to an actor call; it is kept until a call gets no answer. On the broker's node the lane is a Unix socket, from
other nodes TCP.

Failures are of two kinds, as those of a storage client: an error that the broker raised says that it refused; a
ServiceNotAvailableError or RequestTimeoutError says that there was no answer, and that the call may have run. All calls
over lanes are safe to repeat.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from raymq.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.protocol.group import CommitAnswer, GroupConfig, QueueOffset
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import decode_result, encode_call
from raymq.remoting.lane.client import OPEN_TIMEOUT_S, Lane
from raymq.remoting.lane.frames import Kind
from raymq.remoting.lane.handshake import LaneRefusedError
from raymq.retry import left_s

LANE_RESULTS: Final[dict[str, Any]] = {
    "commit_offsets": CommitAnswer,
    "committed_offsets": dict[int, int],
    "start_offset": QueueOffset,
    "start_offsets": dict[str, dict[int, QueueOffset]],
    "ensure_group": None,
    "check_broadcast": None,
    "group_config": GroupConfig,
    "update_group": None,
    "update_groups": None,
    "create_topics": bool,
    "auto_create_topic": None,
    "heartbeat": None,
    "unregister_client": None,
}
"""The methods that a broker's lane serves, with the types of their results."""
BROKER_LANES_MAX: Final = 16
"""The most lanes that a client has open to one broker; further calls are actor methods."""
BROKER_DESCRIBE_TIMEOUT_S: Final = 5.0
"""Bounds the call that asks a broker for its description."""
BROKER_LANE_PAUSE_S: Final = 1.0
"""The pause after a lane could not be opened, in which calls are actor methods."""
_LANE_LOST: Final = (EOFError, OSError)
"""Errors of a lane that broke. With LaneRefusedError: of one that could not be opened."""

logger = logging.getLogger(__name__)


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
        self._lock = threading.Lock()
        self._address: LaneAddress | None = None
        self._idle: list[Lane] = []
        self._lanes = threading.BoundedSemaphore(BROKER_LANES_MAX)
        self._closed_lane: tuple[LaneAddress, float] | None = None
        """The address at which no lane could be opened, and when to try again."""

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the broker. Raises what the method raised; RequestTimeoutError or ServiceNotAvailableError
        without an answer: the call may have run."""
        if method not in LANE_RESULTS:
            return self._actor.call(method, *args, timeout_s=timeout_s)
        # The steps share one deadline: if the broker stands still, each would otherwise wait for the whole timeout.
        deadline_s = time.monotonic() + timeout_s
        address = self._address or self._describe(min(timeout_s, BROKER_DESCRIBE_TIMEOUT_S))
        if self._lanes.acquire(blocking=False):
            lane = None
            try:
                lane = self._take_lane(address, timeout_s)
                if lane is not None:
                    answer = lane.call(Kind.CALL, (encode_call(method, args),), left_s(deadline_s))
                    return decode_result(answer.payload, LANE_RESULTS[method])
            except _LANE_LOST as error:
                if isinstance(error, RaymqError):
                    raise  # RequestTimeoutError is an OSError by way of TimeoutError
                self.drop_lanes()
                raise ServiceNotAvailableError(f"the lane to {self.name} broke during {method} ({error!r})") from error
            finally:
                if lane is not None:
                    self._give_back(lane, address)
                self._lanes.release()
        try:
            return self._actor.call(method, *args, timeout_s=left_s(deadline_s))
        except (ServiceNotAvailableError, RequestTimeoutError):
            self.drop_lanes()
            raise

    def _describe(self, timeout_s: float) -> LaneAddress:
        description: BrokerDescription = self._actor.call("describe", timeout_s=timeout_s)
        with self._lock:
            self._address = description.lane
        return description.lane

    def _take_lane(self, address: LaneAddress, timeout_s: float) -> Lane | None:
        """A lane for one call, or None where none can be opened."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            closed = self._closed_lane
        if closed is not None and closed[0] == address and time.monotonic() < closed[1]:
            return None
        try:
            return _open_lane(address, min(timeout_s, OPEN_TIMEOUT_S))
        except (*_LANE_LOST, LaneRefusedError) as error:
            logger.info("no lane to %s can be opened, so calls are actor methods: %r", self.name, error)
            with self._lock:
                self._closed_lane = address, time.monotonic() + BROKER_LANE_PAUSE_S
            self.drop_lanes()
            return None

    def _give_back(self, lane: Lane, address: LaneAddress) -> None:
        """Keep a lane for the next call, or close it if the lanes were dropped meanwhile."""
        with self._lock:
            if not lane.closed and self._address == address:
                self._idle.append(lane)
                return
        lane.close()

    def drop_lanes(self) -> None:
        """Drop the address and the idle lanes. The next call opens new ones."""
        with self._lock:
            self._address = None
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()


def _open_lane(address: LaneAddress, timeout_s: float) -> Lane:
    try:
        return Lane(address, timeout_s=timeout_s)
    except ConnectionRefusedError:  # no such socket here: the broker is on another node, or gone
        if not address.port:
            raise
        return Lane(address, remote=True, timeout_s=timeout_s)


_clients: Final[dict[tuple[int, str], BrokerClient]] = {}
"""By process id, since a forked child must not use its parent's lanes, and by name."""
_clients_lock: Final = threading.Lock()


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
