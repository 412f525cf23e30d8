"""Counters of a broker, and their rates over the last minute, hour and day (spec/messaging.md §9.6).

Each counter has three series of samples: one sample per 10 s, per 10 min and per hour. 7, 7 and 25 samples cover a
minute, an hour and a day. A rate is the difference between the newest and the oldest sample, divided by the time
between them. Kinds and keys are RocketMQ's, such as `TOPIC_PUT_NUMS` and `orders@billing`. Counters are not durable.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from raymq.common.protocol.stats import Figures

SPANS: Final = (("minute", 10.0, 7), ("hour", 600.0, 7), ("day", 3600.0, 25))
"""Sampling periods: name, seconds between samples, number of samples that are kept."""

TOPIC_PUT_NUMS: Final = "TOPIC_PUT_NUMS"
TOPIC_PUT_SIZE: Final = "TOPIC_PUT_SIZE"
GROUP_GET_NUMS: Final = "GROUP_GET_NUMS"
SNDBCK_PUT_NUMS: Final = "SNDBCK_PUT_NUMS"
SNDBCK2DLQ_TIMES: Final = "SNDBCK2DLQ_TIMES"


class _CounterSample(NamedTuple):
    at_s: float
    total: int


@dataclass(slots=True)
class _Counter:
    total: int = 0
    seen: int = 0
    samples: list[deque[_CounterSample]] = field(default_factory=lambda: [deque(maxlen=kept) for _, _, kept in SPANS])

    def sample(self, now_s: float) -> None:
        for samples, (_, every_s, _) in zip(self.samples, SPANS, strict=True):
            if not samples or now_s - samples[-1].at_s >= every_s:
                samples.append(_CounterSample(now_s, self.total))

    def figures(self) -> Figures:
        values: dict[str, float] = {}
        for samples, (name, _, _) in zip(self.samples, SPANS, strict=True):
            oldest, newest = (samples[0], samples[-1]) if samples else (_CounterSample(0.0, 0), _CounterSample(0.0, 0))
            passed_s = newest.at_s - oldest.at_s
            values[name] = newest.total - oldest.total
            values[f"{name}_tps"] = (newest.total - oldest.total) / passed_s if passed_s > 0 else 0.0
        return Figures(self.total, **values)  # type: ignore[arg-type]  # sums are whole, rates are not


class BrokerStats:
    """All counters of one broker, by kind and key. Not thread-safe. A counter's first sample is 0."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], _Counter] = {}
        self._sampled_s: float | None = None

    def add(self, kind: str, key: str, value: int) -> None:
        """Add `value` to a counter."""
        self._counter(kind, key).total += value

    def take_total(self, kind: str, key: str, total: int) -> None:
        """Update a counter so that it follows the counter of another process, whose value is now `total`. The other
        counter restarts at 0 if its process restarts."""
        counter = self._counter(kind, key)
        counter.total += total - counter.seen if total >= counter.seen else total
        counter.seen = total

    def sample(self, now_s: float) -> None:
        """Take a sample of each counter for which a sample is due."""
        self._sampled_s = now_s
        for counter in self._counters.values():
            counter.sample(now_s)

    def figures(self, kind: str, key: str) -> Figures:
        """Return a counter's total and rates; zeros if nothing was counted."""
        counter = self._counters.get((kind, key))
        return Figures() if counter is None else counter.figures()

    def keys(self, kind: str) -> list[str]:
        """Return the keys of all counters of a kind, sorted."""
        return sorted(key for name, key in self._counters if name == kind)

    def totals(self, kind: str) -> dict[str, int]:
        """Return the total of each counter of the given kind, by the counter's key."""
        return {key: counter.total for (name, key), counter in self._counters.items() if name == kind}

    def forget(self, topic: str | None = None, group: str | None = None) -> None:
        """Drop the counters of a topic or of a group."""
        for kind, key in list(self._counters):
            name, _, of_group = key.partition("@")
            if name == topic or (of_group and of_group == group):
                del self._counters[kind, key]

    def _counter(self, kind: str, key: str) -> _Counter:
        counter = self._counters.get((kind, key))
        if counter is None:
            counter = self._counters[kind, key] = _Counter()
            if self._sampled_s is not None:
                counter.sample(self._sampled_s)
        return counter
