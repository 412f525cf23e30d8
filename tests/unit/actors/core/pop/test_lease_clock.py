"""Tests of the clock that times leases, while the system clock is set forward and back."""

from __future__ import annotations

from actors.core.pop.leases import LeaseClock

HOUR_MS = 3_600_000


class Clocks:
    def __init__(self) -> None:
        self.wall_ms, self.monotonic_ms = 100 * HOUR_MS, 5
        self.clock = LeaseClock(lambda: self.wall_ms, lambda: self.monotonic_ms)

    def passes(self, ms: int) -> int:
        self.wall_ms += ms
        self.monotonic_ms += ms
        return self.clock.now_ms()


def test_a_step_back_neither_stops_nor_turns_the_clock() -> None:
    clocks = Clocks()
    start_ms = clocks.clock.now_ms()
    assert start_ms == clocks.wall_ms
    assert clocks.passes(30_000) == start_ms + 30_000
    clocks.wall_ms -= HOUR_MS
    assert clocks.passes(0) == start_ms + 30_000
    assert clocks.passes(45_000) == start_ms + 75_000


def test_the_wall_clock_counts_again_once_it_is_ahead() -> None:
    clocks = Clocks()
    start_ms = clocks.clock.now_ms()
    clocks.wall_ms -= HOUR_MS
    clocks.passes(1000)
    clocks.wall_ms += HOUR_MS + 250
    assert clocks.passes(1000) == start_ms + 2250 == clocks.wall_ms


def test_a_new_process_continues_after_the_stored_time() -> None:
    clocks = Clocks()
    stored_ms = clocks.wall_ms + HOUR_MS
    clocks.clock.not_before(stored_ms)
    assert clocks.passes(700) == stored_ms + 700
    # This call of `not_before` has no effect, because the clock is already later than `stored_ms`.
    clocks.clock.not_before(stored_ms)
    assert clocks.passes(1) == stored_ms + 701
