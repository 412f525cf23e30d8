"""Fills in, in place, the record fields that only the store can determine, for all records of a batch at a time.

The producer encodes records with zeros for the queue offset, the physical offset, the store timestamp and the store
host (raymq.records.format.encode). This module also computes property CRCs, because they cover these fields, and the
entries (units) of the consume queue (raymq.records.format.layout.UNIT_DTYPE).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from mmap import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import MessageIllegalError
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
)
from raymq.records.format import layout
from raymq.records.format.crc import (
    PROPERTY_CRC_LENGTH,
    PROPERTY_CRC_PLACEHOLDER,
    PROPERTY_CRC_PREFIX,
    is_sealed,
    property_crc,
)
from raymq.records.format.encode import EncodedBatch, topic_part
from raymq.records.format.layout import UNIT_DTYPE, record_ends, void_dtype, windows

_BIG_ENDIAN_LONG: Final = np.dtype(">i8")


_OFFSETS: Final = struct.Struct(">qq")
_STORED_IPV4: Final = struct.Struct(">q8s")
_STORED_IPV6: Final = struct.Struct(">q20s")


def stamp(
    buffer: bytearray | memoryview | NDArray[np.uint8],
    sizes: NDArray[np.int32],
    *,
    first_queue_offset: int,
    first_physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
) -> None:
    """Fill in the fields that the store determines, in place, in all records of a valid batch in the writable `buffer`.

    Record i gets queue offset `first_queue_offset + i`, its physical offset counted from `first_physical_offset`, the
    store timestamp and the store host. If the encoder reserved space for a property CRC, the CRC is computed last.
    `store_host` (`encode_host`) must belong to the records' host family (IPv4 or IPv6). Otherwise MessageIllegalError
    is raised before anything is changed.
    """
    data = memoryview(buffer).cast("B") if not isinstance(buffer, np.ndarray) else buffer.data
    host_bits = data[layout.SYS_FLAG_OFFSET + 3] & layout.SYS_FLAG_HOSTS_MASK
    if (len(store_host) == 20) != bool(host_bits & layout.SYS_FLAG_STORE_HOST_IPV6):
        raise MessageIllegalError(f"the records have no space for a store host of {len(store_host)} bytes")
    if len(sizes) == 1:
        stamp_one(first_queue_offset, first_physical_offset, store_timestamp_ms, store_host, data)
        return
    ends = record_ends(sizes)
    stamp_many(ends, first_queue_offset, first_physical_offset, store_timestamp_ms, store_host, data)


def stamp_one(
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    record: bytearray | memoryview,
) -> None:
    """Fill in the fields that the store determines in one record, without numpy's overhead. `store_host` must have the
    record's host family (IPv4 or IPv6). The record's first 8 bytes are not changed, and are read only to compute a
    property CRC."""
    stamp_at(record, 0, queue_offset, physical_offset, store_timestamp_ms, store_host)
    if is_sealed(record):
        record[-PROPERTY_CRC_LENGTH:] = property_crc(record)


def stamp_at(
    buffer: bytearray | memoryview | mmap,
    position: int,
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
) -> None:
    """Fill in the fields that the store determines in the record at `position` of `buffer`. The record must not have a
    property CRC."""
    _OFFSETS.pack_into(buffer, position + layout.QUEUE_OFFSET_OFFSET, queue_offset, physical_offset)
    stored_at = position + layout.STORE_TIMESTAMP_OFFSET
    if buffer[position + layout.SYS_FLAG_OFFSET + 3] & layout.SYS_FLAG_BORN_HOST_IPV6:
        stored_at += layout.IPV6_EXTRA
    stored = _STORED_IPV6 if len(store_host) == layout.IPV6_HOST_BYTES else _STORED_IPV4
    stored.pack_into(buffer, stored_at, store_timestamp_ms, store_host)


def stamp_many(
    ends: NDArray[np.int64],
    first_queue_offset: int,
    first_physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    data: bytearray | memoryview,
) -> None:
    """Fill in the fields that the store determines in back-to-back records of one batch. `ends`: the end position of
    each record in `data`."""
    starts = _starts_of(ends)
    queue_offsets = np.arange(first_queue_offset, first_queue_offset + len(starts))
    _put_offsets(data, starts, queue_offsets, first_physical_offset)
    # All records have the same store timestamp and store host. All records also have one host family, so the first
    # record determines the positions of these fields.
    stored = store_timestamp_ms.to_bytes(8, signed=True) + store_host
    starts += _store_timestamp_at(data)
    windows(data, len(stored))[starts] = np.void(stored)
    if is_sealed(data):
        _seal(data, [0, *ends[:-1].tolist()], ends.tolist())


def stamp_mixed(
    ends: NDArray[np.int64],
    queue_offsets: NDArray[np.int64],
    first_physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    data: bytearray | memoryview,
) -> None:
    """Fill in the fields that the store determines in back-to-back records. `queue_offsets`: the queue offset of each
    record, shape (n,). `ends`: the end position of each record in `data`, shape (n,). Unlike in a batch, only some of
    the records may have an IPv6 born host or a property CRC."""
    starts = _starts_of(ends)
    _put_offsets(data, starts, queue_offsets, first_physical_offset)
    stored = store_timestamp_ms.to_bytes(8, signed=True) + store_host
    windows(data, len(stored))[_store_timestamps_at(data, starts)] = np.void(stored)
    prefix = np.frombuffer(PROPERTY_CRC_PREFIX, np.uint8)
    tails = windows(data, len(prefix))[ends - PROPERTY_CRC_LENGTH].view(np.uint8).reshape(-1, len(prefix))
    sealed = np.flatnonzero((tails == prefix).all(axis=1))
    _seal(data, starts[sealed].tolist(), ends[sealed].tolist())


def _starts_of(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start position of each record, which is the end position of the previous record. `ends`: the end
    position of each record."""
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1]
    return starts


def _put_offsets(
    data: bytearray | memoryview,
    starts: NDArray[np.int64],
    queue_offsets: NDArray[np.int64],
    first_physical_offset: int,
) -> None:
    """Write the queue offset and the physical offset of the records at positions `starts`. The two fields are adjacent,
    so one numpy scatter writes 16 bytes per record."""
    offsets = np.empty((len(starts), 2), _BIG_ENDIAN_LONG)
    offsets[:, 0] = queue_offsets
    offsets[:, 1] = starts + first_physical_offset
    windows(data, 16)[starts + layout.QUEUE_OFFSET_OFFSET] = offsets.view(void_dtype(16))[:, 0]


def _seal(data: bytearray | memoryview, starts: list[int], ends: list[int]) -> None:
    """Compute and write the property CRC of each record; record i extends from `starts[i]` to `ends[i]`. Each record
    must have space for the CRC."""
    for start, end in zip(starts, ends, strict=True):
        data[end - PROPERTY_CRC_LENGTH : end] = property_crc(data[start:end])


def stamp_alike(
    stride: int,
    first_queue_offset: int,
    first_physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    data: bytearray | memoryview,
) -> None:
    """Fill in the fields that the store sets: queue offset, physical offset, store time and store host. The records
    have an equal size (`stride` bytes), fill `data`, and have no property CRC. Each field is written in all records at
    once."""
    count = len(data) // stride
    offsets = np.ndarray((count, 2), _BIG_ENDIAN_LONG, data, layout.QUEUE_OFFSET_OFFSET, (stride, 8))
    offsets[:, 0] = np.arange(first_queue_offset, first_queue_offset + count)
    offsets[:, 1] = np.arange(first_physical_offset, first_physical_offset + count * stride, stride)
    stored = store_timestamp_ms.to_bytes(8, signed=True) + store_host
    np.ndarray((count,), void_dtype(len(stored)), data, _store_timestamp_at(data), (stride,))[:] = np.void(stored)


def _store_timestamp_at(record: bytes | bytearray | memoryview) -> int:
    """Return the position of the store timestamp in a record. It depends on the size of the born host (IPv4 or
    IPv6)."""
    wide = record[layout.SYS_FLAG_OFFSET + 3] & layout.SYS_FLAG_BORN_HOST_IPV6
    return layout.STORE_TIMESTAMP_OFFSET + (layout.IPV6_EXTRA if wide else 0)


def store_timestamps_at(data: memoryview, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the store timestamps, in ms since 1970, of the records at positions `starts` of `data`."""
    positions = _store_timestamps_at(data, starts)
    times: NDArray[np.int64] = windows(data, 8)[positions].view(_BIG_ENDIAN_LONG).astype(np.int64)
    return times


def _store_timestamps_at(data: bytearray | memoryview, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each record's store-timestamp field. The records begin at positions `starts` of
    `data`."""
    # If a bit in the last byte of the sys flag is set, the born host is an IPv6 address. The store timestamp then
    # begins IPV6_EXTRA bytes later.
    wide = windows(data, 1)[starts + layout.SYS_FLAG_OFFSET + 3].view(np.uint8) & layout.SYS_FLAG_BORN_HOST_IPV6
    return starts + layout.STORE_TIMESTAMP_OFFSET + np.where(wide, layout.IPV6_EXTRA, 0)


def with_property_crc(batch: EncodedBatch) -> EncodedBatch:
    """Return a copy of `batch` with space for a property CRC in every record, which `stamp` fills in. Returns `batch`
    itself if its records already have this space.

    If a record has a property with the CRC's name elsewhere, this property is removed. `batch` must be valid. Raises
    MessageIllegalError if a record's properties then exceed 32767 bytes.
    """
    if is_sealed(batch.records):
        return batch
    _, topic_text = topic_part(batch.topic)
    parts: list[bytes] = []
    sizes: list[int] = []
    end = 0
    for size in batch.sizes.tolist():
        record = bytes(batch.records[end : end + size])
        end += size
        header = layout.header_size_at(record)
        at = header + int.from_bytes(record[header - 4 : header]) + len(topic_text)
        kept = [piece for piece in record[at + 2 :].split(b"\x02") if piece]
        name = PROPERTY_CRC_PREFIX
        properties = (
            b"".join(piece + b"\x02" for piece in kept if not piece.startswith(name)) + PROPERTY_CRC_PLACEHOLDER
        )
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise MessageIllegalError(f"properties of {len(properties)} bytes, including their CRC, exceed the limit")
        sizes.append(at + 2 + len(properties))
        parts += (sizes[-1].to_bytes(4), record[4:at], len(properties).to_bytes(2), properties)
    return replace(batch, records=b"".join(parts), sizes=np.array(sizes, np.int32))


def fill_units(
    units: NDArray[np.void],
    physical_offsets: NDArray[np.int64],
    sizes: NDArray[np.int32],
    tags_codes: NDArray[np.int64],
) -> None:
    """Overwrite consume-queue entries (`units`, an array of UNIT_DTYPE) with the physical offset, the size in bytes and
    the tag code of each record. All arrays have shape (n,)."""
    units["physical_offset"] = physical_offsets
    units["size"] = sizes
    units["tags_code"] = tags_codes


def units_of(
    physical_offsets: NDArray[np.int64], sizes: NDArray[np.int32], tags_codes: NDArray[np.int64]
) -> NDArray[np.void]:
    """Return new consume-queue entries (units), shape (n,), with the content that `fill_units` writes."""
    units = np.empty(len(sizes), UNIT_DTYPE)
    fill_units(units, physical_offsets, sizes, tags_codes)
    return units


def begins_of(physical_offset: int, sizes: NDArray[np.int32], ends: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the physical offsets of back-to-back records with these sizes; the first record is at `physical_offset`.
    `ends`: `record_ends(sizes)`, if the caller already has this array."""
    begins = (record_ends(sizes) if ends is None else ends) - sizes
    begins += physical_offset
    return begins
