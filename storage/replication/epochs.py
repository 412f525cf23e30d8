"""Epochs and sync-state sets: the values by which the replicas of a broker group compare their logs.

A broker group has replicas 0, 1, …; each replica is a separate store. One replica, the master, leads; the other
replicas follow. It leads in an *epoch*, a number that grows each time a replica begins to lead. The *sync-state set*
consists of the replicas that have the whole log up to the *confirm offset*. Any replica of the set may lead next, and
consumers see nothing after the confirm offset (spec/storage.md §11.2).

This module contains the comparison of two logs, and values that are both sent and stored on disk. Values that are only
sent are in actors.core.replica.orders.

These values survive a crash: the epochs, in each replica's epoch file (storage.replication.epoch_file), and the
sync-state set and the ReplicaMembers, in two files of each replica's `config/` (storage.replication.replica_files) and
in the Controller's journal. A LogChunk and an EpochHistory do not survive a crash: they are read again from the log and
the epoch file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from raymq.common.protocol.store import HoleCopy


class EpochEntry(NamedTuple):
    """One epoch of a log. It began with the record at `start_offset`, a physical offset."""

    epoch: int
    start_offset: int


class ConfirmFloor(NamedTuple):
    """The highest confirm offset that a replica has stored (a physical offset), and the epoch in which it was
    confirmed.

    A log that ends before this offset lacks acknowledged messages.
    """

    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class SyncStateSet:
    """The sync-state set: the replicas that may lead next. Of two sets, the set with the larger (`epoch`, `version`) is
    newer.

    `stores`: the id of each member's store directory. If a directory was lost and created again, it has another id, so
    it is not a member.
    """

    epoch: int
    version: int
    # The id of the store directory of each replica in the sync-state set, by replica number. If a directory was lost
    # and created again, it has another id, so the replica is no longer a member of the set.
    stores: Mapping[int, str]

    @property
    def members(self) -> frozenset[int]:
        """The replica numbers of the members of the sync-state set."""
        return frozenset(self.stores)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key (epoch, version): of two sync-state sets, the set with the larger key is newer."""
        return self.epoch, self.version


@dataclass(frozen=True, slots=True)
class ReplicaMembers:
    """The replicas of a broker group, after a change of their number. Each step of a change has the next `version`.

    A group whose replicas were never changed has version 0; raymq.yaml then names its replicas. `replicas`: all
    replicas that have a storage actor. `joining`: the replicas among them that have not been in the sync-state set
    since they were added. `leaving`: the replicas that end as soon as no replica is joining. `added`: the replicas that
    the current change has added. `removed`: the replicas that have left. Their numbers are never used again, and their
    directories stay on disk. `is_final`: True if the current change can no longer be cancelled. `min_in_sync`: the
    minimum number of replicas in sync with which the master accepts messages; 0 if raymq.yaml sets it.
    """

    version: int
    replicas: frozenset[int]
    joining: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()
    removed: frozenset[int] = frozenset()
    is_final: bool = False
    min_in_sync: int = 0

    @property
    def is_changing(self) -> bool:
        """True while a change of the replicas has not ended."""
        return bool(self.joining or self.leaving)

    @property
    def staying(self) -> frozenset[int]:
        """The replicas that the group has after the current change."""
        return self.replicas - self.leaving

    @property
    def next_number(self) -> int:
        """The number of the next replica that joins."""
        return max(self.replicas | self.removed) + 1

    def to_plain(self) -> dict[str, Any]:
        """Return the values as JSON types."""
        sets = {name: sorted(getattr(self, name)) for name in _MEMBER_SETS}
        return {"version": self.version, **sets, "is_final": self.is_final, "min_in_sync": self.min_in_sync}

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> ReplicaMembers:
        """Parse the result of `to_plain`. Raises KeyError, TypeError or ValueError if it has another form."""
        sets = {name: frozenset(map(int, fields[name])) for name in _MEMBER_SETS}
        # Files of earlier builds have no minimum.
        least = int(fields.get("min_in_sync", 0))
        return cls(int(fields["version"]), **sets, is_final=bool(fields["is_final"]), min_in_sync=least)


_MEMBER_SETS: Final = ("replicas", "joining", "leaving", "added", "removed")


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """A master's epochs and the bounds of its log. A follower compares them with its own epochs and log."""

    entries: tuple[EpochEntry, ...]
    # Two physical offsets: the start of the master's log, and the offset up to which the master sends its log to
    # followers. A follower never has more records of the master's epoch.
    min_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A chunk: bytes of a master's log from `physical_offset` on. They are whole records of one log file and of one
    epoch, `entry`.

    The chunk is empty if no new record was stored while the follower waited. If `hole` is set, the bytes are damaged
    and belong to this hole (damaged range of the log). `confirm_offset` is the master's confirm offset. `end_offset` is
    the log offset up to which the master sends to its followers.
    """

    # The physical offset of the first byte of `data`.
    physical_offset: int
    # The bytes of the chunk. They are empty if the follower has waited for new records and none was stored in that
    # time. A memoryview is valid only while the chunk is being appended.
    data: bytes | memoryview
    # The epoch in which the chunk's records were stored; None for records from before the log's first epoch.
    entry: EpochEntry | None
    # The master's confirm offset, and the log offset up to which the master sends to followers.
    confirm_offset: int
    end_offset: int
    # The damaged range (hole) of the master's log to which the chunk's bytes belong; None if the bytes are intact
    # records.
    hole: HoleCopy | None = None


def common_end(mine: Sequence[EpochEntry], my_end: int, theirs: Sequence[EpochEntry], their_end: int) -> int | None:
    """Return the physical offset up to which two logs are equal. Return None if they have no common part
    (spec/storage.md §11.2, handshake truncation).

    The offset lies in the newest epoch that began at the same offset in both logs. If this epoch ends at different
    offsets in the two logs, the smaller end is returned.
    """
    ends = dict(with_ends(theirs, their_end))
    for entry, end in reversed(with_ends(mine, my_end)):
        if entry in ends:
            return min(end, ends[entry])
    return None


def with_ends(entries: Sequence[EpochEntry], end_offset: int) -> list[tuple[EpochEntry, int]]:
    """Return each epoch with its end offset: the start of the next epoch, or the log's end."""
    return list(zip(entries, [*(entry.start_offset for entry in entries[1:]), end_offset], strict=False))


def first_lost_offset(floor: ConfirmFloor, theirs: Sequence[EpochEntry], their_end: int) -> int | None:
    """Return the physical offset from which another replica's log lacks confirmed messages. Returns None if the log has
    all confirmed messages.

    `floor`: a confirm offset and the epoch in which it was confirmed. All messages before this offset are confirmed.
    `theirs` and `their_end`: the epochs and the end of the other replica's log.

    A log that has all these messages reaches `floor.offset` before an epoch newer than `floor.epoch` begins in it. So
    if such an epoch begins earlier in the other log, or the other log ends earlier, it lacks the messages from there
    on.
    """
    starts = [entry.start_offset for entry in theirs if entry.epoch > floor.epoch]
    lost_from = min([*starts, their_end])
    return lost_from if lost_from < floor.offset else None
