"""A pool of buffers for large frames. Buffers are reused because allocating memory costs more than filling it."""

from __future__ import annotations

from typing import Final

LEAST_BYTES: Final = 128 << 10
KEPT_MAX_BYTES: Final = 32 << 20
"""Maximum number of bytes of unused buffers in the pool."""


class FrameBuffers:
    """A pool of unused buffers by size; each size is a power of two. Only one thread may use the pool. The caller
    limits the number of buffers in use."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self.kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """Return a buffer of at least `size` bytes from the pool. The buffer may contain bytes of its earlier
        use."""
        rounded = max(LEAST_BYTES, 1 << (size - 1).bit_length())
        free = self._free.get(rounded)
        if free:
            self.kept_bytes -= rounded
            return free.pop()
        return memoryview(bytearray(rounded))

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer to the pool, or drop the buffer if the pool is full."""
        if self.kept_bytes + len(buffer) <= KEPT_MAX_BYTES:
            self.kept_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
