"""AsyncConsumer is the base of the consumers for asyncio: each has a blocking twin, whose calls it makes in threads.

class AsyncPullConsumer(AsyncConsumer[PullConsumer], …):
    commit = awaited(PullConsumer.commit)       # the arguments, result, errors and docstring of the twin's method
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from raymq.common.closing import OfProcess
from raymq.common.errors import ClientStateError
from raymq.common.numbers import bounded
from raymq.common.parallel import aside


class ConsumerEngine(Protocol):
    """The part of a consumer that both twins share."""

    @property
    def closed(self) -> bool:
        """True after `close`."""

    def check_open(self) -> None:
        """ClientStateError after `close`."""


Twin = TypeVar("Twin")
P = ParamSpec("P")
T = TypeVar("T")


class AsyncConsumer(OfProcess, Generic[Twin]):
    """A consumer for asyncio, with a pool of threads for the blocking calls of its twin.

    Raises ClientStateError unless an event loop runs in this thread.
    """

    _MADE_BY = ""
    """The method of Client that makes a consumer of this class."""

    def __init__(self, twin: Twin, engine: ConsumerEngine, *, threads: int, name: str) -> None:
        """`threads`: the most calls at a time. `name`: the consumer group, which ends the names of the threads."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ClientStateError(
                f"an async consumer belongs to an event loop: call client.{self._MADE_BY}(...) inside a coroutine"
            ) from None
        self._twin = twin
        self._checks = engine
        self._calls = ThreadPoolExecutor(threads, f"calls-{name}")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a raymq consumer cannot be pickled: make one with client.{self._MADE_BY} where it is used")

    async def _call(self, call: Callable[[], T]) -> T:
        """Await a blocking call in a thread. Cancelling the wait does not undo the call."""
        self._checks.check_open()
        answer: asyncio.Future[T]
        _, answer = aside(submit_call, self._calls, call, asyncio.get_running_loop())
        return await answer


def awaited(
    method: Callable[Concatenate[Twin, P], T],
) -> Callable[Concatenate[AsyncConsumer[Twin], P], Coroutine[Any, Any, T]]:
    """Make the method of an AsyncConsumer that awaits a method of its twin. ClientStateError after `close`."""

    async def call(self: AsyncConsumer[Twin], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return await self._call(partial(method, self._twin, *arguments, **keywords))

    # The mark `is_aside` is not copied, and no `__wrapped__` is left: whoever inspects the method sees a coroutine.
    update_wrapper(call, method, updated=())
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = signature(method)  # type: ignore[attr-defined]
    return bounded(**getattr(method, "number_ranges", {}))(call)


def submit_call(
    pool: ThreadPoolExecutor, call: Callable[[], T], loop: asyncio.AbstractEventLoop
) -> tuple[Future[T], asyncio.Future[T]]:
    """Start a call in a thread of a pool, and return its future and the loop's.

    Run this function aside: a signal handler that interrupted it could lose a thread that starts, or keep the end of
    the call from the loop.
    """
    made = pool.submit(call)
    return made, asyncio.wrap_future(made, loop=loop)
