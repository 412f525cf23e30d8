"""What a store adds to a batch before it takes it: room for its own host, and for the property CRC.

A producer encodes its records before it knows which store they end up in, and sends the same bytes again to another
after a failover. What one store wants and another does not, is therefore the store's to add; the producer is told where
each message is then, because it cannot know from its own records' sizes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raymq.protocol.store import AppendResult
from raymq.record.check import validate_batch
from raymq.record.encode import EncodedBatch
from raymq.record.layout import (
    IPV6_EXTRA,
    STORE_HOST_OFFSET,
    SYS_FLAG_BORN_HOST_IPV6,
    SYS_FLAG_OFFSET,
    SYS_FLAG_STORE_HOST_IPV6,
    windows,
)
from raymq.record.stamp import with_property_crc


def fit_batch(batch: EncodedBatch, *, property_crc: bool, ipv6_store_host: bool) -> EncodedBatch:
    """`batch` as this store wants it; itself if it is so already.

    MessageIllegalError unless it is what `encode_batch` makes, and when its properties get too long.
    """
    if property_crc:
        validate_batch(batch)
        batch = with_property_crc(batch)
    return with_ipv6_store_host(batch) if ipv6_store_host else batch


def name_places(result: AppendResult, sent: EncodedBatch, stored: EncodedBatch) -> AppendResult:
    """`result` of a batch that was stored as `stored`, for the producer that knows only what it sent."""
    if stored is sent or len(sent) == 1 or result.physical_offsets is not None or result.physical_offset < 0:
        return result
    starts = result.physical_offset + np.cumsum(stored.sizes, dtype=np.int64) - stored.sizes
    return replace(result, physical_offsets=tuple(starts.tolist()))


def with_ipv6_store_host(batch: EncodedBatch) -> EncodedBatch:
    """`batch` with room for an IPv6 store host in every record; itself if it has that already.

    MessageIllegalError unless it is what `encode_batch` makes.
    """
    sys_flags = validate_batch(batch).sys_flags
    if sys_flags & SYS_FLAG_STORE_HOST_IPV6:
        return batch
    place = STORE_HOST_OFFSET + (IPV6_EXTRA if sys_flags & SYS_FLAG_BORN_HOST_IPV6 else 0)
    starts = np.cumsum(batch.sizes, dtype=np.int64) - batch.sizes
    records = np.insert(np.frombuffer(batch.records, np.uint8), np.repeat(starts + place, IPV6_EXTRA), 0)
    starts += np.arange(len(starts)) * IPV6_EXTRA
    sizes = batch.sizes + np.int32(IPV6_EXTRA)
    windows(records, 4)[starts] = sizes.astype(">i4").view("V4")
    records[starts + SYS_FLAG_OFFSET + 3] |= SYS_FLAG_STORE_HOST_IPV6
    return replace(batch, records=records.tobytes(), sizes=sizes)
