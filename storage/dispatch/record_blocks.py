"""Reads thousands of log records at a time into columns: checked, and with the fields that recovery needs.

A block holds what `raymq.record.check.check_record` and `dispatch_view` say of each record, a column at a time. There
is a block only for ordinary records. On any doubt (damage, an implausible record, a property that occurs twice, a
number with other characters than digits) there is none, and the caller has to read those records one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.delay import is_waiting_topic
from raymq.java_text import decode_utf8
from raymq.kernels.fields import Bytes, FieldOffsets, Ints, find_fields
from raymq.message import (
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
)
from raymq.record.crc import body_crcs
from raymq.record.dispatch import DispatchView, dispatch_view
from raymq.record.hashing import tags_code
from raymq.record.layout import (
    MIN_RECORD_SIZE,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
    RecordError,
    windows,
)
from raymq.record.walk import walk_records
from storage.dispatch.record_check import can_be_topic, is_torn

BLOCK_BYTES: Final = 4 << 20
"""A block ends with the first record that reaches so many bytes."""

_SEPARATOR: Final = 0x02
_DIGITS_MAX: Final = 18
_COMPARED_MAX_BYTES: Final = 128
_NOT_QUEUED: Final = (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)
_PRODUCER_NAMES: Final = (PROPERTY_PRODUCER_ID, PROPERTY_PRODUCER_EPOCH, PROPERTY_SEQUENCE)


class Producers(NamedTuple):
    """The producers of a block's records; one element of each array per record that has one."""

    # The record's row in the block, ascending.
    rows: Ints
    # The index of its producer's instance.
    codes: Ints
    # Its sequence.
    sequences: Ints
    # The different instances: (producer id, epoch).
    instances: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """Good records back to back; one element of each array per record, in order."""

    # The end of the last record, counted like `starts` from the start of the first.
    length: int
    starts: Ints
    sizes: NDArray[np.int32]
    # As the records themselves say.
    physical_offsets: Ints
    sys_flags: Ints
    # The different topics, and for each record the index of its own.
    topics: list[str]
    topic_codes: Ints
    queue_ids: Ints
    queue_offsets: Ints
    # The codes of the records' units: of tags, or in delay queues times.
    tags_codes: Ints
    # The newest store time of all records, in ms.
    last_store_timestamp_ms: int
    producers: Producers
    # True if a record may name other queues (multi_dispatch.py).
    has_units_elsewhere: bool
    # True for records that a scheduler stored, which waited in another queue before.
    was_moved: NDArray[np.bool_]

    @property
    def queue_keys(self) -> Ints:
        """A number for each record's queue."""
        return (self.topic_codes << 32) + self.queue_ids

    @property
    def is_ordinary(self) -> bool:
        """True if no record is an inner batch, and none names other queues."""
        return not self.has_units_elsewhere and not (self.sys_flags & SYS_FLAG_INNER_BATCH).any()

    def is_queued(self) -> NDArray[np.bool_]:
        """True for each record that has a unit in a queue."""
        return ~np.isin(self.sys_flags & SYS_FLAG_TRANSACTION_MASK, _NOT_QUEUED)

    def by_queue(self, chosen: NDArray[np.bool_]) -> Iterator[Ints]:
        """The rows for which `chosen` is true, queue by queue, in order; the queue of the first row comes first."""
        rows = np.flatnonzero(chosen)
        keys = self.queue_keys[rows]
        if not len(rows) or (keys == keys[0]).all():
            return iter([rows] if len(rows) else [])
        # Sorted by queue, each queue's rows still in order; then split wherever the queue changes.
        order = np.argsort(keys, kind="stable")
        groups = np.split(rows[order], np.flatnonzero(np.diff(keys[order])) + 1)
        return iter(sorted(groups, key=lambda group: int(group[0])))

    def queue_of(self, rows: Ints) -> tuple[str, int]:
        """The topic and queue id of `rows`, all of one queue."""
        return self.topics[int(self.topic_codes[rows[0]])], int(self.queue_ids[rows[0]])


def was_moved(view: DispatchView) -> bool:
    """True if a scheduler stored the record, which waited in another queue before."""
    return PROPERTY_REAL_TOPIC in view.properties and not is_waiting_topic(view.topic)


def is_queued(sys_flag: int) -> bool:
    """True if a record with these flags has a unit in a queue."""
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
    """The records from `position` of a log file on, about 4 MiB of them; None if they have to be read one by one.

    `physical_offset` is that of the first. The block ends before the first bytes that are no record. With `may_be_torn`
    (after a crash) the last record is checked, too: those before it are not torn, as a good record follows each.
    """
    starts = walk_records(data, position, position + BLOCK_BYTES).starts
    if not len(starts):
        return None
    # From here on positions count from the first record's start.
    rest = data[position:]
    bytes_of = np.frombuffer(rest, np.uint8)
    try:
        fields = find_fields(bytes_of, starts - position)
    except RecordError:
        return None
    if check_crc and not _crcs_hold(rest, fields):
        return None
    named_topics = _topics(bytes_of, fields)
    if named_topics is None or not _is_plausible(fields, physical_offset):
        return None
    last, last_size = int(starts[-1]), int(fields.head["total_size"][-1])
    file_start = physical_offset - position
    if may_be_torn and is_torn(data, last, last_size, file_start=file_start, check_crc=check_crc):
        return None
    # The properties: tags, producers, and whether a scheduler moved the record.
    topics, topic_codes = named_topics
    properties = _PropertyTexts(bytes_of, fields)
    codes, producers = _tags_codes(properties, len(starts)), _producers(properties)
    real_topics = properties.values(PROPERTY_REAL_TOPIC)
    if codes is None or producers is None or real_topics is None:
        return None
    # Records in delay queues: their units hold a time instead of a tag's code.
    waits = np.array([is_waiting_topic(topic) for topic in topics])[topic_codes]
    moved = np.zeros(len(starts), bool)
    moved[real_topics[0]] = True
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
        producers,
        properties.has(PROPERTY_INNER_MULTI_DISPATCH),
        moved & ~waits,
    )


def _crcs_hold(data: memoryview, fields: FieldOffsets) -> bool:
    """True if each record's body has the CRC that its header says; a record without a body has none."""
    found = body_crcs(data, fields.body_at, fields.body_at + fields.body_size)
    return bool(((found == fields.head["body_crc"]) | (fields.body_size == 0)).all())


def _topics(data: Bytes, fields: FieldOffsets) -> tuple[list[str], Ints] | None:
    """The different topics, and for each record the index of its own. None if one cannot be a topic, or is no text."""
    names, codes = _distinct(data, fields.topic_at, fields.topic_at + fields.topic_size)
    try:
        topics = [name.decode() for name in names]
    except UnicodeDecodeError:
        return None
    return (topics, codes) if all(map(can_be_topic, topics)) else None


def _is_plausible(fields: FieldOffsets, physical_offset: int) -> bool:
    """True if no record is implausible (`record_check.is_implausible`, but for topics)."""
    queue_offsets = fields.head["queue_offset"]
    offsets_max = (fields.starts + physical_offset) // MIN_RECORD_SIZE
    holds = (queue_offsets >= 0) & (queue_offsets <= offsets_max) & (fields.head["queue_id"] >= 0)
    return bool(holds.all())


class _PropertyTexts:
    """The properties of many records, in one text: pieces (name, 0x01, value), each followed by a separator."""

    def __init__(self, data: Bytes, fields: FieldOffsets) -> None:
        # The text, and for each record where its properties end there.
        self.text, self._row_ends = _join(data, fields.properties_at, fields.properties_size)
        self.bytes = np.frombuffer(self.text, np.uint8)
        # Where each piece ends, at a separator, and where it starts, behind the one before.
        self._ends = np.flatnonzero(self.bytes == _SEPARATOR)
        self._starts = np.empty_like(self._ends)
        self._starts[0] = 0
        self._starts[1:] = self._ends[:-1] + 1
        # The first four bytes of each piece as a number: most pieces are told apart by comparing those.
        self._beginnings = windows(self.bytes, 4)[self._starts].view(np.uint32)

    def has(self, name: str) -> bool:
        """True if a record may have the property `name`; the name may also be a part of some other text."""
        return f"{name}\x01".encode() in self.text

    def values(self, name: str) -> tuple[Ints, Ints, Ints] | None:
        """The rows of the records that have `name`, and the start and end of each value in `text`.

        An empty value counts as none. None if a record has the property twice: then the last one counts, and the caller
        has to read the records one by one.
        """
        mark = f"{name}\x01".encode()
        # Pieces that begin like the name; of those with a value, the ones that have the whole name.
        pieces = np.flatnonzero(self._beginnings == np.frombuffer(mark, np.uint32, 1)[0])
        at, end = self._starts[pieces] + len(mark), self._ends[pieces]
        filled = at < end
        at, end = at[filled], end[filled]
        same = windows(self.bytes, len(mark))[at - len(mark)] == np.void(mark)
        at, end = at[same], end[same]
        # The record of each value: the first whose properties end behind it.
        rows = np.searchsorted(self._row_ends, at, "right")
        return None if (rows[1:] == rows[:-1]).any() else (rows, at, end)


def _distinct(data: Bytes, at: Ints, end: Ints) -> tuple[list[bytes], Ints]:
    """The different texts among those from `at` to `end`, at least one, and for each the index of its own."""
    sizes, width = end - at, int((end - at).max())
    # The texts that differ from the one before; all of them, unless they can be compared quickly.
    firsts = np.arange(len(at))
    if 0 < width <= _COMPARED_MAX_BYTES and int(at.max()) + width <= len(data):
        # Neighbours are mostly alike: only where they differ a text is copied. Each row is a text, zeros behind its
        # end.
        texts = windows(data, width)[at].view(np.uint8).reshape(-1, width)
        texts[np.arange(width) >= sizes[:, None]] = 0
        differs = (texts[1:] != texts[:-1]).any(axis=1) | (sizes[1:] != sizes[:-1])
        firsts = np.concatenate(([0], np.flatnonzero(differs) + 1))
    # Number the copied texts, then repeat each number up to the next text that differs.
    view = data.data
    found = [bytes(view[one:other]) for one, other in zip(at[firsts].tolist(), end[firsts].tolist(), strict=True)]
    code_of = {text: code for code, text in enumerate(dict.fromkeys(found))}
    codes = np.array([code_of[text] for text in found], np.int64)
    return list(code_of), np.repeat(codes, np.diff(firsts, append=len(at)))


def _join(data: Bytes, at: Ints, sizes: Ints) -> tuple[bytes, Ints]:
    """The texts of `sizes` bytes at `at` in one text, each followed by a separator or more, then 16 bytes for windows
    that reach beyond the end; and for each where it ends there."""
    ends, width = at + sizes, int(sizes.max()) + 1
    if width * len(at) <= 2 * (int(sizes.sum()) + len(at)) and int(ends.min()) >= width:
        # Rows of equal width that end with the text and begin with separators: one copy for all, if they are not much
        # longer than the texts.
        rows = windows(data, width)[ends - width].view(np.uint8).reshape(-1, width)
        rows[np.arange(width) < (width - sizes)[:, None]] = _SEPARATOR
        return rows.tobytes() + b"\x02" + bytes(16), np.arange(width, width * len(at) + 1, width)
    texts = [data.data[start:end] for start, end in zip(at.tolist(), ends.tolist(), strict=True)]
    return b"\x02".join(texts) + b"\x02" + bytes(16), np.cumsum(sizes + 1)


def _tags_codes(properties: _PropertyTexts, count: int) -> Ints | None:
    """The code of each record's tags, 0 for a record without; None if a record has tags twice."""
    found = properties.values(PROPERTY_TAGS)
    if found is None:
        return None
    rows, at, end = found
    codes = np.zeros(count, np.int64)
    if len(rows):
        tags, numbers = _distinct(properties.bytes, at, end)
        codes[rows] = np.array([tags_code(decode_utf8(tag)) for tag in tags], np.int64)[numbers]
    return codes


def _producers(properties: _PropertyTexts) -> Producers | None:
    """The producers of the records; None if a record has some but not all of the three properties, has one twice, or
    has a number with other characters than digits."""
    nobody = np.zeros(0, np.int64)
    found = [properties.values(name) for name in _PRODUCER_NAMES]
    if any(values is None for values in found):
        return None
    (rows, id_at, id_end), (epoch_rows, epoch_at, epoch_end), (sequence_rows, at, end) = (one for one in found if one)
    if not np.array_equal(rows, epoch_rows) or not np.array_equal(rows, sequence_rows):
        return None
    if not len(rows):
        return Producers(nobody, nobody, nobody, [])
    sequences = _numbers(properties.bytes, at, end)
    ids, id_codes = _distinct(properties.bytes, id_at, id_end)
    epochs, epoch_codes = _distinct(properties.bytes, epoch_at, epoch_end)
    if sequences is None or not all(epoch.isdigit() and len(epoch) <= _DIGITS_MAX for epoch in epochs):
        return None
    # Each pair of a producer id and an epoch is an instance, numbered by their indices.
    pairs, codes = np.unique(id_codes * len(epochs) + epoch_codes, return_inverse=True)
    indices = [divmod(pair, len(epochs)) for pair in pairs.tolist()]
    instances = [(decode_utf8(ids[code]), int(epochs[epoch_code])) for code, epoch_code in indices]
    return Producers(rows, codes, sequences, instances)


def _numbers(text: Bytes, at: Ints, end: Ints) -> Ints | None:
    """The decimal numbers from `at` to `end` in the text; None if one is not all digits, or too long."""
    sizes = end - at
    numbers = np.zeros(len(at), np.int64)
    if sizes.max() > _DIGITS_MAX:
        return None
    # Numbers of one length at a time: a row of digits each, times the powers of ten.
    for size in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        digits = windows(text, size)[at[chosen]].view(np.uint8).reshape(-1, size) - np.uint8(ord("0"))
        if (digits > 9).any():
            return None
        numbers[chosen] = digits.astype(np.int64) @ (10 ** np.arange(size - 1, -1, -1, dtype=np.int64))
    return numbers
