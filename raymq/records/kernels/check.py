"""Checks batches from producers before a store accepts them. All records of a batch are checked together, not one by
one.

`validate_batch` raises MessageIllegalError unless a batch has the form that `encode_batch` produces.
raymq.records.format.check parses single records that are already on disk.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.errors import IllegalNameError, MessageIllegalError
from raymq.common.message import MAX_PROPERTIES_BYTES
from raymq.records.format import layout
from raymq.records.format.encode import EncodedBatch, topic_part
from raymq.records.format.layout import BODY_OFFSET, MIN_RECORD_SIZE, SYS_FLAG_HOSTS_MASK, record_ends, windows

_BIG_ENDIAN_SHORT: Final = np.dtype(">i2")
_BIG_ENDIAN_INT: Final = np.dtype(">i4")
_MAGIC_AND_QUEUE_ID: Final = struct.Struct(">ii")
_ONE_HEAD: Final = struct.Struct(">ii4xi20xi44xi")
"""Struct of the header fields of one record that are checked: total_size, magic, queue_id, sys_flag and, with IPv4
hosts, body_size."""


class BatchFacts(NamedTuple):
    """Facts about a batch of records that decide whether a store accepts the batch. Lengths are in bytes."""

    messages: int
    """Number of records in the batch."""
    longest_record: int
    longest_body: int
    longest_properties: int
    sys_flags: int
    """The sys flags of all records of a batch, combined with bitwise OR."""
    first_properties: bytes
    """The first record's properties, as bytes. The batch's other records have the same reserved property names, so
    checks of these names need only the first record."""
    stride: int = 0
    """Size in bytes of each record of a batch, if all records are known to have the same size; else 0."""


def validate_batch(batch: EncodedBatch, ends: NDArray[np.int64] | None = None) -> BatchFacts:
    """Check that `batch` has the form of the batches that `encode_batch` returns, so that its records can be stamped
    and stored.

    The sizes must add up, and each record's length fields must agree with its size. Magic number and topic must match
    `batch.topic`, queue ids must equal `batch.queue_id`, and all hosts must have the same families (IPv4 or IPv6).
    Raises MessageIllegalError if a condition is not met. Bodies and properties are not read. Returns facts for further
    checks. `ends`: `record_ends` of the sizes, if the caller has already computed them.
    """
    sizes, records = batch.sizes, batch.records
    count = len(sizes)
    if not count or len(batch.tag_codes) != count:
        raise MessageIllegalError(
            f"a batch must have as many tag codes as record sizes, not {len(batch.tag_codes)} and {count}"
        )
    try:
        magic, topic_text = topic_part(batch.topic)
    except IllegalNameError as error:
        raise MessageIllegalError(str(error)) from None
    if count == 1 and sizes.item(0) == len(records):
        facts = _facts_of_one(records, batch.queue_id, batch.topic)
        if facts is not None:
            return facts
    alike = _facts_of_alike(batch, topic_text)
    if alike is not None:
        return alike
    try:
        return _facts_of_many(batch, record_ends(sizes) if ends is None else ends, magic, topic_text)
    except IndexError:
        raise MessageIllegalError("a record is too short for its fields") from None
    except struct.error:
        raise MessageIllegalError(f"queue id {batch.queue_id} does not fit in a record") from None


def _facts_of_alike(batch: EncodedBatch, topic_text: bytes) -> BatchFacts | None:
    """Check a batch quickly, if all its records have the same lengths. The batch's memory is read as a table with one
    row per record. Returns the facts about the batch. Returns None if the first record is not legal, or if any lengths
    differ from the first record's lengths."""
    sizes, data = batch.sizes, batch.records
    count, size = len(sizes), sizes.item(0)
    if size * count != len(data) or sizes.tobytes() != sizes[:1].tobytes() * count:
        return None
    first = _facts_of_one(data[:size], batch.queue_id, batch.topic)
    if first is None:
        return None
    fixed_size = layout.header_size(first.sys_flags)
    head = np.ndarray((count, fixed_size // 4), _BIG_ENDIAN_INT, data, 0, (size, 4))
    # Every record's header must equal the first record's header in these fields: total size, magic number, queue id,
    # sys flag and body size. Other fields may differ.
    for columns in (slice(0, 2), slice(3, 4), slice(9, 10), slice(-1, None)):
        if head[:, columns].tobytes() != head[0, columns].tobytes() * count:
            return None
    width = len(topic_text) + 2
    middle = np.ndarray((count, width), np.uint8, data, fixed_size + first.longest_body, (size, 1))
    if middle.tobytes() != middle[0].tobytes() * count:
        return None
    return first._replace(messages=count, stride=size)


def _facts_of_many(batch: EncodedBatch, ends: NDArray[np.int64], magic: int, topic_text: bytes) -> BatchFacts:
    """Check the records of a batch. The records may differ in length. Reads the headers of all records at once, and
    then the bytes between bodies and properties of all records at once.

    Header fields whose value is known in advance are compared as raw bytes. Raises IndexError if a position lies
    outside the batch.
    """
    sizes, data, count, width = batch.sizes, batch.records, len(batch.sizes), len(topic_text)
    if int(ends[-1]) != len(data):
        raise MessageIllegalError(f"the records' sizes do not add up to the batch's {len(data)} bytes")
    fixed_size = layout.header_size_at(data)
    # `head`: the headers of all records of the batch, as a table of ints with one row per record. Each 4-byte field is
    # one column; an 8-byte field is two columns.
    body_starts = ends - sizes
    head = windows(data, fixed_size)[body_starts].view(_BIG_ENDIAN_INT).reshape(count, fixed_size // 4)
    same = _MAGIC_AND_QUEUE_ID.pack(magic, batch.queue_id)
    if head[:, 0].tobytes() != sizes.astype(_BIG_ENDIAN_INT).tobytes():
        raise MessageIllegalError("a record's total size differs from the size given for it")
    if head[:, 1:4:2].tobytes() != same * count:
        raise MessageIllegalError(f"a record does not belong to queue {batch.queue_id} of topic {batch.topic!r}")
    sys_flags = _common_flags(head[:, layout.SYS_FLAG_OFFSET // 4])
    # The last column of `head` is the size of the record's body. A negative size becomes a huge unsigned number, so the
    # check of the properties' length rejects it.
    bodies = head[:, -1].astype(np.uint32).astype(np.int64)
    properties = sizes - bodies
    properties -= fixed_size + width + 2
    longest_properties = int(np.maximum.reduce(properties.view(np.uint64)))
    if longest_properties > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(
            f"a record's body size leaves too few bytes for the properties, or more than {MAX_PROPERTIES_BYTES}"
        )
    # Read the topic's length and text, and the properties' length, of each record as a table of bytes, shape (count,
    # width + 2).
    body_starts += bodies
    body_starts += fixed_size
    middle = windows(data, width + 2)[body_starts].view(np.uint8).reshape(count, width + 2)
    if middle[:, :-2].tobytes() != topic_text * count:
        raise MessageIllegalError(f"a record's topic is not {batch.topic!r}")
    if middle[:, -2:].tobytes() != properties.astype(_BIG_ENDIAN_SHORT).tobytes():
        raise MessageIllegalError("a record's length fields do not add up to its size")
    first_end = int(ends[0])
    return BatchFacts(
        count,
        int(np.maximum.reduce(sizes)),
        int(np.maximum.reduce(bodies)),
        longest_properties,
        sys_flags,
        bytes(data[first_end - int(properties[0]) : first_end]),
    )


def _common_flags(column: NDArray[np.int32]) -> int:
    """Return the sys flags of all records, combined with bitwise OR. Raises MessageIllegalError unless all records have
    the same host families (IPv4 or IPv6)."""
    first = int(column[0])
    if column.tobytes() == first.to_bytes(4, signed=True) * len(column):
        return first
    either, both = int(np.bitwise_or.reduce(column)), int(np.bitwise_and.reduce(column))
    if (either ^ both) & layout.SYS_FLAG_HOSTS_MASK:
        raise MessageIllegalError("the records of a batch must have hosts of one address family")
    return either


def _facts_of_one(record: layout.Buffer, queue_id: int, topic: str) -> BatchFacts | None:
    """Check a batch of a single record. Returns None if the record is not legal. The caller then runs the checks for
    many records, which raise an error with the reason."""
    found = split_record(record, queue_id, topic)
    if found is None:
        return None
    sys_flag, body_size, properties = found
    return BatchFacts(1, len(record), body_size, len(properties), sys_flag, properties)


def split_record(record: layout.Buffer, queue_id: int, topic: str) -> tuple[int, int, bytes] | None:
    """Return the sys flags, the body's size and the properties of a record. Returns None unless `validate_batch`
    accepts the record as the only record of a batch with this queue id and topic. The function does not use numpy,
    whose overhead is large for one record."""
    size = len(record)
    if size < MIN_RECORD_SIZE:
        return None
    try:
        magic, topic_text = topic_part(topic)
    except IllegalNameError:
        return None
    total, found_magic, found_queue_id, sys_flag, body_size = _ONE_HEAD.unpack_from(record)
    fixed_size = BODY_OFFSET
    if sys_flag & SYS_FLAG_HOSTS_MASK:
        fixed_size = layout.header_size(sys_flag)
        body_size = int.from_bytes(record[fixed_size - 4 : fixed_size], signed=True)
    if total != size or found_magic != magic or found_queue_id != queue_id or body_size < 0:
        return None
    # `rest`: the part of the record after the body, which contains the topic's length and text, the properties' length,
    # and the properties.
    rest, width = bytes(record[fixed_size + body_size :]), len(topic_text)
    properties_size = len(rest) - width - 2
    if not 0 <= properties_size <= MAX_PROPERTIES_BYTES or not rest.startswith(topic_text):
        return None
    if rest[width] << 8 | rest[width + 1] != properties_size:
        return None
    return sys_flag, body_size, rest[width + 2 :]
