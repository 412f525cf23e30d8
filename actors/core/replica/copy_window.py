"""Counts the chunks of a master's log that a Replicator has read but that are not on its slave's disk yet.

    ask ──▶ chunk at the carrier ──▶ at the slave ──▶ on its disk: acknowledged
     └────────── the next one is requested, while at most CHUNKS_MAX are in flight ──────────┘

Chunks are appended in the order in which they are read. No state survives the process: after a failure the Replicator
requests the end of the slave's log.
"""

from __future__ import annotations

from typing import Final

from actors.core.replica.orders import Copied

CHUNKS_MAX: Final = 2
"""Maximum number of chunks that are read but not on the slave's disk yet: one that is being written, and the
next one."""
SECOND_MIN_BYTES: Final = 1 << 20
"""Minimum size, in bytes, of a chunk that is read while another chunk is in flight.

Smaller amounts are gathered until the other chunk is on the slave's disk, because each chunk costs about 0.5 ms of CPU
time, whatever its size.
"""


class CopyWindow:
    """The chunks in flight from a master to one slave. All offsets are physical offsets.

    `position`: the start; all log data before it is on the slave's disk.
    """

    def __init__(self, position: int) -> None:
        self.next_offset = position
        """The physical offset of the next chunk to read."""
        self.acked_offset = position
        """The last known end of the log on the slave's disk."""
        self.under_way = 0
        """The number of chunks that the slave has not answered yet."""
        self.is_asked = False
        """True if a request for a chunk waits for the master's answer."""
        self._told_offset = position

    @property
    def may_ask(self) -> bool:
        """True if the next chunk should be requested now."""
        return not self.is_asked and self.under_way < CHUNKS_MAX

    @property
    def min_bytes(self) -> int:
        """The minimum size, in bytes, of the next chunk.

        If all chunks in flight are acknowledged before the next chunk arrives, the minimum becomes 1.
        """
        return SECOND_MIN_BYTES if self.next_offset > self.acked_offset else 1

    @property
    def must_tell(self) -> bool:
        """True if the slave's newest offset must be sent to the master now, because no request for a chunk will carry
        it soon."""
        return self.acked_offset > self._told_offset and not self.may_ask

    def told(self, *, asked: bool) -> None:
        """Record that the acknowledged offset was sent to the master and, if `asked`, also a request for a
        chunk."""
        self._told_offset = self.acked_offset
        self.is_asked = self.is_asked or asked

    def read(self, size: int) -> None:
        """Record that a chunk of `size` bytes has arrived from the master, and is now in flight to the slave."""
        self.is_asked = False
        self.next_offset += size
        self.under_way += 1

    def copied(self, answer: Copied) -> None:
        """Record the slave's answer to the oldest chunk in flight."""
        self.under_way -= 1
        self.acked_offset = max(self.acked_offset, answer.acked_offset)
