"""Checks the messages of `send_batch`, and the size of records, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from raymq.client.producer.senders.encoder import FEW_MESSAGES
from raymq.client.producer.senders.message_facts import LIGHT_QUEUE_OVERHEAD, OVERHEAD_BYTES, is_delayed, with_more
from raymq.client.producer.senders.send_batch import BATCH_MAX_MESSAGES, REQUEST_MAX_BYTES
from raymq.common.errors import MessageIllegalError
from raymq.common.message import PLAIN_PROPERTIES, USUAL_PROPERTIES_BYTES, Message, message_list
from raymq.common.names import SCHEDULE_TOPIC
from raymq.records.format.encode import ProducerSequence, WaitingBatch, encode_batch, own_properties
from raymq.records.format.hashing import tags_code
from raymq.records.kernels.byte_column import ByteColumn
from raymq.records.kernels.message_columns import MessageColumns


def check_batch(messages: Iterable[Message], *, as_objects: bool = False) -> Sequence[Message]:
    """Check the messages of one batch. Returns the messages as columns if that is possible and `as_objects` is false;
    otherwise as a list. Raises MessageIllegalError unless all messages can be sent together."""
    batch = message_list(messages)
    if not batch:
        raise MessageIllegalError("send_batch got no messages: pass at least one")
    columns = None if as_objects else _columns(batch)
    if columns is not None:
        return columns
    if len({message.topic for message in batch}) > 1:
        raise MessageIllegalError("all messages of a batch must have one topic; send a separate batch for each topic")
    if len({message.wait_store_msg_ok for message in batch}) > 1:
        raise MessageIllegalError(
            "all messages of a batch must have the same wait_store_msg_ok; send a separate batch for each value"
        )
    for message in with_more(batch):
        if may_exceed_a_record(message):
            check_record_size(message)
    return batch


def _columns(batch: list[Message]) -> MessageColumns | None:
    """Check the messages of a batch together, and convert them to columns. Later steps of the send then need not check
    each message.

    Returns None if the batch is small, has several topics, or does not fit in one request. Also returns None if a
    message may be too long for a record, or sets a field that `_is_usual` does not accept.
    """
    if not FEW_MESSAGES < len(batch) <= BATCH_MAX_MESSAGES or set(map(type, batch)) != {Message}:
        return None
    topic = batch[0].topic
    bodies = [message.body for message in batch if message.properties is PLAIN_PROPERTIES and message.topic == topic]
    texts = codes = None
    if len(bodies) < len(batch):
        bodies = [message.body for message in batch if message.topic == topic and _is_usual(message)]
        if len(bodies) < len(batch):
            return None
        texts = ByteColumn.of([own_properties(message).encode() for message in batch])
        codes = np.array([tags_code(message.tags) for message in batch], np.int64)
        if texts.sizes.max() > USUAL_PROPERTIES_BYTES:
            # return None, so that the messages are checked one by one: with long properties, a message may exceed the
            # maximum record size
            return None
    cost = sum(map(len, bodies)) + OVERHEAD_BYTES * len(bodies) + (0 if texts is None else len(texts.data))
    return MessageColumns(topic, ByteColumn.of(bodies), texts, codes) if cost <= REQUEST_MAX_BYTES else None


def _is_usual(message: Message) -> bool:
    """Return True if the message sets only topic, body, tags, keys and properties."""
    return not (
        message.flag
        or message.delay_level
        or message.deliver_at_ms is not None
        or message.wait_store_msg_ok is not True
        or message.light_queues
        or message.priority is not None
    )


def check_record_size(message: Message) -> None:
    """Raise MessageIllegalError if a message does not fit in a record. The check assumes that the message's sequence
    number is as long as possible."""
    encode_batch(
        [message],
        0,
        born_host=("127.0.0.1", 0),
        born_timestamp_ms=0,
        message_ids=["0" * 32],
        producer=ProducerSequence("0" * 16, 0, 2**62),
        waiting=WaitingBatch(SCHEDULE_TOPIC, [2**31 - 1]) if is_delayed(message) else None,
    )


def may_exceed_a_record(message: Message) -> bool:
    """Return True if the properties of a message might be too long for a record. The estimate is quick to compute but
    not exact."""
    if not (message.properties or message.keys or message.tags or message.light_queues):
        return False
    characters = len(message.tags or "") + sum(len(key) + 1 for key in message.keys)
    characters += sum(len(name) + len(value) + 2 for name, value in message.properties.items())
    characters += sum(len(name) + LIGHT_QUEUE_OVERHEAD for name in message.light_queues)
    return 4 * characters > USUAL_PROPERTIES_BYTES
