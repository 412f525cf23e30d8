"""Counts the chunks of a master's log that a Replicator has read, until they are on its slave's disk.

    ask ──▶ chunk at the carrier ──▶ at the slave ──▶ on its disk: acknowledged
     └────────── the next one is requested, while at most CHUNKS_MAX are in flight ──────────┘

Chunks are appended in the order in which they are read. Nothing survives the process: after a failure the slave is
asked for its end.
"""

from __future__ import annotations

from typing import Final

from actors.core.replica.orders import Copied

CHUNKS_MAX: Final = 2
"""The most chunks that are read and not on the slave's disk yet: one for the disk, and the next one."""
SECOND_MIN_BYTES: Final = 1 << 20
"""The least bytes of a chunk that is read while another one is in flight.

Smaller amounts are gathered until the other chunk is on the slave's disk: each chunk costs about 0.5 ms of CPU time,
whatever its size.
"""


class CopyWindow:
    """The state of one carrier, which begins at `position`: everything before is on the slave's disk. Offsets are
    physical.
    """

    def __init__(self, position: int) -> None:
        self.next_offset = position
        """The next offset to read."""
        self.acked_offset = position
        """The known end of the log on the slave's disk."""
        self.under_way = 0
        """The chunks that the slave has not answered yet."""
        self.is_asked = False
        """True while the master has not answered a request for a chunk."""
        self._told_offset = position

    @property
    def may_ask(self) -> bool:
        """True if the next chunk should be requested now."""
        return not self.is_asked and self.under_way < CHUNKS_MAX

    @property
    def min_bytes(self) -> int:
        """The least bytes that the next chunk should have.

        A full acknowledgement in the meantime makes it 1.
        """
        return SECOND_MIN_BYTES if self.next_offset > self.acked_offset else 1

    @property
    def must_tell(self) -> bool:
        """True if the master lacks the slave's newest offset, and no request for a chunk is about to carry it."""
        return self.acked_offset > self._told_offset and not self.may_ask

    def told(self, *, asked: bool) -> None:
        """Record that the master was sent the acknowledged offset and, if `asked`, a request for a chunk."""
        self._told_offset = self.acked_offset
        self.is_asked = self.is_asked or asked

    def read(self, size: int) -> None:
        """Record that a chunk of `size` bytes arrived, and is now in flight to the slave."""
        self.is_asked = False
        self.next_offset += size
        self.under_way += 1

    def copied(self, answer: Copied) -> None:
        """Record the slave's answer to the oldest chunk in flight."""
        self.under_way -= 1
        self.acked_offset = max(self.acked_offset, answer.acked_offset)
