"""Tests of holes (damaged ranges of the log) that no replica can repair. Replicas copy the hole, so that all logs are
equal. They repair it when a replica with the intact bytes returns."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.common.protocol.store import Hole, HoleCopy
from raymq.records.format.layout import BODY_OFFSET, QUEUE_ID_OFFSET, QUEUE_OFFSET_OFFSET
from storage.log.holes import HOLES_FILE, PLACE_REASON
from storage.message_store import MessageStore
from storage.replication.log_chunks import truncate_log
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import PATIENT, LocalReplicas, filled_groups, settle_append
from tests.support.stores.stores import intact_bodies, killed_copy, make_batch, placed_bodies, small_settings

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number + b"x" * 100 for number in range(60)]
AT_ONCE = replace(PATIENT, hole_wait_s=0.0)
NEW = 2
"""Number of the replica that loses its directory, and copies its whole log from the master."""
Make = Callable[..., LocalReplicas]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that creates broker groups. All replicas of a group store BODIES, and the messages are
    acknowledged."""
    with filled_groups(tmp_path, BODIES) as build:
        yield build


def log_path(group: LocalReplicas, name: int) -> Path:
    """Return the path of a replica's first log file, which holds all records of these tests."""
    return min((group.directory(name) / "commitlog").iterdir())


def log_of(group: LocalReplicas, name: int) -> bytes:
    return log_path(group, name).read_bytes()


def stop(group: LocalReplicas) -> None:
    for name in sorted(group.replicas):
        group.close(name)
    group.control_state._accounts.clear()


def lose_new(group: LocalReplicas) -> None:
    """Stop the replica NEW and remove it from the sync-state set. Then stop the other replicas, and delete the
    directory of NEW."""
    group.close(NEW)
    group.master._sync.silent(frozenset({NEW}))
    group.control(4)
    assert group.control_state.record.sync_state_set.members == {0, 1}
    stop(group)
    shutil.rmtree(group.directory(NEW))


def start(group: LocalReplicas, *names: int) -> None:
    for name in names or sorted(group.names):
        group.open(name)


def damage(group: LocalReplicas, numbers: range, *, size: int = 3, before: int = 0) -> bytes:
    """Damage the records of some bodies in the logs of replicas 0 and 1, delete the directory of the replica NEW, and
    start all replicas.

    In each record `size` bytes change; the first changed byte is `before` bytes before the body. Returns the log before
    the damage.
    """
    lose_new(group)
    good = log_of(group, 0)
    for name in (0, 1):
        data = bytearray(good)
        for number in numbers:
            at = good.index(BODIES[number]) - before
            data[at : at + size] = bytes(byte ^ 0x55 for byte in data[at : at + size])
        log_path(group, name).write_bytes(data)
    start(group)
    return good


def give_back(group: LocalReplicas, name: int, good: bytes) -> None:
    """Write the intact log `good` into the directory of a stopped replica, as if its disk was restored from a
    backup."""
    data = bytearray(log_of(group, name))
    end = len(good.rstrip(b"\0"))
    data[:end] = good[:end]
    log_path(group, name).write_bytes(data)
    (group.directory(name) / HOLES_FILE).unlink()


def check_equal(group: LocalReplicas, expected: list[bytes | None]) -> None:
    assert len({log_of(group, name) for name in group.names}) == 1
    assert len({replica.holes for replica in group.replicas.values()}) == 1
    assert [intact_bodies(replica.any_store) for replica in group.replicas.values()] == [expected] * len(group.names)


@pytest.mark.parametrize(
    ("numbers", "size", "before"),
    [
        (range(20, 21), 3, 0),
        (range(59, 59), 0, 0),
        (range(20, 24), 3, 0),
        (range(20, 23), 150, 88),
        (range(1), 150, 88),
    ],
    ids=["a body", "nothing", "several bodies", "headers and all", "the first record"],
)
def test_a_new_replica_gets_the_hole_as_a_hole_and_the_group_continues(make, numbers, size, before):
    group = make(3, AT_ONCE)
    good = damage(group, numbers, size=size, before=before)
    group.settle()
    expected = [None if number in numbers else body for number, body in enumerate(BODIES)]
    check_equal(group, expected)
    assert group.control_state.record.sync_state_set.members == group.names
    assert group.replicas[NEW].account().complete
    lackers = group.names - {group.control_state.record.master} if numbers else None
    assert group.master.account().hole_lackers == lackers
    settle_append(group, make_batch([b"new"]))
    group.settle()
    check_equal(group, [*expected, b"new"])
    end = group.master.account().end_offset
    assert {replica.account().confirm_offset for replica in group.replicas.values()} == {end}
    for _ in range(2):  # Restart the replicas twice: the logs stay equal after each restart.
        stop(group)
        start(group)
        group.settle()
        check_equal(group, [*expected, b"new"])
    if numbers:
        group.close(1)
        give_back(group, 1, good)
        start(group, 1)
        group.settle()
        check_equal(group, [*BODIES, b"new"])
        assert group.master.holes == ()


def test_a_new_replica_gets_a_hole_in_parts(make):
    group = make(3, AT_ONCE, chunk_bytes=100)
    damage(group, range(20, 24))
    group.settle()
    check_equal(group, [None if number in range(20, 24) else body for number, body in enumerate(BODIES)])
    assert group.control_state.record.sync_state_set.members == group.names
    settle_append(group, make_batch([b"new"]))


@pytest.mark.parametrize(("field", "bit"), [(QUEUE_ID_OFFSET + 3, 0), (QUEUE_OFFSET_OFFSET + 7, 1)])
def test_a_record_that_names_a_wrong_place_is_copied_as_a_hole_and_mended(make, field, bit):
    """A record names a wrong queue id or offset but passes all checks. Replicas copy it as a hole (damaged range of the
    log) and repair it later. Only the hole and the consume-queue entry that points to the record show the damage."""
    group = make(3, AT_ONCE)
    lose_new(group)
    good = log_of(group, 0)
    for name in (0, 1):
        data = bytearray(good)
        data[good.index(BODIES[20]) - BODY_OFFSET + field] ^= 1 << bit
        log_path(group, name).write_bytes(data)
    start(group)
    group.settle()
    expected = [body if number != 20 else None for number, body in enumerate(BODIES)]
    for _ in range(2):
        assert len({log_of(group, name) for name in group.names}) == 1
        for replica in group.replicas.values():
            assert [hole.reason.startswith(PLACE_REASON) for hole in replica.holes] == [True]
            assert placed_bodies(replica.any_store) == expected
            assert replica.any_store.topics.queue_ids()["orders"] == [0]
        stop(group)
        start(group)
        group.settle()
    group.close(1)
    give_back(group, 1, good)
    start(group, 1)
    group.settle()
    check_equal(group, BODIES)
    assert group.master.holes == ()


def test_a_hole_at_a_files_end_is_copied_and_the_log_continues_in_the_next_file(make):
    group = make(3, AT_ONCE)
    for _ in range(3):
        settle_append(group, make_batch([b"y" * 20_000]))
    expected = intact_bodies(group.master.store)
    lose_new(group)
    for name in (0, 1):
        data = bytearray(log_of(group, name))
        at = data.rindex(BODIES[-1])
        data[at - 88 :] = b"\xaa" * (len(data) - at + 88)
        log_path(group, name).write_bytes(data)
        # Delete the files "dedup" and "checkpoint", so that recovery scans the whole log, as after a crash.
        for lost in ("dedup", "checkpoint"):
            (group.directory(name) / lost).unlink()
        (group.directory(name) / "abort").touch()
    start(group)
    group.settle()
    lost = [
        None if body == BODIES[-1] or len(expected) - 3 <= row < len(expected) - 1 else body
        for row, body in enumerate(expected)
    ]
    assert lost[-1] is not None
    check_equal(group, lost)


def test_while_a_member_of_the_set_may_have_the_intact_bytes_the_hole_is_not_copied(make, monkeypatch):
    group = make(3, AT_ONCE)
    good = damage(group, range(20, 21))
    group.control(6)
    master = group.control_state.record.master
    other = ({0, 1} - {master}).pop()
    with monkeypatch.context() as patch:
        patch.setattr(group, "mend", lambda name: 0)
        for _ in range(2):
            group.copy(other)
            group.control(4)
    assert group.control_state.record.sync_state_set.members == {0, 1}
    group.close(other)
    give_back(group, other, good)
    for _ in range(2):
        with pytest.raises(StoreCorruptError, match=f"replica {other} may have the intact bytes"):
            group.copy(NEW)
        # Wait until the slave has appended the chunk before the hole (damaged range of the log). If chunks travel over
        # lanes (direct socket connections), `copy` may raise its error before this append.
        store = group.replicas[NEW].any_store
        eventually(
            lambda store=store: store.log.end_offset == group.master.holes[0].offset, "the chunk before the hole"
        )
        store.gate.flush_all()
    [hole] = group.master.holes
    assert group.replicas[NEW].account().end_offset == hole.offset
    start(group, other)
    group.settle()
    check_equal(group, BODIES)


def test_before_a_replica_that_is_away_had_time_to_come_back_the_hole_is_not_copied(make):
    group = make(3, replace(PATIENT, hole_wait_s=3600.0))
    damage(group, range(20, 21))
    group.control(6)
    group.copy(({0, 1} - {group.control_state.record.master}).pop())
    with pytest.raises(StoreCorruptError, match=r"may still send the intact bytes in the next 3\d\d\d s"):
        group.copy(NEW)
    assert group.replicas[NEW].holes == ()


def hole_of_two_stores(tmp_path: Path, numbers: range = range(20, 21)) -> tuple[MessageStore, MessageStore]:
    """Return a master store with a hole (damaged range of the log), and a slave store whose log ends at the start of
    this hole. The hole consists of the master's records with the numbers `numbers`."""
    settings = small_settings(tmp_path / "master")
    master = MessageStore.open(settings, broker_name="broker-a")
    for body in BODIES:
        master.append([make_batch([body])])
    master.close()
    path = min((tmp_path / "master" / "commitlog").iterdir())
    data = bytearray(path.read_bytes())
    for number in numbers:
        data[data.index(BODIES[number])] ^= 1
    path.write_bytes(data)
    master = MessageStore.open(settings, broker_name="broker-a")
    [hole] = master.mender.holes
    slave = open_slave(tmp_path)
    slave.chunks.append_chunk(0, master.chunks.read_chunk(0, hole.offset))
    assert slave.log.end_offset == hole.offset
    return master, slave


def open_slave(tmp_path: Path, name: str = "slave") -> MessageStore:
    return MessageStore.open(small_settings(tmp_path / name), broker_name="broker-a", on_stored=lambda end: None)


@pytest.mark.parametrize("killed", [False, True], ids=["clean stop", "killed"])
def test_a_hole_at_the_end_of_a_copy_survives_a_restart_and_is_no_torn_tail(tmp_path, killed):
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    slave.chunks.append_hole(hole.offset, *master.chunks.read_hole(hole.offset, master.log.end_offset))
    if killed:
        killed_copy(tmp_path / "slave", tmp_path / "copy")
    slave.close()
    slave = open_slave(tmp_path, "copy" if killed else "slave")
    assert (slave.mender.holes, slave.log.end_offset) == ((hole,), hole.end_offset)
    slave.chunks.append_chunk(hole.end_offset, master.chunks.read_chunk(hole.end_offset, 1 << 20))
    slave.show(slave.log.end_offset)
    assert intact_bodies(slave) == intact_bodies(master) == [*BODIES[:20], None, *BODIES[21:]]
    [damaged] = [row for row, body in enumerate(intact_bodies(slave)) if body is None]
    assert damaged == 20
    slave.close()
    master.close()


def test_a_hole_never_overwrites_anything_and_must_continue_the_log(tmp_path):
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    data, copy = master.chunks.read_hole(hole.offset, master.log.end_offset)
    before = killed_copy(tmp_path / "slave", tmp_path / "before")
    [unit] = copy.units
    wrong: list[tuple[int, bytes, HoleCopy]] = [
        (0, data, copy),
        (hole.offset - hole.size, data, copy),
        (hole.end_offset, data, copy),
        (hole.offset, b"", copy),
        (hole.offset, data * 1000, copy),
        (hole.offset, data, HoleCopy("", (unit._replace(physical_offset=0),))),
        (hole.offset, data, HoleCopy("", (unit, unit))),
    ]
    for offset, damaged, noted in wrong:
        with pytest.raises(InvalidArgumentError):
            slave.chunks.append_hole(offset, damaged, noted)
    assert (slave.mender.holes, slave.log.end_offset) == ((), hole.offset)
    log = min((tmp_path / "slave" / "commitlog").iterdir())
    assert log.read_bytes() == (before / "commitlog" / log.name).read_bytes()
    slave.chunks.append_hole(hole.offset, data, copy)
    assert slave.mender.holes == (hole,)
    slave.close()
    master.close()


def test_a_cut_before_a_hole_forgets_it_so_that_new_records_are_none(tmp_path):
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    slave.chunks.append_hole(hole.offset, *master.chunks.read_hole(hole.offset, master.log.end_offset))
    slave.close()
    assert truncate_log(small_settings(tmp_path / "slave"), hole.offset) == hole.size
    slave = open_slave(tmp_path)
    assert (slave.mender.holes, slave.log.end_offset) == ((), hole.offset)
    slave.append([make_batch([b"another"])])
    slave.close()
    slave = open_slave(tmp_path)
    assert slave.mender.holes == ()
    assert intact_bodies(slave) == [*BODIES[:20], b"another"]
    slave.close()
    master.close()


def copy_hole(master: MessageStore, slave: MessageStore, part_bytes: Callable[[], int], parts: int = 1 << 30) -> bool:
    """Copy a hole (damaged range) of the master's log to the slave, in at most `parts` parts. The hole begins at the
    end of the slave's log. Returns True if the slave then has the whole hole."""
    end = slave.log.end_offset
    for _ in range(parts):
        at = slave.chunks.append_offset
        slave.chunks.append_hole(at, *master.chunks.read_hole(at, master.log.end_offset, part_bytes()))
        if slave.log.end_offset > end:
            return True
        assert (slave.mender.holes, slave.chunks.append_offset > at) == ((), True)
    return False


@pytest.mark.parametrize("numbers", [range(20, 21), range(20, 24)], ids=["a record", "several records"])
def test_a_hole_is_copied_in_parts_of_any_size(tmp_path, numbers):
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    master, slave = hole_of_two_stores(tmp_path, numbers)
    assert copy_hole(master, slave, lambda: draw.choice([1, 7, 8, 91, draw.randrange(1, 400)]))
    [hole] = slave.mender.holes
    assert slave.mender.holes == master.mender.holes
    slave.chunks.append_chunk(hole.end_offset, master.chunks.read_chunk(hole.end_offset, 1 << 20))
    slave.show(slave.log.end_offset)
    assert intact_bodies(slave) == intact_bodies(master)
    assert intact_bodies(slave).count(None) == len(numbers)
    slave.close()
    slave = open_slave(tmp_path)
    assert (slave.mender.holes, intact_bodies(slave)) == (master.mender.holes, intact_bodies(master))
    slave.close()
    master.close()


@pytest.mark.parametrize("end", ["clean stop", "killed"])
def test_a_slave_that_stops_between_two_parts_begins_the_hole_again(tmp_path, end):
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    assert not copy_hole(master, slave, lambda: 50, parts=3)
    name = "slave"
    if end == "killed":
        name = killed_copy(tmp_path / "slave", tmp_path / "killed").name
    slave.close()
    assert not any(min((tmp_path / "slave" / "commitlog").iterdir()).read_bytes()[hole.offset :])
    slave = open_slave(tmp_path, name)
    assert (slave.mender.holes, slave.log.end_offset, slave.chunks.append_offset) == ((), hole.offset, hole.offset)
    assert copy_hole(master, slave, lambda: 50)
    assert slave.mender.holes == master.mender.holes
    slave.close()
    master.close()


def test_an_append_after_some_parts_of_a_hole_removes_these_parts(tmp_path):
    master, slave = hole_of_two_stores(tmp_path)
    assert not copy_hole(master, slave, lambda: 50, parts=4)
    slave.append([make_batch([b"x"])])  # The slave appends a message, as it does after it has become master.
    end = slave.log.end_offset
    assert not any(min((tmp_path / "slave" / "commitlog").iterdir()).read_bytes()[end:])
    assert (slave.mender.holes, slave.chunks.append_offset) == ((), end)
    slave.show(end)
    assert intact_bodies(slave) == [*BODIES[:20], b"x"]
    slave.close()
    master.close()


def test_a_hole_that_is_mended_on_the_master_while_it_is_copied_is_copied_as_records(tmp_path):
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    assert not copy_hole(master, slave, lambda: 50, parts=3)
    at = slave.chunks.append_offset
    master.mender.mend(hole.offset, good_record(master, hole))
    with pytest.raises(InvalidArgumentError, match="no damaged range"):
        master.chunks.read_hole(at, master.log.end_offset)
    slave.chunks.append_chunk(hole.offset, master.chunks.read_chunk(hole.offset, 1 << 20))
    slave.show(slave.log.end_offset)
    assert (slave.mender.holes, intact_bodies(slave)) == ((), BODIES)
    slave.close()
    master.close()


def good_record(master: MessageStore, hole: Hole) -> bytes:
    """Return the intact bytes of the record that forms a hole (damaged range of the log). The test has changed the
    first byte of the record's body."""
    data = bytearray(master.chunks.read_hole(hole.offset, master.log.end_offset)[0])
    data[data.index(bytes([BODIES[20][0] ^ 1]) + BODIES[20][1:])] ^= 1
    return bytes(data)


def test_a_part_may_come_twice_and_another_one_in_its_place_starts_the_hole_again(tmp_path):
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    assert not copy_hole(master, slave, lambda: 50, parts=3)
    end = slave.chunks.append_offset
    for at in (hole.offset, hole.offset + 50, hole.offset + 60):
        slave.chunks.append_hole(at, *master.chunks.read_hole(at, master.log.end_offset, 50))
        assert slave.chunks.append_offset == end
    data, copy = master.chunks.read_hole(hole.offset + 50, master.log.end_offset, 50)
    with pytest.raises(InvalidArgumentError, match="changed on the master"):
        slave.chunks.append_hole(hole.offset + 50, bytes(50), copy)
    assert slave.chunks.append_offset == hole.offset
    with pytest.raises(InvalidArgumentError, match=f"the log ends at physical offset {hole.offset}"):
        slave.chunks.append_hole(hole.offset + 50, data, copy)
    assert copy_hole(master, slave, lambda: 50)
    assert slave.mender.holes == master.mender.holes
    slave.close()
    master.close()


def test_a_replica_that_got_a_hole_passes_on_units_that_consumers_do_not_see_yet(tmp_path):
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    assert copy_hole(master, slave, lambda: 1 << 20)
    passed_on = slave.chunks.read_hole(hole.offset, slave.log.end_offset)
    assert passed_on == master.chunks.read_hole(hole.offset, master.log.end_offset)
    assert [unit.queue_offset for unit in passed_on[1].units] == [20]
    slave.close()
    master.close()


def test_an_offset_without_a_unit_leads_to_the_damaged_record_before_it_until_that_is_mended(tmp_path):
    """A slave may copy a hole (damaged range of the log) without its consume-queue entry. The master's entry may be
    wrong and point to another record. A read of this offset from the slave returns the damaged record, and after the
    repair the intact record."""
    master, slave = hole_of_two_stores(tmp_path)
    [hole] = master.mender.holes
    data, copy = master.chunks.read_hole(hole.offset, master.log.end_offset)
    slave.chunks.append_hole(hole.offset, data, replace(copy, units=()))
    slave.chunks.append_chunk(hole.end_offset, master.chunks.read_chunk(hole.end_offset, 1 << 20))
    slave.show(slave.log.end_offset)
    assert intact_bodies(slave) == [*BODIES[:20], None, *BODIES[21:]]
    slave.mender.mend(hole.offset, good_record(master, hole))
    assert intact_bodies(slave) == BODIES
    slave.close()
    master.close()
