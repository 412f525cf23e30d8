"""Tests of the Controller's decisions about one broker group, such as elections of a master."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from actors.core.replica.orders import Drain, Follow, Lead, Renew, ReplicaRole, ReplicaState
from placement.controller import _fields, _record
from placement.election import (
    MASTER_STEPS,
    RECOVERED_EPOCH_GAP,
    ControlRules,
    GroupControl,
    MasterStep,
    MasterView,
    Record,
)
from raymq.common.errors import InvalidArgumentError
from storage.replication.epochs import ReplicaMembers, SyncStateSet

RULES = ControlRules(dead_after_s=1.0, lease_s=1.5, lease_margin_s=0.5)
LEASE_OVER_S = RULES.lease_s + RULES.lease_margin_s


def state(replica: int, *, clock_s: float = 0.0, **changes: object) -> ReplicaState:
    plain = ReplicaState(replica, f"store-{replica}", 1, clock_s, ReplicaRole.FENCED, 5, None, 5, 100, 100, None)
    return replace(plain, **changes)  # type: ignore[arg-type]


def of(epoch: int, version: int, *members: int) -> SyncStateSet:
    return SyncStateSet(epoch, version, {member: f"store-{member}" for member in members})


class World:
    """A simulated broker group with a clock and three replicas, which carry out the Controller's orders."""

    def __init__(self, record: Record | None, rules: ControlRules = RULES, **options: object) -> None:
        self.control = GroupControl("broker-a", frozenset({0, 1, 2}), rules, **options)  # type: ignore[arg-type]
        self.now_s = 0.0
        self.states = {replica: state(replica) for replica in range(3)}
        self.silent: set[int] = set()
        self.records: list[Record] = []
        if record is not None:
            self.control.resume(record, 0.0)

    def step(self, seconds: float = 0.3) -> list[object]:
        """Advance the clock by `seconds`, send the status reports of all replicas that are not silent, and carry out
        the Controller's orders."""
        self.now_s += seconds
        for replica, one in self.states.items():
            if replica not in self.silent:
                self.states[replica] = replace(one, clock_s=self.now_s)
                self.control.note_account(self.states[replica], self.now_s)
        actions = self.control.tick(self.now_s)
        for action in actions:
            self._obey(action)
        return list(actions)

    def pass_leases(self) -> None:
        """Advance the clock until every lease of a lost decision has ended, and all replicas have reported again."""
        until_s = self.now_s + LEASE_OVER_S
        while self.now_s < until_s:
            self.step()
        self.step()

    def ask(self, wanted: SyncStateSet, asker: int = 0) -> None:
        """Let replica `asker` request another sync-state set in its status report."""
        self._change(asker, proposal=wanted)
        self.step()
        self._change(asker, proposal=None)

    def _obey(self, action: object) -> None:
        if isinstance(action, Record):
            self.records.append(action)
        elif isinstance(action, Lead) and action.replica not in self.silent:
            epoch = action.sync_state_set.epoch
            self._change(action.replica, role=ReplicaRole.MASTER, epoch=epoch, draining=False, caught_up=True)
            self._change(action.replica, sync_state_set=action.sync_state_set)
        elif isinstance(action, Renew) and action.replica not in self.silent:
            self._change(action.replica, sync_state_set=action.sync_state_set)
        elif isinstance(action, Follow) and action.replica not in self.silent:
            self._change(
                action.replica, role=ReplicaRole.SLAVE, epoch=action.epoch, master=action.master, caught_up=True
            )
        elif isinstance(action, Drain):
            self._change(action.replica, draining=True)

    def _change(self, replica: int, **changes: object) -> None:
        self.states[replica] = replace(self.states[replica], **changes)  # type: ignore[arg-type]


@pytest.fixture
def led():
    """Return a broker group that replica 0 leads in epoch 6, with all replicas in the sync-state set."""
    world = World(Record("broker-a", 5, None, of(5, 1, 0, 1, 2)))
    world.step()
    world.step()
    world.ask(of(6, 2, 0, 1, 2))
    assert world.control.record is not None
    assert world.control.record.sync_state_set.members == {0, 1, 2}
    return world


def test_the_first_master_is_journaled_before_its_order(led):
    assert led.records[0].master == 0
    assert led.records[0].epoch == 6
    assert led.records[0].sync_state_set.members == {0}


def test_the_others_follow_and_the_lease_is_renewed(led):
    led.step()
    assert led.states[1].master == led.states[2].master == 0
    actions = led.step()
    assert actions == [Renew("broker-a", 0, led.control.record.sync_state_set, led.now_s)]


def test_a_silent_master_is_replaced_only_after_its_lease(led):
    led.step()
    led.silent.add(0)
    started_s = led.now_s
    while led.control.record.master == 0:
        assert led.now_s < started_s + LEASE_OVER_S + 0.6
        led.step(0.1)
    assert led.now_s >= started_s + LEASE_OVER_S
    assert led.control.record.epoch == 7
    assert led.control.record.master in {1, 2}


def test_a_master_whose_process_was_started_again_is_replaced_at_once(led):
    led.step()
    led.states[0] = state(0, incarnation=2, epoch=6, log_epoch=6)
    led.step()
    assert led.control.record.epoch == 7
    assert led.control.record.master == 1  # replica 1 was not restarted, so it has lost no data


def test_a_master_whose_disk_failed_is_replaced_before_its_lease_ends(led):
    led.step()
    led._change(0, failed="the disk of /a failed: EIO", end_offset=900)
    led.step()
    assert led.control.record.epoch == 7
    assert led.control.record.master in {1, 2}


def test_a_replica_whose_disk_failed_is_neither_elected_nor_followed_nor_counted_as_alive(led):
    led.step()
    led._change(1, failed="the disk of /b failed: EIO", log_epoch=6, end_offset=900)
    [renewal] = led.step()
    assert renewal == Renew("broker-a", 0, led.control.record.sync_state_set, led.now_s, frozenset({1}))
    led.control.designate(1, led.now_s)
    assert not any(isinstance(action, Drain) for action in led.step())
    led._change(0, failed="the disk of /a failed: EIO")
    led.step()
    assert led.control.record.master == 2
    led.step()
    assert not any(isinstance(action, Follow) for action in led.step())


def test_where_every_disk_of_the_set_failed_the_reason_names_the_disks_until_one_is_well(led):
    led.step()
    for replica in range(3):
        led._change(replica, failed=f"the disk of /{replica} failed: EIO")
    led.step()
    assert "replica 1: the disk of /1 failed: EIO" in led.control.reason
    assert led.control.record.epoch == 6
    led.states[1] = state(1, incarnation=2, epoch=6, log_epoch=6)
    for _ in range(24):
        led.step(0.5)
    assert led.control.record.master == 1


def test_with_fixed_roles_a_master_whose_disk_failed_is_waited_for():
    world = World(Record("broker-a", 5, None, of(5, 1, 0, 1, 2)), replace(RULES, fixed_master=0))
    world.step()
    world.step()
    world._change(0, failed="the disk of /a failed: EIO")
    for _ in range(12):
        world.step()
    assert "the disk of /a failed: EIO" in world.control.reason
    world.states[0] = state(0, incarnation=2, epoch=6, log_epoch=6)
    world.step()
    assert world.control.record.master == 0


def test_the_replica_with_the_longest_log_is_elected_by_epoch_first(led):
    led.step()
    led.states[1] = replace(led.states[1], log_epoch=6, end_offset=120)
    led.states[2] = replace(led.states[2], log_epoch=5, end_offset=900)
    led.silent.add(0)
    for _ in range(12):
        led.step()
    assert led.control.record.master == 1


def test_priority_decides_between_equals():
    world = World(Record("broker-a", 5, None, of(5, 1, 0, 1, 2)), priorities={2: 1})
    world.step()
    assert world.control.record.master == 2


def test_no_replica_outside_the_set_is_elected_and_status_has_the_reason():
    world = World(Record("broker-a", 5, 0, of(5, 4, 0)))
    world.silent.add(0)
    for _ in range(12):
        world.step()
    assert world.control.record.epoch == 5
    assert "0" in world.control.reason
    assert "enable_elect_unclean_master" in world.control.reason


def test_unclean_elections_are_possible_where_they_are_allowed():
    world = World(Record("broker-a", 5, 0, of(5, 4, 0)), replace(RULES, unclean=True))
    world.silent.add(0)
    for _ in range(24):
        world.step(0.5)
    assert world.control.record.master in {1, 2}


def test_a_learner_never_leads():
    world = World(Record("broker-a", 5, None, of(5, 1, 0, 1, 2)), learners=frozenset({0}))
    world.step()
    assert world.control.record.master == 1


def test_a_member_whose_directory_was_lost_is_not_elected():
    world = World(Record("broker-a", 5, None, of(5, 1, 0)))
    world.states[0] = state(0, store_id="another", end_offset=0, log_epoch=0)
    for _ in range(10):
        world.step()
    assert world.control.record.master is None


def test_a_lease_counts_from_the_account_it_answers(led):
    led.step()
    [renewal] = [action for action in led.step() if isinstance(action, Renew)]
    assert renewal.clock_s == led.states[0].clock_s


def test_a_late_account_is_not_heeded(led):
    led.step()
    led.control.note_account(state(0, clock_s=0.1), led.now_s)
    led.step(0.01)
    assert led.control.record.epoch == 6


def test_without_a_journal_all_replicas_must_answer():
    world = World(None)
    world.silent.add(2)
    world.states[1] = state(1, sync_state_set=of(5, 9, 1))
    for _ in range(5):
        world.step()
    assert world.control.record is None
    assert "replica 2 does not answer" in world.control.reason
    world.silent.clear()
    world.pass_leases()
    assert world.control.record.master == 1  # replica 1 is the only member of the newest sync-state set
    assert world.control.record.epoch == 5 + RECOVERED_EPOCH_GAP + 1


def test_a_journal_that_is_older_than_a_replicas_file_is_not_believed():
    # The journal has lost its last lines: replica 1 has led alone since.
    world = World(Record("broker-a", 5, None, of(5, 1, 0, 1, 2)))
    world.states[1] = state(1, epoch=7, log_epoch=7, end_offset=150, sync_state_set=of(7, 3, 1))
    world.states[0] = state(0, caught_up=True)
    world.silent.add(2)
    for _ in range(5):
        world.step()
    assert world.control.record is None
    assert "is older than the replicas' files, and replica 2 does not answer" in world.control.reason
    world.silent.clear()
    world.pass_leases()
    assert world.control.record.master == 1
    assert world.control.record.epoch == 7 + RECOVERED_EPOCH_GAP + 1
    world.step()
    assert world.control.reason == ""


def test_a_recovered_epoch_is_later_than_every_stored_set():
    # The journal was lost twice: the replicas have stored the set of the first recovery, and executed no order of it.
    world = World(None)
    for replica in range(3):
        world.states[replica] = state(replica, sync_state_set=of(5 + RECOVERED_EPOCH_GAP, 1, 0, 1, 2))
    world.pass_leases()
    assert world.control.record.epoch > 5 + 2 * RECOVERED_EPOCH_GAP


@pytest.mark.parametrize("journal", ["lost", "older"])
def test_after_a_lost_journal_nobody_is_elected_before_the_leases_of_lost_decisions_end(journal):
    """The order of a lost decision can arrive late. Its replica then leads alone until its lease ends. An election in
    this time would lose the messages that the replica acknowledges."""
    world = World(None if journal == "lost" else Record("broker-a", 4, None, of(4, 1, 0, 1, 2)))
    for replica in range(3):
        world.states[replica] = state(replica, sync_state_set=of(5, 2, 0, 1, 2), caught_up=True)
    world.step()
    assert world.control.record is None
    assert "lease of a lost decision" in world.control.reason
    # Replica 2 now gets the order of epoch 6. It leads, and acknowledges messages that no other replica has.
    while world.now_s < RULES.lease_s:
        world.step()
        assert world.control.record is None
    world.states[2] = state(2, epoch=6, log_epoch=6, end_offset=900, sync_state_set=of(6, 3, 2), caught_up=True)
    world.pass_leases()
    assert world.control.record.master == 2
    assert world.control.record.epoch == 6 + RECOVERED_EPOCH_GAP + 1


def test_a_report_from_before_the_end_of_the_leases_does_not_count():
    world = World(None)
    for replica in range(3):
        world.states[replica] = state(replica, sync_state_set=of(5, 2, 0, 1, 2), caught_up=True)
    world.step()
    world.now_s += LEASE_OVER_S
    # The reports arrive after the leases have ended. But they were requested before that.
    for one in world.states.values():
        world.control.note_account(replace(one, clock_s=world.now_s), world.now_s, LEASE_OVER_S - 0.1)
    assert world.control.tick(world.now_s) == []
    world.step()
    assert world.control.record.master is not None


def test_a_group_without_any_set_elects_its_first_master_at_once():
    world = World(None)
    world.step()
    world.step()
    assert world.control.record.master is not None


def test_a_newer_set_of_another_groups_directory_is_ignored():
    world = World(Record("broker-a", 5, None, of(5, 1, 0, 1, 2)))
    foreign = SyncStateSet(90, 4, {1: "another directory"})
    world.states[1] = state(1, store_id="another directory", epoch=90, log_epoch=90, sync_state_set=foreign)
    for _ in range(5):
        world.step()
    assert world.control.record.master in (0, 2)


def test_without_a_journal_and_for_good_without_a_replica_only_an_unclean_election_goes_on():
    for unclean in (False, True):
        world = World(None, replace(RULES, unclean=unclean, grace_s=3.0))
        world.states[1] = state(1, end_offset=150, sync_state_set=of(5, 9, 0, 1, 2))
        world.silent.add(2)
        for _ in range(5):
            world.step()
        assert world.control.record is None
        for _ in range(20):
            world.step()
        assert (world.control.record is not None) == unclean
        assert not unclean or world.control.record.master == 1
        assert unclean or "enable_elect_unclean_master" in world.control.reason


def test_a_set_is_altered_only_by_the_master_of_the_epoch(led):
    now = led.control.record.sync_state_set
    led.ask(SyncStateSet(6, now.version, of(6, 1, 0, 1).stores), asker=1)
    led.ask(SyncStateSet(5, now.version, of(5, 1, 0).stores))
    assert led.control.record.sync_state_set == now


def test_a_question_based_on_an_outdated_set_is_not_heeded(led):
    now = led.control.record.sync_state_set
    led.ask(of(6, now.version - 1, 0))
    assert led.control.record.sync_state_set == now


def test_a_question_in_a_late_report_is_not_heeded(led):
    """Its process may have ended since, and its log may have lost its end. The set would then be this replica alone."""
    before = led.control.record.sync_state_set
    proposal = SyncStateSet(6, before.version, {0: "store-0"})
    for late_s, members in ((0.1, {0, 1, 2}), (-0.1, {0})):
        led.now_s += 0.1
        late = replace(led.states[0], proposal=proposal, clock_s=led.now_s)
        led.control.note_account(late, led.now_s, led.now_s - RULES.dead_after_s - late_s)
        led.control.tick(led.now_s)
        assert led.control.record.sync_state_set.members == members


def test_a_replica_that_may_not_be_in_the_set_is_left_out_of_a_newer_one():
    world = World(Record("broker-a", 5, None, of(5, 1, 0, 1, 2)), learners=frozenset({2}))
    world.step()
    world.step()
    world.ask(of(6, 2, 0, 1, 2))
    assert world.control.record.sync_state_set == of(6, 3, 0, 1)


def test_the_master_receives_the_replicas_that_do_not_answer(led):
    led.silent.add(2)
    for _ in range(5):
        actions = led.step()
    [renewal] = [action for action in actions if isinstance(action, Renew)]
    assert renewal.dead == {2}


def test_mastership_moves_to_the_designated_replica_once_it_has_everything(led):
    led.step()
    for replica in range(3):
        led.states[replica] = replace(led.states[replica], log_epoch=6, end_offset=150 - 10 * replica)
    led.control.designate(2, led.now_s)
    led.step()
    assert led.states[0].draining
    assert led.control.record.master == 0  # replica 2's log lacks the last 20 bytes
    led.states[2] = replace(led.states[2], end_offset=150)
    led.step()
    assert led.control.record.master == 2
    assert led.control.record.epoch == 7


def test_a_designated_replica_that_does_not_come_is_given_up_and_the_master_leads_on(led):
    led.step()
    led.states[0] = replace(led.states[0], log_epoch=6, end_offset=150)
    led.control.designate(2, led.now_s)
    for _ in range(30):
        led.step()
    assert led.control.record.master == 0
    assert not led.states[0].draining
    assert led.control.record.epoch == 7


def test_a_repeated_designation_does_not_extend_the_pause_of_appends(led):
    led.step()
    led.states[0] = replace(led.states[0], log_epoch=6, end_offset=150)
    began_s = led.now_s
    led.control.designate(2, led.now_s)
    led.step()
    assert led.states[0].draining
    while led.states[0].draining and led.now_s < began_s + 30:
        led.control.designate(2, began_s + 1)
        led.step()
    assert not led.states[0].draining
    assert led.now_s < began_s + 10


FIXED = replace(RULES, fixed_master=0)


def test_with_fixed_roles_a_master_that_is_away_is_waited_for():
    world = World(Record("broker-a", 5, 0, of(5, 1, 0)), FIXED)
    world.silent.add(0)
    for _ in range(12):
        world.step()
    assert world.control.record.epoch == 5
    assert "replica 0 does not answer" in world.control.reason
    world.silent.clear()
    world.step()
    assert (world.control.record.epoch, world.control.record.master) == (6, 0)


def test_with_fixed_roles_priorities_do_not_matter():
    world = World(None, FIXED, priorities={2: 0, 0: 9})
    world.step()
    assert world.control.record.master == 0
    assert world.control.able == {0}


def test_with_fixed_roles_a_recreated_directory_does_not_lead():
    world = World(Record("broker-a", 5, 0, of(5, 4, 0)), FIXED)
    world.states[0] = state(0, store_id="another", end_offset=0, log_epoch=0)
    for _ in range(12):
        world.step()
    assert world.control.record.epoch == 5
    assert "its directory is not the one" in world.control.reason


@pytest.mark.parametrize("known", [of(5, 4, 0), None])
def test_with_fixed_roles_and_no_journal_an_empty_directory_does_not_lead(known):
    world = World(None, FIXED)
    world.states = {replica: replace(one, sync_state_set=known) for replica, one in world.states.items()}
    world.states[0] = state(0, store_id="another", end_offset=0, log_epoch=0)
    world.pass_leases()
    assert world.control.record.master is None
    assert "docs/cluster.md" in world.control.reason


def test_with_fixed_roles_a_master_whose_disk_lost_messages_does_not_lead():
    world = World(Record("broker-a", 5, 0, of(5, 4, 0)), FIXED)
    world.states[0] = state(0, incarnation=2, end_offset=60)
    for _ in range(12):
        world.step()
    assert world.control.record.epoch == 5
    assert "replica 1, 2 has a longer log" in world.control.reason


def test_with_fixed_roles_whoever_led_before_gives_way_when_its_lease_is_over_to_a_member_of_the_set():
    world = World(Record("broker-a", 5, 1, of(5, 4, 0, 1)), FIXED)
    # The last 20 bytes of replica 1's log were never acknowledged.
    world.states[1] = state(1, role=ReplicaRole.MASTER, master=1, end_offset=120)
    world.step()
    assert world.control.record.master == 1
    for _ in range(12):
        world.step()
    assert world.control.record.master == 0
    assert world.control.record.sync_state_set.members == {0}
    assert world.states[1].role is ReplicaRole.SLAVE


def test_with_fixed_roles_whoever_lacks_acknowledged_messages_does_not_lead():
    world = World(Record("broker-a", 5, 1, of(5, 4, 1)), FIXED)
    for _ in range(12):
        world.step()
    assert world.control.record.epoch == 5
    assert "every acknowledged message" in world.control.reason


def test_status_reports_that_no_replica_answers_for_an_unclean_election():
    world = World(Record("broker-a", 5, 0, of(5, 4, 0)), replace(RULES, unclean=True))
    world.silent = {0, 1, 2}
    for _ in range(24):
        world.step(0.5)
    assert "no replica that has every acknowledged message answers" in world.control.reason


LED = Record("broker-a", 6, 0, of(6, 2, 0, 1, 2))
LEADING = state(0, role=ReplicaRole.MASTER, epoch=6)
VIEWED: dict[MasterView, tuple[Record, ReplicaState | None, int]] = {
    MasterView.NOBODY: (replace(LED, master=None), state(0, epoch=6), -1),
    MasterView.AWAY: (LED, None, 1),
    MasterView.NOT_ORDERED: (LED, state(0, epoch=5), -1),
    MasterView.ANNULLED: (
        replace(LED, incarnation=1, elected_from=LED.sync_state_set.stores),
        state(0, epoch=5, incarnation=2),
        -1,
    ),
    MasterView.RESTARTED: (LED, state(0, epoch=6, incarnation=2), 1),
    MasterView.FAILED: (LED, replace(LEADING, failed="the disk of /a failed: EIO"), 1),
    MasterView.NOT_LEADING: (LED, state(0, epoch=6, role=ReplicaRole.SLAVE), 1),
    MasterView.LEADING: (LED, LEADING, 1),
}
"""An example for each MasterView (state of the master as the Controller sees it). An example consists of the group's
record, the master's reported state, and the incarnation number of the process that leads."""


@pytest.mark.parametrize(("view", "lease_over"), list(product(MasterView, (False, True))))
def test_every_view_of_the_master_has_its_step(view, lease_over):
    record, account, led_incarnation = VIEWED[view]
    control = GroupControl("broker-a", frozenset({0, 1, 2}), RULES)
    control.resume(record, 0.0)
    control._led_incarnation = led_incarnation
    now_s = LEASE_OVER_S if lease_over else LEASE_OVER_S / 2
    for one in (account, state(1, epoch=6, caught_up=True), state(2, epoch=6, caught_up=True)):
        if one is not None:
            control.note_account(replace(one, clock_s=now_s), now_s)
    actions = control.tick(now_s)
    step = MASTER_STEPS[view, lease_over]
    orders = {type(action) for action in actions if not isinstance(action, Follow)}
    assert (
        orders
        == {
            MasterStep.WAIT: set(),
            MasterStep.ORDER: {Lead},
            MasterStep.RENEW: {Renew},
            MasterStep.ELECT: {Record, Lead},
        }[step]
    )
    assert (control.record == record) == (step is not MasterStep.ELECT)


@pytest.mark.parametrize(
    "account",
    [replace(LEADING, store_id="another"), None],
    ids=["without its directory", "silent"],
)
def test_a_master_without_its_directory_is_away_as_a_silent_one_is(account):
    control = GroupControl("broker-a", frozenset({0, 1, 2}), RULES)
    assert control._view_master(LED, account) is MasterView.AWAY


def test_a_master_that_may_not_lead_any_more_is_away():
    control = GroupControl("broker-a", frozenset({0, 1, 2}), RULES, learners=frozenset({0}))
    assert control._view_master(LED, LEADING) is MasterView.AWAY


def test_while_a_lease_may_be_held_another_is_elected_only_where_the_old_process_is_known_to_be_gone():
    elected = {view for view in MasterView if MASTER_STEPS[view, False] is MasterStep.ELECT}
    # A new master is also elected if the old master reports that its disk has failed (MasterView.FAILED). Such a master
    # releases its lease before it reports the failure.
    assert elected == {MasterView.NOBODY, MasterView.ANNULLED, MasterView.RESTARTED, MasterView.FAILED}


# Tests of elections among replicas whose logs have lost their end or a range in the middle

WHOLE = of(5, 4, 0, 1, 2)
RESTARTED = Record("broker-a", 5, 0, WHOLE)
"""The Controller's decision (Record) for a broker group, all of whose processes have restarted. Before the restart,
replica 0 was the master and all replicas were in the sync-state set."""


def elected_after(world: World, most_s: float = 60.0) -> float:
    """Run the group until a replica is elected master. Returns the seconds that this took. Fails after
    `most_s`."""
    began_s, before = world.now_s, world.control.record
    while world.control.record is before:
        world.step(0.2)
        assert world.now_s - began_s <= most_s, f"nobody is elected: {world.control.reason}"
    return world.now_s - began_s


def never_elected(world: World, wait_s: float = 60.0) -> str:
    """Check that no replica is elected within `wait_s`. Returns the reason that the Controller reports."""
    before = world.control.record
    until_s = world.now_s + wait_s
    while world.now_s < until_s:
        world.step(0.5)
        assert world.control.record is before
    return world.control.reason


@pytest.mark.parametrize("led_before", [0, 1])
@pytest.mark.parametrize("late_s", [1.0, 2.5, 15.0])
def test_a_replica_with_less_than_its_own_confirm_offset_is_not_elected_while_others_may_come(led_before, late_s):
    world = World(replace(RESTARTED, master=led_before))
    world._change(0, end_offset=50, confirm_offset=50, confirm_floor=100)
    world.silent = {1, 2}
    while world.now_s < late_s:
        world.step(0.2)
        assert world.control.record.master == led_before
        assert world.control.record.epoch == 5
    world.silent = set()
    elected_after(world, 1.0)
    assert world.control.record.master == 1


def test_status_names_lost_messages_and_replicas_that_may_have_them():
    world = World(RESTARTED)
    world._change(0, end_offset=50, confirm_floor=100)
    world.silent = {1, 2}
    reason = never_elected(world)
    for part in ("its log ends at physical offset 50", "before 100", "replica 1, 2", "enable_elect_unclean_master"):
        assert part in reason


def test_where_losing_messages_is_allowed_a_short_log_leads_after_the_grace():
    world = World(RESTARTED, replace(RULES, unclean=True))
    world._change(0, end_offset=50, confirm_floor=100)
    world.silent = {1, 2}
    assert elected_after(world) >= RULES.grace_s
    assert world.control.record.master == 0
    assert "its log ends at physical offset 50" in world.control.record.loss


def test_of_equally_long_logs_the_one_without_damage_leads():
    world = World(RESTARTED)
    world._change(0, hole_bytes=10)
    elected_after(world, 1.0)
    assert world.control.record.master == 1
    assert world.control.record.loss == ""


def test_a_log_that_lost_its_end_without_a_trace_does_not_lead_before_longer_damaged_logs():
    """The other logs would be cut to the shorter log. The longer log's holes are repaired after the election."""
    world = World(RESTARTED)
    world._change(0, end_offset=80, confirm_floor=70)
    world._change(1, confirm_floor=75, hole_bytes=10)
    world._change(2, confirm_floor=75, hole_bytes=5)
    elected_after(world, 1.0)
    assert world.control.record.master == 2
    assert world.control.record.loss == ""  # replica 0 may have the intact bytes


def test_a_longer_damaged_log_of_an_older_epoch_does_not_lead():
    world = World(RESTARTED)
    world._change(0, log_epoch=4, end_offset=900, hole_bytes=10)
    elected_after(world, 1.0)
    assert world.control.record.master == 1


def test_a_damaged_log_that_ends_before_the_confirm_offset_does_not_lead_whatever_its_epoch():
    world = World(RESTARTED)
    world._change(0, log_epoch=6, end_offset=80, hole_bytes=10)
    world._change(1, confirm_floor=90)
    elected_after(world, 1.0)
    assert world.control.record.master == 1


def test_a_damaged_log_does_not_lead_alone_while_a_member_does_not_answer():
    world = World(RESTARTED)
    world._change(0, end_offset=900, hole_bytes=10)
    world.silent = {1, 2}
    assert "replica 0 has 10 damaged bytes" in never_elected(world)


def test_a_longer_damaged_log_leads_after_the_grace_if_a_member_does_not_answer():
    world = World(RESTARTED)
    world._change(0, end_offset=120, hole_bytes=10)
    world.silent = {2}
    assert RULES.grace_s <= elected_after(world) <= RULES.grace_s + 1.0
    assert world.control.record.master == 0


def test_a_process_that_ran_all_the_time_leads_before_a_longer_damaged_log():
    """A running process has every acknowledged message, so the longer log's end was never acknowledged."""
    world = World(RESTARTED)
    world._change(0, end_offset=120, hole_bytes=10)
    world._change(1, caught_up=True)
    elected_after(world, 1.0)
    assert world.control.record.master == 1


def test_the_longest_log_leads_and_the_loss_is_recorded_if_none_is_complete():
    world = World(RESTARTED)
    for replica, end_offset in enumerate((50, 80, 60)):
        world._change(replica, end_offset=end_offset, confirm_floor=100)
    elected_after(world, 1.0)
    assert world.control.record.master == 1
    assert "its log ends at physical offset 80, but all messages before 100 were confirmed" in world.control.record.loss


def test_if_no_member_is_complete_a_longer_log_of_another_replica_leads():
    world = World(replace(RESTARTED, sync_state_set=of(5, 4, 0)))
    world._change(0, end_offset=50, confirm_floor=100)
    world._change(2, end_offset=90)
    elected_after(world, 1.0)
    assert world.control.record.master == 1  # replica 1 has the longest log, 100 bytes


def test_among_equal_logs_the_log_with_the_least_damage_leads():
    world = World(RESTARTED)
    for replica, damaged in enumerate((30, 20, 10)):
        world._change(replica, hole_bytes=damaged)
    elected_after(world, 1.0)
    assert world.control.record.master == 2


def test_a_log_that_ends_before_the_confirm_offset_of_another_member_is_not_complete():
    """A log that ends before another member's confirm offset is not complete. In this test the replica's own stored
    confirm offset is lower than its log's end, so the replica itself cannot detect the loss."""
    world = World(RESTARTED)
    world._change(0, end_offset=80, confirm_floor=70)
    for replica in (1, 2):
        world._change(replica, end_offset=100, confirm_floor=90, hole_bytes=10)
    elected_after(world, 1.0)
    assert world.control.record.master == 1
    assert "10 damaged bytes" in world.control.record.loss


def test_after_a_restart_of_the_whole_set_all_are_waited_for_and_the_longest_log_leads():
    """After a restart of all members, the Controller waits for all of them, because one may have a longer log. The
    members' stored confirm floors may be older than the last confirmed offset, so they do not show which log is
    complete."""
    world = World(RESTARTED)
    world._change(0, end_offset=98, confirm_floor=95)
    world.silent = {1, 2}
    while world.now_s < RULES.grace_s / 2:
        world.step()
    assert world.control.record.epoch == 5
    assert "replica 1, 2 does not answer yet" in world.control.reason
    world.silent = set()
    elected_after(world, 1.0)
    assert world.control.record.master == 1


def test_after_the_grace_a_complete_replica_leads_without_the_others():
    world = World(RESTARTED)
    world.silent = {1, 2}
    assert RULES.grace_s <= elected_after(world) <= RULES.grace_s + 1.0
    assert world.control.record.master == 0


def test_the_grace_begins_with_the_first_replica_that_answers():
    world = World(RESTARTED)
    world.silent = {0, 1, 2}
    never_elected(world)
    world.silent = {1, 2}
    assert elected_after(world) >= RULES.grace_s


def test_the_grace_of_a_replica_begins_with_its_newest_report():
    """A replica that ended again has a longer log. The shorter log leads only after the longer log's replica has not
    answered for the whole grace period."""
    world = World(RESTARTED)
    world._change(0, end_offset=50, confirm_floor=0)
    world.silent = {1, 2}
    while world.now_s < RULES.grace_s / 2:
        world.step()
    world.silent = {0, 2}
    world.step()
    world.silent = {1, 2}
    reported_s = world.now_s
    elected_after(world)
    assert world.now_s - reported_s >= RULES.grace_s
    assert world.control.record.master == 0


def test_a_replica_with_a_failed_disk_is_not_waited_for_longer_than_the_grace():
    world = World(RESTARTED)
    world._change(1, failed="its disk failed")
    world.silent = {2}
    assert RULES.grace_s <= elected_after(world) <= RULES.grace_s + 1.0
    assert world.control.record.master == 0


def test_a_master_that_comes_back_shorter_alone_is_replaced_at_once_by_a_process_that_ran_all_the_time(led):
    led.step()
    led.states[0] = state(0, incarnation=2, epoch=6, log_epoch=6, end_offset=98)
    led._change(1, end_offset=97)  # replica 1's log has grown since its last report
    led._change(2, end_offset=96)
    led.step()
    assert (led.control.record.epoch, led.control.record.master) == (7, 1)


def test_mastership_does_not_move_to_a_replica_that_has_not_caught_up(led):
    led.step()
    led._change(2, caught_up=False)
    led.control.designate(2, led.now_s)
    led.step()
    assert not led.states[0].draining


def test_an_order_to_lead_is_for_the_process_that_was_elected(led):
    led.step()
    led.silent.add(0)
    while led.control.record.master == 0:
        [lead] = [action for action in led.step() if isinstance(action, Lead)] or [None]
    assert lead is not None
    assert lead.incarnation == led.states[lead.replica].incarnation == led.control.record.incarnation


def test_the_set_of_an_election_is_in_force_when_the_elected_replica_leads():
    """Otherwise the other replicas store a set with only the elected replica. If that election is then annulled and the
    journal is lost, only the elected replica may lead, although its log may have lost its end."""
    world = World(RESTARTED)
    world.silent = {1}
    world._change(1, caught_up=True)
    world.control.note_account(world.states[1], 0.0)
    assert world.control.set_in_force == WHOLE
    world.step(0.2)
    assert world.control.record.master == 1
    assert world.control.record.sync_state_set.members == {1}
    assert world.control.set_in_force is None
    world.silent = set()
    world._change(1, incarnation=2, caught_up=False)
    world.step(0.2)
    annulled = world.records[-2]
    assert (annulled.master, annulled.sync_state_set.members) == (None, {0, 1, 2})
    world.step()
    assert world.control.set_in_force == world.control.record.sync_state_set


def test_an_election_whose_process_ended_before_it_led_is_annulled():
    """An election is annulled if the elected process ended before it led, because its log may now be shorter. The other
    members may then lead, as before the election."""
    elected = Record("broker-a", 6, 1, of(6, 5, 1), elected_from=WHOLE.stores, incarnation=1)
    world = World(elected)
    world._change(1, incarnation=2, end_offset=98)
    actions = world.step()
    annulled = world.records[0]
    assert (annulled.master, annulled.sync_state_set.stores) == (None, WHOLE.stores)
    assert annulled.sync_state_set.order > elected.sync_state_set.order
    assert (world.control.record.epoch, world.control.record.master) == (7, 0)
    assert [type(action) for action in actions] == [Record, Record, Lead]


def test_with_fixed_roles_a_master_that_lost_confirmed_messages_waits_for_all_others():
    world = World(Record("broker-a", 5, 0, of(5, 4, 0)), FIXED)
    world._change(0, end_offset=50, confirm_floor=100)
    world._change(1, end_offset=40)
    world.silent = {2}
    assert "its log ends at physical offset 50" in never_elected(world)
    world.silent = set()
    world._change(2, end_offset=45)
    elected_after(world, 1.0)
    assert "its log ends at physical offset 50" in world.control.record.loss


def test_with_fixed_roles_a_master_that_was_started_again_waits_a_moment_for_longer_logs():
    world = World(Record("broker-a", 5, 0, of(5, 4, 0)), FIXED)
    world.silent = {1}
    assert elected_after(world) >= RULES.grace_s


def test_an_old_account_does_not_count_as_an_answer_where_no_member_is_complete():
    """An old status report of a member does not count as the member's answer if no member of the sync-state set has a
    complete log. The process that sent the report may have ended, and its log may have grown after the report."""
    world = World(RESTARTED)
    for replica in range(3):
        world._change(replica, end_offset=50, confirm_floor=100)
    world.silent = {2}
    for late_s in range(4):
        world.control.note_account(replace(world.states[2], clock_s=world.now_s), world.now_s, -float(late_s))
        world.step(0.5)
        assert world.control.record.epoch == 5
    world.silent = set()
    elected_after(world, 1.0)


MEMBERS = ReplicaMembers(2, frozenset({0, 1, 2}), removed=frozenset({3}))


def test_a_replica_joins_counts_and_another_leaves_step_by_step():
    world = World(replace(LED, sync_state_set=of(6, 2, 0, 1)))
    world.states[3] = state(3)
    world.step()
    assert world.control.change_replicas(3, replace_one=1).members.joining == {3}
    assert any(isinstance(action, Follow) and action.replica == 3 for action in world.step())
    assert "copies the log of replica 0" in world.control.change_waits
    world.ask(of(6, 2, 0, 1, 3))
    world.step()
    assert (world.control.members.joining, world.control.members.leaving) == (set(), {1})
    world.step()
    assert world.records[-1].sync_state_set == of(6, 4, 0, 3), "first the replica leaves the set"
    world.step()
    world.step()
    last = world.records[-1]
    assert last.members == ReplicaMembers(3, frozenset({0, 2, 3}), removed=frozenset({1}))
    assert last.sync_state_set == of(6, 4, 0, 3)
    assert all(action.replica != 1 for action in world.step())


def test_a_replica_leaves_only_after_a_report_of_the_master_that_is_newer_than_the_order(led):
    """An older report may come from a process that has ended, and whose successor finds damage in its log."""
    led.step()
    led.control.change_replicas(2)
    led.now_s += 0.5
    led.control.tick(led.now_s)
    assert led.control.record.sync_state_set.members == {0, 1}
    led.control.tick(led.now_s)
    assert led.control.members.replicas == {0, 1, 2}
    assert "after the next report of replica 0" in led.control.change_waits
    led.step()
    led.step()
    assert led.control.members.replicas == {0, 1}


def test_a_leaving_replica_does_not_join_the_set_again_if_enough_others_are_in_it():
    world = World(replace(LED, sync_state_set=of(6, 2, 0, 1)))
    world.step()
    world.control.change_replicas(2)
    world.ask(of(6, 2, 0, 1, 2))
    assert world.control.record.sync_state_set.members == {0, 1}
    for _ in range(3):
        world.step()
    assert world.control.replicas == {0, 1}


def test_a_leaving_replica_joins_the_set_again_while_others_are_missing():
    members = ReplicaMembers(4, frozenset({0, 1, 3}), leaving=frozenset({1}), added=frozenset({3}))
    world = World(replace(LED, sync_state_set=of(6, 2, 0), members=members), planned_min_in_sync=2)
    world.step()
    world.ask(of(6, 2, 0, 1))
    assert world.control.record.sync_state_set.members == {0, 1}
    assert world.control.change_waits == "replica 1 leaves when replica 3 is in sync again"


@pytest.mark.parametrize("way", ["proposed by the master", "by a change of the replicas"])
@pytest.mark.parametrize("received", [False, True])
def test_a_smaller_set_is_annulled_if_the_masters_process_ended_before_it_received_the_set(led, way, received):
    """The process can end just after its report, and its log can lose its end. Then only the former members have every
    acknowledged message. A master that has received the set may have acknowledged further messages alone."""
    before = led.control.record.sync_state_set
    if way.startswith("proposed"):
        led._change(0, proposal=of(before.epoch, before.version, 0, 1))
    else:
        led.control.change_replicas(2)
    led.now_s += 0.1
    led.states[0] = replace(led.states[0], clock_s=led.now_s)
    led.control.note_account(led.states[0], led.now_s)
    led.control.tick(led.now_s)
    small = led.control.record.sync_state_set
    assert (small.members, led.control.record.shrunk_from) == ({0, 1}, before.stores)
    assert led.control.set_in_force is None, "the other replicas do not store the set yet"
    # The master's process ends, with or without the set. Its log loses its end.
    stored = small if received else before
    led.states[0] = state(0, incarnation=2, epoch=6, log_epoch=6, end_offset=60, sync_state_set=stored, proposal=None)
    for replica in (1, 2):
        led._change(replica, end_offset=100, epoch=6, log_epoch=6)
    led.step()
    shown = led.control.record
    assert shown.master == (1 if received else shown.master)
    assert shown.elected_from == (small if received else before).stores


def test_a_record_survives_the_journal(led):
    led.ask(of(6, led.control.record.sync_state_set.version, 0, 1))
    record = led.control.record
    assert record.shrunk_from
    for one in (record, replace(record, shrunk_from={}, loss="20 bytes", members=MEMBERS), LED):
        assert _record(one.group, json.loads(json.dumps(_fields(one)))) == one


def test_a_smaller_set_is_in_force_when_the_master_has_received_it(led):
    before = led.control.record.sync_state_set
    led.ask(of(before.epoch, before.version, 0, 1))
    led.step()
    assert led.control.record.sync_state_set.members == {0, 1}
    assert led.control.set_in_force == led.control.record.sync_state_set


def test_a_master_that_leaves_hands_over_first():
    world = World(LED)
    world.step()
    world.control.change_replicas(2)
    world.step()
    world.step()
    assert world.control.replicas == {0, 1}
    world.control.change_replicas(2, replace_one=0)
    world.states[3] = state(3)
    world.step()
    world.ask(of(6, world.control.record.sync_state_set.version, 0, 1, 3))
    for _ in range(8):
        world.step()
    led = world.control.record
    assert led.master == 1
    assert world.control.change_waits == "replica 0 leaves when replica 3 is in sync again"
    world.ask(of(led.epoch, led.sync_state_set.version, 1, 3), asker=1)
    world.step()
    assert world.control.replicas == {1, 3}


def test_nobody_leaves_while_the_group_has_no_master():
    world = World(LED)
    world.step()
    world.control.change_replicas(2)
    world.silent = {0}
    version = world.control.members.version
    for _ in range(3):
        world.step()
    assert world.control.members.version == version


def test_a_higher_minimum_in_sync_keeps_more_replicas():
    world = World(LED, planned_min_in_sync=1)
    world.step()
    in_sync = len(LED.sync_state_set.members)
    assert (world.control.min_in_sync, world.control.required_in_sync) == (1, 1)
    with pytest.raises(InvalidArgumentError, match="would refuse messages"):
        world.control.change_min_in_sync(in_sync + 1)
    assert world.control.ordered == {}
    record = world.control.change_min_in_sync(in_sync)
    assert world.control.ordered == {"replicas": 3, "min_in_sync_replicas": in_sync}
    assert record.members.min_in_sync == in_sync
    assert (world.control.min_in_sync, world.control.required_in_sync) == (in_sync, in_sync)
    with pytest.raises(InvalidArgumentError, match=f"min_in_sync_replicas and in_sync_replicas need {in_sync}"):
        world.control.change_replicas(in_sync - 1)
    assert world.control.change_min_in_sync(1).members.min_in_sync == 1


def test_an_order_that_changes_nothing_leaves_the_decision_as_it_is():
    world = World(LED)
    world.step()
    before = world.control.record
    assert world.control.change_replicas(3) is before


@pytest.mark.parametrize("options", [{"learners": frozenset({2})}, {"rules": FIXED}])
def test_groups_with_learners_or_fixed_roles_refuse_a_change(options):
    world = World(LED, **options)
    with pytest.raises(InvalidArgumentError, match="only by a restart"):
        world.control.change_replicas(2)


def test_without_a_journal_the_members_come_from_the_replicas():
    control = GroupControl("broker-a", frozenset({0, 3}), RULES)
    for replica in (0, 1):
        control.note_account(state(replica, members=MEMBERS, sync_state_set=of(5, 3, 0, 1)), 0.0)
    assert control.tick(0.1) == []
    assert "replica 2 does not answer" in control.reason, "not replica 3, which has left"
    for replica in (0, 1):
        known = state(replica, clock_s=3.0, members=MEMBERS, sync_state_set=of(5, 3, 0, 1))
        control.note_account(known, 3.0)
    control.note_account(state(2, clock_s=3.0), 3.0)
    [record, *_] = control.tick(3.1)
    assert (record.members, record.sync_state_set.stores) == (MEMBERS, of(5, 3, 0, 1).stores)


def test_a_decision_of_the_journal_counts_more_than_the_plan():
    control = GroupControl("broker-a", frozenset({0}), RULES)
    control.resume(replace(LED, members=MEMBERS), 0.0)
    assert control.replicas == {0, 1, 2}


def test_without_a_journal_nobody_leads_before_each_running_replica_has_reported():
    control = GroupControl("broker-a", frozenset({0}), RULES, running=frozenset({0, 1}))
    control.note_account(state(0), 0.0)
    assert control.tick(0.1) == []
    assert "replica 1 does not answer" in control.reason
    newest = ReplicaMembers(3, frozenset({1}), removed=frozenset({0}))
    control.note_account(state(0, clock_s=3.0), 3.0)
    control.note_account(state(1, members=newest, sync_state_set=of(6, 3, 1)), 3.0)
    [record, *_] = control.tick(3.1)
    assert (record.members, record.sync_state_set.members) == (newest, {1}), "replica 0 left, and was not told"


def test_the_members_of_an_outdated_journal_count_more_than_the_plan():
    control = GroupControl("broker-a", frozenset({0}), RULES)
    control.resume(replace(LED, members=MEMBERS), 0.0)
    control.note_account(state(0, sync_state_set=of(7, 1, 0, 1)), 0.1)
    assert control.tick(0.2) == []
    assert "replica 1, 2 does not answer" in control.reason, "not replica 0 of the plan alone"
