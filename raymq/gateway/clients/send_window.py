"""SendWindow: the sends of one gateway process that clients may repeat. A repeated send stores no second message.

A client repeats a send whose answer did not arrive in time. The first send goes on, because its message may
be stored any moment. A repeated send waits for the first one, and gets the same answer. This works within one process:
a client whose connection ended may reach another process, which stores the message again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

from raymq.common.errors import RaymqError, RequestTimeoutError, SendUnknownError

SENDS_MAX: Final = 100_000
"""Maximum number of sends in the window. Beyond this number the oldest send leaves the window."""
SEND_WINDOW_S: Final = 30.0
"""Time in seconds for which a send stays in the window after its end."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SendWindow(Generic[T]):
    """The sends that are under way or ended less than SEND_WINDOW_S ago, by key. Used in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sends: OrderedDict[Hashable, asyncio.Future[T]] = OrderedDict()
        self._ended: OrderedDict[Hashable, float] = OrderedDict()
        """The time at which each ended send leaves the window. The first one leaves first."""

    def __len__(self) -> int:
        return len(self._sends)

    async def send(self, key: Hashable, begin: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Return the result of the send `key`, which `begin` begins if the window does not have it.

        Raises RequestTimeoutError after `timeout_s`; then the send goes on, and a later call may get its result. Raises
        the errors of the send. A send that certainly stored nothing leaves the window, so that it can be repeated.
        """
        self.expire()
        sending = self._sends.get(key)
        if sending is None:
            sending = self._sends[key] = asyncio.ensure_future(begin())
            sending.add_done_callback(lambda done: self._end(key, done))
            if len(self._sends) > SENDS_MAX:
                self._forget(next(iter(self._sends)))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(sending)
        except TimeoutError:
            raise RequestTimeoutError("a send", timeout_s) from None

    def _end(self, key: Hashable, done: asyncio.Future[T]) -> None:
        if self._sends.get(key) is not done:
            return  # the window was full, and the send has left it
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or (error is not None and not isinstance(error, SendUnknownError)):
            self._forget(key)
            if error is not None and not isinstance(error, RaymqError):
                logger.error("a send failed with an unexpected error", exc_info=error)
        else:
            self._ended[key] = self._clock() + SEND_WINDOW_S

    def expire(self) -> None:
        """Forget the sends that ended SEND_WINDOW_S ago."""
        now_s = self._clock()
        while self._ended and next(iter(self._ended.values())) <= now_s:
            self._forget(next(iter(self._ended)))

    def _forget(self, key: Hashable) -> None:
        del self._sends[key]
        self._ended.pop(key, None)
