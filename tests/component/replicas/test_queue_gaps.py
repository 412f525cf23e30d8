"""Tests of a slave that copies a log whose queues have gaps or repeated offsets. The slave builds the same
consume-queue entries (units) as its master."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.records.format.layout import BODY_OFFSET, QUEUE_OFFSET_OFFSET
from raymq.records.logfiles.log_reader import PRE_BLANK_SIZE
from storage.message_store import MessageStore
from tests.support.replicas.local_replicas import PATIENT, LocalReplicas, filled_groups, settle_append
from tests.support.stores.stores import make_batch

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number + b"x" * 100 for number in range(100)]
MADE_AGAIN = ("consumequeue", "dedup", "index", "index.sums")
"""Files and directories that a store rebuilds from its log."""
NEW = 2

Change = Callable[[bytearray], None]


def set_offset(log: bytearray, number: int, queue_offset: int) -> None:
    at = log.index(BODIES[number]) - BODY_OFFSET + QUEUE_OFFSET_OFFSET
    log[at : at + 8] = queue_offset.to_bytes(8)


def genuine_gap(log: bytearray) -> None:
    """Change the log so that the queue's offsets skip five numbers in the middle. The log never had records with these
    offsets."""
    for number in range(40, len(BODIES)):
        set_offset(log, number, number + 5)


def gap_after_few(log: bytearray) -> None:
    """Change the log so that the queue's offsets skip five numbers. The gap is so near to the log's end that the
    records after it are read one by one."""
    for number in range(95, len(BODIES)):
        set_offset(log, number, number + 5)


def gap_beside_a_hole(log: bytearray) -> None:
    """Change the log so that the queue's offsets skip five numbers, and damage the record before the gap. The damaged
    range is too small for five records."""
    genuine_gap(log)
    at = log.index(BODIES[39]) - BODY_OFFSET
    log[at : at + BODY_OFFSET] = b"\xaa" * BODY_OFFSET


def gap_and_damage(log: bytearray) -> None:
    """Change the log so that the queue's offsets skip five numbers, and damage two later records."""
    genuine_gap(log)
    for number in (50, 51):
        at = log.index(BODIES[number]) - BODY_OFFSET
        log[at : at + BODY_OFFSET] = b"\xaa" * BODY_OFFSET


def offsets_twice(log: bytearray) -> None:
    """Change the log so that two ranges of records have the same queue offsets, as in a log that was put together from
    two logs."""
    for number in range(40, len(BODIES)):
        set_offset(log, number, number - 13)


CHANGES = [genuine_gap, gap_after_few, gap_beside_a_hole, gap_and_damage, offsets_twice]


def change_log(directory: Path, change: Change) -> None:
    """Change the log of a closed store with `change`. Delete all files that the store rebuilds from the log."""
    path = min((directory / "commitlog").iterdir())
    log = bytearray(path.read_bytes())
    change(log)
    path.write_bytes(log)
    for name in MADE_AGAIN:
        lost = directory / name
        if lost.is_dir():
            shutil.rmtree(lost)
        else:
            lost.unlink(missing_ok=True)


def units_of(store: MessageStore) -> list[tuple[int, ...]]:
    """Return the consume-queue entries (units) of queue 0. Of a PRE_BLANK entry only the size is returned; its other
    fields are set to zero."""
    queue = store._parts.queues.get_plain("orders", 0)
    assert queue is not None
    units: list[tuple[int, ...]] = []
    while len(units) < queue.next_offset:
        units += [tuple(map(int, unit)) for unit in queue.units(len(units), 1024)]
    return [unit if unit[1] != PRE_BLANK_SIZE else (0, PRE_BLANK_SIZE, 0) for unit in units]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_new_replica_follows_a_master_whose_queue_has_gaps_and_has_the_same_units(tmp_path, change):
    with filled_groups(tmp_path, BODIES) as make:
        group: LocalReplicas = make(3, replace(PATIENT, hole_wait_s=0.0))
        group.close(NEW)
        group.master._sync.silent(frozenset({NEW}))
        group.control(4)
        for name in (0, 1):
            group.close(name)
            change_log(group.directory(name), change)
        group.control_state._accounts.clear()
        shutil.rmtree(group.directory(NEW))
        for name in sorted(group.names):
            group.open(name)
        group.settle()
        assert group.control_state.record.sync_state_set.members == group.names
        settle_append(group, make_batch([b"new"]))
        group.settle()
        for _ in range(2):
            expected = units_of(group.master.any_store)
            assert len(expected) >= 88
            assert [units_of(replica.any_store) == expected for replica in group.replicas.values()] == [True] * 3
            for name in sorted(group.names):
                group.close(name)
            group.control_state._accounts.clear()
            for name in sorted(group.names):
                group.open(name)
            group.settle()
