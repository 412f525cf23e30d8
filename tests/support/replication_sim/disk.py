"""The disk of a simulated replica: the replica's log, the part of the log that survives a power cut, and the small
files. A small file contains, for example, the confirm floor or the list of holes.

If replicas get new data that must survive the end of a process or machine, add the data to this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from storage.replication.epochs import ConfirmFloor, EpochEntry, ReplicaMembers, SyncStateSet

NO_FLOOR = ConfirmFloor(0, 0)


@dataclass
class Disk:
    """A simulated replica's directory. Log records before `flushed` survive a power cut.

    `store_id` changes when the disk is replaced. `log` has (epoch, message) per record. `incarnation` counts the
    processes that opened the directory. `floor` is the highest confirm offset on disk. `_offsets` has each message's
    first offset in the log. `damaged`: offsets of records whose bytes are damaged. `named`: the damaged offsets that
    are listed in the file of holes (damaged ranges that the log keeps).
    """

    store_id: str
    log: list[tuple[int, int]] = field(default_factory=list)
    flushed: int = 0
    epochs: list[EpochEntry] = field(default_factory=list)
    sync_state_set: SyncStateSet | None = None
    members: ReplicaMembers | None = None
    incarnation: int = 0
    floor: ConfirmFloor = NO_FLOOR
    damaged: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    _offsets: dict[int, int] = field(default_factory=dict)

    def append(self, records: Iterable[tuple[int, int]]) -> None:
        """Append (epoch, message) records to the log without a flush."""
        for record in records:
            self._offsets.setdefault(record[1], len(self.log))
            self.log.append(record)

    def truncate(self, end: int) -> None:
        """Remove the log records from offset `end` on."""
        for _, message in self.log[end:]:
            if self._offsets.get(message, -1) >= end:
                del self._offsets[message]
        del self.log[end:]
        self.damaged = {offset for offset in self.damaged if offset < end}
        self.named &= self.damaged

    def damage(self, offset: int) -> None:
        """Damage the bytes of the record at an offset."""
        self.damaged.add(offset)

    def mend(self, offset: int) -> None:
        """Replace the damaged bytes of a record by the original bytes."""
        self.damaged.discard(offset)
        self.named.discard(offset)

    @property
    def last_intact(self) -> int:
        """Return the index in the log of the last record that is flushed and not damaged; -1 if no such record
        exists."""
        return next((offset for offset in reversed(range(self.flushed)) if offset not in self.damaged), -1)

    def is_intact(self, offset: int) -> bool:
        """Return True if the log has a record at the offset that is flushed and not damaged."""
        return offset < self.flushed and offset not in self.damaged

    def has_intact(self, record: tuple[int, int, int]) -> bool:
        """Return True if the log has this record, flushed and not damaged. `record`: offset, epoch and message."""
        offset = record[0]
        return self.is_intact(offset) and self.log[offset] == record[1:]

    def messages(self, *, intact: bool) -> set[int]:
        """Return the flushed messages in the log. With `intact`, without the messages whose records are damaged."""
        damaged = self.damaged if intact else ()
        return {self.log[offset][1] for offset in range(self.flushed) if offset not in damaged}

    def offset_of(self, message: int) -> int | None:
        """Return the offset in the simulated log at which a message is stored first; None if the log does not have the
        message."""
        return self._offsets.get(message)
