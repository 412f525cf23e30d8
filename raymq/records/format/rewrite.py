"""Rewrites a record for another queue.

The scheduler rewrites a delayed message when it is due. The broker rewrites a message that a consumer sent back
(actors.core.broker.send_back). A reader of a light queue rewrites each of the queue's records.

The new record keeps body, flags, born host and born time. The scheduler also keeps the reconsume times and the text of
the properties, including DELAY, REAL_TOPIC and REAL_QID, as RocketMQ does (spec/storage.md §12). Only raymq's own three
properties are replaced: they identify the producer of the new record.

A new record always has a correct CRC of its body, so that recovery and replicas treat the record as complete. If the
old record's body does not match its CRC, the new record's sys flag names a compression type that does not exist. So
readers of this body get an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from raymq.common.errors import MessageIllegalError
from raymq.common.java_text import decode_utf8
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_INNER_MULTI_QUEUE_OFFSET,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
)
from raymq.records.format.crc import PROPERTY_CRC_LENGTH, PROPERTY_CRC_PLACEHOLDER, PROPERTY_CRC_PREFIX, body_crc
from raymq.records.format.encode import ProducerSequence, topic_part
from raymq.records.format.layout import (
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_TYPE_MASK,
    SYS_FLAG_STORE_HOST_IPV6,
    SYS_FLAG_TRANSACTION_MASK,
    RecordError,
    RecordHeader,
    decode_properties,
    encode_properties,
    find_sections,
    header_size,
    read_header,
)

EXCHANGED_NAMES: Final = tuple(
    f"{name}\x01".encode()
    for name in (
        PROPERTY_INNER_MULTI_QUEUE_OFFSET,
        PROPERTY_PRODUCER_ID,
        PROPERTY_PRODUCER_EPOCH,
        PROPERTY_SEQUENCE,
    )
)
"""The beginnings (name and separator) of the properties that are not copied into a new record. Instead the new record
gets the properties of its own producer (`producer_text`), and the store assigns its offsets in light queues."""


_REAL_NAMES: Final = (f"{PROPERTY_REAL_TOPIC}\x01".encode(), f"{PROPERTY_REAL_QUEUE_ID}\x01".encode())


@dataclass(frozen=True, slots=True)
class RecordParts:
    """The decoded fields of a record. `properties`: as on disk, without the property CRC. `sealed`: True if the record
    had a property CRC."""

    header: RecordHeader
    body: bytes
    topic: str
    properties: bytes
    sealed: bool

    @property
    def body_is_intact(self) -> bool:
        """True if the record's body matches the CRC in the header."""
        return not self.body or body_crc(self.body) == self.header.body_crc


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """A record of a topic of delayed messages, with its target queue. `deliver_at_ms`: the delivery time; None if the
    message does not wait for a delivery time."""

    parts: RecordParts
    real_topic: str
    real_queue_id: int
    tags: str | None
    deliver_at_ms: int | None


def split_record(record: bytes | memoryview) -> RecordParts:
    """Split one whole record into its fields. Does not check the CRCs. Raises RecordError if the length fields do not
    match the length of `record`."""
    data = bytes(record)
    header = read_header(data)
    body_at, body_end, topic_at, properties_at, end = find_sections(data, 0, header)
    if end != len(data):
        raise RecordError(f"expected one record of {len(data)} bytes, but the record ends at byte {end}")
    properties = data[properties_at:]
    sealed = properties[-PROPERTY_CRC_LENGTH:].startswith(PROPERTY_CRC_PREFIX)
    return RecordParts(
        header,
        data[body_at:body_end],
        decode_utf8(data[topic_at : properties_at - 2]),
        properties[:-PROPERTY_CRC_LENGTH] if sealed else properties,
        sealed,
    )


def read_waiting(record: bytes | memoryview) -> WaitingRecord:
    """Split one whole record of a delayed message into its fields and its target queue. Raises RecordError if the
    record is damaged, or does not name its target queue."""
    parts = split_record(record)
    table = decode_properties(parts.properties)
    deliver_at = table.get(PROPERTY_TIMER_DELIVER_MS)
    try:
        return WaitingRecord(
            parts,
            table[PROPERTY_REAL_TOPIC],
            int(table[PROPERTY_REAL_QUEUE_ID]),
            table.get(PROPERTY_TAGS),
            None if deliver_at is None else int(deliver_at),
        )
    except KeyError as missing:
        raise RecordError(f"the record has no property {missing}") from None
    except ValueError as error:
        raise RecordError(f"the record cannot be read: {error}") from None


def move_record(
    record: WaitingRecord, topic: str, queue_id: int, *, producer: ProducerSequence, store_host_ipv6: bool
) -> bytearray:
    """Return the bytes of a new record for queue `queue_id` of `topic`, ready for `stamp_one`.

    Raises MessageIllegalError if the message's properties are too long, and IllegalNameError if `topic` is not a legal
    name.
    """
    return bytearray(
        build_record(
            record.parts,
            topic,
            queue_id,
            {},
            producer=producer,
            reconsume_times=record.parts.header.reconsume_times,
            store_host_ipv6=store_host_ipv6,
        )
    )


def build_record(
    record: RecordParts,
    topic: str,
    queue_id: int,
    exchanged: Mapping[str, str],
    *,
    producer: ProducerSequence | None,
    reconsume_times: int,
    store_host_ipv6: bool,
    transaction_bits: int = 0,
    prepared_transaction_offset: int = 0,
) -> bytes:
    """Return the bytes of a new record for queue `queue_id` of `topic`. The properties in `exchanged` replace the
    record's own properties of the same names; an empty value removes the property. The new record does not inherit the
    old record's transaction fields.

    Without `producer` no store detects duplicates of the record. The fields that the store sets are zero. A body that
    does not match its CRC is marked as unreadable (see the module's docstring). Raises MessageIllegalError if the
    properties exceed 32767 bytes, and IllegalNameError if `topic` is not a legal name.
    """
    magic, topic_text = topic_part(topic)
    names = (*EXCHANGED_NAMES, *(f"{name}\x01".encode() for name in exchanged))
    pieces = [piece for piece in record.properties.split(b"\x02") if piece and not piece.startswith(names)]
    pieces += [f"{name}\x01{value}".encode() for name, value in exchanged.items() if value]
    kept = b"".join([piece + b"\x02" for piece in pieces])
    identity = b"" if producer is None else producer_text(producer)
    properties = kept + identity + (PROPERTY_CRC_PLACEHOLDER if record.sealed else b"")
    if len(properties) > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(
            f"the properties take {len(properties)} bytes; at most {MAX_PROPERTIES_BYTES} are allowed"
        )
    kept_flags = record.header.sys_flag & ~(SYS_FLAG_STORE_HOST_IPV6 | SYS_FLAG_TRANSACTION_MASK)
    sys_flag = kept_flags | transaction_bits | store_host_ipv6 * SYS_FLAG_STORE_HOST_IPV6
    crc = record.header.body_crc
    if not record.body_is_intact:
        sys_flag |= SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_TYPE_MASK
        crc = body_crc(record.body)
    header = record.header._replace(
        total_size=header_size(sys_flag) + len(record.body) + len(topic_text) + 2 + len(properties),
        magic=magic,
        body_crc=crc,
        queue_id=queue_id,
        queue_offset=0,
        physical_offset=0,
        sys_flag=sys_flag,
        store_timestamp_ms=0,
        store_host=bytes(20 if store_host_ipv6 else 8),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
    )
    return b"".join((header.encode(), record.body, topic_text, len(properties).to_bytes(2), properties))


def light_record(record: bytes | memoryview, topic: str, queue_offset: int) -> bytes:
    """Return a stored record as a reader of light queue `topic` receives it. The returned record has the light queue's
    topic, and the queue offset from which it was read.

    All other fields are unchanged, so the record still has its position in the log. REAL_TOPIC and REAL_QID name the
    record's original queue. A property CRC is removed, because it would be wrong. Raises RecordError if the record is
    damaged, or if its properties do not name this offset of the light queue.
    """
    parts = split_record(record)
    table = decode_properties(parts.properties)
    names, offsets = (
        table.get(name, "").split(",") for name in (PROPERTY_INNER_MULTI_DISPATCH, PROPERTY_INNER_MULTI_QUEUE_OFFSET)
    )
    if (topic, str(queue_offset)) not in zip(names, offsets, strict=False):
        raise RecordError(f"the record does not contain offset {queue_offset} of topic {topic!r}")
    magic, topic_text = topic_part(topic)
    sent_to = {PROPERTY_REAL_TOPIC: parts.topic, PROPERTY_REAL_QUEUE_ID: str(parts.header.queue_id)}
    kept = [piece for piece in parts.properties.split(b"\x02") if piece and not piece.startswith(_REAL_NAMES)]
    properties = b"".join([piece + b"\x02" for piece in kept]) + encode_properties(sent_to)
    header = parts.header._replace(
        total_size=header_size(parts.header.sys_flag) + len(parts.body) + len(topic_text) + 2 + len(properties),
        magic=magic,
        queue_id=0,
        queue_offset=queue_offset,
    )
    return b"".join((header.encode(), parts.body, topic_text, len(properties).to_bytes(2), properties))


def producer_text(producer: ProducerSequence) -> bytes:
    """Return the properties that identify a new record's producer, as bytes for a record."""
    return (
        f"{PROPERTY_PRODUCER_ID}\x01{producer.producer_id}\x02{PROPERTY_PRODUCER_EPOCH}\x01{producer.epoch}\x02"
        f"{PROPERTY_SEQUENCE}\x01{producer.first_sequence}\x02"
    ).encode()
