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
from typing import Final, Generic, NoReturn, Protocol, TypeVar

from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.retry import left_s
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress, told_seldom
from raymq.remoting.lane.client import OPEN_TIMEOUT_S
from raymq.remoting.lane.handshake import LaneRefusedError, TlsRefusedError

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
A = TypeVar("A")


class LanePool(Generic[D, L]):
    """The lanes of one client to `actor`. Thread-safe.

    `open_lane(description, timeout_s)` opens one; it returns None where the actor has no lane for this process, and
    raises OSError, EOFError or LaneRefusedError. `on_description` is called with each description of the actor.
    """

    def __init__(
        self,
        actor: ActorRef,
        name: str,
        open_lane: Callable[[D, float], L | None],
        on_description: Callable[[D], None] = lambda description: None,
    ) -> None:
        self._actor, self._name, self._open_lane = actor, name, open_lane
        self._on_description = on_description
        self._lock = threading.Lock()
        self._description: D | None = None
        self._idle: list[L] = []
        self._in_use: set[object] = set()
        """A token for each call that uses a lane now. Taken out by one C call, which no signal handler can prevent."""
        self._not_opened: tuple[LaneAddress, float] | None = None
        """The address at which no lane could be opened, and when to try again."""
        self._is_closed = False

    def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> D:
        """The actor's description. It is kept until a call gets no answer."""
        known = self._description
        if known is not None:
            return known
        description: D = self._actor.call("describe", timeout_s=timeout_s)
        self._on_description(description)
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
        token, lane = object(), None
        try:
            if self._begin_use(token):
                lane = self._take(description, timeout_s)
            if lane is not None:
                result = over_lane(lane, left_s(deadline_s))
                if result is not None:
                    return result
        except _LANE_LOST as error:
            self._raise_lost(what, error)
        finally:
            self._in_use.discard(token)
            if lane is not None:
                self._keep(lane, description)
        try:
            return by_actor(left_s(deadline_s))
        except (ServiceNotAvailableError, RequestTimeoutError):
            self.drop()
            raise

    def call_idle(
        self, what: str, over_lane: Callable[[L, A, float], T | None], argument: A, timeout_s: float
    ) -> T | None:
        """Make a call with one argument over a lane that is idle, in fewer steps than `call`. None if there is no such
        lane, or the call returns None. Errors as of `call`."""
        token, lane, description = object(), None, None
        try:
            with self._lock:
                description = self._description
                if description is None or not self._idle or len(self._in_use) >= LANES_MAX:
                    return None
                self._in_use.add(token)
                lane = self._idle.pop()
            return over_lane(lane, argument, timeout_s)
        except _LANE_LOST as error:
            self._raise_lost(what, error)
        finally:
            self._in_use.discard(token)
            if lane is not None and description is not None:
                self._keep(lane, description)

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
            if isinstance(error, TlsRefusedError):
                told_seldom.warn(("server", self._name, str(error)), f"no lane to {self._name}: {error}")
            logger.info("no lane to %s can be opened, so calls are actor methods: %r", self._name, error)
            with self._lock:
                self._not_opened = description.lane, time.monotonic() + LANE_PAUSE_S
            self.drop()
            return None

    def _begin_use(self, token: object) -> bool:
        """Count a call that is to use a lane. False if there are as many as may be."""
        with self._lock:
            if len(self._in_use) >= LANES_MAX:
                return False
            self._in_use.add(token)
            return True

    def _keep(self, lane: L, description: D) -> None:
        """Keep the lane of a call that has ended for the next one, or close it if the lanes were dropped since. A lane
        that is lost here, because a signal handler raises, is closed when it is collected."""
        with self._lock:
            known = self._description
            is_known = known is description or (known is not None and known.lane == description.lane)
            if is_known and not self._is_closed and not lane.closed:
                self._idle.append(lane)
                return
        lane.close()

    def _raise_lost(self, what: str, error: Exception) -> NoReturn:
        """Raise the error of a call whose lane failed with `error`; drop the lanes if it broke."""
        if isinstance(error, RaymqError):
            raise error  # RequestTimeoutError is an OSError by way of TimeoutError
        self.drop()
        raise ServiceNotAvailableError(f"the lane to {self._name} broke during {what} ({error!r})") from error
