"""The producer for programs with an event loop: the same as `Producer`, awaited.

    async with client.async_producer("order-service") as producer:
        result = await producer.send(Message("orders", b"..."))

Nothing blocks the loop, and no thread is spent per message: a send that finds no room in the buffer awaits its turn in
the same line in which threads wait, and a result comes to the loop from the sender thread. Only asking a NameServer,
every ROUTE_VALID_S, `send_table` and `close` borrow a thread of the loop's pool.

Cancelling: a send that is cancelled while it awaits a route or room sends nothing. After that its message is on its way
and stays so, as if the answer had been lost: it is stored or not, and `flush` and `close` wait for it. A `send_table`
that is cancelled is carried on in its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Unpack

from raymq.errors import RequestTimeoutError
from raymq.message import Message, SendResult
from raymq.producer.encoder import SendRequest, check_batch, running_future
from raymq.producer.producer import Producer
from raymq.producer.queue_selector import ANYWHERE, Destination, Where
from raymq.protocol.route import TopicRoute

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.producer.table import TableResult

_Asked = tuple[str, bool, float]
"""The topic of a route, whether messages ask for a queue of it, and how long they wait for it in s."""

ROUTE_VALID_S: Final = 2.0
"""How long a route is used without asking the client's routes again, which may ask a NameServer and wait for it."""


class AsyncProducer:
    """Sends messages; made by `Client.async_producer`. To be used in one event loop; close it, or use `async with`.

    Arguments, results and errors are those of `Producer`, in whose place it stands for its client.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._routes: dict[tuple[str, bool], tuple[TopicRoute, float]] = {}
        self._asking: dict[_Asked, asyncio.Task[TopicRoute]] = {}

    @property
    def group(self) -> str:
        """The producer group."""
        return self._producer.group

    async def send(self, message: Message, *, timeout_s: float | None = None, **where: Unpack[Where]) -> SendResult:
        """Send one message and await that it is stored (`Producer.send`)."""
        [future] = await self._hand_over([message], where, timeout_s)
        return await asyncio.wrap_future(future)

    async def send_batch(
        self, messages: Iterable[Message], *, timeout_s: float | None = None, **where: Unpack[Where]
    ) -> list[SendResult]:
        """Send messages of one topic, one after another into one queue (`Producer.send_batch`)."""
        futures = await self._hand_over(check_batch(messages), where, timeout_s)
        return list(await asyncio.gather(*[asyncio.wrap_future(future) for future in futures]))

    async def send_oneway(self, message: Message, **where: Unpack[Where]) -> None:
        """Hand over one message and do not learn what becomes of it."""
        await self._hand_over([message], where, None)

    async def send_table(self, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
        """Send each row of an Arrow table as a message (`Producer.send_table`), from a thread."""
        return await asyncio.to_thread(self._producer.send_table, topic, table)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Await that everything handed over so far was acknowledged or has failed (`Producer.flush`)."""
        timeout_s = self._producer.flush_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self._producer.buffer.flushed())
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
        self, messages: Sequence[Message], where: Where, timeout_s: float | None
    ) -> list[Future[SendResult]]:
        producer = self._producer
        timeout_s = producer.settings.send_timeout_s if timeout_s is None else timeout_s
        topic = producer.check(messages)
        destination = Destination(**where) if where else ANYWHERE
        deadline_s = time.monotonic() + timeout_s
        route = await self._route(topic, destination.fixed, timeout_s)
        futures = [running_future() for _ in messages]
        parcel = SendRequest.of(messages, futures, destination, timeout_s, together=len(messages) > 1)
        generation = await self._room(parcel.cost_bytes, len(messages), producer.room_timeout_s(timeout_s))
        producer.hand_over(route, parcel, generation, deadline_s)
        return futures

    async def _room(self, cost: int, count: int, timeout_s: float) -> int:
        """`SendBuffer.take`, awaited."""
        buffer = self._producer.buffer
        generation = buffer.try_take(cost, count)
        if generation is not None:
            return generation
        if timeout_s <= 0:
            raise buffer.full(timeout_s)
        place = buffer.line_up(cost, count)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(place.granted)
        except TimeoutError:
            buffer.leave(place)
            raise buffer.full(timeout_s) from None
        except BaseException:
            buffer.leave(place)
            raise
        return place.generation

    async def _route(self, topic: str, keyed: bool, timeout_s: float) -> TopicRoute:
        """The topic's route (`Producer.route`), asked for once at a time, in a thread."""
        key = (topic, keyed, timeout_s)
        known = self._routes.get((topic, keyed))
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._ask(key))
            asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # all who ask may be gone
        return await asyncio.shield(asking)

    async def _ask(self, key: _Asked) -> TopicRoute:
        topic, keyed, timeout_s = key
        try:
            route = await asyncio.to_thread(self._producer.route, topic, timeout_s, keyed=keyed)
            self._routes[topic, keyed] = (route, time.monotonic() + ROUTE_VALID_S)
            return route
        finally:
            del self._asking[key]
