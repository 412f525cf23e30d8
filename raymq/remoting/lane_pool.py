"""LanePool holds the lanes from one client to one actor, and makes the client's calls over them.

The actor's description, which has the address of its lanes, is the answer to an actor call. The pool keeps the
description until a lane breaks or cannot be opened, because a restarted actor has another address. A lane that no call
uses is kept for the next call.

A lane that cannot be opened is retried with back-off, each time at the address that the actor names now. A call whose
lane broke is not retried here: the call may have run, and only its caller can tell if a repetition is safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, NoReturn, Protocol, TypeVar

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.retry import Backoff, left_s
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress, told_seldom
from raymq.remoting.lane.client import OPEN_TIMEOUT_S
from raymq.remoting.lane.handshake import LaneRefusedError, TlsRefusedError

logger = logging.getLogger(__name__)

LANES_MAX: Final = 256
"""The most calls of one client to one actor at the same time. Further calls wait for a lane."""
IDLE_LANES_MAX: Final = 16
"""The most idle lanes that a client keeps to one actor."""
DESCRIBE_TIMEOUT_S: Final = 5.0
"""Limits the call that asks an actor for its description."""
OPEN_PATIENCE_S: Final = 5.0
"""The longest time that one call spends on opening a lane. Its caller may find another master after that."""
_LANE_LOST: Final = (EOFError, OSError)
"""Errors of a lane that broke."""
LANE_NOT_OPENED: Final = (*_LANE_LOST, LaneRefusedError)
"""Errors of a lane that could not be opened."""
ADVICE: Final = (
    "Let this node reach that address through firewalls, and run `raymq doctor`, which tests the lanes between all "
    "nodes. A program outside of the cluster's network has to run as a Ray job."
)
"""Advice to the reader of an error about a lane that cannot be opened."""


def lane_error(what: str, name: str, address: LaneAddress, reason: Exception) -> ServiceNotAvailableError:
    """Build the error of `what`, for which no lane to the actor `name` could be opened because of `reason`."""
    return ServiceNotAvailableError(
        f"{what}: no lane to {name} at {address.place} can be opened, so nothing was sent ({reason or repr(reason)}). "
        f"{ADVICE}"
    )


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

    `open_lane(description, timeout_s)` opens a lane; it raises OSError, EOFError or LaneRefusedError. The pool calls
    `on_description` with each description of the actor.
    """

    def __init__(
        self,
        actor: ActorRef,
        name: str,
        open_lane: Callable[[D, float], L],
        on_description: Callable[[D], None] = lambda description: None,
    ) -> None:
        self._actor, self._name, self._open_lane = actor, name, open_lane
        self._on_description = on_description
        self._lock = threading.Lock()
        self._description: D | None = None
        self._idle: list[L] = []
        self._in_use: set[object] = set()
        """A token for each call that uses a lane now. Taken out by one C call, which no signal handler can prevent."""
        self._is_closed = False

    def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> D:
        """Return the actor's description, from an actor call or from memory.

        Raises what the actor raised; RequestTimeoutError or ServiceNotAvailableError without an answer.
        """
        known = self._description
        if known is not None:
            return known
        description: D = self._actor.call("describe", timeout_s=timeout_s)
        self._on_description(description)
        with self._lock:
            self._description = description
        return description

    def call(self, what: str, over_lane: Callable[[L, float], T], timeout_s: float) -> T:
        """Return `over_lane(lane, seconds left)`, with a lane that is kept or opened for the call `what`.

        Raises what the actor raised. RequestTimeoutError or ServiceNotAvailableError without an answer: the call may
        have run, unless the text says that no lane could be opened.
        """
        # The steps share one deadline: if the actor stands still, each would otherwise wait for the whole timeout.
        deadline_s = time.monotonic() + timeout_s
        token, lane, description = object(), None, None
        try:
            description, lane = self._take(token, what, deadline_s)
            return over_lane(lane, left_s(deadline_s))
        except _LANE_LOST as error:
            self._raise_lost(what, error)
        finally:
            self._in_use.discard(token)
            if lane is not None and description is not None:
                self._keep(lane, description)

    def call_idle(
        self, what: str, over_lane: Callable[[L, A, float], T | None], argument: A, timeout_s: float
    ) -> T | None:
        """Return `over_lane(lane, argument, timeout_s)`, over an idle lane and in fewer steps than `call` takes.

        Returns None, and sends nothing, if no lane is idle. Raises as `call`.
        """
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
        """Drop the description and the idle lanes, because the actor may have another address by now. The next call
        asks for the address and opens a lane.
        """
        with self._lock:
            self._description = None
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()

    def close(self) -> None:
        """Drop the idle lanes, and keep no lane from now on. Running calls end by themselves."""
        self._is_closed = True
        self.drop()

    def _take(self, token: object, what: str, deadline_s: float) -> tuple[D, L]:
        """Take an idle lane or open one, retrying until the deadline or OPEN_PATIENCE_S.

        Raises ServiceNotAvailableError if no lane can be opened; nothing was sent then. Other errors as of `describe`.
        """
        backoff, last_s = Backoff(), min(deadline_s, time.monotonic() + OPEN_PATIENCE_S)
        while True:
            description = self._description or self.describe(min(left_s(deadline_s), DESCRIBE_TIMEOUT_S))
            try:
                return description, self._take_now(token, description, left_s(deadline_s))
            except LANE_NOT_OPENED as error:
                pause_s = backoff.next()
                if time.monotonic() + pause_s >= last_s:
                    raise lane_error(what, self._name, description.lane, error) from error
                logger.info("no lane to %s can be opened for %s, which retries: %r", self._name, what, error)
            time.sleep(pause_s)

    def _take_now(self, token: object, description: D, timeout_s: float) -> L:
        """Take an idle lane, or try once to open one. Raises as LANE_NOT_OPENED."""
        with self._lock:
            if token not in self._in_use:
                if len(self._in_use) >= LANES_MAX:
                    raise LaneRefusedError(f"{LANES_MAX} calls from this client to {self._name} are running")
                self._in_use.add(token)
            if self._idle:
                return self._idle.pop()
        try:
            return self._open_lane(description, min(timeout_s, OPEN_TIMEOUT_S))
        except LANE_NOT_OPENED as error:
            if isinstance(error, TlsRefusedError):
                told_seldom.warn(("server", self._name, str(error)), f"no lane to {self._name}: {error}")
            self.drop()
            raise

    def _keep(self, lane: L, description: D) -> None:
        """Keep the lane of an ended call for the next call, or close it if the pool's lanes were dropped since.

        A lane that is lost here, because a signal handler raises, is closed when Python collects it.
        """
        with self._lock:
            known = self._description
            is_known = known is description or (known is not None and known.lane == description.lane)
            if is_known and not self._is_closed and not lane.closed and len(self._idle) < IDLE_LANES_MAX:
                self._idle.append(lane)
                return
        lane.close()

    def _raise_lost(self, what: str, error: Exception) -> NoReturn:
        """Raise the error of a call whose lane failed with `error`; drop all lanes unless a server's error came."""
        if isinstance(error, RaymqError):
            raise error  # RequestTimeoutError is an OSError by way of TimeoutError
        self.drop()
        raise ServiceNotAvailableError(f"the lane to {self._name} broke during {what} ({error!r})") from error
