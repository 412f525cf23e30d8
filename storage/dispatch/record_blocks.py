"""Reads thousands of log records at a time into columns, checks them, and extracts the fields that recovery needs.

A block has the results of `raymq.records.format.check.check_record` and `dispatch_view` for many records, as one column
per field. Only ordinary records form a block. If any record is doubtful, no block is returned, and the caller must read
the records one by one. Doubtful are: damage, an implausible record, a property that occurs twice, or a number with
characters other than digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.delay import is_waiting_topic, names_real_topic
from raymq.common.message import PROPERTY_REAL_TOPIC
from raymq.common.names import TRANSACTION_TOPICS
from raymq.records.format.crc import body_crcs, wrong_seals
from raymq.records.format.dispatch import DispatchView, dispatch_view
from raymq.records.format.layout import (
    MIN_RECORD_SIZE,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
    RecordError,
)
from raymq.records.format.walk import walk_records
from raymq.records.kernels.fields import Bytes, FieldOffsets, Ints, find_fields
from storage.dispatch.block_properties import Producers, distinct_texts, read_properties
from storage.dispatch.record_check import can_be_topic, is_torn

BLOCK_BYTES: Final = 4 << 20
"""Target size, in bytes, of a block of log records, which are processed together. The block ends with the first record
that reaches this size."""

_NOT_QUEUED: Final = (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive intact log records as columns. Each array has one element per record, in log order."""

    # The end of the block's last record, counted from the start of its first record, like the offsets in `starts`.
    length: int
    starts: Ints
    sizes: NDArray[np.int32]
    # The physical offsets that the headers of the records contain.
    physical_offsets: Ints
    sys_flags: Ints
    # The distinct topics of the block, and for each record the index of its topic.
    topics: list[str]
    topic_codes: Ints
    queue_ids: Ints
    queue_offsets: Ints
    # The codes that the records' consume-queue entries (units) contain: tags codes, or delivery times for records in
    # delay queues.
    tags_codes: Ints
    # The newest store time of all records in the block, in ms.
    last_store_timestamp_ms: int
    producers: Producers
    # True if any record of the block may name additional queues. Such a record also has units in these queues
    # (multi_dispatch.py).
    has_light_queue_units: bool
    # True for each record that a scheduler stored after the message had waited in another queue.
    was_moved: NDArray[np.bool_]

    @property
    def queue_keys(self) -> Ints:
        """Return a number for each record. Records of the block have equal numbers if they belong to the same
        queue."""
        return (self.topic_codes << 32) + self.queue_ids

    @property
    def is_ordinary(self) -> bool:
        """True if each record of the block is ordinary: it is no inner batch, names no additional queues, and is not
        part of a transaction."""
        if self.has_light_queue_units or (self.sys_flags & SYS_FLAG_INNER_BATCH).any():
            return False
        return not self.of_transactions().any()

    def of_transactions(self) -> NDArray[np.bool_]:
        """True for each record from which the table of half messages must be updated (half_messages.py)."""
        internal = np.array([topic in TRANSACTION_TOPICS for topic in self.topics])[self.topic_codes]
        committed = self.sys_flags & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_COMMIT
        found: NDArray[np.bool_] = internal | committed
        return found

    def is_queued(self) -> NDArray[np.bool_]:
        """Return a mask of the block's records: True for each record that has an entry (unit) in a consume
        queue."""
        kinds: Ints = self.sys_flags & SYS_FLAG_TRANSACTION_MASK
        queued: NDArray[np.bool_] = (kinds != SYS_FLAG_TRANSACTION_PREPARED) & (kinds != SYS_FLAG_TRANSACTION_ROLLBACK)
        return queued

    def by_queue(self, chosen: NDArray[np.bool_]) -> Iterator[Ints]:
        """Yield the rows of the block for which `chosen` is true, one array of rows per queue. Rows of a queue keep
        their order. The queue of the first row comes first."""
        rows = np.flatnonzero(chosen)
        keys = self.queue_keys[rows]
        if not len(rows) or (keys == keys[0]).all():
            return iter([rows] if len(rows) else [])
        # Sort the rows by queue, keeping the order within each queue. Then split the rows into one group per queue.
        order = np.argsort(keys, kind="stable")
        groups = np.split(rows[order], np.flatnonzero(np.diff(keys[order])) + 1)
        return iter(sorted(groups, key=lambda group: int(group[0])))

    def queue_of(self, rows: Ints) -> tuple[str, int]:
        """Return the topic and queue id of the given rows of the block, which all belong to one queue."""
        return self.topics[int(self.topic_codes[rows[0]])], int(self.queue_ids[rows[0]])


def was_moved(view: DispatchView) -> bool:
    """True if a scheduler stored the record after the message had waited in another queue."""
    return PROPERTY_REAL_TOPIC in view.properties and not names_real_topic(view.topic)


def is_queued(sys_flag: int) -> bool:
    """True if a record with the flags `sys_flag` has an entry (unit) in a consume queue."""
    return sys_flag & SYS_FLAG_TRANSACTION_MASK not in _NOT_QUEUED


def read_block(
    data: memoryview,
    position: int,
    physical_offset: int,
    *,
    check_crc: bool,
    delay_levels_ms: tuple[int, ...],
    may_be_torn: bool = False,
) -> Block | None:
    """Read a block of about 4 MiB of records from `position` of a log file on. Returns None if the caller must read the
    records one by one.

    `physical_offset` is the physical offset of the first record. The block ends before the first bytes that are not a
    record. With `may_be_torn` (after a crash), the function also checks whether the end of the last record is torn.
    Earlier records cannot be torn, because a good record follows each of them.
    """
    starts = walk_records(data, position, position + BLOCK_BYTES).starts
    if not len(starts):
        return None
    # Below, positions are counted from the start of the block's first record.
    rest = data[position:]
    bytes_of = np.frombuffer(rest, np.uint8)
    try:
        fields = find_fields(bytes_of, starts - position)
    except RecordError:
        return None
    if check_crc and not (_crcs_hold(rest, fields) and _seals_hold(bytes_of, fields)):
        return None
    named_topics = _topics(bytes_of, fields)
    if named_topics is None or not _is_plausible(fields, physical_offset):
        return None
    last, last_size = int(starts[-1]), int(fields.head["total_size"][-1])
    file_start = physical_offset - position
    if may_be_torn and is_torn(data, last, last_size, file_start=file_start, check_crc=check_crc):
        return None
    topics, topic_codes = named_topics
    found = read_properties(bytes_of, fields)
    if found is None:
        return None
    # Queue units of records in delay queues contain a delivery time instead of a tags code.
    waits = np.array([is_waiting_topic(topic) for topic in topics])[topic_codes]
    codes = found.tags_codes
    for row in np.flatnonzero(waits).tolist():
        codes[row] = dispatch_view(rest, int(fields.starts[row]), delay_levels_ms=delay_levels_ms).tags_code
    return Block(
        int(fields.starts[-1]) + int(fields.head["total_size"][-1]),
        fields.starts,
        fields.head["total_size"].astype(np.int32),
        fields.head["physical_offset"].astype(np.int64),
        fields.sys_flag,
        topics,
        topic_codes,
        fields.head["queue_id"].astype(np.int64),
        fields.head["queue_offset"].astype(np.int64),
        codes,
        int(fields.store_timestamp.max()),
        found.producers,
        found.has_light_queue_units,
        found.was_moved & ~np.array([names_real_topic(topic) for topic in topics])[topic_codes],
    )


def _crcs_hold(data: memoryview, fields: FieldOffsets) -> bool:
    """True if the body of each record matches the CRC in the record's header. A record without a body has no
    CRC."""
    found = body_crcs(data, fields.body_at, fields.body_at + fields.body_size)
    return bool(((found == fields.head["body_crc"]) | (fields.body_size == 0)).all())


def _seals_hold(data: Bytes, fields: FieldOffsets) -> bool:
    """True if each record that has a property CRC matches its property CRC."""
    return not len(wrong_seals(data, fields.starts, fields.starts + fields.head["total_size"]))


def _topics(data: Bytes, fields: FieldOffsets) -> tuple[list[str], Ints] | None:
    """Return the distinct topics, and for each record the index of its topic. Return None if a topic's name is not
    valid text or cannot be a topic."""
    names, codes = distinct_texts(data, fields.topic_at, fields.topic_at + fields.topic_size)
    try:
        topics = [name.decode() for name in names]
    except UnicodeDecodeError:
        return None
    return (topics, codes) if all(map(can_be_topic, topics)) else None


def _is_plausible(fields: FieldOffsets, physical_offset: int) -> bool:
    """True if every record of a block is plausible, by the rules of `record_check.is_implausible`. Topics are not
    checked here."""
    queue_offsets = fields.head["queue_offset"]
    offsets_max = (fields.starts + physical_offset) // MIN_RECORD_SIZE
    holds = (queue_offsets >= 0) & (queue_offsets <= offsets_max) & (fields.head["queue_id"] >= 0)
    return bool(holds.all())
