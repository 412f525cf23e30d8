"""SendWindow: the sends of one gateway process that clients may repeat. A repeated send stores no second message.

A client repeats a send whose answer did not arrive in time. The first send goes on, because its message may be stored
any moment. A repeated send waits for the first one, and gets the same answer. This works within one process. A client
whose connection ended may reach another process: there `raymq.gateway.service.stored_sends` asks the stores.
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
    """The sends that are under way or ended less than SEND_WINDOW_S ago, by key. Used in one event loop.

    `is_final`: returns False for a result that a repeated send may improve. Such a send counts as failed.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, is_final: Callable[[T], bool] = lambda result: True
    ) -> None:
        self._clock, self._is_final = clock, is_final
        self._sends: OrderedDict[Hashable, asyncio.Future[T]] = OrderedDict()
        self._ended: OrderedDict[Hashable, float] = OrderedDict()
        """The time at which each ended send leaves the window. The first one leaves first."""
        self._failed: OrderedDict[Hashable, float] = OrderedDict()
        """The time until which each send that failed and left the window is remembered."""

    def __len__(self) -> int:
        return len(self._sends)

    def has_failed(self, key: Hashable) -> bool:
        """Return True if a send `key` has failed, and has left the window less than SEND_WINDOW_S ago."""
        self.expire()
        return key in self._failed

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
        has_failed = done.cancelled() or (error is not None and not isinstance(error, SendUnknownError))
        if has_failed or (error is None and not self._is_final(done.result())):
            self._forget(key)
            self._note_failure(key)
            if error is not None and not isinstance(error, RaymqError):
                logger.error("a send failed with an unexpected error", exc_info=error)
        else:
            self._ended[key] = self._clock() + SEND_WINDOW_S

    def expire(self) -> None:
        """Forget the sends that ended SEND_WINDOW_S ago."""
        now_s = self._clock()
        while self._ended and next(iter(self._ended.values())) <= now_s:
            key = next(iter(self._ended))
            is_unknown = self._sends[key].exception() is not None
            self._forget(key)
            if is_unknown:
                self._note_failure(key)
        while self._failed and next(iter(self._failed.values())) <= now_s:
            self._failed.popitem(last=False)

    def _note_failure(self, key: Hashable) -> None:
        self._failed.pop(key, None)
        self._failed[key] = self._clock() + SEND_WINDOW_S
        if len(self._failed) > SENDS_MAX:
            self._failed.popitem(last=False)

    def _forget(self, key: Hashable) -> None:
        del self._sends[key]
        self._ended.pop(key, None)
