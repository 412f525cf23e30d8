"""Computes the index hashes of consecutive unique ids, and checks that records have these ids.

For the ids of a range, the hash of `TOPIC#ID` (raymq.records.format.hashing.index_key_hash) is the sum of two numbers.
The first is for the topic and the part that the ids have in common (the stem). The second is from a table for the four
digits of the counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raymq.common.message import PROPERTY_KEYS, PROPERTY_SEQUENCE, PROPERTY_UNIQ_KEY
from raymq.records.format import layout
from raymq.records.format.encode import topic_part
from raymq.records.format.hashing import java_hash
from raymq.records.format.layout import Buffer, windows
from raymq.records.format.message_id import IDS_PER_MS, IdRange
from raymq.records.kernels.fields import Bytes, Ints
from raymq.records.kernels.property_shapes import PropertyShape, find_property_shapes, shapes_of_table

_DIGITS: Final = 4
_POWER: Final = np.uint32(31**_DIGITS)
_SMALLEST: Final = 1 << 31
_FLAGS_THAT_MATTER: Final = layout.SYS_FLAG_TRANSACTION_MASK | layout.SYS_FLAG_HOSTS_MASK


def _counter_digits() -> NDArray[np.uint8]:
    """Return the four upper-case hexadecimal digits of each value that a unique id's counter can have; shape (65536,
    4)."""
    symbols = np.frombuffer(b"0123456789ABCDEF", np.uint8)
    shifts = np.arange(_DIGITS - 1, -1, -1) * 4
    return np.ascontiguousarray(symbols[(np.arange(IDS_PER_MS)[:, None] >> shifts) & 15])


def _hashes_of(digits: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return Java's string hash of each row of `digits`, modulo 2**32."""
    hashes = np.zeros(len(digits), np.uint32)
    for column in digits.T:
        hashes = hashes * np.uint32(31) + column
    return hashes


_COUNTER_DIGITS: Final = _counter_digits()
_COUNTER_HASHES: Final = _hashes_of(_COUNTER_DIGITS)
# For each value of a message id's counter: its four hexadecimal digits (4 bytes), read as one 32-bit number. Comparing
# such numbers with a record's bytes is faster than comparing single digits.
_COUNTER_WORDS: Final = _COUNTER_DIGITS.view(np.uint32).ravel()


def key_hashes(hashes: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Convert Java hashes into the key hashes of index entries. A key hash is the absolute value of the hash as a
    signed number. It is 0 for -2**31, which has no absolute value in 32 bits."""
    absolute = np.abs(hashes.view(np.int32).astype(np.int64))
    absolute[absolute == _SMALLEST] = 0
    return absolute.astype(np.int32)


def id_range_hashes(topic: str, ranges: Sequence[IdRange]) -> NDArray[np.int32]:
    """Return `index_key_hash(topic, id)` for each id in `ranges`, in order; shape (n,) for n ids in total."""
    stems = np.array([java_hash(f"{topic}#{ids.stem}") & 0xFFFFFFFF for ids in ranges], np.uint32)
    counters, numbers = _counters_of(ranges)
    return key_hashes(_COUNTER_HASHES[counters] + (stems * _POWER)[numbers])


def _counters_of(ranges: Sequence[IdRange]) -> tuple[Ints, Ints]:
    """Return two arrays with one element per message id in `ranges`: the counter at the end of the id, and the index of
    its range in `ranges`. Both have shape (n,) for n ids in total."""
    counts = np.array([len(ids) for ids in ranges])
    numbers = np.repeat(np.arange(len(ranges)), counts)
    # Within a range, both the counters and the indices of the ids are consecutive numbers. `moved`: for each range, the
    # difference between an id's counter and its index.
    moved = np.array([ids.first for ids in ranges]) - (np.cumsum(counts) - counts)
    return (np.arange(len(numbers)) + moved[numbers]) & (IDS_PER_MS - 1), numbers


def have_only_these_ids(data: Buffer, ends: Ints, topic: str, ranges: Sequence[IdRange]) -> bool:
    """Return True if the records in `data` have exactly the unique ids of `ranges`, in order, and no other index key.
    `ends`: the end position of each record; the records follow one another. Returns False if a record has the property
    KEYS or belongs to a rolled-back transaction.

    Each record's fields must fit into the record, and its topic must be `topic`: the store's check of a batch
    guarantees both conditions. The result is also False if a host is an IPv6 address or the id stems differ in length.
    The same is true if the properties have too many different layouts.
    """
    stems = [ids.stem.encode() for ids in ranges]
    if sum(map(len, ranges)) != len(ends) or not len(ends) or len(set(map(len, stems))) > 1:
        return False
    fixed = layout.BODY_OFFSET + len(topic_part(topic)[1]) + 2
    counters, numbers = _counters_of(ranges)
    texts = _texts_of_table(np.frombuffer(data, np.uint8), ends, fixed)
    if texts is not None and len(ranges) == 1 and _differ_in_numbers_only(texts, ranges[0].stem, counters):
        return True
    shapes = _shapes_of_rows(data, ends, fixed) if texts is None else shapes_of_table(texts)
    if shapes is None:
        return False
    table = np.frombuffer(b"".join(stems), np.uint8).reshape(len(stems), -1)
    return all(_has_only_ids(shape, table[numbers[shape.rows]], counters[shape.rows]) for shape in shapes)


def _texts_of_table(data: Bytes, ends: Ints, fixed: int) -> Bytes | None:
    """Return the property texts of records as a table of shape (n, length of one text). All records must have the same
    size, and all bodies must have the same size. Returns None if sizes differ, or if a record has an IPv6 host or
    belongs to a transaction (_FLAGS_THAT_MATTER). `fixed`: the length of a record without body and properties."""
    size = int(ends[0])
    if int(ends[-1]) != len(ends) * size or not (np.diff(ends) == size).all():
        return None
    # View the memory of the records as a table with one row per record, and read its columns without a copy.
    flags, body_sizes = (
        np.ndarray((len(ends),), ">i4", data, offset, (size,))
        for offset in (layout.SYS_FLAG_OFFSET, layout.BODY_OFFSET - 4)
    )
    properties_at = fixed + int(body_sizes[0])
    if (flags & _FLAGS_THAT_MATTER).any() or (body_sizes != body_sizes[0]).any() or properties_at > size:
        return None
    return data[: int(ends[-1])].reshape(len(ends), size)[:, properties_at:]


def _differ_in_numbers_only(texts: Bytes, stem: str, counters: Ints) -> bool:
    """True if the property texts have no KEYS and differ only in two numbers. The first number is the counter in the
    record's unique id: the id of record i is `stem` followed by `counters[i]`. The second number is the producer's
    sequence number. False if an id differs from this.

    Most batches of a producer pass this check, which reads each text only a few times.
    """
    first = texts[0].tobytes()
    names = [piece.partition(b"\x01")[0] for piece in first.split(b"\x02")]
    found = f"\x02{PROPERTY_UNIQ_KEY}\x01{stem}".encode()
    counter = (b"\x02" + first).find(found) + len(found) - 1
    if counter < len(found) - 1 or first[counter + _DIGITS :][:1] != b"\x02":
        return False
    if PROPERTY_KEYS.encode() in names or names.count(PROPERTY_UNIQ_KEY.encode()) != 1:
        return False
    name = f"\x02{PROPERTY_SEQUENCE}\x01".encode()
    digits = first.find(name, counter) + len(name)
    digits_end = first.find(b"\x02", digits)
    if digits < len(name) or digits_end < 0:
        digits = digits_end = len(first)
    for start, end in ((0, counter), (counter + _DIGITS, digits), (digits_end, len(first))):
        if texts[:, start:end].tobytes() != first[start:end] * len(texts):
            return False
    if (texts[:, digits:digits_end] - np.uint8(ord("0")) > 9).any():
        return False
    return _have_counters(texts[:, counter : counter + _DIGITS], counters)


def _have_counters(digits: Bytes, counters: Ints) -> bool:
    """True if row i of `digits`, shape (m, 4), is `counters[i]` written as four hexadecimal digits, for every
    i."""
    return np.array_equal(np.ascontiguousarray(digits).view(np.uint32).ravel(), _COUNTER_WORDS[counters])


def _shapes_of_rows(data: Buffer, ends: Ints, fixed: int) -> list[PropertyShape] | None:
    """Return the property shapes (raymq.records.kernels.property_shapes) of records whose sizes may differ. Returns
    None if a record has one of _FLAGS_THAT_MATTER, or if the records have too many shapes."""
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    if (windows(data, 4)[starts + layout.SYS_FLAG_OFFSET].view(">i4") & _FLAGS_THAT_MATTER).any():
        return None
    body_sizes = windows(data, 4)[starts + layout.BODY_OFFSET - 4].view(">i4")
    properties_at = starts + body_sizes + fixed
    if (properties_at > ends).any():
        return None
    return find_property_shapes(np.frombuffer(data, np.uint8), properties_at, ends - properties_at)


def _has_only_ids(shape: PropertyShape, stems: Bytes, counters: Ints) -> bool:
    """Return True if two things hold for the records of one property shape (layout of the property texts). They have no
    KEYS, and the unique id of each record i consists of `stems[i]` and the digits of `counters[i]`."""
    found, length = shape.get(PROPERTY_UNIQ_KEY.encode()), stems.shape[1]
    if found is None or PROPERTY_KEYS.encode() in shape.values or found.table.shape[1] != length + _DIGITS:
        return False
    if not np.array_equal(found.table[:, :length], stems):
        return False
    return _have_counters(found.table[:, length:], counters)
