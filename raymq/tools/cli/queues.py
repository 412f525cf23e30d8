"""Queues and places in them as they are typed: broker-a:3 and broker-a:3:1700."""

from __future__ import annotations

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue


def parse_queue(topic_name: str, text: str) -> MessageQueue:
    """The queue of a topic that BROKER:QUEUE names. InvalidArgumentError."""
    broker_name, _, queue_id = text.rpartition(":")
    if not broker_name or not _is_number(queue_id):
        raise InvalidArgumentError(f"{text!r} is not a queue; write BROKER:QUEUE, for example broker-a:3")
    return MessageQueue(topic_name, broker_name, int(queue_id))


def parse_position(topic_name: str, text: str) -> tuple[MessageQueue, int]:
    """The queue and the offset that BROKER:QUEUE:OFFSET names. InvalidArgumentError."""
    parts = text.split(":")
    if len(parts) != 3 or not parts[0] or not _is_number(parts[1]) or not _is_number(parts[2]):
        raise InvalidArgumentError(
            f"{text!r} is not an offset of a queue; write BROKER:QUEUE:OFFSET, for example broker-a:3:1700"
        )
    return MessageQueue(topic_name, parts[0], int(parts[1])), int(parts[2])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
