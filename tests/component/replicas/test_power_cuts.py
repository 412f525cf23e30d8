"""Tests of a broker group whose slave has more records on disk than its master. No acknowledged record is lost,
whichever replica leads next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.core.replica.orders import ReplicaRole
from actors.core.replica.rules import ReplicaRules
from raymq.common.errors import ServiceNotAvailableError, StoreCorruptError
from raymq.common.message import SendStatus
from raymq.common.protocol.store import AppendResult
from storage.append.durability import StartedAppend
from storage.replication.epoch_file import CONFIRM_FILE, EPOCH_FILE, EPOCHS_FILE
from storage.replication.log_chunks import truncate_log
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.stores import bodies_of, make_batch

MASTER, SLAVE = 0, 1


class Disk:
    """Fake disk: while `works` is not set, flushes of files below one directory wait. Flushes of all other files return
    at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = f"{directory}/"
        self.works = threading.Event()
        self.works.set()

    def fdatasync(self, descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._directory):
            assert self.works.wait(WAIT_S)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalReplicas]:
    """Yield a broker group of two replicas in sync. The first replica is the master."""
    group = LocalReplicas(tmp_path, 2)
    begin(group)
    assert group.master is group.replicas[MASTER]
    assert group.control_state.record is not None
    assert group.control_state.record.sync_state_set.members == {MASTER, SLAVE}
    yield group
    group.end()


@pytest.fixture
def disk(group: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Yield the fake disk of the master, with which a test can stop the master's flushes."""
    disk = Disk(group.directory(MASTER))
    monkeypatch.setattr(os, "fdatasync", disk.fdatasync)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    yield disk
    disk.works.set()


def begin(group: LocalReplicas) -> None:
    """Store a first message in the logs of master and slave, so that the log files exist."""
    group.settle()
    started = group.master.start_append([make_batch([b"zero"])])
    eventually(lambda: bool(group.master.account().end_offset), "a flush")
    group.copy(SLAVE)
    assert [result.status for result in eventually(lambda: settled(started), "an answer")] == [SendStatus.SEND_OK]
    group.settle()


def settled(started: StartedAppend) -> list[AppendResult] | None:
    return started.settle(time.monotonic())


def append_ahead(group: LocalReplicas, disk: Disk, body: bytes) -> StartedAppend:
    """Append a record that is flushed to the slave's disk. The master has written the record but not flushed
    it."""
    disk.works.clear()
    started = group.replicas[MASTER].start_append([make_batch([body])])
    group.copy(SLAVE)
    assert group.replicas[SLAVE].account().end_offset > group.replicas[MASTER].account().end_offset
    return started


def cut_power(group: LocalReplicas, disk: Disk) -> None:
    """Simulate a power failure of the master: end its process, and truncate its log to the flushed part."""
    end = group.replicas[MASTER].account().end_offset
    settings = group.settings(MASTER)
    copies = [group.directory(MASTER) / name for name in (CONFIRM_FILE, f"{CONFIRM_FILE}.bak")]
    floor = copies[0].read_bytes()
    disk.works.set()
    group.close(MASTER)
    truncate_log(settings, end)
    for copy in copies:
        copy.write_bytes(floor)


def elect(group: LocalReplicas, away: int | None = None) -> None:
    group.control_state._lease_until_s = 0.0
    if away is not None:
        group.control_state._accounts.pop(away)
        # Simulate that the Controller has waited for the absent replica for the whole grace period.
        group.control_state._due_since_s = -group.control_state.rules.grace_s
    group.control(6)


def logs(group: LocalReplicas) -> set[bytes]:
    return {
        b"".join(path.read_bytes() for path in sorted((group.directory(name) / "commitlog").iterdir())).rstrip(b"\0")
        for name in group.names
    }


def test_nothing_is_acknowledged_or_visible_before_the_masters_flush_although_the_slave_has_it(group, disk):
    started = append_ahead(group, disk, b"one")
    assert settled(started) is None
    assert bodies_of(group.replicas[MASTER].store) == [b"zero"]
    group.copy(SLAVE)
    assert bodies_of(group.replicas[SLAVE].store) == [b"zero"]
    disk.works.set()
    results = eventually(lambda: settled(started), "an answer")
    assert [result.status for result in results] == [SendStatus.SEND_OK]
    assert bodies_of(group.replicas[MASTER].store) == [b"zero", b"one"]
    group.copy(SLAVE)
    assert bodies_of(group.replicas[SLAVE].store) == [b"zero", b"one"]


def test_a_master_that_lost_records_of_its_slave_follows_the_slave(group, disk):
    append_ahead(group, disk, b"one")
    epoch = group.replicas[MASTER].account().epoch
    cut_power(group, disk)
    group.open(MASTER)
    elect(group)
    group.settle()
    assert group.master is group.replicas[SLAVE]
    assert group.master.account().epoch > epoch
    assert bodies_of(group.master.store) == bodies_of(group.replicas[MASTER].store) == [b"zero", b"one"]
    assert len(logs(group)) == 1


def test_a_master_that_lost_records_leads_in_a_new_epoch_and_its_slave_cuts(group, disk):
    append_ahead(group, disk, b"one")
    epoch = group.replicas[MASTER].account().epoch
    longer = group.replicas[SLAVE].account().end_offset
    cut_power(group, disk)
    group.close(SLAVE)
    master = group.open(MASTER)
    elect(group, away=SLAVE)
    assert master.account().role is ReplicaRole.MASTER
    assert master.account().epoch > epoch
    [other] = master.append([make_batch([b"another one"])])
    assert other.status is SendStatus.SEND_OK
    assert other.physical_offset < longer
    group.open(SLAVE)
    group.settle()
    assert bodies_of(master.store) == bodies_of(group.replicas[SLAVE].store) == [b"zero", b"another one"]
    assert len(logs(group)) == 1


def test_a_slave_that_returns_in_the_same_epoch_keeps_acknowledged_records(group, disk):
    started = append_ahead(group, disk, b"one")
    end = group.replicas[SLAVE].account().end_offset
    group.close(SLAVE)
    slave = group.open(SLAVE)
    group.control(2)
    following = slave.following(0.0)
    assert following is not None
    # The slave has already acknowledged its copied records to the master. So `align` must not truncate these records,
    # not even for a moment.
    assert slave.align(following.epoch, group.replicas[MASTER].history(following.epoch)) == end
    group.copy(SLAVE)
    disk.works.set()
    eventually(lambda: settled(started), "an answer")
    assert len(logs(group)) == 1


def test_with_fixed_roles_a_slave_never_has_more_than_the_masters_disk(tmp_path, monkeypatch):
    rules = ReplicaRules(lease_s=60.0, slave_timeout_s=60.0, all_ack_in_sync_state_set=False, fixed_roles=True)
    group = LocalReplicas(tmp_path, 2, rules)
    disk = Disk(group.directory(MASTER))
    try:
        begin(group)
        monkeypatch.setattr(os, "fdatasync", disk.fdatasync)
        disk.works.clear()
        end = group.master.account().end_offset
        started = group.master.start_append([make_batch([b"one"])])
        group.copy(SLAVE)
        assert group.replicas[SLAVE].account().end_offset == group.replicas[MASTER].account().end_offset == end
        disk.works.set()
        eventually(lambda: settled(started), "an answer")
        group.copy(SLAVE)
        assert group.replicas[SLAVE].account().end_offset == group.replicas[MASTER].account().end_offset > end
        assert bodies_of(group.master.store) == [b"zero", b"one"]
    finally:
        disk.works.set()
        group.end()


def test_a_chunk_that_comes_while_a_role_changes_is_refused_and_not_waited_for(group):
    slave = group.replicas[SLAVE]
    following = slave.following(0.0)
    assert following is not None
    chunk = group.master.chunk_at(following.epoch, following.position or 0, 1 << 20)
    with slave._order_lock, pytest.raises(ServiceNotAvailableError, match="is changing its role"):
        slave.start_append_log(following.epoch, chunk)


def test_a_replica_whose_epoch_file_and_all_copies_are_torn_names_the_file_when_it_starts(group):
    group.close(SLAVE)
    for name in (EPOCH_FILE, f"{EPOCH_FILE}.bak", f"config/{EPOCHS_FILE}", f"config/{EPOCHS_FILE}.bak"):
        (group.directory(SLAVE) / name).write_bytes(bytes(10))
    with pytest.raises(StoreCorruptError, match=EPOCH_FILE):
        group.open(SLAVE)
