"""Measures, per topic, how fast a consumer instance was over the last minute (ConsumeStats, spec/messaging.md
§5.11)."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0


@dataclass(slots=True)
class _Second:
    at_s: float
    pulled: int = 0
    ok: int = 0
    failed: int = 0
    timed: int = 0
    consume_s: float = 0.0


class ConsumeStats:
    """Counters of one consumer instance. For each topic there is a separate set of counts for each second. Not
    thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[_Second]] = defaultdict(deque)

    def pulled(self, topic: str, count: int, now_s: float) -> None:
        """Count messages that were fetched from a topic."""
        self._now(topic, now_s).pulled += count

    def consumed(self, topic: str, ok: int, failed: int, now_s: float) -> None:
        """Count messages that were consumed successfully (`ok`) and messages that failed."""
        second = self._now(topic, now_s)
        second.ok += ok
        second.failed += failed

    def took(self, topic: str, count: int, consume_s: float, now_s: float) -> None:
        """Add `consume_s`, the listener's total time in seconds for `count` messages, to the topic's
        statistics."""
        second = self._now(topic, now_s)
        second.timed += count
        second.consume_s += consume_s

    def figures(self, now_s: float) -> dict[str, dict[str, float]]:
        """Return the consumer's metrics by topic, under RocketMQ's names: TPS in messages per second, RT in ms per
        message."""
        return {topic: self._figures(topic, now_s) for topic in sorted(self._seconds)}

    def _figures(self, topic: str, now_s: float) -> dict[str, float]:
        self._now(topic, now_s)
        seconds = self._seconds[topic]
        span_s = min(WINDOW_S, max(1.0, now_s - seconds[0].at_s))
        timed = sum(second.timed for second in seconds)
        return {
            "PULL_TPS": sum(second.pulled for second in seconds) / span_s,
            "CONSUME_OK_TPS": sum(second.ok for second in seconds) / span_s,
            "CONSUME_FAILED_TPS": sum(second.failed for second in seconds) / span_s,
            "CONSUME_RT": 1000 * sum(second.consume_s for second in seconds) / timed if timed else 0.0,
        }

    def _now(self, topic: str, now_s: float) -> _Second:
        seconds = self._seconds[topic]
        while seconds and seconds[0].at_s <= now_s - WINDOW_S:
            seconds.popleft()
        if not seconds or now_s - seconds[-1].at_s >= 1.0:
            seconds.append(_Second(now_s))
        return seconds[-1]
