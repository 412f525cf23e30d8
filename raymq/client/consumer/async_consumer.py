"""AsyncConsumer is the base of the asyncio consumers. Each asyncio consumer has a blocking variant (`twin`), and calls
its methods in threads.

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
from raymq.common.parallel import aside, submit


class ConsumerEngine(Protocol):
    """Interface of the part of a consumer that the blocking and the asyncio variant share."""

    @property
    def closed(self) -> bool:
        """True after the consumer was closed."""

    def check_open(self) -> None:
        """Raise ClientStateError if the consumer was closed."""


Twin = TypeVar("Twin")
P = ParamSpec("P")
T = TypeVar("T")


class AsyncConsumer(OfProcess, Generic[Twin]):
    """Base of the asyncio consumers. Makes the calls of the blocking consumer (`twin`) in a pool of threads.

    Raises ClientStateError if no event loop runs in the current thread.
    """

    _MADE_BY = ""
    """Name of the method of Client that creates a consumer of this class."""

    def __init__(self, twin: Twin, engine: ConsumerEngine, *, threads: int, name: str) -> None:
        """Start the consumer's pool of threads. `threads`: maximum number of concurrent calls. `name`: the name of the
        consumer group, with which the threads' names end."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ClientStateError(
                f"an async consumer belongs to an event loop: call client.{self._MADE_BY}(...) in a coroutine"
            ) from None
        self._twin = twin
        self._checks = engine
        self._calls = ThreadPoolExecutor(threads, f"calls-{name}")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a raymq consumer cannot be pickled: create it with client.{self._MADE_BY} in the process that uses it"
        )

    async def _call(self, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread and await its result. Cancelling the await does not undo the call."""
        self._checks.check_open()
        answer: asyncio.Future[T]
        _, answer = aside(submit_call, self._calls, call, asyncio.get_running_loop())
        return await answer


def awaited(
    method: Callable[Concatenate[Twin, P], T],
) -> Callable[Concatenate[AsyncConsumer[Twin], P], Coroutine[Any, Any, T]]:
    """Create an AsyncConsumer method that awaits the given method of the blocking consumer. The created method raises
    ClientStateError after the consumer was closed."""

    async def call(self: AsyncConsumer[Twin], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return await self._call(partial(method, self._twin, *arguments, **keywords))

    # `call` must look like a coroutine function to code that inspects it, not like the blocking method. So do not copy
    # the blocking method's attribute `is_aside`, and remove `__wrapped__`.
    update_wrapper(call, method, updated=())
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = signature(method)  # type: ignore[attr-defined]
    return bounded(**getattr(method, "number_ranges", {}))(call)


def submit_call(
    pool: ThreadPoolExecutor, call: Callable[[], T], loop: asyncio.AbstractEventLoop
) -> tuple[Future[T], asyncio.Future[T]]:
    """Start a call in a thread of a pool. Returns the call's concurrent future, and an asyncio future of `loop` with
    the same result.

    Call this function in a helper thread. If a signal handler interrupted it, the pool could lose a thread that is
    starting, or the event loop might never get the result.
    """
    made = submit(pool, call)
    return made, asyncio.wrap_future(made, loop=loop)
