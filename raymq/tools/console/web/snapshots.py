"""A cache for answers of the cluster that many pages share, and the thread pool for calls to the cluster.

The console requests each list at most every SNAPSHOT_KEPT_S, whatever the number of users who view it. If the cluster
does not answer, the page shows the last answer, with its age and the error.

Calls to the cluster run in a bounded pool of threads, each with a timeout. After its timeout a page no longer waits for
a call, but the thread stays busy until the call's own timeout. If all threads are busy, further calls wait within their
timeout. If more than CALLS_WAITING_MAX calls wait, further calls are refused at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import Any, Final, Generic, TypeVar

from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.tools.console.cluster import ConsoleCluster

SNAPSHOT_KEPT_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CachedAnswer(Generic[T]):
    """A cached answer of the cluster, and its age `age_s` in seconds. `error`: the reason why the answer could not be
    refreshed; empty for a fresh answer. `value`: None if no call has succeeded yet."""

    value: T | None
    age_s: float = 0.0
    error: str = ""


class Snapshots:
    """A cache of answers of the cluster, by name. Only one event loop may use it."""

    def __init__(self, *, kept_s: float = SNAPSHOT_KEPT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_s = kept_s
        self._clock = clock
        self._values: dict[str, tuple[Any, float]] = {}
        self._asking: dict[str, asyncio.Task[str]] = {}

    async def get(self, name: str, ask: Callable[[], Awaitable[T]], *, kept_s: float | None = None) -> CachedAnswer[T]:
        """Return the cached answer with the name `name` if it is young enough. Otherwise call `ask` and cache the
        result. Concurrent callers share one call. A RaymqError is not raised; its text is in the returned answer.

        `kept_s`: the maximum age of a cached answer in seconds; by default the `kept_s` of this cache.
        """
        value, at_s = self._values.get(name, (None, 0.0))
        if name in self._values and self._clock() - at_s < (self._kept_s if kept_s is None else kept_s):
            return CachedAnswer(value, self._clock() - at_s)
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.ensure_future(self._ask(name, ask))
        error = await asyncio.shield(task)
        value, at_s = self._values.get(name, (None, self._clock()))
        return CachedAnswer(value, self._clock() - at_s, error)

    async def _ask(self, name: str, ask: Callable[[], Awaitable[Any]]) -> str:
        """Call the function `ask`, and cache its result under `name`. Returns "" on success, or the text of the error
        that `ask` raised."""
        try:
            value = await ask()
        except RaymqError as error:
            return str(error)
        finally:
            del self._asking[name]
        self._values[name] = (value, self._clock())
        return ""

    def forget(self) -> None:
        """Mark all cached answers as expired, because the cluster was changed."""
        self._values = {name: (value, at_s - self._kept_s) for name, (value, at_s) in self._values.items()}


LIST_TIMEOUT_S: Final = 5.0
PAGE_QUERY_TIMEOUT_S: Final = 10.0
PAGE_CHANGE_TIMEOUT_S: Final = 30.0
"""Timeout in seconds of a call that changes the cluster. It is long enough to wait for a broker that is
restarting."""
CONSOLE_CALL_THREADS: Final = 16
CALLS_WAITING_MAX: Final = 64


class CallPool:
    """The thread pool for calls from the console to one cluster. Only one event loop may use it."""

    def __init__(self, cluster: ConsoleCluster, *, threads: int = CONSOLE_CALL_THREADS) -> None:
        self.cluster = cluster
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="console-call")
        self._free = Semaphore(threads + CALLS_WAITING_MAX)

    async def call(
        self,
        call: Callable[[ConsoleCluster], T],
        timeout_s: float = PAGE_QUERY_TIMEOUT_S,
        *,
        about: str = "the cluster",
    ) -> T:
        """Run `call` in a thread of the pool, and return its result. Raises RequestTimeoutError after `timeout_s`,
        ServiceNotAvailableError if too many calls are waiting, and the errors of the call."""
        if not self._free.acquire(blocking=False):
            raise ServiceNotAvailableError(
                "too many requests of the console already wait for the cluster; try again soon"
            )
        future = self._pool.submit(call, self.cluster)
        future.add_done_callback(lambda ended: self._free.release())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            if isinstance(_error_of(future), RaymqError):
                # The call itself failed with a RaymqError (a timeout). Raise it, because it has more details than the
                # RequestTimeoutError that `call` raises otherwise.
                raise
            raise RequestTimeoutError(about, timeout_s) from None

    def close(self) -> None:
        """Refuse further calls to the cluster, without waiting for running calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _error_of(future: Future[T]) -> BaseException | None:
    """Return the error if `future` has finished with an error; None otherwise."""
    return future.exception() if future.done() and not future.cancelled() else None
