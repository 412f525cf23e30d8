"""Buffers for large frames, which are used again: fresh memory costs more than the bytes that are put into it."""

from __future__ import annotations

from typing import Final

LEAST_BYTES: Final = 128 << 10
KEPT_MAX_BYTES: Final = 32 << 20
"""The most bytes of buffers that nobody uses."""


class FrameBuffers:
    """Buffers by size, which is a power of two. For one thread. How many are in use is for the caller to bound."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes or more, with any content."""
        rounded = max(LEAST_BYTES, 1 << (size - 1).bit_length())
        free = self._free.get(rounded)
        if free:
            self.kept_bytes -= rounded
            return free.pop()
        return memoryview(bytearray(rounded))

    def give_back(self, buffer: memoryview) -> None:
        """Give back a buffer of `take`. It is kept, or dropped if many are kept already."""
        if self.kept_bytes + len(buffer) <= KEPT_MAX_BYTES:
            self.kept_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
