"""CopyWindow counts the chunks that a Replicator has read of a master's log, up to those on its slave's disk.

    ask ──▶ chunk at the carrier ──▶ at the slave ──▶ on its disk: acknowledged
     └────────── the next one is asked for, while CHUNKS_MAX at most are on their way ──────────┘

Chunks are appended in the order in which they are read. Nothing survives the process: after a failure the slave is
asked for its end.
"""

from __future__ import annotations

from typing import Final

from actors.core.replica.orders import Copied

CHUNKS_MAX: Final = 2
"""The most chunks that are read and not on the slave's disk: one for the disk, and the next one."""
SECOND_MIN_BYTES: Final = 1 << 20
"""The least bytes of a chunk that is read while another one is on its way. Smaller ones are gathered until that is on
the slave's disk: each costs some 0.5 ms of CPU time, whatever its size."""


class CopyWindow:
    """The state of one carrier, which begins at `position`: all before is on the slave's disk. Offsets are physical."""

    def __init__(self, position: int) -> None:
        self.next_offset = position
        """The next offset to read."""
        self.acked_offset = position
        """The end of the log on the slave's disk, as far as is known."""
        self.under_way = 0
        """The chunks that the slave has no answer for yet."""
        self.is_asked = False
        """True while the master owes a chunk."""
        self._told_offset = position

    @property
    def may_ask(self) -> bool:
        """True if the next chunk is to be asked for now."""
        return not self.is_asked and self.under_way < CHUNKS_MAX

    @property
    def min_bytes(self) -> int:
        """The least bytes that the next chunk is to have. What was told meanwhile makes it one."""
        return SECOND_MIN_BYTES if self.next_offset > self.acked_offset else 1

    @property
    def must_tell(self) -> bool:
        """True if the master does not know how far the slave is, and is not about to be asked for a chunk."""
        return self.acked_offset > self._told_offset and not self.may_ask

    def told(self, *, asked: bool) -> None:
        """Note that the master was told the acknowledged offset, and with `asked` was asked for a chunk."""
        self._told_offset = self.acked_offset
        self.is_asked = self.is_asked or asked

    def read(self, size: int) -> None:
        """Note that a chunk of `size` bytes came, which is on its way to the slave now."""
        self.is_asked = False
        self.next_offset += size
        self.under_way += 1

    def copied(self, answer: Copied) -> None:
        """Note the slave's answer to the oldest chunk on its way."""
        self.under_way -= 1
        self.acked_offset = max(self.acked_offset, answer.acked_offset)
