"""Progress is the memory that a predicate's process shares with its runner.

It outlives the process: when that has ended in the middle of its work, the runner reads which message it was at, and
which messages before that one match.

    | index of the message 8 | 1 byte per message: 1 if it matches |
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

EVALUATED_MAX: Final = 4096
"""The most records of one Evaluate frame."""
PROGRESS_BYTES: Final = 8 + EVALUATED_MAX


class Progress:
    """The shared memory, from either side."""

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self._index = view[:8].cast("q")
        self.matches = view[8:]
        """For each message 1 if it matches, else 0; the process writes it."""

    def at(self, index: int) -> None:
        """Note that the function is called for this message next."""
        self._index[0] = index

    @property
    def index(self) -> int:
        """The message that the function was called for last."""
        return self._index[0]

    def matching(self, count: int) -> NDArray[np.bool_]:
        """A copy of the first `count` messages' matches."""
        matches: NDArray[np.bool_] = np.frombuffer(self.matches, np.uint8, count) == 1
        return matches
