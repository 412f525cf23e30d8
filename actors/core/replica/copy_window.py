"""Counts the chunks of a master's log that a Replicator has read but that are not on its slave's disk yet.

    ask ──▶ chunk at the carrier ──▶ at the slave ──▶ on its disk: acknowledged
     └────────── the next one is requested, while at most CHUNKS_MAX are in flight ──────────┘

Chunks are appended in the order in which they are read. No state survives the process: after a failure the Replicator
asks the slave for the end of its log.
"""

from __future__ import annotations

from typing import Final

from actors.core.replica.orders import Copied

CHUNKS_MAX: Final = 2
"""Maximum number of log chunks that were read from the master's log but are not on the slave's disk yet: the chunk that
is written now, and the next chunk."""
SECOND_MIN_BYTES: Final = 1 << 20
"""Minimum size, in bytes, of a log chunk that is read while another chunk is in flight.

A smaller amount waits until the other chunk is on the slave's disk, because each chunk costs about 0.5 ms of CPU time,
whatever its size.
"""


class CopyWindow:
    """The log chunks in flight from a master to one slave. All offsets are physical offsets.

    `position`: the offset to start at; all log data before it is on the slave's disk.
    """

    def __init__(self, position: int) -> None:
        self.next_offset = position
        """The physical offset at which the next log chunk to copy to the slave begins."""
        self.acked_offset = position
        """The physical end offset of the log on the slave's disk, as last reported."""
        self.under_way = 0
        """The number of log chunks that the slave has not answered yet."""
        self.is_asked = False
        """True while a request for a log chunk waits for the master's answer."""
        self._told_offset = position

    @property
    def may_ask(self) -> bool:
        """True if the next log chunk should be requested from the master now."""
        return not self.is_asked and self.under_way < CHUNKS_MAX

    @property
    def min_bytes(self) -> int:
        """The minimum size, in bytes, of the next log chunk that the Replicator requests.

        The minimum is 1 if no chunk in flight waits for the slave's acknowledgement. It also becomes 1 if all chunks in
        flight are acknowledged before the next chunk arrives.
        """
        return SECOND_MIN_BYTES if self.next_offset > self.acked_offset else 1

    @property
    def must_tell(self) -> bool:
        """True if the slave's newest acknowledged offset must be sent to the master in a separate message now. Usually
        the next request for a chunk contains this offset, but no such request can be made at present."""
        return self.acked_offset > self._told_offset and not self.may_ask

    def told(self, *, asked: bool) -> None:
        """Record that the acknowledged offset was sent to the master and, if `asked`, that a chunk was requested from
        the master."""
        self._told_offset = self.acked_offset
        self.is_asked = self.is_asked or asked

    def read(self, size: int) -> None:
        """Record that a chunk of `size` bytes has arrived from the master, and is now in flight to the slave."""
        self.is_asked = False
        self.next_offset += size
        self.under_way += 1

    def copied(self, answer: Copied) -> None:
        """Record the slave's answer to the oldest log chunk in flight."""
        self.under_way -= 1
        self.acked_offset = max(self.acked_offset, answer.acked_offset)
