"""AsyncProducer: the Producer for programs with an event loop.

    async with client.async_producer("order-service") as producer:
        result = await producer.send(Message("orders", b"..."))

No call blocks the loop, and no message needs a thread. If the buffer is full, a send waits in the same queue as the
threads that wait for buffer space. The sender thread passes each result to the loop. Only these operations use threads
of the producer's own pool: the route query every ROUTE_VALID_S, `send_table`, requests, replies, recalls and `close`.

In the main thread, where signal handlers may raise, a helper thread enqueues each message that opens a batch. The loop
waits about 50 µs for the helper thread (raymq.common.parallel).

Cancellation: a send that is cancelled while it awaits a route or buffer space sends nothing. If a send is cancelled
later, its message is already enqueued. As after a lost acknowledgement, it is unknown whether the message is stored.
`flush` and `close` wait for the message. A cancelled `send_table` continues in its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, Unpack

from raymq.client.producer.buffer_pool import BufferWaiter
from raymq.client.producer.checks.batches import check_batch
from raymq.client.producer.completion import SendFuture
from raymq.client.producer.producer import REQUEST_TIMEOUT_S, Producer
from raymq.client.producer.queue_selector import DestinationOptions, destination_of
from raymq.client.producer.senders.send_batch import SendRequest
from raymq.client.producer.senders.send_state import closed_error
from raymq.common.closing import OfProcess
from raymq.common.errors import RequestTimeoutError
from raymq.common.message import Message, MessageExt, SendResult
from raymq.common.parallel import aside, submit
from raymq.common.protocol.request_reply import DirectRequestsInLoop
from raymq.common.protocol.route import TopicRoute
from raymq.remoting.direct_requests import check_direct

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.client.producer.table import TableResult

_RouteRequest = tuple[str, bool, float]
"""Key of a running fetch of a topic's route: the topic, a flag, and the timeout in seconds. The flag is True if the
send chooses one of the topic's queues: by a sharding key, a selector or the queue itself."""

T = TypeVar("T")

BLOCKING_CALLS_MAX: Final = 32
"""Maximum number of threads that one AsyncProducer uses for blocking calls."""
ROUTE_VALID_S: Final = 2.0
"""Time in seconds for which an AsyncProducer reuses a topic's route. After that time it fetches the route from the
client's route cache, which may wait for a NameServer."""


class AsyncProducer(OfProcess):
    """Sends messages from one asyncio event loop; made by `Client.async_producer`. Close it, or use `async with`.

    Arguments, results and errors are the same as in `Producer`. Each AsyncProducer sends through its own Producer.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer, self._pipeline = producer, producer.pipeline
        self._routes: dict[tuple[str, bool], tuple[TopicRoute, float]] = {}
        self._fetching: dict[_RouteRequest, asyncio.Task[TopicRoute]] = {}
        self._calls = ThreadPoolExecutor(BLOCKING_CALLS_MAX, f"calls-{producer.group}")
        self._closed = False
        self._direct: DirectRequestsInLoop | None = None
        """The requests that are not stored; None before the first of them."""

    @property
    def group(self) -> str:
        """Name of the producer group."""
        return self._producer.group

    @property
    def max_message_size_bytes(self) -> int:
        """The maximum size of a body that this producer sends."""
        return self._pipeline.settings.max_message_size_bytes

    async def send(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        message_id: str | None = None,
        **where: Unpack[DestinationOptions],
    ) -> SendResult:
        """Send one message and wait until it is stored (`Producer.send`)."""
        if message_id is not None:
            [future] = await self._hand_over([message], where, timeout_s, message_ids=(message_id,))
            return await future
        joined = self._pipeline.open_batches.join(message, where) if timeout_s is None else None
        if joined is None:
            [joined] = await self._hand_over([message], where, timeout_s)
        return await joined

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        timeout_s: float | None = None,
        message_ids: Sequence[str] = (),
        **where: Unpack[DestinationOptions],
    ) -> list[SendResult]:
        """Send messages of one topic, in order, to one queue, and wait until all are stored
        (`Producer.send_batch`)."""
        batch = check_batch(messages, as_objects=self._pipeline.needs_objects)
        futures = await self._hand_over(batch, where, timeout_s, together=len(batch) > 1, message_ids=message_ids)
        return [await future for future in futures]

    async def send_oneway(self, message: Message, **where: Unpack[DestinationOptions]) -> None:
        """Enqueue one message for sending, without a result (`Producer.send_oneway`)."""
        if self._pipeline.open_batches.join(message, where) is None:
            await self._hand_over([message], where, None)

    async def request(
        self,
        message: Message,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        durable: bool = True,
        **where: Unpack[DestinationOptions],
    ) -> MessageExt:
        """Send a message, and await the reply (`Producer.request`). If the call is cancelled, the reply is dropped.
        With ``durable=False`` no thread waits."""
        if not durable:
            return await self._request_directly(message, timeout_s, where)
        pending = await self._call(self._producer.begin_request, message, timeout_s)
        try:
            await self.send(pending.message, timeout_s=timeout_s, **where)
            return await _in_loop(pending.future)
        finally:
            # Call `abandon` in a helper thread, because it takes the lock that guards all requests. If a signal handler
            # interrupted `abandon`, the lock would stay held.
            aside(pending.abandon)

    async def _request_directly(self, message: Message, timeout_s: float, where: DestinationOptions) -> MessageExt:
        """Send a request with ``durable=False`` from the running event loop, and await the reply."""
        destination_of(where)
        topic = self._pipeline.check([message])
        check_direct(message, where)
        route = await self._route(topic, False, timeout_s)
        if self._direct is None:
            self._direct = self._producer._direct_requests().in_loop()
        return await self._direct.request(route, self._producer.names.wrap(topic), message, timeout_s)

    async def reply(
        self,
        request: MessageExt,
        body: bytes,
        *,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Reply to a request (`Producer.reply`). The call runs in a thread of the producer's pool."""
        reply = self._producer.reply
        return await self._call(reply, request, body, keys=keys, properties=properties, timeout_s=timeout_s)

    async def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        """Recall a message that waits for its `deliver_at_ms` (`Producer.recall`). The call runs in a thread of the
        producer's pool."""
        return await self._call(self._producer.recall, topic, handle, timeout_s=timeout_s)

    async def send_table(self, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
        """Send each row of an Arrow table as a message (`Producer.send_table`). The call runs in a thread of the
        producer's pool."""
        return await self._call(self._producer.send_table, topic, table)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until each message that was enqueued before this call is acknowledged or has failed
        (`Producer.flush`)."""
        timeout_s = self._producer.flush_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await _in_loop(aside(self._pipeline.flushed, timeout_s))
        except TimeoutError:
            raise RequestTimeoutError("the flush of the producer", timeout_s) from None

    async def close(self) -> None:
        """Flush the messages, then stop the sender threads (`Producer.close`). Idempotent."""
        if self._direct is not None:
            self._direct.close()
        if not self._closed:
            await self._call(self._producer.close)
            self._closed = True
        aside(self._calls.shutdown, wait=False)

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a raymq producer cannot be pickled: call raymq.connect().async_producer(...) in the process that "
            "uses the producer"
        )

    async def _call(self, call: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Run a blocking call in a thread of the pool and await its result. Cancelling the await does not stop the
        call. Raises ClientStateError if the producer was closed."""
        if self._closed:
            raise closed_error()
        in_context = partial(copy_context().run, call, *arguments, **keywords)
        return await aside(_submit, self._calls, in_context, asyncio.get_running_loop())

    async def _hand_over(
        self,
        messages: Sequence[Message],
        where: DestinationOptions,
        timeout_s: float | None,
        *,
        together: bool = False,
        message_ids: Sequence[str] = (),
    ) -> list[SendFuture]:
        pipeline = self._pipeline
        timeout_s = pipeline.settings.send_timeout_s if timeout_s is None else timeout_s
        topic = pipeline.check(messages)
        destination = destination_of(where)
        request = pipeline.begin(messages, destination, timeout_s, together=together, message_ids=message_ids)
        try:
            route = await self._route(topic, destination.fixed, timeout_s)
            if len(messages) == 1 and not message_ids and timeout_s == pipeline.settings.send_timeout_s:
                # Add the message to an open batch, because another send may have opened one while this send waited for
                # the route.
                joined = pipeline.open_batches.join(messages[0], where)
                if joined is not None:
                    return [joined]
            futures = aside(self._hand_over_now, route, request)
            return await self._hand_over_later(route, request) if futures is None else futures
        except BaseException as error:
            request.fail(error)
            raise

    # `_hand_over_now` and `_hand_over_granted` run in a helper thread (`aside`). If a signal handler interrupted one of
    # them, buffer space would stay allocated.

    def _hand_over_now(self, route: TopicRoute, request: SendRequest) -> list[SendFuture] | None:
        """Enqueue the messages of a request if the buffer has space for them now. Returns None if the buffer is
        full."""
        generation = self._pipeline.buffer.try_allocate(request.cost_bytes, len(request.messages))
        if generation is None:
            return None
        request.generation = generation
        return self._pipeline.put(route, request).futures(len(request.messages))

    def _hand_over_granted(self, route: TopicRoute, request: SendRequest, waiter: BufferWaiter) -> list[SendFuture]:
        """Enqueue the messages of a request whose waiter was granted buffer space. Enqueues nothing if the send was
        cancelled or timed out."""
        generation = self._pipeline.buffer.take(waiter)
        if generation is None:
            return []
        request.generation = generation
        return self._pipeline.put(route, request).futures(len(request.messages))

    async def _hand_over_later(self, route: TopicRoute, request: SendRequest) -> list[SendFuture]:
        """Wait for space in the buffer, in the same queue as `BufferPool.allocate`, then enqueue the messages of a
        request."""
        buffer, patience_s = self._pipeline.buffer, self._pipeline.allocate_timeout_s(request.timeout_s)
        if patience_s <= 0:
            raise buffer.full_error(patience_s)
        waiter = BufferWaiter(request.cost_bytes, len(request.messages))
        try:
            aside(buffer.enqueue, waiter)
            async with asyncio.timeout(patience_s):
                await _in_loop(waiter.granted)
            return aside(self._hand_over_granted, route, request, waiter)
        except TimeoutError:
            aside(buffer.remove_waiter, waiter)
            raise buffer.full_error(patience_s) from None
        except BaseException:
            aside(buffer.remove_waiter, waiter)
            raise

    async def _route(self, topic: str, keyed: bool, timeout_s: float) -> TopicRoute:
        """Return a topic's route (`SendPipeline.route`), from the cache if possible. Concurrent sends that need the
        same route wait for one common fetch."""
        request = (topic, keyed, timeout_s)
        known = self._routes.get((topic, keyed))
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        fetching = self._fetching.get(request)
        # Start a new fetch of the route if the fetch in `_fetching` has already ended. An ended fetch can remain there
        # if an interrupt came at its start.
        if fetching is None or fetching.done():
            fetching = self._fetching[request] = asyncio.ensure_future(self._fetch_route(request))
            # Read the error of the route's fetch even if all sends that waited for the route were cancelled. Otherwise
            # asyncio logs an unread error.
            fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(fetching)

    async def _fetch_route(self, request: _RouteRequest) -> TopicRoute:
        """Fetch a route in a thread, and cache the route for ROUTE_VALID_S."""
        topic, keyed, timeout_s = request
        try:
            route = await self._call(self._pipeline.route, topic, timeout_s, keyed=keyed)
            self._routes[topic, keyed] = (route, time.monotonic() + ROUTE_VALID_S)
            return route
        finally:
            self._fetching.pop(request, None)


def _in_loop(future: Future[T]) -> asyncio.Future[T]:
    """Wrap a future of another thread as a future of the running event loop."""
    return aside(asyncio.wrap_future, future, loop=asyncio.get_running_loop())


def _submit(pool: ThreadPoolExecutor, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> asyncio.Future[T]:
    """Start a call in a thread of a pool. Returns the call's future in `loop`. Call this function through `aside`: if a
    signal handler interrupted it, a lock of the pool would stay held, or a thread would never start."""
    return asyncio.wrap_future(submit(pool, call), loop=loop)
