"""The layout of a commit-log record: the offset of each field, functions that read the header, and the encodings of
hosts and properties (spec/storage.md §1).

A record is big-endian. The following offsets are for IPv4 hosts. An IPv6 host is 12 bytes longer and shifts all later
fields:

    | total_size 4 | magic 4 | body_crc 4 | queue_id 4 | flag 4 | queue_offset 8 | physical_offset 8 | sys_flag 4 |
    0              4         8            12           16       20               28                  36
    | born_timestamp 8 | born_host 8/20 | store_timestamp 8 | store_host 8/20 | reconsume_times 4 |
    40                 48               56                  64                72
    | prepared_transaction_offset 8 | body_size 4 | body | topic_size 1 (V1) or 2 (V2) | topic | props_size 2 | props |
    76                              84            88

If the next record does not fit into the rest of a file, the rest starts with a BLANK: its length (4) and the BLANK's
own magic (4).
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import InvalidArgumentError, MessageIllegalError, RaymqError
from raymq.common.java_text import decode_utf8
from raymq.common.message import MAX_PROPERTIES_BYTES

Buffer = bytes | bytearray | memoryview

# Magic numbers of records and of a BLANK. The topic length of a record has one byte (V1) or two bytes (V2).
MAGIC_V1: Final = -626843481
MAGIC_V2: Final = -626843477
BLANK_MAGIC: Final = -875286124
BLANK_LENGTH: Final = 8

# Positions of a record's fields, in bytes from the start of a record with IPv4 hosts.
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
RECONSUME_TIMES_OFFSET: Final = 72
BODY_SIZE_OFFSET: Final = 84
BODY_OFFSET: Final = 88
IPV6_EXTRA: Final = 12
"""Number of bytes by which an IPv6 host in a record's header shifts the later fields."""
IPV6_HOST_BYTES: Final = 20
MIN_RECORD_SIZE: Final = 91
"""Minimum size of a record in bytes: IPv4 hosts, an empty body, an empty topic and no properties."""

# The bits of a record's sys flag.
SYS_FLAG_COMPRESSED: Final = 0x1
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
TOPIC_SIZE_MAX: Final = (0, V1_TOPIC_SIZE_MAX, 32767)
"""Maximum length of a topic in bytes, indexed by the width of the record's topic-length field (1 or 2 bytes). The field
is signed in Java."""

UNIT_DTYPE: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
"""numpy type of a consume-queue unit (entry), 20 bytes (spec/storage.md §2)."""
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
"""numpy type of a batch consume-queue unit (entry), 46 bytes. The unit's record contains `count` messages from queue
offset `base_offset` on."""
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
"""The header fields that have the same offset in every record, with their numpy types. They are used to read many
records at a time."""

HEADERS: Final = tuple(
    struct.Struct(f">iiiiiqqiq{born}sq{store}siqi") for born, store in ((8, 8), (20, 8), (8, 20), (20, 20))
)
"""Structs of a record's header fields, from the first field to body_size. The index is the sum of the sys flag's host
bits: 1 for an IPv6 born host, 2 for an IPv6 store host."""
_IPV4_HEADER: Final = HEADERS[0]
_HOSTS_SHIFT: Final = 4
_BLANK: Final = struct.Struct(">ii")
_PORT: Final = struct.Struct(">i")
INT: Final = struct.Struct(">i")
INTS: Final = struct.Struct(">ii")
SHORT: Final = struct.Struct(">h")


class RecordError(RaymqError):
    """Raised for bytes that are not a complete, intact record. Most readers convert this error into
    BodyUnreadableError. The class derives from RaymqError, so that a command reports the error without a traceback.

    `reason`: the damage, without a position; readers add the queue and offset.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text


HeaderFields = tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int]


class RecordHeader(NamedTuple):
    """A record's header fields, in their order on disk; spec/storage.md §1 explains each field.

    Times are in milliseconds. Hosts have the form of `encode_host`'s result. `body_size` is in bytes, as stored.
    """

    total_size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: bytes
    store_timestamp_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body_size: int

    def encode(self) -> bytes:
        """Return the header's bytes as in a record. The sys flag determines the length of the host fields."""
        return header_struct(self.sys_flag).pack(*self)


def header_struct(sys_flag: int) -> struct.Struct:
    """Return the struct of a record header's fields, for the host families (IPv4 or IPv6) in `sys_flag`. Encoders use
    the struct for many records."""
    return HEADERS[(sys_flag & SYS_FLAG_HOSTS_MASK) >> _HOSTS_SHIFT]


def header_size(sys_flag: int) -> int:
    """Return the number of bytes before the body of a record, for the host families (IPv4 or IPv6) in `sys_flag`.
    `sys_flag` may be only the low byte of the flag."""
    return HEADERS[(sys_flag & SYS_FLAG_HOSTS_MASK) >> _HOSTS_SHIFT].size


def header_size_at(buffer: Buffer, position: int = 0) -> int:
    """Return the number of bytes before the body of the record at `position` of `buffer`. Raises IndexError if `buffer`
    ends before the record's sys flag."""
    return header_size(buffer[position + SYS_FLAG_OFFSET + 3])


def read_header(buffer: Buffer, position: int = 0) -> RecordHeader:
    """Return the header of the record at `position` of `buffer`, without checks. Raises RecordError if `buffer` ends
    inside the header."""
    return RecordHeader._make(unpack_header(buffer, position))


def unpack_header(buffer: Buffer, position: int) -> HeaderFields:
    """Return the record header at `position`, as `read_header` does, but as a plain tuple. A plain tuple is faster for
    readers that read every record of a fetch."""
    try:
        fields = _IPV4_HEADER.unpack_from(buffer, position)
        # if the sys flag (header field 7) states an IPv6 host, the header is longer
        if fields[7] & SYS_FLAG_HOSTS_MASK:
            return header_struct(fields[7]).unpack_from(buffer, position)
        return fields
    except struct.error:
        raise RecordError(
            f"the header of the record at byte {position} is incomplete", "the record's header is incomplete"
        ) from None


def store_timestamp_at(buffer: Buffer, position: int) -> int:
    """Return the store timestamp of the record at `position`, in ms since 1970. Raises RecordError if `buffer` ends
    inside the header."""
    return unpack_header(buffer, position)[10]


def find_sections(buffer: Buffer, position: int, header: HeaderFields) -> tuple[int, int, int, int, int]:
    """Return positions in `buffer` for the record at `position`: the start and end of the body, the start of the
    topic's text, the start of the properties, and the end of the record. The topic's text ends two bytes before the
    properties.

    Raises RecordError unless all length fields fit exactly.
    """
    size, magic, sys_flag, body_size = header[0], header[1], header[7], header[14]
    body_at = position + (header_size(sys_flag) if sys_flag & SYS_FLAG_HOSTS_MASK else BODY_OFFSET)
    body_end = body_at + body_size
    end = position + size
    if body_size >= 0 and body_end + 3 <= end <= len(buffer):
        if magic == MAGIC_V1:
            width, topic_size = 1, buffer[body_end]
        elif magic == MAGIC_V2:
            width, topic_size = 2, SHORT.unpack_from(buffer, body_end)[0]
        else:
            reason = f"{magic & 0xFFFFFFFF:#x} is not the magic of a record"
            raise RecordError(f"no record at byte {position}: magic {magic & 0xFFFFFFFF:#x}", reason)
        topic_at = body_end + width
        properties_at = topic_at + topic_size + 2
        if (
            0 <= topic_size <= TOPIC_SIZE_MAX[width]
            and properties_at <= end
            and properties_at + SHORT.unpack_from(buffer, properties_at - 2)[0] == end
        ):
            return body_at, body_end, topic_at, properties_at, end
    reason = "the record is incomplete, or its length fields do not add up to its size"
    raise RecordError(
        f"the record at byte {position} is incomplete, or its length fields do not add up to its size", reason
    )


def encode_blank(remaining: int) -> bytes:
    """Return the 8 bytes of a BLANK, which ends a commit-log file. `remaining`: the number of unused bytes in the file,
    including these 8 bytes."""
    return _BLANK.pack(remaining, BLANK_MAGIC)


@lru_cache(maxsize=1024)
def encode_host(ip: str, port: int) -> bytes:
    """Encode a host as in a record: 4 or 16 bytes of the address, then 4 bytes of the port.

    Raises InvalidArgumentError unless `ip` is an IP address and `port` is in range.
    """
    try:
        address = ipaddress.ip_address(ip.partition("%")[0]).packed
        return address + _PORT.pack(port)
    except (ValueError, struct.error):
        raise InvalidArgumentError(f"{ip!r} port {port!r} is not an IP address with a port") from None


@lru_cache(maxsize=4096)
def decode_host(host: bytes) -> str:
    """Return an encoded host as text: `192.168.1.2:10911` or `[::1]:10911`."""
    (port,) = _PORT.unpack_from(host, len(host) - 4)
    if len(host) == 8:
        return f"{socket.inet_ntop(socket.AF_INET, host[:4])}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, host[:16])}]:{port}"


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Encode `properties` as on disk: name 0x01 value 0x02 for each property, in the map's order, UTF-8, without
    escapes.

    Raises MessageIllegalError if a name or a value is empty or contains a separator, because no reader could decode the
    property. Raises MessageIllegalError also if the result exceeds 32767 bytes.
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
    """Decode the properties in `data` as RocketMQ does.

    A property without a name or a value is dropped. The last 0x02 may be missing. Only the first 0x01 of a property
    separates name and value. If a name is repeated, the last property with this name counts. Invalid UTF-8 becomes
    replacement characters, as many as in Java.
    """
    properties = {}
    for piece in decode_utf8(data).split("\x02"):
        name, _, value = piece.partition("\x01")
        if value and name:
            properties[name] = value
    return properties


def record_ends(sizes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the end position of each record in a sequence of records. `sizes`: the records' sizes in bytes. The first
    record starts at position 0."""
    ends = sizes.astype(np.int64)
    return ends.cumsum() if len(ends) > 1 else ends


def windows(data: bytes | bytearray | memoryview | NDArray[np.uint8], width: int) -> NDArray[np.void]:
    """Return all windows of `width` bytes in `data` without a copy; element i starts at byte i. Indexing the result
    with an array of positions reads or writes one field of many records at a time. A position less than `width` bytes
    before the end raises IndexError."""
    return np.ndarray((max(len(data) - width + 1, 0),), void_dtype(width), data, 0, (1,))


@lru_cache(maxsize=1024)
def void_dtype(width: int) -> np.dtype[np.void]:
    """Return the numpy type for values of `width` bytes that numpy does not interpret."""
    return np.dtype(f"V{width}")
