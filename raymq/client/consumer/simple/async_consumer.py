"""AsyncSimpleConsumer is the simple consumer for asyncio: SimpleConsumer's methods, without blocking the event loop.

Calls run in a few threads of this consumer's own. A receive that is cancelled gives back what it gets all the same,
with its attempt not counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Final, NoReturn, TypeVar, overload

from raymq.client.consumer.simple.consumer import INVISIBLE_S, MESSAGES, WAIT_S, refuse
from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.closing import OfProcess
from raymq.common.errors import ClientStateError, RaymqError
from raymq.common.numbers import bounded
from raymq.common.parallel import aside
from raymq.common.protocol.pop import INVISIBLE, INVISIBLE_AGAIN, RECEIVE_MESSAGES
from raymq.records.filters.sql import SqlFilter

RECEIVE_THREADS: Final = 8
"""The most calls at a time, receives that wait included."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncSimpleConsumer(OfProcess):
    """Made by `Client.async_simple_consumer` inside the event loop that uses it. Several tasks may use it.

    Methods do the same, and raise the same, as those of SimpleConsumer with the same name, and are awaited.
    """

    def __init__(self, engine: SimpleEngine) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ClientStateError(
                "an async consumer belongs to an event loop: call client.async_simple_consumer(...) in a coroutine"
            ) from None
        self.group = engine.names.unwrap(engine.settings.group)
        self._engine = engine
        self._calls = ThreadPoolExecutor(RECEIVE_THREADS, f"calls-{self.group}")

    async def subscribe(self, topic: str, expression: str | SqlFilter = "*") -> None:
        await self._call(self._engine.subscribe, topic, expression)

    async def unsubscribe(self, topic: str) -> None:
        await self._call(self._engine.unsubscribe, topic)

    @bounded(max_messages=RECEIVE_MESSAGES, invisible_s=INVISIBLE)
    async def receive(
        self, max_messages: int = MESSAGES, invisible_s: float = INVISIBLE_S, *, wait_s: float = WAIT_S
    ) -> list[ReceivedMessage]:
        self._engine.check_open()
        call = partial(self._engine.receive, max_messages, invisible_s, wait_s)
        received, future = aside(self._submit, call, asyncio.get_running_loop())
        try:
            return await asyncio.shield(future)
        except BaseException:
            failed = received.done() and not received.cancelled() and received.exception() is not None
            if not failed and not received.cancel():
                received.add_done_callback(self._give_back)
            raise

    def _give_back(self, received: Future[list[ReceivedMessage]]) -> None:
        """Give back what nobody waits for any more. In the thread of the receive."""
        try:
            self._engine.change_invisible(received.result(), 0.0, counted=False)
        except RaymqError as error:
            logger.info("messages of a cancelled receive come again after their invisible time: %s", error)

    async def ack(self, messages: ReceivedMessage | Iterable[ReceivedMessage]) -> int:
        return await self._call(self._engine.ack, _listed(messages))

    async def ack_handles(self, topic: str, handles: Iterable[str]) -> int:
        return await self._call(self._engine.ack_handles, topic, list(handles))

    @overload
    async def change_invisible(self, messages: ReceivedMessage, invisible_s: float) -> ReceivedMessage: ...

    @overload
    async def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_s: float
    ) -> list[ReceivedMessage]: ...

    @bounded(invisible_s=INVISIBLE_AGAIN)
    async def change_invisible(
        self, messages: ReceivedMessage | Iterable[ReceivedMessage], invisible_s: float
    ) -> ReceivedMessage | list[ReceivedMessage]:
        renewed = await self._call(self._engine.change_invisible, _listed(messages), invisible_s)
        if isinstance(messages, ReceivedMessage):
            return renewed[0] if renewed else refuse(messages)
        return renewed

    async def close(self) -> None:
        """End the consumer; a receive that waits ends within some seconds."""
        try:
            if not self._engine.closed:
                await self._call(self._engine.close)
        finally:
            if self._engine.closed:  # else the close was cancelled before it began
                self._calls.shutdown(wait=False)

    async def __aenter__(self) -> AsyncSimpleConsumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq consumer cannot be pickled: make one with client.async_simple_consumer there")

    async def _call(self, call: Callable[..., T], *args: object) -> T:
        """Await a blocking call in a thread. Cancelling the wait does not undo the call."""
        self._engine.check_open()
        answer: asyncio.Future[T]
        _, answer = aside(self._submit, partial(call, *args), asyncio.get_running_loop())
        return await answer

    def _submit(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> tuple[Future[T], asyncio.Future[T]]:
        """The future of a call in a thread, and the loop's. Runs aside: where a signal handler interrupts it, a thread
        may be lost while it starts, or the end of the call never reach the loop."""
        made = self._calls.submit(call)
        return made, asyncio.wrap_future(made, loop=loop)


def _listed(messages: ReceivedMessage | Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
    return [messages] if isinstance(messages, ReceivedMessage) else list(messages)
