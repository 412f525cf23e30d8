"""AsyncCalls awaits the answers of coroutine listeners, on one event loop for each listener's process.

A thread of the ConsumePool calls the listener, as for a plain function. If the answer is awaitable, the thread has the
loop await it and waits for the result. So the number of threads bounds the number of messages in work in both cases,
and timeouts, retries, order and dead letters are the same.

    thread of the pool     listener(message) → awaitable ──▶ AsyncCall ──▶ the thread waits for `result`
    thread "listener-loop"                                   awaits it; runs all coroutines of the process

The loop and its thread are made for the first awaitable. They end with the process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)


class AsyncCall:
    """One awaitable on the loop. Thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awaitable: Awaitable[Any]) -> None:
        self._loop = loop
        self._awaitable = awaitable
        self._ended: Future[Any] = Future()
        self._task: asyncio.Task[tuple[Any, BaseException | None]] | None = None
        """Only the loop's thread uses this field."""
        loop.call_soon_threadsafe(self._start)  # the caller's context variables go along

    @property
    def done(self) -> bool:
        """True once the awaitable has ended."""
        return self._ended.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until the awaitable has ended; returns its result, or raises what it raised. TimeoutError after
        `timeout_s`; the awaitable still runs then."""
        return self._ended.result(timeout_s)

    def cancel(self) -> None:
        """Cancel the awaitable. `result` goes on waiting until the awaitable has ended."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:  # `_start` was called before
            self._task.cancel()

    async def _run(self) -> tuple[Any, BaseException | None]:
        """The result, or the exception: SystemExit, for one, would end the loop of all others."""
        try:
            return await self._awaitable, None
        except BaseException as error:
            return None, error

    def _end(self, task: asyncio.Task[tuple[Any, BaseException | None]]) -> None:
        if task.cancelled():  # before its first step
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
    """The event loop of one listener's process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """None before the first awaitable."""

    def start(self, awaitable: Awaitable[Any]) -> AsyncCall:
        """Have the loop await `awaitable`."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="listener-loop", daemon=True).start()
        return AsyncCall(self._loop, awaitable)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except BaseException:  # a callback of the user's code raised SystemExit: the other coroutines go on
            logger.exception("a callback on the listener's event loop failed")
