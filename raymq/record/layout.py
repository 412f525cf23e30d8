"""Where each field of a commit-log record is, and the small encodings inside it (spec/storage.md §1).

A record, big-endian; the offsets hold for IPv4 hosts, an IPv6 host is 12 bytes longer and moves what follows:

    | total_size 4 | magic 4 | body_crc 4 | queue_id 4 | flag 4 | queue_offset 8 | physical_offset 8 | sys_flag 4 |
    0              4         8            12           16       20               28                  36
    | born_timestamp 8 | born_host 8/20 | store_timestamp 8 | store_host 8/20 | reconsume_times 4 |
    40                 48               56                  64                72
    | prepared_transaction_offset 8 | body_size 4 | body | topic_size 1 (V1) or 2 (V2) | topic | props_size 2 | props |
    76                              84            88

A file's tail that no record fits in starts with a BLANK: its length (4) and a magic of its own (4).
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.errors import InvalidArgumentError, MessageIllegalError
from raymq.java_text import decode_utf8
from raymq.message import (
    MAX_PROPERTIES_BYTES,
)

MAGIC_V1: Final = -626843481


MAGIC_V2: Final = -626843477


BLANK_MAGIC: Final = -875286124


BLANK_LENGTH: Final = 8


TOTAL_SIZE_OFFSET: Final = 0


MAGIC_OFFSET: Final = 4


BODY_CRC_OFFSET: Final = 8


QUEUE_ID_OFFSET: Final = 12


FLAG_OFFSET: Final = 16


QUEUE_OFFSET_OFFSET: Final = 20


PHYSICAL_OFFSET_OFFSET: Final = 28


SYS_FLAG_OFFSET: Final = 36


BORN_TIMESTAMP_OFFSET: Final = 40


BORN_HOST_OFFSET: Final = 48


STORE_TIMESTAMP_OFFSET: Final = 56


STORE_HOST_OFFSET: Final = 64


BODY_SIZE_OFFSET: Final = 84


BODY_OFFSET: Final = 88


IPV6_EXTRA: Final = 12
"""By how much an IPv6 host moves the fields after it."""


IPV6_HOST_BYTES: Final = 20


MIN_RECORD_SIZE: Final = 91


SYS_FLAG_COMPRESSED: Final = 0x1


SYS_FLAG_MULTI_TAGS: Final = 0x2


SYS_FLAG_TRANSACTION_MASK: Final = 0xC


SYS_FLAG_TRANSACTION_PREPARED: Final = 0x4


SYS_FLAG_TRANSACTION_COMMIT: Final = 0x8


SYS_FLAG_TRANSACTION_ROLLBACK: Final = 0xC


SYS_FLAG_BORN_HOST_IPV6: Final = 0x10


SYS_FLAG_STORE_HOST_IPV6: Final = 0x20


SYS_FLAG_HOSTS_MASK: Final = 0x30


SYS_FLAG_NEED_UNWRAP: Final = 0x40


SYS_FLAG_INNER_BATCH: Final = 0x80


SYS_FLAG_COMPRESSION_TYPE_MASK: Final = 0x700


V1_TOPIC_SIZE_MAX: Final = 127


UNIT_DTYPE: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
"""A consume-queue unit, 20 bytes (spec/storage.md §2)."""


BATCH_UNIT_DTYPE: Final = np.dtype(
    [
        ("physical_offset", ">i8"),
        ("size", ">i4"),
        ("tags_code", ">i8"),
        ("store_timestamp", ">i8"),
        ("base_offset", ">i8"),
        ("count", ">i2"),
        ("compacted_offset", ">i4"),
        ("reserved", ">i4"),
    ]
)
"""A batch consume-queue unit, 46 bytes: a record that holds `count` messages from queue offset `base_offset` on."""


HEAD_FIELDS: Final = (
    ("total_size", ">i4"),
    ("magic", ">i4"),
    ("body_crc", ">i4"),
    ("queue_id", ">i4"),
    ("flag", ">i4"),
    ("queue_offset", ">i8"),
    ("physical_offset", ">i8"),
    ("sys_flag", ">i4"),
)
"""The fields that every record has at the same place, with their numpy types, for reading many records at a time."""


HEADERS: Final = tuple(
    struct.Struct(f">iiiiiqqiq{born}sq{store}siqi") for born, store in ((8, 8), (20, 8), (8, 20), (20, 20))
)
"""The fields up to body_size, indexed by the sys flag's two host bits (`(sys_flag >> 4) & 3`)."""


_BLANK: Final = struct.Struct(">ii")


_PORT: Final = struct.Struct(">i")


class RecordError(Exception):
    """Bytes that are not a complete, undamaged record. Whoever reads them decides what that means."""


def encode_blank(remaining: int) -> bytes:
    """The 8 bytes that end a commit-log file with `remaining` bytes left, these 8 included."""
    return _BLANK.pack(remaining, BLANK_MAGIC)


@lru_cache(maxsize=1024)
def encode_host(ip: str, port: int) -> bytes:
    """A host as in a record: the address' 4 or 16 bytes and the port's 4. InvalidArgumentError unless `ip` is one."""
    try:
        address = ipaddress.ip_address(ip.partition("%")[0]).packed
        return address + _PORT.pack(port)
    except (ValueError, struct.error):
        raise InvalidArgumentError(f"{ip!r} port {port!r} is not an IP address with a port") from None


@lru_cache(maxsize=4096)
def decode_host(host: bytes) -> str:
    """`192.168.1.2:10911` or `[::1]:10911` of a host as in a record."""
    (port,) = _PORT.unpack_from(host, len(host) - 4)
    if len(host) == 8:
        return f"{socket.inet_ntop(socket.AF_INET, host[:4])}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, host[:16])}]:{port}"


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """`properties` as on disk: name 0x01 value 0x02, in the map's order, UTF-8, no escaping.

    MessageIllegalError when a name or a value is empty or holds a separator (it could not be read back), or when the
    result exceeds 32767 bytes.
    """
    pieces = []
    for name, value in properties.items():
        if not name or not value or not {"\x01", "\x02"}.isdisjoint(name + value):
            raise MessageIllegalError(f"property {name!r}={value!r} is empty or contains a separator (\\x01, \\x02)")
        pieces.append(f"{name}\x01{value}\x02")
    try:
        data = "".join(pieces).encode()
    except UnicodeEncodeError as error:
        raise MessageIllegalError(f"a property cannot be written as UTF-8: {error}") from None
    if len(data) > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(f"properties of {len(data)} bytes exceed the limit of {MAX_PROPERTIES_BYTES} bytes")
    return data


def decode_properties(data: bytes) -> dict[str, str]:
    """The properties in `data`, RocketMQ's way: a piece without a name or a value is dropped, the last 0x02 may be
    missing, only the first 0x01 of a piece separates, the last of equal names wins. Text that is not UTF-8 gets
    replacement characters, as many as in Java."""
    properties = {}
    for piece in decode_utf8(data).split("\x02"):
        name, _, value = piece.partition("\x01")
        if value and name:
            properties[name] = value
    return properties


def record_ends(sizes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where each of the records of these sizes ends that lie back to back from 0 on."""
    ends = sizes.astype(np.int64)
    return ends.cumsum() if len(ends) > 1 else ends


def windows(data: bytes | bytearray | memoryview | NDArray[np.uint8], width: int) -> NDArray[np.void]:
    """All `width`-byte windows of `data`, element i starting at byte i, without a copy. Indexing it with an array of
    positions reads or writes one field of many records at a time; a position too near the end is an IndexError."""
    return np.ndarray((max(len(data) - width + 1, 0),), void_dtype(width), data, 0, (1,))


@lru_cache(maxsize=1024)
def void_dtype(width: int) -> np.dtype[np.void]:
    return np.dtype(f"V{width}")


Buffer = bytes | bytearray | memoryview


IPV4_HEADER: Final = HEADERS[0]


INT: Final = struct.Struct(">i")


SHORT: Final = struct.Struct(">h")


INTS: Final = struct.Struct(">ii")


TOPIC_SIZE_MAX: Final = (0, 127, 32767)
"""Indexed by the width of the topic's length field; both are signed in Java."""
