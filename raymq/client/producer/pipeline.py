"""SendPipeline: the path of each message from a call of a producer to the sender of its queue.

    check ──► begin ──► route ──► allocate ──► put ──► wait
                                                │
                                                └── types ──► select ──► observers ──► cut ──► join, at once, or queue

    check     The message is a Message of a user's topic, its body is short enough, and the producer is open.
              It needs no route. A limit from the producer's settings belongs here: `SendPipeline.check`.
    begin     The messages of one call become one SendRequest with a deadline and a cost in bytes.
              Observers may change the messages: a span adds its context (raymq.client.producer.observers).
    route     The topic's queues and brokers, from a cache. This step waits while no NameServer answers, and creates the
              topic if the cluster does that.
    allocate  Space in the producer's buffer (raymq.client.producer.buffer_pool). This step waits while it is full.
    put       The last steps, which wait for nothing. An error frees the space again, and nothing is sent:
      types     The topic accepts the message's type: raymq.client.producer.checks. A check that depends on the topic
                belongs there: `check_types`.
      select    The queue: the caller's, the queue of the message's priority, or the queue whose turn it is
                (raymq.client.producer.queue_selector).
      observers The user's hooks get the message and its queue. A CheckForbiddenHook may refuse it.
      cut       The messages become parts that fit in one request (raymq.client.producer.send_parts). Delayed messages
                become parts of their own, for the queues in which they wait.
      join      A single message joins the batch that waits in its queue, if it may.
      at once   The caller sends the batch in its own thread, if nothing is in flight to the broker.
      queue     Otherwise the batch waits for the sender's thread (raymq.client.producer.senders.sender), which encodes
                it, sends it, and retries it.
    wait      The caller waits for the Completion of its batch (raymq.client.producer.completion), or gets a future.

Two shortcuts skip most steps, for messages without special options. A producer uses neither shortcut if one of its
observers observes each send.

    open batch   A message of `send_async` joins the batch that gathers for its topic or queue. The batch's first
                 message took all steps. raymq.client.producer.open_batches
    single send  For a few milliseconds, a message of `send` goes to the queue of the message before, in its caller's
                 thread. raymq.client.producer.single_sends

Where a new check belongs:

    a fixed limit of a message     the constructor of Message: `Message._check…` in raymq.common.message, tested by
                                   tests/unit/raymq/common/test_message.py
    a limit from the settings      `SendPipeline.check`
    a rule about the topic         `check_types` in raymq.client.producer.checks.topic_types

Some messages pass `check` unseen. The rows of a table become no Message, and `check` compares only the body sizes of
MessageColumns. If rows may break a new rule of Message, mark these rows as doubtful in
raymq.client.producer.table_rows (tests/unit/raymq/client/producer/test_table.py): a Message is made of each doubtful
row. System messages (half messages, requests, replies) already have raymq's own properties. The user's part of a reply
is checked when the Reply is made, before `reply_message` (raymq.common.protocol.request_reply) makes a SystemMessage.

`SingleSends.send` and `OpenBatches.join` skip `check` and `check_types`. They do not refuse a message: they return None
and change nothing, and then the message passes through the whole pipeline. They must return None for each message that
a new check in `check` or `check_types` might refuse. For examples, see how they test the size of a body, and how
`_put_locked` uses `attributes.takes_normal` and `attributes.is_compacted`.

One lock guards the open batches, the buffer pool and the states of the senders. While it is held, no code blocks, and
no code of the user runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from raymq.client.producer.buffer_pool import BufferPool, end_all
from raymq.client.producer.checks.topic_types import check_types
from raymq.client.producer.completion import Completion
from raymq.client.producer.observers import SendObserver, SendWatch, before_end
from raymq.client.producer.open_batches import OpenBatches
from raymq.client.producer.queue_selector import (
    Destination,
    DestinationOptions,
    QueueTurns,
    destination_of,
    named_queue,
)
from raymq.client.producer.results import BeforeEnd
from raymq.client.producer.send_parts import BatchPart, PlacedSend, cut, wait_store_msg_ok
from raymq.client.producer.senders.encoder import BatchEncoder, ProducerIdentity
from raymq.client.producer.senders.latency_fault import BrokerFaults
from raymq.client.producer.senders.message_facts import OVERHEAD_BYTES, cost_bytes, with_more
from raymq.client.producer.senders.send_batch import SendBatch, SendRequest
from raymq.client.producer.senders.send_state import closed_error
from raymq.client.producer.senders.sender import Sender
from raymq.client.producer.senders.sender_context import Pauses, SenderContext, ThreadlessSenders, in_sender
from raymq.client.producer.settings import ProducerSettings
from raymq.client.producer.single_sends import SingleSends
from raymq.common.errors import MessageIllegalError, RaymqError
from raymq.common.message import Message, MessageQueue, SystemMessage, not_a_message
from raymq.common.names import check_user_topic
from raymq.common.namespaces import Namespace
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.route import TopicRoute
from raymq.common.retry import Backoff, persist_until
from raymq.records.format.message_id import checked_message_id
from raymq.records.kernels.message_columns import MessageColumns
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient


class SendPipeline:
    """Carries out the steps of each send, for Producer, AsyncProducer, `send_table` and RepeatableWriter.
    Thread-safe."""

    def __init__(
        self,
        *,
        routes: RouteSource,
        storage: Callable[[str], StorageClient],
        born_host: tuple[str, int],
        settings: ProducerSettings,
        identity: ProducerIdentity | None,
        names: Namespace,
        observers: Sequence[SendObserver],
        clock: Callable[[], float] = time.monotonic,
        pauses: Callable[[], Pauses] = Backoff,
    ) -> None:
        """Create the pipeline. `routes` finds topics by their names in the namespace `names`. The class Producer
        explains the other arguments."""
        self.settings = settings
        self._routes, self._clock = routes, clock
        self._watching = [observer for observer in observers if observer.watches]
        self.needs_objects = any(observer.needs_objects for observer in observers)
        """True if an observer needs Message objects, so that `check_batch` must not convert the messages to
        columns."""
        self._lock = lock = threading.Lock()
        self.buffer = BufferPool(settings.max_buffered_bytes, settings.max_buffered_messages, lock)
        self.open_batches = OpenBatches(lock, self.buffer, clock, settings.send_timeout_s)
        faults = BrokerFaults(latency_enabled=settings.send_latency_enable)
        self._turns = QueueTurns(faults)
        self._context = SenderContext(
            lock=lock,
            clock=clock,
            pauses=pauses,
            routes=routes,
            storage=storage,
            encoder=BatchEncoder(born_host, settings.compression, identity, names),
            buffer=self.buffer,
            open_batches=self.open_batches,
            faults=faults,
            move=self._move,
            attempt_timeout_s=settings.attempt_timeout_s,
            retry_when_not_store_ok=settings.retry_when_not_store_ok,
            max_message_size_bytes=settings.max_message_size_bytes,
            observers=tuple(observers),
            threadless=ThreadlessSenders(clock),
        )
        self._senders: dict[str, Sender] = {}
        """Senders of batches, by broker name."""
        self.single_sends = SingleSends(
            self._context, self._turns, self._senders, lambda topic: self._usable_route(topic, keyed=False)
        )
        self._closed = False

    # The method `hand_over`, which carries out all steps of a send

    def hand_over(
        self,
        messages: Sequence[Message],
        where: DestinationOptions,
        timeout_s: float,
        *,
        together: bool = False,
        at_once: bool = False,
        message_ids: Sequence[str] = (),
    ) -> PlacedSend:
        """Enqueue messages of one topic for sending, through all steps of the pipeline.

        Waits up to `timeout_s` for the route, and again up to `timeout_s` for buffer space. `together`: True if all
        messages must go to one queue. `message_ids`: the ids of the messages; empty if the producer makes them.

        `at_once`: True to send the messages in this thread if nothing is in flight to the broker. In this case the call
        returns after the send has completed, or after the sender's thread has taken it over.
        """
        topic = self.check(messages)
        destination = destination_of(where)
        request = self.begin(messages, destination, timeout_s, together=together, message_ids=message_ids)
        try:
            route = self.route(topic, timeout_s, keyed=destination.fixed)
            patience_s = self.allocate_timeout_s(timeout_s)
            request.generation = self.buffer.allocate(request.cost_bytes, len(messages), patience_s)
            placed = self.put(route, request, at_once=at_once)
        except BaseException as error:
            request.fail(error)
            raise
        if placed.at_once is not None:
            sender, target = placed.at_once
            sender.send_at_once(placed.batches[0][0], target)
        return placed

    # Methods for the single steps of a send, in the order of the steps

    def check(self, messages: Sequence[Message]) -> str:
        """Check messages of one topic, without using the topic's route. Returns the topic.

        Raises MessageIllegalError if a message is invalid, IllegalNameError if the topic is not a user's topic, or
        ClientStateError if the producer is closed. After an error, nothing was sent.
        """
        longest = self.settings.max_message_size_bytes
        is_checked = isinstance(messages, MessageColumns) and int(messages.bodies.sizes.max()) <= longest
        for message in () if is_checked else messages:
            if message.__class__ is not Message and not isinstance(message, Message):
                raise MessageIllegalError(not_a_message(message))
            if len(message.body) > longest:
                raise MessageIllegalError(
                    f"a message body of {len(message.body)} bytes exceeds this producer's max_message_size_bytes "
                    f"of {longest}: send a reference to the data, split it, or raise max_message_size_bytes of "
                    "the producer and of the store"
                )
        self.require_open()
        if isinstance(messages, MessageColumns):
            return check_user_topic(messages.topic)
        return messages[0].topic if isinstance(messages[0], SystemMessage) else check_user_topic(messages[0].topic)

    def begin(
        self,
        messages: Sequence[Message],
        destination: Destination,
        timeout_s: float,
        *,
        together: bool = False,
        before_end: BeforeEnd | None = None,
        message_ids: Sequence[str] = (),
    ) -> SendRequest:
        """Make a SendRequest of messages that `check` has accepted. No buffer space is allocated yet: `generation` is
        -1.

        `before_end` is called for parts of the messages just before the outcome of these parts is set. Raises
        MessageIllegalError if an id in `message_ids` is not legal, or if there are not as many ids as messages.
        """
        if message_ids and len(message_ids) != len(messages):
            raise MessageIllegalError(
                f"{len(messages)} messages cannot have {len(message_ids)} ids: pass one id for each"
            )
        ids = tuple(map(checked_message_id, message_ids))
        watches: list[SendWatch] = []
        for observer in self._watching:
            messages, watch = observer.begin(messages)
            if watch is not None:
                watches.append(watch)
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
            messages, destination, timeout_s, deadline_s, together, plain, cost, -1, before_end, watches=watches,
            message_ids=ids,
        )  # fmt: skip

    def route(self, topic: str, timeout_s: float, *, keyed: bool) -> TopicRoute:
        """Return a topic's route for sending. If the topic does not exist, it is created if the cluster allows
        automatic creation.

        `keyed`: True if the message's destination chooses a queue, so that the route must have all queues of the topic.
        Otherwise one writable queue is enough. Waits up to `timeout_s` for such a route; does not wait in a callback of
        a send. Raises TopicNotExistError if the topic does not exist, NoPermissionError if it is not writable, or
        ServiceNotAvailableError after `timeout_s`.
        """
        try:
            return self._usable_route(topic, keyed)
        except RaymqError as error:
            if not error.retryable or in_sender():
                raise
        return persist_until(time.monotonic() + timeout_s, lambda left_s: self._usable_route(topic, keyed))

    def allocate_timeout_s(self, timeout_s: float) -> float:
        """Return the time in seconds for which a send with timeout `timeout_s` may wait for space in the producer's
        buffer."""
        return 0.0 if self.settings.when_full == "raise" or in_sender() else timeout_s

    def put(self, route: TopicRoute, request: SendRequest, *, at_once: bool = False) -> PlacedSend:
        """Give the messages of a request to the sender of their queue, without waiting. Their buffer space is already
        allocated.

        With `at_once`, the caller may have to send the messages itself. The result then names a sender in its own field
        `at_once`, and the caller must call this sender's `send_at_once` next. After an error nothing is sent, and the
        buffer space is free again.
        """
        try:
            priority = None
            if route.attributes.restricts:
                check_types(route, request.messages, request.destination, request.stored)
                priority = request.messages[0].priority if route.attributes.has_levels else None
            if priority is None:
                queue = self._select(route, request)
            else:
                queue = self._turns.of_priority(route, priority, self._clock())
            for watch in request.watches:
                watch.selected(request.messages, queue)
            sender = self._sender(queue.broker_name)
            parts = cut(request, queue)
            with self._lock:
                if self._closed or sender.closed:
                    raise closed_error()
                placed, futures = self._put_locked(request, parts, queue, sender, route.attributes, at_once=at_once)
        except BaseException as error:
            self.buffer.deallocate(request.cost_bytes, len(request.messages), request.generation)
            for watch in request.watches:
                watch.ended(range(len(request.messages)), error)
            raise
        end_all(futures)
        if placed.at_once is None:
            sender.send_left(request.deadline_s, placed.is_done)
        return placed

    def _usable_route(self, topic: str, keyed: bool) -> TopicRoute:
        route = self._routes.get_or_create(topic, self.settings.default_topic_queue_nums)
        if keyed:
            route.require_all_queues()
        else:
            route.require_writable()
        return route

    def queue_with_fewest(self, route: TopicRoute, rows: Mapping[MessageQueue, int]) -> MessageQueue:
        """Return the queue for the next rows of a table. `rows`: the number of rows of the table that each queue
        already has. Raises the errors of `QueueTurns.fewest`."""
        return self._turns.fewest(route, rows, self._clock())

    def _select(self, route: TopicRoute, request: SendRequest) -> MessageQueue:
        if request.turn_queue is not None:
            return request.turn_queue
        if request.destination.queue is not None:
            return named_queue(route, request.destination.queue)
        if request.destination.fixed:
            if request.destination.sharding_key is not None:
                self.open_batches.note_key_queues(route.topic, route.require_all_queues())
            return request.destination.select(route, request.messages[0])
        gathered = self.open_batches.gathered(route.topic)
        if gathered > 1:
            # Add the open batch's messages to the count by which queues take turns. Its first message is left out,
            # because `_turns.next` counted it when the batch was opened.
            self._turns.used(route.topic, gathered - 1)
        return self._turns.next(route, len(request.messages), self._clock())

    def _put_locked(
        self,
        request: SendRequest,
        parts: list[BatchPart],
        queue: MessageQueue,
        sender: Sender,
        attributes: TopicAttributes,
        *,
        at_once: bool,
    ) -> tuple[PlacedSend, list[Future[None]]]:
        """Add the message of a request to the batch that waits in its queue, or make batches of the request's parts.

        Returns the batch and index of each message, and the futures of flushes that the caller must complete without
        holding the lock.
        """
        special = request.together or request.before_end is not None or bool(self._watching)
        joins = not special and len(request.messages) == 1 and not request.message_ids
        if joins:
            waiting = sender.state.sends(parts[0][0]).waiting
            if waiting and (index := self.open_batches.add_locked(waiting[-1], request, queue)) is not None:
                return PlacedSend([(waiting[-1], (0,), index)]), self.buffer.merge_locked(request.generation)
        placed = PlacedSend([])
        for number, (stored, indices, members, cost) in enumerate(parts):
            batch = SendBatch(
                queue.topic, queue, sender.state.sends(stored), members,
                Completion(before_end(request.watches, indices, request.before_end)), request.movable,
                wait_store_msg_ok(members), request.timeout_s, request.deadline_s, cost, request.generation,
                plain=request.plain, first_sequence=request.first_sequence,
                inner=attributes.has_inner_batches and stored.topic == queue.topic,
                message_ids=[request.message_ids[index] for index in indices] if request.message_ids else (),
            )  # fmt: skip
            if number:
                self.buffer.share_locked(request.generation)
            placed.batches.append((batch, indices, 0))
            if at_once and len(parts) == 1 and sender.begin_at_once_locked(batch):
                placed.at_once = sender, sender.require_target()
                if joins and attributes.takes_normal and (request.movable or request.destination.queue is not None):
                    self.single_sends.begin_locked(batch, sender)
                break
            if joins:
                # `join` does not choose a queue, and the messages of a topic with levels may have different queues
                any_may_join = not attributes.is_compacted and not attributes.has_levels
                self.open_batches.open_locked(batch, stored, any_may_join=any_may_join)
            sender.put_locked(batch)
        return placed, []

    # Methods that find or create the Sender of a broker

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

    def _move(self, batch: SendBatch, broker_name: str) -> bool:
        """Move a batch from the failing broker `broker_name` to another broker. Returns False if no other broker can
        take the batch, which then stays unchanged."""
        try:
            route = self._routes.get(batch.topic)
            priority = batch.messages[0].priority if route.attributes.has_levels else None
            queue = self._turns.next_at_another_broker(route, broker_name, self._clock(), priority)
            if queue is None:
                return False
            sender = self._sender(queue.broker_name)
        except RaymqError:
            # the batch stays with its sender: the route of its topic is unknown now, or this producer is closing
            return False
        before, stored = batch.sends.queue, queue
        # A delayed batch waits in a queue of a system topic. At the new broker, store it in the queue of this system
        # topic that has the same id.
        if before.topic != batch.topic:
            stored = MessageQueue(before.topic, queue.broker_name, before.queue_id)
        with self._lock:
            if self._closed or sender.closed:
                return False
            batch.queue, batch.sends = queue, sender.state.sends(stored)
            sender.put_locked(batch)
        return True

    # Methods that close the producer

    def require_open(self) -> None:
        """Raise ClientStateError if the producer is closed."""
        if self._closed:
            raise closed_error()

    def flushed(self, timeout_s: float) -> Future[None]:
        """Return a future that completes when each message that was enqueued before this call has an outcome.

        Messages of senders without a thread that no other thread sends are first sent in this thread, for about
        `timeout_s`.
        """
        flush = self.buffer.flushed()
        with self._lock:
            # Close the open batches, so that later messages open new batches, for which the flush does not wait.
            self.open_batches.clear_locked()
        threadless = self._context.threadless
        if threadless and not in_sender():
            threadless.send(self._clock() + timeout_s, lambda: True, leaves=True)
        return flush

    def stop(self) -> list[Sender] | None:
        """Refuse further messages. Returns the senders, which the caller must close. Returns None if an earlier call
        returned the senders."""
        with self._lock:
            stops, self._closed = not self._closed, True
            self.open_batches.clear_locked()
            self.single_sends.close_locked()
            return list(self._senders.values()) if stops else None
