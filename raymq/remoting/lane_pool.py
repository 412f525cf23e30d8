"""A pool of the lanes (direct socket connections) from one client to one actor. The client makes its calls over these
lanes.

The pool requests the actor's description with an actor call; the description contains the address of the actor's lanes.
The pool keeps the description until a lane breaks or cannot be opened, because a restarted actor has another address.
The pool keeps an idle lane for the next call.

If a lane cannot be opened, the pool retries with back-off, each time at the actor's current address. The pool does not
retry a call whose lane broke: the call may have run, and only its caller can decide if a repetition is safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, NoReturn, Protocol, TypeVar

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.retry import Backoff, left_s
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress, rate_limited_log
from raymq.remoting.lane.client import OPEN_TIMEOUT_S
from raymq.remoting.lane.handshake import LaneRefusedError, TlsRefusedError

logger = logging.getLogger(__name__)

LANES_MAX: Final = 256
"""Maximum number of concurrent calls of one client to one actor over lanes (direct socket connections). Further calls
wait."""
IDLE_LANES_MAX: Final = 16
"""Maximum number of idle lanes (direct socket connections) that a client keeps to one actor."""
DESCRIBE_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of the actor call that requests an actor's description."""
OPEN_PATIENCE_S: Final = 5.0
"""Maximum time in seconds that one call spends on opening a lane (direct socket connection). After this time the call
fails, and its caller may look for a new master."""
LANE_LOST: Final = (EOFError, OSError)
"""The errors that a call over a lane (direct socket connection) raises if the lane breaks."""
LANE_NOT_OPENED: Final = (*LANE_LOST, LaneRefusedError)
"""The errors that are raised if a lane (direct socket connection) cannot be opened."""
ADVICE: Final = (
    "Open the firewalls between this node and that address, then run `raymq doctor`, which tests the lanes "
    "between all nodes. Run a program outside of the cluster's network as a Ray job."
)
"""The advice that ends the text of an error about a lane (direct socket connection) that cannot be opened."""


def lane_error(what: str, name: str, address: LaneAddress, reason: Exception) -> ServiceNotAvailableError:
    """Return the error for the operation `what`, which failed because no lane to the actor `name` could be opened.
    `reason`: the cause."""
    return ServiceNotAvailableError(
        f"{what}: cannot open a lane (connection for messages) to {name} at {address.place}, so nothing was sent "
        f"({reason or repr(reason)}). {ADVICE}"
    )


def lane_broken(what: str, name: str, reason: Exception) -> ServiceNotAvailableError:
    """Return the error for the call `what`, whose lane to the actor `name` broke. The call may have run."""
    return ServiceNotAvailableError(f"the connection (lane) to {name} broke during the call {what} ({reason!r})")


def warn_refused(name: str, error: Exception) -> None:
    """Log that a server refuses this process's certificate, or does not use TLS. Other errors are not logged."""
    if isinstance(error, TlsRefusedError):
        rate_limited_log.warn(("server", name, str(error)), f"cannot open a lane to {name}: {error}")


class Described(Protocol):
    """Interface of an actor's description that contains the address of the actor's lanes."""

    @property
    def lane(self) -> LaneAddress: ...


class PooledLane(Protocol):
    """Interface of a lane (direct socket connection) that a LanePool can manage."""

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


D = TypeVar("D", bound=Described)
L = TypeVar("L", bound=PooledLane)
T = TypeVar("T")
A = TypeVar("A")


class LanePool(Generic[D, L]):
    """The lanes (direct socket connections) of one client to `actor`. Thread-safe.

    `open_lane(description, timeout_s)` opens a lane; it raises OSError, EOFError or LaneRefusedError. The pool calls
    `on_description` with each new description of the actor.
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
        """One token for each call that uses a lane (direct socket connection) now. `set.discard` removes a token in a
        single C call, so a signal handler cannot interrupt the removal."""
        self._is_closed = False

    def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> D:
        """Return the actor's description, cached or from an actor call.

        Raises the actor's error. Raises RequestTimeoutError or ServiceNotAvailableError if no answer arrives.
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
        """Return the result of `over_lane(lane, seconds_left)`, which makes a call over the given lane (direct socket
        connection). The lane is an idle lane or a new lane. `what`: the call's name in error texts.

        Raises the actor's error. Raises RequestTimeoutError or ServiceNotAvailableError if no answer arrives. The call
        may then have run, unless the error text says that no lane could be opened.
        """
        # Requesting the address, opening a lane and calling share one deadline. Otherwise each step could wait for the
        # whole timeout if the actor hangs.
        deadline_s = time.monotonic() + timeout_s
        token, lane, description = object(), None, None
        try:
            description, lane = self._take(token, what, deadline_s)
            return over_lane(lane, left_s(deadline_s))
        except LANE_LOST as error:
            self._raise_lost(what, error)
        finally:
            self._in_use.discard(token)
            if lane is not None and description is not None:
                self._keep(lane, description)

    @contextmanager
    def lane(self, what: str, timeout_s: float) -> Iterator[L]:
        """Lend a lane (direct socket connection) for the call `what`, whose errors the caller handles: it closes a lane
        on which an answer may still arrive, and drops the lanes if this lane broke.

        Raises the actor's error. Raises RequestTimeoutError or ServiceNotAvailableError if no lane can be opened.
        """
        token, lane, description = object(), None, None
        try:
            description, lane = self._take(token, what, time.monotonic() + timeout_s)
            yield lane
        finally:
            self._in_use.discard(token)
            if lane is not None and description is not None:
                self._keep(lane, description)

    def call_idle(
        self, what: str, over_lane: Callable[[L, A, float], T | None], argument: A, timeout_s: float
    ) -> T | None:
        """Return the result of `over_lane(lane, argument, timeout_s)`, called with an idle lane. This is a faster path
        than `call`.

        Returns None, and sends nothing, if no lane is idle. Raises like `call`.
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
        except LANE_LOST as error:
            self._raise_lost(what, error)
        finally:
            self._in_use.discard(token)
            if lane is not None and description is not None:
                self._keep(lane, description)

    def drop(self) -> None:
        """Drop the actor's cached description and the idle lanes, because the actor may have another address now. The
        next call requests the address and opens a lane."""
        with self._lock:
            self._description = None
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()

    def close(self) -> None:
        """Close the idle lanes (direct socket connections) of this pool, and keep no idle lanes from now on. Running
        calls finish normally."""
        self._is_closed = True
        self.drop()

    def _take(self, token: object, what: str, deadline_s: float) -> tuple[D, L]:
        """Return an idle lane (direct socket connection), or open a new lane. Retries opening until the deadline, but
        at most for OPEN_PATIENCE_S.

        Raises ServiceNotAvailableError if no lane can be opened; in that case nothing was sent. Also raises the errors
        of `describe`, which requests the actor's address.
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
                logger.info("cannot open a lane to %s for the call %s, retrying: %r", self._name, what, error)
            time.sleep(pause_s)

    def _take_now(self, token: object, description: D, timeout_s: float) -> L:
        """Return an idle lane (direct socket connection), or try once to open a new lane. Raises the errors in
        LANE_NOT_OPENED."""
        with self._lock:
            if token not in self._in_use:
                if len(self._in_use) >= LANES_MAX:
                    raise LaneRefusedError(
                        f"this client already has {LANES_MAX} running calls to {self._name}, the maximum; wait "
                        "until some of them end"
                    )
                self._in_use.add(token)
            if self._idle:
                return self._idle.pop()
        try:
            return self._open_lane(description, min(timeout_s, OPEN_TIMEOUT_S))
        except LANE_NOT_OPENED as error:
            warn_refused(self._name, error)
            self.drop()
            raise

    def _keep(self, lane: L, description: D) -> None:
        """Keep the lane (direct socket connection) of a finished call for the next call. Close the lane if the pool has
        dropped its lanes after this lane was opened.

        If a signal handler raises an error in this method, the lane is not kept, and Python closes it during garbage
        collection.
        """
        with self._lock:
            known = self._description
            is_known = known is description or (known is not None and known.lane == description.lane)
            if is_known and not self._is_closed and not lane.closed and len(self._idle) < IDLE_LANES_MAX:
                self._idle.append(lane)
                return
        lane.close()

    def _raise_lost(self, what: str, error: Exception) -> NoReturn:
        """Raise the error with which a call over a lane (direct socket connection) failed. If the actor's server sent
        `error`, all other lanes stay in use. Otherwise the connection broke, and all lanes are dropped."""
        if isinstance(error, RaymqError):
            # Raise the error unchanged. A RequestTimeoutError can get here, because it is also an OSError, and the
            # callers catch OSError for broken connections.
            raise error
        self.drop()
        raise lane_broken(what, self._name, error) from error
