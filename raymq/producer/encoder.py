"""Encodes a producer's pending messages as batches: ids, sequences, and the queues in which delayed messages wait."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

from raymq.delay import DELAY_LEVELS_MAX, TIMER_TOPIC, is_waiting_topic, timer_queue
from raymq.errors import MessageIllegalError
from raymq.message import MAX_PROPERTIES_BYTES, Message, MessageQueue, SendResult, message_list
from raymq.names import SCHEDULE_TOPIC
from raymq.producer.queue_selector import Destination
from raymq.record.compression import Compression
from raymq.record.encode import EncodedBatch, ProducerSequence, Waiting, encode_batch
from raymq.record.message_id import UniqueIdGenerator

_OVERHEAD_BYTES: Final = 256
"""Memory of a message beside its body: record header, ids, Python objects. For the buffer pool's bound."""


class Outcome(Protocol):
    """Receives a message's result or error, once. A Future is one."""

    def done(self) -> bool: ...

    def set_result(self, result: SendResult, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


@dataclass(slots=True)
class PendingMessage:
    """A message that was handed over, to be stored in `queue` of its topic.

    `deadline_s` is a time of the monotonic clock, `timeout_s` the time the sender gave it. `cost_bytes` of the buffer
    pool are allocated for it, in `generation`. `movable`: it asked for no order, so another queue will do as long as
    nothing of it may be stored. `message_id` is empty until it was encoded, and stays the same when that is repeated.
    """

    message: Message
    queue: MessageQueue
    outcome: Outcome
    deadline_s: float
    timeout_s: float
    cost_bytes: int
    generation: int
    movable: bool
    message_id: str = ""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Messages of one topic that are sent by one call, each with its outcome and its cost in the buffer pool (bytes).
    `together`: they must stay in one queue."""

    messages: Sequence[Message]
    outcomes: Sequence[Outcome]
    destination: Destination
    together: bool
    timeout_s: float
    costs: Sequence[int]

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        outcomes: Sequence[Outcome],
        destination: Destination,
        timeout_s: float,
        *,
        together: bool,
    ) -> SendRequest:
        """A request for `messages`, with the cost of each."""
        return cls(messages, outcomes, destination, together, timeout_s, [cost_bytes(message) for message in messages])

    @property
    def cost_bytes(self) -> int:
        """The cost of all its messages in the buffer pool."""
        return sum(self.costs)


def running_future() -> Future[SendResult]:
    """A future that cannot be cancelled: its message is on its way as soon as it was handed over."""
    future: Future[SendResult] = Future()
    future.set_running_or_notify_cancel()
    return future


class BatchEncoder:
    """Encodes a producer's messages. Its sequences grow per queue, and none is used twice.

    `born_host` is an IP address and a port. A queue's messages are encoded by one thread at a time, the sender's of its
    broker group.
    """

    def __init__(self, born_host: tuple[str, int], compression: Compression) -> None:
        self._born_host = born_host
        self._compression = compression
        self._ids = UniqueIdGenerator(born_host[0])
        self._producer_id = secrets.token_hex(8)
        self._sequences: dict[MessageQueue, int] = {}

    def encode(self, queue: MessageQueue, entries: Sequence[PendingMessage]) -> EncodedBatch:
        """A batch of the entries, for the `queue` that stores them. MessageIllegalError; no sequence is used then."""
        first = self._sequences.get(queue, 0)
        batch = encode_batch(
            [entry.message for entry in entries],
            queue.queue_id,
            born_host=self._born_host,
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=self._message_ids(entries),
            producer=ProducerSequence(self._producer_id, 0, first),
            compression=self._compression,
            waiting=(
                Waiting(queue.topic, [entry.queue.queue_id for entry in entries])
                if is_waiting_topic(queue.topic)
                else None
            ),
        )
        self._sequences[queue] = first + len(entries)
        return batch

    def check_size(self, message: Message, max_body_bytes: int) -> None:
        """MessageIllegalError when the body, as it would be stored, is longer than a store takes."""
        if len(message.body) > max_body_bytes:
            stored, _ = self._compression.compress_body(message.body)
            if len(stored) > max_body_bytes:
                raise MessageIllegalError(
                    f"a body of {len(stored)} bytes exceeds the store's limit of {max_body_bytes} "
                    "(max_message_size_bytes): send a reference to the data, or split it"
                )

    def _message_ids(self, entries: Sequence[PendingMessage]) -> list[str]:
        message_ids = self._ids.next_batch(len(entries))
        for index, entry in enumerate(entries):
            if entry.message_id:
                message_ids[index] = entry.message_id
        return message_ids


def by_stored_queue(entries: list[PendingMessage], queue: MessageQueue) -> dict[MessageQueue, list[PendingMessage]]:
    """The entries for `queue` by the queue that stores them now: delayed ones wait in queues of system topics."""
    if not any(is_delayed(entry.message) for entry in entries):
        return {queue: entries}
    by_queue: dict[MessageQueue, list[PendingMessage]] = {}
    for entry in entries:
        by_queue.setdefault(_stored_queue(entry.message, queue), []).append(entry)
    return by_queue


def is_delayed(message: Message) -> bool:
    """True if the message asks to be delivered later."""
    return message.delay_level > 0 or message.deliver_at_ms is not None


def _stored_queue(message: Message, queue: MessageQueue) -> MessageQueue:
    """The queue that stores a message sent now to `queue`: that one, or the one in which a delayed message waits."""
    if message.delay_level:
        return MessageQueue(SCHEDULE_TOPIC, queue.broker_name, min(message.delay_level, DELAY_LEVELS_MAX) - 1)
    now_ms = time.time_ns() // 1_000_000
    if message.deliver_at_ms is None or message.deliver_at_ms <= now_ms:
        return queue
    return MessageQueue(TIMER_TOPIC, queue.broker_name, timer_queue(message.deliver_at_ms, now_ms))


def check_record_size(message: Message) -> None:
    """MessageIllegalError when the message does not fit a record, with the longest sequence it may be sent with."""
    encode_batch(
        [message],
        0,
        born_host=("127.0.0.1", 0),
        born_timestamp_ms=0,
        message_ids=["0" * 32],
        producer=ProducerSequence("0" * 16, 0, 2**62),
        waiting=Waiting(SCHEDULE_TOPIC, [2**31 - 1]) if is_delayed(message) else None,
    )


def may_exceed_a_record(message: Message) -> bool:
    """True if the properties might be too long for a record, by a bound that is quick to compute."""
    if not message.properties and not message.keys and not message.tags:
        return False
    characters = len(message.tags or "") + sum(len(key) + 1 for key in message.keys)
    characters += sum(len(name) + len(value) + 2 for name, value in message.properties.items())
    return 4 * characters > MAX_PROPERTIES_BYTES - 1024


def check_batch(messages: Iterable[Message]) -> list[Message]:
    """The messages of one batch, as a list; MessageIllegalError unless all can be sent together."""
    batch = message_list(messages)
    if not batch:
        raise MessageIllegalError("send_batch was given no messages")
    if len({message.topic for message in batch}) > 1:
        raise MessageIllegalError("all messages of a batch must have one topic; send one batch per topic")
    if len({message.wait_store_msg_ok for message in batch}) > 1:
        raise MessageIllegalError("all messages of a batch must have the same wait_store_msg_ok")
    for message in batch:
        if may_exceed_a_record(message):
            check_record_size(message)
    return batch


def cost_bytes(message: Message) -> int:
    """A message's cost in the buffer pool."""
    cost = len(message.body) + _OVERHEAD_BYTES
    return cost + sum(map(len, message.properties.values())) if message.properties else cost
