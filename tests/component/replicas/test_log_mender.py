"""Damage in a replica's log is mended by the bytes of another one, and a damaged replica does not lead before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.replication.log_chunks import truncate_log
from tests.support.replicas.local_replicas import LocalReplicas, append, filled_groups
from tests.support.stores.stores import bodies_of

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number + b"x" * 100 for number in range(60)]
Make = Callable[..., LocalReplicas]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a group in which all replicas have BODIES, acknowledged."""
    with filled_groups(tmp_path, BODIES) as build:
        yield build


def flip(group: LocalReplicas, name: int, body: bytes) -> None:
    """Change a byte of a body in the log of a replica that is closed."""
    for path in sorted((group.directory(name) / "commitlog").iterdir()):
        data = bytearray(path.read_bytes())
        position = data.find(body)
        if position >= 0:
            data[position] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"replica {name} has no {body!r}")


def stop(group: LocalReplicas) -> None:
    for name in sorted(group.names):
        group.close(name)
    group.control_state._accounts.clear()


def start(group: LocalReplicas, *names: int) -> None:
    for name in names or sorted(group.names):
        group.open(name)


def logs(group: LocalReplicas) -> set[bytes]:
    """The different logs of the group."""
    return {
        b"".join(path.read_bytes() for path in sorted((group.directory(name) / "commitlog").iterdir())).rstrip(b"\0")
        for name in group.names
    }


def has_no_damage(group: LocalReplicas) -> bool:
    return all(not replica.holes for replica in group.replicas.values())


def check_whole(group: LocalReplicas, bodies: list[bytes]) -> None:
    assert has_no_damage(group)
    assert all(bodies_of(replica.store) == bodies for replica in group.replicas.values())
    assert len(logs(group)) == 1


@pytest.mark.parametrize("record", [0, 30, 58])
def test_the_former_master_with_a_damaged_record_does_not_lead_and_is_mended(make, record):
    group = make()
    first = group.control_state.record.master
    stop(group)
    flip(group, first, BODIES[record])
    start(group, first)
    group.control(6)
    assert group.replicas[first].account().hole_bytes > 0
    assert group.control_state.record.epoch == 101
    start(group, *(group.names - {first}))
    group.settle()
    assert group.control_state.record.master != first
    check_whole(group, BODIES)
    assert group.replicas[first].account().complete
    append(group, [b"new"])
    check_whole(group, [*BODIES, b"new"])


def test_if_every_replica_has_damage_of_its_own_each_gets_back_what_it_lacks(make):
    group = make()
    stop(group)
    for name in group.names:
        flip(group, name, BODIES[10 + name])
    start(group)
    group.settle()
    assert "damaged bytes" in group.control_state.record.loss
    check_whole(group, BODIES)


def test_what_no_replica_has_stays_damaged_and_the_group_goes_on(make):
    group = make()
    stop(group)
    for name in group.names:
        flip(group, name, BODIES[20])
    start(group)
    group.settle()
    append(group, [b"new"])
    assert [len(replica.holes) for replica in group.replicas.values()] == [1, 1, 1]
    assert group.control_state.record.sync_state_set.members == group.names
    slaves = [replica for replica in group.replicas.values() if replica is not group.master]
    assert all(replica.account().complete for replica in slaves)  # as good as the master: one of them may lead next
    assert len(logs(group)) == 1


def test_damage_behind_the_end_to_which_a_log_is_cut_is_gone_with_it(make):
    group = make()
    first = group.control_state.record.master
    other = min(group.names - {first})
    end = group.replicas[first].account().end_offset
    stop(group)
    flip(group, other, BODIES[5])
    settings = group.settings(other)
    start(group, other)
    [hole] = group.replicas[other].holes
    stop_one = group.replicas.pop(other)
    stop_one.close()
    assert truncate_log(settings, end) == 0  # a record boundary behind the damage
    assert truncate_log(settings, hole.offset) > 0
    start(group, other)
    assert group.replicas[other].holes == ()


def test_a_range_with_damage_is_not_given_to_others(make):
    group = make()
    first = group.control_state.record.master
    epoch, other = group.control_state.record.epoch, min(group.names - {first})
    stop(group)
    flip(group, other, BODIES[5])
    start(group, other)
    [hole] = group.replicas[other].holes
    start(group, *(group.names - {other}))
    group.control(6)
    epoch = group.control_state.record.epoch
    master = group.master
    assert master.read_range(epoch, hole.offset, hole.size - 1) is None
    assert master.read_range(epoch, hole.offset, 1 << 40) is None
    data = master.read_range(epoch, hole.offset, hole.size)
    assert data is not None
    assert len(data) == hole.size
    assert group.replicas[other].any_store.chunks.read_range(hole.offset, hole.size) is None
