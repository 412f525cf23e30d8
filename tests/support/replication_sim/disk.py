"""The disk of a simulated replica: its log, what of it a power cut leaves, and the small files beside it.

A change to what a replica keeps when its process or its machine ends belongs here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from storage.replication.epochs import ConfirmFloor, EpochEntry, SyncStateSet

NO_FLOOR = ConfirmFloor(0, 0)


@dataclass
class Disk:
    """A replica's directory. Records before `flushed` survive a power cut.

    `store_id` changes when the disk is replaced; `log` has (epoch, message) per record; `incarnation` counts the
    processes that opened the directory; `floor` is the highest confirm offset on disk; `_offsets` has each message's
    first offset in the log.
    """

    store_id: str
    log: list[tuple[int, int]] = field(default_factory=list)
    flushed: int = 0
    epochs: list[EpochEntry] = field(default_factory=list)
    sync_state_set: SyncStateSet | None = None
    incarnation: int = 0
    floor: ConfirmFloor = NO_FLOOR
    _offsets: dict[int, int] = field(default_factory=dict)

    def append(self, records: Iterable[tuple[int, int]]) -> None:
        """Append (epoch, message) records; they are not flushed."""
        for record in records:
            self._offsets.setdefault(record[1], len(self.log))
            self.log.append(record)

    def truncate(self, end: int) -> None:
        """Remove the records at `end` and behind it."""
        for _, message in self.log[end:]:
            if self._offsets.get(message, -1) >= end:
                del self._offsets[message]
        del self.log[end:]

    def offset_of(self, message: int) -> int | None:
        """The first offset of a message in the log; None if it is not there."""
        return self._offsets.get(message)
