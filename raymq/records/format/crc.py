"""The two checksums of a record (spec/storage.md §1, "CRC").

Both are zlib's CRC-32 with the top bit cleared, so that Java stores them in a positive int. The body's CRC is a header
field. The property CRC, an option of the store, covers the whole record except the 20 bytes of the property CRC itself.
These bytes are at the end of the record: `__CRC32#` 0x01, ten decimal digits with the least significant first, 0x02.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

crc32: Final = isal_zlib.crc32
"""zlib's CRC-32, 0 to 2**32 - 1. This implementation uses special instructions of the processor and is 2 to 6 times as
fast as zlib."""

PROPERTY_CRC_PREFIX: Final = b"__CRC32#\x01"
PROPERTY_CRC_LENGTH: Final = 20
PROPERTY_CRC_PLACEHOLDER: Final = PROPERTY_CRC_PREFIX + b"0" * 10 + b"\x02"
SEAL_WRONG: Final = "the record does not match its CRC"
_MARK: Final = np.frombuffer(PROPERTY_CRC_PREFIX + b"\x02", np.uint8)
_MARK_COLUMNS: Final = np.array([*range(len(PROPERTY_CRC_PREFIX)), PROPERTY_CRC_LENGTH - 1])
"""Positions of the constant bytes in the 20 bytes of a property CRC: the prefix and the final byte."""
_MARK_LEAST: Final = len(_MARK) - 2
"""Minimum number of matching constant bytes from which a record counts as having a property CRC. The constant bytes are
the prefix and the last byte of a property CRC. Up to two of them may differ, because a disk error may have changed
them."""
_POWERS: Final = 10 ** np.arange(10, dtype=np.int64)


def body_crc(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32 of `data` with the top bit cleared, from 0 to 2**31 - 1. Returns 0 for empty data."""
    return crc32(data) & 0x7FFFFFFF


def body_crcs(
    data: bytes | bytearray | memoryview, at: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Compute `body_crc` of each range of `data`, from byte `at[i]` up to `ends[i]`. The result has shape (n,) and the
    integer type of the header field.

    The ranges may overlap and may be in any order. A range beyond the end of `data` is truncated, like a slice.
    """
    view = memoryview(data)
    found = np.array([crc32(view[start:end]) for start, end in zip(at.tolist(), ends.tolist(), strict=True)], np.uint32)
    return (found & 0x7FFFFFFF).view(np.int32)


def property_crc_digits(crc: int) -> bytes:
    """Format `crc` as ten decimal digits, in reverse order: the least significant digit is the first."""
    return (b"%010d" % crc)[::-1]


def property_crc(record: bytes | bytearray | memoryview) -> bytes:
    """Return the 20 bytes of the property CRC for the end of `record`. The record must have space for them: the last 20
    bytes of `record` are ignored."""
    digits = property_crc_digits(body_crc(memoryview(record)[:-PROPERTY_CRC_LENGTH]))
    return PROPERTY_CRC_PREFIX + digits + b"\x02"


def is_sealed(data: bytes | bytearray | memoryview) -> bool:
    """True if the last record in `data` has a property CRC. In a batch, either all records have a property CRC or no
    record has one."""
    tail = data[-PROPERTY_CRC_LENGTH:]
    return tail[: len(PROPERTY_CRC_PREFIX)] == PROPERTY_CRC_PREFIX


def seal_holds(record: bytes | bytearray | memoryview) -> bool:
    """True if `record` has a correct property CRC or no property CRC. The record must have at least PROPERTY_CRC_LENGTH
    bytes."""
    seal = bytes(record[-PROPERTY_CRC_LENGTH:])
    if seal[:2] != PROPERTY_CRC_PREFIX[:2] and seal[2:4] != PROPERTY_CRC_PREFIX[2:4]:
        # fast path: most records have no property CRC, which the first four bytes of `seal` (the record's last 20
        # bytes) already show
        return True
    same = sum(seal[column] == byte for column, byte in zip(_MARK_COLUMNS.tolist(), _MARK.tolist(), strict=True))
    return same < _MARK_LEAST or seal == property_crc(record)


def wrong_seals(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices, ascending, of the records with a wrong property CRC (`seal_holds` is false). Record i is the
    bytes from `starts[i]` up to `ends[i]` of `data`."""
    if not len(starts):
        return starts
    seals = np.ndarray((len(data) - PROPERTY_CRC_LENGTH + 1, PROPERTY_CRC_LENGTH), np.uint8, data, 0, (1, 1))
    likely = np.flatnonzero(
        (data[ends - PROPERTY_CRC_LENGTH] == _MARK[0]) | (data[ends - PROPERTY_CRC_LENGTH + 2] == _MARK[2])
    )
    if not len(likely):
        return likely
    found = seals[ends[likely] - PROPERTY_CRC_LENGTH]
    same = found[:, _MARK_COLUMNS] == _MARK
    sealed = same.sum(axis=1) >= _MARK_LEAST
    rows, found, same = likely[sealed], found[sealed], same[sealed]
    crcs = body_crcs(data.data, starts[rows], ends[rows] - PROPERTY_CRC_LENGTH)
    digits = found[:, len(PROPERTY_CRC_PREFIX) : -1] - np.uint8(ord("0"))
    holds = same.all(axis=1) & (digits <= 9).all(axis=1) & (digits @ _POWERS == crcs)
    wrong: NDArray[np.int64] = rows[~holds]
    return wrong
