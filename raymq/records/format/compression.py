"""Compressed message bodies (spec/storage.md §1, "SYSFLAG bits").

A record's sys flag states whether the body is compressed (bit 0) and in which format (bits 8-10: LZ4, ZSTD, ZLIB, and 0
for ZLIB in old data). The formats are RocketMQ's: the LZ4 *frame* format, a Zstandard frame, a zlib stream. Each
message is compressed alone, so that a reader needs only one record.

A body is exactly one frame or stream: further bytes after its end make the body unreadable. RocketMQ's Java consumers
ignore bytes after a zlib stream, and join several LZ4 or Zstandard frames; no RocketMQ producer sends such bodies.

A store accepts bodies of up to its `max_message_size_bytes`, so a reader decompresses bodies of up to this size. A
reader needs the limit because the sender of a body determines the decompressed size. A reader may read from several
stores, and their settings may change. Therefore a process has one limit (`body_max_bytes`), which never decreases. The
limit is the largest setting of all stores that the process has opened or called, and at least the setting's default. A
process may decode records that another process fetched. It receives the limit together with these records
(raymq/common/protocol/consume_result.py, raymq/client/predicates/frames.py).
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
"""Maximum total size, in bytes, of the decompressed bodies in one table or page: 16 bodies of 4 MiB, or 8 times the
stored bytes of a fetch from another node. A table is copied up to twice during its creation, so a reader uses at most
three times this size. Messages that exceed the limit become part of the next table."""
INNER_BATCH_MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum size, in bytes, of the decompressed items of one inner batch, which has up to 32,767 messages."""
PIECE_BYTES: Final = 256 * 1024
"""Maximum number of bytes that `check_compressed` and `decompress_prefix` decompress in one step. A Zstandard block (up
to 128 KiB) is always smaller than a step."""

_CHECKSUM_BYTES: Final = 4
"""Size in bytes of the optional checksum at the end of a Zstandard frame."""


class _Bound:
    """This process's limit for the size of a decompressed body, in bytes, and the lock that guards changes of the
    limit."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.most_bytes = MAX_MESSAGE_SIZE_BYTES


_bound = _Bound()


def body_max_bytes() -> int:
    """Return this process's maximum size of a decompressed body, in bytes. A larger body is unreadable."""
    return _bound.most_bytes


def admit_bodies_of(max_message_size_bytes: int) -> None:
    """Increase this process's limit for the size of a decompressed body to a store's `max_message_size_bytes`, if this
    setting is larger. Thread-safe."""
    with _bound.lock:
        _bound.most_bytes = max(_bound.most_bytes, max_message_size_bytes)


class CompressionType(IntEnum):
    """The format of a compressed body. The value is the compression bits of the sys flag, at their place in the flag;
    NONE sets no bit."""

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
"""Lowest, default and highest compression level of each compression type."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A producer's compression settings: bodies of at least `threshold_bytes` are compressed with `type` at `level`. If
    `level` is None, the type's default level is used; for ZLIB it is RocketMQ's 5. Raises InvalidArgumentError if the
    type does not have this level."""

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
        """Return the bytes to store for `body`, and the sys-flag bits of their compression. A body that is below the
        threshold, or that compression does not shrink, is returned unchanged, with no bits set."""
        if self.type is CompressionType.NONE or len(body) < self.threshold_bytes:
            return body, 0
        compressed = compress(body, self.type, self.level)
        if len(compressed) >= len(body):
            return body, 0
        return compressed, SYS_FLAG_COMPRESSED | self.type


class _Contexts(threading.local):
    """The Zstandard contexts of one thread. Creating a context is expensive, and two threads must not share one
    context."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_contexts: Final = _Contexts()


def compress(data: bytes | memoryview, type: CompressionType, level: int | None = None) -> bytes:
    """Return `data`, compressed with `type`. If `level` is None, the type's default level is used."""
    if level is None:
        level = _LEVELS[type][1]
    if type is CompressionType.ZLIB:
        return zlib.compress(data, level)
    if type is CompressionType.LZ4:
        # Compress into LZ4 blocks that do not depend on each other, because lz4-java, which RocketMQ's consumers use,
        # rejects linked blocks.
        return cast(bytes, lz4.frame.compress(data, compression_level=level, block_linked=False))
    if type is CompressionType.ZSTD:
        compressor = _contexts.compressors.get(level)
        if compressor is None:
            compressor = _contexts.compressors[level] = zstandard.ZstdCompressor(level=level)
        return compressor.compress(data)
    return bytes(data)


def decompress(data: bytes | memoryview, sys_flag: int, *, max_bytes: int | None = None) -> bytes:
    """Return the body that is stored as `data`. It is decompressed if the record's `sys_flag` has the compression bit.
    `max_bytes`: by default this process's limit (`body_max_bytes`).

    Raises RecordError if the data is damaged or incomplete, continues after the end of the frame, has an unknown
    compression type, or would become larger than `max_bytes`. The decompressed data in memory never exceeds
    `max_bytes`.
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
            raise RecordError(f"unknown compression type: sys flag {sys_flag:#x}")
    except (zlib.error, RuntimeError, EOFError, zstandard.ZstdError) as error:
        raise RecordError(f"a compressed body is damaged: {error}") from None
    _check_end(len(body), complete, rest, max_bytes)
    return body


def _check_end(size: int, complete: bool, rest: bytes | None, max_bytes: int) -> None:
    if size > max_bytes:
        raise RecordError(f"a body has more than {max_bytes} bytes when decompressed")
    if not complete:
        raise RecordError("a compressed body ends too early")
    if rest:
        raise RecordError(f"a compressed body has {len(rest)} bytes after its end")


def _decompress_zstd(data: bytes, max_bytes: int) -> bytes:
    """Decompress a Zstandard frame. If the frame states its content's size, a buffer of exactly this size is allocated.
    Java's streams write frames without this size. For such a frame a buffer of `max_bytes` is allocated, and the system
    allocates memory only for the pages that are written."""
    frame = zstandard.get_frame_parameters(data)
    size, is_known = frame.content_size, frame.content_size != zstandard.CONTENTSIZE_UNKNOWN
    _check_end(size if is_known else 0, True, None, max_bytes)
    most = size if is_known else max_bytes
    body = _contexts.decompressor.decompress(data, max_output_size=most, allow_extra_data=False)
    # zstandard does not report extra bytes after a frame that lacks a content size, so check for extra bytes here
    if not is_known or not size:
        _check_end(len(body), True, data[_frame_end(data, has_checksum=frame.has_checksum) :], max_bytes)
    return body


def check_compressed(data: bytes | memoryview, sys_flag: int, *, max_bytes: int) -> None:
    """Check that `decompress` succeeds for this data with `max_bytes`. Raises RecordError if it does not.

    The body is decompressed in steps of PIECE_BYTES, and the output of each step is dropped at once. So the memory does
    not grow with the body.
    """
    size = 0
    for piece in _pieces(data, sys_flag):
        size += len(piece)
        _check_end(size, True, None, max_bytes)


def decompress_prefix(data: bytes | memoryview, sys_flag: int, *, max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of a decompressed body, or the whole body if it is shorter. Raises RecordError
    if this part of the body is damaged.

    Bytes after the prefix are neither decompressed nor checked, so damage or excess size after the prefix is not
    detected. At most `max_bytes` + PIECE_BYTES of the body are in memory.
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
    """Yield a decompressed body in pieces of at most PIECE_BYTES. Raises RecordError if the data is damaged or has an
    unknown compression type."""
    bits = sys_flag & SYS_FLAG_COMPRESSION_TYPE_MASK
    try:
        if bits in (0, CompressionType.ZLIB):
            yield from _pieces_of_zlib(data)
        elif bits == CompressionType.LZ4:
            yield from _pieces_of_lz4(data)
        elif bits == CompressionType.ZSTD:
            yield from _pieces_of_zstd(bytes(data))
        else:
            raise RecordError(f"unknown compression type: sys flag {sys_flag:#x}")
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
    """Yield the decompressed content of a Zstandard frame. The content is one piece if the frame states a size of at
    most PIECE_BYTES. Otherwise each block, of up to 128 KiB, is a piece."""
    content_bytes = zstandard.get_frame_parameters(data).content_size
    if content_bytes != zstandard.CONTENTSIZE_UNKNOWN and content_bytes <= PIECE_BYTES:
        yield _decompress_zstd(data, PIECE_BYTES)
        return
    # Use a separate decompressor for this body. The caller may take a pause between two pieces, and use this thread's
    # shared decompressor for another body.
    frame = zstandard.ZstdDecompressor().decompressobj()
    position, end = 0, zstandard.frame_header_size(data)
    while not frame.eof and position < len(data):
        yield frame.decompress(data[position:end])
        position, end = end, _block_end(data, end)
    _check_end(0, frame.eof, data[position:] + frame.unused_data, 0)


def _frame_end(data: bytes, *, has_checksum: bool) -> int:
    """Return the end of the complete Zstandard frame at the beginning of `data`."""
    position, is_last = zstandard.frame_header_size(data), 0
    while not is_last and position < len(data):
        is_last = data[position] & 1
        position = _block_end(data, position)
    # `_block_end` assumes that a checksum follows the last block. If the frame has no checksum, subtract the checksum's
    # size.
    return position - (0 if has_checksum else _CHECKSUM_BYTES)


def _block_end(data: bytes, position: int) -> int:
    """Return the end of the Zstandard block at `position`, including the checksum that may follow the last block."""
    header = int.from_bytes(data[position : position + 3], "little")
    is_last, is_run, size = header & 1, header >> 1 & 3 == 1, header >> 3
    return position + 3 + (1 if is_run else size) + _CHECKSUM_BYTES * is_last
