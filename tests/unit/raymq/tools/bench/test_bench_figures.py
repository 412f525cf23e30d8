"""Tests of the pure parts of `raymq bench`: percentiles, the plan, the schedule, the loops and the table. The loops
have a clock by hand."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message
from raymq.tools.bench.latencies import percentile, summarize
from raymq.tools.bench.plan import (
    TIME_SHARES,
    BenchOptions,
    BenchPhase,
    PhaseLimit,
    SendSchedule,
    due_ns_of,
    plan_run,
    stamped_body,
)
from raymq.tools.bench.report import BENCH_COLUMNS, BenchReport, bench_lines, bench_rows, bench_value
from raymq.tools.bench.run import PhaseResult
from raymq.tools.bench.surroundings import BrokerSetup, DiskFigures, MachineFigures
from raymq.tools.bench.workload import PhaseLoop, Tally


def test_a_percentile_is_the_least_value_that_enough_values_do_not_exceed() -> None:
    values = [float(number) for number in range(1, 1001)]
    assert [percentile(values, percent) for percent in (50, 99, 99.9, 100)] == [500, 990, 999, 1000]
    assert [percentile([7.0], percent) for percent in (50, 99.9)] == [7, 7]
    assert percentile([1.0, 2.0], 50) == 1, "a percentile is no mean of two values"


def test_the_latencies_of_all_threads_have_common_percentiles() -> None:
    fast, slow = array("d", [0.001] * 990), array("d", [0.1] * 9 + [2.5])
    found = summarize([fast, array("d"), slow])
    assert found is not None
    assert [round(value, 6) for value in found] == [1, 1, 100, 2500]
    assert summarize([array("d"), array("d")]) is None


def test_the_default_plan_is_bounded_in_time_and_bytes() -> None:
    plan = plan_run(BenchOptions())
    assert math.isclose(sum(TIME_SHARES.values()), 1)
    assert math.isclose(sum(limit.seconds for limit in plan.limits.values()), 14)
    assert plan.limits[BenchPhase.BATCH].messages == (512 << 20) // 1024
    assert plan.limits[BenchPhase.DELAY] == PhaseLimit(3500, 3.5)
    assert plan.bytes_max == (256 << 20) + (512 << 20) + 3500 * 1024
    assert (plan.batch, plan.queues, plan.rate) == (500, 4, None)


def test_options_change_the_plan() -> None:
    plan = plan_run(BenchOptions(messages=90, size=1 << 20, producers=6, consumers=2, rate=20.0, seconds=10))
    assert {phase: limit.messages for phase, limit in plan.limits.items()} == {
        BenchPhase.PUBLISH: 50, BenchPhase.BATCH: 90, BenchPhase.CONSUME: 90,
        BenchPhase.RECEIVE: 90, BenchPhase.DELAY: 50,
    }  # fmt: skip
    assert (plan.batch, plan.queues, plan.call_messages) == (4, 6, 16)
    assert plan.rate == 20
    assert sum(limit.seconds for limit in plan_run(BenchOptions(messages=1)).limits.values()) == pytest.approx(120)


@pytest.mark.parametrize(
    ("rate", "sends_per_s", "delay_rate"),
    [(None, 5000.0, 1000), (None, 340.0, 170), (None, 0.0, 1), (2000.0, 50.0, 2000)],
)
def test_delays_are_measured_at_a_rate_that_the_cluster_reaches(
    rate: float | None, sends_per_s: float, delay_rate: float
) -> None:
    assert plan_run(BenchOptions(rate=rate)).delay_rate(sends_per_s) == delay_rate


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (BenchOptions(messages=10_000_000, size=1 << 20), "are more than 4 GiB: choose smaller --messages or --size"),
        (BenchOptions(batch=10_000, size=1 << 20), "more than 64 MiB: choose a smaller --batch or --size"),
    ],
)
def test_too_many_bytes_are_refused(options: BenchOptions, seen: str) -> None:
    with pytest.raises(InvalidArgumentError, match=seen):
        plan_run(options)


def test_the_threads_share_the_messages_and_the_rate() -> None:
    assert [PhaseLimit(10, 1.0).share(index, 4) for index in range(4)] == [3, 3, 2, 2]
    schedule = SendSchedule(100.0, producers=2)
    times = sorted(schedule.due_s(producer, number) for producer in range(2) for number in range(3))
    assert times == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05])


def test_only_bodies_of_this_run_have_a_scheduled_time() -> None:
    body = stamped_body(17, 123_456_789, b"x" * 40)
    assert len(body) == 40
    assert [due_ns_of(each, token) for each, token in ((body, 17), (body, 18), (b"short", 17))] == [
        123_456_789, None, None,
    ]  # fmt: skip


class Clock:
    """A clock by hand, and the event `stop`, whose wait moves the clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.stopped = False

    def __call__(self) -> float:
        return self.now_s

    def wait(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return self.stopped

    def is_set(self) -> bool:
        return self.stopped


class Sends:
    """A producer whose n-th send takes the n-th time of `times_s`; the other sends take no time."""

    def __init__(self, clock: Clock, times_s: dict[int, float]) -> None:
        self._clock, self._times_s = clock, times_s
        self.bodies: list[bytes] = []
        self.batches: list[int] = []

    def send(self, message: Message) -> None:
        self._clock.now_s += self._times_s.get(len(self.bodies), 0.0)
        self.bodies.append(message.body)

    def send_batch(self, messages: Any) -> None:
        self._clock.now_s += self._times_s.get(len(self.batches), 0.0)
        self.batches.append(len(messages))


def loop_of(seconds: float) -> tuple[Any, Clock]:
    clock = Clock()
    loop: Any = PhaseLoop(seconds, clock)
    loop.stop = clock
    return loop, clock


def test_messages_that_wait_for_a_slow_send_count_with_their_wait() -> None:
    """One send of 50 ms at 100/s delays the sends that follow. Their latencies count from their scheduled times, so the
    stall is in five latencies and not in one."""
    loop, clock = loop_of(1.0)
    tally = Tally()
    loop.send_each(Sends(clock, {2: 0.05}), tally, 10, "orders", b"x" * 20, schedule=SendSchedule(100.0))
    assert list(tally.latencies_s) == pytest.approx([0, 0, 0.05, 0.04, 0.03, 0.02, 0.01, 0, 0, 0])
    assert (tally.messages, tally.bytes, tally.last_s) == (10, 200, pytest.approx(100.09))


def test_sends_without_a_rate_count_from_the_call() -> None:
    loop, clock = loop_of(1.0)
    tally = Tally()
    loop.send_each(Sends(clock, {1: 0.3, 2: 0.1}), tally, 4, "orders", b"x")
    assert list(tally.latencies_s) == pytest.approx([0, 0.3, 0.1, 0])


def test_a_phase_ends_at_its_time() -> None:
    loop, clock = loop_of(1.0)
    tally, batches = Tally(), Tally()
    loop.send_each(Sends(clock, {}), tally, 1000, "orders", b"x", schedule=SendSchedule(10.0))
    assert tally.messages == 10
    loop, clock = loop_of(1.0)
    loop.send_batches(Sends(clock, dict.fromkeys(range(9), 0.4)), batches, 1000, Message("orders", b"abcd"), 7)
    assert (batches.messages, batches.bytes, len(batches.latencies_s)) == (21, 84, 3)


def test_a_rate_that_is_too_high_ends_a_second_after_the_phase() -> None:
    loop, clock = loop_of(1.0)
    tally = Tally()
    loop.send_each(
        Sends(clock, dict.fromkeys(range(100), 0.25)), tally, 1000, "orders", b"x", schedule=SendSchedule(1e6)
    )
    assert (tally.messages, tally.last_s) == (8, 102.0)


def test_batches_end_with_the_number_of_messages() -> None:
    loop, clock = loop_of(1.0)
    sends = Sends(clock, {})
    loop.send_batches(sends, Tally(), 10, Message("orders", b"x"), 4)
    assert sends.batches == [4, 4, 2]


def test_a_stopped_phase_sends_nothing() -> None:
    loop, clock = loop_of(1.0)
    clock.stopped = True
    sends = Sends(clock, {})
    loop.send_each(sends, Tally(), 10, "orders", b"x", schedule=SendSchedule(1.0))
    loop.send_batches(sends, Tally(), 10, Message("orders", b"x"), 4)
    assert (sends.bodies, sends.batches) == ([], [])


def test_a_delay_counts_from_the_scheduled_send_and_only_for_messages_of_the_run() -> None:
    loop, clock = loop_of(1.0)
    sends, tally = Sends(clock, {0: 0.25}), Tally()
    loop.send_each(sends, Tally(), 2, "orders", b"x" * 24, schedule=SendSchedule(10.0), token=5)

    def poll(most: int, timeout_s: float) -> list[Any]:
        clock.now_s, clock.stopped = 101.0, True
        return [SimpleNamespace(body=body) for body in (*sends.bodies, b"a message of another program")]

    loop.watch_delays(SimpleNamespace(poll=poll), tally, 5, 10)
    assert list(tally.latencies_s) == pytest.approx([1.0, 0.9], abs=1e-6)
    assert (tally.messages, tally.bytes) == (2, 48)


MACHINE = MachineFigures("host-1", 2, 8 << 30, (1.5, 2.25), "Linux 6.1", "3.11.7", "0.2.0")
REPORT = BenchReport(
    plan_run(BenchOptions(rate=50.0, producers=2)),
    "raymq-bench-1",
    4,
    [
        PhaseResult(BenchPhase.PUBLISH, 2000, 2_048_000, 2.0, summarize([array("d", [0.00025] * 1999 + [1.5])])),
        PhaseResult(BenchPhase.CONSUME, 500_000, 512_000_000, 2.5, None, "slow"),
        PhaseResult(BenchPhase.RECEIVE, 0, 0, 0.0),
        PhaseResult(BenchPhase.DELAY, 100, 102_400, 2.0, summarize([array("d", [0.002])]), rate=1234.56),
    ],
    [BrokerSetup("broker-a", 1, True, "SYNC_FLUSH", 1), BrokerSetup("broker-b", 3, False, error="refused")],
    [DiskFigures("/data", 64 << 20, 412e6, 0.4, 12.34), DiskFigures("/log", error="/log cannot be written: read-only")],
    MACHINE,
)


def test_the_table_has_rates_and_percentiles() -> None:
    rows = bench_rows(REPORT.results)
    assert {len(row) for row in rows} == {len(BENCH_COLUMNS)}
    assert rows == [
        ["send one by one", "2,000", "1,000", "1.0", "0.250", "0.250", "0.250", "1,500"],
        ["poll and commit", "500,000", "200,000", "204.8", "-", "-", "-", "-"],
        ["receive and acknowledge", "0", "0", "0.0", "-", "-", "-", "-"],
        ["delay from send to poll", "100", "50", "0.1", "2.000", "2.000", "2.000", "2.000"],
    ]


def test_the_lines_below_the_table_name_brokers_machine_and_disk() -> None:
    assert list(bench_lines(REPORT)) == [
        "messages of 1,024 bytes to 4 queues; 2 producers and 1 consumer in threads of one process; single sends at "
        "50/s, batches of 500, delays at 1,235/s",
        "broker-a: 1 replica, SYNC_FLUSH, min. 1 in sync; its master is on this node",
        "broker-b: 3 replicas, settings unknown: refused; its master is on another node",
        "machine host-1: 2 cores, 8.0 GiB, load 1.5 before and 2.2 after; Linux 6.1, Python 3.11.7, raymq 0.2.0",
        "disk of /data: 412 MB/s in order, with fdatasync; a flush of 4 KiB p50 0.400 ms, p99 12.340 ms",
        "disk of /log: not measured: /log cannot be written: read-only",
        "note: poll and commit: slow",
    ]
    assert "no disk was measured: no store's directory is on this machine" in bench_lines(replace(REPORT, disks=[]))


def test_the_json_has_numbers_by_phase() -> None:
    value = bench_value(REPORT)
    assert value["phases"]["publish"] == {
        "messages": 2000, "seconds": 2.0, "messages_per_s": 1000.0, "bytes_per_s": 1_024_000.0,
        "p50_ms": 0.25, "p99_ms": 0.25, "p999_ms": 0.25, "max_ms": 1500.0,
    }  # fmt: skip
    assert value["phases"]["consume"]["note"] == "slow"
    assert "p50_ms" not in value["phases"]["consume"]
    assert (value["rate"], value["phases"]["delay"]["rate"]) == (50, 1234.6)
    assert value["temporary"]
    assert value["machine"]["load"] == (1.5, 2.25)
    assert value["disks"][0]["flush_p99_ms"] == 12.34
    assert value["brokers"][1]["error"] == "refused"
