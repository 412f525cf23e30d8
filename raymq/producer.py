"""The producer: messages in, acknowledgements out, batching by itself.

    send_async → [pending per queue] → one sender thread per storage actor → Storage.append → futures

Each sender has one request under way. While it waits, messages gather, and go together in the next request: batches
form under load, and a lone message leaves at once. Within a queue, order is the order of `send` calls, also over
retries.

A batch is encoded once, with this producer's id, epoch and a sequence that grows per queue. A request without an answer
is sent again, the very same bytes, until its time is up; the store drops what it has already (design §5, promise 1).
A batch is never sent to another queue, since it may already be stored in its own.

A delayed message is encoded as a record of the queue where it waits (raymq.delay), and is sent there like any other:
the sequence that recognises its repeats is that queue's, and SendResult names the place there. Its own topic and queue
go along as properties. When it is delivered, it comes after what was sent to its queue meanwhile.

Memory is bounded: at most `max_buffered_bytes` of bodies and properties wait here; `send` then blocks, until its own
timeout. Nothing survives the process: what was not acknowledged may or may not be stored.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NoReturn, Protocol

import numpy as np

from raymq.backoff import Backoff
from raymq.compression import Compression, CompressionType
from raymq.delay import DELAY_LEVELS_MAX, TIMER_TOPIC, timer_queue
from raymq.errors import (
    ClientStateError,
    InvalidArgumentError,
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.hashing import java_hash
from raymq.ids import UniqueIdGenerator, offset_message_id
from raymq.message import MAX_PROPERTIES_BYTES, Message, MessageQueue, SendResult, message_list
from raymq.names import SCHEDULE_TOPIC, check_group, check_user_topic
from raymq.record import EncodedBatch, ProducerSequence, Waiting, encode_batch
from raymq.route import TopicRoute
from raymq.storage_client import StorageClient
from raymq.store_api import AppendResult

SEND_TIMEOUT_S: Final = 30.0
"""RocketMQ's default is 3 s. A killed storage process is back within a few seconds here, and waiting for it is what
makes its death invisible to producers, so the default outlasts it."""

ATTEMPT_TIMEOUT_S: Final = 10.0
MAX_BUFFERED_BYTES: Final = 64 * 1024 * 1024
BATCH_MAX_MESSAGES: Final = 4096
REQUEST_MAX_BYTES: Final = 4 * 1024 * 1024
RUN_MAX_MESSAGES: Final = 256
FAILING_S: Final = 5.0
"""How long queues of a storage actor are passed over after an attempt without an answer."""
_OVERHEAD_BYTES: Final = 256
"""What a message costs beside its body: record header, ids, Python objects. For the bound on memory."""

_log = logging.getLogger(__name__)


class RouteSource(Protocol):
    """Where a producer learns a topic's queues."""

    def get(self, topic: str) -> TopicRoute: ...

    def forget(self, topic: str) -> None: ...


@dataclass(slots=True)
class _Pending:
    message: Message
    real_queue_id: int
    future: Future[SendResult]
    deadline_s: float
    timeout_s: float
    cost_bytes: int


@dataclass(slots=True)
class _InFlight:
    """A batch on its way, encoded once. `queue` is where it is stored: for delayed messages, where they wait.

    `deadline_s` is the next one of its entries; `expired`: some are over.
    """

    queue: MessageQueue
    entries: list[_Pending]
    batch: EncodedBatch
    deadline_s: float
    expired: bool = False

    def waiting(self) -> list[_Pending]:
        """The entries whose senders still wait."""
        return [entry for entry in self.entries if not entry.future.done()] if self.expired else self.entries


class Producer:
    """Sends messages. Thread-safe; made by `Client.producer`, closed by `close` or `with`.

    Not to be pickled: make a producer in the process that uses it.
    """

    def __init__(
        self,
        group: str,
        *,
        routes: RouteSource,
        storage: Callable[[str], StorageClient],
        born_host: tuple[str, int],
        send_timeout_s: float = SEND_TIMEOUT_S,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        compression: Compression | None = None,
        on_close: Callable[[Producer], None] = lambda producer: None,
        allow_system_topics: bool = False,
    ) -> None:
        self.group = check_group(group)
        if send_timeout_s <= 0:
            raise InvalidArgumentError(f"send_timeout_s must be positive, not {send_timeout_s}")
        self._routes = routes
        self._storage = storage
        self._send_timeout_s = send_timeout_s
        self._check_topic = (lambda topic: topic) if allow_system_topics else check_user_topic
        self._on_close = on_close
        self._budget = _Budget(max_buffered_bytes)
        self._encoder = _Encoder(born_host, compression or Compression(CompressionType.ZSTD))
        self._selector = _QueueSelector()
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        self._closed = False

    def send(self, message: Message, *, sharding_key: str | None = None, timeout_s: float | None = None) -> SendResult:
        """Send one message and wait until it is stored as durably as the cluster's settings say.

        Raises TopicNotExistError, ClientStateError (closed), SystemBusyError (buffer full for the whole timeout), or
        SendUnknownError when there was no acknowledgement within `timeout_s` (default: the producer's); the message
        may be stored then. With `sharding_key`, messages of one key go to one queue, in the order sent.
        """
        _refuse_in_callback("send")
        timeout_s = self._send_timeout_s if timeout_s is None else timeout_s
        return _wait(self._enqueue([message], sharding_key, timeout_s)[0], timeout_s)

    def send_async(self, message: Message, *, sharding_key: str | None = None) -> Future[SendResult]:
        """Hand over one message and return at once; the future ends as `send` does.

        Blocks only while the buffer is full, and raises SystemBusyError when that lasts for the send timeout. Callbacks
        of the future run in the thread that sends: they should be short, and must not wait for another send.
        """
        return self._enqueue([message], sharding_key, self._send_timeout_s)[0]

    def send_batch(
        self, messages: Iterable[Message], *, sharding_key: str | None = None, timeout_s: float | None = None
    ) -> list[SendResult]:
        """Send messages of one topic, one after another into one queue; returns a result for each, in order.

        Nothing is sent when one of them is not legal (MessageIllegalError). When an error is raised later, some of the
        batch may be stored.
        """
        _refuse_in_callback("send_batch")
        batch = message_list(messages)
        if not batch:
            raise MessageIllegalError("send_batch was given no messages")
        if len({message.topic for message in batch}) > 1:
            raise MessageIllegalError("all messages of a batch must have one topic; send one batch per topic")
        for message in batch:
            if _may_exceed_a_record(message):
                _check_record(message)
        timeout_s = self._send_timeout_s if timeout_s is None else timeout_s
        futures = self._enqueue(batch, sharding_key, timeout_s)
        return [_wait(future, timeout_s) for future in futures]

    def send_oneway(self, message: Message, *, sharding_key: str | None = None) -> None:
        """Hand over one message and do not learn what becomes of it. It is retried as any other."""
        self._enqueue([message], sharding_key, self._send_timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything handed over so far was acknowledged or has failed (the futures tell which)."""
        _refuse_in_callback("flush")
        timeout_s = self._send_timeout_s * 2 if timeout_s is None else timeout_s
        if not self._budget.wait_empty(timeout_s):
            raise RequestTimeoutError("flushing the producer", timeout_s)

    def close(self) -> None:
        """Flush, then end the sender threads. Later sends raise ClientStateError. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            senders = list(self._senders.values())
        try:
            self.flush()
        finally:
            for sender in senders:
                sender.close()
            self._on_close(self)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq producer cannot be pickled: call raymq.connect().producer(...) where it is used")

    def _enqueue(self, messages: list[Message], sharding_key: str | None, timeout_s: float) -> list[Future[SendResult]]:
        if not isinstance(messages[0], Message):
            raise MessageIllegalError(f"expected a raymq.Message, got {type(messages[0]).__name__}")
        topic = self._check_topic(messages[0].topic)
        if self._closed:
            raise ClientStateError("this producer is closed; make a new one with client.producer(...)")
        route = self._routes.get(topic)
        deadline_s = time.monotonic() + timeout_s
        costs = [_cost_bytes(message) for message in messages]
        self._budget.take(sum(costs), 0.0 if _in_sender.active else timeout_s)
        try:
            queue = self._selector.select(route, sharding_key, len(messages), self._is_healthy)
            sender = self._sender(route.master_storage(queue.broker_name))
            entries = [
                _Pending(message, queue.queue_id, _running_future(), deadline_s, timeout_s, cost)
                for message, cost in zip(messages, costs, strict=True)
            ]
            sender.put(_by_stored_queue(entries, queue))
        except BaseException:
            self._budget.give(sum(costs))
            raise
        return [entry.future for entry in entries]

    def _is_healthy(self, route: TopicRoute, queue: MessageQueue) -> bool:
        sender = self._senders.get(route.master_storage(queue.broker_name))
        return sender is None or not sender.failing

    def _sender(self, storage_name: str) -> _Sender:
        sender = self._senders.get(storage_name)
        if sender is None:
            with self._lock:
                if self._closed:
                    raise ClientStateError("this producer is closed; make a new one with client.producer(...)")
                sender = self._senders.get(storage_name)
                if sender is None:
                    sender = _Sender(self._storage(storage_name), self._encoder, self._budget, self._routes)
                    self._senders[storage_name] = sender
        return sender


class _InSender(threading.local):
    """Whether this thread is a sender's, which must never wait for itself."""

    active = False


_in_sender = _InSender()


def _refuse_in_callback(call: str) -> None:
    if _in_sender.active:
        raise ClientStateError(f"a callback of a send's future must not call {call}, which waits; use send_async there")


def _cost_bytes(message: Message) -> int:
    cost = len(message.body) + _OVERHEAD_BYTES
    return cost + sum(map(len, message.properties.values())) if message.properties else cost


class _Budget:
    """Bounds the bytes that wait. `take` blocks when they are used up; `wait_empty` waits for all to be given back."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._changed = threading.Condition()

    def take(self, count: int, timeout_s: float) -> None:
        with self._changed:
            # A single message larger than the whole budget passes when nothing else waits.
            fits = self._changed.wait_for(lambda: self._used == 0 or self._used + count <= self._limit, timeout_s)
            if not fits:
                raise SystemBusyError(
                    f"the producer's buffer of {self._limit} bytes stayed full for {timeout_s:g} s: the cluster takes "
                    "messages more slowly than they are sent; see `raymq status`, or raise max_buffered_bytes"
                )
            self._used += count

    def give(self, count: int) -> None:
        with self._changed:
            self._used -= count
            self._changed.notify_all()

    def wait_empty(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._used == 0, timeout_s)


class _QueueSelector:
    """Picks a queue per message (spec/messaging.md §3.4, §3.9).

    A sharding key decides by its Java hash. Otherwise queues take turns, each for RUN_MAX_MESSAGES or until
    RUN_MAX_S have passed, because a run in one queue costs the store less than the same messages scattered. Queues of
    a storage actor that does not answer now are passed over while there are others.
    """

    RUN_MAX_S: Final = 0.002

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}
        self._run: dict[str, tuple[MessageQueue, int, float]] = {}

    def select(
        self,
        route: TopicRoute,
        sharding_key: str | None,
        count: int,
        healthy: Callable[[TopicRoute, MessageQueue], bool],
    ) -> MessageQueue:
        queues = route.publish_queues
        if not queues:
            raise ServiceNotAvailableError(f"topic {route.topic!r} has no writable queue now; see `raymq status`")
        if sharding_key is not None:
            hashed = java_hash(sharding_key)
            return queues[abs(hashed) % len(queues)]
        now_s = time.monotonic()
        with self._lock:
            queue, used, since_s = self._run.get(route.topic, (None, 0, 0.0))
            fresh = queue is not None and used < RUN_MAX_MESSAGES and now_s - since_s < self.RUN_MAX_S
            if queue is None or not fresh or queue not in queues or not healthy(route, queue):
                queue = self._turn(route, queues, healthy)
                used, since_s = 0, now_s
            self._run[route.topic] = (queue, used + count, since_s)
            return queue

    def _turn(
        self,
        route: TopicRoute,
        queues: Sequence[MessageQueue],
        healthy: Callable[[TopicRoute, MessageQueue], bool],
    ) -> MessageQueue:
        first = self._next.get(route.topic, secrets.randbelow(len(queues)))
        ring = [queues[(first + step) % len(queues)] for step in range(len(queues))]
        chosen = next((queue for queue in ring if healthy(route, queue)), ring[0])
        self._next[route.topic] = (queues.index(chosen) + 1) % len(queues)
        return chosen


class _Encoder:
    """Turns pending messages into batches, with ids and sequences. Sequences grow per queue and are never reused."""

    def __init__(self, born_host: tuple[str, int], compression: Compression) -> None:
        self._born_host = born_host
        self._compression = compression
        self._ids = UniqueIdGenerator(born_host[0])
        self._producer_id = secrets.token_hex(8)
        self._sequences: dict[MessageQueue, int] = {}

    def encode(self, queue: MessageQueue, entries: Sequence[_Pending]) -> EncodedBatch:
        """Only called by the one sender thread of the queue's storage actor."""
        first = self._sequences.get(queue, 0)
        waits = queue.topic in (SCHEDULE_TOPIC, TIMER_TOPIC)
        batch = encode_batch(
            [entry.message for entry in entries],
            queue.queue_id,
            born_host=self._born_host,
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=self._ids.next_batch(len(entries)),
            producer=ProducerSequence(self._producer_id, 0, first),
            compression=self._compression,
            waiting=Waiting(queue.topic, [entry.real_queue_id for entry in entries]) if waits else None,
        )
        self._sequences[queue] = first + len(entries)
        return batch


@dataclass(slots=True)
class _QueueBuffer:
    queue: MessageQueue
    entries: deque[_Pending] = field(default_factory=deque)


class _Sender:
    """The thread that carries this producer's messages to one storage actor."""

    def __init__(self, storage: StorageClient, encoder: _Encoder, budget: _Budget, routes: RouteSource) -> None:
        self._storage = storage
        self._encoder = encoder
        self._budget = budget
        self._routes = routes
        self._wake = threading.Condition()
        self._buffers: dict[MessageQueue, _QueueBuffer] = {}
        self._closed = False
        self._failing_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"producer-{storage.name}", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        """Whether the storage actor did not answer lately. After FAILING_S it is tried again."""
        return time.monotonic() < self._failing_until_s

    def put(self, entries_by_queue: Mapping[MessageQueue, list[_Pending]]) -> None:
        """Take messages to be sent. ClientStateError when the sender was closed meanwhile; nothing is taken then."""
        with self._wake:
            if self._closed:
                raise ClientStateError("this producer is closed; make a new one with client.producer(...)")
            for queue, entries in entries_by_queue.items():
                buffer = self._buffers.get(queue)
                if buffer is None:
                    buffer = self._buffers[queue] = _QueueBuffer(queue)
                buffer.entries.extend(entries)
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(ATTEMPT_TIMEOUT_S)

    def _run(self) -> None:
        _in_sender.active = True
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or bool(self._buffers))
                if self._closed and not self._buffers:
                    return
                taken = self._take()
            try:
                flights = [flight for queue, entries in taken if (flight := self._encode(queue, entries)) is not None]
                self._deliver(flights)
            except Exception as error:  # a bug here must fail the futures, not leave them waiting
                _log.exception("sending to %s failed", self._storage.name)
                self._fail([entry for _, entries in taken for entry in entries if not entry.future.done()], error)

    def _take(self) -> list[tuple[MessageQueue, list[_Pending]]]:
        """What goes into the next request: from every queue in turn, up to the limits. Called with the lock."""
        taken: list[tuple[MessageQueue, list[_Pending]]] = []
        room = REQUEST_MAX_BYTES
        for queue in list(self._buffers):
            waiting = self._buffers.pop(queue)
            entries: list[_Pending] = []
            # The first message of a request always fits, whatever its size.
            while waiting.entries and len(entries) < BATCH_MAX_MESSAGES:
                if room < waiting.entries[0].cost_bytes and (taken or entries):
                    break
                entry = waiting.entries.popleft()
                room -= entry.cost_bytes
                entries.append(entry)
            if waiting.entries:
                self._buffers[queue] = waiting  # at the end: the other queues come first next time
            if entries:
                taken.append((queue, entries))
        return taken

    def _encode(self, queue: MessageQueue, entries: list[_Pending]) -> _InFlight | None:
        now_s = time.monotonic()
        late = [entry for entry in entries if entry.deadline_s <= now_s]
        if late:
            self._fail(
                late,
                ServiceNotAvailableError(
                    f"not sent: {self._storage.name} did not take messages in time, nothing of this one was stored; "
                    "see `raymq status`"
                ),
            )
            entries = [entry for entry in entries if entry.deadline_s > now_s]
            if not entries:
                return None
        try:
            batch = self._encoder.encode(queue, entries)
        except RaymqError as error:
            if len(entries) == 1:
                self._fail(entries, error)
                return None
            # One message breaks a rule that shows only in its record (properties too long): find out which.
            return self._encode_one_by_one(queue, entries, error)
        return _InFlight(queue, entries, batch, min(entry.deadline_s for entry in entries))

    def _encode_one_by_one(self, queue: MessageQueue, entries: list[_Pending], failure: RaymqError) -> _InFlight | None:
        legal = []
        for entry in entries:
            try:
                _check_record(entry.message)
            except RaymqError as error:
                self._fail([entry], error)
            else:
                legal.append(entry)
        if len(legal) == len(entries):
            self._fail(entries, failure)
            return None
        return self._encode(queue, legal) if legal else None

    def _deliver(self, flights: list[_InFlight]) -> None:
        """Send until everything is acknowledged, refused, or out of time."""
        backoff = Backoff()
        while flights:
            left_s = min(flight.deadline_s for flight in flights) - time.monotonic()
            attempt_s = min(ATTEMPT_TIMEOUT_S, max(left_s, 0.1))
            try:
                store_host = self._storage.describe(attempt_s).store_host
                results = self._storage.append([flight.batch.without_ids() for flight in flights], attempt_s)
            except RaymqError as error:
                if not error.retryable:
                    self._refused(flights, error)
                    return
                flights = self._still_in_time(flights, error)
                self._failing_until_s = time.monotonic() + FAILING_S
                if flights:
                    time.sleep(backoff.next())
                continue
            self._failing_until_s = 0.0
            for flight, result in zip(flights, results, strict=True):
                self._acknowledge(flight, result, store_host)
            return

    def _refused(self, flights: list[_InFlight], error: RaymqError) -> None:
        """The store takes a request as a whole or not at all, so find out which of its batches it does not take."""
        if len(flights) == 1:
            self._fail(flights[0].waiting(), error)
            return
        for flight in flights:
            self._deliver([flight])

    def _still_in_time(self, flights: list[_InFlight], error: RaymqError) -> list[_InFlight]:
        now_s = time.monotonic()
        for flight in [flight for flight in flights if flight.deadline_s <= now_s]:
            self._routes.forget(flight.queue.topic)
            late = [entry for entry in flight.waiting() if entry.deadline_s <= now_s]
            waited_s = max(entry.timeout_s for entry in late)
            self._fail(late, SendUnknownError(str(flight.queue), len(late), waited_s, str(error)))
            flight.expired = True
            flight.deadline_s = min((entry.deadline_s for entry in flight.waiting()), default=now_s)
        return [flight for flight in flights if flight.deadline_s > now_s]

    def _acknowledge(self, flight: _InFlight, result: AppendResult, store_host: tuple[str, int]) -> None:
        count = len(flight.entries)
        waiting = flight.waiting()
        queue_offsets = result.queue_offsets or range(result.queue_offset, result.queue_offset + count)
        positions: Sequence[int] = result.physical_offsets or ()
        if not positions:
            ends = np.cumsum(flight.batch.sizes, dtype=np.int64)
            positions = (result.physical_offset + ends - flight.batch.sizes).tolist()
        for entry, message_id, queue_offset, position in zip(
            flight.entries, flight.batch.message_ids, queue_offsets, positions, strict=True
        ):
            if flight.expired and entry.future.done():
                continue
            place = offset_message_id(*store_host, position)
            entry.future.set_result(SendResult(result.status, message_id, place, flight.queue, queue_offset))
        self._budget.give(sum(entry.cost_bytes for entry in waiting))

    def _fail(self, entries: list[_Pending], error: Exception) -> None:
        for entry in entries:
            entry.future.set_exception(error)
        self._budget.give(sum(entry.cost_bytes for entry in entries))


def _by_stored_queue(entries: list[_Pending], queue: MessageQueue) -> dict[MessageQueue, list[_Pending]]:
    """The entries for `queue` by where they are stored: delayed ones wait elsewhere."""
    if not any(_is_delayed(entry.message) for entry in entries):
        return {queue: entries}
    by_queue: dict[MessageQueue, list[_Pending]] = {}
    for entry in entries:
        by_queue.setdefault(_stored_queue(entry.message, queue), []).append(entry)
    return by_queue


def _is_delayed(message: Message) -> bool:
    return message.delay_level > 0 or message.deliver_at_ms is not None


def _stored_queue(message: Message, queue: MessageQueue) -> MessageQueue:
    """Where a message that is sent now to `queue` is stored: there, or where it waits."""
    if message.delay_level:
        return MessageQueue(SCHEDULE_TOPIC, queue.broker_name, min(message.delay_level, DELAY_LEVELS_MAX) - 1)
    now_ms = time.time_ns() // 1_000_000
    if message.deliver_at_ms is None or message.deliver_at_ms <= now_ms:
        return queue
    return MessageQueue(TIMER_TOPIC, queue.broker_name, timer_queue(message.deliver_at_ms, now_ms))


def _running_future() -> Future[SendResult]:
    """A future that cannot be cancelled: its message is on its way as soon as it was handed over."""
    future: Future[SendResult] = Future()
    future.set_running_or_notify_cancel()
    return future


def _may_exceed_a_record(message: Message) -> bool:
    """Whether the properties might be too long for a record, by a bound that is quick to compute."""
    characters = len(message.tags or "") + sum(len(key) + 1 for key in message.keys)
    characters += sum(len(name) + len(value) + 2 for name, value in message.properties.items())
    return 4 * characters > MAX_PROPERTIES_BYTES - 1024


def _check_record(message: Message) -> None:
    """MessageIllegalError when the message does not fit a record, with the longest sequence it may be sent with."""
    encode_batch(
        [message],
        0,
        born_host=("127.0.0.1", 0),
        born_timestamp_ms=0,
        message_ids=["0" * 32],
        producer=ProducerSequence("0" * 16, 0, 2**62),
        waiting=Waiting(SCHEDULE_TOPIC, [2**31 - 1]) if _is_delayed(message) else None,
    )


def _wait(future: Future[SendResult], timeout_s: float) -> SendResult:
    """The future's result. The sender ends every future by its deadline; the margin is for one attempt under way."""
    try:
        return future.result(timeout_s + ATTEMPT_TIMEOUT_S)
    except FutureTimeoutError:
        raise SendUnknownError("its queue", 1, timeout_s, "the sender thread gave no answer") from None
