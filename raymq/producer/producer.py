"""The producer: takes messages, gathers them into batches, and returns the acknowledgements.

    send_async → BufferPool.allocate → queue → [buffer per queue] → one sender thread per broker group → Storage.append

Each sender has one request under way (raymq.producer.sender). While it waits, messages gather, and go together in the
next request: batches form under load, and a lone message leaves at once. Messages that asked for an order (a sharding
key, a queue, a selector, a batch) stay in their queue in the order of the `send` calls, also over retries.

A batch carries this producer's id, epoch and a sequence that grows per queue. When an attempt may have stored it, it is
sent again to the same queue, the very same bytes; the store drops what it has already (design §5, promise 1). Only
messages of which surely nothing is stored, and that asked for no order, go to another broker
(raymq.producer.retry_policy).

A delayed message is encoded as a record of the queue in which it waits (raymq.delay), and is sent there like any other:
the sequence that recognises its repeats is that queue's, and SendResult names that queue and its offset there. Its own
topic and queue go along as properties. When it is delivered, it comes after what was sent to its queue meanwhile.

Memory is bounded by `max_buffered_bytes` and `max_buffered_messages`; when that is used up, `send` blocks up to its
timeout, or raises SystemBusyError at once (`when_full`). Nothing survives the process: what was not acknowledged may or
may not be stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from itertools import groupby
from typing import TYPE_CHECKING, Final, NoReturn, Unpack

from raymq.closing import Closing
from raymq.errors import (
    ClientStateError,
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    SendUnknownError,
)
from raymq.message import Message, MessageQueue, SendResult
from raymq.names import check_group, check_user_topic
from raymq.producer.buffer_pool import BufferPool
from raymq.producer.encoder import (
    BatchEncoder,
    PendingMessage,
    SendRequest,
    by_stored_queue,
    check_batch,
    running_future,
)
from raymq.producer.hooks import SendHooks
from raymq.producer.latency_fault import BrokerFaults
from raymq.producer.queue_selector import ANYWHERE, TURN_MAX_MESSAGES, Destination, DestinationOptions, QueueTurns
from raymq.producer.sender import Sender, SenderContext, in_sender
from raymq.producer.settings import ProducerSettings
from raymq.protocol.route import TopicRoute
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient
from raymq.retry import persist_until

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.producer.table import TableResult

_MARGIN_S: Final = 5.0
"""Time that a waiting `send` allows the sender thread beyond its timeout and the attempt under way."""


class Producer(Closing):
    """Sends messages. Thread-safe; made by `Client.producer`, closed by `close` or `with`.

    Every send takes, beside its messages, their destination (raymq.producer.queue_selector.DestinationOptions):
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
        on_close: Callable[[Producer], None] = lambda producer: None,
        allow_system_topics: bool = False,
    ) -> None:
        self.group = check_group(group)
        self.settings = settings = settings or ProducerSettings()
        self._routes = routes
        self._check_topic = (lambda topic: topic) if allow_system_topics else check_user_topic
        self._on_close = on_close
        self.buffer = BufferPool(settings.max_buffered_bytes, settings.max_buffered_messages)
        self._hooks = SendHooks(group, settings.hooks, settings.check_forbidden)
        faults = BrokerFaults(latency_enabled=settings.send_latency_enable)
        self._turns = QueueTurns(faults)
        self._context = SenderContext(
            routes=routes,
            storage=storage,
            encoder=BatchEncoder(born_host, settings.compression),
            buffer=self.buffer,
            faults=faults,
            reroute=self._reroute,
            attempt_timeout_s=settings.attempt_timeout_s,
            retry_when_not_store_ok=settings.retry_when_not_store_ok,
        )
        self._lock = threading.Lock()
        self._senders: dict[str, Sender] = {}
        self._closed = False

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
        timeout_s = self._timeout_s(timeout_s)
        [future] = self._enqueue([message], where, timeout_s)
        return self._wait(future, timeout_s)

    def send_async(self, message: Message, **where: Unpack[DestinationOptions]) -> Future[SendResult]:
        """Hand over one message and return at once; the future ends as `send` does.

        Blocks only while the buffer is full, and raises SystemBusyError when that lasts for the send timeout; and, as
        long, while no NameServer knows if the topic exists, with ServiceNotAvailableError. Callbacks of the future
        part in the thread that sends: they should be short, and must not wait for another send.
        """
        [future] = self._enqueue([message], where, self.settings.send_timeout_s)
        return future

    def send_batch(
        self, messages: Iterable[Message], *, timeout_s: float | None = None, **where: Unpack[DestinationOptions]
    ) -> list[SendResult]:
        """Send messages of one topic, one after another into one queue; returns a result for each, in order.

        RocketMQ refuses delayed messages in a batch; here they go to the queues in which they wait, the others into one
        queue. Nothing is sent when one of them is not legal (MessageIllegalError). When an error is raised later, some
        of the batch may be stored.
        """
        _refuse_in_callback("send_batch")
        batch = check_batch(messages)
        timeout_s = self._timeout_s(timeout_s)
        futures = self._enqueue(batch, where, timeout_s)
        return [self._wait(future, timeout_s) for future in futures]

    def send_oneway(self, message: Message, **where: Unpack[DestinationOptions]) -> None:
        """Hand over one message without learning its result. It is retried as any other."""
        self._enqueue([message], where, self.settings.send_timeout_s)

    def send_table(self, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
        """Send each row of an Arrow table as a message, and wait until all are stored.

        Columns: `body` (binary or string); optional, and null where a row has none: `tags` (string), `keys` (string or
        list of strings), `properties` (map of string to string), `sharding_key` (string or integer). All rows are
        checked before the first is sent: InvalidArgumentError for the columns, MessageIllegalError for a row. Rows with
        one sharding key go to one queue in their order, the others to queues in turn. Memory beside the table is
        bounded by the producer's buffer.

        When sending fails later, the error's notes say how many rows were acknowledged.
        """
        from raymq.producer.table import send_table

        _refuse_in_callback("send_table")
        return send_table(self, topic, table)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything handed over so far was acknowledged or has failed (the futures tell which).

        What other threads hand over meanwhile is not waited for. RequestTimeoutError after `timeout_s`, by default
        twice the send timeout, which only sends with a longer timeout of their own exceed.
        """
        _refuse_in_callback("flush")
        timeout_s = self.flush_timeout_s if timeout_s is None else timeout_s
        try:
            self.buffer.flushed().result(timeout_s)
        except FutureTimeoutError:
            raise RequestTimeoutError("flushing the producer", timeout_s) from None

    @property
    def flush_timeout_s(self) -> float:
        """The time that `flush` and `close` wait by default: twice the send timeout."""
        return 2 * self.settings.send_timeout_s

    def close(self) -> None:
        """Flush, then end the sender threads. Idempotent. Sends that come later, in other threads too, raise
        ClientStateError; whatever was handed over before is acknowledged, or its future fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            senders = list(self._senders.values())
        give_up = True
        try:
            self.flush()
            give_up = False
        finally:
            for sender in senders:
                sender.close(give_up=give_up)
            self._on_close(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq producer cannot be pickled: call raymq.connect().producer(...) where it is used")

    # The steps of a send, which AsyncProducer and send_table take too

    def check(self, messages: Sequence[Message]) -> str:
        """The messages' topic; MessageIllegalError, IllegalNameError or ClientStateError."""
        for message in messages:
            if not isinstance(message, Message):
                raise MessageIllegalError(f"expected a raymq.Message, got {type(message).__name__}")
            if len(message.body) > self.settings.max_message_size_bytes:
                raise MessageIllegalError(
                    f"a body of {len(message.body)} bytes exceeds this producer's max_message_size_bytes of "
                    f"{self.settings.max_message_size_bytes}"
                )
        if self._closed:
            raise _closed_error()
        return self._check_topic(messages[0].topic)

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

    def allocate_timeout_s(self, timeout_s: float) -> float:
        """The time that a send with `timeout_s` may wait for space in the buffer."""
        return 0.0 if self.settings.when_full == "raise" or in_sender() else timeout_s

    def hand_over(self, route: TopicRoute, request: SendRequest, generation: int, deadline_s: float) -> None:
        """Give messages, whose buffer space is allocated, to the sender of their queue. When this fails, the space is
        deallocated and their outcomes end with the error, which is raised."""
        messages, outcomes = request.messages, request.outcomes
        try:
            queue = self._select(route, messages, request.destination)
            if self._hooks:
                for message in messages:
                    self._hooks.check(message, queue)
                outcomes = [
                    self._hooks.watch(message, queue, outcome)
                    for message, outcome in zip(messages, outcomes, strict=True)
                ]
            movable = not request.destination.fixed and not request.together
            entries = [
                PendingMessage(message, queue, outcome, deadline_s, request.timeout_s, cost, generation, movable)
                for message, outcome, cost in zip(messages, outcomes, request.costs, strict=True)
            ]
            self._sender(queue.broker_name).put(by_stored_queue(entries, queue))
        except BaseException as error:
            self.buffer.deallocate_unused(request.cost_bytes, len(messages), generation)
            for outcome in outcomes:
                outcome.set_exception(error)
            raise

    def _enqueue(
        self, messages: list[Message], where: DestinationOptions, timeout_s: float
    ) -> list[Future[SendResult]]:
        topic = self.check(messages)
        destination = Destination(**where) if where else ANYWHERE
        deadline_s = time.monotonic() + timeout_s
        route = self.route(topic, timeout_s, keyed=destination.fixed)
        futures = [running_future() for _ in messages]
        request = SendRequest.of(messages, futures, destination, timeout_s, together=len(messages) > 1)
        generation = self.buffer.allocate(request.cost_bytes, len(messages), self.allocate_timeout_s(timeout_s))
        self.hand_over(route, request, generation, deadline_s)
        return futures

    def _select(self, route: TopicRoute, messages: Sequence[Message], destination: Destination) -> MessageQueue:
        if destination.fixed:
            return destination.select(route, messages[0])
        return self._turns.next(route, len(messages), time.monotonic())

    def _reroute(self, entries: list[PendingMessage], broker_name: str) -> list[PendingMessage]:
        """Give the movable entries to other brokers than the one that fails; returns the entries that stay."""
        staying: list[PendingMessage] = []
        for (movable, topic), group in groupby(entries, lambda entry: (entry.movable, entry.message.topic)):
            for part in _parts(list(group)):
                if not movable or not self._move_to_another_broker(part, topic, broker_name):
                    staying += part
        return staying

    def _move_to_another_broker(self, part: list[PendingMessage], topic: str, broker_name: str) -> bool:
        """Give entries of one topic to another broker's sender. False if they stay: then nothing has changed."""
        try:
            queue = self._turns.next_at_another_broker(self._routes.get(topic), broker_name, time.monotonic())
            if queue is None:
                return False
            sender = self._sender(queue.broker_name)
            before = [entry.queue for entry in part]
            for entry in part:
                entry.queue = queue
            try:
                sender.put(by_stored_queue(part, queue))
            except ClientStateError:
                for entry, old in zip(part, before, strict=True):
                    entry.queue = old
                return False
        except RaymqError:
            return False  # the topic's route is not known now, or this producer is being closed: they stay
        return True

    def _sender(self, broker_name: str) -> Sender:
        sender = self._senders.get(broker_name)
        if sender is None:
            with self._lock:
                if self._closed:
                    raise _closed_error()
                sender = self._senders.get(broker_name)
                if sender is None:
                    sender = self._senders[broker_name] = Sender(broker_name, self._context)
        return sender

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self.settings.send_timeout_s if timeout_s is None else timeout_s

    def _wait(self, future: Future[SendResult], timeout_s: float) -> SendResult:
        """The future's result. The sender ends the future by its deadline, or when the attempt under way then is over.
        SendUnknownError if it has not, _MARGIN_S later."""
        try:
            return future.result(timeout_s + self.settings.attempt_timeout_s + _MARGIN_S)
        except FutureTimeoutError:
            raise SendUnknownError("its queue", 1, timeout_s, "the sender thread gave no answer") from None


def _parts(entries: list[PendingMessage]) -> Iterator[list[PendingMessage]]:
    """The entries in parts that are as long as a queue's turn, so that each part may go to another queue."""
    for first in range(0, len(entries), TURN_MAX_MESSAGES):
        yield entries[first : first + TURN_MAX_MESSAGES]


def _closed_error() -> ClientStateError:
    return ClientStateError("this producer is closed; make a new one with client.producer(...)")


def _refuse_in_callback(call: str) -> None:
    """ClientStateError in a sender thread, which would wait for itself."""
    if in_sender():
        raise ClientStateError(f"a callback of a send's future must not call {call}, which waits; use send_async there")
