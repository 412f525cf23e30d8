"""Compressed message bodies (spec/storage.md §1, "SYSFLAG bits").

A record's sys flag says whether its body is compressed (bit 0) and how (bits 8-10: LZ4, ZSTD, ZLIB, and 0 for ZLIB in
old data). The formats are those RocketMQ's Java libraries read and write: the LZ4 *frame* format, a Zstandard frame, a
zlib stream. Each message is compressed alone, so that a reader needs one record only.

A body is one such frame or stream, and nothing follows it: bytes behind its end make a body unreadable. RocketMQ's Java
consumers ignore bytes behind a zlib stream, and join several LZ4 or Zstandard frames; no producer of RocketMQ's sends
either.

A store takes bodies of up to its `max_message_size_bytes`, so a reader decompresses bodies of that size, and no larger
ones: whoever sends a body chooses how large it becomes. A reader may read from several stores, whose settings may
change. So a process has one bound, which never falls (`body_max_bytes`): the largest setting of the stores that the
process has opened or called, and at least the default of the setting. A process that reads what another one has fetched
is told the bound with the records (raymq/common/protocol/consume_result.py, raymq/client/predicates/frames.py).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar, cast

import lz4.frame
import zstandard

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.numbers import NOT_NEGATIVE, NumberRange, check_fields
from raymq.records.format.layout import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_TYPE_MASK, RecordError

BytesT = TypeVar("BytesT", bound=bytes | memoryview)

DECOMPRESSED_MAX_BYTES: Final = 64 * 1024 * 1024
"""The budget of decompressed bodies in one table or page, in bytes: 16 bodies of 4 MiB, or 8 times the
stored bytes of a fetch from another node. A table is copied up to twice while it is made, so three times the budget
bounds a reader's memory. Messages beyond the budget are in the next table."""
INNER_BATCH_MAX_BYTES: Final = 64 * 1024 * 1024
"""The bound on the decompressed items of one inner batch, which holds up to 32,767 messages."""
PIECE_BYTES: Final = 256 * 1024
"""The most bytes that `check_compressed` and `decompress_prefix` decompress at a time; a Zstandard block fits."""

_CHECKSUM_BYTES: Final = 4
"""The size of the checksum that may end a Zstandard frame."""


class _Bound:
    """The bound of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.most_bytes = MAX_MESSAGE_SIZE_BYTES


_bound = _Bound()


def body_max_bytes() -> int:
    """The most bytes of a decompressed body. A body that claims more cannot be read."""
    return _bound.most_bytes


def admit_bodies_of(max_message_size_bytes: int) -> None:
    """Let readers in this process decompress bodies of a store with this setting. Thread-safe; never lowers the
    bound."""
    with _bound.lock:
        _bound.most_bytes = max(_bound.most_bytes, max_message_size_bytes)


class CompressionType(IntEnum):
    """The format of a compressed body. The value is that of the sys flag's type bits, unshifted; NONE sets no bit."""

    NONE = 0
    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300


_LEVELS: Final = {
    CompressionType.NONE: (0, 0, 0),
    CompressionType.LZ4: (0, 0, 16),
    CompressionType.ZSTD: (1, 3, 22),
    CompressionType.ZLIB: (1, 5, 9),
}
"""Lowest, default and highest level of each type."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A producer's compression: bodies of `threshold_bytes` or more, with `type` at `level` (None: the type's own
    default; ZLIB's is RocketMQ's 5). InvalidArgumentError for a level the type does not have."""

    type: CompressionType = CompressionType.NONE
    threshold_bytes: int = 4096
    level: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.type, CompressionType):
            raise InvalidArgumentError(f"type must be a CompressionType, not {self.type!r}")
        lowest, _, highest = _LEVELS[self.type]
        ranges = {"threshold_bytes": NOT_NEGATIVE}
        if self.level is not None:
            ranges["level"] = NumberRange(lowest, highest)
        check_fields(self, ranges)

    def compress_body(self, body: BytesT) -> tuple[bytes | BytesT, int]:
        """The bytes to store for `body`, and the sys-flag bits that go with them. A body that is too short or does not
        get smaller is stored as it is, with no bits."""
        if self.type is CompressionType.NONE or len(body) < self.threshold_bytes:
            return body, 0
        compressed = compress(body, self.type, self.level)
        if len(compressed) >= len(body):
            return body, 0
        return compressed, SYS_FLAG_COMPRESSED | self.type


class _Contexts(threading.local):
    """Zstandard's contexts: costly to make, and not to be used by two threads at a time."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_contexts: Final = _Contexts()


def compress(data: bytes | memoryview, type: CompressionType, level: int | None = None) -> bytes:
    """`data` compressed with `type` (at its default level when `level` is None)."""
    if level is None:
        level = _LEVELS[type][1]
    if type is CompressionType.ZLIB:
        return zlib.compress(data, level)
    if type is CompressionType.LZ4:
        # lz4-java, which RocketMQ's consumers use, refuses frames whose blocks refer to each other.
        return cast(bytes, lz4.frame.compress(data, compression_level=level, block_linked=False))
    if type is CompressionType.ZSTD:
        compressor = _contexts.compressors.get(level)
        if compressor is None:
            compressor = _contexts.compressors[level] = zstandard.ZstdCompressor(level=level)
        return compressor.compress(data)
    return bytes(data)


def decompress(data: bytes | memoryview, sys_flag: int, *, max_bytes: int | None = None) -> bytes:
    """The body whose stored bytes are `data`, according to its record's `sys_flag`. `max_bytes` is by default this
    process's bound (`body_max_bytes`).

    RecordError when the data is damaged or incomplete, goes on after its end, is of an unknown type, or would become
    larger than `max_bytes`; memory use stays within that bound.
    """
    if not sys_flag & SYS_FLAG_COMPRESSED:
        return bytes(data)
    if max_bytes is None:
        max_bytes = body_max_bytes()
    bits = sys_flag & SYS_FLAG_COMPRESSION_TYPE_MASK
    try:
        if bits in (0, CompressionType.ZLIB):
            inflater = zlib.decompressobj()
            body, complete, rest = inflater.decompress(data, max_bytes + 1), inflater.eof, inflater.unused_data
        elif bits == CompressionType.LZ4:
            frame = lz4.frame.LZ4FrameDecompressor()
            body, complete, rest = frame.decompress(data, max_length=max_bytes + 1), frame.eof, frame.unused_data
        elif bits == CompressionType.ZSTD:
            return _decompress_zstd(bytes(data), max_bytes)
        else:
            raise RecordError(f"a compression type that is not known: sys flag {sys_flag:#x}")
    except (zlib.error, RuntimeError, EOFError, zstandard.ZstdError) as error:
        raise RecordError(f"a compressed body is damaged: {error}") from None
    _check_end(len(body), complete, rest, max_bytes)
    return body


def _check_end(size: int, complete: bool, rest: bytes | None, max_bytes: int) -> None:
    if size > max_bytes:
        raise RecordError(f"a compressed body is larger than {max_bytes} bytes when decompressed")
    if not complete:
        raise RecordError("a compressed body ends too early")
    if rest:
        raise RecordError(f"a compressed body has {len(rest)} bytes after its end")


def _decompress_zstd(data: bytes, max_bytes: int) -> bytes:
    """A frame that says how long its content is gets just that much memory; one that does not (Java's streams write
    those) gets the whole bound, of which the system backs only the pages that are written to."""
    frame = zstandard.get_frame_parameters(data)
    size, is_known = frame.content_size, frame.content_size != zstandard.CONTENTSIZE_UNKNOWN
    _check_end(size if is_known else 0, True, None, max_bytes)
    most = size if is_known else max_bytes
    body = _contexts.decompressor.decompress(data, max_output_size=most, allow_extra_data=False)
    if not is_known or not size:  # then the library does not look at what follows the frame
        _check_end(len(body), True, data[_frame_end(data, has_checksum=frame.has_checksum) :], max_bytes)
    return body


def check_compressed(data: bytes | memoryview, sys_flag: int, *, max_bytes: int) -> None:
    """Check that `decompress` succeeds for a body within `max_bytes`. RecordError otherwise.

    The body is decompressed in pieces of PIECE_BYTES that are dropped at once, so memory does not grow with the body.
    """
    size = 0
    for piece in _pieces(data, sys_flag):
        size += len(piece)
        _check_end(size, True, None, max_bytes)


def decompress_prefix(data: bytes | memoryview, sys_flag: int, *, max_bytes: int) -> bytes:
    """The first `max_bytes` bytes of a body, or the whole of a shorter one. RecordError if these bytes are damaged.

    Bytes after the prefix are neither decompressed nor checked, so the body may be damaged or too large there. At most
    PIECE_BYTES more than `max_bytes` are held.
    """
    if not sys_flag & SYS_FLAG_COMPRESSED:
        return bytes(data[:max_bytes])
    found, size = [], 0
    for piece in _pieces(data, sys_flag):
        found.append(piece)
        size += len(piece)
        if size >= max_bytes:
            break
    return b"".join(found)[:max_bytes]


def _pieces(data: bytes | memoryview, sys_flag: int) -> Iterator[bytes]:
    """A compressed body in pieces of at most PIECE_BYTES. RecordError where the data turns out to be damaged."""
    bits = sys_flag & SYS_FLAG_COMPRESSION_TYPE_MASK
    try:
        if bits in (0, CompressionType.ZLIB):
            yield from _pieces_of_zlib(data)
        elif bits == CompressionType.LZ4:
            yield from _pieces_of_lz4(data)
        elif bits == CompressionType.ZSTD:
            yield from _pieces_of_zstd(bytes(data))
        else:
            raise RecordError(f"a compression type that is not known: sys flag {sys_flag:#x}")
    except (zlib.error, RuntimeError, EOFError, zstandard.ZstdError) as error:
        raise RecordError(f"a compressed body is damaged: {error}") from None


def _pieces_of_zlib(data: bytes | memoryview) -> Iterator[bytes]:
    inflater, rest = zlib.decompressobj(), data
    while not inflater.eof:
        piece = inflater.decompress(rest, PIECE_BYTES)
        rest = inflater.unconsumed_tail
        if not piece and not rest:
            break
        yield piece
    _check_end(0, inflater.eof, inflater.unused_data, 0)


def _pieces_of_lz4(data: bytes | memoryview) -> Iterator[bytes]:
    frame, rest = lz4.frame.LZ4FrameDecompressor(), data
    while not frame.eof:
        piece = frame.decompress(rest, max_length=PIECE_BYTES)
        rest = b""
        if not piece and frame.needs_input:
            break
        yield piece
    _check_end(0, frame.eof, frame.unused_data, 0)


def _pieces_of_zstd(data: bytes) -> Iterator[bytes]:
    """A Zstandard frame: whole if it says that it is small, else block by block, each of up to 128 KiB."""
    content_bytes = zstandard.get_frame_parameters(data).content_size
    if content_bytes != zstandard.CONTENTSIZE_UNKNOWN and content_bytes <= PIECE_BYTES:
        yield _decompress_zstd(data, PIECE_BYTES)
        return
    # A decompressor of its own: the thread's one may decompress another body between two pieces.
    frame = zstandard.ZstdDecompressor().decompressobj()
    position, end = 0, zstandard.frame_header_size(data)
    while not frame.eof and position < len(data):
        yield frame.decompress(data[position:end])
        position, end = end, _block_end(data, end)
    _check_end(0, frame.eof, data[position:] + frame.unused_data, 0)


def _frame_end(data: bytes, *, has_checksum: bool) -> int:
    """The end of the Zstandard frame that `data` begins with, which is whole."""
    position, is_last = zstandard.frame_header_size(data), 0
    while not is_last and position < len(data):
        is_last = data[position] & 1
        position = _block_end(data, position)
    # `_block_end` leaves room for a checksum behind the last block.
    return position - (0 if has_checksum else _CHECKSUM_BYTES)


def _block_end(data: bytes, position: int) -> int:
    """The end of the Zstandard block at `position`, and of the checksum that may follow the last block."""
    header = int.from_bytes(data[position : position + 3], "little")
    is_last, is_run, size = header & 1, header >> 1 & 3 == 1, header >> 3
    return position + 3 + (1 if is_run else size) + _CHECKSUM_BYTES * is_last
