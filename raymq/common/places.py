"""Parses queues and offsets that users type, such as broker-a:3 (queue 3) and broker-a:3:1700 (offset 1700 in
queue 3)."""

from __future__ import annotations

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.numbers import INT32_MAX, NumberRange, number_of_text, shown

_QUEUE_IDS = NumberRange(0, INT32_MAX)


def parse_queue(topic: str, text: str) -> MessageQueue:
    """Parse BROKER:QUEUE into a queue of a topic. Raises InvalidArgumentError if `text` has another form."""
    broker_name, _, queue_id = text.rpartition(":")
    try:
        number = number_of_text("the queue", queue_id, _QUEUE_IDS)
    except InvalidArgumentError:
        number = -1
    if not broker_name or number < 0:
        raise InvalidArgumentError(f"{shown(text)} is not a queue; write BROKER:QUEUE, for example broker-a:3")
    return MessageQueue(topic, broker_name, number)


def parse_position(topic: str, text: str) -> tuple[MessageQueue, int]:
    """Parse BROKER:QUEUE:OFFSET into a queue and an offset. Raises InvalidArgumentError if `text` has another
    form."""
    queue, _, offset = text.rpartition(":")
    try:
        return parse_queue(topic, queue), number_of_text("the offset", offset)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"{shown(text)} is not an offset of a queue; write BROKER:QUEUE:OFFSET, for example broker-a:3:1700"
        ) from None
