"""Adds to a batch the bytes that this store needs in its records: for an IPv6 store host, and for the property CRC.

A producer encodes its records before it knows which store receives them, and sends the same bytes to another store
after a failover. So the store adds its own bytes. It also returns each message's physical offset, which the producer
cannot compute from the sizes of its own records. A store that needs neither does not use this module:
`MessageStore.open` chooses.
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
    """Fits batches before `write` gets them, and adds to the results the offsets that the producer cannot compute."""

    def __init__(
        self, write: WriteBatches, *, property_crc: bool, ipv6_store_host: bool, on_refused: Callable[[], None]
    ) -> None:
        """Fit batches for the property CRC, for an IPv6 store host, or for both. `on_refused` is called if a batch is
        refused.
        """
        self._write, self._on_refused = write, on_refused
        self._property_crc, self._ipv6_store_host = property_crc, ipv6_store_host

    def __call__(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Written:
        """Fit and write `batches`. Raises MessageIllegalError as `fit_batch` does, before anything is written."""
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
    """Return `batch` with the bytes that this store needs; `batch` itself if it has them already.

    Raises MessageIllegalError if the batch was not made by `encode_batch`, or if its properties get too long.
    """
    if property_crc:
        validate_batch(batch)
        batch = with_property_crc(batch)
    return with_ipv6_store_host(batch) if ipv6_store_host else batch


def name_offsets(result: AppendResult, sent: EncodedBatch, stored: EncodedBatch) -> AppendResult:
    """Return `result` with each message's physical offset, if the offsets follow from the sizes of `stored`, not
    `sent`.
    """
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
    # The store host's offset in a record; all records of a batch have the same flags.
    host_offset = STORE_HOST_OFFSET + (IPV6_EXTRA if sys_flags & SYS_FLAG_BORN_HOST_IPV6 else 0)
    starts = np.cumsum(batch.sizes, dtype=np.int64) - batch.sizes
    # Insert 12 zeros before each 4-byte store host, which makes it 16 bytes long.
    records = np.insert(np.frombuffer(batch.records, np.uint8), np.repeat(starts + host_offset, IPV6_EXTRA), 0)
    # Record i moves by the bytes that the i records before it have gained.
    starts += np.arange(len(starts)) * IPV6_EXTRA
    sizes = batch.sizes + np.int32(IPV6_EXTRA)
    # Each record's first field is its size. The flag of the longer host is in the last byte of the flags.
    windows(records, 4)[starts] = sizes.astype(">i4").view("V4")
    records[starts + SYS_FLAG_OFFSET + 3] |= SYS_FLAG_STORE_HOST_IPV6
    return replace(batch, records=records.tobytes(), sizes=sizes)
