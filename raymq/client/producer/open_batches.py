"""OpenBatches: the batches of one producer that gather further messages while their sender is busy.

The first message of a batch takes all steps of the pipeline. A later message joins the batch through `join`, which
looks up the topic or the queue and appends the message. The later message needs no route, no queue selection and no
request. A batch stays open for a short time only, so that all its messages have nearly the same deadline. It is closed
earlier if it is full, if its sender takes it, or if another batch for the same queue is enqueued after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from raymq.client.producer.buffer_pool import BufferPool
from raymq.client.producer.completion import SendFuture
from raymq.client.producer.queue_selector import KEY_QUEUES_VALID_S, DestinationOptions, own_queue, select_queue_by_hash
from raymq.client.producer.senders import send_batch as limits
from raymq.client.producer.senders.message_facts import OVERHEAD_BYTES, cost_bytes
from raymq.client.producer.senders.send_batch import SEALED, SendBatch, SendRequest
from raymq.common.message import PLAIN_PROPERTIES, Message, MessageQueue

_JOIN_TIMEOUT_SHARE: Final = 1 / 64
"""Fraction of the send timeout for which a batch stays open for further messages."""


class OpenBatches:
    """The open batches of one producer, by topic or queue. Thread-safe.

    `lock` is the producer's lock; the caller holds it while it calls a method whose name ends in `_locked`.
    `send_timeout_s`: the producer's default timeout. `join` adds messages only to batches with this timeout.
    """

    def __init__(
        self, lock: threading.Lock, buffer: BufferPool, clock: Callable[[], float], send_timeout_s: float
    ) -> None:
        self._lock, self._buffer, self._clock = lock, buffer, clock
        self._send_timeout_s = send_timeout_s
        self._batches: dict[str | MessageQueue, SendBatch] = {}
        """Open batches. The key is the topic for messages without a destination, or the queue for messages with a
        destination."""
        self._key_queues: dict[str, tuple[tuple[MessageQueue, ...], float]] = {}
        """For each topic, the queues from which sharding keys choose, and the monotonic time until which these queues
        are valid."""

    def join(self, message: Message, where: DestinationOptions) -> SendFuture | None:
        """Add a message to the open batch of its topic or queue. Returns None, and changes nothing, if the message
        cannot join a batch."""
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
        place = self._place(message, where, now_s) if where else message.topic
        # A signal handler may raise after each call in this block. So after `extend_locked` has allocated the space, no
        # call follows except the final `append`.
        with self._lock:
            batch = self._batches.get(place)
            if (
                batch is None
                or (batch_cost := batch.cost_bytes + cost) > batch.limit_bytes
                or now_s > batch.join_until_s
            ):
                return None
            messages = batch.messages
            if TYPE_CHECKING:
                # for the type checker: the messages of an open batch are always a list
                assert isinstance(messages, list)
            index = len(messages)
            if not self._buffer.extend_locked(cost, 1):
                return None
            batch.cost_bytes = batch_cost
            if index >= batch.max_messages - 1:
                batch.limit_bytes = SEALED
            if not plain:
                batch.plain = False
            messages.append(message)
        return SendFuture(batch.completion, index)

    def add_locked(self, batch: SendBatch, request: SendRequest, queue: MessageQueue) -> int | None:
        """Add the single message of a request to a waiting batch of its queue. Returns the message's index in the
        batch; None if the message may not join."""
        [message] = request.messages
        if (
            batch.cost_bytes + request.cost_bytes > batch.limit_bytes
            or batch.queue != queue
            or batch.movable is not request.movable
            or batch.waits is not message.wait_store_msg_ok
            or batch.timeout_s != request.timeout_s
            or batch.generation != self._buffer.generation
            or self._clock() > batch.join_until_s
        ):
            return None
        if TYPE_CHECKING:
            # for the type checker: as long as further messages can join a batch, the batch's messages are a list
            assert isinstance(batch.messages, list)
        index = len(batch.messages)
        batch.messages.append(message)
        batch.plain = batch.plain and request.plain
        batch.cost_bytes += request.cost_bytes
        if index >= batch.max_messages - 1:
            batch.limit_bytes = SEALED
        return index

    def open_locked(self, batch: SendBatch, stored: MessageQueue, *, any_may_join: bool) -> None:
        """Keep a new batch open, so that further messages can be added to it. `stored`: the queue that stores the
        batch.

        `any_may_join`: True if `join`, which does not check messages, may add messages to the batch. If false, only
        `add_locked` may add messages.
        """
        open_for_s = batch.timeout_s * _JOIN_TIMEOUT_SHARE
        batch.join_until_s = self._clock() + open_for_s
        batch.deadline_s += open_for_s
        batch.open_for_s = open_for_s
        batch.limit_bytes = limits.OPEN_BATCH_MAX_BYTES
        if batch.movable:
            before = self._batches.get(batch.topic)
            full = before is not None and len(before.messages) >= before.max_messages
            batch.max_messages = limits.FIRST_TURN_MAX_MESSAGES
            if before is not None and full:
                batch.max_messages = min(2 * before.max_messages, limits.BATCH_MAX_MESSAGES)
        if any_may_join and batch.waits and stored == batch.queue and batch.timeout_s == self._send_timeout_s:
            self._batches[batch.topic if batch.movable else batch.queue] = batch

    def close_locked(self, batch: SendBatch) -> None:
        """Close an open batch, so that no later message is added to it. Called after the outcome of the batch's
        messages was determined."""
        place = batch.topic if batch.movable else batch.queue
        if self._batches.get(place) is batch:
            del self._batches[place]

    def clear_locked(self) -> None:
        """Close all open batches, so that no further message joins them."""
        self._batches.clear()

    def gathered(self, topic: str) -> int:
        """Return the number of messages in the open batch of a topic; 0 if the topic has no open batch."""
        batch = self._batches.get(topic)
        return 0 if batch is None else len(batch.messages)

    def note_key_queues(self, topic: str, queues: tuple[MessageQueue, ...]) -> None:
        """Store all `queues` of a topic for KEY_QUEUES_VALID_S, so that `join` can map a message's sharding key to a
        queue without the topic's route."""
        self._key_queues[topic] = queues, self._clock() + KEY_QUEUES_VALID_S

    def _place(self, message: Message, where: DestinationOptions, now_s: float) -> str | MessageQueue:
        """Return the queue that the message's destination determines, because it is the key of the open batch that the
        message may join. Returns "" if only the topic's route determines the queue."""
        queue, key = own_queue(message, where), where.get("sharding_key")
        if queue is not None:
            return queue
        queues, until_s = self._key_queues.get(message.topic, ((), 0.0))
        if len(where) == 1 and key is not None and now_s < until_s:
            return select_queue_by_hash(queues, message, key)
        return ""
