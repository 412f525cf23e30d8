"""The offsets of the fields of many records, found for all records at once.

It serves readers that take some fields of each record and leave the rest where it is: the columns
(raymq.kernels.columns) and the index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.record import layout
from raymq.record.layout import HEAD_FIELDS, RecordError, windows

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_HEAD: Final = np.dtype([*HEAD_FIELDS, ("born_timestamp", ">i8")])


@dataclass(frozen=True, slots=True)
class FieldOffsets:
    """Positions in the buffer and sizes, in bytes, of the fields of n records. Each array has shape (n,)."""

    starts: Ints
    """The first byte of each record."""
    head: NDArray[np.void]
    """The fields of HEAD_FIELDS and the born timestamp, by name."""
    sys_flag: Ints
    store_timestamp: NDArray[np.int64]
    """In milliseconds since 1970."""
    store_host_at: Ints
    body_at: Ints
    body_size: Ints
    topic_at: Ints
    """The topic's text, behind its length."""
    topic_size: Ints
    properties_at: Ints
    properties_size: Ints


def find_fields(data: Bytes, starts: Ints) -> FieldOffsets:
    """The fields of the records at `starts`, checked. RecordError unless every field of each record fits exactly."""
    _require((starts >= 0) & (starts <= len(data) - layout.MIN_RECORD_SIZE), starts, "lies outside the buffer")
    # The fields whose offset does not depend on the hosts, gathered as one structured array.
    head = windows(data, _HEAD.itemsize)[starts].view(_HEAD)
    ends = starts + head["total_size"]
    sys_flag = head["sys_flag"].astype(np.int64)
    # An IPv6 host is 12 bytes longer and moves everything behind it.
    born_extra = np.where(sys_flag & layout.SYS_FLAG_BORN_HOST_IPV6, layout.IPV6_EXTRA, 0)
    extra = born_extra + np.where(sys_flag & layout.SYS_FLAG_STORE_HOST_IPV6, layout.IPV6_EXTRA, 0)
    v1 = head["magic"] == layout.MAGIC_V1
    _require(v1 | (head["magic"] == layout.MAGIC_V2), starts, "has no record's magic")
    body_at = starts + extra + layout.BODY_OFFSET
    _require((ends <= len(data)) & (body_at + 3 <= ends), starts, "is cut or claims a wrong size")
    # The body: its size ends the header. Each gather reads only positions that the check before it has admitted.
    body_size = windows(data, 4)[body_at - 4].view(">i4").astype(np.int64)
    length_at = body_at + body_size
    _require((body_size >= 0) & (length_at + 3 <= ends), starts, "has a body that does not fit in it")
    # The topic: its length takes one byte in V1 and two in V2; both are read and the right one is chosen.
    long_size = windows(data, 2)[length_at].view(">i2").astype(np.int64)
    topic_size = np.where(v1, data[length_at], long_size)
    topic_at = length_at + np.where(v1, 1, 2)
    properties_at = topic_at + topic_size + 2
    legal = (topic_size >= 0) & (properties_at <= ends) & (~v1 | (topic_size <= layout.V1_TOPIC_SIZE_MAX))
    _require(legal, starts, "has a topic that does not fit in it")
    # The properties must end where the record ends.
    properties_size = windows(data, 2)[properties_at - 2].view(">i2").astype(np.int64)
    _require(properties_at + properties_size == ends, starts, "has length fields that do not add up to its size")
    return FieldOffsets(
        starts,
        head,
        sys_flag,
        windows(data, 8)[starts + born_extra + layout.STORE_TIMESTAMP_OFFSET].view(">i8"),
        starts + born_extra + layout.STORE_HOST_OFFSET,
        body_at,
        body_size,
        topic_at,
        topic_size,
        properties_at,
        properties_size,
    )


def _require(holds: NDArray[np.bool_], starts: Ints, otherwise: str) -> None:
    if not holds.all():
        raise RecordError(f"the record at byte {starts[int(np.argmin(holds))]} {otherwise}")
