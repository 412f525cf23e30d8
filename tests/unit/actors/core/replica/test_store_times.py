"""Tests of StoreTimes, which remembers when bytes of a replica's log were stored."""

from __future__ import annotations

from actors.core.replica.sync_state import MARK_S, MARKS_MAX, StoreTimes


def test_the_age_of_a_byte_counts_from_when_it_was_stored():
    times = StoreTimes(100, 10.0)
    times.stored(200, 12.0)
    times.stored(300, 15.0)
    assert [times.age_s(at, 20.0) for at in (0, 99, 100, 199, 200, 299, 300)] == [10.0, 10.0, 8.0, 8.0, 5.0, 5.0, 0.0]


def test_storing_nothing_more_leaves_no_mark():
    times = StoreTimes(100, 10.0)
    times.stored(100, 12.0)
    times.stored(200, 15.0)
    assert times.age_s(100, 16.0) == 1.0


def test_bytes_that_arrive_within_moments_get_the_store_time_of_the_first():
    times = StoreTimes(0, 0.0)
    times.stored(10, 5.0)
    times.stored(20, 5.0 + MARK_S / 2)
    times.stored(30, 5.0 + 2 * MARK_S)
    assert times.age_s(15, 6.0) == 1.0
    assert times.age_s(20, 6.0) == 6.0 - (5.0 + 2 * MARK_S)


def test_memory_is_bounded_and_an_age_is_never_too_small_nor_much_too_large():
    times = StoreTimes(0, 0.0)
    stored_s = [0.25 * number for number in range(1, 20 * MARKS_MAX)]
    for number, now_s in enumerate(stored_s, 1):
        times.stored(number, now_s)
        assert len(times._ends) == len(times._times_s) <= MARKS_MAX
    now_s = stored_s[-1] + 0.25
    for number, at_s in enumerate(stored_s, 1):
        age_s = now_s - at_s
        assert age_s <= times.age_s(number - 1, now_s) <= 1.05 * age_s + 1.0
    assert times.age_s(len(stored_s), now_s) == 0.0
