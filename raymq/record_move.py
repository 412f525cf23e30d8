"""The same message as a record for another queue: what the scheduler stores when a delayed message is due.

Body, flags, born host and time and the number of consumptions are kept, and so is the text of the properties, DELAY,
REAL_TOPIC and REAL_QID included, as RocketMQ keeps it (spec/storage.md §12). Only raymq's own three are exchanged: they
say who stores this record.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from raymq.crc import PROPERTY_CRC_LENGTH, PROPERTY_CRC_PLACEHOLDER, PROPERTY_CRC_PREFIX, property_crc
from raymq.errors import MessageIllegalError
from raymq.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
)
from raymq.record_batch import ProducerSequence, topic_part
from raymq.record_layout import (
    HEADERS,
    IPV6_EXTRA,
    MAGIC_V1,
    QUEUE_OFFSET_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_BORN_HOST_IPV6,
    SYS_FLAG_HOSTS_MASK,
    SYS_FLAG_OFFSET,
    SYS_FLAG_STORE_HOST_IPV6,
    RecordError,
    decode_properties,
)

_OFFSETS: Final = struct.Struct(">qq")
_EXCHANGED: Final = tuple(
    f"{name}\x01".encode() for name in (PROPERTY_PRODUCER_ID, PROPERTY_PRODUCER_EPOCH, PROPERTY_SEQUENCE)
)


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """A record of a waiting topic, taken apart. `deliver_at_ms` is None unless it waits for a time of its own."""

    header: tuple[int | bytes, ...]
    body: bytes
    properties: bytes
    real_topic: str
    real_queue_id: int
    tags: str | None
    deliver_at_ms: int | None


def read_waiting(record: bytes | memoryview) -> WaitingRecord:
    """Take one whole record apart. RecordError when it is damaged, or does not say where it is for."""
    data = bytes(record)
    try:
        header = HEADERS[(int.from_bytes(data[36:40]) >> 4) & 3]
        values = header.unpack_from(data)
        topic_at = header.size + values[14]
        width = 1 if values[1] == MAGIC_V1 else 2
        properties_at = topic_at + width + int.from_bytes(data[topic_at : topic_at + width]) + 2
        properties = data[properties_at:]
        if len(data) != values[0] or len(properties) != int.from_bytes(data[properties_at - 2 : properties_at]):
            raise RecordError("the record's length fields do not add up to its size")
        table = decode_properties(properties)
        deliver_at = table.get(PROPERTY_TIMER_DELIVER_MS)
        return WaitingRecord(
            values,
            data[header.size : topic_at],
            properties,
            table[PROPERTY_REAL_TOPIC],
            int(table[PROPERTY_REAL_QUEUE_ID]),
            table.get(PROPERTY_TAGS),
            None if deliver_at is None else int(deliver_at),
        )
    except KeyError as missing:
        raise RecordError(f"the record has no property {missing}") from None
    except (struct.error, ValueError) as error:
        raise RecordError(f"the record cannot be read: {error}") from None


def move_record(
    record: WaitingRecord, topic: str, queue_id: int, *, producer: ProducerSequence, store_host_ipv6: bool
) -> bytearray:
    """The bytes of a new record of `topic`:`queue_id`, for `stamp_one`.

    MessageIllegalError when they would break a rule; IllegalNameError when `topic` is no name.
    """
    magic, topic_text = topic_part(topic)
    sealed = record.properties[-PROPERTY_CRC_LENGTH:].startswith(PROPERTY_CRC_PREFIX)
    kept = record.properties[:-PROPERTY_CRC_LENGTH] if sealed else record.properties
    pieces = [piece for piece in kept.split(b"\x02") if piece and not piece.startswith(_EXCHANGED)]
    pieces += [
        name + value
        for name, value in zip(
            _EXCHANGED,
            (producer.producer_id.encode(), b"%d" % producer.epoch, b"%d" % producer.first_sequence),
            strict=True,
        )
    ]
    properties = b"\x02".join(pieces) + b"\x02" + (PROPERTY_CRC_PLACEHOLDER if sealed else b"")
    if len(properties) > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(f"the properties take {len(properties)} bytes; {MAX_PROPERTIES_BYTES} fit")
    _, _, crc, _, flag, _, _, sys_flag, born_ms, born, _, _, reconsume_times, _, _ = record.header
    assert isinstance(sys_flag, int)
    sys_flag = sys_flag & ~SYS_FLAG_STORE_HOST_IPV6 | store_host_ipv6 * SYS_FLAG_STORE_HOST_IPV6
    header = HEADERS[(sys_flag & SYS_FLAG_HOSTS_MASK) >> 4]
    size = header.size + len(record.body) + len(topic_text) + 2 + len(properties)
    store = bytes(20 if store_host_ipv6 else 8)
    fields = (size, magic, crc, queue_id, flag, 0, 0, sys_flag, born_ms, born, 0, store, reconsume_times, 0)
    head = header.pack(*fields, len(record.body))
    return bytearray(b"".join((head, record.body, topic_text, len(properties).to_bytes(2), properties)))


def stamp_one(
    record: bytearray, queue_offset: int, physical_offset: int, store_timestamp_ms: int, store_host: bytes
) -> None:
    """Fill in, in place, what only the store knows: `stamp` for one record, whose queue other records need not have."""
    _OFFSETS.pack_into(record, QUEUE_OFFSET_OFFSET, queue_offset, physical_offset)
    extra = IPV6_EXTRA if record[SYS_FLAG_OFFSET + 3] & SYS_FLAG_BORN_HOST_IPV6 else 0
    place = STORE_TIMESTAMP_OFFSET + extra
    stored = store_timestamp_ms.to_bytes(8, signed=True) + store_host
    record[place : place + len(stored)] = stored
    if record.startswith(PROPERTY_CRC_PREFIX, len(record) - PROPERTY_CRC_LENGTH):
        record[-PROPERTY_CRC_LENGTH:] = property_crc(record)
