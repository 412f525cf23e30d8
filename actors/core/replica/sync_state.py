"""A master's records of its followers, and the confirm offset and the sync-state set computed from these records.

This module decides when a replica counts as in sync, and when an append has enough copies.

A follower reports the end of the log on its disk with each request, and in acknowledgements. This end may be beyond the
end on the master's own disk. The confirm offset is the end of the log that every member of the set has, the master
included; it never goes back. The master proposes a change of the set to the Controller:

    expand   a follower that has everything up to the confirm offset and has recently reached the master's end
    shrink   a member that has not reached the master's end for `not_catchup_s`, that does not answer the Controller,
             or whose disk has lost its log

While messages arrive all the time, a follower that is close to the master's end never has exactly the confirmed log. So
the confirm offset waits for the copy of such a follower before the follower is a member. The wait begins when the
follower has reached the end that the log had at its last request. It lasts at most JOIN_MAX_S, because only the master
counts the follower. When the follower has everything up to the confirm offset, the master proposes it as a member.

From the proposal to the answer, the members of both the old and the new set count (spec/storage.md §11.2). So every
replica that the Controller may elect in that time has every acknowledged message. No state survives the process.

This module also records the times at which the bytes of a log were stored, approximately and in little memory, to
compute the lag in seconds.

The times are stored as marks. A mark has an end offset and a time: the bytes from the end of the previous mark to the
mark's own end were stored at that time or later. Bytes stored within MARK_S of a mark's time are added to the mark. If
there are more than MARKS_MAX marks, two marks are joined. So an age may be too large, by a few percent and MARK_S. It
is never too small, except for bytes stored before the first mark. No mark survives the process.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from actors.core.replica.orders import FollowerLag
from storage.replication.epochs import SyncStateSet

MARK_S: Final = 0.1
MARKS_MAX: Final = 512


class StoreTimes:
    """The approximate times at which the bytes of one log were stored.

    `end_offset`: the end of the log when this object is created, at `now_s`. The store times of earlier bytes are not
    known; `now_s` is used for them.
    """

    def __init__(self, end_offset: int, now_s: float) -> None:
        self._ends = [end_offset]
        self._times_s = [now_s]

    def stored(self, end_offset: int, now_s: float) -> None:
        """Record that the log's bytes up to `end_offset` were stored at `now_s`."""
        if end_offset <= self._ends[-1]:
            return
        if len(self._ends) > 1 and now_s - self._times_s[-1] < MARK_S:
            self._ends[-1] = end_offset
            return
        self._ends.append(end_offset)
        self._times_s.append(now_s)
        if len(self._ends) > MARKS_MAX:
            self._join_two(now_s)

    def age_s(self, physical_offset: int, now_s: float) -> float:
        """Return the time, in s, since the byte of the log at `physical_offset` was stored; 0 if the byte is not stored
        yet."""
        index = bisect_right(self._ends, physical_offset)
        return max(now_s - self._times_s[index], 0.0) if index < len(self._ends) else 0.0

    def _join_two(self, now_s: float) -> None:
        """Join two neighbouring marks of the list, so that the list stays short. A mark has a time and an end offset of
        the log (see the module's docstring). The joined mark has the earlier time and the later end. A join makes bytes
        look older than they are. The pair is chosen for which this error is smallest, relative to the age."""
        times_s = self._times_s
        first = min(
            range(1, len(times_s) - 2), key=lambda i: (times_s[i + 2] - times_s[i]) / max(now_s - times_s[i], MARK_S)
        )
        del self._times_s[first + 1], self._ends[first]


JOIN_MAX_S: Final = 1.0


@dataclass(slots=True)
class _Follower:
    """The state of one follower, according to its newest request. Offsets are physical; times are in s on the master's
    clock.

    `acked_offset`: the follower has everything before this offset. `asked_end_offset`: the end of the master's log at
    the newest request. `asked_s`: the time of the newest request. `caught_up_s`: the last time at which the follower
    had reached the end of the master's log.
    """

    store_id: str
    acked_offset: int
    asked_end_offset: int
    asked_s: float
    caught_up_s: float
    learner: bool


class MasterSyncState:
    """The followers of a master in one epoch. `first`: the sync-state set at the start of the epoch, at `now_s`, when
    the master's log ended at `end_offset`."""

    def __init__(
        self, replica: int, first: SyncStateSet, end_offset: int, now_s: float, *, not_catchup_s: float
    ) -> None:
        self._replica = replica
        self._not_catchup_s = not_catchup_s
        self.sync_state_set = first
        self._proposed: dict[int, str] | None = None
        """The proposed members of the sync-state set, each with the id of its directory; None if the master has
        proposed no change."""
        self._followers: dict[int, _Follower] = {}
        self._joining: dict[int, tuple[str, float]] = {}
        """The followers that will soon become members of the sync-state set. The confirm offset already requires their
        copies, but the master has not proposed them as members yet. For each follower: the id of its directory, and the
        time, in s, from which the confirm offset requires its copies."""
        self._strangers: frozenset[int] = frozenset()
        """Replicas that have left the broker group. Their copies never count, even if they still read the log."""
        self._counted_others: tuple[tuple[int, str], ...] = ()
        """The items of `_counted_stores` without this replica. The confirm offset needs them at each flush and at each
        request of a follower."""
        self._own_end = self.confirm_offset = end_offset
        self._recount()
        self._stored_times = StoreTimes(end_offset, now_s)

    @property
    def epoch(self) -> int:
        return self.sync_state_set.epoch

    @property
    def counted(self) -> frozenset[int]:
        """The replicas that must have copied a record before the confirm offset passes the record. They are the members
        of the sync-state set, proposed members, and followers that will be proposed soon."""
        return frozenset(self._counted_stores())

    def _counted_stores(self) -> dict[int, str]:
        """Return the replicas for whose copies the confirm offset waits, each with the id of the directory that holds
        its copy."""
        joining = {name: store_id for name, (store_id, _) in self._joining.items()}
        return {**joining, **self.sync_state_set.stores, **(self._proposed or {})}

    def _recount(self) -> None:
        """Compute `_counted_others` again. Each change of the set in force, of the proposal or of the joining followers
        needs this call."""
        stores = self._counted_stores()
        self._counted_others = tuple((name, store_id) for name, store_id in stores.items() if name != self._replica)

    def in_sync(self, now_s: float) -> frozenset[int]:
        """Return the replicas that are in sync now, including this replica."""
        return self.sync_state_set.members

    def flushed(self, end_offset: int, now_s: float) -> None:
        """Record that the log is on the master's own disk up to `end_offset`."""
        if end_offset > self._own_end:
            self._own_end = end_offset
            self._stored_times.stored(end_offset, now_s)
        self._confirm()

    def asked(self, follower: int, store_id: str, from_offset: int, now_s: float, *, learner: bool = False) -> None:
        """Record a follower's request or acknowledgement: the follower has this epoch's log up to `from_offset` on its
        disk."""
        if follower in self._strangers and follower not in self.sync_state_set.stores:
            return
        known = self._followers.get(follower)
        caught_up_s = now_s if from_offset >= self._own_end else -math.inf
        if known is not None and known.store_id == store_id:
            reached = from_offset >= known.asked_end_offset
            caught_up_s = max(caught_up_s, known.caught_up_s, known.asked_s if reached else -math.inf)
            is_member = follower in self.sync_state_set.stores
            if reached and not learner and not is_member and follower not in self._joining:
                self._joining[follower] = store_id, now_s
                self._recount()
        self._followers[follower] = _Follower(store_id, from_offset, self._own_end, now_s, caught_up_s, learner)
        self._confirm()

    def silent(self, names: frozenset[int]) -> None:
        """Record that some replicas do not answer the Controller. These replicas are removed from the sync-state set
        without waiting for `not_catchup_s`."""
        for name in names & self._followers.keys():
            self._followers[name].caught_up_s = -math.inf
            if self._joining.pop(name, None) is not None:
                self._recount()
        self._confirm()

    def note_removed(self, replicas: frozenset[int]) -> None:
        """Record the replicas that have left the broker group. This master never proposes them as members again."""
        self._strangers = replicas
        self._forget_strangers()

    def _forget_strangers(self) -> None:
        # A replica that is still in the set counts until the Controller's answer has the set without the replica.
        for name in self._strangers - self.sync_state_set.members:
            self._followers.pop(name, None)
            if self._joining.pop(name, None) is not None:
                self._recount()

    def copies(self, end_offset: int) -> int:
        """Return how many replicas of the sync-state set, including this replica, have the log up to
        `end_offset`."""
        stores = self._counted_stores()
        acked = [self._acked(member, stores) for member in self.sync_state_set.members - {self._replica}]
        return sum(offset is not None and offset >= end_offset for offset in acked) + (self._own_end >= end_offset)

    def propose(self, now_s: float) -> SyncStateSet | None:
        """Return the sync-state set to propose to the Controller: if the set should change, or if an earlier proposal
        was not answered. Otherwise return None."""
        late = [
            name
            for name, (_, since_s) in self._joining.items()
            if now_s - since_s > JOIN_MAX_S or name in self.sync_state_set.stores
        ]
        for name in late:
            del self._joining[name]
        if late:
            self._recount()
        self._confirm()
        if self._proposed is None:
            wanted = self._wanted(now_s)
            if wanted == self.sync_state_set.stores:
                return None
            self._proposed = wanted
            self._recount()
        return SyncStateSet(self.epoch, self.sync_state_set.version, self._proposed)

    def decided(self, answer: SyncStateSet) -> None:
        """Record the sync-state set that the Controller returned as the set in force.

        If the returned set is newer than the set in force so far, this master's current proposal ends. Otherwise the
        proposal stays open, because the Controller may still accept it. While it is open, the confirm offset also waits
        for the copies of all replicas in the proposed set.
        """
        if answer.epoch == self.epoch and answer.version > self.sync_state_set.version:
            self.sync_state_set = answer
            self._proposed = None
            self._recount()
            self._forget_strangers()
            self._confirm()

    def lags(self, now_s: float) -> dict[int, FollowerLag]:
        """Return the lag of each follower. The store times of bytes from earlier epochs are unknown here; the start of
        this epoch is used for them."""
        return {
            name: FollowerLag(
                max(self._own_end - follower.acked_offset, 0), self._stored_times.age_s(follower.acked_offset, now_s)
            )
            for name, follower in self._followers.items()
        }

    def _wanted(self, now_s: float) -> dict[int, str]:
        stores = self.sync_state_set.stores
        wanted = {self._replica: stores[self._replica]}
        for name, follower in self._followers.items():
            member = stores.get(name) == follower.store_id
            able = not follower.learner and follower.acked_offset >= self.confirm_offset
            if now_s - follower.caught_up_s <= self._not_catchup_s and (member or able):
                wanted[name] = follower.store_id
        return {name: store_id for name, store_id in wanted.items() if name not in self._strangers}

    def _confirm(self) -> None:
        end = self._own_end
        if end <= self.confirm_offset:
            return  # the confirm offset never passes the end of the master's own log
        for name, store_id in self._counted_others:
            follower = self._followers.get(name)
            if follower is None or follower.store_id != store_id:
                return
            end = min(end, follower.acked_offset)
        self.confirm_offset = max(self.confirm_offset, end)

    def _acked(self, name: int, stores: Mapping[int, str]) -> int | None:
        """Return the end of the log on a replica's disk. Returns None if the replica has sent no request, or if its
        directory is not the directory given in `stores`."""
        follower = self._followers.get(name)
        return None if follower is None or stores.get(name) != follower.store_id else follower.acked_offset


class FixedSyncState(MasterSyncState):
    """The followers of a master with fixed roles, which stays the master forever.

    A follower is in sync if it sent a request within `not_catchup_s`, answers the Controller, and lacks less than
    `max_gap_bytes` (RocketMQ's haMaxGapNotInSync). The confirm offset is the end of the master's own log.
    """

    def __init__(
        self,
        replica: int,
        first: SyncStateSet,
        end_offset: int,
        now_s: float,
        *,
        not_catchup_s: float,
        max_gap_bytes: int,
    ) -> None:
        super().__init__(replica, first, end_offset, now_s, not_catchup_s=not_catchup_s)
        self._max_gap_bytes = max_gap_bytes
        self._silent: frozenset[int] = frozenset()

    def silent(self, names: frozenset[int]) -> None:
        """Record which replicas do not answer the Controller now. All other replicas count as answering."""
        self._silent = names

    def in_sync(self, now_s: float) -> frozenset[int]:
        """Return the replicas that are in sync now, including this replica."""
        near = {
            name
            for name, follower in self._followers.items()
            if not follower.learner
            and name not in self._silent
            and now_s - follower.asked_s <= self._not_catchup_s
            and self._own_end - follower.acked_offset < self._max_gap_bytes
        }
        return frozenset(near | {self._replica})

    def copies(self, end_offset: int) -> int:
        """Return the number of replicas that have the log up to `end_offset`. This replica is included; learners are
        not."""
        others = sum(
            follower.acked_offset >= end_offset and not follower.learner for follower in self._followers.values()
        )
        return others + (self._own_end >= end_offset)

    def propose(self, now_s: float) -> SyncStateSet | None:
        """Return None, because the sync-state set never changes with fixed roles."""
        return None

    def _confirm(self) -> None:
        self.confirm_offset = self._own_end
