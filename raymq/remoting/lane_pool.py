"""LanePool has the lanes from one client to one actor, and makes calls over them or, without one, as actor methods.

The actor's description, which has the address of its lanes, is the answer to an actor call; it is kept until a call
gets no answer. A lane that no call uses is kept for the next one. Where no lane can be opened, calls are actor methods,
and a lane is tried again after LANE_PAUSE_S.

Used for calls to storage actors and to brokers, which differ in how a lane is opened and in what goes over it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from raymq.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.client import OPEN_TIMEOUT_S
from raymq.remoting.lane.handshake import LaneRefusedError
from raymq.retry import left_s

logger = logging.getLogger(__name__)

LANES_MAX: Final = 16
"""The most lanes that a client has open to one actor; further calls are actor methods."""
DESCRIBE_TIMEOUT_S: Final = 5.0
"""Bounds the call that asks an actor for its description."""
LANE_PAUSE_S: Final = 1.0
"""The pause after a lane could not be opened, in which calls are actor methods."""
_LANE_LOST: Final = (EOFError, OSError)
"""Errors of a lane that broke."""
LANE_NOT_OPENED: Final = (*_LANE_LOST, LaneRefusedError)
"""Errors of a lane that could not be opened."""


class Described(Protocol):
    """A description of an actor that has lanes."""

    @property
    def lane(self) -> LaneAddress: ...


class PooledLane(Protocol):
    """A lane as a pool needs it."""

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


D = TypeVar("D", bound=Described)
L = TypeVar("L", bound=PooledLane)
T = TypeVar("T")


class LanePool(Generic[D, L]):
    """The lanes of one client to `actor`. Thread-safe.

    `open_lane(description, timeout_s)` opens one; it returns None where the actor has no lane for this process, and
    raises OSError, EOFError or LaneRefusedError.
    """

    def __init__(self, actor: ActorRef, name: str, open_lane: Callable[[D, float], L | None]) -> None:
        self._actor, self._name, self._open_lane = actor, name, open_lane
        self._lock = threading.Lock()
        self._description: D | None = None
        self._idle: list[L] = []
        self._lanes = threading.BoundedSemaphore(LANES_MAX)
        self._not_opened: tuple[LaneAddress, float] | None = None
        """The address at which no lane could be opened, and when to try again."""
        self._is_closed = False

    def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> D:
        """The actor's description. It is kept until a call gets no answer."""
        known = self._description
        if known is not None:
            return known
        description: D = self._actor.call("describe", timeout_s=timeout_s)
        with self._lock:
            self._description = description
        return description

    def call(
        self, what: str, over_lane: Callable[[L, float], T | None], by_actor: Callable[[float], T], timeout_s: float
    ) -> T:
        """Make a call over a lane or, where there is none or it returns None, as an actor method. Both get the time
        that is left.

        Raises what the actor raised; RequestTimeoutError or ServiceNotAvailableError without an answer: the call may
        have run.
        """
        # The steps share one deadline: if the actor stands still, each would otherwise wait for the whole timeout.
        deadline_s = time.monotonic() + timeout_s
        description = self._description or self.describe(min(timeout_s, DESCRIBE_TIMEOUT_S))
        if self._lanes.acquire(blocking=False):
            lane = None
            try:
                lane = self._take(description, timeout_s)
                if lane is not None:
                    result = over_lane(lane, left_s(deadline_s))
                    if result is not None:
                        return result
            except _LANE_LOST as error:
                if isinstance(error, RaymqError):
                    raise  # RequestTimeoutError is an OSError by way of TimeoutError
                self.drop()
                raise ServiceNotAvailableError(f"the lane to {self._name} broke during {what} ({error!r})") from error
            finally:
                if lane is not None:
                    self._put_back(lane, description)
                self._lanes.release()
        try:
            return by_actor(left_s(deadline_s))
        except (ServiceNotAvailableError, RequestTimeoutError):
            self.drop()
            raise

    def drop(self) -> None:
        """Drop the description and the idle lanes: the actor was restarted or is gone, and has another address. The
        next call opens new ones."""
        with self._lock:
            self._description = None
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()

    def close(self) -> None:
        """Drop the lanes, and keep none from now on. Calls under way end by themselves."""
        self._is_closed = True
        self.drop()

    def _take(self, description: D, timeout_s: float) -> L | None:
        """A lane for one call, or None where none can be opened."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            not_opened = self._not_opened
        if not_opened is not None and not_opened[0] == description.lane and time.monotonic() < not_opened[1]:
            return None
        try:
            return self._open_lane(description, min(timeout_s, OPEN_TIMEOUT_S))
        except LANE_NOT_OPENED as error:
            logger.info("no lane to %s can be opened, so calls are actor methods: %r", self._name, error)
            with self._lock:
                self._not_opened = description.lane, time.monotonic() + LANE_PAUSE_S
            self.drop()
            return None

    def _put_back(self, lane: L, description: D) -> None:
        """Keep a lane for the next call, or close it if the lanes were dropped meanwhile."""
        with self._lock:
            known = self._description
            if not self._is_closed and not lane.closed and known is not None and known.lane == description.lane:
                self._idle.append(lane)
                return
        lane.close()
