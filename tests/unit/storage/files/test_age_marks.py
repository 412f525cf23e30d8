"""Tests of the age clock of a store, over restarts of the process and of the machine, and of the marks of its log."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from storage.files.age_marks import AGES_FILE, AgeMarks, Elapsed, machine_elapsed
from storage.files.config_files import ConfigFiles

HOUR_MS = 3_600_000


class Machine:
    """A machine with a store. `ages` is the age clock of the store's process."""

    def __init__(self, root: Path) -> None:
        self.boot, self.ms, self.log_end = "first", 50, 0
        self.config = ConfigFiles(root)
        self.restart()

    def elapsed(self) -> Elapsed:
        return Elapsed(self.boot, self.ms)

    def restart(self) -> None:
        self.ages = AgeMarks(self.config, self.log_end, self.elapsed)
        self.ages.save_if_cut(0)
        self.ages.save_if_due(0)

    def passes(self, ms: int, log_bytes: int = 0) -> None:
        self.ms += ms
        self.log_end += log_bytes
        self.ages.observe(self.log_end)
        self.ages.save_if_due(0)


@pytest.fixture
def machine(tmp_path: Path, no_flushes: None) -> Machine:
    return Machine(tmp_path)


def test_the_log_is_old_once_it_has_been_in_the_store_for_the_time(machine: Machine) -> None:
    machine.passes(0, 100)
    machine.passes(HOUR_MS - 1)
    assert machine.ages.old_until(HOUR_MS) == 0
    machine.passes(1)
    assert machine.ages.old_until(HOUR_MS) == 100
    assert machine.ages.old_until(0) == 100
    machine.passes(30_000, 100)
    assert machine.ages.old_until(HOUR_MS) == 100
    machine.passes(HOUR_MS)
    assert machine.ages.old_until(HOUR_MS) == 200


def test_the_age_clock_continues_in_a_new_process(machine: Machine) -> None:
    machine.passes(60_000, 100)
    machine.ms += HOUR_MS
    machine.restart()
    assert machine.ages.old_until(HOUR_MS) == 100
    assert machine.ages.old_until(HOUR_MS + 1) == 0


def test_the_time_between_two_boots_does_not_count(machine: Machine) -> None:
    machine.passes(60_000, 100)
    machine.boot, machine.ms = "second", 100 * HOUR_MS
    machine.restart()
    machine.passes(HOUR_MS - 1)
    assert machine.ages.old_until(HOUR_MS) == 0
    machine.passes(1)
    assert machine.ages.old_until(HOUR_MS) == 100


@pytest.mark.parametrize("boot", ["", "first"])
def test_a_machine_without_a_boot_id_or_with_a_clock_that_went_back_counts_only_each_process(
    machine: Machine, boot: str
) -> None:
    machine.boot = boot
    machine.passes(60_000, 100)
    machine.ms = 10
    machine.restart()
    assert machine.ages.old_until(60_001) == 0


def test_marks_after_the_log_was_cut_are_dropped_at_once(machine: Machine) -> None:
    machine.passes(60_000, 100)
    machine.passes(60_000, 100)
    machine.log_end = 150
    machine.restart()
    machine.log_end = 400
    machine.restart()
    machine.passes(60_000)
    assert machine.ages.old_until(60_000) == 100
    machine.passes(60_000)
    assert machine.ages.old_until(60_000) == 400


def test_a_log_without_marks_is_judged_by_its_times_only(tmp_path: Path) -> None:
    ages = AgeMarks(ConfigFiles(tmp_path), 1000, lambda: Elapsed("first", 5))
    assert ages.old_until(HOUR_MS) == 1000
    ages.observe(2000)
    assert ages.old_until(HOUR_MS) == 1000


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"boot": "first", "elapsedMs": 1, "ageMs": 2, "marks": [[1]]}'])
def test_a_damaged_file_makes_all_records_new(machine: Machine, text: str) -> None:
    machine.passes(100 * HOUR_MS, 100)
    for name in (AGES_FILE, f"{AGES_FILE}.bak"):
        (machine.config.directory / name).write_text(text)
    machine.restart()
    assert machine.ages.old_until(0) == 0
    machine.passes(HOUR_MS)
    assert machine.ages.old_until(HOUR_MS) == 0
    machine.passes(HOUR_MS)
    assert machine.ages.old_until(HOUR_MS) == 100


def test_few_marks_remain_and_no_record_counts_as_older_than_it_is(machine: Machine) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    written: list[tuple[int, int]] = []
    for _ in range(1500):
        machine.passes(dice.choice((1, 200, 10_000, 60_000)), 10)
        written.append((machine.ms, machine.log_end))
        if dice.random() < 0.01:
            machine.restart()
    machine.passes(60_000, 10)
    written.append((machine.ms, machine.log_end))
    assert len(machine.ages._marks) < 500
    for age_ms in (0, 1000, 60_000, HOUR_MS, 3 * HOUR_MS, 6 * HOUR_MS):
        found = machine.ages.old_until(age_ms)
        exact = max([end for at_ms, end in written if at_ms <= machine.ms - age_ms], default=0)
        late = max([end for at_ms, end in written if at_ms <= machine.ms - age_ms * 33 / 32 - 150_000], default=0)
        assert late <= found <= exact


def test_marks_of_deleted_records_are_dropped(machine: Machine) -> None:
    for _ in range(5):
        machine.passes(60_000, 100)
    machine.ms += 60_000
    machine.ages.observe(600)
    machine.ages.save_if_due(300)
    assert [mark.end for mark in machine.ages._marks] == [400, 500, 600]


def test_the_clock_of_this_machine_advances_within_one_boot() -> None:
    before, after = machine_elapsed(), machine_elapsed()
    assert before.boot == after.boot
    assert 0 < before.ms <= after.ms
