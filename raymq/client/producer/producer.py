"""The producer: takes messages, gathers them into batches, and returns the acknowledgements.

    send_async → the open batch of the topic or queue → one sender thread per broker group → Storage.append
    send, send_batch → on an idle queue: encoded, sent and the answer read by the caller itself

Each sender has one request under way (raymq.client.producer.sender). While it waits, messages gather in *open batches*,
and go together in the next request: batches form under load, and a lone message leaves at once. What all messages of a
batch have in common is done once per batch: route, turn of the queue, deadline, unique ids, sequences, the end.
Messages that asked for an order (a sharding key, a queue, a selector, a batch) stay in their queue in the order of the
`send` calls, also over retries.

A batch carries this producer's id, epoch and a sequence that grows per queue. When an attempt may have stored it, it is
sent again to the same queue, the very same bytes; the store drops what it has already (design §5, promise 1). Only
messages of which surely nothing is stored, and that asked for no order, go to another broker
(raymq.client.producer.send_state, raymq.client.producer.retry_policy).

A delayed message is encoded as a record of the queue in which it waits (raymq.common.delay), and is sent there like any
other: the sequence that recognises its repeats is that queue's, and SendResult names that queue and its offset there.
Its own topic and queue go along as properties. When it is delivered, it comes after what was sent to its queue
meanwhile.

Memory is bounded by `max_buffered_bytes` and `max_buffered_messages`; when that is used up, `send` blocks up to its
timeout, or raises SystemBusyError at once (`when_full`). Nothing survives the process: what was not acknowledged may or
may not be stored.

One lock guards the open batches, the buffer pool and the senders' states. Nothing that blocks, or is the user's, is
called with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final, NoReturn, Unpack

from msgspec import Struct

from raymq.client.producer import send_batch as limits
from raymq.client.producer.buffer_pool import BufferPool, end_all
from raymq.client.producer.checks.topic_types import check_types
from raymq.client.producer.completion import BeforeEnd, Completion, SendFuture, SendResults
from raymq.client.producer.encoder import (
    OVERHEAD_BYTES,
    BatchEncoder,
    ProducerIdentity,
    by_stored_queue,
    check_batch,
    cost_bytes,
    with_more,
)
from raymq.client.producer.hooks import SendHooks, Watched
from raymq.client.producer.latency_fault import BrokerFaults
from raymq.client.producer.queue_selector import (
    ANYWHERE,
    TURN_MAX_MESSAGES,
    TURN_MAX_S,
    Destination,
    DestinationOptions,
    QueueTurns,
    named_queue,
    select_queue_by_hash,
)
from raymq.client.producer.send_batch import SEALED, QueueSends, SendBatch, SendRequest
from raymq.client.producer.send_state import closed_error
from raymq.client.producer.sender import LoneSend, Pauses, Sender, SenderContext, Target, in_sender
from raymq.client.producer.settings import ProducerSettings
from raymq.common.closing import Closing, direct
from raymq.common.errors import (
    ClientStateError,
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    SendUnknownError,
)
from raymq.common.message import (
    PLAIN_PROPERTIES,
    PROPERTY_TRANSACTION_PREPARED,
    Message,
    MessageExt,
    MessageQueue,
    SendResult,
    SystemMessage,
)
from raymq.common.names import check_group, check_user_topic
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.parallel import aside
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.request_reply import PendingRequest, Reply, Requests, RequestStatistics, reply_message
from raymq.common.protocol.route import TopicRoute
from raymq.common.retry import Backoff, persist_until
from raymq.records.kernels.message_columns import MessageColumns
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.remoting.recall import check_recall, send_recall
from raymq.remoting.storage_client import StorageClient
from raymq.telemetry.trace.sends import SendTrace
from raymq.telemetry.trace.spans import Spans

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.client.producer.table import TableResult

_MARGIN_S: Final = 5.0
"""Time that a waiting `send` allows the sender thread beyond its timeout and the attempt under way."""
_JOIN_TIMEOUT_SHARE: Final = 1 / 64
"""The share of the send timeout for which a batch is open, so that its messages have nearly the same deadline."""

REQUEST_TIMEOUT_S: Final = 3.0
"""The default time for a request and its reply, RocketMQ's."""

_KEY_QUEUES_VALID_S: Final = 0.1
"""Time for which the queues of a topic's sharding keys are not asked for again."""


class _Placed(Struct, eq=False):
    """The messages of one call, where they are now: in `batches`, each of the messages with `indices` of the call, from
    index `first` of the batch on. `at_once`: the sender and the master to which the caller is to send the only batch
    itself."""

    batches: list[tuple[SendBatch, Sequence[int], int]]
    at_once: tuple[Sender, Target] | None = None

    def futures(self, count: int) -> list[SendFuture]:
        """A future for each of the call's messages."""
        if len(self.batches) == 1:
            [(batch, _, first)] = self.batches
            return [SendFuture(batch.completion, index) for index in range(first, first + count)]
        places = [
            (index, SendFuture(batch.completion, first + at))
            for batch, indices, first in self.batches
            for at, index in enumerate(indices)
        ]
        return [future for _, future in sorted(places, key=lambda place: place[0])]


class _LoneTurn(Struct, eq=False):
    """The queue to which lone messages go, up to a time and a number of messages. `checked`: users may send there."""

    sender: Sender
    sends: QueueSends
    until_s: float
    left: int
    checked: bool


class Producer(Closing):
    """Sends messages. Thread-safe; made by `Client.producer`, closed by `close` or `with`.

    Every send takes, beside its messages, their destination (raymq.client.producer.queue_selector.DestinationOptions):
    `sharding_key="user-9"`, or `queue=MessageQueue(...)`, or `selector=function, argument=...`. Without one, the
    topic's queues take turns.

    Not to be pickled: make a producer in the process that uses it.
    """

    def __init__(
        self,
        group: str,
        *,
        routes: RouteSource,
        storage: Callable[[str], StorageClient],
        born_host: tuple[str, int],
        settings: ProducerSettings | None = None,
        identity: ProducerIdentity | None = None,
        requests: Callable[[], Requests] | None = None,
        trace: SendTrace | None = None,
        spans: Spans | None = None,
        names: Namespace = NO_NAMESPACE,
        on_close: Callable[[Producer], None] = lambda producer: None,
        clock: Callable[[], float] = time.monotonic,
        pauses: Callable[[], Pauses] = Backoff,
    ) -> None:
        self.group = check_group(group)
        self.names = names
        self.settings = settings = settings or ProducerSettings()
        self._routes: RouteSource = NamespacedRoutes(routes, names) if names else routes
        self._requests = requests
        self.trace = trace
        self._spans = spans
        self._born_host = born_host
        self._on_close = on_close
        self._lock = threading.Lock()
        self.buffer = BufferPool(settings.max_buffered_bytes, settings.max_buffered_messages, self._lock)
        self._clock = clock
        self._hooks = SendHooks(group, settings.hooks, settings.check_forbidden)
        faults = BrokerFaults(latency_enabled=settings.send_latency_enable)
        self._turns = QueueTurns(faults)
        self._open: dict[str | MessageQueue, SendBatch] = {}
        """The batches that messages may join: by topic those which asked for no queue, the others by queue."""
        self._key_queues: dict[str, tuple[tuple[MessageQueue, ...], float]] = {}
        """By topic, the queues among which sharding keys choose, and the time until which that is not asked again."""
        self._lone_turns: dict[str | MessageQueue, _LoneTurn] = {}
        """By topic, and by queue for messages that name it, where a lone message goes."""
        self._context = SenderContext(
            lock=self._lock,
            clock=clock,
            pauses=pauses,
            routes=self._routes,
            storage=storage,
            encoder=BatchEncoder(born_host, settings.compression, identity, names),
            buffer=self.buffer,
            open_batches=self._open,
            faults=faults,
            move=self._move,
            attempt_timeout_s=settings.attempt_timeout_s,
            retry_when_not_store_ok=settings.retry_when_not_store_ok,
            max_message_size_bytes=settings.max_message_size_bytes,
            trace=trace,
        )
        self._senders: dict[str, Sender] = {}
        self._closed = False
        self._is_ended = threading.Event()

    @direct
    def send(
        self, message: Message, *, timeout_s: float | None = None, **where: Unpack[DestinationOptions]
    ) -> SendResult:
        """Send one message and wait until it is stored as durably as the cluster's settings say.

        A message with a sharding key, a selector or a queue goes to that queue and no other: while its broker is away,
        it waits. Raises TopicNotExistError, NoPermissionError (the topic must not be written), ClientStateError
        (closed), SystemBusyError (no space in the buffer for the whole timeout), ServiceNotAvailableError (no broker
        for it came back in time), or SendUnknownError when there was no acknowledgement within `timeout_s` (default:
        the producer's); the message may be stored then. After every other error it is not.
        """
        _refuse_in_callback("send")
        timeout_s = self.settings.send_timeout_s if timeout_s is None else timeout_s
        sent = self._send_lone(message, where, timeout_s)
        if sent is None:
            placed = aside(self._place, [message], where, timeout_s, at_once=True)
            [(batch, _, index)] = placed.batches
            return self._wait(batch.completion, index, timeout_s)
        return sent if isinstance(sent, SendResult) else self._wait(sent, 0, timeout_s)

    @direct
    def send_async(self, message: Message, **where: Unpack[DestinationOptions]) -> Future[SendResult]:
        """Hand over one message and return at once; the future ends as `send` does.

        Blocks only while the buffer is full, and raises SystemBusyError when that lasts for the send timeout; and, as
        long, while no NameServer knows if the topic exists, with ServiceNotAvailableError. Callbacks of the future
        part in the thread that sends: they should be short, and must not wait for another send. The future can be
        awaited, too.
        """
        future = self.join(message, where)
        if future is None:
            [future] = aside(self._enqueue, [message], where, self.settings.send_timeout_s)
        return future

    @direct
    def join(self, message: Message, where: DestinationOptions) -> SendFuture | None:
        """Hand over a message to the open batch of its topic or queue. None if there is none that it may join; nothing
        was done then."""
        if message.__class__ is not Message:
            return None
        plain = message.properties is PLAIN_PROPERTIES
        if plain:
            cost = len(message.body) + OVERHEAD_BYTES
        elif message.delay_level or message.deliver_at_ms is not None or message.wait_store_msg_ok is not True:
            return None
        else:
            cost = cost_bytes(message)
        now_s = self._clock()
        place = self._open_place(message, where, now_s) if where else message.topic
        # A signal handler may raise after each call here, so the changes after `extend_locked` end with `append`.
        with self._lock:
            batch = self._open.get(place)
            if (
                batch is None
                or (batch_cost := batch.cost_bytes + cost) > batch.limit_bytes
                or now_s > batch.join_until_s
            ):
                return None
            messages = batch.messages
            if TYPE_CHECKING:
                assert isinstance(messages, list)  # as in every open batch
            index = len(messages)
            if not self.buffer.extend_locked(cost, 1):
                return None
            batch.cost_bytes = batch_cost
            if index >= batch.max_messages - 1:
                batch.limit_bytes = SEALED
            if not plain:
                batch.plain = False
            messages.append(message)
        return SendFuture(batch.completion, index)

    @direct
    def send_batch(
        self, messages: Iterable[Message], *, timeout_s: float | None = None, **where: Unpack[DestinationOptions]
    ) -> Sequence[SendResult]:
        """Send messages of one topic, one after another into one queue; returns a result for each, in order.

        RocketMQ refuses delayed messages in a batch; here they go to the queues in which they wait, the others into one
        queue. Nothing is sent when one of them is not legal (MessageIllegalError). When an error is raised later, some
        of the batch may be stored.
        """
        _refuse_in_callback("send_batch")
        batch = check_batch(messages, as_objects=self.has_hooks)
        if len(batch) == 1:
            return [self.send(batch[0], timeout_s=timeout_s, **where)]
        timeout_s = self.settings.send_timeout_s if timeout_s is None else timeout_s
        placed = aside(self._place, batch, where, timeout_s, together=True, at_once=True)
        if len(placed.batches) == 1:
            completion = placed.batches[0][0].completion
            if completion.acknowledged is None:
                self._wait(completion, 0, timeout_s)
            if completion.acknowledged is not None:
                return SendResults(completion.acknowledged)
        return [self._wait(*future.place, timeout_s) for future in placed.futures(len(batch))]

    @direct
    def send_oneway(self, message: Message, **where: Unpack[DestinationOptions]) -> None:
        """Hand over one message without learning its result. It is retried as any other."""
        if self.join(message, where) is None:
            aside(self._enqueue, [message], where, self.settings.send_timeout_s)

    def send_table(self, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
        """Send each row of an Arrow table as a message, and wait until all are stored.

        Columns: `body` (binary or string); optional, and null where a row has none: `tags` (string), `keys` (string or
        list of strings), `properties` (map of string to string), `sharding_key` (string or integer). All rows are
        checked before the first is sent: InvalidArgumentError for the columns, MessageIllegalError for a row. Rows with
        one sharding key go to one queue in their order, the others to queues in turn. Memory beside the table is
        bounded by the producer's buffer.

        When sending fails later, the error's notes say how many rows were acknowledged.
        """
        from raymq.client.producer.table import send_table

        _refuse_in_callback("send_table")
        return send_table(self, topic, table)

    # Request-reply (raymq.client.request)

    def request(
        self, message: Message, *, timeout_s: float = REQUEST_TIMEOUT_S, **where: Unpack[DestinationOptions]
    ) -> MessageExt:
        """Send a message, and wait for the reply of whoever consumes it.

        RequestTimeoutError when none comes within `timeout_s`, which the send counts into: the request may have been
        carried out, and a reply that comes later is dropped. SystemBusyError while REQUESTS_MAX requests of this client
        wait. When sending fails, the errors of `send`; nobody waits for a reply then.
        """
        _refuse_in_callback("request")
        pending = self.begin_request(message, timeout_s)
        try:
            self.send(pending.message, timeout_s=timeout_s, **where)
        except BaseException:
            pending.abandon()
            raise
        return pending.result()

    def request_async(
        self, message: Message, *, timeout_s: float = REQUEST_TIMEOUT_S, **where: Unpack[DestinationOptions]
    ) -> Future[MessageExt]:
        """Send a message as `send_async` does; the future ends as `request` does. It cannot be cancelled. Its callbacks
        run in a thread that takes replies: they should be short."""
        pending = self.begin_request(message, timeout_s)
        try:
            self.send_async(pending.message, **where).add_done_callback(pending.sent)
        except BaseException:
            pending.abandon()
            raise
        return pending.future

    def begin_request(self, message: Message, timeout_s: float) -> PendingRequest:
        """A request that is to be sent now, whose reply is waited for. The first one to a broker group takes calls."""
        if self._requests is None:
            raise ClientStateError("this producer takes no replies; make one with client.producer(...)")
        topic = self.check([message])
        return self._requests().begin(self.route(topic, timeout_s, keyed=False), message, timeout_s)

    def reply(
        self,
        request: MessageExt,
        body: bytes,
        *,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Answer a request that a pull consumer returned; a listener answers with ``return raymq.reply(body)``.

        Raises CreateReplyMessageError for a message that is no request, RequesterGoneError when the reply is stored
        and the broker knows that nobody waits for it, else the errors of `send`. A reply that comes too late is
        stored, too; its requester drops and counts it.
        """
        if self._requests is None:
            raise ClientStateError("this producer sends no replies; make one with client.producer(...)")
        message, queue = reply_message(request, Reply(body, keys, dict(properties or {})))
        result = self.send(message, timeout_s=timeout_s, queue=queue)
        self._requests().check_present(request)
        return result

    @direct
    def request_statistics(self) -> RequestStatistics:
        """The requests of this producer's client, by how they ended."""
        if self._requests is None:
            return RequestStatistics(0, 0, 0, 0, 0)
        return self._requests().statistics()

    def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        """Take back a message that waits for its `deliver_at_ms`, by the `recall_handle` of its SendResult; returns its
        id. On return the message will never be delivered, whatever fails later.

        RecallError for a handle that is none or of another topic, and when the message was due already.
        TopicNotExistError. ServiceNotAvailableError or RequestTimeoutError when no store answers for `timeout_s`
        (default: the send timeout); whether it is recalled is unknown then, and the call may be repeated.
        """
        _refuse_in_callback("recall")
        if self._closed:
            raise closed_error()
        found = check_recall(topic, handle, time.time_ns() // 1_000_000)
        context, recalled = self._context, False
        try:
            send_recall(
                found._replace(topic=self.names.wrap(topic)),
                routes=context.routes,
                storage=context.storage,
                born_host=self._born_host,
                timeout_s=self.settings.send_timeout_s if timeout_s is None else timeout_s,
            )
            recalled = True
        finally:
            if self.trace is not None:
                self.trace.recalled(self.names.wrap(topic), found.message_id, success=recalled)
        return found.message_id

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything handed over so far was acknowledged or has failed (the futures tell which).

        What other threads hand over meanwhile is not waited for. RequestTimeoutError after `timeout_s`, by default
        twice the send timeout, which only sends with a longer timeout of their own exceed.
        """
        _refuse_in_callback("flush")
        timeout_s = self.flush_timeout_s if timeout_s is None else timeout_s
        try:
            self.flushed().result(timeout_s)
        except FutureTimeoutError:
            raise RequestTimeoutError("flushing the producer", timeout_s) from None

    @direct
    def flushed(self) -> Future[None]:
        """A future that ends when everything handed over so far has its end."""
        flush = self.buffer.flushed()
        with self._lock:
            self._open.clear()  # what comes now is not waited for
        return flush

    @property
    def has_hooks(self) -> bool:
        """True if hooks look at the messages."""
        return bool(self._hooks)

    @property
    def flush_timeout_s(self) -> float:
        """The time that `flush` and `close` wait by default: twice the send timeout."""
        return 2 * self.settings.send_timeout_s

    def close(self) -> None:
        """Flush, then end the sender threads. Idempotent: a call while another one closes waits for that. Sends that
        come later, in other threads too, raise ClientStateError; whatever was handed over before is acknowledged, or
        its future fails. In a callback of a send's future, which must not wait, it returns at once: a thread closes."""
        if in_sender():
            threading.Thread(target=self.close, name="producer-close", daemon=True).start()
            return
        with self._lock:
            closes, self._closed = not self._closed, True
            self._open.clear()
            self._lone_turns.clear()
            senders = list(self._senders.values())
        if not closes:
            self._is_ended.wait(self.flush_timeout_s + self.settings.attempt_timeout_s)
            return
        give_up = True
        try:
            self.flush()
            give_up = False
        finally:
            for sender in senders:
                sender.close(give_up=give_up)
            self._is_ended.set()
            self._on_close(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq producer cannot be pickled: call raymq.connect().producer(...) where it is used")

    # The steps of a send, which AsyncProducer and send_table take too

    @direct
    def check(self, messages: Sequence[Message]) -> str:
        """The messages' topic; MessageIllegalError, IllegalNameError or ClientStateError."""
        longest = self.settings.max_message_size_bytes
        is_checked = isinstance(messages, MessageColumns) and int(messages.bodies.sizes.max()) <= longest
        for message in () if is_checked else messages:
            if message.__class__ is not Message and not isinstance(message, Message):
                raise MessageIllegalError(f"expected a raymq.Message, got {type(message).__name__}")
            if len(message.body) > longest:
                raise MessageIllegalError(
                    f"a body of {len(message.body)} bytes exceeds this producer's max_message_size_bytes of {longest}: "
                    "send a reference to the data, split it, or raise max_message_size_bytes here and in the store"
                )
        if self._closed:
            raise closed_error()
        if isinstance(messages, MessageColumns):
            return check_user_topic(messages.topic)
        return messages[0].topic if isinstance(messages[0], SystemMessage) else check_user_topic(messages[0].topic)

    @direct
    def route(self, topic: str, timeout_s: float, *, keyed: bool) -> TopicRoute:
        """The route of a topic that is to be sent to. A topic that does not exist is created if the cluster does that,
        else TopicNotExistError.

        `keyed`: the messages name a queue, so all queues of the topic must be known; otherwise one that can be written
        is enough. While that is not the case, or nobody knows the topic, this waits up to `timeout_s`, then raises
        ServiceNotAvailableError. In a callback of a send, which must not wait, it raises at once.
        """
        try:
            return self._usable_route(topic, keyed)
        except RaymqError as error:
            if not error.retryable or in_sender():
                raise
        return persist_until(time.monotonic() + timeout_s, lambda left_s: self._usable_route(topic, keyed))

    def _usable_route(self, topic: str, keyed: bool) -> TopicRoute:
        route = self._routes.get_or_create(topic, self.settings.default_topic_queue_nums)
        if keyed:
            route.require_all_queues()
        else:
            route.require_writable()
        return route

    @direct
    def allocate_timeout_s(self, timeout_s: float) -> float:
        """The time that a send with `timeout_s` may wait for space in the buffer."""
        return 0.0 if self.settings.when_full == "raise" or in_sender() else timeout_s

    @direct
    def send_request(
        self,
        messages: Sequence[Message],
        destination: Destination,
        timeout_s: float,
        *,
        together: bool = False,
        before_end: BeforeEnd | None = None,
    ) -> SendRequest:
        """A request for messages that were checked, whose buffer space is not allocated yet (`generation` is -1)."""
        span = None
        if self._spans is not None:
            messages, before_end, span = self._spans.send_begins(self.group, messages, before_end)
        if isinstance(messages, MessageColumns):
            plain = messages.properties is None
            cost = int(messages.sizes.sum()) + OVERHEAD_BYTES * len(messages)
        else:
            rich = with_more(messages)
            cost = sum([len(message.body) for message in messages]) + OVERHEAD_BYTES * len(messages)
            for message in rich:
                cost += cost_bytes(message) - len(message.body) - OVERHEAD_BYTES
            plain = not rich
        deadline_s = self._clock() + timeout_s
        return SendRequest(
            messages, destination, timeout_s, deadline_s, together, plain, cost, -1, before_end, span=span
        )

    @direct
    def hand_over(self, route: TopicRoute, request: SendRequest, *, at_once: bool = False) -> _Placed:
        """Give messages, whose buffer space is allocated, to the sender of their queue. When this fails, the space is
        deallocated and the error is raised.

        With `at_once` the caller is to send them itself, where the result says so (`send_at_once`).
        """
        watched: Watched | None = None
        try:
            if route.attributes.restricts:
                check_types(route, request.messages, request.destination, request.stored)
            queue = self._select(route, request)
            if self._hooks:
                for message in request.messages:
                    self._hooks.check(message, queue)
                watched = self._hooks.watch(request.messages, queue)
            sender = self._sender(queue.broker_name)
            parts = self._parts(request, queue)
            with self._lock:
                if self._closed or sender.closed:
                    raise closed_error()
                attributes = route.attributes
                placed, futures = self._put_locked(
                    request, parts, queue, sender, watched, attributes=attributes, at_once=at_once
                )
        except BaseException as error:
            self.buffer.deallocate(request.cost_bytes, len(request.messages), request.generation)
            if watched is not None:
                watched(0, len(request.messages), error)
            raise
        end_all(futures)
        return placed

    def _enqueue(self, messages: list[Message], where: DestinationOptions, timeout_s: float) -> list[SendFuture]:
        placed = self._place(messages, where, timeout_s, together=len(messages) > 1)
        return placed.futures(len(messages))

    def _place(
        self,
        messages: Sequence[Message],
        where: DestinationOptions,
        timeout_s: float,
        *,
        together: bool = False,
        at_once: bool = False,
    ) -> _Placed:
        """Hand over messages; with `at_once`, send them in this thread if nothing is before them."""
        topic = self.check(messages)
        destination = Destination(**where) if where else ANYWHERE
        request = self.send_request(messages, destination, timeout_s, together=together)
        try:
            route = self.route(topic, timeout_s, keyed=destination.fixed)
            patience_s = self.allocate_timeout_s(timeout_s)
            request.generation = self.buffer.allocate(request.cost_bytes, len(messages), patience_s)
            placed = self.hand_over(route, request, at_once=at_once)
        except BaseException as error:
            request.fail(error)
            raise
        if placed.at_once is not None:
            sender, target = placed.at_once
            sender.send_at_once(placed.batches[0][0], target)
        return placed

    def _select(self, route: TopicRoute, request: SendRequest) -> MessageQueue:
        if request.destination.queue is not None:
            return named_queue(route, request.destination.queue)
        if request.destination.fixed:
            if request.destination.sharding_key is not None:
                self._key_queues[route.topic] = route.require_all_queues(), self._clock() + _KEY_QUEUES_VALID_S
            return request.destination.select(route, request.messages[0])
        gathered = self._open.get(route.topic)
        if gathered is not None:
            self._turns.used(route.topic, len(gathered.messages) - 1)  # it was opened as one message
        return self._turns.next(route, len(request.messages), self._clock())

    def _parts(
        self, request: SendRequest, queue: MessageQueue
    ) -> list[tuple[MessageQueue, Sequence[int], list[Message] | MessageColumns, int]]:
        """The messages in parts that fit in one request: the queue that stores them, their indices in the request, the
        messages themselves, and their cost."""
        if isinstance(request.messages, MessageColumns):  # they fit, and none is delayed
            return [(request.stored or queue, range(len(request.messages)), request.messages, request.cost_bytes)]
        messages = list(request.messages)
        if (
            request.plain
            and len(messages) <= limits.BATCH_MAX_MESSAGES
            and (request.cost_bytes <= limits.REQUEST_MAX_BYTES or len(messages) == 1)
        ):
            return [(queue, range(len(messages)), messages, request.cost_bytes)]
        by_queue = {queue: range(len(messages))} if request.plain else by_stored_queue(messages, queue)
        parts: list[tuple[MessageQueue, Sequence[int], list[Message] | MessageColumns, int]] = []
        for stored, indices in by_queue.items():
            for part in _cut(messages, indices):
                members = [messages[index] for index in part]
                parts.append((stored, part, members, sum(map(cost_bytes, members))))
        return parts

    def _put_locked(
        self,
        request: SendRequest,
        parts: list[tuple[MessageQueue, Sequence[int], list[Message] | MessageColumns, int]],
        queue: MessageQueue,
        sender: Sender,
        watched: Watched | None,
        *,
        attributes: TopicAttributes,
        at_once: bool,
    ) -> tuple[_Placed, list[Future[None]]]:
        """Let the parts of a request join the batch that is open in their queue, or wait as batches of their own.
        `attributes` are the topic's.

        Returns, beside where they are, the futures of flushes that are to end.
        """
        joins = not request.together and watched is None and request.before_end is None and len(request.messages) == 1
        if joins and (joined := self._join_locked(request, parts[0][0], queue, sender)) is not None:
            return joined
        placed = _Placed([])
        for number, (stored, indices, members, cost) in enumerate(parts):
            ending = request.before_end if watched is None else watched.part(indices, request.before_end)
            batch = SendBatch(
                queue.topic, queue, sender.state.sends(stored), members, Completion(ending), request.movable,
                _waits(members), request.timeout_s, request.deadline_s, cost, request.generation,
                plain=request.plain, first_sequence=request.first_sequence,
                inner=attributes.has_inner_batches and stored.topic == queue.topic,
            )  # fmt: skip
            if number:
                self.buffer.share_locked(request.generation)
            placed.batches.append((batch, indices, 0))
            if at_once and len(parts) == 1 and sender.begin_at_once_locked(batch):
                placed.at_once = sender, sender.require_target()
                if joins and attributes.takes_normal and (request.movable or request.destination.queue is not None):
                    self._note_lone_turn_locked(batch, sender)
                break
            if joins:
                self._open_locked(batch, stored, any_may_join=not attributes.is_compacted)
            sender.put_locked(batch)
        return placed, []

    def _join_locked(
        self, request: SendRequest, stored: MessageQueue, queue: MessageQueue, sender: Sender
    ) -> tuple[_Placed, list[Future[None]]] | None:
        """Let one message join the batch that is open in its queue; None if there is none that it may join."""
        waiting = sender.state.sends(stored).waiting
        batch = waiting[-1] if waiting else None
        [message] = request.messages
        if (
            batch is None
            or batch.cost_bytes + request.cost_bytes > batch.limit_bytes
            or batch.queue != queue
            or batch.movable is not request.movable
            or batch.waits is not message.wait_store_msg_ok
            or batch.timeout_s != request.timeout_s
            or batch.generation != self.buffer.generation
            or self._clock() > batch.join_until_s
        ):
            return None
        if TYPE_CHECKING:
            assert isinstance(batch.messages, list)  # as in every batch with room
        index = len(batch.messages)
        batch.messages.append(message)
        batch.plain = batch.plain and request.plain
        batch.cost_bytes += request.cost_bytes
        if index >= batch.max_messages - 1:
            batch.limit_bytes = SEALED
        return _Placed([(batch, (0,), index)]), self.buffer.merge_locked(request.generation)

    def _open_locked(self, batch: SendBatch, stored: MessageQueue, *, any_may_join: bool) -> None:
        """Let further messages join a batch, as long as they have nearly the same deadline; unless `any_may_join`, only
        those that were checked."""
        open_for_s = batch.timeout_s * _JOIN_TIMEOUT_SHARE
        batch.join_until_s = self._clock() + open_for_s
        batch.deadline_s += open_for_s
        batch.open_for_s = open_for_s
        batch.limit_bytes = limits.OPEN_BATCH_MAX_BYTES
        if batch.movable:
            before = self._open.get(batch.topic)
            full = before is not None and len(before.messages) >= before.max_messages
            batch.max_messages = limits.FIRST_TURN_MAX_MESSAGES
            if before is not None and full:
                batch.max_messages = min(2 * before.max_messages, limits.BATCH_MAX_MESSAGES)
        if any_may_join and batch.waits and stored == batch.queue and batch.timeout_s == self.settings.send_timeout_s:
            self._open[batch.topic if batch.movable else batch.queue] = batch

    def _open_place(self, message: Message, where: DestinationOptions, now_s: float) -> str | MessageQueue:
        """The key of `_open` under which a message with a destination finds its batch; one that is not there if its
        queue is to be chosen by the route."""
        queue, key = _own_queue(message, where), where.get("sharding_key")
        if queue is not None:
            return queue
        queues, until_s = self._key_queues.get(message.topic, ((), 0.0))
        if len(where) == 1 and key is not None and now_s < until_s:
            return select_queue_by_hash(queues, message, key)
        return ""

    # A lone message on an idle queue

    def _send_lone(
        self, message: Message, where: DestinationOptions, timeout_s: float
    ) -> SendResult | Completion | None:
        """Send a message in this thread to the queue that it names, or whose turn it is, if nothing is under way to its
        broker. Returns its result, or what will have it when the sender's thread has gone on with it. None if it is to
        go the general way: nothing was done then."""
        kind = message.__class__
        if (
            (kind is not Message and (kind is not SystemMessage or PROPERTY_TRANSACTION_PREPARED in message.properties))
            or message.delay_level
            or message.deliver_at_ms is not None
        ):
            return None
        size = len(message.body)
        if size > self.settings.max_message_size_bytes:
            return None
        now_s = self._clock()
        place = self._lone_place(message, where) if where else message.topic
        turn = self._lone_turns.get(place)
        if turn is None or (now_s > turn.until_s and (turn := self._next_lone_turn(turn, now_s)) is None):
            return None
        if kind is Message and not turn.checked:
            return None
        sender, buffer = turn.sender, self.buffer
        cost = cost_bytes(message) if message.properties or message.light_queues else size + OVERHEAD_BYTES
        lone = LoneSend(message, turn.sends, now_s, timeout_s, cost, buffer.generation, movable=not where)
        try:
            with self._lock:
                if not turn.left or self._closed or (target := sender.begin_lone_locked(lone)) is None:
                    return None
                lone.generation = buffer.generation
                lone.allocated = buffer.allocate_locked(cost)
                if not lone.allocated:
                    sender.state.release_alone(lone)
                    return None
                turn.left -= 1
            return sender.send_lone(lone, target)
        except BaseException as error:
            aside(sender.interrupted, lone, error)
            raise

    def _lone_place(self, message: Message, where: DestinationOptions) -> str | MessageQueue:
        """The key of `_lone_turns` of a message with a destination; one that is not there if that is no queue."""
        return _own_queue(message, where) or ""

    def _note_lone_turn_locked(self, batch: SendBatch, sender: Sender) -> None:
        """The next lone messages of the topic go to the same queue, as far as its turn goes; and so do those that name
        it, until the route is asked for it again."""
        if self._hooks or batch.sends.queue != batch.queue:
            return
        checked = batch.messages[0].__class__ is Message  # the topics of others are raymq's own to send to
        valid_s = TURN_MAX_S if batch.movable else _KEY_QUEUES_VALID_S
        turn = _LoneTurn(sender, batch.sends, self._clock() + valid_s, TURN_MAX_MESSAGES - 1, checked)
        self._lone_turns[batch.topic if batch.movable else batch.queue] = turn

    def _next_lone_turn(self, before: _LoneTurn, now_s: float) -> _LoneTurn | None:
        """The turn behind one whose time is over: that of the next queue of its topic. None if that is for the general
        way to find out, as it is for a queue that is named."""
        topic = before.sends.queue.topic
        if self._lone_turns.get(topic) is not before:
            return None
        try:
            route = self._usable_route(topic, keyed=False)
            queue = self._turns.next(route, 1, now_s)
        except RaymqError:
            return None  # the general way waits, or raises
        if not route.attributes.takes_normal:
            return None  # the general way checks the message
        sender = self._senders.get(queue.broker_name)
        with self._lock:
            if sender is None or self._closed:
                return None
            sends = sender.state.sends(queue)
            turn = _LoneTurn(sender, sends, now_s + TURN_MAX_S, TURN_MAX_MESSAGES, before.checked)
            self._lone_turns[topic] = turn
        return turn

    # Other brokers

    def _move(self, batch: SendBatch, broker_name: str) -> bool:
        """Give a batch to another broker than the one that fails. False if it stays: then nothing has changed."""
        try:
            queue = self._turns.next_at_another_broker(self._routes.get(batch.topic), broker_name, self._clock())
            if queue is None:
                return False
            sender = self._sender(queue.broker_name)
        except RaymqError:
            return False  # the topic's route is not known now, or this producer is being closed: it stays
        was, stored = batch.sends.queue, queue
        if was.topic != batch.topic:
            stored = MessageQueue(was.topic, queue.broker_name, was.queue_id)  # it waits to be delivered there
        with self._lock:
            if self._closed or sender.closed:
                return False
            batch.queue, batch.sends = queue, sender.state.sends(stored)
            sender.put_locked(batch)
        return True

    def _sender(self, broker_name: str) -> Sender:
        sender = self._senders.get(broker_name)
        if sender is None:
            with self._lock:
                if self._closed:
                    raise closed_error()
                sender = self._senders.get(broker_name)
                if sender is None:
                    sender = self._senders[broker_name] = Sender(broker_name, self._context)
        return sender

    def _wait(self, completion: Completion, index: int, timeout_s: float) -> SendResult:
        """The result of a message. SendUnknownError if it has no end long after its deadline."""
        if completion.acknowledged is not None:
            return completion.acknowledged.results()[index]
        try:
            return completion.result(index, timeout_s + self.settings.attempt_timeout_s + _MARGIN_S)
        except FutureTimeoutError:
            if completion.done(index):
                raise
            raise SendUnknownError("its queue", 1, timeout_s, "the sender thread gave no answer") from None


def _own_queue(message: Message, where: DestinationOptions) -> MessageQueue | None:
    """The queue that a destination names, if it is one of the message's topic; Destination checks all others."""
    queue = where.get("queue")
    if len(where) != 1 or queue.__class__ is not MessageQueue or queue.queue_id.__class__ is not int:
        return None
    return queue if queue.topic == message.topic else None


def _waits(messages: list[Message] | MessageColumns) -> bool:
    """The `wait_store_msg_ok` that all these messages have."""
    return isinstance(messages, MessageColumns) or messages[0].wait_store_msg_ok


def _cut(messages: Sequence[Message], indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """The indices in parts whose messages fit in one request."""
    first = count = cost = 0
    for at, index in enumerate(indices):
        more = cost_bytes(messages[index])
        if count and (cost + more > limits.REQUEST_MAX_BYTES or count == limits.BATCH_MAX_MESSAGES):
            yield indices[first:at]
            first, count, cost = at, 0, 0
        count += 1
        cost += more
    yield indices[first:]


def _refuse_in_callback(call: str) -> None:
    """ClientStateError in a sender thread, which would wait for itself."""
    if in_sender():
        raise ClientStateError(f"a callback of a send's future must not call {call}, which waits; use send_async there")
