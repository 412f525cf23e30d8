"""Tests of the periodic verification of an open store's log: what it finds, how fast it reads, and that its progress
survives a restart. The clocks are the tests' own, and no thread runs."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from raymq.common.errors import ServiceNotAvailableError, StoreNotWritableError
from raymq.common.protocol.store import ScrubStatus
from raymq.records.format.walk import walk_records
from storage.files import disk
from storage.message_store import MessageStore
from storage.scrub import log_section, scrubber
from storage.scrub.log_section import LogSection
from storage.scrub.pace import CPU_SHARE_MAX, RATE_MIN_BYTES, SCRUB_HOUR_MS
from storage.scrub.progress import SCRUB_FILE
from storage.scrub.scrubber import SAVE_INTERVAL_S, SCRUB_IDLE_S, SCRUB_RETRY_S, Scrubber
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import LOG_FILE_BYTES, killed_copy, make_batch, open_store, placed_bodies

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number + b"x" * (number % 300) for number in range(700)]
WEEK_HOURS = 168
START_MS = 1_800_000_000_000
PART_BYTES = 20_000


class Clocks:
    """The clocks of a scrubber: the wall clock, the monotonic clock, and the processor time of its thread."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.cpu_used_s = 0.0

    def ms(self) -> int:
        return START_MS + int(self.now_s * 1000)

    def s(self) -> float:
        return self.now_s

    def cpu_s(self) -> float:
        return self.cpu_used_s


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageStore]:
    """Yield an open store with BODIES in one queue and several log files. A step reads PART_BYTES."""
    monkeypatch.setattr(log_section, "PART_BYTES", PART_BYTES)
    opened = open_store(root)
    try:
        for body in BODIES:
            opened.append([make_batch([body])])
        yield opened
    finally:
        opened.close()


def scrubber_of(store: MessageStore, clocks: Clocks) -> Scrubber:
    """Return a scrubber of an open store's log with the clocks of a test."""
    parts = store._parts
    sections = [LogSection(parts, store.inspector)]
    return Scrubber(parts, store.gate, sections, clock_ms=clocks.ms, clock_s=clocks.s, cpu_s=clocks.cpu_s)


def run(scrubber: Scrubber, clocks: Clocks, until_completed: int) -> list[float]:
    """Call `tick` until this many verifications are complete, and let the pauses pass on the clock. Returns the
    pauses."""
    pauses = []
    while scrubber.status().completed < until_completed:
        pauses.append(scrubber.tick())
        clocks.now_s += pauses[-1]
        assert len(pauses) < 10_000
    return pauses


def records_of(root: Path, end: int) -> list[int]:
    """Return the physical offset of each record of a log that begins at offset 0."""
    data = b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))[:end]
    return [
        start + at
        for start in range(0, len(data), LOG_FILE_BYTES)
        for at in walk_records(data[start : start + LOG_FILE_BYTES]).starts.tolist()
    ]


def found(status: ScrubStatus) -> tuple[int, int]:
    return status.found, status.repaired


def test_an_intact_log_is_read_once_and_nothing_is_found(store, clocks):
    scrubber = scrubber_of(store, clocks)
    run(scrubber, clocks, 1)
    status = scrubber.status()
    assert found(status) == (0, 0)
    assert status.read_bytes == status.checked_bytes == status.total_bytes == store.log.end_offset
    assert not status.running
    assert not status.overdue
    # The next verification begins one period after the beginning of the first one.
    assert scrubber.tick() == SCRUB_IDLE_S
    clocks.now_s += WEEK_HOURS * 3600
    assert scrubber.tick() < SCRUB_IDLE_S
    assert scrubber.status().running


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_in_any_file_becomes_a_hole_and_intact_bytes_repair_it(store, root, clocks, field):
    log = b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))
    offsets = records_of(root, store.log.end_offset)
    by_file = [[one for one in offsets if one // LOG_FILE_BYTES == number] for number in range(3)]
    assert all(by_file)
    random.seed(seed := random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed}")
    damaged = [random.choice(by_file[0]), random.choice(by_file[1]), random.choice(by_file[2])]
    for offset in damaged:
        flip(root, offset, field)
    scrubber = scrubber_of(store, clocks)
    run(scrubber, clocks, 1)
    assert [hole.offset for hole in store.mender.holes] == sorted(damaged)
    assert found(scrubber.status()) == (3, 0)
    # A further verification does not count the known damage again.
    scrubber.verify_now()
    run(scrubber, clocks, 2)
    assert found(scrubber.status()) == (0, 0)
    assert scrubber.status().found_ever == 3
    for hole in store.mender.holes:
        store.mender.mend(hole.offset, log[hole.offset : hole.end_offset])
    assert scrubber.status().repaired_ever == 3
    assert placed_bodies(store) == BODIES


def test_damage_that_another_replica_repairs_counts_as_repaired(store, root, clocks):
    log = b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))
    offsets = records_of(root, store.log.end_offset)
    flip(root, offsets[100], "body")
    flip(root, offsets[200], "body")
    scrubber = scrubber_of(store, clocks)
    run(scrubber, clocks, 1)
    first, second = store.mender.holes
    store.mender.mend(first.offset, log[first.offset : first.end_offset])
    assert found(scrubber.status()) == (2, 1)
    store.mender.mend(second.offset, log[second.offset : second.end_offset])
    assert found(scrubber.status()) == (2, 2)


def test_the_last_record_of_the_written_log_is_checked_too(store, root, clocks):
    last = records_of(root, store.log.end_offset)[-1]
    flip(root, last, "body")
    run(scrubber := scrubber_of(store, clocks), clocks, 1)
    assert [hole.offset for hole in store.mender.holes] == [last]
    # The store still takes messages, and they are after the damage.
    store.append([make_batch([b"later"])])
    assert placed_bodies(store) == [*BODIES[:-1], None, b"later"]
    assert scrubber.status().found == 1


def test_a_wrong_queue_entry_is_rewritten_at_once(store, root, clocks):
    path = root / "consumequeue/orders/0/00000000000000002000"
    data = bytearray(path.read_bytes())
    data[20 * 7 + 5] ^= 0x10
    path.write_bytes(data)
    run(scrubber := scrubber_of(store, clocks), clocks, 1)
    assert found(scrubber.status()) == (1, 1)
    assert store.mender.holes == ()
    assert placed_bodies(store) == BODIES


def test_the_background_never_reads_faster_than_its_rate(store, clocks):
    store._settings.scrub_rate_max_bytes = 1 << 16
    began_s = clocks.now_s
    run(scrubber_of(store, clocks), clocks, 1)
    assert store.log.end_offset / (clocks.now_s - began_s) <= 1 << 16


def test_a_small_store_is_read_at_the_minimum_rate(store, clocks):
    began_s = clocks.now_s
    run(scrubber_of(store, clocks), clocks, 1)
    assert store.log.end_offset / (clocks.now_s - began_s) == pytest.approx(RATE_MIN_BYTES, rel=0.01)


def test_costly_checks_keep_their_share_of_processor_time(store, clocks, monkeypatch):
    scrubber = scrubber_of(store, clocks)
    step = scrubber._sections["log"].step

    def costly(position: str) -> object:
        clocks.cpu_used_s += 0.5
        clocks.now_s += 0.5
        return step(position)

    monkeypatch.setattr(scrubber._sections["log"], "step", costly)
    began_s = clocks.now_s
    run(scrubber, clocks, 1)
    assert clocks.cpu_used_s / (clocks.now_s - began_s) <= CPU_SHARE_MAX * 1.001


def test_a_verification_by_command_has_no_pauses_and_replaces_a_running_one(store, clocks):
    scrubber = scrubber_of(store, clocks)
    scrubber.tick()
    assert scrubber.status().running
    assert not scrubber.status().full_speed
    number = scrubber.verify_now()
    assert scrubber.status().full_speed
    assert scrubber.verify_now() == number == 1
    scrubber.tick()
    assert scrubber.status().checked_bytes < 2 * PART_BYTES
    assert scrubber.verify_now() == number
    assert set(run(scrubber, clocks, number)) == {0.0}
    status = scrubber.status()
    assert not status.full_speed
    assert not status.running
    assert status.checked_bytes == store.log.end_offset


def test_with_period_0_only_a_command_verifies(store, clocks):
    store._settings.scrub_period_hours = 0
    scrubber = scrubber_of(store, clocks)
    clocks.now_s += 10 * WEEK_HOURS * 3600
    assert scrubber.tick() == SCRUB_IDLE_S
    assert not scrubber.status().running
    assert not scrubber.status().overdue
    scrubber.verify_now()
    run(scrubber, clocks, 1)
    assert scrubber.tick() == SCRUB_IDLE_S


def test_a_restarted_process_continues_where_the_last_one_stopped(store, root, clocks):
    first = scrubber_of(store, clocks)
    for _ in range(4):
        clocks.now_s += first.tick()
    before = first.status()
    assert 0 < before.checked_bytes < store.log.end_offset
    first.close()
    second = scrubber_of(store, clocks)
    assert second.status().checked_bytes == before.checked_bytes
    run(second, clocks, 1)
    assert second.status().read_bytes == store.log.end_offset - before.checked_bytes
    second.close()
    assert scrubber_of(store, clocks).status().completed == 1


def test_a_killed_process_repeats_at_most_the_checks_since_the_last_save(store, root, clocks, tmp_path):
    scrubber = scrubber_of(store, clocks)
    while scrubber.status().checked_bytes < 5 * PART_BYTES:
        clocks.now_s += max(scrubber.tick(), SAVE_INTERVAL_S)
    copy = killed_copy(root, tmp_path / "copy")
    opened = open_store(copy)
    try:
        resumed = scrubber_of(opened, clocks).status()
        assert scrubber.status().checked_bytes - resumed.checked_bytes <= 2 * PART_BYTES
    finally:
        opened.close()


@pytest.mark.parametrize("text", [b"", b"00000000\n{}", b"not a checksum", b"\xff" * 100])
def test_a_damaged_or_missing_progress_file_only_begins_anew(store, root, clocks, text):
    run(scrubber_of(store, clocks), clocks, 1)
    assert json.loads((root / SCRUB_FILE).read_bytes().partition(b"\n")[2])["completed"] == 1
    (root / SCRUB_FILE).write_bytes(text)
    scrubber = scrubber_of(store, clocks)
    assert scrubber.status() == ScrubStatus()
    run(scrubber, clocks, 1)
    assert found(scrubber.status()) == (0, 0)


def test_each_flipped_bit_of_the_progress_file_is_noticed(store, root, clocks):
    run(scrubber_of(store, clocks), clocks, 1)
    data = (root / SCRUB_FILE).read_bytes()
    for at in range(len(data)):
        (root / SCRUB_FILE).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert scrubber_of(store, clocks).status().completed == 0


def test_an_unreadable_sector_is_reported_and_the_other_files_are_checked(store, root, clocks, monkeypatch):
    offsets = records_of(root, store.log.end_offset)
    behind = next(offset for offset in offsets if offset >= 2 * LOG_FILE_BYTES)
    flip(root, behind, "body")
    bad = (root / "commitlog" / f"{LOG_FILE_BYTES:020}").stat().st_ino
    pread = disk.pread

    def reading(descriptor: int, size: int, position: int) -> bytes:
        if disk.os.fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, size, position)

    monkeypatch.setattr(disk, "pread", reading)
    scrubber = scrubber_of(store, clocks)
    run(scrubber, clocks, 1)
    status = scrubber.status()
    [text] = status.unrepaired
    assert f"{LOG_FILE_BYTES:020} cannot be read from byte 0 on" in text
    assert found(status) == (2, 0)
    assert [hole.offset for hole in store.mender.holes] == [behind]
    assert not store.gate.failure


def test_damage_that_cannot_be_recorded_is_found_again_later(store, root, clocks, monkeypatch):
    flip(root, records_of(root, store.log.end_offset)[0], "body")
    scrubber = scrubber_of(store, clocks)
    with monkeypatch.context() as patch:

        def refuse(physical_offset: int, end_offset: int) -> object:
            raise StoreNotWritableError("the disk is full")

        patch.setattr(store.inspector, "inspect", refuse)
        assert scrubber.tick() == SCRUB_RETRY_S
        assert scrubber.status().error == "the disk is full"
    run(scrubber, clocks, 1)
    assert scrubber.status().error == ""
    assert scrubber.status().found == 1


def test_files_that_retention_deletes_are_skipped(store, root, clocks):
    scrubber = scrubber_of(store, clocks)
    clocks.now_s += scrubber.tick()
    with store._parts.append_lock:
        for path in store.log.drop_files_before(2 * LOG_FILE_BYTES):
            path.unlink()
    run(scrubber, clocks, 1)
    assert found(scrubber.status()) == (0, 0)


def test_the_age_of_the_last_verification_survives_a_restart(store, root, clocks):
    scrubber = scrubber_of(store, clocks)
    scrubber.tick()
    scrubber.close()
    clocks.now_s += 2 * WEEK_HOURS * 3600
    late = scrubber_of(store, clocks)
    assert late.status().overdue
    run(late, clocks, 1)
    # This verification began two weeks ago, so it is as old as that.
    assert late.status().overdue
    assert late.status().completed_ms == pytest.approx(clocks.ms(), abs=SCRUB_HOUR_MS)
    clocks.now_s += 1
    run(late, clocks, 2)
    assert not late.status().overdue


def test_a_closed_store_ends_the_verification(store, clocks):
    scrubber = scrubber_of(store, clocks)
    store.close()
    with pytest.raises(ServiceNotAvailableError):
        scrubber.tick()


def test_the_thread_verifies_by_command_and_ends_with_the_store(store, root):
    flip(root, records_of(root, store.log.end_offset)[0], "body")
    number = store.scrubber.verify_now()
    while store.scrubber.status().completed < number:
        assert store.scrubber._thread is not None
        assert store.scrubber._thread.is_alive()
        store.scrubber._thread.join(0.01)
    assert found(store.status().scrub) == (1, 0)
    store.close()
    assert not store.scrubber._thread.is_alive()


def test_a_fault_of_a_check_does_not_end_the_thread(store, clocks, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(scrubber, "SCRUB_RETRY_S", 0.0)

    def fail(position: str) -> object:
        calls.append(position)
        raise ZeroDivisionError("a fault")

    section = store.scrubber._sections["log"]
    with monkeypatch.context() as patch:
        patch.setattr(section, "step", fail)
        number = store.scrubber.verify_now()
        while len(calls) < 3:
            store.scrubber._thread.join(0.01)
    while store.scrubber.status().completed < number:
        store.scrubber._thread.join(0.01)


def test_a_checkpoint_that_is_damaged_before_its_first_change_is_written_again(store, root):
    store.close()
    store = open_store(root)
    checkpoint = root / "checkpoint"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert store._checkpoints.damaged_files() == [checkpoint]
    store._checkpoints.rewrite()
    assert store._checkpoints.damaged_files() == []
    store.close()


def test_records_are_adjacent_in_the_log_of_these_tests(store, root):
    assert len(records_of(root, store.log.end_offset)) == len(BODIES)
    assert all(first < second for first, second in pairwise(records_of(root, store.log.end_offset)))
