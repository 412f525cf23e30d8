"""BrokerFaults: the brokers that a producer avoids for a while. The functions take the current time as an argument.

A broker is *reachable* if it answered the last request. The producer skips a broker that did not answer for FAILING_S,
or until the broker answers. A broker is *available* if it is reachable and answers quickly. With latency fault
tolerance, a slow broker is unavailable for a time from RocketMQ's table:

    answer took at least, ms   550    1800   3000   5000    15000
    not available for, ms      2000   5000   6000   10000   30000

A broker that does not answer counts as a broker that took 10 s. A later, faster answer does not shorten the time. A new
producer regards each broker as available.
"""

from __future__ import annotations

from typing import Final

FAILING_S: Final = 5.0
"""Time in seconds for which a producer skips a broker that did not answer."""
ISOLATED_LATENCY_MS: Final = 10_000.0
"""Latency in ms that a producer assumes for an attempt that got no answer."""
_NOT_AVAILABLE_MS: Final = ((15_000, 30_000), (5_000, 10_000), (3_000, 6_000), (1_800, 5_000), (550, 2_000))


def not_available_ms(latency_ms: float) -> int:
    """Return the time in ms for which a producer avoids a broker that took `latency_ms` to answer."""
    return next((pause_ms for limit_ms, pause_ms in _NOT_AVAILABLE_MS if latency_ms >= limit_ms), 0)


class BrokerFaults:
    """Tracks which brokers of a producer are reachable and available. One thread records the answers of each broker;
    any thread may query the state.

    Without `latency_enabled`, each reachable broker is available.
    """

    def __init__(self, *, latency_enabled: bool) -> None:
        self._latency_enabled = latency_enabled
        self._unreachable_until_s: dict[str, float] = {}
        self._available_from_s: dict[str, float] = {}

    def answered(self, broker_name: str, latency_ms: float, now_s: float) -> None:
        """Record that the broker's store answered a request after `latency_ms` milliseconds."""
        if self._unreachable_until_s:
            self._unreachable_until_s.pop(broker_name, None)
        if self._latency_enabled:
            self._slow(broker_name, latency_ms, now_s)

    def failed(self, broker_name: str, now_s: float) -> None:
        """Record that the broker's store did not answer, or refused a request."""
        self._unreachable_until_s[broker_name] = now_s + FAILING_S
        self._slow(broker_name, ISOLATED_LATENCY_MS, now_s)

    def reachable(self, broker_name: str, now_s: float) -> bool:
        """Return False if the broker has recently left a request without an answer, else True."""
        return now_s >= self._unreachable_until_s.get(broker_name, 0.0)

    def available(self, broker_name: str, now_s: float) -> bool:
        """Return True if the broker is reachable and was not recently slow."""
        return self.reachable(broker_name, now_s) and now_s >= self._available_from_s.get(broker_name, 0.0)

    def _slow(self, broker_name: str, latency_ms: float, now_s: float) -> None:
        if self._latency_enabled and (pause_ms := not_available_ms(latency_ms)):
            until_s = now_s + pause_ms / 1000
            self._available_from_s[broker_name] = max(self._available_from_s.get(broker_name, 0.0), until_s)
