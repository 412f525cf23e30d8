"""Compressed message bodies (spec/storage.md §1, "SYSFLAG bits").

A record's sys flag says whether its body is compressed (bit 0) and how (bits 8-10: LZ4, ZSTD, ZLIB, and 0 for ZLIB in
old data). The formats are RocketMQ's: the LZ4 *frame* format, a Zstandard frame, a zlib stream.
Each message is compressed alone, so that a reader needs only one record.

A body is one such frame or stream: further bytes after its end make a body unreadable. RocketMQ's Java consumers ignore
bytes after a zlib stream, and join several LZ4 or Zstandard frames; no producer of RocketMQ sends either.

A store accepts bodies of up to its `max_message_size_bytes`, so a reader decompresses bodies of up to this size. It
needs the limit because the sender of a body chooses its decompressed size. A reader may read from several stores, whose
settings may change. So a process has one limit, which never decreases (`body_max_bytes`): the largest setting of the
stores that the process has opened or called, and at least the setting's default. A process that reads what another
process fetched gets the limit with the records (raymq/common/protocol/consume_result.py,
raymq/client/predicates/frames.py).
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
"""The budget of decompressed bodies in one table or page, in bytes: 16 bodies of 4 MiB, or 8 times the stored bytes of
a fetch from another node. A table is copied up to twice during its creation, so three times the budget bounds a
reader's memory. The next table has the messages beyond the budget."""
INNER_BATCH_MAX_BYTES: Final = 64 * 1024 * 1024
"""The limit of the decompressed items of one inner batch, which holds up to 32,767 messages."""
PIECE_BYTES: Final = 256 * 1024
"""The most bytes that `check_compressed` and `decompress_prefix` decompress at a time; a Zstandard block fits."""

_CHECKSUM_BYTES: Final = 4
"""The size of the optional checksum at the end of a Zstandard frame."""


class _Bound:
    """The limit of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.most_bytes = MAX_MESSAGE_SIZE_BYTES


_bound = _Bound()


def body_max_bytes() -> int:
    """Return the most bytes of a decompressed body. A body with a larger size cannot be read."""
    return _bound.most_bytes


def admit_bodies_of(max_message_size_bytes: int) -> None:
    """Raise this process's limit to a store's setting, if it is larger. Thread-safe."""
    with _bound.lock:
        _bound.most_bytes = max(_bound.most_bytes, max_message_size_bytes)


class CompressionType(IntEnum):
    """The format of a compressed body. The value is the sys flag's type bits, unshifted; NONE sets no bit."""

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
    """A producer's compression: bodies of at least `threshold_bytes` are compressed with `type` at `level` (None: the
    type's default; ZLIB's is RocketMQ's 5). Raises InvalidArgumentError for a level that the type does not have."""

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
        """Return the bytes to store for `body`, and their sys-flag bits. A body that is too short, or does not become
        smaller, is stored unchanged, without bits."""
        if self.type is CompressionType.NONE or len(body) < self.threshold_bytes:
            return body, 0
        compressed = compress(body, self.type, self.level)
        if len(compressed) >= len(body):
            return body, 0
        return compressed, SYS_FLAG_COMPRESSED | self.type


class _Contexts(threading.local):
    """Zstandard's contexts of one thread: creating them is expensive, and two threads must not share one."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_contexts: Final = _Contexts()


def compress(data: bytes | memoryview, type: CompressionType, level: int | None = None) -> bytes:
    """Compress `data` with `type`. `level` None: the type's default."""
    if level is None:
        level = _LEVELS[type][1]
    if type is CompressionType.ZLIB:
        return zlib.compress(data, level)
    if type is CompressionType.LZ4:
        # lz4-java in RocketMQ's consumers refuses frames whose blocks refer to each other.
        return cast(bytes, lz4.frame.compress(data, compression_level=level, block_linked=False))
    if type is CompressionType.ZSTD:
        compressor = _contexts.compressors.get(level)
        if compressor is None:
            compressor = _contexts.compressors[level] = zstandard.ZstdCompressor(level=level)
        return compressor.compress(data)
    return bytes(data)


def decompress(data: bytes | memoryview, sys_flag: int, *, max_bytes: int | None = None) -> bytes:
    """Return the body with the stored bytes `data`, according to its record's `sys_flag`. `max_bytes` is by default
    this process's limit (`body_max_bytes`).

    Raises RecordError if the data is damaged or incomplete, continues after its end, is of an unknown type, or would
    become larger than `max_bytes`. Memory use stays within that limit.
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
        raise RecordError(f"a compressed body is larger than {max_bytes} bytes when decompressed")
    if not complete:
        raise RecordError("a compressed body ends too early")
    if rest:
        raise RecordError(f"a compressed body has {len(rest)} bytes after its end")


def _decompress_zstd(data: bytes, max_bytes: int) -> bytes:
    """Decompress a Zstandard frame. A frame with its content's size gets exactly this memory. A frame without it, as
    Java's streams write them, gets the whole limit; the system only backs the pages that are written."""
    frame = zstandard.get_frame_parameters(data)
    size, is_known = frame.content_size, frame.content_size != zstandard.CONTENTSIZE_UNKNOWN
    _check_end(size if is_known else 0, True, None, max_bytes)
    most = size if is_known else max_bytes
    body = _contexts.decompressor.decompress(data, max_output_size=most, allow_extra_data=False)
    if not is_known or not size:  # the library then ignores bytes after the frame
        _check_end(len(body), True, data[_frame_end(data, has_checksum=frame.has_checksum) :], max_bytes)
    return body


def check_compressed(data: bytes | memoryview, sys_flag: int, *, max_bytes: int) -> None:
    """Check that `decompress` succeeds for a body within `max_bytes`. Raises RecordError otherwise.

    The body is decompressed in pieces of PIECE_BYTES that are dropped at once, so memory does not grow with the body.
    """
    size = 0
    for piece in _pieces(data, sys_flag):
        size += len(piece)
        _check_end(size, True, None, max_bytes)


def decompress_prefix(data: bytes | memoryview, sys_flag: int, *, max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of a body, or a shorter body as a whole. Raises RecordError if these bytes are
    damaged.

    Bytes after the prefix are neither decompressed nor checked, so the body may be damaged or too large there. Holds at
    most PIECE_BYTES more than `max_bytes`.
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
    """Yield a compressed body in pieces of at most PIECE_BYTES. Raises RecordError at damaged data."""
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
    """Yield a Zstandard frame: as a whole if its size is small, else block by block, each of up to 128 KiB."""
    content_bytes = zstandard.get_frame_parameters(data).content_size
    if content_bytes != zstandard.CONTENTSIZE_UNKNOWN and content_bytes <= PIECE_BYTES:
        yield _decompress_zstd(data, PIECE_BYTES)
        return
    # A separate decompressor: the thread's own may decompress another body between two pieces.
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
    # `_block_end` includes the space of a checksum after the last block.
    return position - (0 if has_checksum else _CHECKSUM_BYTES)


def _block_end(data: bytes, position: int) -> int:
    """Return the end of the Zstandard block at `position`, including the checksum that may follow the last block."""
    header = int.from_bytes(data[position : position + 3], "little")
    is_last, is_run, size = header & 1, header >> 1 & 3 == 1, header >> 3
    return position + 3 + (1 if is_run else size) + _CHECKSUM_BYTES * is_last
