"""The clocks of a simulated machine: a monotonic clock that drifts, and a wall clock that is wrong and steps.

The decisions use only the monotonic clock. The wall clock is for planted bugs: a lease that uses it must be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.replication_sim.world import World

DRIFT_MAX = 0.05
"""The largest difference between the speeds of a monotonic clock and of true time. A real clock drifts a thousand
times less."""
DAY_S = 86_400.0


class Clock:
    """The clocks of one machine. Times are in s.

    The monotonic clock begins at an unknown time at each boot, and runs too fast or too slow. The wall clock is wrong
    by up to a day, and may step at any time.
    """

    def __init__(self, world: World) -> None:
        self._world, self._is_wall_clock = world, world.bugs.lease_by_wall_clock
        self.restart()
        self.step()

    def restart(self) -> None:
        """Let the monotonic clock begin again, as at a boot."""
        dice = self._world.clock_dice
        self._booted_s, self._begin_s = self._world.now, dice.uniform(0.0, 1e6)
        self._speed = 1.0 + dice.uniform(-1.0, 1.0) * self._world.drift

    def step(self) -> None:
        """Set the wall clock to a time that is wrong by up to a day."""
        self._wall_error_s = self._world.clock_dice.uniform(-DAY_S, DAY_S)

    def read_s(self) -> float:
        """Return the time of the clock that leases use: the monotonic clock, or the wall clock if that bug is
        planted."""
        if self._is_wall_clock:
            return self._world.now + self._wall_error_s
        return self._begin_s + (self._world.now - self._booted_s) * self._speed
