"""Where the parts of many records are, found for all of them at once.

For readers that take a part of each record and leave the rest where it is: the columns (raymq.columnar.columns) and the
index.
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
    """Where the parts of each record are: positions and sizes in bytes, one element per record."""

    starts: Ints
    head: NDArray[np.void]
    sys_flag: Ints
    store_timestamp: NDArray[np.int64]
    store_host_at: Ints
    body_at: Ints
    body_size: Ints
    topic_at: Ints
    topic_size: Ints
    properties_at: Ints
    properties_size: Ints


def find_fields(data: Bytes, starts: Ints) -> FieldOffsets:
    """Find and check the parts of the records at `starts`. RecordError unless every part fits exactly."""
    _require((starts >= 0) & (starts <= len(data) - layout.MIN_RECORD_SIZE), starts, "lies outside the buffer")
    head = windows(data, _HEAD.itemsize)[starts].view(_HEAD)
    ends = starts + head["total_size"]
    sys_flag = head["sys_flag"].astype(np.int64)
    born_extra = np.where(sys_flag & layout.SYS_FLAG_BORN_HOST_IPV6, layout.IPV6_EXTRA, 0)
    extra = born_extra + np.where(sys_flag & layout.SYS_FLAG_STORE_HOST_IPV6, layout.IPV6_EXTRA, 0)
    v1 = head["magic"] == layout.MAGIC_V1
    _require(v1 | (head["magic"] == layout.MAGIC_V2), starts, "has no record's magic")
    body_at = starts + extra + layout.BODY_OFFSET
    _require((ends <= len(data)) & (body_at + 3 <= ends), starts, "is cut or claims a wrong size")
    body_size = windows(data, 4)[body_at - 4].view(">i4").astype(np.int64)
    length_at = body_at + body_size
    _require((body_size >= 0) & (length_at + 3 <= ends), starts, "has a body that does not fit in it")
    long_size = windows(data, 2)[length_at].view(">i2").astype(np.int64)
    topic_size = np.where(v1, data[length_at], long_size)
    topic_at = length_at + np.where(v1, 1, 2)
    properties_at = topic_at + topic_size + 2
    legal = (topic_size >= 0) & (properties_at <= ends) & (~v1 | (topic_size <= layout.V1_TOPIC_SIZE_MAX))
    _require(legal, starts, "has a topic that does not fit in it")
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
