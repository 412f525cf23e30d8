"""Tests of a store's counters, including the totals of yesterday and today."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest

from storage import stats as stats_module
from storage.stats import DayTotalsFile, StoreStats

MONDAY = date(2026, 11, 23)


class Calendar:
    """Fake clocks: the current day, and the seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.day, self.now_s = MONDAY, 0.0

    def __call__(self) -> date:
        return self.day


def days_of(stats: StoreStats, calendar: Calendar) -> dict[str, tuple[int, int, int]]:
    """Return the number of puts and the number of gets since the store's start, each as counted at three times:
    yesterday morning, this morning and now."""
    runtime = stats.runtime(calendar.now_s, 0)
    moments = ("YesterdayMorning", "TodayMorning", "TodayNow")
    found = {name: [int(runtime[f"msg{name}Total{moment}"]) for moment in moments] for name in ("Put", "Get")}
    return {name: (first, second, third) for name, (first, second, third) in found.items()}


def work(stats: StoreStats, calendar: Calendar, messages: int, *, days_later: int = 0) -> None:
    """Count `messages` puts and half as many gets, `days_later` days after the previous call, and take a
    sample."""
    calendar.day += timedelta(days_later)
    calendar.now_s += 1
    stats.take_sample(calendar.now_s)
    stats.count_put("orders", messages, 100 * messages, 0.001)
    stats.count_gets(1, 0, messages // 2, 0.001)
    calendar.now_s += 1
    stats.take_sample(calendar.now_s)


def test_totals_are_kept_at_midnight_for_two_days() -> None:
    calendar = Calendar()
    stats = StoreStats(calendar)
    # The first sample has the time of the real monotonic clock. So set the fake clock to a later time, far in the
    # future.
    calendar.now_s = 1e9
    work(stats, calendar, 10)
    assert days_of(stats, calendar) == {"Put": (0, 0, 10), "Get": (0, 0, 5)}
    work(stats, calendar, 4, days_later=1)
    assert days_of(stats, calendar) == {"Put": (0, 10, 14), "Get": (0, 5, 7)}
    work(stats, calendar, 2)
    work(stats, calendar, 6, days_later=1)
    assert days_of(stats, calendar) == {"Put": (10, 16, 22), "Get": (5, 8, 11)}


def test_after_days_without_a_sample_yesterday_had_no_messages() -> None:
    calendar = Calendar()
    stats = StoreStats(calendar)
    calendar.now_s = 1e9
    work(stats, calendar, 10)
    work(stats, calendar, 4, days_later=3)
    assert days_of(stats, calendar)["Put"] == (10, 10, 14)


def test_a_deleted_topic_stays_in_the_totals() -> None:
    calendar = Calendar()
    stats = StoreStats(calendar)
    calendar.now_s = 1e9
    work(stats, calendar, 10)
    stats.forget_topic("orders")
    work(stats, calendar, 2, days_later=1)
    assert days_of(stats, calendar)["Put"] == (0, 10, 12)


def test_reads_in_place_are_gets() -> None:
    calendar = Calendar()
    stats = StoreStats(calendar)
    calendar.now_s = 1e9
    stats.take_sample(calendar.now_s)
    stats.count_reads(10, 5000)
    calendar.now_s += 10
    runtime = stats.runtime(calendar.now_s, 0)
    assert runtime["msgGetTotalTodayNow"] == "5000"
    assert runtime["getFoundTps"].split()[0] == "1.0"
    assert runtime["getTransferredTps"].split()[0] == "500.0"


def reopened(path: Path, calendar: Calendar) -> StoreStats:
    calendar.now_s = 1e9
    return StoreStats(calendar, DayTotalsFile(path))


def test_the_totals_of_the_days_survive_a_restart(tmp_path: Path) -> None:
    calendar, path = Calendar(), tmp_path / "dayTotals.json"
    stats = reopened(path, calendar)
    work(stats, calendar, 10)
    work(stats, calendar, 4, days_later=1)
    stats.save_days(calendar.now_s, last=True)
    stats = reopened(path, calendar)
    assert days_of(stats, calendar) == {"Put": (0, 10, 14), "Get": (0, 5, 7)}
    assert stats.runtime(calendar.now_s, 0)["putMessageTimesTotal"] == "0", "this one counts from the opening"
    work(stats, calendar, 2)
    stats.save_days(calendar.now_s, last=True)
    calendar.day += timedelta(1)
    stats = reopened(path, calendar)
    assert days_of(stats, calendar) == {"Put": (10, 16, 16), "Get": (5, 8, 8)}
    calendar.day += timedelta(7)
    stats = reopened(path, calendar)
    assert days_of(stats, calendar) == {"Put": (16, 16, 16), "Get": (8, 8, 8)}


def test_the_totals_are_written_now_and_then_if_they_have_changed(tmp_path: Path) -> None:
    calendar, path = Calendar(), tmp_path / "dayTotals.json"
    stats = reopened(path, calendar)
    work(stats, calendar, 10)
    stats.save_days(calendar.now_s)
    before = path.stat().st_mtime_ns
    work(stats, calendar, 10)
    stats.save_days(calendar.now_s)
    assert path.stat().st_mtime_ns == before, "not before its time"
    stats.save_days(calendar.now_s + stats_module.DAY_TOTALS_INTERVAL_S)
    changed = path.read_bytes()
    path.unlink()
    stats.save_days(calendar.now_s + 3 * stats_module.DAY_TOTALS_INTERVAL_S)
    assert not path.exists(), "nothing is new"
    assert changed


@pytest.mark.parametrize("bit", range(0, 8 * 80, 7))
def test_totals_in_a_damaged_file_are_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture, bit: int) -> None:
    calendar, path = Calendar(), tmp_path / "dayTotals.json"
    stats = reopened(path, calendar)
    work(stats, calendar, 10)
    stats.save_days(calendar.now_s, last=True)
    data = bytearray(path.read_bytes())
    if bit >= 8 * len(data):
        return
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    totals = days_of(reopened(path, calendar), calendar)["Put"]
    assert totals == (0, 0, 0)
    assert "cannot be read" in caplog.text


def test_totals_that_cannot_be_written_stop_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calendar = Calendar()
    stats = reopened(tmp_path / "missing" / "dayTotals.json", calendar)
    work(stats, calendar, 10)
    stats.save_days(calendar.now_s, last=True)
    assert "cannot be written" in caplog.text
    assert days_of(stats, calendar)["Put"] == (0, 0, 10)
