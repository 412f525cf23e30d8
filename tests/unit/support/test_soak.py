"""Tests of the pieces of the soak test: its audit finds every kind of violation, and its rules find a process that
grows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from tests.support.cases import check_all
from tests.support.soak.audit import Audit, ReadRows
from tests.support.soak.clients import bodies_of, rows_of
from tests.support.soak.minutes import HEADINGS, Minute, as_text, rate_changes, save, size_changes
from tests.support.soak.number_set import BLOCK, NumberSet
from tests.support.soak.readings import READINGS_MIN, SERVERS, WARM_S, Reading, growths, leaks

MINUTE_S = 60.0


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def rows(*places: tuple[int, int, int, int]) -> ReadRows:
    """Return rows, each a queue id, an offset, a producer and a sequence number."""
    columns = np.array(places, np.int64).reshape(-1, 4).T
    return ReadRows(*columns, np.zeros(len(places)))


def test_a_number_set_equals_a_set_of_python() -> None:
    rng = random.Random(7)
    ours, theirs = NumberSet(), set[int]()
    for _ in range(30):
        first, count = rng.randrange(3 * BLOCK), rng.randrange(1, BLOCK)
        added = [*range(first, first + count), first, *rng.sample(range(4 * BLOCK), 100)]
        new = ours.add(np.array(added, np.int64))
        assert sorted(np.array(added)[new].tolist()) == sorted(set(added) - theirs)
        theirs |= set(added)
        assert (len(ours), ours.end) == (len(theirs), max(theirs) + 1)
    other = NumberSet()
    other.add(np.arange(BLOCK, 2 * BLOCK, dtype=np.int64))
    assert ours.missing_in(other).tolist() == sorted(theirs - set(range(BLOCK, 2 * BLOCK)))
    assert ours.missing_in(ours).tolist() == []


def test_a_complete_block_needs_no_flags() -> None:
    ours = NumberSet()
    ours.add(np.arange(3 * BLOCK + 5, dtype=np.int64))
    assert len(ours._partial) == 1
    assert ours.add(numbers(0, BLOCK, 3 * BLOCK + 5)).tolist() == [False, False, True]


def test_an_audit_accepts_repeated_reads_and_sends_without_an_answer() -> None:
    audit = Audit()
    audit.add_acknowledged(0, 0, 3)
    assert audit.add_read(rows((0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 2), (1, 1, 5, 0))) == 4
    assert audit.add_read(rows((0, 1, 0, 1), (1, 0, 0, 2))) == 0
    verdict = audit.verdict()
    assert verdict.violations == {}
    assert (verdict.acknowledged, verdict.stored, verdict.repeated) == (3, 4, 2)


def test_an_audit_finds_each_kind_of_violation() -> None:
    good = [(0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 0, 2)]
    cases: list[tuple[dict[str, int], list[Sequence[tuple[int, int, int, int]]]]] = [
        ({"lost": 1}, [good[:2]]),
        ({"stored_twice": 1}, [good, [(0, 3, 0, 1)]]),
        ({"stored_twice": 1}, [[*good, (1, 0, 0, 2)]]),
        ({"changed": 1}, [good, [(0, 1, 7, 7)]]),
        ({"skipped": 1, "lost": 1}, [[good[0], good[2]]]),
    ]

    def check(case: tuple[dict[str, int], list[Sequence[tuple[int, int, int, int]]]]) -> None:
        expected, reads = case
        audit = Audit()
        audit.add_acknowledged(0, 0, 3)
        for read in reads:
            audit.add_read(rows(*read))
        verdict = audit.verdict()
        assert verdict.violations == expected
        assert verdict.examples or expected == {"skipped": 1}

    check_all(cases, check)


@pytest.mark.parametrize("count", [1, 700])
def test_bodies_return_as_rows(count: int) -> None:
    due_ns = np.arange(count, dtype=np.int64) * 1_000_000
    sent = bodies_of(3, 40, due_ns, b"filler")
    assert {len(body) for body in sent["body"].to_pylist()} == {24 + 6}
    stored = sent.cast(pa.schema({"body": pa.binary()}))
    table = pa.concat_tables([stored[: count // 2], stored[count // 2 :]])
    table = table.append_column("queue_id", pa.array([2] * count, pa.int32()))
    table = table.append_column("queue_offset", pa.array(range(count), pa.int64()))
    read = rows_of(table, 5_000_000_000)
    assert read.queue_ids.tolist() == [2] * count
    assert read.offsets.tolist() == list(range(count))
    assert set(read.producers.tolist()) == {3}
    assert read.sequences.tolist() == list(range(40, 40 + count))
    assert read.latencies_ms[0] == 5000.0


def reading(kind: str, pid: int, age_s: float, memory_mib: float = 100.0, descriptors: int = 50) -> Reading:
    return Reading(kind, pid, age_s, memory_mib, memory_mib + 10, descriptors, 20, 300)


def life(**values: Sequence[float]) -> list[list[Reading]]:
    """Return the readings of a process in consecutive minutes; each argument is a measure and its values."""
    count = len(next(iter(values.values())))
    return [
        [
            reading("Storage", 9, WARM_S + minute * MINUTE_S)._replace(
                **{name: one[minute] for name, one in values.items()}
            )
        ]
        for minute in range(count)
    ]


def test_a_process_that_grows_is_found() -> None:
    minutes = 3 * READINGS_MIN
    steady = [100.0 + minute % 3 for minute in range(minutes)]
    growing = [100.0 + minute for minute in range(minutes)]
    outlier = [*steady[:-1], 500.0]

    def excessive(**values: Sequence[float]) -> list[str]:
        return [one.measure for one in growths(life(**values)) if one.excessive]

    assert excessive(memory_mib=steady) == []
    assert excessive(memory_mib=outlier) == []
    assert excessive(memory_mib=growing) == ["memory_mib"]
    assert excessive(descriptors=growing) == ["descriptors"]
    assert excessive(threads=[20 + minute for minute in range(minutes)]) == ["threads"]
    assert growths(life(memory_mib=growing[: READINGS_MIN - 1])) == []


def test_a_young_process_may_grow() -> None:
    young = [[reading("Broker", 1, minute * 5.0, 50.0 + minute)] for minute in range(20)]
    assert growths(young) == []


def test_a_leak_of_descriptors_or_processes_is_named() -> None:
    before = [reading("Storage", 1, 10.0), reading("Storage", 2, 10.0, descriptors=70), reading("Broker", 3, 10.0)]
    assert leaks(before, [one._replace(pid=one.pid + 10) for one in before], {"descriptors": 8}) == []
    [sentence] = leaks(before, [*before[:2], reading("Broker", 8, 1.0, descriptors=90)], {"descriptors": 8})
    assert sentence == "Broker (8) has 90 descriptors, at most 50 before"
    assert leaks(before, [*before, reading("Broker", 4, 1.0)], {}) == ["2 processes of Broker, 1 before"]


def minute(number: int, *, sent: int = 1200, descriptors: int = 50, pid: int = 1) -> Minute:
    processes = (reading("Storage", pid, number * MINUTE_S, descriptors=descriptors),)
    return Minute(number, MINUTE_S, sent, sent, (1.0, 2.0), (3.0, 4.0), 5, 0, "broker", 6.0, 7.0, processes)


def test_the_first_minutes_are_compared_with_the_last_ones() -> None:
    run = [minute(number) for number in range(30)]
    assert set(rate_changes(run).values()) | set(size_changes(run).values()) == {0.0}
    slower = [*run[:20], *(minute(number, sent=900, descriptors=60) for number in range(20, 30))]
    assert rate_changes(slower)["sent/s"] == pytest.approx(-0.25)
    assert size_changes(slower)["descriptors"] == pytest.approx(0.2)
    assert size_changes(slower)["memory_mib"] == 0.0


def test_the_report_has_a_row_for_each_minute(tmp_path) -> None:
    run = [minute(number) for number in range(4)]
    lines = as_text(run).splitlines()
    assert len(lines) == 5
    assert len(run[0].cells()) == len(HEADINGS)
    save(tmp_path / "report.json", {"seed": 3}, run, growths(one.processes for one in run))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["seed"], len(report["minutes"])) == (3, 4)
    assert report["minutes"][0]["processes"][0]["kind"] in SERVERS
