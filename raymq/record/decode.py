"""Decodes commit-log records into messages (spec/storage.md §1).

Encoding is in `raymq.record.encode`, the layout in `raymq.record.layout`, the parser that recovery walks a file with in
`raymq.record.check`. A record that was cut or damaged raises RecordError, whatever its bytes: nothing here reads
outside the buffer it is given.
"""

from __future__ import annotations

from functools import lru_cache

from raymq.java_text import decode_utf8
from raymq.message import (
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    RESERVED_PROPERTIES,
    MessageExt,
)
from raymq.record.compression import decompress
from raymq.record.crc import body_crc
from raymq.record.layout import (
    MIN_RECORD_SIZE,
    SYS_FLAG_COMPRESSED,
    Buffer,
    RecordError,
    decode_host,
    find_sections,
    unpack_header,
)


def decode_record(buffer: Buffer, position: int = 0, *, broker_name: str = "", check_crc: bool = True) -> MessageExt:
    """The message whose record starts at `position` of `buffer`, its body decompressed. RecordError on any damage."""
    if position < 0 or position + MIN_RECORD_SIZE > len(buffer):
        raise RecordError(f"no record fits at byte {position} of {len(buffer)}")
    if isinstance(buffer, bytes):
        return _decode(buffer, position, broker_name, check_crc)[0]
    # The sections are checked before anything is copied: a damaged size may name the rest of a mapped file.
    end = find_sections(buffer, position, unpack_header(buffer, position))[-1]
    return _decode(bytes(buffer[position:end]), 0, broker_name, check_crc)[0]


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
    """The message at `position`, and the position behind its record."""
    header = unpack_header(data, position)
    # One name for each: slices of the tuple cost more than the names not used.
    # fmt: off
    (
        _, _, crc, queue_id, flag, queue_offset, physical_offset, sys_flag,
        born_ms, born, store_ms, store, reconsume_times, _, body_size,
    ) = header
    # fmt: on
    body_at, body_end, topic_at, properties_at, end = find_sections(data, position, header)
    stored = data[body_at:body_end]
    if check_crc and body_size and body_crc(stored) != crc:
        raise RecordError(f"the body's CRC is wrong in the record at byte {position}")
    if sys_flag & SYS_FLAG_COMPRESSED:
        stored = decompress(stored, sys_flag)
    user, system = split_properties(data[properties_at:end])
    store_hex, store_host = store_host_of(store)
    offset_id = f"{store_hex}{physical_offset & 0xFFFFFFFFFFFFFFFF:016X}"
    values = (
        topic_text(data[topic_at : properties_at - 2]),
        stored,
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
    return MessageExt.decoded(values), end


def split_properties(data: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """The user's properties and the reserved ones in `data`, as `decode_properties` of the layout reads them."""
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
    """The keys in the text of the property KEYS."""
    if keys is None:
        return ()
    return (keys,) if " " not in keys else tuple(filter(None, keys.split(" ")))


@lru_cache(maxsize=4096)
def topic_text(data: bytes) -> str:
    """The topic whose bytes in a record are `data`; the same few come again and again."""
    return decode_utf8(data)


@lru_cache(maxsize=1024)
def store_host_of(store: bytes) -> tuple[str, str]:
    """A store host in hexadecimal, as offset message ids begin, and as text."""
    return store.hex().upper(), decode_host(store)
