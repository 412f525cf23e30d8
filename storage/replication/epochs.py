"""Epochs and sync-state sets: the values by which the replicas of a broker group compare their logs.

A broker group has replicas 0, 1, …; each is a store of its own. One of them, the master, leads in an *epoch*, a number
that grows each time a replica begins to lead; the others follow. The *sync-state set* consists of the replicas that
have the whole log up to the *confirm offset*. Any of these replicas may lead next, and consumers see nothing after the
confirm offset (spec/storage.md §11.2).

The comparison of two logs, and values that are both sent and on disk, belong here; values that are only sent are in
actors.core.replica.orders.

These survive a crash: the epochs, in each replica's epoch file (storage.replication.epoch_file), and the sync-state
set, in each member's `config/syncStateSet.json` (storage.replication.replica_files) and in the Controller's journal. A
LogChunk and an EpochHistory do not survive a crash: they are read again from the log and the epoch file.
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
    """The highest confirm offset that a replica has stored, a physical offset, and the epoch in which it was confirmed.

    A log that ends before `offset` lacks acknowledged messages.
    """

    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class SyncStateSet:
    """The replicas that may lead next. Of two sets, the set with the larger (`epoch`, `version`) is newer.

    `stores`: the id of each member's store directory. A directory that was lost and made again has another id, so it is
    no member.
    """

    epoch: int
    version: int
    # The id of each member's store directory. A directory that was lost and made again is no member.
    stores: Mapping[int, str]

    @property
    def members(self) -> frozenset[int]:
        """The replicas of the set."""
        return frozenset(self.stores)

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and version: of two sets, the set with the larger order is newer."""
        return self.epoch, self.version


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """A master's epochs and the bounds of its log, which a follower compares with its own."""

    entries: tuple[EpochEntry, ...]
    # The first offset of the log, and the end of what the master sends. A follower never has more of the master's
    # epoch.
    min_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of a master's log from `physical_offset` on: whole records of one file and of one epoch, `entry`.

    Empty if nothing new came within the wait. If `hole` is set, the bytes are damaged and belong to that hole.
    `confirm_offset` is the master's; `end_offset` is the end of what the master sends.
    """

    # The offset of the first byte.
    physical_offset: int
    # Empty if nothing came within the wait. A view is valid only while the chunk is appended.
    data: bytes | memoryview
    # The epoch of the records; None for a log from before the first epoch.
    entry: EpochEntry | None
    # The master's confirm offset, and the end of what it sends to followers.
    confirm_offset: int
    end_offset: int
    # The hole that the bytes belong to; None for intact records.
    hole: HoleCopy | None = None


def common_end(mine: Sequence[EpochEntry], my_end: int, theirs: Sequence[EpochEntry], their_end: int) -> int | None:
    """Return the offset up to which two logs are equal; None if no part is (spec/storage.md §11.2, handshake
    truncation).

    The offset lies in the newest epoch that began at the same offset in both logs, where the first of them ends it.
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
    """Return the offset before `floor.offset` from which another log lacks confirmed messages; None if it has all.

    A replica that has every confirmed message begins its epoch at `floor.offset` or later. So an epoch newer than the
    floor's that began before `floor.offset` lacks some of them.
    """
    starts = [entry.start_offset for entry in theirs if entry.epoch > floor.epoch]
    lost_from = min([*starts, their_end])
    return lost_from if lost_from < floor.offset else None
