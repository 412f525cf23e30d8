"""Converts points in time and durations between protobuf's messages and milliseconds.

A client may send any number of seconds. So a value is limited to NUMBER_MAX ms on both sides of zero.
"""

from __future__ import annotations

from raymq.common.numbers import NUMBER_MAX
from raymq.gateway.wire.messages import Duration, Timestamp


def millis(value: Timestamp | Duration) -> int:
    """Return a point in time as ms since 1970, or a duration in ms, rounded down."""
    return max(-NUMBER_MAX, min(value.seconds * 1000 + value.nanos // 1_000_000, NUMBER_MAX))


def timestamp(at_ms: int) -> Timestamp:
    """Return the point in time `at_ms`, in ms since 1970, as a message."""
    seconds, rest = divmod(at_ms, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)


def duration(time_ms: int) -> Duration:
    """Return a duration of 0 ms or more as a message."""
    seconds, rest = divmod(time_ms, 1000)
    return Duration(seconds=seconds, nanos=rest * 1_000_000)
