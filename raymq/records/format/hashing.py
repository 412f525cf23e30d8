"""Java's `String.hashCode`, the basis of RocketMQ's tag filter and index file (spec/storage.md §2, §3).

The hash is `sum(unit[i] * 31**(n-1-i))` over UTF-16 code units, wrapped to signed 32 bits. A character outside the
basic plane counts as its two surrogates. The hash function must never change, because hashes are on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = 0xFFFFFFFF
_SIGN: Final = 0x80000000
_POWERS_LENGTH: Final = 512


def _powers(count: int) -> NDArray[np.uint32]:
    """Return the powers 31**0 … 31**(count-1), modulo 2**32."""
    powers = np.full(count, 31, dtype=np.uint32)
    powers[:1] = 1
    return np.multiply.accumulate(powers, dtype=np.uint32)


_POWERS_DOWN: Final = [int(power) for power in _powers(_POWERS_LENGTH)[::-1]]


def java_hash(text: str) -> int:
    """Return Java's `text.hashCode()`: a signed 32-bit number, 0 for the empty text. Never raises."""
    if text.isascii():
        units: bytes | list[int] = text.encode()
    else:
        units = np.frombuffer(text.encode("utf-16-be", "surrogatepass"), dtype=">u2").tolist()
    if len(units) <= _POWERS_LENGTH:
        value: int = sum(map(mul, units, _POWERS_DOWN[_POWERS_LENGTH - len(units) :]))
    else:
        value = 0
        for unit in units:
            value = (value * 31 + unit) & _MASK
    value &= _MASK
    return value - 0x1_0000_0000 if value & _SIGN else value


_cached_java_hash = lru_cache(maxsize=4096)(java_hash)


def tags_code(tags: str | None) -> int:
    """Return the tag code of a message for its consume-queue unit (entry): the hash of the whole TAGS text, or 0 if the
    text is absent or empty."""
    return _cached_java_hash(tags) if tags else 0


def index_key_hash(topic: str, key: str) -> int:
    """Return the key hash of an index entry, 0 to 2**31 - 1: the absolute value of the hash of `topic#key`. The hash
    -2**31 has no absolute value in 32 bits, so its key hash is 0 (spec/storage.md §3)."""
    value = abs(java_hash(f"{topic}#{key}"))
    return 0 if value == _SIGN else value


def index_key_hashes(topic: str, keys: Sequence[str]) -> NDArray[np.int32]:
    """Return `index_key_hash(topic, key)` for each key, in order. All hashes are computed together with vectorized
    operations."""
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    if not len(keys) or not lengths.all():
        return np.array([index_key_hash(topic, key) for key in keys], dtype=np.int32)
    units = np.frombuffer("".join(keys).encode("utf-16-be", "surrogatepass"), dtype=">u2").astype(np.uint32)
    # a key has surrogate pairs, so it has more UTF-16 code units than characters: hash the keys one by one
    if len(units) != lengths.sum():
        return np.array([index_key_hash(topic, key) for key in keys], dtype=np.int32)
    powers = _powers(int(lengths.max()) + 1)
    ends = np.cumsum(lengths)
    units *= powers[np.repeat(ends, lengths) - 1 - np.arange(len(units))]
    hashes = np.add.reduceat(units, ends - lengths, dtype=np.uint32)
    hashes += powers[lengths] * np.uint32(java_hash(f"{topic}#") & _MASK)
    absolute = np.abs(hashes.view(np.int32).astype(np.int64))
    return np.where(absolute == _SIGN, 0, absolute).astype(np.int32)
