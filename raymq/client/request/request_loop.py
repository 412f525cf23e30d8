"""RequestLoop waits for the replies of requests with ``durable=False`` that have a future: one thread for all of them.

The thread runs an event loop. It starts with the first such request of a client, and ends with `close`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final

from raymq.common.errors import ClientStateError
from raymq.common.message import MessageExt
from raymq.common.parallel import contained, require_daemon
from raymq.common.protocol.request_reply import DirectRequestsInLoop

_CALLBACK_FAILED: Final = "a callback of a request raised an exception"
_CLOSE_WITHIN_S: Final = 5.0

logger = logging.getLogger(__name__)

Ask = Callable[[DirectRequestsInLoop], Coroutine[Any, Any, MessageExt]]
"""Type of a function that begins a request in the event loop."""


class RequestLoop:
    """A thread with an event loop, which sends the requests that have a future."""

    def __init__(self, requests: DirectRequestsInLoop) -> None:
        self._requests = requests
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False
        try:
            self._thread = require_daemon(self._run, name="direct-requests", what="the first request of a client")
        except BaseException:
            self._loop.close()
            raise

    def start(self, make: Ask, future: Future[MessageExt]) -> None:
        """Start a request in the event loop. Its end completes `future`."""
        self._loop.call_soon_threadsafe(self._start, make, future)

    def close(self) -> None:
        """End all requests with ClientStateError, and stop the thread."""
        self._loop.call_soon_threadsafe(self._end)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_WITHIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _start(self, make: Ask, future: Future[MessageExt]) -> None:
        if self._is_closed:
            contained(logger, _CALLBACK_FAILED, future.set_exception, _closed_error())
            return
        task = self._loop.create_task(self._finish(make, future))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _finish(self, make: Ask, future: Future[MessageExt]) -> None:
        try:
            reply = await make(self._requests)
        except asyncio.CancelledError:
            contained(logger, _CALLBACK_FAILED, future.set_exception, _closed_error())
        except Exception as error:  # every error belongs to the future
            contained(logger, _CALLBACK_FAILED, future.set_exception, error)
        else:
            # a callback of the future may raise SystemExit, which must not end the thread
            contained(logger, _CALLBACK_FAILED, future.set_result, reply)

    def _end(self) -> None:
        self._is_closed = True
        for task in self._running:
            task.cancel()
        self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        if self._running:
            await asyncio.wait(list(self._running))
        self._requests.close()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn
        self._loop.stop()


def _closed_error() -> ClientStateError:
    return ClientStateError("the client was closed before the reply arrived")
