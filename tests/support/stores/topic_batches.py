"""Generated messages of a topic as Arrow batches, with the columns of the batches that a scan returns."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from raymq.client.scan.ranges import OffsetRange
from raymq.records.kernels.columns import schema_with

MARCH_1_MS = 1_772_323_200_000
"""The first moment of 2026-03-01 UTC, in ms since 1970."""
HOUR_MS = 3_600_000


def messages_of(item: OffsetRange, *, step: int = 7) -> Iterator[pa.RecordBatch]:
    """Yield the messages of an offset range, `step` messages per batch. The message at offset n was stored n hours
    after the start of 2026-03-01."""
    for first in range(item.start_offset, item.end_offset, step):
        yield batch_of(item, list(range(first, min(first + step, item.end_offset))))


def batch_of(item: OffsetRange, offsets: list[int], shift_ms: int = 0) -> pa.RecordBatch:
    """Return the messages at the given offsets of a queue. Each store time is `shift_ms` later than in the batches of
    `messages_of`."""
    count = len(offsets)
    columns = {
        "topic": [item.topic] * count,
        "broker_name": [item.broker_name] * count,
        "queue_id": [item.queue_id] * count,
        "queue_offset": offsets,
        "tags": ["late" if offset % 2 else None for offset in offsets],
        "keys": [[f"o-{offset}"] for offset in offsets],
        "body": [b"%s:%d:%d" % (item.broker_name.encode(), item.queue_id, offset) for offset in offsets],
        "properties": [[("number", str(offset))] for offset in offsets],
        "born_timestamp": [MARCH_1_MS] * count,
        "store_timestamp": [MARCH_1_MS + offset * HOUR_MS + shift_ms for offset in offsets],
        "message_id": [f"{offset:032X}" for offset in offsets],
    }
    return pa.RecordBatch.from_pydict(columns, schema_with("binary"))
