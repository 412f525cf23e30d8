"""Epochs and sync-state sets: the values by which the replicas of a broker group compare their logs.

A broker group has replicas 0, 1, …; each is a store of its own. One of them, the master, leads in an *epoch*, a number
that grows each time a replica begins to lead; the others follow. The *sync-state set* consists of the replicas that
have the whole log up to the *confirm offset*: any of them may lead next, and consumers see nothing beyond that offset
(spec/storage.md §11.2).

A change of how two logs are compared, or of a value that is both sent and on disk, belongs here; values that are only
sent are in actors.core.replica.orders.

These survive a crash: the epochs, in each replica's epoch file (storage.replication.epoch_file), and the sync-state
set, in each member's `config/syncStateSet.json` (storage.replication.replica_files) and in the Controller's journal. A
LogChunk and an EpochHistory do not: they are read from the log and the epoch file again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymq.common.protocol.store import HoleCopy


class EpochEntry(NamedTuple):
    """One epoch of a log. It began with the record at `start_offset`, a physical offset."""

    epoch: int
    start_offset: int


class ConfirmFloor(NamedTuple):
    """The highest confirm offset that a replica remembers, a physical offset, and the epoch in which it was confirmed.

    A log that ends before `offset` lacks acknowledged messages.
    """

    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class SyncStateSet:
    """The replicas that may lead next. Of two sets, the one with the larger (`epoch`, `version`) is newer.

    `stores`: member to the id of its store directory. A directory that was lost and begun anew is no member, for its id
    is another one.
    """

    epoch: int
    version: int
    # The id of each member's store directory. A directory that was lost and begun anew is no member.
    stores: Mapping[int, str]

    @property
    def members(self) -> frozenset[int]:
        """The replicas of the set."""
        return frozenset(self.stores)

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and version: of two sets, the larger one is newer."""
        return self.epoch, self.version


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """A master's epochs and the bounds of its log, which a follower compares with its own."""

    entries: tuple[EpochEntry, ...]
    # The log's first offset, and the end of what the master gives to followers: a follower never has more of its epoch.
    min_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of a master's log from `physical_offset` on: whole records of one file and of one epoch, `entry`.

    Empty when there was nothing in time. If `hole` is set, the bytes are damaged and belong to that hole.
    `confirm_offset` is the master's, `end_offset` the end of what it gives.
    """

    # The offset of the first byte.
    physical_offset: int
    # Empty when nothing came in time. A view is valid only while the chunk is appended.
    data: bytes | memoryview
    # The epoch of the records; None for a log of before there were epochs.
    entry: EpochEntry | None
    # The master's confirm offset, and the end of what it gives to followers.
    confirm_offset: int
    end_offset: int
    # The hole that the bytes belong to; None for intact records.
    hole: HoleCopy | None = None


def common_end(mine: Sequence[EpochEntry], my_end: int, theirs: Sequence[EpochEntry], their_end: int) -> int | None:
    """The offset up to which two logs are the same; None if nothing is (spec/storage.md §11.2, handshake truncation).

    It is in the newest epoch that began at the same offset in both, where the first of the two logs ends that epoch.
    """
    ends = dict(with_ends(theirs, their_end))
    for entry, end in reversed(with_ends(mine, my_end)):
        if entry in ends:
            return min(end, ends[entry])
    return None


def with_ends(entries: Sequence[EpochEntry], end_offset: int) -> list[tuple[EpochEntry, int]]:
    """Each epoch with its end offset: the start of the next one, or the log's end."""
    return list(zip(entries, [*(entry.start_offset for entry in entries[1:]), end_offset], strict=False))


def first_lost_offset(floor: ConfirmFloor, theirs: Sequence[EpochEntry], their_end: int) -> int | None:
    """The offset before `floor.offset` from which another log lacks confirmed messages; None if it has all of them.

    A replica that has every confirmed message begins its epoch at `floor.offset` or later. So an epoch that is newer
    than the floor's and began before `floor.offset` was begun without some of them.
    """
    starts = [entry.start_offset for entry in theirs if entry.epoch > floor.epoch]
    lost_from = min([*starts, their_end])
    return lost_from if lost_from < floor.offset else None
