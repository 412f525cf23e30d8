"""Finds the offsets of the fields of many records at once.

This module serves readers that need some fields of each record: the columns (raymq.records.kernels.columns) and the
index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.records.format import layout
from raymq.records.format.crc import SEAL_WRONG, body_crcs, wrong_seals
from raymq.records.format.layout import HEAD_FIELDS, RecordError, windows
from raymq.records.format.places import RecordPlaces, is_topic

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class DamagedRowsError(RecordError):
    """Raised if some records of a batch fail a check. `rows`: the indices of these records, ascending. `reason`: the
    failed check."""

    def __init__(self, text: str, reason: str, rows: Ints) -> None:
        super().__init__(text, reason)
        self.rows = rows


_HEAD: Final = np.dtype([*HEAD_FIELDS, ("born_timestamp", ">i8")])


@dataclass(frozen=True, slots=True)
class FieldOffsets:
    """The fields of n records: their positions in the buffer, and their sizes in bytes. Each array has shape
    (n,)."""

    starts: Ints
    """The position in the buffer of the first byte of each record."""
    head: NDArray[np.void]
    """The header fields that HEAD_FIELDS lists, and the born timestamp, as a structured array."""
    sys_flag: Ints
    store_timestamp: NDArray[np.int64]
    """The store timestamp of each record, in milliseconds since 1970."""
    store_host_at: Ints
    body_at: Ints
    body_size: Ints
    topic_at: Ints
    """The position of each record's topic text, which follows the topic's length."""
    topic_size: Ints
    properties_at: Ints
    properties_size: Ints


def find_fields(data: Bytes, starts: Ints) -> FieldOffsets:
    """Return the checked fields of the records at positions `starts`. Raises DamagedRowsError if a field of a record
    does not fit exactly. The error names all records that fail the first failing check."""
    _require((starts >= 0) & (starts <= len(data) - layout.MIN_RECORD_SIZE), starts, "lies outside the buffer")
    # The hosts in a record's header may be IPv4 or IPv6. The fields before the hosts have the same offsets in all
    # records, so read them into one structured array.
    head = windows(data, _HEAD.itemsize)[starts].view(_HEAD)
    ends = starts + head["total_size"]
    sys_flag = head["sys_flag"].astype(np.int64)
    # An IPv6 host in a record's header is 12 bytes longer than an IPv4 host and shifts all later fields.
    born_extra = np.where(sys_flag & layout.SYS_FLAG_BORN_HOST_IPV6, layout.IPV6_EXTRA, 0)
    extra = born_extra + np.where(sys_flag & layout.SYS_FLAG_STORE_HOST_IPV6, layout.IPV6_EXTRA, 0)
    v1 = head["magic"] == layout.MAGIC_V1
    _require(v1 | (head["magic"] == layout.MAGIC_V2), starts, "does not begin with the magic of a record")
    body_at = starts + extra + layout.BODY_OFFSET
    _require((ends <= len(data)) & (body_at + 3 <= ends), starts, "is incomplete or has a wrong size")
    # Read the body's size, the last field of the header. From here on, each read uses only positions that the check
    # before it has proven to lie inside the record.
    body_size = windows(data, 4)[body_at - 4].view(">i4").astype(np.int64)
    length_at = body_at + body_size
    _require((body_size >= 0) & (length_at + 3 <= ends), starts, "has a body that is longer than the record")
    # The topic's length has one byte in V1 records and two bytes in V2 records. Read both forms and select the right
    # one for each record.
    long_size = windows(data, 2)[length_at].view(">i2").astype(np.int64)
    topic_size = np.where(v1, data[length_at], long_size)
    topic_at = length_at + np.where(v1, 1, 2)
    properties_at = topic_at + topic_size + 2
    legal = (topic_size >= 0) & (properties_at <= ends) & (~v1 | (topic_size <= layout.V1_TOPIC_SIZE_MAX))
    _require(legal, starts, "has a topic that is longer than the record")
    # Check the length fields of each record: they are right only if the properties end exactly at the record's end.
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


def find_intact(
    data: Bytes, starts: Ints, places: RecordPlaces | None = None, *, check_crc: bool = False
) -> tuple[FieldOffsets, Ints, dict[int, str]]:
    """Find the intact records among the records at positions `starts`. Returns the fields of the intact records, their
    indices (ascending), and the reason for each damaged record, by index.

    `places`: the queue, offsets and sizes that the records should have. If it is given, a record that differs from its
    place counts as damaged. With `check_crc`, a record also counts as damaged if its property CRC is wrong although its
    body matches the body's CRC.
    """
    rows, damaged = np.arange(len(starts)), dict[int, str]()
    # A check that fails reports all its damaged records at once. Repeat the checks without these records. The loop
    # ends, because each check fails at most once.
    while True:
        try:
            fields = find_fields(data, starts[rows])
            if places is not None:
                check_places(data, starts[rows], places.pick(rows) if damaged else places)
                check_topics(data, fields, places.queue.topic)
            if check_crc:
                check_seals(data, fields.starts, fields.head, fields.body_at, fields.body_size)
            return fields, rows, damaged
        except DamagedRowsError as error:
            damaged.update(dict.fromkeys(rows[error.rows].tolist(), error.reason))
            rows = np.delete(rows, error.rows)


_PLACED: Final = np.dtype([("queue_id", ">i4"), ("flag", ">i4"), ("queue_offset", ">i8"), ("physical_offset", ">i8")])
"""numpy type of the header fields from QUEUE_ID_OFFSET on. A reader compares them with the queue id, queue offset and
physical offset that a record should have."""


def check_places(data: Bytes, starts: Ints, places: RecordPlaces) -> None:
    """Raise DamagedRowsError unless the record headers at positions `starts` agree with the records' expected places.
    The headers must lie inside `data`."""
    if places.sizes is not None:
        sizes = windows(data, 4)[starts].view(">i4")
        _require(sizes == places.sizes, starts, "has another size than its queue records")
    if places.offsets is None and places.physical_offsets is None and places.queue.queue_id < 0:
        return
    head = windows(data, _PLACED.itemsize)[starts + layout.QUEUE_ID_OFFSET].view(_PLACED)
    if places.queue.queue_id >= 0:
        _require(head["queue_id"] == places.queue.queue_id, starts, "has another queue id than its queue")
    if places.offsets is not None:
        _require(head["queue_offset"] == places.offsets, starts, "has another queue offset than its queue records")
    if places.physical_offsets is not None:
        holds = head["physical_offset"] == places.physical_offsets
        _require(holds, starts, "has another physical offset than its queue records")


def check_topics(data: Bytes, fields: FieldOffsets, topic: str) -> None:
    """Raise DamagedRowsError unless all records belong to `topic`. An empty `topic` means that the topic is unknown:
    nothing is checked."""
    if not topic or not len(fields.starts):
        return
    text, at = np.frombuffer(topic.encode(errors="surrogatepass"), np.uint8), fields.topic_at
    same = fields.topic_size == len(text)
    rows = np.flatnonzero(same)
    same[rows] = windows(data, len(text))[at[rows]] == np.void(text.tobytes())
    for row in np.flatnonzero(~same).tolist():
        same[row] = is_topic(data[at[row] : at[row] + fields.topic_size[row]].tobytes(), topic)
    _require(same, fields.starts, "has another topic than its queue")


def check_seals(data: Bytes, starts: Ints, head: Mapping[str, Ints] | NDArray[np.void], at: Ints, size: Ints) -> None:
    """Raise DamagedRowsError if a record has a wrong property CRC although its body matches the body's CRC. `head`: the
    records' sizes and body CRCs, by the names of HEAD_FIELDS. `at` and `size`: positions and sizes of the bodies."""
    rows = wrong_seals(data, starts, starts + head["total_size"])
    if not len(rows):
        return
    body_holds = (body_crcs(data.data, at[rows], at[rows] + size[rows]) == head["body_crc"][rows]) | (size[rows] == 0)
    holds = np.ones(len(starts), np.bool_)
    holds[rows[body_holds]] = False
    if not holds.all():
        wrong = np.flatnonzero(~holds)
        raise DamagedRowsError(f"the record at byte {starts[wrong[0]]} does not match its CRC", SEAL_WRONG, wrong)


def _require(holds: NDArray[np.bool_], starts: Ints, otherwise: str) -> None:
    if not holds.all():
        rows = np.flatnonzero(~holds)
        raise DamagedRowsError(f"the record at byte {starts[rows[0]]} {otherwise}", f"the record {otherwise}", rows)
