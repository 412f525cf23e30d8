"""Producer: the calls with which a program sends messages, requests and replies.

`send` and `send_batch` wait for the acknowledgement, `send_async` returns a future, and `send_oneway` returns nothing.
SendPipeline (raymq.client.producer.pipeline) implements the path of a message.

Guarantees:

    Each message is stored once    A batch carries this producer's id, an epoch, and a sequence that grows per queue. If
                                   an attempt may have stored the batch, the very same bytes go to the same queue again,
                                   and the store drops what it already has (docs/design.md).
    Order                          Messages with a sharding key, a queue or a selector, and messages of one batch, stay
                                   in their queue in the order of the calls, also over retries. Other messages may go to
                                   another broker, if no attempt can have stored any of them.
    Delay                          A delayed message is stored at once, in a queue where it waits (raymq.common.delay).
                                   SendResult names that queue, and the offset there. When the message is delivered, it
                                   follows messages that were sent to its real queue earlier.
    Memory                         `max_buffered_bytes` and `max_buffered_messages` bound it. If the buffer is full, a
                                   send waits up to its timeout, or raises SystemBusyError at once (`when_full`).
    Death of the process           A message that was not acknowledged may or may not be stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final, NoReturn, Unpack

from raymq.client.producer.checks.batches import check_batch
from raymq.client.producer.completion import Completion
from raymq.client.producer.hooks import SendHooks
from raymq.client.producer.observers import SendFigures, SendObserver
from raymq.client.producer.pipeline import SendPipeline
from raymq.client.producer.queue_selector import DestinationOptions, destination_of
from raymq.client.producer.results import SendResults
from raymq.client.producer.senders.encoder import ProducerIdentity
from raymq.client.producer.senders.sender_context import Pauses, in_sender
from raymq.client.producer.settings import ProducerSettings
from raymq.common.closing import Closing, direct
from raymq.common.errors import ClientStateError, RequestTimeoutError, SendUnknownError
from raymq.common.message import Message, MessageExt, SendResult
from raymq.common.names import check_group
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.parallel import aside, start_daemon
from raymq.common.protocol.request_reply import (
    DirectRequester,
    PendingRequest,
    Reply,
    Requests,
    RequestStatistics,
    reply_message,
)
from raymq.common.protocol.route import TopicRoute
from raymq.common.retry import Backoff
from raymq.remoting.direct_requests import check_direct
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.remoting.recall import check_recall, send_recall
from raymq.remoting.storage_client import StorageClient

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.client.producer.table import TableResult

_MARGIN_S: Final = 5.0
"""Extra time in seconds that a blocking `send` waits for the sender thread, after the send timeout and the timeout of
the last attempt."""

REQUEST_TIMEOUT_S: Final = 3.0
"""Default timeout in seconds for a request and its reply together; RocketMQ has the same default."""


class Producer(Closing):
    """Sends messages. Thread-safe; made by `Client.producer`, closed by `close` or `with`.

    Each send accepts the destination of its messages as keyword arguments
    (raymq.client.producer.queue_selector.DestinationOptions): `sharding_key="user-9"`, or `queue=MessageQueue(...)`, or
    `selector=function, argument=...`. Without a destination, the producer sends to the topic's queues in turn.

    A producer cannot be pickled: make one in each process that sends.
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
        observers: Sequence[SendObserver] = (),
        names: Namespace = NO_NAMESPACE,
        on_close: Callable[[Producer], None] = lambda producer: None,
        clock: Callable[[], float] = time.monotonic,
        pauses: Callable[[], Pauses] = Backoff,
    ) -> None:
        """Create the producer. `observers`: further observers of sends, beside the metrics and the hooks of `settings`.
        `clock`: returns monotonic time in seconds."""
        self.group = check_group(group)
        self.names = names
        self.settings = settings = settings or ProducerSettings()
        self._routes: RouteSource = NamespacedRoutes(routes, names) if names else routes
        self._storage, self._born_host = storage, born_host
        self._requests, self._on_close = requests, on_close
        hooks = SendHooks(group, settings.hooks, settings.check_forbidden)
        self.observers = SendFigures(), *observers, *((hooks,) if settings.hooks or settings.check_forbidden else ())
        self.pipeline = SendPipeline(
            routes=self._routes,
            storage=storage,
            born_host=born_host,
            settings=settings,
            identity=identity,
            names=names,
            observers=self.observers,
            clock=clock,
            pauses=pauses,
        )
        self._single_sends, self._open_batches = self.pipeline.single_sends, self.pipeline.open_batches
        self._is_ended = threading.Event()

    @direct
    def send(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        message_id: str | None = None,
        **where: Unpack[DestinationOptions],
    ) -> SendResult:
        """Send one message and wait until it is stored as durably as the cluster's settings require.

        A message with a sharding key, a selector or a queue goes only to the queue that this destination chooses. While
        the queue's broker is unreachable, the message waits. `timeout_s`: by default the producer's send timeout.
        `message_id`: the message's unique id, up to 64 printable ASCII characters; by default the producer makes one.
        The program must not use an id twice: raymq stores both messages.

        Raises TopicNotExistError if the topic does not exist; NoPermissionError if the topic is not writable;
        ClientStateError if the producer is closed; SystemBusyError if the buffer had no space for the whole timeout;
        ServiceNotAvailableError if no broker for the message became reachable in time; SendUnknownError if no
        acknowledgement arrived in time. After SendUnknownError the message may be stored; after each other error it is
        not stored.
        """
        _refuse_in_callback("send")
        timeout_s = self.settings.send_timeout_s if timeout_s is None else timeout_s
        ids = () if message_id is None else (message_id,)
        sent = None if ids else self._single_sends.send(message, where, timeout_s)
        if sent is None:
            hand_over = self.pipeline.hand_over
            placed = aside(hand_over, [message], where, timeout_s, at_once=True, message_ids=ids)
            [(batch, _, index)] = placed.batches
            return self._wait(batch.completion, index, timeout_s)
        return sent if isinstance(sent, SendResult) else self._wait(sent, 0, timeout_s)

    @direct
    def send_async(self, message: Message, **where: Unpack[DestinationOptions]) -> Future[SendResult]:
        """Enqueue one message for sending and return a future. The future has the result or the error that `send` would
        return or raise.

        Blocks only while the buffer is full, or while it is unknown if the topic exists because no NameServer answers.
        If this lasts for the send timeout, raises SystemBusyError for the full buffer, or ServiceNotAvailableError for
        the missing NameServer. Callbacks of the future run in the thread that sends: they should be short, and must not
        wait for another send. The future can be awaited, too.
        """
        future = self._open_batches.join(message, where)
        if future is None:
            placed = aside(self.pipeline.hand_over, [message], where, self.settings.send_timeout_s)
            [future] = placed.futures(1)
        return future

    @direct
    def send_batch(
        self,
        messages: Iterable[Message],
        *,
        timeout_s: float | None = None,
        message_ids: Sequence[str] = (),
        **where: Unpack[DestinationOptions],
    ) -> Sequence[SendResult]:
        """Send messages of one topic together. Returns their results, in the order of the messages.

        `message_ids`: the unique id of each message, as in `send`; by default the producer makes them.

        All messages go to one queue, in order. RocketMQ refuses delayed messages in a batch; raymq sends them to the
        queues in which delayed messages wait. If a message is not legal, raises MessageIllegalError, and nothing is
        sent. After any other error, some messages of the batch may be stored. The other errors are the errors of
        `send`.
        """
        _refuse_in_callback("send_batch")
        batch = check_batch(messages, as_objects=self.pipeline.needs_objects)
        if len(batch) == 1 and len(message_ids) <= 1:
            return [self.send(batch[0], timeout_s=timeout_s, message_id=next(iter(message_ids), None), **where)]
        timeout_s = self.settings.send_timeout_s if timeout_s is None else timeout_s
        hand_over = self.pipeline.hand_over
        placed = aside(hand_over, batch, where, timeout_s, together=True, at_once=True, message_ids=message_ids)
        if len(placed.batches) == 1:
            completion = placed.batches[0][0].completion
            if completion.acknowledged is None:
                self._wait(completion, 0, timeout_s)
            if completion.acknowledged is not None:
                return SendResults(completion.acknowledged)
        return [self._wait(*future.place, timeout_s) for future in placed.futures(len(batch))]

    @direct
    def send_oneway(self, message: Message, **where: Unpack[DestinationOptions]) -> None:
        """Enqueue one message for sending, without a result. The producer retries it like any other message."""
        if self._open_batches.join(message, where) is None:
            aside(self.pipeline.hand_over, [message], where, self.settings.send_timeout_s)

    def send_table(self, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
        """Send each row of an Arrow table as a message, and wait until all are stored.

        The column `body` (binary or string) is required. Optional columns, null for a row without a value: `tags`
        (string), `keys` (string or list of strings), `properties` (map of string to string), `sharding_key` (string or
        integer). A column may have these values as a dictionary (a category of pandas or polars), as list views or as
        byte strings of fixed size. The column `__index_level_0__` of pandas is left out.

        All rows are checked before the first is sent. Raises InvalidArgumentError if a column is invalid, and
        MessageIllegalError if a row is invalid. Rows with one sharding key go to one queue in their order; the other
        rows are spread evenly over the topic's queues. The producer's buffer limits the memory that is used in addition
        to the table.

        If sending fails later, the error's notes contain the number of acknowledged rows.
        """
        from raymq.client.producer.table import send_table

        _refuse_in_callback("send_table")
        return send_table(self.pipeline, topic, table)

    # Methods for requests and replies (raymq.client.request)

    def request(
        self,
        message: Message,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        durable: bool = True,
        **where: Unpack[DestinationOptions],
    ) -> MessageExt:
        """Send a message as a request, and wait for the reply of its consumer.

        With ``durable=False`` neither request nor reply is stored. A broker passes the request to one listener of a
        push consumer with `request_threads`, and passes its reply back. So the request is executed at most once, and is
        lost if the listener, the broker or a connection is lost. Such a request takes no destination and no delay.
        Raises NoListenerError if no listener waits for such requests, ListenerError if the listener fails or returns no
        reply, and ServiceNotAvailableError if the request, which may have been executed, was lost.

        Raises RequestTimeoutError if no reply arrives within `timeout_s`, which includes the send. The consumer may
        still have processed the request; a late reply is dropped. Raises SystemBusyError if REQUESTS_MAX requests of
        this client already wait. If sending fails, raises the errors of `send`, and waits for no reply.
        """
        _refuse_in_callback("request")
        if not durable:
            return self._direct_requests().request(*self._begin_direct(message, timeout_s, where), message, timeout_s)
        pending = self.begin_request(message, timeout_s)
        try:
            self.send(pending.message, timeout_s=timeout_s, **where)
        except BaseException:
            pending.abandon()
            raise
        return pending.result()

    def request_async(
        self,
        message: Message,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        durable: bool = True,
        **where: Unpack[DestinationOptions],
    ) -> Future[MessageExt]:
        """Send a request as `send_async` does, and return a future of the reply. The future has the reply that
        `request` would return, or the error that it would raise. It cannot be cancelled. Its callbacks run in a thread
        that receives replies: they should be short."""
        if not durable:
            begun = self._begin_direct(message, timeout_s, where)
            return self._direct_requests().request_later(*begun, message, timeout_s)
        pending = self.begin_request(message, timeout_s)
        try:
            self.send_async(pending.message, **where).add_done_callback(pending.sent)
        except BaseException:
            pending.abandon()
            raise
        return pending.future

    def begin_request(self, message: Message, timeout_s: float) -> PendingRequest:
        """Register a request, so that its reply can be passed to the caller. The caller must send the request's message
        after this call. The first request to a broker group also makes remote calls."""
        topic = self.pipeline.check([message])
        return self._requests_of_client().begin(self.pipeline.route(topic, timeout_s, keyed=False), message, timeout_s)

    def _begin_direct(self, message: Message, timeout_s: float, where: DestinationOptions) -> tuple[TopicRoute, str]:
        """Check a request with ``durable=False``. Returns the route and the stored name of its topic. Raises
        InvalidArgumentError if only a stored message can be as requested, and the errors of `SendPipeline.check` and
        `SendPipeline.route`."""
        destination_of(where)
        topic = self.pipeline.check([message])
        check_direct(message, where)
        return self.pipeline.route(topic, timeout_s, keyed=False), self.names.wrap(topic)

    def _direct_requests(self) -> DirectRequester:
        """Return the requests of the client that are not stored. Raises ClientStateError if this kind of producer
        cannot send requests."""
        return self._requests_of_client().direct

    def _requests_of_client(self) -> Requests:
        if self._requests is None:
            raise ClientStateError(
                "this kind of producer cannot send requests; create a producer with client.producer(...)"
            )
        return self._requests()

    def reply(
        self,
        request: MessageExt,
        body: bytes,
        *,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Reply to a request that a pull consumer has received. A listener replies with ``return raymq.reply(body)``.

        Raises MessageIllegalError if a message cannot have this body, these keys or these properties. Raises
        CreateReplyMessageError if the message is not a request. Raises RequesterGoneError if the reply is stored
        but the broker reports that its requester has disconnected. Otherwise raises the errors of `send`. A late reply
        is also stored; its requester drops and counts it.
        """
        if self._requests is None:
            raise ClientStateError(
                "this kind of producer cannot send replies; create a producer with client.producer(...)"
            )
        message, queue = reply_message(request, Reply(body, keys, properties or {}))
        result = self.send(message, timeout_s=timeout_s, queue=queue)
        self._requests().check_present(request)
        return result

    @direct
    def request_statistics(self) -> RequestStatistics:
        """Return the statistics of request-reply calls: the number of requests with each outcome, for all producers of
        this producer's client."""
        if self._requests is None:
            return RequestStatistics(0, 0, 0, 0, 0)
        return self._requests().statistics()

    def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        """Recall a delayed message that waits for its `deliver_at_ms`, by the `recall_handle` of its SendResult.
        Returns the message's id. After this call has returned, the message is never delivered.

        Raises RecallError if the handle is invalid or belongs to another topic, or if the message was already due.
        Raises TopicNotExistError if the topic does not exist. Raises ServiceNotAvailableError or RequestTimeoutError if
        no store answers for `timeout_s` (default: the send timeout). After these two errors the message may be
        recalled; the call may be repeated.
        """
        _refuse_in_callback("recall")
        self.pipeline.require_open()
        found = check_recall(topic, handle, time.time_ns() // 1_000_000)
        recalled = False
        try:
            send_recall(
                found._replace(topic=self.names.wrap(topic)),
                routes=self._routes,
                storage=self._storage,
                born_host=self._born_host,
                timeout_s=self.settings.send_timeout_s if timeout_s is None else timeout_s,
            )
            recalled = True
        finally:
            for observer in self.observers:
                observer.recalled(self.names.wrap(topic), found.message_id, success=recalled)
        return found.message_id

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until each message that was enqueued before this call is acknowledged or has failed. The messages'
        futures hold the outcomes.

        The call does not wait for messages that other threads enqueue during it. Raises RequestTimeoutError after
        `timeout_s`. The default is twice the send timeout. Only a send with a longer timeout of its own can take longer
        than the default.
        """
        _refuse_in_callback("flush")
        timeout_s = self.flush_timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + timeout_s
        try:
            self.pipeline.flushed(timeout_s).result(max(until_s - time.monotonic(), 0.0))
        except FutureTimeoutError:
            raise RequestTimeoutError("the flush of the producer", timeout_s) from None

    @property
    def flush_timeout_s(self) -> float:
        """Default maximum time, in seconds, that the producer's `flush` and `close` wait: twice the send
        timeout."""
        return 2 * self.settings.send_timeout_s

    def close(self) -> None:
        """Flush the messages, then stop the sender threads. Idempotent: a second call waits until the first call has
        closed the producer.

        Messages that were enqueued before are acknowledged, or their futures fail. Later sends, also in other threads,
        raise ClientStateError. A callback of a send's future must not wait. If `close` is called in such a callback, it
        returns at once, and another thread closes the producer.
        """
        if in_sender():
            # start_daemon starts no thread if the interpreter is exiting; the client's exit handler then closes the
            # producer
            start_daemon(self.close, name="producer-close")
            return
        senders = self.pipeline.stop()
        if senders is None:
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
        raise TypeError(
            "a raymq producer cannot be pickled: call raymq.connect().producer(...) in the process that uses the "
            "producer"
        )

    def _wait(self, completion: Completion, index: int, timeout_s: float) -> SendResult:
        """Wait for the result of a message and return it. Raises SendUnknownError if the send has no outcome long after
        its deadline."""
        if completion.acknowledged is not None:
            return completion.acknowledged.results()[index]
        try:
            return completion.result(index, timeout_s + self.settings.attempt_timeout_s + _MARGIN_S)
        except FutureTimeoutError:
            if completion.done(index):
                raise
            raise SendUnknownError("its queue", 1, timeout_s, "the sender thread did not answer") from None


def _refuse_in_callback(call: str) -> None:
    """Raise ClientStateError if the caller runs in a sender thread, because `call` would make that thread wait for
    itself."""
    if in_sender():
        raise ClientStateError(
            f"a callback of a send's future must not call {call}, which would wait for ever; call send_async instead"
        )
