"""Buffers for large frames, which are reused because fresh memory costs more than filling it."""

from __future__ import annotations

from typing import Final

LEAST_BYTES: Final = 128 << 10
KEPT_MAX_BYTES: Final = 32 << 20
"""The most bytes of unused buffers."""


class FrameBuffers:
    """Buffers by size, a power of two. For one thread. The caller limits the number of buffers in use."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """Return a buffer of at least `size` bytes, with any content."""
        rounded = max(LEAST_BYTES, 1 << (size - 1).bit_length())
        free = self._free.get(rounded)
        if free:
            self.kept_bytes -= rounded
            return free.pop()
        return memoryview(bytearray(rounded))

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer of `take` to the pool, which drops it if the pool is full."""
        if self.kept_bytes + len(buffer) <= KEPT_MAX_BYTES:
            self.kept_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
