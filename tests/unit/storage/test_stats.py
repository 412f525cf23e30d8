"""The counters of a store: the totals of yesterday and today."""

from __future__ import annotations

from datetime import date, timedelta

from storage.stats import StoreStats

MONDAY = date(2026, 11, 23)


class Calendar:
    """The day, and the seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.day, self.now_s = MONDAY, 0.0

    def __call__(self) -> date:
        return self.day


def days_of(stats: StoreStats, calendar: Calendar) -> dict[str, tuple[int, int, int]]:
    """Yesterday morning, this morning and now, of puts and gets."""
    runtime = stats.runtime(calendar.now_s, 0)
    moments = ("YesterdayMorning", "TodayMorning", "TodayNow")
    found = {name: [int(runtime[f"msg{name}Total{moment}"]) for moment in moments] for name in ("Put", "Get")}
    return {name: (first, second, third) for name, (first, second, third) in found.items()}


def work(stats: StoreStats, calendar: Calendar, messages: int, *, days_later: int = 0) -> None:
    """Put messages and fetch half of them, `days_later` than before; then a sample is due."""
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
    calendar.now_s = 1e9  # later than the monotonic clock, by which the first sample was taken
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
