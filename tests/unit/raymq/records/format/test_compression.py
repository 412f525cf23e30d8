"""Tests of compressed message bodies: compressing and decompressing, size limits, and damaged bodies."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial

import lz4.frame
import pytest
import zstandard

from raymq.common.errors import InvalidArgumentError
from raymq.records.format.compression import (
    PIECE_BYTES,
    Compression,
    CompressionType,
    check_compressed,
    compress,
    decompress,
    decompress_prefix,
)
from raymq.records.format.layout import RecordError
from tests.support.stores.lying_bodies import bomb

TYPES = [CompressionType.LZ4, CompressionType.ZSTD, CompressionType.ZLIB]
TEXT = b"a body that compresses well, " * 400


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("data", [b"", b"x", TEXT])
def test_compressed_data_can_be_decompressed(type: CompressionType, data: bytes) -> None:
    assert decompress(compress(data, type), 1 | type) == data


def test_a_body_without_the_compressed_bit_is_taken_as_it_is() -> None:
    assert decompress(memoryview(b"plain"), 0x300) == b"plain"


def test_type_bits_of_zero_mean_zlib_in_old_data() -> None:
    assert decompress(zlib.compress(TEXT), 1) == TEXT


def test_a_zstandard_frame_without_its_content_size_is_read() -> None:
    """A Zstandard frame that does not state its content size can be read. Java's Zstandard output stream writes such
    frames."""
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    assert decompress(compressor.compress(TEXT), 1 | CompressionType.ZSTD) == TEXT


def lz4_stream(data: bytes) -> bytes:
    """Return an LZ4 frame that does not state the length of its content."""
    frame = lz4.frame.LZ4FrameCompressor()
    return frame.begin() + frame.compress(data) + frame.flush()


def zstd_stream(data: bytes, **options: bool) -> bytes:
    """Return a Zstandard frame that does not state the length of its content."""
    stream = zstandard.ZstdCompressor(**options).compressobj()
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize("size", [0, 1, 5000, PIECE_BYTES + 7, 1_000_000])
@pytest.mark.parametrize("kind", ["text", "zeros", "noise"])
@pytest.mark.parametrize(
    ("type", "make"),
    [
        (CompressionType.ZLIB, zlib.compress),
        (CompressionType.LZ4, partial(compress, type=CompressionType.LZ4)),
        (CompressionType.LZ4, lz4_stream),
        (CompressionType.ZSTD, partial(compress, type=CompressionType.ZSTD)),
        (CompressionType.ZSTD, zstd_stream),
        (CompressionType.ZSTD, partial(zstd_stream, write_checksum=True)),
        (CompressionType.ZSTD, zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress),
    ],
)
def test_bytes_after_the_end_of_a_body_make_the_body_unreadable(
    type: CompressionType, make: Callable[[bytes], bytes], kind: str, size: int
) -> None:
    source = {"text": TEXT * 90, "zeros": bytes(size), "noise": random.Random(size).randbytes(size)}[kind]
    body = source[:size]
    stored = make(body)
    assert decompress(stored, 1 | type) == body
    check_compressed(stored, 1 | type, max_bytes=size)
    skippable = b"\x50\x2a\x4d\x18\x01\x00\x00\x00x"
    for rest in (b"\0", b"\0" * 4, b"\0" * 5, b"garbage", skippable, stored):
        with pytest.raises(RecordError):
            decompress(stored + rest, 1 | type)
        with pytest.raises(RecordError):
            check_compressed(stored + rest, 1 | type, max_bytes=size)


@pytest.mark.parametrize("bits", [0x400, 0x500, 0x700])
def test_an_unknown_type_is_refused(bits: int) -> None:
    with pytest.raises(RecordError, match="unknown compression type"):
        decompress(b"anything", 1 | bits)


@pytest.mark.parametrize("type", TYPES)
def test_a_body_that_ends_too_early_is_refused(type: CompressionType) -> None:
    data = compress(TEXT, type)
    for length in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(RecordError):
            decompress(data[:length], 1 | type)


@pytest.mark.parametrize("type", TYPES)
def test_bytes_after_the_end_are_refused(type: CompressionType) -> None:
    with pytest.raises(RecordError):
        decompress(compress(TEXT, type) + b"more", 1 | type)


@pytest.mark.parametrize("type", TYPES)
def test_damaged_bytes_raise_record_errors_only(type: CompressionType) -> None:
    seed = 20240515
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(300):
        data = bytearray(compress(TEXT, type))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            decompress(bytes(data), 1 | type)
        except RecordError:
            continue


@pytest.mark.parametrize("type", TYPES)
def test_a_body_that_grows_beyond_the_bound_is_refused(type: CompressionType) -> None:
    data = compress(TEXT, type)
    assert decompress(data, 1 | type, max_bytes=len(TEXT)) == TEXT
    with pytest.raises(RecordError):
        decompress(data, 1 | type, max_bytes=len(TEXT) - 1)


def test_a_stream_of_unknown_size_beyond_the_bound_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)
    with pytest.raises(RecordError):
        decompress(frame, 1 | CompressionType.ZSTD, max_bytes=len(TEXT) - 1)


def test_formats_match_the_java_libraries() -> None:
    # An LZ4 frame begins with the magic number 04 22 4D 18; a bare LZ4 block has no magic number.
    assert compress(TEXT, CompressionType.LZ4)[:4] == b"\x04\x22\x4d\x18"
    assert compress(TEXT, CompressionType.ZSTD)[:4] == b"\x28\xb5\x2f\xfd"
    assert zlib.decompress(compress(TEXT, CompressionType.ZLIB)) == TEXT
    assert lz4.frame.decompress(compress(TEXT, CompressionType.LZ4)) == TEXT


def test_the_blocks_of_an_lz4_frame_are_independent_as_lz4_java_requires() -> None:
    frame = compress(bytes(70_000), CompressionType.LZ4)
    assert lz4.frame.get_frame_info(frame)["block_linked"] is False
    assert decompress(frame, 1 | CompressionType.LZ4) == bytes(70_000)


def test_bodies_under_the_threshold_stay_as_they_are() -> None:
    compression = Compression(CompressionType.ZSTD, threshold_bytes=100)
    assert compression.compress_body(b"a" * 99) == (b"a" * 99, 0)
    stored, bits = compression.compress_body(b"a" * 100)
    assert bits == 0x201
    assert decompress(stored, bits) == b"a" * 100


def test_a_body_that_does_not_get_smaller_stays_as_it_is() -> None:
    noise = random.Random(1).randbytes(5000)
    assert Compression(CompressionType.LZ4).compress_body(noise) == (noise, 0)


def test_no_compression_is_the_default() -> None:
    assert Compression().compress_body(TEXT) == (TEXT, 0)


def test_levels_are_used() -> None:
    assert len(compress(TEXT, CompressionType.ZLIB, 1)) > len(compress(TEXT, CompressionType.ZLIB, 9))


@pytest.mark.parametrize(("type", "level"), [("ZLIB", 10), ("ZSTD", 0), ("ZSTD", 23), ("LZ4", 17), ("NONE", 1)])
def test_a_level_the_type_does_not_have_is_refused(type: str, level: int) -> None:
    with pytest.raises(InvalidArgumentError, match="level must be"):
        Compression(CompressionType[type], level=level)


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="threshold"):
        Compression(threshold_bytes=-1)


def frames(data: bytes) -> list[tuple[bytes, int]]:
    """Compress `data` once for each compressor: raymq's own, and Java's zstd and LZ4 streams. Returns pairs of
    compressed bytes and sys flag."""
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    linked = lz4.frame.compress(data, block_linked=True, content_checksum=True)
    return [
        *((compress(data, type), 1 | type) for type in TYPES),
        (stream.compress(data) + stream.flush(), 1 | CompressionType.ZSTD),
        (linked, 1 | CompressionType.LZ4),
    ]


@pytest.mark.parametrize("size", [1, 5000, PIECE_BYTES, PIECE_BYTES + 1, 1_500_000])
def test_a_check_and_a_prefix_agree_with_the_whole_body(size: int) -> None:
    chance = random.Random(size)
    data = b"".join(chance.choice((chance.randbytes(900), bytes(4000))) for _ in range(size // 900 + 1))[:size]
    for stored, flags in frames(data):
        check_compressed(stored, flags, max_bytes=size)
        with pytest.raises(RecordError, match="more than"):
            check_compressed(stored, flags, max_bytes=size - 1)
        for length in (1, 100, PIECE_BYTES, size, size + 1):
            assert decompress_prefix(stored, flags, max_bytes=length) == data[:length]


def test_a_check_refuses_each_body_that_cannot_be_decompressed() -> None:
    seed = 20240516
    print("seed", seed)
    chance = random.Random(seed)
    refused = 0
    for size in (5000, 400_000):
        data = chance.randbytes(size // 10) * 10
        for stored, flags in frames(data):
            for number in range(25):
                damaged = bytearray(stored if number else stored[: chance.randrange(len(stored))])
                damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
                outcomes = []
                for function in (decompress, check_compressed):
                    try:
                        function(bytes(damaged), flags, max_bytes=1 << 20)  # type: ignore[operator]
                        outcomes.append(True)
                    except RecordError:
                        outcomes.append(False)
                assert outcomes[0] or not outcomes[1]
                refused += not outcomes[1]
    assert refused > 100


@pytest.mark.parametrize("type", TYPES)
def test_a_check_and_a_prefix_of_a_bomb_hold_pieces_only(type: CompressionType) -> None:
    stored = bomb(type, 64)
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match="more than 4194304"):
            check_compressed(stored, 1 | type, max_bytes=4 << 20)
        assert decompress_prefix(stored, 1 | type, max_bytes=100) == bytes(100)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
