"""Tests of read repair: a damaged record that a reader or a slave meets is reported, checked by its store, and replaced
by another replica's intact bytes. No damaged record is copied or served, and after a failover nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.common.errors import InvalidArgumentError, NotMasterError, RecordsDamagedError, StoreCorruptError
from raymq.common.protocol.store import REPORT_MAX, QueuePosition, RepairState
from tests.support.replicas.local_replicas import LocalReplicas, settle_append
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import LOG_FILE_BYTES, make_batch, placed_bodies

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number + b"x" * 1000 for number in range(180)]
SETTLE_S = 60.0


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalReplicas]:
    """Yield a broker group of three replicas. All of them have the messages BODIES, in several log files."""
    group = LocalReplicas(tmp_path)
    group.settle()
    for start in range(0, len(BODIES), 20):
        settle_append(group, make_batch(BODIES[start : start + 20]))
    group.settle()
    yield group
    group.end()


def places(group: LocalReplicas) -> list[int]:
    """Return the physical offset of each message of BODIES. All replicas have the same log."""
    queue = group.master.any_store._parts.queues.get_plain("orders", 0)
    assert queue is not None
    return [int(queue.units(offset, 1)[0]["physical_offset"]) for offset in range(len(BODIES))]


def report(group: LocalReplicas, name: int, *offsets: int) -> list[RepairState]:
    """Report messages of BODIES to a replica, as a reader does, and wait until the replica has checked them."""
    positions = [QueuePosition("orders", 0, offset) for offset in offsets]
    replica = group.replicas[name]
    replica.report_damage(positions)
    assert replica.any_store.reported.settle(SETTLE_S)
    return replica.report_damage(positions)


def mend(group: LocalReplicas) -> None:
    """Let the Replicators of all slaves repair damage, until there is nothing left to repair."""
    while sum(group.mend(name) for name in sorted(group.replicas)):
        pass


def master_of(group: LocalReplicas) -> int:
    assert group.control_state.record is not None
    assert group.control_state.record.master is not None
    return group.control_state.record.master


def slaves_of(group: LocalReplicas) -> list[int]:
    return sorted(group.names - {master_of(group)})


def logs(group: LocalReplicas) -> set[bytes]:
    return {
        b"".join(path.read_bytes() for path in sorted((group.directory(name) / "commitlog").iterdir())).rstrip(b"\0")
        for name in group.names
    }


def check_whole(group: LocalReplicas, bodies: list[bytes]) -> None:
    assert [replica.holes for replica in group.replicas.values()] == [()] * len(group.replicas)
    assert all(placed_bodies(replica.any_store) == bodies for replica in group.replicas.values())
    assert len(logs(group)) == 1


def fail_over(group: LocalReplicas) -> None:
    """Stop the master for good, and let another replica lead."""
    former = master_of(group)
    group.close(former)
    group.control_state._accounts.pop(former, None)
    group.open(former)
    for _ in range(3):
        group.settle()


@pytest.mark.parametrize("damaged", [1, 2])
def test_flipped_bits_of_each_field_in_each_file_are_mended_from_an_intact_replica(group, damaged):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    at = places(group)
    files = sorted({offset // LOG_FILE_BYTES for offset in at})
    assert len(files) >= 3
    chosen: dict[int, str] = {}
    for file in (files[0], files[len(files) // 2], files[-1]):
        numbers = [number for number, offset in enumerate(at) if offset // LOG_FILE_BYTES == file]
        chosen |= dict(zip(dice.sample(numbers, len(FIELDS)), FIELDS, strict=True))
    for number, field in chosen.items():
        for name in dice.sample(sorted(group.names), damaged):
            flip(group.directory(name), at[number], field)
    for name in group.names:
        for number in chosen:
            report(group, name, number)
        # A reader gets the message itself, or an error, but never other bytes.
        for body, expected in zip(placed_bodies(group.replicas[name].any_store), BODIES, strict=True):
            assert body in (expected, None)
    mend(group)
    check_whole(group, BODIES)
    fail_over(group)
    check_whole(group, BODIES)


def test_a_reader_learns_when_it_may_read_again(group):
    master, at = master_of(group), places(group)
    flip(group.directory(master), at[100], "body")
    assert report(group, master, 99, 100) == [RepairState.INTACT, RepairState.PENDING]
    group.mend(slaves_of(group)[0])
    assert report(group, master, 99, 100) == [RepairState.INTACT] * 2


def test_a_reader_learns_that_no_replica_has_the_record(group):
    master, at = master_of(group), places(group)
    for name in group.names:
        flip(group.directory(name), at[100], "body")
        report(group, name, 100)
    assert report(group, master, 100) == [RepairState.PENDING]
    mend(group)
    assert report(group, master, 100) == [RepairState.LOST]
    assert placed_bodies(group.master.any_store) == [*BODIES[:100], None, *BODIES[101:]]


def test_a_stopped_replica_with_the_intact_record_repairs_the_others_when_it_returns(group):
    master, (other, away), at = master_of(group), slaves_of(group), places(group)
    group.close(away)
    for name in (master, other):
        flip(group.directory(name), at[100], "body")
        report(group, name, 100)
    group.mend(other)
    # The stopped replica may have the record, so a reader waits for a while.
    assert report(group, master, 100) == [RepairState.PENDING]
    group.open(away)
    group.settle()
    mend(group)
    assert report(group, master, 100) == [RepairState.INTACT]
    check_whole(group, BODIES)


def test_a_slave_refuses_damaged_records_and_gets_them_from_the_master_after_its_repair(group):
    master, (early, late) = master_of(group), slaves_of(group)
    started = group.master.start_append([make_batch([b"new %d" % number + b"y" * 500 for number in range(20)])])
    group.copy(early)
    end = group.replicas[late].account().end_offset
    assert end < group.replicas[early].account().end_offset
    flip(group.directory(master), end, "body")
    with pytest.raises(RecordsDamagedError) as caught:
        group.copy(late)
    assert caught.value.physical_offset == end
    assert group.replicas[late].account().end_offset == end
    assert group.replicas[master].any_store.reported.settle(SETTLE_S)
    [hole] = group.replicas[master].holes
    assert hole.offset == end
    # The master sends nothing of the damaged range while another replica may have the intact record.
    with pytest.raises(StoreCorruptError):
        group.copy(late)
    assert group.replicas[late].account().end_offset == end
    assert group.mend(early) == hole.size
    group.settle()
    assert started.settle(0.0) is not None
    check_whole(group, [*BODIES, *(b"new %d" % number + b"y" * 500 for number in range(20))])


def test_a_former_master_does_not_believe_a_report_of_a_slave(group):
    epoch = group.replicas[slaves_of(group)[0]].account().epoch
    with pytest.raises(NotMasterError):
        group.replicas[slaves_of(group)[0]].report_log(epoch, 0, 100)
    group.master.report_log(epoch, 0, 1 << 40)
    assert group.master.any_store.reported.settle(SETTLE_S)
    assert group.master.holes == ()


def test_the_number_of_reported_records_is_bounded(group):
    positions = [QueuePosition("orders", 0, 0)] * (REPORT_MAX + 1)
    with pytest.raises(InvalidArgumentError, match="1000"):
        group.master.report_damage(positions)
