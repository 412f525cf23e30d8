"""The producer for programs with an event loop: the same as `Producer`, awaited.

    async with client.async_producer("order-service") as producer:
        result = await producer.send(Message("orders", b"..."))

Nothing blocks the loop, and no thread is spent per message: a send that finds no space in the buffer awaits its turn in
the same queue as waiting threads, and a result comes to the loop from the sender thread. Only asking a NameServer,
every ROUTE_VALID_S, `send_table` and `close` borrow a thread of the loop's pool.

Cancelling: a send that is cancelled while it awaits a route or buffer space sends nothing. After that its message is on
its way and stays so, as if the answer had been lost: it is stored or not, and `flush` and `close` wait for it. A
`send_table` that is cancelled is carried on in its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Unpack

from raymq.client.producer.completion import SendFuture
from raymq.client.producer.encoder import check_batch
from raymq.client.producer.producer import REQUEST_TIMEOUT_S, Producer
from raymq.client.producer.queue_selector import ANYWHERE, Destination, DestinationOptions
from raymq.common.closing import OfProcess
from raymq.common.errors import RequestTimeoutError
from raymq.common.message import Message, MessageExt, SendResult
from raymq.common.protocol.route import TopicRoute

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.client.producer.table import TableResult

_RouteRequest = tuple[str, bool, float]
"""A topic, True if the messages name one of its queues, and the seconds to wait for the route."""

ROUTE_VALID_S: Final = 2.0
"""Age at which a route is fetched again from the client's routes, which may ask a NameServer and wait for it."""


class AsyncProducer(OfProcess):
    """Sends messages; made by `Client.async_producer`. To be used in one event loop; close it, or use `async with`.

    Arguments, results and errors are those of `Producer`. It sends through a Producer of its own.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._routes: dict[tuple[str, bool], tuple[TopicRoute, float]] = {}
        self._fetching: dict[_RouteRequest, asyncio.Task[TopicRoute]] = {}

    @property
    def group(self) -> str:
        """The producer group."""
        return self._producer.group

    async def send(
        self, message: Message, *, timeout_s: float | None = None, **where: Unpack[DestinationOptions]
    ) -> SendResult:
        """Send one message and await that it is stored (`Producer.send`)."""
        future = self._producer.join(message, where) if timeout_s is None else None
        if future is None:
            [future] = await self._hand_over([message], where, timeout_s)
        return await future

    async def send_batch(
        self, messages: Iterable[Message], *, timeout_s: float | None = None, **where: Unpack[DestinationOptions]
    ) -> list[SendResult]:
        """Send messages of one topic, one after another into one queue (`Producer.send_batch`)."""
        batch = check_batch(messages, as_objects=self._producer.has_hooks)
        futures = await self._hand_over(batch, where, timeout_s, together=len(batch) > 1)
        return [await future for future in futures]

    async def send_oneway(self, message: Message, **where: Unpack[DestinationOptions]) -> None:
        """Hand over one message without learning its result (`Producer.send_oneway`)."""
        if self._producer.join(message, where) is None:
            await self._hand_over([message], where, None)

    async def request(
        self, message: Message, *, timeout_s: float = REQUEST_TIMEOUT_S, **where: Unpack[DestinationOptions]
    ) -> MessageExt:
        """Send a message, and await the reply (`Producer.request`). Cancelled, it awaits the reply no more."""
        pending = await asyncio.to_thread(self._producer.begin_request, message, timeout_s)
        try:
            await self.send(pending.message, timeout_s=timeout_s, **where)
            return await asyncio.wrap_future(pending.future)
        finally:
            pending.abandon()

    async def reply(
        self,
        request: MessageExt,
        body: bytes,
        *,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
    ) -> SendResult:
        """Answer a request (`Producer.reply`), from a thread."""
        return await asyncio.to_thread(self._producer.reply, request, body, keys=keys, properties=properties)

    async def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        """Take back a message that waits for its `deliver_at_ms` (`Producer.recall`), from a thread."""
        return await asyncio.to_thread(self._producer.recall, topic, handle, timeout_s=timeout_s)

    async def send_table(self, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
        """Send each row of an Arrow table as a message (`Producer.send_table`), from a thread."""
        return await asyncio.to_thread(self._producer.send_table, topic, table)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Await that everything handed over so far was acknowledged or has failed (`Producer.flush`)."""
        timeout_s = self._producer.flush_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self._producer.flushed())
        except TimeoutError:
            raise RequestTimeoutError("flushing the producer", timeout_s) from None

    async def close(self) -> None:
        """Flush, then end the sender threads (`Producer.close`). Idempotent."""
        await asyncio.to_thread(self._producer.close)

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq producer cannot be pickled: call raymq.connect().async_producer(...) where it is used")

    async def _hand_over(
        self, messages: Sequence[Message], where: DestinationOptions, timeout_s: float | None, *, together: bool = False
    ) -> list[SendFuture]:
        producer = self._producer
        timeout_s = producer.settings.send_timeout_s if timeout_s is None else timeout_s
        topic = producer.check(messages)
        destination = Destination(**where) if where else ANYWHERE
        request = producer.send_request(messages, destination, timeout_s, together=together)
        try:
            route = await self._route(topic, destination.fixed, timeout_s)
            if len(messages) == 1 and timeout_s == producer.settings.send_timeout_s:
                joined = producer.join(messages[0], where)  # others came first, and have opened a batch meanwhile
                if joined is not None:
                    return [joined]
            patience_s = producer.allocate_timeout_s(timeout_s)
            request.generation = await self._allocate(request.cost_bytes, len(messages), patience_s)
            return producer.hand_over(route, request).futures(len(messages))
        except BaseException as error:
            request.fail(error)
            raise

    async def _allocate(self, cost_bytes: int, count: int, timeout_s: float) -> int:
        """`BufferPool.allocate`, awaited."""
        buffer = self._producer.buffer
        generation = buffer.try_allocate(cost_bytes, count)
        if generation is not None:
            return generation
        if timeout_s <= 0:
            raise buffer.full_error(timeout_s)
        waiter = buffer.add_waiter(cost_bytes, count)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(waiter.granted)
        except TimeoutError:
            buffer.remove_waiter(waiter)
            raise buffer.full_error(timeout_s) from None
        except BaseException:
            buffer.remove_waiter(waiter)
            raise
        return waiter.generation

    async def _route(self, topic: str, keyed: bool, timeout_s: float) -> TopicRoute:
        """The topic's route (`Producer.route`). Sends that want the same one at the same time share one fetch."""
        request = (topic, keyed, timeout_s)
        known = self._routes.get((topic, keyed))
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        fetching = self._fetching.get(request)
        if fetching is None:
            fetching = self._fetching[request] = asyncio.ensure_future(self._fetch_route(request))
            # All sends that wait for it may be cancelled; then nobody else would read its error.
            fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(fetching)

    async def _fetch_route(self, request: _RouteRequest) -> TopicRoute:
        """Fetch a route in a thread, and use it for ROUTE_VALID_S."""
        topic, keyed, timeout_s = request
        try:
            route = await asyncio.to_thread(self._producer.route, topic, timeout_s, keyed=keyed)
            self._routes[topic, keyed] = (route, time.monotonic() + ROUTE_VALID_S)
            return route
        finally:
            del self._fetching[request]
