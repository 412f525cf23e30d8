"""Commit-log records: reading them back, and the parser that recovery and dispatch walk a file with.

Writing is in `raymq.record.encode`, the layout in `raymq.record.layout`; their public names are here too. A record that
was cut or damaged raises RecordError (or is reported as failed, by `check_record`), whatever its bytes: nothing here
reads outside the buffer it is given. spec/storage.md §1 (layout) and §5 (record parser).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from raymq.delay import DELAY_LEVELS_MS, is_waiting_topic, waiting_code
from raymq.message import (
    PROPERTY_KEYS,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    RESERVED_PROPERTIES,
    MessageExt,
)
from raymq.record.compression import decompress
from raymq.record.crc import PROPERTY_CRC_LENGTH, property_crc
from raymq.record.encode import EncodedBatch, ProducerSequence, Waiting, encode_batch, stamp, validate_batch
from raymq.record.hashing import tags_code
from raymq.record.java_text import decode_utf8
from raymq.record.layout import (
    BLANK_LENGTH,
    BLANK_MAGIC,
    BODY_OFFSET,
    HEADERS,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_HOSTS_MASK,
    UNIT_DTYPE,
    RecordError,
    decode_host,
    decode_properties,
    encode_blank,
    encode_host,
    encode_properties,
)

__all__ = [
    "BLANK_LENGTH",
    "BLANK_MAGIC",
    "MAGIC_V1",
    "MAGIC_V2",
    "MIN_RECORD_SIZE",
    "UNIT_DTYPE",
    "DispatchView",
    "EncodedBatch",
    "ProducerSequence",
    "RecordCheck",
    "RecordError",
    "Waiting",
    "check_record",
    "decode_host",
    "decode_properties",
    "decode_record",
    "decode_records",
    "dispatch_view",
    "encode_batch",
    "encode_blank",
    "encode_host",
    "encode_properties",
    "record_starts",
    "stamp",
    "validate_batch",
]

Buffer = bytes | bytearray | memoryview

_HEADER: Final = HEADERS[0]
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_INTS: Final = struct.Struct(">ii")
_CHECKED: Final = struct.Struct(">iii24xi44xi")
"""total_size, magic, body_crc, sys_flag and, with IPv4 hosts, body_size."""
_TOPIC_SIZE_MAX: Final = (0, 127, 32767)
"""Indexed by the width of the topic's length field; both are signed in Java."""


class RecordCheck(NamedTuple):
    """What the record parser says of a position: `size` and `ok` are (record's size, True), (0, True) for a BLANK,
    (-1, False) for no record, (size, False) for a record whose length fields disagree with its size."""

    size: int
    ok: bool

    @property
    def is_blank(self) -> bool:
        return self.ok and self.size == 0


_BLANK_CHECK: Final = RecordCheck(0, True)
_NO_RECORD: Final = RecordCheck(-1, False)


def check_record(
    buffer: Buffer, position: int = 0, *, check_crc: bool = True, check_property_crc: bool = False
) -> RecordCheck:
    """The record parser of spec/storage.md §5 at `position` of `buffer`, whose end is the end of the file.

    `check_crc` compares the body's CRC, `check_property_crc` the property CRC (a record without one fails). Never
    raises for what is in the buffer. A record whose fields would lie outside the buffer is no record.
    """
    limit = len(buffer)
    if not 0 <= position <= limit - MIN_RECORD_SIZE:
        return _check_tail(buffer, position)
    total, magic, crc, sys_flag, body_size = _CHECKED.unpack_from(buffer, position)
    if total > limit - position:
        return _NO_RECORD
    if magic == MAGIC_V1:
        topic_width = 1
    elif magic == MAGIC_V2:
        topic_width = 2
    else:
        return _BLANK_CHECK if magic == BLANK_MAGIC else _NO_RECORD
    body = position + BODY_OFFSET
    if sys_flag & SYS_FLAG_HOSTS_MASK:
        body = position + HEADERS[(sys_flag >> 4) & 3].size
        if body > limit:
            return _NO_RECORD
        (body_size,) = _INT.unpack_from(buffer, body - 4)
    topic = body + body_size
    if body_size < 0 or topic + topic_width > limit:
        return _NO_RECORD
    if check_crc and body_size and crc32(buffer[body:topic]) & 0x7FFFFFFF != crc:
        return _NO_RECORD
    topic_size = buffer[topic] if topic_width == 1 else _SHORT.unpack_from(buffer, topic)[0]
    properties = topic + topic_width + topic_size
    if not 0 <= topic_size <= _TOPIC_SIZE_MAX[topic_width] or properties + 2 > limit:
        return _NO_RECORD
    (properties_size,) = _SHORT.unpack_from(buffer, properties)
    end = properties + 2 + properties_size
    if properties_size < 0 or end > limit:
        return _NO_RECORD
    if end - position != total:
        return RecordCheck(total, False)
    if check_property_crc and not _property_crc_holds(buffer[position:end], properties_size):
        return _NO_RECORD
    return RecordCheck(total, True)


def _check_tail(buffer: Buffer, position: int) -> RecordCheck:
    """`check_record` where no record fits any more: a BLANK or nothing."""
    remaining = len(buffer) - position
    if position < 0 or remaining < BLANK_LENGTH:
        return _NO_RECORD
    total, magic = _INTS.unpack_from(buffer, position)
    return _BLANK_CHECK if magic == BLANK_MAGIC and total <= remaining else _NO_RECORD


def _property_crc_holds(record: Buffer, properties_size: int) -> bool:
    return properties_size >= PROPERTY_CRC_LENGTH and record[-PROPERTY_CRC_LENGTH:] == property_crc(record)


def record_starts(buffer: Buffer) -> NDArray[np.int64]:
    """The positions of the back-to-back records that fill `buffer`, by their total sizes alone. RecordError when these
    do not end exactly at its end."""
    starts = []
    position, limit, unpack_from = 0, len(buffer), _INT.unpack_from
    while position <= limit - MIN_RECORD_SIZE:
        starts.append(position)
        (size,) = unpack_from(buffer, position)
        if size < MIN_RECORD_SIZE:
            raise RecordError(f"the record at byte {position} claims a size of {size} bytes")
        position += size
    if position != limit:
        raise RecordError(f"the records end at byte {position} of {limit}")
    return np.array(starts, dtype=np.int64)


def decode_record(buffer: Buffer, position: int = 0, *, broker_name: str = "", check_crc: bool = True) -> MessageExt:
    """The message whose record starts at `position` of `buffer`, its body decompressed. RecordError on any damage."""
    if position < 0 or position + MIN_RECORD_SIZE > len(buffer):
        raise RecordError(f"no record fits at byte {position} of {len(buffer)}")
    (size,) = _INT.unpack_from(buffer, position)
    data = buffer if isinstance(buffer, bytes) else bytes(buffer[position : position + max(size, 0)])
    return _decode(data, position if data is buffer else 0, broker_name, check_crc)[0]


def decode_records(buffer: Buffer, *, broker_name: str = "", check_crc: bool = True) -> list[MessageExt]:
    """The messages of the back-to-back records that fill `buffer`. RecordError on any damage."""
    data = bytes(buffer)
    messages = []
    position, limit = 0, len(data)
    while position < limit:
        message, position = _decode(data, position, broker_name, check_crc)
        messages.append(message)
    return messages


def _decode(data: bytes, position: int, broker_name: str, check_crc: bool) -> tuple[MessageExt, int]:
    """The message at `position`, and where its record ends."""
    try:
        values = _HEADER.unpack_from(data, position)
        body = position + BODY_OFFSET
        if values[7] & SYS_FLAG_HOSTS_MASK:
            header = HEADERS[(values[7] >> 4) & 3]
            values = header.unpack_from(data, position)
            body = position + header.size
    except struct.error:
        raise RecordError(f"a record is cut in its header at byte {position}") from None
    # One name for each: slices of the tuple cost more than the names not used.
    # fmt: off
    (
        _, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag,
        born_ms, born, store_ms, store, reconsume_times, _, body_size,
    ) = values
    # fmt: on
    topic_at, properties_at, end = _sections(data, position, body, values)
    stored = data[body:topic_at]
    if check_crc and body_size and crc32(stored) & 0x7FFFFFFF != crc:
        raise RecordError(f"the body's CRC is wrong in the record at byte {position}")
    if sys_flag & SYS_FLAG_COMPRESSED:
        stored = decompress(stored, sys_flag)
    user: dict[str, str] = {}
    system: dict[str, str] = {}
    for piece in decode_utf8(data[properties_at:end]).split("\x02"):
        name, _, value = piece.partition("\x01")
        if value and name:
            if name in RESERVED_PROPERTIES:
                system[name] = value
            else:
                user[name] = value
    keys = system.get(PROPERTY_KEYS)
    store_hex, store_host = _store_host(store)
    offset_id = f"{store_hex}{physical_offset & 0xFFFFFFFFFFFFFFFF:016X}"
    message = _ThawedMessageExt(
        _topic_text(data[topic_at + (1 if magic == MAGIC_V1 else 2) : properties_at - 2]),
        stored,
        system.get(PROPERTY_TAGS),
        () if keys is None else (keys,) if " " not in keys else tuple(filter(None, keys.split(" "))),
        user,
        flag,
        broker_name,
        queue_id,
        queue_offset,
        physical_offset,
        born_ms,
        store_ms,
        decode_host(born),
        store_host,
        system.get(PROPERTY_UNIQ_KEY) or offset_id,
        offset_id,
        reconsume_times,
        sys_flag,
        system,
    )
    message.__class__ = MessageExt
    return message, end


_ThawedMessageExt: Any = make_dataclass(
    "_ThawedMessageExt", [(field.name, field.type) for field in fields(MessageExt)], slots=True
)
"""MessageExt with the same slots but not frozen. A frozen dataclass sets each field through `object.__setattr__`, which
takes 1.7 µs a message; making this and turning it into a MessageExt 0.3 µs. Decoding is a consumer's hot path."""


def _sections(data: Buffer, position: int, body: int, values: tuple[Any, ...]) -> tuple[int, int, int]:
    """Where the topic's length, the properties and the record end, for a record whose header holds `values`.
    RecordError unless everything fits exactly."""
    magic, body_size = values[1], values[14]
    end = position + values[0]
    topic_at = body + body_size
    if body_size >= 0 and topic_at + 3 <= end <= len(data):
        if magic == MAGIC_V1:
            width, topic_size = 1, data[topic_at]
        elif magic == MAGIC_V2:
            width, topic_size = 2, _SHORT.unpack_from(data, topic_at)[0]
        else:
            raise RecordError(f"no record at byte {position}: magic {magic & 0xFFFFFFFF:#x}")
        properties_at = topic_at + width + topic_size + 2
        if (
            0 <= topic_size <= _TOPIC_SIZE_MAX[width]
            and properties_at <= end
            and properties_at + _SHORT.unpack_from(data, properties_at - 2)[0] == end
        ):
            return topic_at, properties_at, end
    raise RecordError(f"the record at byte {position} is cut, or its length fields do not add up to its size")


@lru_cache(maxsize=4096)
def _topic_text(data: bytes) -> str:
    return decode_utf8(data)


@lru_cache(maxsize=1024)
def _store_host(store: bytes) -> tuple[str, str]:
    """A store host in hexadecimal, as offset message ids begin, and as text."""
    return store.hex().upper(), decode_host(store)


class DispatchView(NamedTuple):
    """What dispatch needs of a record: the consume-queue unit, the index keys and the dedup identity.

    `tags_code` is the unit's field, which for a delayed message is its time of delivery (spec/storage.md §2).
    `properties` are all of them, reserved names too. The body is not read.
    """

    size: int
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    store_timestamp_ms: int
    prepared_transaction_offset: int
    tags_code: int
    properties: Mapping[str, str]

    @property
    def message_id(self) -> str | None:
        return self.properties.get(PROPERTY_UNIQ_KEY)

    @property
    def keys(self) -> list[str]:
        """The index keys in order: the unique id, then each business key."""
        keys = [key for key in self.properties.get(PROPERTY_KEYS, "").split(" ") if key]
        message_id = self.message_id
        return [message_id, *keys] if message_id else keys

    @property
    def producer(self) -> ProducerSequence | None:
        """The dedup identity; None when a property is missing or not a number (another writer's record)."""
        properties = self.properties
        producer_id = properties.get(PROPERTY_PRODUCER_ID)
        if producer_id is None:
            return None
        try:
            epoch, sequence = int(properties[PROPERTY_PRODUCER_EPOCH]), int(properties[PROPERTY_SEQUENCE])
        except (KeyError, ValueError):
            return None
        return ProducerSequence(producer_id, epoch, sequence)


def dispatch_view(
    buffer: Buffer, position: int = 0, *, delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
) -> DispatchView:
    """What dispatch needs of the record at `position`. RecordError when its fields do not fit; no CRC is checked.

    `delay_levels_ms` are the store's, for the unit of a delayed message.
    """
    if position < 0:
        raise RecordError(f"no record at byte {position}")
    try:
        values = _HEADER.unpack_from(buffer, position)
        hosts = (values[7] >> 4) & 3
        if hosts:
            values = HEADERS[hosts].unpack_from(buffer, position)
    except struct.error:
        raise RecordError(f"a record is cut in its header at byte {position}") from None
    total, magic = values[0], values[1]
    topic_at, properties_at, end = _sections(buffer, position, position + HEADERS[hosts].size, values)
    topic = _topic_text(bytes(buffer[topic_at + (1 if magic == MAGIC_V1 else 2) : properties_at - 2]))
    properties = decode_properties(bytes(buffer[properties_at:end]))
    code = waiting_code(topic, values[3], properties, values[10], delay_levels_ms) if is_waiting_topic(topic) else None
    if code is None:
        code = tags_code(properties.get(PROPERTY_TAGS))
    return DispatchView(
        total, topic, values[3], values[5], values[6], values[7], values[10], values[13], code, properties
    )
