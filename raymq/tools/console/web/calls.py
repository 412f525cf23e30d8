"""Calls of the backend, in a bounded pool of threads, each with a timeout.

A call that takes too long is no longer waited for; its thread is busy until the backend's own timeout. When all
threads are busy, further calls wait within their timeout, and beyond CALLS_WAITING_MAX are refused at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import Final, TypeVar

from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.tools.console.backend.protocol import Backend

LIST_TIMEOUT_S: Final = 5.0
PAGE_QUERY_TIMEOUT_S: Final = 10.0
PAGE_CHANGE_TIMEOUT_S: Final = 30.0
"""Bounds a change: a broker that restarts meanwhile is waited for."""
CONSOLE_CALL_THREADS: Final = 16
CALLS_WAITING_MAX: Final = 64

T = TypeVar("T")


class BackendCalls:
    """The pool, for one backend. Used from one event loop."""

    def __init__(self, backend: Backend, *, threads: int = CONSOLE_CALL_THREADS) -> None:
        self.backend = backend
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="console-call")
        self._free = Semaphore(threads + CALLS_WAITING_MAX)

    async def call(
        self, call: Callable[[Backend], T], timeout_s: float = PAGE_QUERY_TIMEOUT_S, *, about: str = "the cluster"
    ) -> T:
        """The result of `call`, run in a thread. RequestTimeoutError if it takes longer; ServiceNotAvailableError if
        too many calls wait already; and whatever the call raises."""
        if not self._free.acquire(blocking=False):
            raise ServiceNotAvailableError("too many questions wait for the cluster already; try again soon")
        future = self._pool.submit(call, self.backend)
        future.add_done_callback(lambda ended: self._free.release())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            if isinstance(_error_of(future), RaymqError):
                raise  # the backend's own timeout, which says more
            raise RequestTimeoutError(about, timeout_s) from None

    def close(self) -> None:
        """Take no more calls; those under way are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _error_of(future: Future[T]) -> BaseException | None:
    """The error of a call that has ended with one."""
    return future.exception() if future.done() and not future.cancelled() else None
