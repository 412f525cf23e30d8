"""Functions for the cost of a message in the buffer pool, and for the queue that stores a message."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.message import PROPERTY_TRANSACTION_PREPARED, Message, MessageQueue
from raymq.common.names import HALF_TOPIC, SCHEDULE_TOPIC

OVERHEAD_BYTES: Final = 256
"""Memory in bytes that the buffer pool counts for a message in addition to the message's body: record header, ids,
objects."""
LIGHT_QUEUE_OVERHEAD: Final = 26
"""Bytes that a light queue adds to a record, not counting the light queue's name: prefix, separators, and the light
queue's offset."""


def cost_bytes(message: Message) -> int:
    """Return the number of bytes that a message takes up in the producer's buffer pool. Includes an estimate for the
    record header, ids and objects."""
    cost = len(message.body) + OVERHEAD_BYTES
    if message.light_queues:
        cost += sum(map(len, message.light_queues)) + LIGHT_QUEUE_OVERHEAD * len(message.light_queues)
    return cost + sum(map(len, message.properties.values())) if message.properties else cost


def with_more(messages: Iterable[Message]) -> list[Message]:
    """Return the messages that set any field besides topic, body and `wait_store_msg_ok`."""
    return [
        message
        for message in messages
        if message.tags is not None
        or message.keys
        or message.properties
        or message.flag
        or message.delay_level
        or message.deliver_at_ms is not None
        or message.light_queues
    ]


def is_delayed(message: Message) -> bool:
    """Return True if the message has a delay level or a delivery time."""
    return message.delay_level > 0 or message.deliver_at_ms is not None


def stored_queue(message: Message, queue: MessageQueue) -> MessageQueue:
    """Return the queue that stores a message sent now to `queue`. The result is `queue` itself, or the system queue in
    which a delayed message or a half message waits."""
    if PROPERTY_TRANSACTION_PREPARED in message.properties:
        return MessageQueue(HALF_TOPIC, queue.broker_name, 0)
    if message.delay_level:
        return MessageQueue(SCHEDULE_TOPIC, queue.broker_name, message.delay_level - 1)
    if message.deliver_at_ms is None:
        return queue
    now_ms = time.time_ns() // 1_000_000
    if message.deliver_at_ms <= now_ms:
        return queue
    return MessageQueue(TIMER_TOPIC, queue.broker_name, timer_queue(message.deliver_at_ms, now_ms))


def by_stored_queue(messages: Sequence[Message], queue: MessageQueue) -> dict[MessageQueue, list[int]]:
    """Group messages that are sent to `queue` by the queue that stores each message first: `queue` itself, or a system
    topic's queue for delayed messages. Returns, for each queue, the positions of its messages in `messages`."""
    by_queue: dict[MessageQueue, list[int]] = {}
    for index, message in enumerate(messages):
        by_queue.setdefault(stored_queue(message, queue), []).append(index)
    return by_queue
