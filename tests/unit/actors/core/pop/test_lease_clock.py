"""Tests of the clock that times leases, while the system clock is set forward and back, also between two processes."""

from __future__ import annotations

import pytest

from actors.core.pop.leases import CLOCK_ERROR_MS, Lease, LeaseClock, PopQueue, PopTable

HOUR_MS = 3_600_000
STEPS_MS = (-24 * HOUR_MS, -600_000, -1000, 0, 1000, 600_000, 24 * HOUR_MS)
INVISIBLE_MS = 30_000


class Clocks:
    """The clocks of one machine, and a broker's lease clock on this machine."""

    def __init__(self, wall_ms: int = 100 * HOUR_MS) -> None:
        self.wall_ms, self.monotonic_ms = wall_ms, 5
        self.clock = LeaseClock(lambda: self.wall_ms, lambda: self.monotonic_ms)

    def passes(self, ms: int) -> int:
        self.wall_ms += ms
        self.monotonic_ms += ms
        return self.clock.now_ms()


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_no_step_of_the_wall_clock_moves_the_clock_of_leases(step_ms: int) -> None:
    clocks = Clocks()
    start_ms = clocks.clock.now_ms()
    assert start_ms == clocks.wall_ms
    assert clocks.passes(30_000) == start_ms + 30_000
    clocks.wall_ms += step_ms
    assert clocks.passes(0) == start_ms + 30_000
    assert clocks.passes(45_000) == start_ms + 75_000
    clocks.wall_ms -= step_ms
    assert clocks.passes(1) == start_ms + 75_001


def test_a_new_process_continues_after_the_newest_pop_time() -> None:
    clocks = Clocks()
    popped_ms = clocks.wall_ms + HOUR_MS
    clocks.clock.not_before(popped_ms)
    assert clocks.passes(700) == popped_ms + 700
    # This call of `not_before` has no effect, because the clock is already later than `popped_ms`.
    clocks.clock.not_before(popped_ms)
    assert clocks.passes(1) == popped_ms + 701


def table_of(*leases: Lease) -> PopTable:
    return PopTable({("group", "orders"): {0: PopQueue(100, {lease.key: lease for lease in leases})}})


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_new_processes_with_other_wall_clocks_give_no_lease_to_two(step_ms: int) -> None:
    clocks = Clocks()
    popped_ms = clocks.clock.now_ms()
    older = Lease(0, popped_ms - 20_000, 10, INVISIBLE_MS, 1)
    expired = Lease(10, popped_ms - INVISIBLE_MS, 10, INVISIBLE_MS, 1)
    newest = Lease(20, popped_ms, 10, INVISIBLE_MS, 1)
    table = table_of(older, expired, newest)
    queue = table.tables["group", "orders"][0]
    after = Clocks(clocks.wall_ms + 5000 + step_ms)
    after.clock.resume(table.newest_ms())
    assert queue.due(after.passes(0)) == 10
    assert queue.due(after.passes(9000)) == 10
    third = Clocks(after.wall_ms + 5000 + step_ms)
    latest = Lease(30, after.clock.now_ms(), 10, INVISIBLE_MS, 1)
    queue.leases[latest.key] = latest
    third.clock.resume(table.newest_ms())
    assert queue.due(third.passes(999)) == 10
    assert queue.due(third.passes(1)) == 20
    assert queue.due(third.passes(INVISIBLE_MS - 10_001)) == 20
    assert queue.due(third.passes(1)) == 30
    assert queue.due(third.passes(8999)) == 30
    assert queue.due(third.passes(1)) == 40


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_an_extended_lease_outlasts_a_restart_by_its_extension_at_most(step_ms: int) -> None:
    """A lease that was extended again and again for two hours ends soon after the broker's restart, not two hours
    later."""
    clocks = Clocks()
    popped_ms = clocks.clock.now_ms()
    extended_ms = clocks.passes(2 * HOUR_MS)
    lease = Lease(0, popped_ms, 10, 2 * HOUR_MS + INVISIBLE_MS, 1, extended_ms=extended_ms)
    assert Lease.of_record(lease.record()) == lease
    table = table_of(lease, Lease(10, popped_ms + 1, 5, INVISIBLE_MS, 1))
    after = Clocks(clocks.wall_ms + 5000 + step_ms)
    after.clock.resume(table.newest_ms())
    queue = table.tables["group", "orders"][0]
    assert queue.due(after.passes(INVISIBLE_MS - 1)) == 5
    assert queue.due(after.passes(1)) == 15


def test_leases_that_are_days_old_end_at_once() -> None:
    lease = Lease(0, 100 * HOUR_MS, 10, INVISIBLE_MS, 1)
    table = table_of(lease)
    after = Clocks(lease.pop_ms + CLOCK_ERROR_MS + 1)
    after.clock.resume(table.newest_ms())
    assert after.clock.now_ms() == after.wall_ms
    assert PopTable().newest_ms() == 0
