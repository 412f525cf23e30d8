"""Inner batches: RocketMQ's records that contain many messages each (spec/storage.md §1 "Batches").

An inner-batch record has the sys flags 0x40 and 0x80. Its body, which may be compressed, is a sequence of items
(spec/storage.md §1). The properties INNER_NUM and INNER_BASE contain the number of items and the queue offset of the
first item. raymq.records.format.inner_batch_encode writes inner batches. A reader of a queue with inner batches
receives a separate record for each message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from raymq.common.message import PROPERTY_INNER_BASE, PROPERTY_INNER_NUM, PROPERTY_KEYS, PROPERTY_UNIQ_KEY
from raymq.records.format.check import check_record
from raymq.records.format.compression import INNER_BATCH_MAX_BYTES, decompress
from raymq.records.format.crc import body_crc
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.inner_batch_encode import INNER_MESSAGES_MAX
from raymq.records.format.layout import (
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_TYPE_MASK,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_NEED_UNWRAP,
    Buffer,
    RecordError,
    RecordHeader,
    decode_properties,
    encode_properties,
    find_sections,
    header_size,
    read_header,
)

_OF_THE_BATCH: Final = (
    SYS_FLAG_COMPRESSED | SYS_FLAG_NEED_UNWRAP | SYS_FLAG_INNER_BATCH | SYS_FLAG_COMPRESSION_TYPE_MASK
)


class InnerBatch(NamedTuple):
    """The queue offsets of an inner batch: `messages` consecutive offsets from `base_offset` on."""

    base_offset: int
    messages: int


def inner_batch(view: DispatchView) -> InnerBatch:
    """Return the queue offsets of an inner-batch record. Raises RecordError if the record's properties do not contain
    these offsets."""
    try:
        found = InnerBatch(int(view.properties[PROPERTY_INNER_BASE]), int(view.properties[PROPERTY_INNER_NUM]))
    except (KeyError, ValueError):
        found = InnerBatch(-1, 0)
    if found.base_offset < 0 or not 0 < found.messages <= INNER_MESSAGES_MAX:
        raise RecordError(f"the inner batch at physical offset {view.physical_offset} lacks its queue offsets")
    return found


def split_inner_batch(record: Buffer) -> list[bytes]:
    """Split an inner-batch record into one record per message, in order. Raises RecordError if the record is damaged or
    is not an inner batch.

    Each new record has the flag, body and properties of one message, and its own queue offset. All other fields,
    including the physical offset, are copied from the inner batch.
    """
    data = bytes(record)
    if check_record(data) != (len(data), True):
        raise RecordError("an inner batch is damaged")
    view = dispatch_view(data)
    base_offset, count = inner_batch(view)
    header = read_header(data)
    _, body_end, _, properties_at, _ = find_sections(data, 0, header)
    items = _items_of(data, header)
    if len(items) != count:
        raise RecordError(
            f"the inner batch at physical offset {view.physical_offset} has {len(items)} messages, not {count}"
        )
    # `topic`: the part of the inner batch that contains the topic's length and the topic's text. The record that is
    # built for each message contains the same bytes.
    topic = data[body_end : properties_at - 2]
    header = header._replace(sys_flag=header.sys_flag & ~_OF_THE_BATCH)
    return [_record_of(item, header, base_offset + index, topic) for index, item in enumerate(items)]


def inner_keys(record: Buffer) -> list[str]:
    """Return the index keys of the messages in an inner batch, in order: each message's unique id, then its business
    keys. Raises RecordError if the batch is damaged."""
    keys: list[str] = []
    for item in _items_of(bytes(record), read_header(record)):
        names = [item.properties.get(PROPERTY_UNIQ_KEY, ""), *item.properties.get(PROPERTY_KEYS, "").split(" ")]
        keys += [name for name in names if name]
    return keys


def _items_of(record: bytes, header: RecordHeader) -> list[BatchItem]:
    """Return the messages (items) in the body of an inner batch. The body may be compressed."""
    body_at, body_end, _, _, _ = find_sections(record, 0, header)
    body = record[body_at:body_end]
    return decode_batch_items(decompress(body, header.sys_flag, max_bytes=INNER_BATCH_MAX_BYTES))


def _record_of(item: BatchItem, batch: RecordHeader, queue_offset: int, topic: bytes) -> bytes:
    """Return the separate record of one message of an inner batch. `batch`: the header of the inner batch. `topic`: the
    topic's length and text, as in a record."""
    properties = encode_properties(item.properties)
    header = batch._replace(
        total_size=header_size(batch.sys_flag) + len(item.body) + len(topic) + _SHORT.size + len(properties),
        body_crc=body_crc(item.body),
        flag=item.flag,
        queue_offset=queue_offset,
        body_size=len(item.body),
    )
    return header.encode() + item.body + topic + _SHORT.pack(len(properties)) + properties


_HEAD: Final = struct.Struct(">iiiii")


_SHORT: Final = struct.Struct(">h")


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One message of an inner batch. `properties` includes reserved properties."""

    body: bytes
    properties: Mapping[str, str]
    flag: int = 0


def encode_batch_item(item: BatchItem) -> bytes:
    """Encode one message as an item of an inner batch. Raises MessageIllegalError if the item's properties cannot be
    encoded."""
    properties = encode_properties(item.properties)
    size = _HEAD.size + len(item.body) + _SHORT.size + len(properties)
    head = _HEAD.pack(size, 0, 0, item.flag, len(item.body))
    return head + item.body + _SHORT.pack(len(properties)) + properties


def count_items(data: bytes) -> int:
    """Return the number of inner-batch items that fill `data`, from the items' sizes. Raises RecordError if `data` is
    truncated or an item's length fields do not add up."""
    count, position = 0, 0
    while position < len(data):
        position = _item_at(data, position)[-1]
        count += 1
    return count


def _item_at(data: bytes, position: int) -> tuple[int, int, int, int]:
    """Parse the inner-batch item at `position`. Returns the item's flag, the start of its body, the start of its
    properties, and its end. Raises RecordError if the item is truncated or its length fields do not add up."""
    try:
        total, _, _, flag, body_size = _HEAD.unpack_from(data, position)
        body_at = position + _HEAD.size
        properties_at = body_at + body_size + _SHORT.size
        (properties_size,) = _SHORT.unpack_from(data, max(properties_at, body_at + _SHORT.size) - _SHORT.size)
    except struct.error:
        raise RecordError(f"the item at byte {position} of an inner batch is incomplete") from None
    end = properties_at + properties_size
    if body_size < 0 or properties_size < 0 or end != position + total or end > len(data):
        raise RecordError(f"the length fields of the item at byte {position} of an inner batch do not add up")
    return flag, body_at, properties_at, end


def decode_batch_items(data: bytes) -> list[BatchItem]:
    """Return the inner-batch items that fill `data`. Raises RecordError if `data` is truncated or an item's length
    fields do not add up."""
    items = []
    position = 0
    while position < len(data):
        flag, body_at, properties_at, end = _item_at(data, position)
        properties = decode_properties(data[properties_at:end])
        items.append(BatchItem(data[body_at : properties_at - _SHORT.size], properties, flag))
        position = end
    return items
