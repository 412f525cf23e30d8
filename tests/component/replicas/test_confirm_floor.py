"""Tests of the highest confirm offset, which each replica stores on disk. A replica whose log ends before this offset
neither leads nor truncates other logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.core.replica.orders import Lead, ReplicaRole
from raymq.common.errors import StoreCorruptError
from storage.replication.epoch_file import CONFIRM_FILE, ConfirmFile
from storage.replication.epochs import SyncStateSet
from storage.replication.log_chunks import truncate_log
from tests.support.replicas.local_replicas import PATIENT, LocalReplicas, append, filled_groups
from tests.support.stores.stores import bodies_of

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number for number in range(100)]
Make = Callable[..., LocalReplicas]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that creates broker groups. Each new group already stores the messages BODIES: all replicas have
    them, and the master has acknowledged them to the producer."""
    with filled_groups(tmp_path, BODIES, mapped_file_size_commit_log_bytes=1 << 20) as build:
        yield build


def record_ends(group: LocalReplicas, name: int) -> list[int]:
    """Return the end offset of each record in a replica's log. All records are in the log's first file."""
    end = group.replicas[name].account().end_offset
    path = min((group.directory(name) / "commitlog").iterdir())
    data, ends, position = path.read_bytes(), [], 0
    while position < end:
        position += int.from_bytes(data[position : position + 4])
        ends.append(position)
    return ends


def restart(group: LocalReplicas, kept: dict[int, int]) -> dict[int, int]:
    """End the process of every replica, and truncate some logs. `kept`: by replica, the number of records that its log
    keeps. Returns the end of each log before the truncation."""
    ends = {name: record_ends(group, name) for name in sorted(group.names)}
    for name in sorted(group.names):
        group.close(name)
    for name, count in kept.items():
        truncate_log(group.settings(name), ends[name][count - 1])
    group.control_state._accounts.clear()
    return {name: one[-1] for name, one in ends.items()}


def test_the_confirm_offset_is_on_disk_before_an_account_reports_it(make):
    group = make()
    for name, replica in group.replicas.items():
        account = replica.account()
        assert account.confirm_offset == account.end_offset == account.confirm_floor > 0
        assert ConfirmFile(group.directory(name)).floor.offset == account.confirm_offset
        assert account.caught_up


def test_a_replica_that_lost_its_logs_end_reports_it_and_recovers_the_end(make):
    group = make()
    first = group.control_state.record.master
    ends = restart(group, {first: 40})
    replica = group.open(first)
    group.control(6)
    account = replica.account()
    assert (account.complete, account.caught_up, account.role) == (False, False, ReplicaRole.FENCED)
    for name in group.names - {first}:
        group.open(name)
    group.control(6)
    assert group.control_state.record.master != first
    group.settle()
    assert {one.account().end_offset for one in group.replicas.values()} == set(ends.values())
    assert all(bodies_of(one.store) == BODIES for one in group.replicas.values())
    assert replica.account().complete
    assert replica.account().caught_up


def forget_confirm_offset(group: LocalReplicas, name: int) -> None:
    """Delete the stored confirm offset of a stopped replica, so that a lost end of its log leaves no trace."""
    for copy in (CONFIRM_FILE, f"{CONFIRM_FILE}.bak"):
        (group.directory(name) / copy).unlink()


def damage_body(group: LocalReplicas, name: int, number: int) -> None:
    """Flip a bit in the body of a message in the log of a stopped replica."""
    path = min((group.directory(name) / "commitlog").iterdir())
    data = bytearray(path.read_bytes())
    data[data.index(BODIES[number])] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_log_that_lost_its_end_without_a_trace_does_not_cut_longer_damaged_logs(make, short):
    group = make()
    ends = restart(group, {short: 40})
    for name in sorted(group.names):
        forget_confirm_offset(group, name)
    damaged = dict(zip(sorted(group.names - {short}), (20, 70), strict=True))
    for name, number in damaged.items():
        damage_body(group, name, number)
    for name in sorted(group.names):
        group.open(name)
    assert {name for name, replica in group.replicas.items() if replica.holes} == damaged.keys()
    assert group.replicas[short].account().complete
    group.control(6)
    assert group.control_state.record.master != short
    for _ in range(2):
        group.settle()
    assert {one.account().end_offset for one in group.replicas.values()} == set(ends.values())
    assert all(bodies_of(one.any_store) == BODIES for one in group.replicas.values())
    assert [one.holes for one in group.replicas.values()] == [()] * 3


def elect_alone(group: LocalReplicas, name: int) -> None:
    """Elect a replica that has lost the end of its log and its confirm offset. The other replicas count as absent for a
    long time."""
    forget_confirm_offset(group, name)
    group.open(name)
    group.control_state._due_since_s = -group.control_state.rules.grace_s
    group.control_state._lease_until_s = 0.0
    group.control(6)
    assert group.master is group.replicas[name]


@pytest.mark.parametrize("more", [0, 80])
def test_a_replica_is_not_cut_below_its_confirm_offset_by_a_master_that_lacks_acknowledged_messages(make, more, caplog):
    group = make(2)
    first = group.control_state.record.master
    ends = restart(group, {first: 40})
    elect_alone(group, first)
    append(group, [b"new %d" % number for number in range(more)])
    other = next(iter(group.names - {first}))
    slave = group.open(other)
    group.control(4)
    for _ in range(2):
        with pytest.raises(StoreCorruptError, match="lacks acknowledged messages"):
            group.copy(other)
    account = slave.account()
    assert account.end_offset == ends[other]
    assert "Nothing was cut on replica" in account.refusal
    assert "Nothing was cut on replica" in slave.status()["refusal"]
    assert "lacks acknowledged messages" in caplog.text
    group.control(4)
    assert group.control_state.record.sync_state_set.members == {first}


def test_the_replica_is_truncated_if_losing_messages_is_allowed(make):
    group = make(2, replace(PATIENT, may_lose_confirmed=True))
    first = group.control_state.record.master
    restart(group, {first: 40})
    elect_alone(group, first)
    group.open(next(iter(group.names - {first})))
    group.settle()
    append(group, [b"new"])
    assert all(bodies_of(one.store) == [*BODIES[:40], b"new"] for one in group.replicas.values())
    assert group.control_state.record.sync_state_set.members == group.names


def test_messages_that_every_replica_lost_are_given_up_and_the_group_continues(make, caplog):
    group = make()
    first = group.control_state.record.master
    restart(group, {0: 40, 1: 60, 2: 50})
    for name in group.names:
        group.open(name)
    group.settle()
    assert group.control_state.record.master == 1
    assert "lacks acknowledged messages" in group.control_state.record.loss
    assert "without the acknowledged messages" in caplog.text
    assert all(bodies_of(one.store) == BODIES[:60] for one in group.replicas.values())
    assert all(one.account().complete for one in group.replicas.values())
    append(group, [b"new"])
    restart(group, {})
    for name in group.names:
        group.open(name)
    group.settle()
    assert all(bodies_of(one.store) == [*BODIES[:60], b"new"] for one in group.replicas.values())
    assert group.control_state.record.loss == ""
    assert first in group.names


def test_an_order_to_lead_that_was_meant_for_another_process_is_not_carried_out(make):
    group = make(2)
    account = group.replicas[1].account()
    first = SyncStateSet(account.epoch + 1, 9, {1: account.store_id})
    another = SyncStateSet(first.epoch, 9, {1: "another directory"})
    for stores, incarnation in [(first, account.incarnation - 1), (first, 9), (another, account.incarnation)]:
        order = Lead("broker-a", 1, stores, account.clock_s, incarnation)
        assert group.replicas[1].obey(order, None).role is ReplicaRole.SLAVE
    order = Lead("broker-a", 1, first, account.clock_s, account.incarnation)
    assert group.replicas[1].obey(order, None).role is ReplicaRole.MASTER
