"""Latency fault tolerance: the brokers that a producer avoids now (spec/messaging.md §3.4). No clock: time comes in.

Two things are known of a broker. *Reachable*: it answered last time; one that did not is passed over for FAILING_S,
until it answers. *Available*: it answers quickly. With latency fault tolerance on, a slow answer, or none, keeps the
broker out of the turn for a while, after RocketMQ's table:

    answer took at least, ms   550    1800   3000   5000    15000
    not available for, ms      2000   5000   6000   10000   30000

A broker without an answer counts as one that took 10 s. The time at which it is available again only moves later.
Nothing here survives the process; a new producer takes every broker for a good one.
"""

from __future__ import annotations

from typing import Final

FAILING_S: Final = 5.0
"""Time for which a broker that did not answer is passed over."""
ISOLATED_LATENCY_MS: Final = 10_000.0
"""Latency that is noted for an attempt without an answer."""
_NOT_AVAILABLE_MS: Final = ((15_000, 30_000), (5_000, 10_000), (3_000, 6_000), (1_800, 5_000), (550, 2_000))


def not_available_ms(latency_ms: float) -> int:
    """The time for which a broker that took `latency_ms` to answer is left out."""
    return next((pause_ms for limit_ms, pause_ms in _NOT_AVAILABLE_MS if latency_ms >= limit_ms), 0)


class BrokerFaults:
    """The faults of a producer's brokers. Each broker's answers are noted by one thread; any thread may ask.

    Without `latency_enabled`, a broker is available when it is reachable.
    """

    def __init__(self, *, latency_enabled: bool) -> None:
        self._latency_enabled = latency_enabled
        self._unreachable_until_s: dict[str, float] = {}
        self._available_from_s: dict[str, float] = {}

    def answered(self, broker_name: str, latency_ms: float, now_s: float) -> None:
        """Note that the broker's store answered a request after `latency_ms`."""
        if self._unreachable_until_s:
            self._unreachable_until_s.pop(broker_name, None)
        if self._latency_enabled:
            self._slow(broker_name, latency_ms, now_s)

    def failed(self, broker_name: str, now_s: float) -> None:
        """Note that the broker's store did not answer, or refused a request."""
        self._unreachable_until_s[broker_name] = now_s + FAILING_S
        self._slow(broker_name, ISOLATED_LATENCY_MS, now_s)

    def reachable(self, broker_name: str, now_s: float) -> bool:
        """True unless the broker failed to answer lately."""
        return now_s >= self._unreachable_until_s.get(broker_name, 0.0)

    def available(self, broker_name: str, now_s: float) -> bool:
        """True if the broker is reachable and was not slow lately."""
        return self.reachable(broker_name, now_s) and now_s >= self._available_from_s.get(broker_name, 0.0)

    def _slow(self, broker_name: str, latency_ms: float, now_s: float) -> None:
        if self._latency_enabled and (pause_ms := not_available_ms(latency_ms)):
            until_s = now_s + pause_ms / 1000
            self._available_from_s[broker_name] = max(self._available_from_s.get(broker_name, 0.0), until_s)
