"""AsyncSimpleConsumer is the simple consumer for asyncio: SimpleConsumer's methods, without blocking the event loop.

Calls run in a few threads of the consumer. If a receive is cancelled, messages that arrive later are returned to the
broker, and their delivery attempt is not counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Final, overload

from raymq.client.consumer.async_consumer import AsyncConsumer, awaited, submit_call
from raymq.client.consumer.simple.consumer import INVISIBLE_S, MESSAGES, WAIT_S, SimpleConsumer
from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.errors import RaymqError
from raymq.common.numbers import bounded
from raymq.common.parallel import aside
from raymq.common.protocol.pop import INVISIBLE, INVISIBLE_AGAIN, RECEIVE_MESSAGES

RECEIVE_THREADS: Final = 8
"""Maximum number of concurrent calls of an asyncio simple consumer, including receives that wait."""

logger = logging.getLogger(__name__)


class AsyncSimpleConsumer(AsyncConsumer[SimpleConsumer]):
    """A simple consumer for asyncio, created by `Client.async_simple_consumer` inside the event loop that uses it.
    Several tasks may use it.

    Each method is a coroutine with the arguments, result and errors of SimpleConsumer's method of the same name.
    """

    _MADE_BY = "async_simple_consumer"

    def __init__(self, engine: SimpleEngine) -> None:
        self._engine = engine
        self.group = engine.names.unwrap(engine.settings.group)
        super().__init__(SimpleConsumer(engine), engine, threads=RECEIVE_THREADS, name=self.group)

    subscribe = awaited(SimpleConsumer.subscribe)
    unsubscribe = awaited(SimpleConsumer.unsubscribe)
    ack = awaited(SimpleConsumer.ack)
    ack_handles = awaited(SimpleConsumer.ack_handles)
    change_invisible_handles = awaited(SimpleConsumer.change_invisible_handles)
    extend_invisible_handles = awaited(SimpleConsumer.extend_invisible_handles)

    @bounded(max_messages=RECEIVE_MESSAGES, invisible_s=INVISIBLE)
    async def receive(
        self, max_messages: int = MESSAGES, invisible_s: float = INVISIBLE_S, *, wait_s: float = WAIT_S
    ) -> list[ReceivedMessage]:
        """Receive messages (`SimpleConsumer.receive`). If the call is cancelled, messages that arrive later are
        returned to the broker."""
        self._engine.check_open()
        call = partial(self._engine.receive, max_messages, invisible_s, wait_s)
        received, future = aside(submit_call, self._calls, call, asyncio.get_running_loop())
        try:
            return await asyncio.shield(future)
        except BaseException:
            failed = received.done() and not received.cancelled() and received.exception() is not None
            if not failed and not received.cancel():
                received.add_done_callback(self._give_back)
            raise

    def _give_back(self, received: Future[list[ReceivedMessage]]) -> None:
        """Give the messages of a cancelled receive back to the broker. Runs in the thread of the receive."""
        try:
            self._engine.change_invisible(received.result(), 0.0, counted=False)
        except RaymqError as error:
            logger.info(
                "cannot return the messages of a cancelled receive, so they are delivered again after their "
                "invisible time: %s",
                error,
            )

    @overload
    async def change_invisible(
        self, messages: ReceivedMessage, invisible_s: float | None = None
    ) -> ReceivedMessage: ...

    @overload
    async def change_invisible(
        self, messages: Iterable[ReceivedMessage], invisible_s: float | None = None
    ) -> list[ReceivedMessage]: ...

    @bounded(invisible_s=INVISIBLE_AGAIN)
    async def change_invisible(
        self, messages: ReceivedMessage | Iterable[ReceivedMessage], invisible_s: float | None = None
    ) -> ReceivedMessage | list[ReceivedMessage]:
        """Set a new invisible time for received messages (`SimpleConsumer.change_invisible`)."""
        return await self._call(lambda: self._twin.change_invisible(messages, invisible_s))

    @overload
    async def extend_invisible(self, messages: ReceivedMessage, invisible_s: float) -> bool: ...

    @overload
    async def extend_invisible(self, messages: Iterable[ReceivedMessage], invisible_s: float) -> list[bool]: ...

    @bounded(invisible_s=INVISIBLE_AGAIN)
    async def extend_invisible(
        self, messages: ReceivedMessage | Iterable[ReceivedMessage], invisible_s: float
    ) -> bool | list[bool]:
        """Extend the leases of received messages (`SimpleConsumer.extend_invisible`)."""
        return await self._call(lambda: self._twin.extend_invisible(messages, invisible_s))

    async def close(self) -> None:
        """Close the consumer. A waiting receive ends within a few seconds. Idempotent."""
        try:
            if not self._engine.closed:
                await self._call(self._engine.close)
        finally:
            # `_engine` is still open if this call of `close` was cancelled before it began; then the threads are needed
            # for the next call
            if self._engine.closed:
                self._calls.shutdown(wait=False)

    async def __aenter__(self) -> AsyncSimpleConsumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
