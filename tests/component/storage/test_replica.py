"""Tests of the replicas of a broker group, with real stores: they copy the log, confirm records, fail over, and
truncate unconfirmed records."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.core.replica.orders import Copied, Follow, LogRequest, ReplicaRole
from actors.core.replica.rules import ReplicaRules
from actors.replica import group_replica
from actors.replica.replica import Replica
from raymq.common.errors import (
    InSyncReplicasError,
    NotMasterError,
    ServiceNotAvailableError,
    StoreFailedError,
    StoreNotWritableError,
)
from raymq.common.message import PullStatus, SendStatus
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import FetchRequest, FetchResult
from storage.files import disk
from storage.read import queue_queries
from storage.replication.epochs import ReplicaMembers
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.stores import LOG_FILE_BYTES, bodies_of, make_batch

pytestmark = pytest.mark.usefixtures("no_flushes")

Make = Callable[..., LocalReplicas]
RULES = ReplicaRules(lease_s=60.0, slave_timeout_s=0.05)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    # Raise the time after which a slave considers its master silent, because the machine may be busy. Tests of a silent
    # master set this time themselves.
    monkeypatch.setattr(group_replica, "MASTER_SILENT_AFTER_S", 3600.0)
    groups: list[LocalReplicas] = []

    def build(**options: Any) -> LocalReplicas:
        groups.append(LocalReplicas(tmp_path, **options))
        return groups[-1]

    yield build
    for group in groups:
        group.end()


def logs(group: LocalReplicas) -> list[bytes]:
    """Return each replica's log, up to the end of the log's last record."""
    found = []
    for name in sorted(group.names):
        files = sorted((group.directory(name) / "commitlog").iterdir())
        found.append(b"".join(path.read_bytes() for path in files).rstrip(b"\0"))
    return found


def bodies(first: int, count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(first, first + count)]


def test_a_new_group_elects_a_master_and_the_others_follow_into_the_set(make):
    group = make()
    group.settle()
    assert group.master.account().role is ReplicaRole.MASTER
    assert group.control_state.record.sync_state_set.members == {0, 1, 2}
    assert [r.account().role for r in group.replicas.values()].count(ReplicaRole.SLAVE) == 2


def test_acknowledged_messages_are_on_all_members_byte_for_byte(make):
    group = make()
    group.settle()
    group.start()
    for first in range(0, 3000, 100):
        [result] = group.master.append([make_batch(bodies(first, 100), producer=("p", 0, first))])
        assert result.status is SendStatus.SEND_OK
    assert len({replica.account().end_offset for replica in group.replicas.values()}) == 1
    assert bodies_of(group.master.store) == bodies(0, 3000)
    group.settle()
    for replica in group.replicas.values():
        assert bodies_of(replica.store) == bodies(0, 3000)
    assert len(set(logs(group))) == 1


def test_nothing_is_visible_or_acknowledged_before_the_members_have_it(make):
    group = make(rules=RULES)
    group.settle()
    [result] = group.master.append([make_batch([b"one"])])
    assert result.status is SendStatus.FLUSH_SLAVE_TIMEOUT
    assert bodies_of(group.master.store) == []
    group.settle()
    assert bodies_of(group.master.store) == [b"one"]


def test_a_message_that_does_not_wait_is_acknowledged_before_its_copies(make):
    group = make(rules=RULES)
    group.settle()
    hasty = replace(make_batch([b"one"]), wait_store_msg_ok=False)
    [result] = group.master.append([hasty])
    assert result.status is SendStatus.SEND_OK
    assert bodies_of(group.master.store) == []
    both = group.master.append([make_batch([b"two"]), hasty])
    assert [one.status for one in both] == [SendStatus.FLUSH_SLAVE_TIMEOUT, SendStatus.SEND_OK]
    group.settle()
    assert bodies_of(group.master.store) == [b"one", b"two", b"one"]


def test_a_fenced_replica_neither_takes_nor_shows(make):
    group = make()
    with pytest.raises(NotMasterError):
        group.replicas[0].append([make_batch([b"x"])])
    with pytest.raises(ServiceNotAvailableError, match="no master"):
        _ = group.replicas[0].store


def test_a_slave_takes_no_appends_not_even_by_its_store(make):
    group = make()
    group.settle()
    slave = next(r for r in group.replicas.values() if r is not group.master)
    with pytest.raises(NotMasterError):
        slave.append([make_batch([b"x"])])
    with pytest.raises(StoreNotWritableError, match="not the master"):
        slave.any_store.append([make_batch([b"x"])])


def test_too_few_in_sync_are_refused_before_anything_is_written(make):
    group = make(rules=replace(RULES, min_in_sync_replicas=2))
    group.control()
    end = group.master.account().end_offset
    with pytest.raises(InSyncReplicasError, match="nothing was stored"):
        group.master.append([make_batch([b"x"])])
    assert group.master.account().end_offset == end
    [result] = group.master.append([replace(make_batch([b"x"]), wait_store_msg_ok=False)])
    assert result.status is SendStatus.SEND_OK


def test_the_minimum_in_sync_of_the_members_counts_more_than_the_settings(make):
    group = make(rules=replace(RULES, min_in_sync_replicas=1))
    group.control()
    members = ReplicaMembers(1, frozenset({0, 1, 2}), min_in_sync=2)
    group.master.obey(None, None, members)
    with pytest.raises(InSyncReplicasError, match=r"min_in_sync_replicas \(2\)"):
        group.master.append([make_batch([b"x"])])
    group.master.obey(None, None, replace(members, version=2, min_in_sync=1))
    [result] = group.master.append([make_batch([b"x"])])
    assert result.status is SendStatus.SEND_OK


def test_after_a_failover_a_repeat_is_recognised_and_the_old_master_follows(make):
    group = make()
    group.settle()
    group.start()
    old = group.control_state.record.master
    group.master.append([make_batch(bodies(0, 50), producer=("p", 0, 0))])
    group.close(old)
    group.control_state._lease_until_s = 0.0  # Simulate that the master's lease has expired.
    group.control_state._accounts.pop(old)
    group.control(6)
    assert group.control_state.record.master != old
    group.settle()
    [repeat] = group.master.append([make_batch(bodies(0, 50), producer=("p", 0, 0))])
    assert repeat.duplicate
    group.master.append([make_batch(bodies(50, 50), producer=("p", 0, 50))])
    group.open(old)
    group.settle()
    assert bodies_of(group.replicas[old].store) == bodies(0, 100)
    assert len(set(logs(group))) == 1


def depose(group: LocalReplicas) -> int:
    """Close the master and elect another master. Returns the number of the closed replica."""
    old = group.control_state.record.master
    group.close(old)
    group.control_state._lease_until_s = 0.0
    group.control_state._accounts.pop(old)
    group.settle()
    assert group.control_state.record.master != old
    return old


@pytest.mark.parametrize("before", [0, 50])
def test_a_master_that_was_deposed_before_it_wrote_anything_follows_the_next_one(make, before):
    """A master loses its role before it has written a record, and follows the next master. Its epoch starts at the same
    offset as the next master's epoch, and no other replica has seen this epoch."""
    group = make()
    group.settle()
    group.start()
    if before:
        group.master.append([make_batch(bodies(0, before), producer=("p", 0, 0))])
    first = depose(group)
    second = depose(group)
    group.open(first)
    group.settle()
    group.master.append([make_batch(bodies(before, 10), producer=("p", 0, before))])
    group.open(second)
    group.settle()
    assert group.control_state.record.sync_state_set.members == {0, 1, 2}
    assert bodies_of(group.replicas[second].store) == bodies(0, before + 10)
    assert len(set(logs(group))) == 1


def test_records_of_an_old_master_only_are_cut_when_it_follows(make):
    group = make(rules=RULES)
    group.settle()
    old, others = group.master, [r for r in group.replicas.values() if r is not group.master]
    group.settle()
    # No other replica copies these records of the old master, because the test appends them after the last copy.
    old.append([make_batch(bodies(0, 10))])
    longer = old.account().end_offset
    name = group.control_state.record.master
    group.replicas.pop(name)
    group.control_state._lease_until_s = 0.0
    group.control_state._accounts.pop(name)
    group.settle()
    assert group.master in others
    group.replicas[name] = old
    group.settle()
    group.start()
    group.master.append([make_batch([b"new"])])
    assert old.account().role is ReplicaRole.SLAVE
    assert old.account().end_offset != longer
    group.settle()
    assert bodies_of(old.store) == [b"new"]
    assert len(set(logs(group))) == 1


def test_a_replica_that_starts_empty_is_filled_from_where_the_masters_log_begins(make):
    group = make()
    group.settle()
    group.start()
    for first in range(0, 2000, 50):
        group.master.append([make_batch([body * 20 for body in bodies(first, 50)])])
    empty = next(name for name in group.names if group.replicas[name] is not group.master)
    group.close(empty)
    shutil.rmtree(group.directory(empty))
    _drop_first_file(group)
    group.open(empty)
    group.settle()
    assert group.control_state.record.sync_state_set.members == {0, 1, 2}
    master, filled = group.master.store, group.replicas[empty].store
    assert filled.log.min_offset == master.log.min_offset > 0
    assert bodies_of(filled) == bodies_of(master)


def _drop_first_file(group: LocalReplicas) -> None:
    """Delete the first log file of all running stores, as retention does."""
    for replica in group.replicas.values():
        store = replica.any_store
        with store._parts.append_lock:
            for path in store.log.drop_files_before(store.log.file_size + 1):
                path.unlink()
            for queue in store._parts.queues:
                queue.correct_min_offset(store.log.min_offset)


def test_orders_of_older_epochs_change_nothing(make):
    group = make()
    group.settle()
    state = group.master.account()
    late = Follow("broker-a", state.replica, state.epoch - 1, (state.replica + 1) % 3)
    assert group.master.obey(late, None).role is ReplicaRole.MASTER


def test_chunks_of_an_older_epoch_are_refused(make):
    group = make()
    group.settle()
    slave = next(r for r in group.replicas.values() if r is not group.master)
    following = slave.following(0.0)
    assert following is not None
    chunk = group.master.chunk_at(following.epoch, following.position, 1000)
    with pytest.raises(NotMasterError):
        slave.start_append_log(following.epoch - 1, chunk)


def test_a_slave_with_a_large_lag_continues_and_reports_its_flushed_offset(make, monkeypatch):
    group = make(rules=RULES)
    group.settle()
    for first in range(0, 300, 100):
        group.master.append([make_batch(bodies(first, 100))])
    name, slave = next((n, r) for n, r in group.replicas.items() if r is not group.master)
    following = slave.following(0.0)
    start = following.position
    disk_has_worked = threading.Event()

    def flush(descriptor: int) -> None:
        # Delay only the flushes of the log. Other threads also flush, to create the next log file or to store the
        # epoch.
        if threading.current_thread().name == "raymq-flush":
            disk_has_worked.wait(60)

    monkeypatch.setattr(os, "fdatasync", flush)
    first = group.master.chunk_at(following.epoch, start, 1000)
    copied = slave.start_append_log(following.epoch, first)
    assert copied == Copied(start + len(first.data), start, len(first.data))
    at = copied.next_offset, copied.acked_offset
    group.master.note_request(LogRequest(name, following.store_id, following.learner, following.epoch, *at))
    rest = group.master.chunk_at(following.epoch, copied.next_offset, 1 << 20)
    assert group.master.account().confirm_offset == start
    end = slave.start_append_log(following.epoch, rest).next_offset
    assert slave.copied(following.epoch, end) is None
    disk_has_worked.set()
    assert end == group.master.account().end_offset > start + len(first.data)
    assert eventually(lambda: slave.copied(following.epoch, end), "the slave's disk to work") == end


def test_a_restarted_group_continues_from_disk(make, tmp_path):
    group = make()
    group.settle()
    group.start()
    group.master.append([make_batch(bodies(0, 100), producer=("p", 0, 0))])
    group.settle()
    group.end()
    again = make()
    again.settle()
    assert bodies_of(again.master.store) == bodies(0, 100)
    again.start()
    [repeat] = again.master.append([make_batch(bodies(0, 100), producer=("p", 0, 0))])
    assert repeat.duplicate


SLAVES_READ = replace(RULES, slave_read_enable=True)


def slave_of(group: LocalReplicas) -> Replica:
    return next(replica for replica in group.replicas.values() if replica is not group.master)


def fetch(replica: Replica, offset: int, *, max_messages: int = 1000) -> FetchResult:
    [result] = replica.fetch([FetchRequest("orders", 0, offset, max_messages)], max_bytes=1 << 20, wait_s=0.0)
    return result


def name_of(group: LocalReplicas, replica: Replica) -> str:
    return f"storage-{group.directory(replica.account().replica).name}"


def test_a_slave_refuses_readers_unless_they_may_read_from_slaves(make):
    group = make(rules=RULES)
    group.settle()
    with pytest.raises(NotMasterError):
        fetch(slave_of(group), 0)
    with pytest.raises(NotMasterError):
        slave_of(group).require_master()
    group.master.require_master()


def test_a_slave_serves_confirmed_messages_and_waits_for_later_offsets(make):
    group = make(rules=SLAVES_READ)
    group.settle()
    group.master.append([make_batch(bodies(0, 10))])
    for name in sorted(group.names):
        # Let each slave copy the records. The master has not informed a slave yet that the other slave has copied the
        # records, too.
        group.copy(name)
    slave, master = slave_of(group), group.master
    assert fetch(slave, 0).count == 0
    for offset in (0, 7, 10):
        result = fetch(slave, offset)
        assert (result.status, result.next_offset) == (PullStatus.NO_NEW_MESSAGE, offset)
        assert result.pull_from == name_of(group, master)
    group.settle()
    assert fetch(slave, 0).count == 10
    assert fetch(master, 11).status is PullStatus.OFFSET_ILLEGAL


def test_a_reader_of_old_messages_is_sent_to_a_slave_and_returns_after_catching_up(make, monkeypatch):
    group = make(rules=SLAVES_READ)
    group.settle()
    group.start()
    group.master.append([make_batch(bodies(0, 100))])
    group.settle()
    slave, master = slave_of(group), group.master
    assert fetch(master, 0, max_messages=10).pull_from == ""
    # Simulate a machine whose memory is 25/40 of the log. As access_message_in_memory_max_ratio is 40 %, only the last
    # quarter of the log then counts as in memory.
    monkeypatch.setattr(queue_queries, "_MEMORY_BYTES", 25 * master.account().end_offset // 40)
    sent_to = fetch(master, 0, max_messages=10).pull_from
    assert sent_to in {name_of(group, one) for one in group.replicas.values() if one is not master}
    assert fetch(slave, 10, max_messages=10).pull_from == ""
    assert fetch(slave, 20).pull_from == name_of(group, master)
    assert fetch(master, 100).pull_from == ""


def test_a_slave_without_contact_to_its_master_keeps_its_readers(make, monkeypatch):
    group = make(rules=SLAVES_READ)
    group.settle()
    assert fetch(slave_of(group), 0).pull_from == name_of(group, group.master)
    monkeypatch.setattr(group_replica, "MASTER_SILENT_AFTER_S", 0.0)
    assert fetch(slave_of(group), 0).pull_from == ""
    assert fetch(slave_of(group), 5).status is PullStatus.NO_NEW_MESSAGE


FIXED = replace(RULES, fixed_roles=True, all_ack_in_sync_state_set=False, slave_read_enable=True)


def test_with_fixed_roles_replica_0_acknowledges_after_its_own_flush(make):
    group = make(rules=FIXED)
    group.control()
    assert group.master is group.replicas[0]
    [result] = group.master.append([make_batch([b"one"])])
    assert result.status is SendStatus.SEND_OK
    assert fetch(group.master, 0).count == 1
    group.settle()
    assert [fetch(group.replicas[name], 0).count for name in (1, 2)] == [1, 1]
    assert group.control_state.record.sync_state_set.members == {0}
    assert group.master.account().in_sync == {0, 1, 2}
    assert len(set(logs(group))) == 1


def test_a_sync_master_waits_for_a_copy_and_says_when_there_was_none_in_time(make):
    group = make(rules=replace(FIXED, in_sync_replicas=2))
    group.control()
    [late] = group.master.append([make_batch([b"one"], producer=("p", 0, 0))])
    assert late.status is SendStatus.FLUSH_SLAVE_TIMEOUT
    # The message is visible although no slave has copied it in time. The master is fixed, so no slave without the
    # message can become the master.
    assert fetch(group.master, 0).count == 1
    group.rules = replace(group.rules, slave_timeout_s=60.0)
    group.close(0)
    group.open(0)
    group.control()
    group.start()
    [result] = group.master.append([make_batch([b"two"], producer=("p", 0, 1))])
    assert result.status is SendStatus.SEND_OK
    ends = {name: replica.account().end_offset for name, replica in group.replicas.items()}
    assert max(ends[1], ends[2]) == ends[0]


def fail_calls(monkeypatch: pytest.MonkeyPatch, directory: Path, kind: str = "flush") -> None:
    """Make disk calls of one kind fail with EIO, for files below `directory`."""
    real = getattr(disk, kind)

    def call(descriptor: int, *rest: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{directory}/"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *rest)

    monkeypatch.setattr(disk, kind, call)


@pytest.mark.parametrize("kind", ["flush", "pwrite_all", "preallocate"])
def test_a_master_whose_disk_fails_is_replaced_at_once_and_comes_back_when_its_disk_is_well(make, monkeypatch, kind):
    group = make()
    group.settle()
    group.start()
    group.master.append([make_batch(bodies(0, 20), producer=("p", 0, 0))])
    left = group.control_state.record.master
    told: list[str] = []
    group.master.call_on_failure(lambda: told.append("failed"))
    # The bodies of this batch together are longer than one write into a memory map, and longer than two log files. So
    # the append needs a new log file, even if the next file is already preallocated.
    long_bodies = [body.ljust(LOG_FILE_BYTES // 8, b".") for body in bodies(20, 20)]
    batch = make_batch(long_bodies, producer=("p", 0, 20))
    with monkeypatch.context() as patch:
        fail_calls(patch, group.directory(left), kind)
        with pytest.raises(StoreFailedError):
            group.master.append([batch])
        # A replica whose disk failed answers with NotMasterError, so that the producer asks for the address of the new
        # master.
        with pytest.raises(NotMasterError):
            group.replicas[left].append([batch])
        assert told == ["failed"]
        assert os.strerror(errno.EIO) in group.replicas[left].account().failed
        group.control(6)  # Elect a new master, although the old master's lease has not expired.
        assert group.control_state.record.master != left
        [result] = group.master.append([batch])
        assert result.status is SendStatus.SEND_OK
        group.close(left)  # End the process of the replica whose disk failed.
    group.open(left)
    group.settle()
    assert group.control_state.record.sync_state_set.members == {0, 1, 2}
    for replica in group.replicas.values():
        assert bodies_of(replica.store) == bodies(0, 20) + long_bodies
    assert len(set(logs(group))) == 1


def test_a_replica_that_cannot_write_an_order_down_says_that_its_disk_failed(make, monkeypatch):
    group = make()
    group.settle()
    group.start()
    group.master.append([make_batch(bodies(0, 20))])
    left = group.control_state.record.master
    other = next(name for name in group.names if name != left)
    with monkeypatch.context() as patch:
        fail_calls(patch, group.directory(other))
        newest = group.control_state.record.sync_state_set
        account = group.replicas[other].obey(None, replace(newest, version=newest.version + 1))
        assert account.failed
        group.control(6)
    assert group.control_state.record.master == left
    group.close(other)
    group.open(other)
    group.settle()
    assert group.control_state.record.sync_state_set.members == {0, 1, 2}


def open_below(directory: Path) -> int:
    """Return the number of this process's descriptors and memory maps of files below a directory, including deleted
    files."""
    links = [_target(link) for link in Path("/proc/self/fd").iterdir()]
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(one.startswith(f"{directory}/") for one in [*links, *maps])


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # another thread has closed the descriptor since /proc/self/fd was listed
        return ""


def test_slaves_let_go_of_deleted_topics_as_their_master_does(make):
    group = make(rules=replace(RULES, slave_read_enable=True, slave_timeout_s=60.0))
    group.settle()
    group.start()
    names = [f"short-{number}" for number in range(30)]

    def state(body: bytes) -> int:
        """Append a record to the broker's state topic. Returns the queue offset after the record."""
        return int(group.master.append([make_batch([body], topic=STATE_TOPIC)])[0].queue_offset) + 1

    state(b"the topics were made")
    group.master.append([make_batch([b"a"], topic=name) for name in names])
    group.settle()
    slaves = {name: replica for name, replica in group.replicas.items() if replica is not group.master}
    for replica in slaves.values():
        fetch_all(replica, names)
    before = {name: open_below(group.directory(name)) for name in slaves}
    for name in names:
        group.master.store.topics.delete(name)
    deleted = state(b"the topics were deleted")
    # Create one topic again. So a slave may copy a message of the new topic before it gets the deletion of the old
    # topic.
    [again, *_] = names
    made = state(b"a topic was made anew")
    group.master.append([make_batch([b"b"], topic=again)])
    group.settle()
    for name, replica in slaves.items():
        # The first argument is a list of the existing topics. The slave gets an old list, from before the deletion,
        # that still contains these topics. So the slave must keep them.
        replica.delete_topics_before(frozenset(names), deleted)
        assert set(names) <= replica.any_store.topics.queue_ids().keys()
        # The deletion is at a log position that the slave has not copied yet, so the slave must keep the deleted
        # topics.
        replica.delete_topics_before(frozenset(), made + 100)
        assert set(names) <= replica.any_store.topics.queue_ids().keys()
        replica.delete_topics_before(frozenset(), deleted)
        assert set(names) & replica.any_store.topics.queue_ids().keys() == {again}
        # Check that the slave has closed more than one descriptor or map per deleted topic. The exact number varies,
        # because other threads of the store may have opened files.
        assert open_below(group.directory(name)) < before[name] - len(names)
        eventually(lambda store=replica.any_store: bodies_of(store, topic=again) == [b"b"], "the new message")
    master = group.master
    master.delete_topics_before(frozenset(), made)  # `delete_topics_before` deletes no topics on a master.
    assert again in master.store.topics.queue_ids()
    for name in slaves:
        group.close(name)
        replica = group.open(name)
        assert set(names) & replica.any_store.topics.queue_ids().keys() == {again}
    group.settle()
    assert len(set(logs(group))) == 1


def fetch_all(replica: Replica, names: list[str]) -> None:
    """Read the first message of each topic from a replica. Waits until the message is visible there."""

    def count(name: str) -> int:
        [result] = replica.fetch([FetchRequest(name, 0, 0, 10)], max_bytes=1 << 20, wait_s=0)
        return result.count

    for name in names:
        eventually(lambda name=name: count(name) == 1, f"a message of {name}")


def test_with_fixed_roles_slaves_serve_reads_while_the_master_is_away_and_it_leads_again(make):
    group = make(rules=FIXED)
    group.control()
    group.master.append([make_batch(bodies(0, 20))])
    group.settle()
    group.close(0)
    group.control_state._lease_until_s = 0.0
    group.control_state._accounts.pop(0)
    group.control(6)
    assert group.control_state.record.master == 0
    assert "replica 0 does not answer" in group.control_state.reason
    assert [fetch(group.replicas[name], 0).count for name in (1, 2)] == [20, 20]
    group.open(0)
    group.settle()
    group.master.append([make_batch(bodies(20, 20))])
    group.settle()
    assert [fetch(replica, 0).count for replica in group.replicas.values()] == [40, 40, 40]


def test_with_fixed_roles_a_master_that_lost_its_directory_does_not_empty_its_slaves(make):
    group = make(rules=FIXED)
    group.control()
    group.master.append([make_batch(bodies(0, 20))])
    group.settle()
    group.close(0)
    shutil.rmtree(group.directory(0))
    group.open(0)
    group.control_state._lease_until_s = 0.0
    group.control(6)
    assert "its directory is not the one" in group.control_state.reason
    with pytest.raises(NotMasterError):
        group.replicas[0].append([make_batch([b"x"])])
    assert [fetch(group.replicas[name], 0).count for name in (1, 2)] == [20, 20]


def test_epochs_of_which_retention_left_nothing_are_forgotten_and_all_follow_on(make):
    group = make()
    group.settle()
    group.start()
    first = group.master._epochs.last_epoch
    group.master.append([make_batch(bodies(0, 100), producer=("p", 0, 0))])
    group.open(depose(group))
    group.settle()
    for number in range(100, 1000, 100):
        group.master.append([make_batch(bodies(number, 100), producer=("p", 0, number))])
    group.settle()
    for replica in group.replicas.values():
        store = replica.any_store
        assert store.cleaner._delete_log_files(store.log.end_offset, "the test wants it") > 0
        assert replica._epochs.entries[0].epoch == first
    group.open(depose(group))
    group.master.append([make_batch(bodies(1000, 100), producer=("p", 0, 1000))])
    group.settle()
    for replica in group.replicas.values():
        assert replica._epochs.entries[0].epoch > first
        assert bodies_of(replica.any_store)[-100:] == bodies(1000, 100)
