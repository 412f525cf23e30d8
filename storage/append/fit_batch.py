"""Adds to a batch the bytes that this store wants in its records: for an IPv6 store host, and for the property CRC.

A producer encodes its records before it knows which store they end up in, and sends the same bytes again to another
store after a failover. So the store adds the bytes that it alone wants, and tells the producer each message's physical
offset, which the producer cannot compute from the sizes of its own records. A store that wants neither does not come
here: `MessageStore.open` chooses.
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
    """Fits batches before `write` gets them, and names in the results the offsets that the producer cannot know."""

    def __init__(
        self, write: WriteBatches, *, property_crc: bool, ipv6_store_host: bool, on_refused: Callable[[], None]
    ) -> None:
        """Fit for the property CRC, for an IPv6 store host, or for both. `on_refused` is told when that fails."""
        self._write, self._on_refused = write, on_refused
        self._property_crc, self._ipv6_store_host = property_crc, ipv6_store_host

    def __call__(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Written:
        """`WriteBatches`. MessageIllegalError, before anything is written, as `fit_batch` raises it."""
        try:
            fitted = [self._fit(batch) for batch in batches]
        except RaymqError:
            self._on_refused()
            raise
        results, end_offset = self._write(fitted, timeout_s)
        named = [name_offsets(*row) for row in zip(results, batches, fitted, strict=True)]
        return named, end_offset

    def _fit(self, batch: EncodedBatch) -> EncodedBatch:
        return fit_batch(batch, property_crc=self._property_crc, ipv6_store_host=self._ipv6_store_host)


def fit_batch(batch: EncodedBatch, *, property_crc: bool, ipv6_store_host: bool) -> EncodedBatch:
    """`batch` with the bytes that this store wants; `batch` itself if it has them already.

    MessageIllegalError unless it is what `encode_batch` makes, and when its properties get too long.
    """
    if property_crc:
        validate_batch(batch)
        batch = with_property_crc(batch)
    return with_ipv6_store_host(batch) if ipv6_store_host else batch


def name_offsets(result: AppendResult, sent: EncodedBatch, stored: EncodedBatch) -> AppendResult:
    """`result` with the physical offset of each message, if they follow from the sizes of `stored`, not of `sent`."""
    if stored is sent or len(sent) == 1 or result.physical_offsets is not None or result.physical_offset < 0:
        return result
    starts = result.physical_offset + np.cumsum(stored.sizes, dtype=np.int64) - stored.sizes
    return msgspec.structs.replace(result, physical_offsets=tuple(starts.tolist()))


def with_ipv6_store_host(batch: EncodedBatch) -> EncodedBatch:
    """`batch` with an IPv6 store host in every record, zeros still; `batch` itself if it has that already.

    MessageIllegalError unless it is what `encode_batch` makes.
    """
    sys_flags = validate_batch(batch).sys_flags
    if sys_flags & SYS_FLAG_STORE_HOST_IPV6:
        return batch
    # The store host's offset in a record; all records of a batch have the same flags.
    host_offset = STORE_HOST_OFFSET + (IPV6_EXTRA if sys_flags & SYS_FLAG_BORN_HOST_IPV6 else 0)
    starts = np.cumsum(batch.sizes, dtype=np.int64) - batch.sizes
    # Twelve zeros before each store host: with its four bytes it has sixteen then.
    records = np.insert(np.frombuffer(batch.records, np.uint8), np.repeat(starts + host_offset, IPV6_EXTRA), 0)
    # Record i has moved by what the i records before it have grown.
    starts += np.arange(len(starts)) * IPV6_EXTRA
    sizes = batch.sizes + np.int32(IPV6_EXTRA)
    # Each record's first field is its size; then the flag that tells the longer host, in the last byte of the flags.
    windows(records, 4)[starts] = sizes.astype(">i4").view("V4")
    records[starts + SYS_FLAG_OFFSET + 3] |= SYS_FLAG_STORE_HOST_IPV6
    return replace(batch, records=records.tobytes(), sizes=sizes)
