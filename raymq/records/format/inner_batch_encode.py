"""Writes inner batches: many messages of one queue as one record, for topics with the queue type "batch".

A producer encodes inner batches (raymq.client.producer.encoder), as RocketMQ 5 does for a topic with
`queue.type=BatchCQ`; raymq.records.format.inner_batch describes the record. Two fields contain the queue offset of the
first message: a header field, and the text of property INNER_BASE. The producer does not have this offset, so it writes
nineteen zeros into INNER_BASE at the end of the properties. The store overwrites the zeros with the offset and leading
zeros, which RocketMQ parses like other numbers. So the record's size does not depend on the offset.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from raymq.common.errors import MessageIllegalError
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_INNER_BASE,
    PROPERTY_INNER_NUM,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_SEQUENCE,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    Message,
)
from raymq.records.format import layout
from raymq.records.format.compression import Compression
from raymq.records.format.crc import PROPERTY_CRC_LENGTH, PROPERTY_CRC_PREFIX, body_crc
from raymq.records.format.encode import EncodedBatch, ProducerSequence, own_properties, topic_part
from raymq.records.format.layout import (
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_NEED_UNWRAP,
    SYS_FLAG_OFFSET,
    Buffer,
    RecordHeader,
    decode_properties,
)

INNER_MESSAGES_MAX: Final = 2**15 - 1
"""Maximum number of messages in an inner batch. The entry (unit) of a batch consume queue has a signed two-byte field
for this number."""

_ITEM_HEAD: Final = struct.Struct(">iiiii")
_ITEM_FIXED_BYTES: Final = _ITEM_HEAD.size + layout.SHORT.size
_BASE_DIGITS: Final = 19
_BASE: Final = f"{PROPERTY_INNER_BASE}\x01".encode() + b"0" * _BASE_DIGITS + b"\x02"
"""The property INNER_BASE with zeros that the store replaces with the queue offset. It is the last property of an inner
batch."""


def encode_inner_batch(
    messages: Sequence[Message],
    queue_id: int,
    *,
    born_host: tuple[str, int],
    born_timestamp_ms: int,
    message_ids: Sequence[str],
    producer: ProducerSequence,
    compression: Compression,
) -> EncodedBatch:
    """Encode `messages`, all of one topic, as one inner-batch record of the topic's queue `queue_id`.

    Each message is an item of the record's body, with its flag, its own properties and its unique id; the body is
    compressed as a whole. The record has the first message's id and sequence number, which represent all messages. The
    returned batch has one size, and one id per message. `born_host`: an IP address and a port.

    Raises MessageIllegalError if there are no messages or too many, or if a message's properties are too long.
    """
    if not 0 < len(messages) <= INNER_MESSAGES_MAX:
        raise MessageIllegalError(f"an inner batch must have 1 to {INNER_MESSAGES_MAX} messages, not {len(messages)}")
    first = messages[0]
    parts: list[bytes] = []
    for message, message_id in zip(messages, message_ids, strict=True):
        parts += _item(message, message_id)
    body, compressed = compression.compress_body(b"".join(parts))
    magic, topic = topic_part(first.topic)
    born = layout.encode_host(*born_host)
    born_bit = layout.SYS_FLAG_BORN_HOST_IPV6 if len(born) == layout.IPV6_HOST_BYTES else 0
    sys_flag = born_bit | compressed | SYS_FLAG_NEED_UNWRAP | SYS_FLAG_INNER_BATCH
    properties = layout.encode_properties(_properties(len(messages), message_ids[0], first, producer)) + _BASE
    size = layout.header_size(sys_flag) + len(body) + len(topic) + layout.SHORT.size + len(properties)
    header = RecordHeader(
        size, magic, body_crc(body), queue_id, 0, 0, 0, sys_flag, born_timestamp_ms, born, 0, bytes(8), 0, 0, len(body)
    )
    record = b"".join((header.encode(), body, topic, layout.SHORT.pack(len(properties)), properties))
    columns = np.array((size,), np.int32), np.zeros(1, np.int64)
    return EncodedBatch(first.topic, queue_id, record, *columns, producer, message_ids, first.wait_store_msg_ok)


def is_inner_batch(records: Buffer) -> bool:
    """True if the first record in `records` is an inner batch. Reads only the record's sys flag."""
    return len(records) > SYS_FLAG_OFFSET + 3 and bool(records[SYS_FLAG_OFFSET + 3] & SYS_FLAG_INNER_BATCH)


def count_messages(properties: bytes) -> int:
    """Read the number of messages in an inner batch from the batch's properties, which `encode_inner_batch` wrote.
    Returns 0 if this number is missing or invalid. Also returns 0 if the properties have no space for the queue offset
    of the batch's first message."""
    text = decode_properties(properties).get(PROPERTY_INNER_NUM, "")
    messages = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else 0
    return messages if messages <= INNER_MESSAGES_MAX and base_position(properties) else 0


def base_position(record: Buffer) -> int:
    """Return the position of the digits of property INNER_BASE (the queue offset of the batch's first message) in an
    inner-batch record. A property CRC may follow the digits. The position is negative, counted from the record's end.
    It is 0 if the record does not end with INNER_BASE."""
    tail = bytes(record[-len(_BASE) - PROPERTY_CRC_LENGTH :])
    behind = PROPERTY_CRC_LENGTH if tail[-PROPERTY_CRC_LENGTH:].startswith(PROPERTY_CRC_PREFIX) else 0
    return -behind - _BASE_DIGITS - 1 if tail[: len(tail) - behind].endswith(_BASE) else 0


def put_base(record: bytearray | memoryview, position: int, base_offset: int) -> None:
    """Write the queue offset of an inner batch's first message over the zeros at `position`. `position` is the result
    of `base_position` for the record, and counts from the record's end."""
    at = len(record) + position
    record[at : at + _BASE_DIGITS] = b"%0*d" % (_BASE_DIGITS, base_offset)


def _item(message: Message, message_id: str) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the encoded fields of a message's item in an inner batch (spec/storage.md §1, "Batches"), in the order on
    disk."""
    if message.light_queues:
        raise MessageIllegalError(
            f"topic {message.topic!r} stores inner batches, whose messages cannot be in light queues; send "
            "the message to another topic"
        )
    properties = f"{own_properties(message)}{PROPERTY_UNIQ_KEY}\x01{message_id}\x02".encode()
    if len(properties) > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(
            f"a message's properties, tags and keys take {len(properties)} bytes; at most "
            f"{MAX_PROPERTIES_BYTES} are allowed"
        )
    body = message.body
    head = _ITEM_HEAD.pack(_ITEM_FIXED_BYTES + len(body) + len(properties), 0, 0, message.flag, len(body))
    return head, body, layout.SHORT.pack(len(properties)), properties


def _properties(count: int, message_id: str, first: Message, producer: ProducerSequence) -> dict[str, str]:
    """Return the properties of an inner-batch record of `count` messages, except INNER_BASE."""
    return {
        PROPERTY_UNIQ_KEY: message_id,
        **({} if first.wait_store_msg_ok else {PROPERTY_WAIT: "false"}),
        PROPERTY_PRODUCER_ID: producer.producer_id,
        PROPERTY_PRODUCER_EPOCH: str(producer.epoch),
        PROPERTY_SEQUENCE: str(producer.first_sequence),
        PROPERTY_INNER_NUM: str(count),
    }
