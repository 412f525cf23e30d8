"""AsyncCalls awaits what coroutine listeners return, on one event loop for each listener process.

A thread of the ConsumePool calls the listener, as for a plain function. If the return value is awaitable, the thread
makes the event loop await it, and waits for the result. So in both cases the number of threads bounds the number of
messages in progress, and timeouts, retries, order and dead letters are the same.

    thread of the pool     listener(message) → awaitable ──▶ AsyncCall ──▶ the thread waits for `result`
    thread "listener-loop"                                   awaits it; runs all coroutines of the process

The loop and its thread are created for the first awaitable. They end with the process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

from raymq.common.parallel import require_daemon

logger = logging.getLogger(__name__)


class AsyncCall:
    """Runs one awaitable, such as a call of an async listener, on an event loop in another thread. Thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]) -> None:
        self._loop = loop
        self._awaitable = awaitable
        self._ended: Future[Any] = Future()
        self._task: asyncio.Task[tuple[Any, BaseException | None]] | None = None
        """The asyncio task that runs the awaitable. Only the event loop's thread uses this attribute."""
        # call_soon_threadsafe also passes the caller's context variables to the loop
        loop.call_soon_threadsafe(self._start)

    @property
    def done(self) -> bool:
        """True if the awaitable has ended with a result or an exception."""
        return self._ended.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until the awaitable has ended, and return its result or raise its exception. If it has not ended after
        `timeout_s`, raises TimeoutError; the awaitable continues to run."""
        return self._ended.result(timeout_s)

    def cancel(self) -> None:
        """Cancel the awaitable. `result` still waits until the awaitable has ended."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:  # None if the awaitable's task was not started yet; then no task can be cancelled
            self._task.cancel()

    async def _run(self) -> tuple[Any, BaseException | None]:
        """Return the awaitable's result or its exception as a value. If this coroutine raised SystemExit, for example,
        the exception would end the event loop of all listener calls."""
        try:
            return await self._awaitable, None
        except BaseException as error:
            return None, error

    def _end(self, task: asyncio.Task[tuple[Any, BaseException | None]]) -> None:
        if task.cancelled():  # the asyncio task was cancelled before its first step, so the awaitable never ran
            if inspect.iscoroutine(self._awaitable):
                self._awaitable.close()
            self._ended.set_exception(asyncio.CancelledError())
            return
        value, error = task.result()
        if error is None:
            self._ended.set_result(value)
        else:
            self._ended.set_exception(error)


class AsyncCalls:
    """The event loop that runs the coroutines of one listener process. The loop starts when a listener returns an
    awaitable for the first time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop; None before the first awaitable."""

    def start(self, awaitable: Awaitable[Any]) -> AsyncCall:
        """Start to await `awaitable` on the event loop, and return the running call."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                try:
                    require_daemon(_run, loop, name="listener-loop", what="the event loop of listeners")
                except BaseException:
                    loop.close()
                    raise
                self._loop = loop
        return AsyncCall(self._loop, awaitable)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except BaseException:  # user code in a callback raised SystemExit; the other coroutines must continue
            logger.exception("a callback on the listener's event loop failed")
