"""Add the bytes that this store needs to the records of a batch: for an IPv6 store host and for the property CRC.

A producer encodes its records before it knows which store receives them, and after a failover it sends the same bytes
to another store. So each store adds its own bytes. This module also returns each message's physical offset, because the
producer cannot compute these offsets from the sizes of its own records. A store that adds no bytes does not use this
module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from raymq.common.errors import RaymqError
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.layout import (
    IPV6_EXTRA,
    STORE_HOST_OFFSET,
    SYS_FLAG_BORN_HOST_IPV6,
    SYS_FLAG_OFFSET,
    SYS_FLAG_STORE_HOST_IPV6,
    windows,
)
from raymq.records.kernels.check import validate_batch
from raymq.records.kernels.stamp import with_property_crc
from storage.append.durability import WriteBatches, Written


class FittedWrite:
    """Adds bytes that only this store needs to the records of batches: a property CRC, and room for an IPv6 host.
    Passes the batches to `write`, and adds the physical offsets to the results."""

    def __init__(
        self, write: WriteBatches, *, property_crc: bool, ipv6_store_host: bool, on_refused: Callable[[], None]
    ) -> None:
        """Create the wrapper of `write`. `property_crc`: add the property CRC to each record. `ipv6_store_host`: make
        room for an IPv6 store host in each record. `on_refused` is called if a batch is refused."""
        self._write, self._on_refused = write, on_refused
        self._property_crc, self._ipv6_store_host = property_crc, ipv6_store_host

    def __call__(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Written:
        """Add to `batches` the bytes that this store's settings require (property CRC, room for an IPv6 store host),
        and write them. Raises MessageIllegalError as `fit_batch` does, before anything is written."""
        try:
            fitted = [
                fit_batch(batch, property_crc=self._property_crc, ipv6_store_host=self._ipv6_store_host)
                for batch in batches
            ]
        except RaymqError:
            self._on_refused()
            raise
        results, end_offset = self._write(fitted, timeout_s)
        named = [name_offsets(*row) for row in zip(results, batches, fitted, strict=True)]
        return named, end_offset


def fit_batch(batch: EncodedBatch, *, property_crc: bool, ipv6_store_host: bool) -> EncodedBatch:
    """Return a copy of `batch` whose records have the property CRC, the room for an IPv6 store host, or both, as the
    arguments require. Returns `batch` itself if its records already have the required form.

    Raises MessageIllegalError if the batch was not made by `encode_batch`, or if its properties become too long.
    """
    if property_crc:
        validate_batch(batch)
        batch = with_property_crc(batch)
    return with_ipv6_store_host(batch) if ipv6_store_host else batch


def name_offsets(result: AppendResult, sent: EncodedBatch, stored: EncodedBatch) -> AppendResult:
    """Add each message's physical offset to `result` if the store has made the records longer, so that `stored` and
    `sent` differ in their record sizes. Otherwise return `result` itself."""
    if stored is sent or len(sent) == 1 or result.physical_offsets is not None or result.physical_offset < 0:
        return result
    starts = result.physical_offset + np.cumsum(stored.sizes, dtype=np.int64) - stored.sizes
    return msgspec.structs.replace(result, physical_offsets=tuple(starts.tolist()))


def with_ipv6_store_host(batch: EncodedBatch) -> EncodedBatch:
    """Return `batch` with a zeroed IPv6 store host in every record; `batch` itself if its hosts are IPv6 already.

    Raises MessageIllegalError if the batch was not made by `encode_batch`.
    """
    sys_flags = validate_batch(batch).sys_flags
    if sys_flags & SYS_FLAG_STORE_HOST_IPV6:
        return batch
    # Position of the store host (the broker's address) in a record. It is equal in all records of the batch, because
    # their sys flags state the same address families (IPv4 or IPv6).
    host_offset = STORE_HOST_OFFSET + (IPV6_EXTRA if sys_flags & SYS_FLAG_BORN_HOST_IPV6 else 0)
    starts = np.cumsum(batch.sizes, dtype=np.int64) - batch.sizes
    # Insert 12 zeros before each store host of 4 bytes, so that the host field has 16 bytes (the size of an IPv6
    # address).
    records = np.insert(np.frombuffer(batch.records, np.uint8), np.repeat(starts + host_offset, IPV6_EXTRA), 0)
    # Move the start of record i by the number of bytes that were inserted into the i records before it.
    starts += np.arange(len(starts)) * IPV6_EXTRA
    sizes = batch.sizes + np.int32(IPV6_EXTRA)
    # Update two fields of each record: the size, which comes first, and the IPv6 flag in the last byte of the sys
    # flags.
    windows(records, 4)[starts] = sizes.astype(">i4").view("V4")
    records[starts + SYS_FLAG_OFFSET + 3] |= SYS_FLAG_STORE_HOST_IPV6
    return replace(batch, records=records.tobytes(), sizes=sizes)
