"""Decides which replica is the master of a broker group. The Controller has one `GroupControl` per group.

MASTER_STEPS has the next step for each view of the current master.

The GroupControl gets each replica's report (`note_account`) about three times a second. It returns actions (`tick`):
renew the master's lease, let other replicas follow, or elect. Rules (spec/storage.md §11.2, §11.3):

- A replica is alive if its report is recent by the Controller's clock. So a suspended process counts as dead.
- While the master may still hold its last lease, no other replica is elected. There are two exceptions: a report of the
  master's new process shows that the old process ended, or the master reports that its disk has failed.
- A replica with a failed disk is not elected, and not followed.
- An alive member of the sync-state set is elected. But a replica whose log is known to lack acknowledged messages is
  not elected while another member may have these messages (actors.core.replica.candidates). After a restart of the
  whole set, the GroupControl waits for each replica until the replica has not answered for `grace_s`.
- A group that never had a master starts with the replica with the longest log, after all reports have arrived.
- With fixed roles only `fixed_master` may lead. It does not lead if it has lost the directory with which it led, and
  it does not lead while another replica has a longer log, because the end of that log would be removed. While the fixed
  master is unreachable, the group has no master.
- A decision (`Record`) is journaled before an order is sent, and the order is repeated until the replica's report shows
  that it was executed.
- An order to lead is for the process that sent the report. If that process ended before it led, the election is
  annulled, and the previous sync-state set is valid again. The other replicas store the new set only after the elected
  replica leads.
- A sync-state set with fewer members is annulled in the same way, if the master's process ended before it received the
  set. The log of this process may have lost its end, and then only the former members have every message. A replica
  that leaves the group is first taken out of the set, and leaves after the master has reported the smaller set.

The newest `Record` of the group is in the journal and survives a crash. If the journal is lost, or if a replica has
stored a newer sync-state set than the journal has, the record is rebuilt from the replicas' reports. That waits for all
reports, because a missing replica may have seen a newer epoch. With `unclean` it waits for `grace_s` at most. It also
waits until every lease that the lost decisions may have granted is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from actors.core.replica.candidates import Choice, Electorate, against_fixed_master, describe_lack, names
from actors.core.replica.orders import MASTER_LEASE_S, Drain, Follow, Lead, Renew, ReplicaRole, ReplicaState
from placement.membership import begin_change, cancel_change, change_min_in_sync, next_step
from raymq.common.errors import InvalidArgumentError
from storage.replication.epochs import ReplicaMembers, SyncStateSet

FIXED_MASTER: Final = 0
"""The number of the only replica that may lead with fixed roles (replication.broker_role)."""
RECOVERED_EPOCH_GAP: Final = 100
"""Number of epochs that the Controller skips after the journal was lost, so that a new epoch cannot equal an epoch from
the lost journal."""


@dataclass(frozen=True, slots=True)
class Record:
    """A decision of the Controller about a broker group. The decision is written to the journal before the Controller
    acts on it.

    `elected_from`: the sync-state set from which the master was elected, which is valid until the master leads. It maps
    each member to the id of the member's directory. `incarnation`: the incarnation of the master's directory at the
    election, 0 if unknown. `loss`: the acknowledged messages that the master lacked at the election, empty if none.
    `members`: the group's replicas; None if they were never changed, so that raymq.yaml names them. `shrunk_from`: the
    former sync-state set if the present one lacks some of its members, else empty. The former set is valid until the
    master has received the present one.
    """

    group: str
    epoch: int
    master: int | None
    sync_state_set: SyncStateSet
    elected_from: Mapping[int, str] = field(default_factory=dict)
    incarnation: int = 0
    loss: str = ""
    members: ReplicaMembers | None = None
    shrunk_from: Mapping[int, str] = field(default_factory=dict)


Action = Record | Lead | Renew | Follow | Drain


@dataclass(frozen=True, slots=True)
class ControlRules:
    """The timing of elections in s, and the fixed master.

    `dead_after_s`: a replica counts as dead after this time without a report. `lease_s`: the length of a lease, counted
    from the report that the Controller answers. So a lease never ends later than the Controller assumes, however long
    messages take. `lease_margin_s`: the maximum drift between two clocks during a lease. `drain_timeout_s`: the longest
    time that a master waits for its successor. `grace_s`: the Controller waits for a replica until the
    replica has not answered for this time. It waits only if a master is needed and no replica is sure to have every
    acknowledged message.
    `fixed_master`: with fixed roles, the only replica that may lead.
    """

    dead_after_s: float = 1.0
    lease_s: float = MASTER_LEASE_S
    lease_margin_s: float = 0.5
    drain_timeout_s: float = 5.0
    grace_s: float = 10.0
    unclean: bool = False
    fixed_master: int | None = None


class MasterView(Enum):
    """The state of a broker group's master, as the Controller sees it."""

    NOBODY = "the group has no master"
    AWAY = "it does not answer, has not the directory that it led with, or may not lead any more"
    NOT_ORDERED = "it was elected and does not know it yet"
    ANNULLED = "its process was started again before it led"
    RESTARTED = "its process was started again: the one that led is gone, and its lease with it"
    FAILED = "its disk has failed, and it has given up its lease"
    NOT_LEADING = "it answers, and does not lead in its epoch"
    LEADING = "it leads"


class MasterStep(Enum):
    """The Controller's next step for a master."""

    WAIT = "do nothing until the lease is over"
    ORDER = "order it to lead"
    RENEW = "renew its lease, alter its set, or have it hand over"
    ELECT = "elect another"


MASTER_STEPS: Final[Mapping[tuple[MasterView, bool], MasterStep]] = {
    (MasterView.NOBODY, False): MasterStep.ELECT,
    (MasterView.NOBODY, True): MasterStep.ELECT,
    (MasterView.AWAY, False): MasterStep.WAIT,
    (MasterView.AWAY, True): MasterStep.ELECT,
    (MasterView.NOT_ORDERED, False): MasterStep.ORDER,
    (MasterView.NOT_ORDERED, True): MasterStep.ORDER,
    (MasterView.ANNULLED, False): MasterStep.ELECT,
    (MasterView.ANNULLED, True): MasterStep.ELECT,
    (MasterView.RESTARTED, False): MasterStep.ELECT,
    (MasterView.RESTARTED, True): MasterStep.ELECT,
    (MasterView.FAILED, False): MasterStep.ELECT,
    (MasterView.FAILED, True): MasterStep.ELECT,
    (MasterView.NOT_LEADING, False): MasterStep.WAIT,
    (MasterView.NOT_LEADING, True): MasterStep.ELECT,
    (MasterView.LEADING, False): MasterStep.RENEW,
    (MasterView.LEADING, True): MasterStep.RENEW,
}
"""The Controller's next step for a broker group. Each key is the Controller's view of the group's master, and True if
the master's last lease has expired."""


@dataclass(slots=True)
class _Account:
    """A replica's newest report, with the times at which the Controller requested and received the report, by the
    Controller's clock."""

    state: ReplicaState
    asked_s: float
    at_s: float


@dataclass(slots=True)
class GroupControl:
    """The election state of one broker group.

    `planned`: the replicas that the plan names. They count until the group's replicas are changed
    (placement.membership). `priorities`: the priority of each replica; the replica with the smallest number is the
    preferred master. `learners`: replicas that never lead. `planned_min_in_sync`: min_in_sync_replicas of raymq.yaml,
    which counts until the group gets another minimum. `in_sync_replicas`: the number of copies that a message needs.
    `running`: the replicas that had a storage actor when the Controller started. Without a journal they may belong to
    the group, too. `lost_leases_until_s`: the time, by the Controller's clock, at which the leases of lost decisions
    are over. None means the time of a lease after the Controller finds that its journal is lost.
    """

    group: str
    planned: frozenset[int]
    rules: ControlRules = field(default_factory=ControlRules)
    priorities: Mapping[int, int] = field(default_factory=dict)
    learners: frozenset[int] = frozenset()
    planned_min_in_sync: int = 1
    in_sync_replicas: int = 1
    running: frozenset[int] = frozenset()
    lost_leases_until_s: float | None = None
    record: Record | None = None
    reason: str = "no replica has reported yet"
    """The reason why the group has no master now; empty if the group has a master."""
    change_waits: str = ""
    """The reason why the current change of the group's replicas cannot go on now; empty without a reason."""
    _step_versions: tuple[int, int] = (-1, -1)
    """The versions of the members and of the sync-state set for which the Controller last looked for the next step of a
    change."""
    _step_since_s: float = 0.0
    """The time since which the group has the members and the sync-state set of `_step_versions`."""
    _accounts: dict[int, _Account] = field(default_factory=dict)
    """The newest state report of each replica, by replica number."""
    _lease_until_s: float = 0.0
    """The time at which the newest lease of the group's master expires, including a safety margin, by the Controller's
    clock."""
    _led_incarnation: int = -1
    """The incarnation (number of starts of its store directory) in which the master was seen leading in the current
    epoch; -1 if the master has not led in this epoch yet."""
    _due_since_s: float | None = None
    """The time since which the group needs a master and has a working replica that may lead; None while the group has a
    master."""
    _outdated: bool = False
    """True after the journal's record was dropped, because a replica had stored a newer sync-state set."""
    _outdated_members: ReplicaMembers | None = None
    """The members in the dropped record. The group has these members, or newer ones that a replica reports."""
    _designated: int | None = None
    """The replica that should become master as soon as the change is safe; None if no change is requested."""
    _designated_until_s: float = 0.0
    """The time at which the Controller drops the request to change the master, if the change has not happened
    by then."""
    _planned_members: ReplicaMembers = field(init=False)
    """The members of a group whose replicas were never changed."""

    def __post_init__(self) -> None:
        self._planned_members = ReplicaMembers(0, self.planned)

    @property
    def members(self) -> ReplicaMembers:
        """The group's replicas. Without a decision of the Controller, these are the newest members that a replica
        has reported, so that they survive the loss of the journal."""
        if self.record is not None:
            return self.record.members or self._planned_members
        known = [self._outdated_members, *(account.state.members for account in self._accounts.values())]
        return max([self._planned_members, *(one for one in known if one is not None)], key=lambda one: one.version)

    @property
    def set_in_force(self) -> SyncStateSet | None:
        """The sync-state set that all replicas may store now; None without one.

        The set of an election is not in force before the elected replica leads. If its process ends before it leads,
        the previous set is valid again. Suppose that replicas had stored the set of this election, and the journal is
        lost. Then the group would have only the elected replica, although its log may have lost its end. The same holds
        for a set with fewer members, until the master has received it.
        """
        record = self.record
        if record is None:
            return None
        # An election begins with the elected replica alone. A set with more members was proposed by a master that led.
        is_elected = record.master is not None and record.sync_state_set.members == {record.master}
        if (is_elected and self._led_incarnation < 0) or (record.shrunk_from and not self._has_received(record)):
            return None
        return record.sync_state_set

    @property
    def replicas(self) -> frozenset[int]:
        """The replicas that the group has now, including replicas that join or leave."""
        return self.members.replicas

    @property
    def min_in_sync(self) -> int:
        """The minimum number of replicas in sync with which the master accepts messages."""
        return self.members.min_in_sync or self.planned_min_in_sync

    @property
    def ordered(self) -> dict[str, int]:
        """The values of the section `replication` that `raymq broker replicas` has changed. raymq.yaml's values no
        longer count for this group."""
        if not self.members.version:
            return {}
        least = {"min_in_sync_replicas": self.members.min_in_sync} if self.members.min_in_sync else {}
        return {"replicas": len(self.members.staying), **least}

    @property
    def required_in_sync(self) -> int:
        """The number of replicas that stay in sync while others leave."""
        return max(self.min_in_sync, self.in_sync_replicas)

    @property
    def able(self) -> frozenset[int]:
        """The replicas that may become the master of the group."""
        fixed = self.rules.fixed_master
        return self.replicas - self.learners if fixed is None else frozenset({fixed})

    def resume(self, record: Record, now_s: float) -> None:
        """Continue from the group's last decision in the journal (`record`) after the Controller restarts. A master may
        still hold a lease that the Controller granted before the restart."""
        self.record = record
        self._lease_until_s = now_s + self.rules.lease_s + self.rules.lease_margin_s

    def note_account(self, state: ReplicaState, now_s: float, asked_s: float | None = None) -> None:
        """Record a replica's report. `asked_s`: the time at which the report was requested; None means now.

        A report that arrives after a newer report of the same directory is ignored.
        """
        known = self._accounts.get(state.replica)
        if known is None or known.state.store_id != state.store_id or state.age > known.state.age:
            self._accounts[state.replica] = _Account(state, now_s if asked_s is None else asked_s, now_s)

    def designate(self, replica: int, now_s: float) -> None:
        """Request that `replica` becomes master as soon as that is safe (`raymq balance`). The request is dropped after
        `drain_timeout_s`. A second call for the same replica does not extend this time, because the old master refuses
        appends while it waits for the new master."""
        if replica == self._designated and now_s <= self._designated_until_s:
            return
        self._designated, self._designated_until_s = replica, now_s + self.rules.drain_timeout_s

    def change_replicas(self, count: int, replace_one: int | None = None) -> Record:
        """Start a change to `count` replicas, and return the decision for the journal. `replace_one`: the replica that
        a new replica replaces. Raises InvalidArgumentError if the change is not possible (placement.membership)."""
        record = self._require_record()
        now = begin_change(
            self.group,
            self.members,
            count,
            replace_one=replace_one,
            in_sync=record.sync_state_set.members,
            master=record.master,
            required=self.required_in_sync,
        )
        return self._with_members(record, now)

    def change_min_in_sync(self, least: int) -> Record:
        """Change the minimum number of replicas in sync, and return the decision for the journal. Raises
        InvalidArgumentError if the change is not possible (placement.membership)."""
        record = self._require_record()
        in_sync = record.sync_state_set.members
        now = change_min_in_sync(self.group, self.members, least, present=self.min_in_sync, in_sync=in_sync)
        return self._with_members(record, now)

    def cancel_change(self) -> Record:
        """Cancel the current change of the group's replicas, and return the decision for the journal. Raises
        InvalidArgumentError if there is no change, or if a replica has already left."""
        record = self._require_record()
        return self._with_members(record, cancel_change(self.group, self.members))

    def _require_record(self) -> Record:
        if self.rules.fixed_master is not None or self.learners:
            raise InvalidArgumentError(
                f"the replicas of broker group {self.group!r} can be changed only by a restart, because broker_role or "
                "learners is set"
            )
        if self.record is None:
            raise InvalidArgumentError(f"broker group {self.group!r} has no master yet: {self.reason}")
        return self.record

    def _with_members(self, record: Record, members: ReplicaMembers) -> Record:
        if members != self.members:
            record = self.record = replace(record, members=members)
        return record

    def alive(self, now_s: float) -> dict[int, ReplicaState]:
        """Return the newest report of each replica that reported recently, by replica number."""
        return self._alive(self.reporting(now_s))

    def _alive(self, reporting: frozenset[int]) -> dict[int, ReplicaState]:
        answering = self.replicas & reporting
        return {replica: account.state for replica, account in self._accounts.items() if replica in answering}

    def reporting(self, now_s: float) -> frozenset[int]:
        """Return the replicas that reported recently, including replicas that do not belong to the group."""
        recent = {one for one, account in self._accounts.items() if now_s - account.at_s <= self.rules.dead_after_s}
        return frozenset(recent)

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that the Controller must execute now for this broker group, in order."""
        reporting = self.reporting(now_s)
        self._drop_outdated(reporting)
        alive = self._alive(reporting)
        if self.record is None:
            self._recover(alive, now_s)
            if self.record is None:
                return []
            return [self.record, *self.tick(now_s)]
        actions = self._serve_master(alive, now_s)
        if actions is None:
            actions = [*self._annul(alive), *self._annul_shrink(alive), *self._elect(alive, now_s)]
        return [*actions, *self._followers(alive)]

    def _serve_master(self, alive: dict[int, ReplicaState], now_s: float) -> list[Action] | None:
        """Return the actions that the current master needs, such as a lease renewal; None if another replica must be
        elected."""
        record = self.record
        assert record is not None
        state = None if record.master is None else alive.get(record.master)
        view = self._view_master(record, state)
        step = MASTER_STEPS[view, now_s >= self._lease_until_s]
        if step is MasterStep.ELECT:
            return None
        if step is MasterStep.WAIT:
            if view is MasterView.AWAY:
                self.reason = (
                    f"replica {record.master} no longer leads; its lease must expire before another replica may lead"
                )
            return []
        assert state is not None
        if step is MasterStep.ORDER:
            return [self._lead(state, record)]
        self._led_incarnation, self._due_since_s, self.reason = state.incarnation, None, ""
        moving = self._hand_over(state, alive, now_s)
        if moving:
            return moving
        # A removal comes first: the master proposes a leaving replica again as long as the replica has not left.
        altered = self._change_members(record, alive, now_s) or self._alter(state, record, now_s)
        return [*altered, self._renew(state, altered[0] if altered else record, alive)]

    def _view_master(self, record: Record, state: ReplicaState | None) -> MasterView:
        """Return the state of the master that the journal's record names, as the Controller sees it. `state`: the
        replica state that the master reported last; None if there is no recent report."""
        if record.master is None:
            return MasterView.NOBODY
        # If the recorded master has lost its store directory, it has no messages and cannot be the master any more. The
        # changed settings may also no longer allow it to lead.
        lost = state is not None and record.sync_state_set.stores.get(state.replica) != state.store_id
        if state is None or lost or record.master not in self.able:
            return MasterView.AWAY
        if state.failed:
            return MasterView.FAILED
        if state.role is ReplicaRole.MASTER and state.epoch == record.epoch:
            return MasterView.LEADING
        if self._led_incarnation < 0 and state.epoch < record.epoch:
            again = record.incarnation and state.incarnation > record.incarnation
            return MasterView.ANNULLED if again else MasterView.NOT_ORDERED
        if state.role is ReplicaRole.FENCED and state.incarnation > self._led_incarnation:
            return MasterView.RESTARTED
        return MasterView.NOT_LEADING

    def _alter(self, state: ReplicaState, record: Record, now_s: float) -> list[Record]:
        """Return the group's new journal record, if the master proposes a change of the sync-state set. Returns an
        empty list if the master proposes nothing.

        A proposal that is based on an outdated set is ignored, and so is a proposal in a report that was requested more
        than `dead_after_s` ago: the master's process may have ended since, and its log may have lost its end. A running
        master proposes again in its next report.

        For any other proposal the new record gets the proposed set, with a new version, so that the master sees that
        its proposal was processed. Replicas that must not be members are removed from the set.
        """
        if not self._is_timely(state.replica, now_s):
            return []
        asked, now = state.proposal, record.sync_state_set
        if asked is None or (asked.epoch, asked.version) != now.order or state.replica not in asked.stores:
            return []
        stores = {name: store for name, store in asked.stores.items() if name in self.replicas - self.learners}
        # A leaving replica that other replicas can stand in for does not join again. Otherwise it would never leave.
        leaving = self.members.leaving - now.members
        if len(stores.keys() - leaving) >= max(self.required_in_sync, 1):
            stores = {name: store for name, store in stores.items() if name not in leaving}
        # The proposal is based on the present set, so the master has received the present set.
        lost = now.stores if now.stores.keys() - stores.keys() else {}
        self.record = replace(record, sync_state_set=SyncStateSet(now.epoch, now.version + 1, stores), shrunk_from=lost)
        return [self.record]

    def _has_received(self, record: Record) -> bool:
        """Return True if the master's newest report shows that the master has stored the record's sync-state set."""
        account = None if record.master is None else self._accounts.get(record.master)
        known = None if account is None else account.state.sync_state_set
        return known is not None and known.order >= record.sync_state_set.order

    def _change_members(self, record: Record, alive: dict[int, ReplicaState], now_s: float) -> list[Record]:
        """Return the decision with the next step of the current change of the group's replicas; an empty list if no
        step is possible now."""
        assert record.master is not None
        step = next_step(self.members, record.sync_state_set.stores, record.master, alive, self.required_in_sync)
        self.change_waits = step.waits
        if step.successor is not None:
            self.designate(step.successor, now_s)
        if step.members is None or step.stores is None:
            return []
        versions = self.members.version, record.sync_state_set.version
        if versions != self._step_versions:
            self._step_versions, self._step_since_s = versions, now_s
        is_current = self._accounts[record.master].asked_s >= self._step_since_s and self._is_timely(
            record.master, now_s
        )
        received = self._has_received(record)
        if step.members.removed > self.members.removed and not (is_current and received):
            # An older report may come from a process that has ended, or that had not found the damage of its log yet.
            # Since that report, the leaving replica may have become the only one with every acknowledged message.
            self.change_waits = f"a replica leaves after the next report of replica {record.master}, which leads"
            return []
        now = record.sync_state_set
        if step.stores == now.stores:
            self.record = replace(record, members=step.members)
        else:
            stores = SyncStateSet(now.epoch, now.version + 1, step.stores)
            before = now.stores if received else record.shrunk_from or now.stores
            self.record = replace(record, sync_state_set=stores, members=step.members, shrunk_from=before)
        return [self.record]

    def _is_timely(self, replica: int, now_s: float) -> bool:
        """Return True if the replica's newest report was requested at most `dead_after_s` ago. The process that sent an
        older report may have ended."""
        return self._accounts[replica].asked_s >= now_s - self.rules.dead_after_s

    def _hand_over(self, state: ReplicaState, alive: dict[int, ReplicaState], now_s: float) -> list[Action]:
        record, to = self.record, self._designated
        assert record is not None
        if to is None or to == record.master or now_s > self._designated_until_s:
            self._designated = None
            # A master that is draining continues to lead in a new epoch if its successor does not start in time.
            return self._begin(state, record) if state.draining else []
        other = alive.get(to)
        if to not in record.sync_state_set.members or other is None or other.failed:
            return []
        if not (other.complete and other.caught_up):
            return []
        if state.draining and other.log_epoch == state.log_epoch and other.end_offset == state.end_offset:
            self._designated = None
            return self._begin(other, record)
        return [self._renew(state, record, alive), Drain(self.group, state.replica, record.epoch, to)]

    def _annul(self, alive: dict[int, ReplicaState]) -> list[Action]:
        """Annul an election whose elected replica restarted before it led. Returns the group's record for the journal
        without this election, or an empty list if there is no such election.

        The elected process has ended, and its order to lead is not valid for any other process. So no message was
        acknowledged in the epoch of this election, and any member of the previous sync-state set may be elected.
        """
        record = self.record
        assert record is not None
        state = None if record.master is None else alive.get(record.master)
        if self._view_master(record, state) is not MasterView.ANNULLED:
            return []
        before = SyncStateSet(record.epoch, record.sync_state_set.version + 1, record.elected_from)
        self.record = Record(self.group, record.epoch, None, before, members=record.members)
        return [self.record]

    def _annul_shrink(self, alive: dict[int, ReplicaState]) -> list[Action]:
        """Annul a sync-state set with fewer members that the master's process had not received when it ended. Returns
        the group's record for the journal with the former set, or an empty list if there is no such set.

        The master stores a set before it acts on it. So if its report shows an older set, every acknowledged message
        has a copy at each member of the former set.
        """
        record = self.record
        assert record is not None
        state = None if record.master is None else alive.get(record.master)
        if not record.shrunk_from or state is None or self._has_received(record):
            return []
        if record.shrunk_from.get(state.replica) != state.store_id:
            return []
        former = SyncStateSet(record.epoch, record.sync_state_set.version + 1, record.shrunk_from)
        self.record = replace(record, sync_state_set=former, shrunk_from={})
        return [self.record]

    def _elect(self, alive: dict[int, ReplicaState], now_s: float) -> list[Action]:
        record = self.record
        assert record is not None
        working = {replica: state for replica, state in alive.items() if not state.failed}
        if self._due_since_s is None and self.able & working.keys():
            self._due_since_s = now_s
        since_s = now_s if self._due_since_s is None else self._due_since_s
        silent = self._silent(record, working, since_s, now_s)
        # No message is acknowledged while the group has no master. So if a replica's report was requested after the
        # group lost its master, the report counts all acknowledged messages that the replica has.
        fresh = frozenset(replica for replica in working if self._accounts[replica].asked_s >= since_s)
        if self.rules.fixed_master is None:
            stores, unclean = record.sync_state_set.stores, self.rules.unclean
            choice = Electorate(
                self.replicas, self.able, stores, working, fresh, self.priorities, silent, unclean=unclean
            ).choose()
        else:
            choice = self._choose_fixed(self.rules.fixed_master, alive, record, fresh, silent)
        if choice.elected is None:
            failed = "".join(f"; replica {one.replica}: {one.failed}" for one in alive.values() if one.failed)
            self.reason = choice.reason if self.rules.fixed_master is not None else choice.reason + failed
            return []
        return self._begin(choice.elected, record, choice.loss)

    def _silent(self, record: Record, working: Collection[int], since_s: float, now_s: float) -> frozenset[int]:
        """Return the replicas that did not answer for `grace_s`, and that have not answered since.

        The period of each replica begins with its newest report, but not before `since_s`, the time since which the
        group needs a master. So a replica that ends again and again is not passed over soon after a report. A replica
        that reports a failed disk counts as if it did not answer.
        """
        last_s = {
            replica: max(since_s, account.at_s)
            for replica, account in self._accounts.items()
            if not account.state.failed
        }
        return frozenset(
            replica
            for replica in self.replicas | record.sync_state_set.members
            if replica not in working and now_s - last_s.get(replica, since_s) >= self.rules.grace_s
        )

    def _choose_fixed(
        self,
        fixed: int,
        alive: dict[int, ReplicaState],
        record: Record,
        fresh: frozenset[int],
        silent: frozenset[int],
    ) -> Choice:
        reason = self._against_fixed_master(fixed, alive, record)
        absent = self.replicas - fresh
        reason = reason or against_fixed_master(alive[fixed], absent, graced=absent <= silent)
        return Choice(None, reason) if reason else Choice(alive[fixed], loss=describe_lack(alive[fixed]))

    def _against_fixed_master(self, fixed: int, alive: dict[int, ReplicaState], record: Record) -> str:
        """Return the reason why the fixed master (the only replica that the settings allow to lead) must not lead now;
        empty if it may lead."""
        state = alive.get(fixed)
        if state is None:
            return (
                f"replica {fixed} does not answer, and no other replica may lead (broker_role): the Controller "
                f"waits for replica {fixed}"
            )
        if state.failed:
            return f"replica {fixed} cannot lead, and no other replica may lead (broker_role): {state.failed}"
        if record.sync_state_set.stores.get(fixed) != state.store_id:
            return (
                f"replica {fixed} must lead (broker_role), but its directory is not the one that has every "
                "acknowledged message: bring that directory back, or let another replica lead; see "
                "docs/cluster.md"
            )
        longer = [replica for replica, other in alive.items() if other.rank > state.rank]
        # Suppose that another replica's log is longer than the fixed master's log. This is a reason to refuse the fixed
        # master only if no other replica has led before. If another replica has led, some member of the sync-state set
        # has every acknowledged message; the additional messages of the longer log were never acknowledged.
        if longer and record.master in (None, fixed):
            return (
                f"replica {fixed} must lead (broker_role), but replica {names(longer)} has a longer log: the disk "
                f"of replica {fixed} has lost messages; see docs/cluster.md"
            )
        return ""

    def _begin(self, state: ReplicaState, record: Record, loss: str = "") -> list[Action]:
        replica = state.replica
        epoch = max([record.epoch, *(account.state.epoch for account in self._accounts.values())]) + 1
        first = SyncStateSet(epoch, record.sync_state_set.version + 1, {replica: state.store_id})
        before = record.sync_state_set.stores
        self.record = Record(
            self.group, epoch, replica, first, before, state.incarnation, loss=loss, members=record.members
        )
        self._led_incarnation, self._due_since_s = -1, None
        self.reason = f"replica {replica} was elected and has not answered yet"
        return [self.record, self._lead(state, self.record)]

    def _lead(self, state: ReplicaState, record: Record) -> Lead:
        self._note_lease(state)
        incarnation = record.incarnation or state.incarnation
        return Lead(self.group, state.replica, record.sync_state_set, state.clock_s, incarnation)

    def _renew(self, state: ReplicaState, record: Record, alive: dict[int, ReplicaState]) -> Renew:
        self._note_lease(state)
        dead = self.replicas - {replica for replica, one in alive.items() if not one.failed}
        return Renew(self.group, state.replica, record.sync_state_set, state.clock_s, frozenset(dead))

    def _note_lease(self, state: ReplicaState) -> None:
        """Record that the Controller grants the master a lease. The Controller counts the lease from the time at which
        it received the master's report. The master sent this report earlier, so the master's lease ends first."""
        until_s = self._accounts[state.replica].at_s + self.rules.lease_s + self.rules.lease_margin_s
        self._lease_until_s = max(self._lease_until_s, until_s)

    def _followers(self, alive: dict[int, ReplicaState]) -> list[Action]:
        record = self.record
        if record is None or record.master is None or self._led_incarnation < 0:
            return []  # no replica may follow a new master until the master reports that it leads
        followed = (ReplicaRole.SLAVE, record.epoch, record.master)
        return [
            Follow(self.group, replica, record.epoch, record.master)
            for replica, state in sorted(alive.items())
            if replica != record.master and not state.failed and (state.role, state.epoch, state.master) != followed
        ]

    def _drop_outdated(self, reporting: frozenset[int]) -> None:
        """Drop the record if the journal has lost later records. A replica stores a sync-state set only after the set
        was journaled, so a newer set at a replica proves the loss. Sets without a common directory are ignored: they
        come from another broker group's directory."""
        record = self.record
        if record is None:
            return
        known = record.sync_state_set
        order = known.order
        for replica in reporting:
            newest = self._accounts[replica].state.sync_state_set
            if newest is None or newest.order <= order:
                continue
            own = {*known.stores.items(), *record.elected_from.items(), *record.shrunk_from.items()}
            if own & newest.stores.items():
                self.record, self._outdated, self._due_since_s = None, True, None
                self._outdated_members = record.members
                return

    def _recover(self, alive: dict[int, ReplicaState], now_s: float) -> None:
        """Rebuild the broker group's record (the Controller's last decision) from the replicas' reports, if the journal
        has no record or an outdated one. Waits until every replica has reported; with `unclean` for `grace_s` at
        most. If a replica has stored a sync-state set, the group has had a master. Then only reports count that were
        requested after the end of every lease.

        An order of a lost decision may still be on its way. The replica that gets the order leads until its lease ends,
        and may store a set with itself alone. A later report of the replica has this set."""
        if self.lost_leases_until_s is None:
            self.lost_leases_until_s = now_s + self.rules.lease_s + self.rules.lease_margin_s
        # A replica that left the group, or has just joined it, may not have received the newest members. So wait for
        # each replica that runs, unless the newest members say that it has left.
        missing = (self.replicas | self.running - self.members.removed) - self.reporting(now_s)
        if missing:
            if self._due_since_s is None:
                self._due_since_s = now_s
            lack = "is older than the replicas' files" if self._outdated else "has no entry of this broker group"
            self.reason = (
                f"the Controller's journal {lack}, and replica {names(missing)} does not answer. The group has no "
                "master until this replica answers. Bring it back, or allow losing messages with "
                "enable_elect_unclean_master"
            )
            if not alive or not self.rules.unclean or now_s - self._due_since_s < self.rules.grace_s:
                return
        sets = [state.sync_state_set for state in alive.values() if state.sync_state_set is not None]
        leased_until_s = max(self.lost_leases_until_s, self._lease_until_s)
        if sets and min(self._accounts[replica].asked_s for replica in alive) < leased_until_s:
            self.reason = "the Controller's journal is lost, and a replica may still hold the lease of a lost decision"
            return
        # The lost journal may have contained a newer epoch, and a replica may still receive the order to lead in it.
        # Skip some epochs, so that the new epoch is larger than any epoch of the lost journal. A replica that has not
        # executed an order since its start may have stored a set of a later epoch than the epoch that it reports.
        epochs = [state.epoch for state in alive.values()] + [one.epoch for one in sets]
        epoch = max(epochs) + RECOVERED_EPOCH_GAP
        newest = max(sets, key=lambda one: one.order, default=None)
        everybody = {replica: state.store_id for replica, state in alive.items() if replica not in self.learners}
        stores, version = (everybody, 0) if newest is None else (newest.stores, newest.version)
        members = self.members if self.members.version else None
        self.record = Record(self.group, epoch, None, SyncStateSet(epoch, version, stores), members=members)
        self._led_incarnation, self._due_since_s = -1, None
