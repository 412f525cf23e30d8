"""What storage actors, Replicators and the Controller tell each other about the replicas of a broker group.

A broker group has replicas 0, 1, …; each is a store of its own. One of them leads (the master) in an *epoch*, a number
that grows with each start of leading; the others follow. The *sync-state set* are the replicas that have everything
up to the *confirm offset*: any of them may lead next, and consumers see nothing beyond it (spec/storage.md §11.2).

What survives a crash: the epochs in each replica's epoch file, the sync-state set in each member's
`config/syncStateSet.json` and in the Controller's journal. The rest is heard anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class EpochEntry(NamedTuple):
    """`epoch` began with the record at `start_offset`."""

    epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True)
class SyncStateSet:
    """The replicas that may lead next. Newer is what has the larger (`epoch`, `version`).

    `stores`: member to the id of its store directory. A directory that was lost and begun anew is no member.
    """

    epoch: int
    version: int
    stores: Mapping[int, str]

    @property
    def members(self) -> frozenset[int]:
        return frozenset(self.stores)

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.version


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """A master's epochs, and the end of what is on its disk: what a follower compares with its own."""

    entries: tuple[EpochEntry, ...]
    min_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of a master's log from `physical_offset` on: whole records of one file and of one epoch, `entry`.

    Empty when there was nothing in time. `confirm_offset` is the master's, and `end_offset` where its disk ends.
    """

    physical_offset: int
    data: bytes
    entry: EpochEntry | None
    confirm_offset: int
    end_offset: int


def common_end(mine: Sequence[EpochEntry], my_end: int, theirs: Sequence[EpochEntry], their_end: int) -> int | None:
    """Up to where two logs are the same; None if nothing is (spec/storage.md §11.2, handshake truncation).

    The newest epoch that began at the same place in both, up to where the first of the two leaves it.
    """
    ends = dict(with_ends(theirs, their_end))
    for entry, end in reversed(with_ends(mine, my_end)):
        if entry in ends:
            return min(end, ends[entry])
    return None


def with_ends(entries: Sequence[EpochEntry], end_offset: int) -> list[tuple[EpochEntry, int]]:
    """Each epoch with where it ends: where the next begins, or at the log's end."""
    return list(zip(entries, [*(entry.start_offset for entry in entries[1:]), end_offset], strict=False))
