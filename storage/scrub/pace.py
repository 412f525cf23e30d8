"""Decides how fast a verification of a store reads, and when the next one begins. It has no clock and no thread.

A verification is spread over most of its period, so that the load is even: a small store is read at a small rate. The
rate never exceeds the setting `scrub_rate_max_bytes`. The pauses are also long enough that the checks take at most
CPU_SHARE_MAX of one core: records of 100 bytes cost more time per byte than large records.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

CPU_SHARE_MAX: Final = 0.02
"""Maximum fraction of one core that a verification in the background takes."""
PERIOD_SHARE: Final = 0.8
"""Fraction of the period over which the reads are spread. The rest is a reserve for restarts and for a growing log."""
RATE_MIN_BYTES: Final = 256 << 10
"""Minimum rate in bytes per second. A small store is verified within minutes."""
OVERDUE_PERIODS: Final = 1.5
"""Number of periods after which a verification is overdue."""
FIRST_DELAY_S: Final = 60.0
"""Minimum time in s between the opening of a store and the first check. Recovery and catching up come first."""
FIRST_SPREAD_S: Final = 600
"""Upper limit in s of the additional delay, which differs from store to store."""
SCRUB_HOUR_MS: Final = 3_600_000


class StepCost(NamedTuple):
    """The cost of one step of a verification: bytes read, processor time in s, and elapsed time in s."""

    read_bytes: int
    cpu_s: float
    elapsed_s: float


def first_delay_s(root: str) -> float:
    """Return the time in s between the opening of the store in directory `root` and its first check. Stores on one
    machine begin at different times."""
    return FIRST_DELAY_S + zlib.crc32(root.encode()) % FIRST_SPREAD_S


def even_rate(left_bytes: int, elapsed_ms: int, period_hours: int, rate_max_bytes: int) -> float:
    """Return the rate in bytes per second with which the remaining `left_bytes` are read in time. `elapsed_ms`: the age
    of the verification."""
    left_s = max((period_hours * SCRUB_HOUR_MS * PERIOD_SHARE - max(elapsed_ms, 0)) / 1000, 1.0)
    return min(max(left_bytes / left_s, RATE_MIN_BYTES), float(rate_max_bytes))


def pause_s(cost: StepCost, rate_bytes: float) -> float:
    """Return the time in s to wait after a step, so that the average rate is at most `rate_bytes` per second, and the
    step took at most CPU_SHARE_MAX of one core."""
    return max(max(cost.read_bytes / rate_bytes, cost.cpu_s / CPU_SHARE_MAX) - cost.elapsed_s, 0.0)


def ms_until_due(now_ms: int, began_ms: int, period_hours: int) -> int:
    """Return the time in ms until the next verification begins: one period after the beginning of the last one. If the
    clock was set back, the next one begins at most one period from now."""
    period_ms = period_hours * SCRUB_HOUR_MS
    return min(max(began_ms + period_ms - now_ms, 0), period_ms) if began_ms else 0


def is_overdue(now_ms: int, verified_ms: int, period_hours: int) -> bool:
    """True if a verification is overdue. `verified_ms`: the beginning of the last complete verification, or the time
    from which the store has waited for its first one."""
    return bool(period_hours and verified_ms) and now_ms - verified_ms > OVERDUE_PERIODS * period_hours * SCRUB_HOUR_MS
