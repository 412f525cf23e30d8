"""Thousands of log records at a time, checked and taken apart as recovery needs them.

A block says what `raymq.record.check.check_record` and `dispatch_view` say of each record, a column at a time. It says
so only where nothing is out of the ordinary. On any doubt (damage, a record that cannot be, a property that is there
twice, a number that is none) there is no block, and the reader has to look at those records one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from raymq.columnar.fields import Bytes, FieldOffsets, Ints, find_fields
from raymq.delay import is_waiting_topic
from raymq.java_text import decode_utf8
from raymq.message import (
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_PRODUCER_EPOCH,
    PROPERTY_PRODUCER_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEQUENCE,
    PROPERTY_TAGS,
)
from raymq.record.dispatch import DispatchView, dispatch_view
from raymq.record.hashing import tags_code
from raymq.record.layout import (
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_SIZE,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
    RecordError,
    windows,
)
from storage.dispatch.record_check import can_be_topic, is_torn

BLOCK_BYTES: Final = 4 << 20

_INTS: Final = struct.Struct(">ii")
_MAGICS: Final = (MAGIC_V1, MAGIC_V2)
_SEPARATOR: Final = 0x02
_DIGITS_MAX: Final = 18
_COMPARED_MAX_BYTES: Final = 128
_NOT_QUEUED: Final = (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)
_PRODUCER_NAMES: Final = (PROPERTY_PRODUCER_ID, PROPERTY_PRODUCER_EPOCH, PROPERTY_SEQUENCE)


class Producers(NamedTuple):
    """Who sent the records at `rows` of a block, with which sequence: `codes` are indices into `instances`, which are
    (producer id, epoch)."""

    rows: Ints
    codes: Ints
    sequences: Ints
    instances: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """Good records back to back, one element of each array per record, in order.

    The first record starts at byte 0 of the block; `length` is where the last ends. `physical_offsets` are what the
    records say of themselves. `topics` are numbered by `topic_codes`.
    """

    length: int
    starts: Ints
    sizes: NDArray[np.int32]
    physical_offsets: Ints
    sys_flags: Ints
    topics: list[str]
    topic_codes: Ints
    queue_ids: Ints
    queue_offsets: Ints
    tags_codes: Ints
    last_store_timestamp_ms: int
    producers: Producers
    has_units_elsewhere: bool
    was_moved: NDArray[np.bool_]

    @property
    def queue_keys(self) -> Ints:
        """A number for each record's queue."""
        return (self.topic_codes << 32) + self.queue_ids

    @property
    def is_ordinary(self) -> bool:
        """Whether each record is in one queue, of single messages: none is an inner batch, or names other queues."""
        return not self.has_units_elsewhere and not (self.sys_flags & SYS_FLAG_INNER_BATCH).any()

    def is_queued(self) -> NDArray[np.bool_]:
        """Which records have a unit in a queue."""
        return ~np.isin(self.sys_flags & SYS_FLAG_TRANSACTION_MASK, _NOT_QUEUED)

    def by_queue(self, chosen: NDArray[np.bool_]) -> Iterator[Ints]:
        """The rows for which `chosen` is true, by queue, each in order, the queue first that comes first."""
        rows = np.flatnonzero(chosen)
        keys = self.queue_keys[rows]
        if not len(rows) or (keys == keys[0]).all():
            return iter([rows] if len(rows) else [])
        order = np.argsort(keys, kind="stable")
        groups = np.split(rows[order], np.flatnonzero(np.diff(keys[order])) + 1)
        return iter(sorted(groups, key=lambda group: int(group[0])))

    def queue_of(self, rows: Ints) -> tuple[str, int]:
        """The queue of `rows`, which are of one."""
        return self.topics[int(self.topic_codes[rows[0]])], int(self.queue_ids[rows[0]])


def was_moved(view: DispatchView) -> bool:
    """Whether a scheduler stored the record, which waited in another queue before."""
    return PROPERTY_REAL_TOPIC in view.properties and not is_waiting_topic(view.topic)


def is_queued(sys_flag: int) -> bool:
    """Whether a record with these flags has a unit in a queue."""
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
    """The records from `position` of a log file on, about 4 MiB of them; None where they have to be looked at singly.

    `physical_offset` is that of the first. The block ends before the first bytes that are no record. With `may_be_torn`
    (after a crash) a block has no last record that is torn; those before it are not, as a good record follows.
    """
    starts = _hop(data, position)
    if not starts:
        return None
    rest = data[position:]
    bytes_of = np.frombuffer(rest, np.uint8)
    try:
        places = find_fields(bytes_of, np.array(starts, np.int64) - position)
    except RecordError:
        return None
    if check_crc and not _crcs_hold(rest, places):
        return None
    named_topics = _topics(bytes_of, places)
    if named_topics is None or not _is_plausible(places, physical_offset):
        return None
    last, last_size = starts[-1], int(places.head["total_size"][-1])
    file_start = physical_offset - position
    if may_be_torn and is_torn(data, last, last_size, file_start=file_start, check_crc=check_crc):
        return None
    topics, topic_codes = named_topics
    properties = _PropertyTexts(bytes_of, places)
    codes, producers = _tags_codes(properties, len(starts)), _producers(properties)
    real_topics = properties.values(PROPERTY_REAL_TOPIC)
    if codes is None or producers is None or real_topics is None:
        return None
    waits = np.array([is_waiting_topic(topic) for topic in topics])[topic_codes]
    moved = np.zeros(len(starts), bool)
    moved[real_topics[0]] = True
    for row in np.flatnonzero(waits).tolist():
        codes[row] = dispatch_view(rest, int(places.starts[row]), delay_levels_ms=delay_levels_ms).tags_code
    return Block(
        int(places.starts[-1]) + int(places.head["total_size"][-1]),
        places.starts,
        places.head["total_size"].astype(np.int32),
        places.head["physical_offset"].astype(np.int64),
        places.sys_flag,
        topics,
        topic_codes,
        places.head["queue_id"].astype(np.int64),
        places.head["queue_offset"].astype(np.int64),
        codes,
        int(places.store_timestamp.max()),
        producers,
        properties.has(PROPERTY_INNER_MULTI_DISPATCH),
        moved & ~waits,
    )


def _hop(data: memoryview, position: int) -> list[int]:
    """Where records start, by their sizes and magics."""
    starts = []
    end, limit, unpack_from = len(data), position + BLOCK_BYTES, _INTS.unpack_from
    while position < limit and position <= end - MIN_RECORD_SIZE:
        size, magic = unpack_from(data, position)
        if magic not in _MAGICS or not MIN_RECORD_SIZE <= size <= end - position:
            break
        starts.append(position)
        position += size
    return starts


def _crcs_hold(data: memoryview, places: FieldOffsets) -> bool:
    ends = (places.body_at + places.body_size).tolist()
    found = [crc32(data[at:end]) for at, end in zip(places.body_at.tolist(), ends, strict=True)]
    same = (np.array(found, np.int64) & 0x7FFFFFFF) == places.head["body_crc"]
    return bool((same | (places.body_size == 0)).all())


def _topics(data: Bytes, places: FieldOffsets) -> tuple[list[str], Ints] | None:
    """The topics, and for each record the number of its own. None if one cannot be a topic, or is no text."""
    names, codes = _distinct(data, places.topic_at, places.topic_at + places.topic_size)
    try:
        topics = [name.decode() for name in names]
    except UnicodeDecodeError:
        return None
    return (topics, codes) if all(map(can_be_topic, topics)) else None


def _is_plausible(places: FieldOffsets, physical_offset: int) -> bool:
    """What recovery asks of a good record beside its checks (storage.recovery.recovery)."""
    queue_offsets = places.head["queue_offset"]
    offsets_max = (places.starts + physical_offset) // MIN_RECORD_SIZE
    holds = (queue_offsets >= 0) & (queue_offsets <= offsets_max) & (places.head["queue_id"] >= 0)
    return bool(holds.all())


class _PropertyTexts:
    """The properties of many records: all their pieces (name, 0x01, value) in one text."""

    def __init__(self, data: Bytes, places: FieldOffsets) -> None:
        self.text, self._row_ends = _join(data, places.properties_at, places.properties_size)
        self.bytes = np.frombuffer(self.text, np.uint8)
        self._ends = np.flatnonzero(self.bytes == _SEPARATOR)
        self._starts = np.empty_like(self._ends)
        self._starts[0] = 0
        self._starts[1:] = self._ends[:-1] + 1
        self._beginnings = windows(self.bytes, 4)[self._starts].view(np.uint32)

    def has(self, name: str) -> bool:
        """Whether a record may have the property `name`, perhaps as a part of something else."""
        return f"{name}\x01".encode() in self.text

    def values(self, name: str) -> tuple[Ints, Ints, Ints] | None:
        """In which records `name` is, and there the place of its value in `text`: from, to. Empty values are none. None
        if a record has it twice: then the last one counts."""
        mark = f"{name}\x01".encode()
        pieces = np.flatnonzero(self._beginnings == np.frombuffer(mark, np.uint32, 1)[0])
        at, end = self._starts[pieces] + len(mark), self._ends[pieces]
        filled = at < end
        at, end = at[filled], end[filled]
        same = windows(self.bytes, len(mark))[at - len(mark)] == np.void(mark)
        at, end = at[same], end[same]
        rows = np.searchsorted(self._row_ends, at, "right")
        return None if (rows[1:] == rows[:-1]).any() else (rows, at, end)


def _distinct(data: Bytes, at: Ints, end: Ints) -> tuple[list[bytes], Ints]:
    """The different texts at these places, of which there are some, and for each place the number of its own."""
    sizes, width = end - at, int((end - at).max())
    firsts = np.arange(len(at))
    if 0 < width <= _COMPARED_MAX_BYTES and int(at.max()) + width <= len(data):
        # Neighbours are mostly alike: only where they differ a text is taken out.
        texts = windows(data, width)[at].view(np.uint8).reshape(-1, width)
        texts[np.arange(width) >= sizes[:, None]] = 0
        differs = (texts[1:] != texts[:-1]).any(axis=1) | (sizes[1:] != sizes[:-1])
        firsts = np.concatenate(([0], np.flatnonzero(differs) + 1))
    view = data.data
    found = [bytes(view[one:other]) for one, other in zip(at[firsts].tolist(), end[firsts].tolist(), strict=True)]
    code_of = {text: code for code, text in enumerate(dict.fromkeys(found))}
    codes = np.array([code_of[text] for text in found], np.int64)
    return list(code_of), np.repeat(codes, np.diff(firsts, append=len(at)))


def _join(data: Bytes, at: Ints, sizes: Ints) -> tuple[bytes, Ints]:
    """The texts at `at`, a separator or more between each two, then room for windows; and where the rows end."""
    ends, width = at + sizes, int(sizes.max()) + 1
    if width * len(at) <= 2 * (int(sizes.sum()) + len(at)) and int(ends.min()) >= width:
        rows = windows(data, width)[ends - width].view(np.uint8).reshape(-1, width)
        rows[np.arange(width) < (width - sizes)[:, None]] = _SEPARATOR
        return rows.tobytes() + b"\x02" + bytes(16), np.arange(width, width * len(at) + 1, width)
    places = zip(at.tolist(), ends.tolist(), strict=True)
    texts = [data.data[start:end] for start, end in places]
    return b"\x02".join(texts) + b"\x02" + bytes(16), np.cumsum(sizes + 1)


def _tags_codes(properties: _PropertyTexts, count: int) -> Ints | None:
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
    """None where a record has some but not all of the three properties, or a number that is more than digits."""
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
    pairs, codes = np.unique(id_codes * len(epochs) + epoch_codes, return_inverse=True)
    places = [divmod(pair, len(epochs)) for pair in pairs.tolist()]
    instances = [(decode_utf8(ids[code]), int(epochs[epoch_code])) for code, epoch_code in places]
    return Producers(rows, codes, sequences, instances)


def _numbers(text: Bytes, at: Ints, end: Ints) -> Ints | None:
    """The decimal numbers there; None if one is not all digits, or too long."""
    sizes = end - at
    numbers = np.zeros(len(at), np.int64)
    if sizes.max() > _DIGITS_MAX:
        return None
    for size in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        digits = windows(text, size)[at[chosen]].view(np.uint8).reshape(-1, size) - np.uint8(ord("0"))
        if (digits > 9).any():
            return None
        numbers[chosen] = digits.astype(np.int64) @ (10 ** np.arange(size - 1, -1, -1, dtype=np.int64))
    return numbers
