"""Creates test records of a topic with `queue.type=BatchCQ`, as RocketMQ writes them: one record for many
messages."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from raymq.common.message import Message
from raymq.records.format.encode import encode_batch
from raymq.records.format.inner_batch import BatchItem, encode_batch_item
from raymq.records.format.layout import SYS_FLAG_OFFSET, encode_host
from raymq.records.kernels.stamp import stamp


def inner_batch_record(
    items: Sequence[BatchItem],
    *,
    base_offset: int,
    physical_offset: int,
    topic: str = "batched",
    queue_id: int = 0,
    store_timestamp_ms: int = 1_700_000_000_001,
    born_ip: str = "127.0.0.1",
    compressed: bool = False,
    num: int | None = None,
    keys: str | None = None,
) -> bytes:
    """Return a record that holds all `items`, with queue offsets from `base_offset` on. `num`: the message count in the
    record's properties."""
    body = b"".join(map(encode_batch_item, items))
    properties = {"INNER_NUM": str(len(items) if num is None else num), "INNER_BASE": str(base_offset)}
    batch = encode_batch(
        [Message(topic, zlib.compress(body) if compressed else body, keys=keys or ())],
        queue_id,
        born_host=(born_ip, 5000),
        born_timestamp_ms=1_700_000_000_000,
        message_ids=["0" * 32],
        extra_properties=properties,
    )
    record = bytearray(batch.records)
    record[SYS_FLAG_OFFSET + 3] |= 0xC0 | compressed
    stamp(
        record,
        batch.sizes,
        first_queue_offset=base_offset,
        first_physical_offset=physical_offset,
        store_timestamp_ms=store_timestamp_ms,
        store_host=encode_host("127.0.0.1", 10911),
    )
    return bytes(record)
