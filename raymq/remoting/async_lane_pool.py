"""A pool of the lanes (direct socket connections) from one asyncio program to one actor. A call that waits holds no
thread.

The pool differs from raymq.remoting.lane_pool in one point: a lane carries several calls at the same time
(raymq.remoting.lane.async_client). Only the actor call that requests the actor's address needs a thread. After a
failure all waiting calls share one such call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Final

from raymq.common.errors import ClientStateError, RaymqError, RequestTimeoutError, SystemBusyError
from raymq.common.retry import Backoff, left_s
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.async_client import AsyncLane, open_lane_anywhere
from raymq.remoting.lane.client import OPEN_TIMEOUT_S, Answer
from raymq.remoting.lane.frames import Buffer
from raymq.remoting.lane_pool import (
    DESCRIBE_TIMEOUT_S,
    IDLE_LANES_MAX,
    LANE_LOST,
    LANE_NOT_OPENED,
    OPEN_PATIENCE_S,
    Described,
    lane_broken,
    lane_error,
    warn_refused,
)

logger = logging.getLogger(__name__)

ASYNC_CALLS_MAX: Final = 4096
"""Maximum number of unanswered calls of one pool, cancelled calls included. Further calls are refused."""
ASYNC_CALLS_MAX_BYTES: Final = 64 << 20
"""Maximum total payload in bytes of the unanswered calls of one pool. Further calls are refused; a lone call may be
larger."""


class AsyncLanePool:
    """The lanes (direct socket connections) of one event loop to `actor`, whose name is `name`. All methods must be
    called in this loop.

    `open_one(address, timeout_s)` opens a lane; it raises OSError, EOFError or LaneRefusedError.
    """

    def __init__(
        self,
        actor: ActorRef,
        name: str,
        open_one: Callable[[LaneAddress, float], Awaitable[AsyncLane]] = open_lane_anywhere,
    ) -> None:
        self._actor, self._name, self._open_one = actor, name, open_one
        self._description: Described | None = None
        self._lanes: dict[AsyncLane, Described] = {}
        """The open lanes, each with the description that had its address."""
        self._free: dict[AsyncLane, None] = {}
        """The lanes that take another call; the lane that became free last is used first."""
        self._opening: asyncio.Task[tuple[LaneAddress, Exception] | None] | None = None
        self._backoff, self._open_again_s = Backoff(), 0.0
        """The pauses between the attempts to open a lane, which all calls share, and the end of the present pause."""
        self._calls = self._calls_bytes = 0
        self._is_closed = False

    @property
    def lanes(self) -> int:
        """Number of open lanes."""
        return len(self._lanes)

    @property
    def calls(self) -> int:
        """Number of calls without an answer, cancelled calls included."""
        return self._calls

    async def call(
        self,
        what: str,
        kind: int,
        parts: Sequence[Buffer],
        timeout_s: float,
        leave: asyncio.Future[None] | None = None,
    ) -> Answer:
        """Send a request over a lane, and return the actor's answer. `what`: the call's name in error texts. `parts`:
        the parts of the payload. `leave`: when this future is done, the actor is asked to answer at once.

        If the caller is cancelled, the answer is dropped; the call may run all the same. Raises the actor's error.
        Raises RequestTimeoutError or ServiceNotAvailableError if no answer arrives: the call may then have run, unless
        the error text says that no lane could be opened. Raises SystemBusyError if too many calls are unanswered, and
        ClientStateError after `close`; nothing was sent then.
        """
        size = sum(map(len, parts))
        if self._calls >= ASYNC_CALLS_MAX or (self._calls and self._calls_bytes + size > ASYNC_CALLS_MAX_BYTES):
            raise SystemBusyError(
                f"this client already has {self._calls} running calls of {self._calls_bytes} bytes to {self._name}; "
                "wait until some of them end"
            )
        deadline_s = time.monotonic() + timeout_s
        self._calls, self._calls_bytes = self._calls + 1, self._calls_bytes + size

        def ended() -> None:
            self._calls, self._calls_bytes = self._calls - 1, self._calls_bytes - size

        try:
            lane = await self._take(what, deadline_s, timeout_s)
        except BaseException:
            ended()
            raise
        description = self._lanes[lane]
        try:
            # `call` counts on the lane before it first waits. So no other caller takes the lane's last place.
            return await lane.call(kind, parts, left_s(deadline_s), on_end=ended, leave=leave)
        except LANE_LOST as error:
            if isinstance(error, RaymqError):
                raise
            self._drop(description)
            raise lane_broken(what, self._name, error) from error

    async def ready(self, what: str, timeout_s: float) -> None:
        """Wait until a lane takes the call `what`. Without an await before it, the next `call` uses this lane. Raises
        ClientStateError after `close`, and ServiceNotAvailableError or RequestTimeoutError if no lane can be opened."""
        await self._take(what, time.monotonic() + timeout_s, timeout_s)

    async def _take(self, what: str, deadline_s: float, timeout_s: float) -> AsyncLane:
        """Return a lane that takes a call. Opens one, with retries until the deadline, but at most for
        OPEN_PATIENCE_S. Raises like `call`; nothing was sent then."""
        last_s = min(deadline_s, time.monotonic() + OPEN_PATIENCE_S)
        while True:
            if self._is_closed:
                raise ClientStateError(f"the connections to {self._name} are closed")
            while self._free:
                lane = next(reversed(self._free))
                if lane.is_free:
                    return lane
                del self._free[lane]
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open())
                self._opening.add_done_callback(self._opened)
            opening = self._opening
            done, _ = await asyncio.wait([opening], timeout=max(0.0, deadline_s - time.monotonic()))
            if not done:
                raise RequestTimeoutError(what, timeout_s)
            if opening.cancelled():
                continue
            failure = opening.exception()
            if failure is not None:
                # Raise a copy: all waiting calls share the error, and each raise makes its traceback longer.
                raise copy(failure) from failure
            refused = opening.result()
            if refused is None:
                continue
            address, error = refused
            if self._open_again_s >= last_s:
                raise lane_error(what, self._name, address, error) from error
            logger.info("cannot open a lane to %s for the call %s, retrying: %r", self._name, what, error)
            await asyncio.sleep(self._open_again_s - time.monotonic())

    async def _open(self) -> tuple[LaneAddress, Exception] | None:
        """Open a lane, which all waiting calls share. Returns None, or the address at which no lane could be opened,
        with the reason. Raises the errors of the actor call that requests the address."""
        description = self._description or await self._describe()
        try:
            lane = await self._open_one(description.lane, OPEN_TIMEOUT_S)
        except LANE_NOT_OPENED as error:
            warn_refused(self._name, error)
            self._drop(description)
            self._open_again_s = time.monotonic() + self._backoff.next()
            return description.lane, error
        self._backoff.reset()
        self._lanes[lane] = description
        lane.on_change = self._changed
        self._changed(lane)
        return None

    async def _describe(self) -> Described:
        """Request the actor's description, in a thread. Raises the errors of ActorRef.call."""
        found: Described = await asyncio.to_thread(self._actor.call, "describe", timeout_s=DESCRIBE_TIMEOUT_S)
        self._description = found
        return found

    def _opened(self, opening: asyncio.Task[tuple[LaneAddress, Exception] | None]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # each waiting call reads it; without a call, asyncio would log it as unread

    def _changed(self, lane: AsyncLane) -> None:
        """Note that a lane has opened, closed or got an answer. Of the idle lanes, IDLE_LANES_MAX stay open."""
        if lane.closed:
            self._lanes.pop(lane, None)
            self._free.pop(lane, None)
            return
        if lane.is_free:
            self._free[lane] = None
        if not lane.calls and sum(not one.calls for one in self._lanes) > IDLE_LANES_MAX:
            lane.close()

    def _drop(self, description: Described) -> None:
        """Forget a description of the actor, because the actor may have another address now. The lanes at its address
        close when their calls have ended."""
        if self._description is description:
            self._description = None
        for lane in [lane for lane, known in self._lanes.items() if known is description]:
            lane.retire()

    def close(self) -> None:
        """Close all lanes, and end all calls with an error. Idempotent."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
        for lane in list(self._lanes):
            lane.close()
