"""A set of non-negative integers that takes little memory if almost all numbers of a range are in it.

A soak test sends a hundred million messages. Their numbers are in such sets, one bit of knowledge per message.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 1 << 16

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class NumberSet:
    """A set of numbers. A block of 65,536 numbers takes 64 KiB while some of its numbers are missing. A complete block
    takes only its place in a Python set."""

    def __init__(self) -> None:
        self._partial: dict[int, Flags] = {}
        self._complete: set[int] = set()

    def __len__(self) -> int:
        return len(self._complete) * BLOCK + sum(int(flags.sum()) for flags in self._partial.values())

    @property
    def end(self) -> int:
        """Return the number that follows the largest number; 0 for an empty set."""
        block = max((*self._complete, *self._partial), default=-1)
        return 0 if block < 0 else block * BLOCK + int(np.flatnonzero(self._flags(block))[-1]) + 1

    def add(self, numbers: Numbers) -> Flags:
        """Add numbers. Returns a flag for each number: True if the set did not have the number before. If a number
        occurs several times in `numbers`, only its first place has the flag."""
        new = np.zeros(len(numbers), np.bool_)
        unique, places = np.unique(numbers, return_index=True)
        blocks = unique // BLOCK
        for block in np.unique(blocks).tolist():
            if block in self._complete:
                continue
            inside = blocks == block
            flags = self._partial.setdefault(block, np.zeros(BLOCK, np.bool_))
            offsets = unique[inside] - block * BLOCK
            new[places[inside]] = ~flags[offsets]
            flags[offsets] = True
            if flags.all():
                del self._partial[block]
                self._complete.add(block)
        return new

    def missing_in(self, other: NumberSet) -> Numbers:
        """Return the numbers of this set that `other` does not have, in ascending order."""
        found = [
            np.flatnonzero(self._flags(block) & ~other._flags(block)) + block * BLOCK
            for block in sorted(self._complete | self._partial.keys())
            if block not in other._complete
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _flags(self, block: int) -> Flags:
        if block in self._complete:
            return np.ones(BLOCK, np.bool_)
        return self._partial.get(block, np.zeros(BLOCK, np.bool_))
