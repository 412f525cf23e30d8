"""Decodes commit-log records into messages (spec/storage.md §1).

All readers treat damage in the same way. They always deliver intact records, and deliver a damaged record as a message
whose `body` raises BodyUnreadableError. The reader's offset continues after that message. `read_record` decodes one
record in this way, and `raymq.records.kernels.messages` and `raymq.records.kernels.columns` decode many. In contrast,
`decode_record` raises an error for a damaged record.

Encoding is in `raymq.records.format.encode`, the layout in `raymq.records.format.layout`, recovery's parser in
`raymq.records.format.check`. No function reads outside of its buffer, whatever bytes a record has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from raymq.common.errors import BodyUnreadableError
from raymq.common.java_text import decode_utf8
from raymq.common.message import (
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    RESERVED_PROPERTIES,
    MessageExt,
    MessageQueue,
)
from raymq.records.format.compression import decompress
from raymq.records.format.crc import SEAL_WRONG, body_crc, seal_holds
from raymq.records.format.layout import (
    MIN_RECORD_SIZE,
    SYS_FLAG_COMPRESSED,
    Buffer,
    HeaderFields,
    RecordError,
    decode_host,
    find_sections,
    unpack_header,
)
from raymq.records.format.places import RecordPlace

CRC_WRONG: Final = "the body's CRC is wrong"


def read_record(buffer: Buffer, position: int, place: RecordPlace, *, check_crc: bool = True) -> MessageExt:
    """Return the message of the record at `position` of `buffer`. Never raises an error for damaged bytes.

    If the body is unreadable, the message's `body_error` has the reason and all other fields are as stored. If the
    record is damaged, or does not have the queue and offsets that `place` expects, the message only has the fields of
    `place`.
    """
    try:
        header, sections = _whole_record(buffer, position)
        place.check(header, buffer[sections[2] : sections[3] - 2])
        data = bytes(buffer[position : sections[-1]])
        sections = tuple([at - position for at in sections])
        if check_crc:
            _check_seal(data, 0, header, sections)
    except RecordError as error:
        return place.damaged(error.reason)
    body: bytes | BodyUnreadableError
    try:
        body = _body(data, header, sections, check_crc)
    except RecordError as error:
        queue = place.queue
        if not queue.topic:
            topic = topic_text(data[sections[2] : sections[3] - 2])
            queue = MessageQueue(topic, queue.broker_name, header[3])
        body = BodyUnreadableError(str(queue), header[5], header[6], error.reason)
    return _message(data, header, sections, place.queue.broker_name, body)


def _check_seal(data: bytes, position: int, header: HeaderFields, sections: tuple[int, ...]) -> None:
    """Raise RecordError if the record's property CRC is wrong but the CRC of its body is right. If both CRCs are wrong,
    raise nothing: the damage then is reported as damage of the body."""
    if not seal_holds(memoryview(data)[position : sections[-1]]):
        body = data[sections[0] : sections[1]]
        if not body or body_crc(body) == header[2]:
            raise RecordError(f"the record at byte {position} does not match its property CRC", SEAL_WRONG)


def _whole_record(buffer: Buffer, position: int) -> tuple[HeaderFields, tuple[int, ...]]:
    """Return the header and the sections (`find_sections`) of the record at `position`. Raises RecordError unless the
    whole record lies in the buffer and its length fields add up."""
    if position < 0 or position + MIN_RECORD_SIZE > len(buffer):
        raise RecordError(
            f"no record fits at byte {position} of {len(buffer)} bytes",
            "the record lies outside the bytes that were read",
        )
    header = unpack_header(buffer, position)
    return header, find_sections(buffer, position, header)


def decode_record(buffer: Buffer, position: int = 0, *, broker_name: str = "", check_crc: bool = True) -> MessageExt:
    """Return the message of the record at `position` of `buffer`, with its body decompressed. Raises RecordError if the
    record is damaged."""
    # Check the positions of the record's parts (header, body, topic, properties) before copying the record. Otherwise a
    # damaged size field could make the copy include the rest of a mapped file.
    header, sections = _whole_record(buffer, position)
    if not isinstance(buffer, bytes):
        buffer, sections = bytes(buffer[position : sections[-1]]), tuple([at - position for at in sections])
        position = 0
    if check_crc:
        _check_seal(buffer, position, header, sections)
    return _message(buffer, header, sections, broker_name, _body(buffer, header, sections, check_crc))


def decode_records(buffer: Buffer, *, broker_name: str = "", check_crc: bool = True) -> list[MessageExt]:
    """Return the messages of the records that fill `buffer` one after another. Raises RecordError if a record is
    damaged."""
    data = bytes(buffer)
    messages = []
    position, limit = 0, len(data)
    while position < limit:
        header = unpack_header(data, position)
        sections = find_sections(data, position, header)
        if check_crc:
            _check_seal(data, position, header, sections)
        messages.append(_message(data, header, sections, broker_name, _body(data, header, sections, check_crc)))
        position = sections[-1]
    return messages


def _body(data: bytes, header: HeaderFields, sections: tuple[int, ...], check_crc: bool) -> bytes:
    """Return the decompressed body of a record. Raises RecordError if the body is damaged."""
    stored = data[sections[0] : sections[1]]
    if check_crc and stored and body_crc(stored) != header[2]:
        raise RecordError(f"the body's CRC is wrong in the record whose body is at byte {sections[0]}", CRC_WRONG)
    sys_flag = header[7]
    return decompress(stored, sys_flag) if sys_flag & SYS_FLAG_COMPRESSED else stored


def _message(
    data: bytes, header: HeaderFields, sections: tuple[int, ...], broker_name: str, body: bytes | BodyUnreadableError
) -> MessageExt:
    """Create a record's message from its header, sections and body."""
    # Assign each header field to a name, even a field that is not used: this is faster than slicing the tuple.
    (
        _,
        _,
        _,
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag,
        born_ms,
        born,
        store_ms,
        store,
        reconsume_times,
        _,
        _,
    ) = header
    # fmt: on
    _, _, topic_at, properties_at, end = sections
    user, system = split_properties(data[properties_at:end])
    store_hex, store_host = store_host_of(store)
    offset_id = f"{store_hex}{physical_offset & 0xFFFFFFFFFFFFFFFF:016X}"
    values: tuple[Any, ...] = (
        topic_text(data[topic_at : properties_at - 2]),
        body,
        system.get(PROPERTY_TAGS),
        split_keys(system.get(PROPERTY_KEYS)),
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
    return MessageExt.decoded(values)


def split_properties(data: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Decode the properties in `data` into two maps: the user's properties and the reserved properties. The rules are
    the same as in `decode_properties` of raymq.records.format.layout."""
    user: dict[str, str] = {}
    system: dict[str, str] = {}
    for piece in decode_utf8(data).split("\x02"):
        name, _, value = piece.partition("\x01")
        if value and name:
            if name in RESERVED_PROPERTIES:
                system[name] = value
            else:
                user[name] = value
    return user, system


def split_keys(keys: str | None) -> tuple[str, ...]:
    """Split the text of the property KEYS into separate keys."""
    if keys is None:
        return ()
    return (keys,) if " " not in keys else tuple(filter(None, keys.split(" ")))


@lru_cache(maxsize=4096)
def topic_text(data: bytes) -> str:
    """Decode the bytes of a record's topic. Results are cached, because few topics occur in many records."""
    return decode_utf8(data)


@lru_cache(maxsize=1024)
def store_host_of(store: bytes) -> tuple[str, str]:
    """Return a store host in two forms: hexadecimal, as in offset message ids, and readable text."""
    return store.hex().upper(), decode_host(store)
