"""The items inside a RocketMQ batch: what its producers send, and what an inner-batch record's body holds.

An item, big-endian (spec/storage.md §1 "Batches"); items follow each other without a gap:

    | total_size 4 | magic 4, zero | crc 4, zero | flag 4 | body_size 4 | body | props_size 2 | props |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from raymq.record.layout import RecordError, decode_properties, encode_properties

_HEAD: Final = struct.Struct(">iiiii")
_SHORT: Final = struct.Struct(">h")


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One message of a batch; `properties` are all of them, reserved names too."""

    body: bytes
    properties: Mapping[str, str]
    flag: int = 0


def encode_batch_item(item: BatchItem) -> bytes:
    """`item` as it is inside a batch. MessageIllegalError when its properties cannot be written."""
    properties = encode_properties(item.properties)
    size = _HEAD.size + len(item.body) + _SHORT.size + len(properties)
    head = _HEAD.pack(size, 0, 0, item.flag, len(item.body))
    return head + item.body + _SHORT.pack(len(properties)) + properties


def decode_batch_items(data: bytes) -> list[BatchItem]:
    """The items that fill `data`. RecordError when it is cut or an item's length fields do not add up."""
    items = []
    position = 0
    while position < len(data):
        try:
            total, _, _, flag, body_size = _HEAD.unpack_from(data, position)
            body_at = position + _HEAD.size
            properties_at = body_at + body_size + _SHORT.size
            (properties_size,) = _SHORT.unpack_from(data, max(properties_at, body_at + _SHORT.size) - _SHORT.size)
        except struct.error:
            raise RecordError(f"a batch item is cut at byte {position}") from None
        end = properties_at + properties_size
        if body_size < 0 or properties_size < 0 or end != position + total or end > len(data):
            raise RecordError(f"the length fields of the batch item at byte {position} do not add up")
        properties = decode_properties(data[properties_at:end])
        items.append(BatchItem(data[body_at : properties_at - _SHORT.size], properties, flag))
        position = end
    return items
