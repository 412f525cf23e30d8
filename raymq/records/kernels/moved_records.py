"""Moves due records of delayed messages to their target queues, many records at a time.

For each record, the result equals the result of `read_waiting` and `move_record` in raymq.records.format.rewrite. The
module handles only records that these two functions move without an error. Such a record has IPv4 hosts, a common
property layout, readable properties, and a body that matches its CRC. The caller passes all other records to these two
functions, which raise the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import IllegalNameError
from raymq.common.java_text import decode_utf8
from raymq.common.message import (
    MAX_PROPERTIES_BYTES,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
)
from raymq.records.format import layout
from raymq.records.format.crc import PROPERTY_CRC_PREFIX, body_crcs
from raymq.records.format.encode import ProducerSequence, topic_part
from raymq.records.format.layout import RecordError, windows
from raymq.records.format.rewrite import EXCHANGED_NAMES, producer_text
from raymq.records.kernels.fields import Bytes, FieldOffsets, find_fields
from raymq.records.kernels.property_shapes import PropertyShape, Values, find_property_shapes

_QUEUE_ID_MAX: Final = 2**31 - 1
_CRC_NAME: Final = PROPERTY_CRC_PREFIX[:-1]
_ONLY_THE_STORE_KNOWS: Final = (
    slice(layout.QUEUE_OFFSET_OFFSET, layout.SYS_FLAG_OFFSET),
    slice(layout.STORE_TIMESTAMP_OFFSET, layout.STORE_HOST_OFFSET + 8),
    slice(layout.BODY_SIZE_OFFSET - 8, layout.BODY_SIZE_OFFSET),
)
"""Header fields that are set to zero in a moved record: the fields that the store stamps, and the prepared
transaction's offset."""


class MovedRecord(NamedTuple):
    """A delayed message's record as it will be stored in its target queue. The store must still fill in the queue
    offset, physical offset, store time and store host. `tags_code` is the code of the message's tags."""

    topic: str
    queue_id: int
    record: bytearray
    tags_code: int


def move_waiting_records(
    records: Sequence[bytes | memoryview], producers: Sequence[ProducerSequence]
) -> list[MovedRecord | None]:
    """Return, for each delayed message, the record for its target queue. The result is None for a record that the
    caller must handle separately. `records`: whole records. `producers`: the new producer sequence of each record."""
    moved: list[MovedRecord | None] = [None] * len(records)
    data = np.frombuffer(b"".join(records), np.uint8)
    sizes = np.array([len(record) for record in records], np.int64)
    try:
        fields = find_fields(data, np.cumsum(sizes) - sizes)
    except RecordError:
        return moved
    if (fields.head["total_size"] != sizes).any() or (fields.sys_flag & layout.SYS_FLAG_HOSTS_MASK).any():
        return moved
    for shape in find_property_shapes(data, fields.properties_at, fields.properties_size) or ():
        for row, record in _move_shape(data, fields, shape, producers):
            moved[row] = record
    return moved


def _move_shape(
    data: Bytes, fields: FieldOffsets, shape: PropertyShape, producers: Sequence[ProducerSequence]
) -> Iterator[tuple[int, MovedRecord]]:
    """Yield the records for the target queues of the delayed messages whose properties have the layout `shape`. Each
    record comes with its row number. Records that cannot be moved are skipped."""
    real_topic, real_queue_id = shape.get(PROPERTY_REAL_TOPIC.encode()), shape.get(PROPERTY_REAL_QUEUE_ID.encode())
    queue_ids = None if real_queue_id is None else real_queue_id.numbers()
    deliver_at = shape.get(PROPERTY_TIMER_DELIVER_MS.encode())
    if real_topic is None or queue_ids is None or queue_ids.max() > _QUEUE_ID_MAX or _CRC_NAME in shape.values:
        return
    if deliver_at is not None and deliver_at.numbers() is None:
        return
    names, name_codes = real_topic.distinct()
    topics = [_topic(name) for name in names]
    tags_codes = _tags_codes(shape.get(PROPERTY_TAGS.encode()), len(shape.rows))
    rows, kept = shape.rows, _kept_text(shape)
    headers = windows(data, layout.BODY_OFFSET)[fields.starts[rows]].view(np.uint8).reshape(-1, layout.BODY_OFFSET)
    for columns in _ONLY_THE_STORE_KNOWS:
        headers[:, columns] = 0
    _put_ints(headers, layout.QUEUE_ID_OFFSET, queue_ids)
    body_at, body_end = fields.body_at[rows].tolist(), (fields.body_at + fields.body_size)[rows].tolist()
    view = data.data
    crcs = body_crcs(view, fields.body_at[rows], (fields.body_at + fields.body_size)[rows])
    intact = (crcs == fields.head["body_crc"][rows]) | (fields.body_size[rows] == 0)
    for index, row in enumerate(rows.tolist()):
        topic = topics[int(name_codes[index])]
        producer = producers[row]
        properties = kept[index].tobytes() + producer_text(producer)
        if topic is None or len(properties) > MAX_PROPERTIES_BYTES or not intact[index]:
            continue
        body = view[body_at[index] : body_end[index]]
        record = bytearray().join((headers[index].data, body, topic.text, len(properties).to_bytes(2), properties))
        record[: layout.BODY_CRC_OFFSET] = len(record).to_bytes(4) + topic.magic
        yield row, MovedRecord(topic.name, int(queue_ids[index]), record, int(tags_codes[index]))


class _RecordTopic(NamedTuple):
    """A topic's name, the magic number of its records, and the topic's length and text as bytes of a record."""

    name: str
    magic: bytes
    text: bytes


def _topic(data: bytes) -> _RecordTopic | None:
    """Return the name and the encoded fields of the topic whose UTF-8 name is `data`. Returns None if the name is
    illegal."""
    name = decode_utf8(data)
    try:
        magic, text = topic_part(name)
    except IllegalNameError:
        return None
    return _RecordTopic(name, magic.to_bytes(4, signed=True), text)


def _tags_codes(tags: Values | None, count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64) if tags is None else tags.tags_codes()


def _kept_text(shape: PropertyShape) -> Bytes:
    """Return the property texts of due delayed messages for their records in the target queues, without the properties
    that are exchanged. The result is a table of bytes with one row per record. A separator byte follows each property.
    """
    columns: list[int] = []
    at = 0
    for piece in shape.texts[0].tobytes().split(b"\x02"):
        if piece and not piece.startswith(EXCHANGED_NAMES):
            columns += [*range(at, at + len(piece)), -1]
        at += len(piece) + 1
    wanted = np.array(columns, np.int64)
    kept = shape.texts[:, wanted]
    kept[:, wanted < 0] = 0x02
    return kept


def _put_ints(headers: Bytes, offset: int, values: NDArray[np.signedinteger[Any]]) -> None:
    """Write a 4-byte number into each record's header, at byte `offset` of the header."""
    headers[:, offset : offset + 4] = values.astype(">i4")[:, None].view(np.uint8)
