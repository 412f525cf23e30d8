"""Tests of log repair: a replica repairs damage in its log with another replica's bytes, and does not become master
before the repair."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raymq.common.errors import StoreNotWritableError
from raymq.common.protocol.store import Hole
from raymq.records.format.decode import decode_records
from raymq.records.format.layout import BLANK_MAGIC
from storage.files import disk
from storage.replication.log_chunks import LogChunks, truncate_log
from storage.replication.mend import HoleMender
from tests.support.replicas.local_replicas import LocalReplicas, append, filled_groups, settle_append
from tests.support.stores.stores import bodies_of, intact_bodies, make_batch

pytestmark = pytest.mark.usefixtures("no_flushes")

BLANK = BLANK_MAGIC.to_bytes(4, signed=True)
BODIES = [b"%06d" % number + b"x" * 100 for number in range(60)]
Make = Callable[..., LocalReplicas]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that creates broker groups. Each new group already stores the messages BODIES: all replicas have
    them, and the master has acknowledged them to the producer."""
    with filled_groups(tmp_path, BODIES) as build:
        yield build


BODY_AFTER_MAGIC = 84
"""Number of bytes from the start of a record's magic number to the start of its body."""


def flip(group: LocalReplicas, name: int, body: bytes, back: int = 0) -> None:
    """Flip one bit in the log of a stopped replica. The bit is in the first byte of `body`, or in the byte that lies
    `back` bytes before the first byte."""
    for path in sorted((group.directory(name) / "commitlog").iterdir()):
        data = bytearray(path.read_bytes())
        position = data.find(body)
        if position >= 0:
            data[position - back] ^= 1
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
    """Return the set of the replicas' logs. If the set has one element, all logs are equal."""
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


def test_replicas_with_different_damage_repair_each_other(make):
    group = make()
    stop(group)
    for name in group.names:
        flip(group, name, BODIES[10 + name])
    start(group)
    group.settle()
    assert "damaged bytes" in group.control_state.record.loss
    check_whole(group, BODIES)


def test_records_that_no_replica_has_intact_stay_damaged_and_the_group_continues(make):
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
    # The slaves' logs have everything that the master's log has, and the slaves report this. So each slave may become
    # the next master.
    assert all(replica.account().complete for replica in slaves)
    assert len(logs(group)) == 1


def test_damage_after_the_cut_of_a_log_is_removed(make):
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
    # `end` is the end of the log, so this call of `truncate_log` removes nothing
    assert truncate_log(settings, end) == 0
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
    assert master.read_part(epoch, hole.offset, hole.size - 1) is None
    assert master.read_part(epoch, hole.offset, 1 << 40) is None
    found = master.read_part(epoch, hole.offset, hole.size)
    assert found is not None
    assert (found[0], len(found[1])) == (hole.offset, hole.size)
    chunks = group.replicas[other].any_store.chunks
    assert chunks.read_part(hole.offset, hole.size) is None
    # A hole is a damaged range of the log. A read that requests twice the hole's size skips the hole, and returns the
    # next record. This record is as long as the hole, because all records have equal sizes.
    after = chunks.read_part(hole.offset, 2 * hole.size)
    assert after == master.any_store.chunks.read_part(hole.end_offset, hole.size)


def damage(group: LocalReplicas, name: int, numbers: range) -> None:
    """Flip one bit in each of several bodies in the log of a stopped replica."""
    for number in numbers:
        flip(group, name, BODIES[number])


def count_parts(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> list[int]:
    """Make replicas repair a hole (damaged range of the log) in parts of about `max_bytes`. Returns a list to which the
    size of each written part is appended."""
    sizes: list[int] = []
    read_part, mend = LogChunks.read_part, HoleMender.mend

    def note(mender: HoleMender, offset: int, data: bytes) -> None:
        sizes.append(len(data))
        mend(mender, offset, data)

    monkeypatch.setattr(LogChunks, "read_part", lambda self, offset, size: read_part(self, offset, size, max_bytes))
    monkeypatch.setattr(HoleMender, "mend", note)
    return sizes


def test_a_large_hole_is_mended_part_by_part_each_of_whole_records(make, monkeypatch):
    group = make()
    other = min(group.names - {group.control_state.record.master})
    stop(group)
    damage(group, other, range(10, 40))
    start(group)
    [hole] = group.replicas[other].holes
    sizes = count_parts(monkeypatch, 1)
    group.settle()
    check_whole(group, BODIES)
    assert sizes == [hole.size // 30] * 30
    status = group.replicas[other].any_store.status()
    assert (status.mended_bytes, status.mended_holes) == (hole.size, 1)


def test_two_replicas_with_overlapping_damage_repair_each_other_partly(make):
    group = make(2)
    stop(group)
    damage(group, 0, range(10, 20))
    damage(group, 1, range(15, 25))
    start(group)
    group.settle()
    assert len({replica.holes for replica in group.replicas.values()}) == 1
    assert [replica.account().complete for replica in group.replicas.values() if replica is not group.master] == [True]
    expected = [*BODIES[:15], *[None] * 5, *BODIES[20:]]
    assert [intact_bodies(replica.store) for replica in group.replicas.values()] == [expected] * 2


def test_a_failed_repair_keeps_the_repaired_parts(make, monkeypatch):
    group = make(2)
    other = min(group.names - {group.control_state.record.master})
    stop(group)
    damage(group, other, range(10, 20))
    start(group)
    [hole] = group.replicas[other].holes
    group.control(6)
    count_parts(monkeypatch, 1)
    overwrite, calls = disk.overwrite, itertools.count()

    def fail_at_fourth(path: Path, position: int, data: bytes) -> None:
        if next(calls) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        overwrite(path, position, data)

    monkeypatch.setattr(disk, "overwrite", fail_at_fourth)
    with pytest.raises(StoreNotWritableError, match="was not repaired"):
        group.copy(other)
    step = hole.size // 10
    assert group.replicas[other].holes == (Hole(hole.offset + 3 * step, hole.size - 3 * step, hole.reason),)
    assert len(logs(group)) == 2
    group.close(other)
    start(group, other)
    group.settle()
    check_whole(group, BODIES)


def test_mended_records_are_found_by_their_keys(make):
    group = make(2)
    other = min(group.names - {group.control_state.record.master})
    for body in (b"first", b"keyed", b"last"):
        settle_append(group, make_batch([body], extra_properties={"KEYS": f"one {body.decode()}"}))
    stop(group)
    flip(group, other, b"keyed", BODY_AFTER_MAGIC)
    shutil.rmtree(group.directory(other) / "index")
    start(group, other)
    assert keyed(group, other, "keyed") == []
    start(group, *(group.names - {other}))
    group.settle()
    for _ in range(2):
        assert has_no_damage(group)
        assert keyed(group, other, "keyed") == [b"keyed"]
        assert keyed(group, other, "one") == [b"first", b"keyed", b"last"]
        assert keyed(group, other, "one", max_num=2) == [b"keyed", b"last"]
        group.close(other)
        start(group, other)
        group.settle()


def keyed(group: LocalReplicas, name: int, key: str, **options: int) -> list[bytes]:
    """Return the bodies of the messages that a query by key finds in a replica's store."""
    found = group.replicas[name].any_store.queries.by_key("orders", key, **options)
    return [one.body for one in decode_records(found.records)]


def last_blank(group: LocalReplicas, name: int) -> tuple[Path, int]:
    """Return the path of a replica's first log file, and the position of the BLANK record at the file's end."""
    path = min((group.directory(name) / "commitlog").iterdir())
    data, position = path.read_bytes(), 0
    while data[position + 4 : position + 8] != BLANK:
        position += int.from_bytes(data[position : position + 4])
    return path, position


@pytest.mark.parametrize(
    ("damaged", "is_made_again"),
    [((0,), True), ((5,), True), ((1, 6), False), ((40,), False)],
    ids=["its size", "its magic", "both", "the magic is lost and the rest is not zero"],
)
def test_a_damaged_end_of_a_file_is_written_again_here_or_mended(make, damaged, is_made_again):
    group = make(2)
    append(group, [b"y" * 20_000] * 3)
    other = min(group.names - {group.control_state.record.master})
    expected = bodies_of(group.master.store)
    path, position = last_blank(group, other)
    stop(group)
    data = bytearray(path.read_bytes())
    for at in damaged:
        data[position + at] ^= 0x41
    if damaged == (40,):
        data[position + 5] ^= 1
    path.write_bytes(data)
    # Delete the files "dedup" and "checkpoint", so that recovery scans the whole log, as after a crash.
    for name in ("dedup", "checkpoint"):
        (group.directory(other) / name).unlink()
    (group.directory(other) / "abort").touch()
    start(group, other)
    assert bool(group.replicas[other].holes) != is_made_again
    start(group, *(group.names - {other}))
    group.settle()
    check_whole(group, expected)
    group.close(other)
    start(group, other)
    group.settle()
    check_whole(group, expected)
