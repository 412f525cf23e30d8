"""Message bodies that a hostile producer sends: compressed bytes that are garbage, or that become huge when
decompressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import lz4.frame
import numpy as np
import zstandard

from raymq.records.format.compression import CompressionType
from raymq.records.format.crc import body_crc
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.layout import SYS_FLAG_COMPRESSED, find_sections, read_header, record_ends
from tests.support.stores.stores import make_batch

TYPES = (CompressionType.ZLIB, CompressionType.LZ4, CompressionType.ZSTD)
_ZEROS = bytes(1 << 20)


@cache
def bomb(kind: CompressionType, mib: int = 64) -> bytes:
    """Return a compressed body that decompresses to `mib` MiB of zeros. A Zstandard body does not state its
    decompressed size."""
    if kind is CompressionType.ZLIB:
        deflater = zlib.compressobj(9)
        return b"".join([deflater.compress(_ZEROS) for _ in range(mib)]) + deflater.flush()
    if kind is CompressionType.LZ4:
        frame = lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX4MB)
        return frame.begin() + b"".join([frame.compress(_ZEROS) for _ in range(mib)]) + frame.flush()
    stream = zstandard.ZstdCompressor(level=3).compressobj()
    return b"".join([stream.compress(_ZEROS) for _ in range(mib)]) + stream.flush()


def garbage(kind: CompressionType) -> bytes:
    """Return a message body that begins like a compressed body of the given compression type and continues with
    garbage."""
    return {
        CompressionType.ZLIB: b"\x78\x9cgarbage",
        CompressionType.LZ4: b"\x04\x22\x4d\x18garbage",
        CompressionType.ZSTD: b"\x28\xb5\x2f\xfdgarbage",
    }[kind]


def lying_bodies() -> dict[str, tuple[bytes, int]]:
    """Return one unreadable body of each kind, by the kind's name: the stored bytes and the record's system
    flags."""
    found = {}
    for kind in TYPES:
        name, flags = kind.name.lower(), SYS_FLAG_COMPRESSED | kind
        found[f"{name} garbage"] = (garbage(kind), flags)
        found[f"{name} bomb"] = (bomb(kind, 8), flags)
        found[f"{name} cut"] = (bomb(kind, 1)[:-9], flags)
    found["unknown type"] = (b"whatever", SYS_FLAG_COMPRESSED | 0x700)
    return found


def lying_batch(stored: Sequence[tuple[bytes, int]], **changes: object) -> EncodedBatch:
    """Return a batch of records with the given stored bodies and system flags, which need not fit each other. The CRCs
    and sizes of the records are correct.

    `changes`: arguments of `make_batch`.
    """
    batch = make_batch([body for body, _ in stored], **changes)  # type: ignore[arg-type]
    records = bytearray(batch.records)
    for start, (_, flags) in zip((record_ends(batch.sizes) - batch.sizes).tolist(), stored, strict=True):
        header = read_header(records, start)
        encoded = header._replace(sys_flag=header.sys_flag | flags).encode()
        records[start : start + len(encoded)] = encoded
    return replace(batch, records=bytes(records))


def stored_body(record: bytes) -> bytes:
    """Return the bytes of a record's body as the record stores them, compressed or not."""
    body_at, body_end, *_ = find_sections(record, 0, read_header(record))
    return record[body_at:body_end]


def with_stored_body(batch: EncodedBatch, body: bytes) -> EncodedBatch:
    """Return a copy of a one-record batch with `body` as the stored body. The record's CRC and sizes are
    correct."""
    record = bytes(batch.records)
    header = read_header(record)
    _, body_end, *_ = find_sections(record, 0, header)
    size = header.total_size + len(body) - header.body_size
    head = header._replace(total_size=size, body_size=len(body), body_crc=body_crc(body)).encode()
    return replace(batch, records=head + body + record[body_end:], sizes=np.array([size], np.int32))
