"""The Controller's metrics: masters, epochs, in-sync replicas, their lag, elections, and the clocks of their nodes.

A replica reads its wall clock while a call of the Controller runs. So the Controller's clock before and after the call
bounds the difference of the two clocks. Of the last calls, the shortest gives the best bound. No decision about masters
depends on the difference: leases use monotonic clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from placement.election import Record
from raymq.common.names import StorageName
from raymq.telemetry.metrics.reporter import Reporter

ELECTED: Final = "new_master_elected"
NO_MASTER: Final = "no_master_elected"
READINGS_MAX: Final = 20
STEP_S: Final = 1.0
"""Smallest difference in s between two readings that cannot be explained by their errors, and means a step."""


class ClockSkew(NamedTuple):
    """A difference of two clocks in s (positive: the other clock is ahead), and its maximum error in s."""

    skew_s: float
    error_s: float


class SkewEstimate:
    """The difference between the clock of one replica's node and the Controller's clock, from the last calls.

    One thread calls `note`; any thread may call `best`.
    """

    def __init__(self) -> None:
        self._readings: tuple[ClockSkew, ...] = ()

    def note(self, wall_ms: int, asked_ms: int, answered_ms: int) -> None:
        """Add a reading of the replica's clock, and the Controller's clock before and after the call, in ms since 1970.
        Ignores a call during which the Controller's clock was set back."""
        if answered_ms < asked_ms:
            return
        skew_s = (wall_ms - (asked_ms + answered_ms) / 2) / 1000
        reading = ClockSkew(skew_s, (answered_ms - asked_ms) / 2000)
        # After one of the two clocks was set, the earlier readings no longer hold.
        known = self._readings[1 - READINGS_MAX :]
        is_set = any(abs(skew_s - one.skew_s) > reading.error_s + one.error_s + STEP_S for one in known)
        self._readings = (reading,) if is_set else (*known, reading)

    def best(self) -> ClockSkew | None:
        """Return the most exact of the last readings; None without readings."""
        return min(self._readings, key=lambda one: one.error_s, default=None)


class ControllerMetrics:
    """Counts the elections of a Controller, and reports them together with the Controller's status. One thread may
    count while another thread reports."""

    def __init__(self) -> None:
        self._elections: Counter[tuple[str, str]] = Counter()

    def note(self, before: Record | None, after: Record) -> None:
        """Count an election if the Controller's decision `after` has another epoch than its previous decision `before`.
        Called after a decision was written to the journal."""
        if before is None or before.epoch != after.epoch:
            self._elections[after.group, NO_MASTER if after.master is None else ELECTED] += 1

    def report(self, reporter: Reporter, status: Callable[[], dict[str, Any]]) -> None:
        """Report the metrics of each broker group in the Controller's `status`, and the number of elections."""
        groups = status()["groups"]
        for group in groups:
            self._report_group(reporter, group)
        reporter.gauge("raymq_active_broker_num", sum(_has_master(group) for group in groups))
        for (broker, result), total in self._elections.copy().items():
            reporter.count("raymq_election", total, broker=broker, election_result=result)

    def _report_group(self, reporter: Reporter, group: dict[str, Any]) -> None:
        broker = group["broker"]
        reporter.gauge("raymq_broker_has_master", _has_master(group), broker=broker)
        reporter.gauge("raymq_broker_epoch", group["epoch"] or 0, broker=broker)
        reporter.gauge("raymq_replicas", len(group["replicas"]) - len(group["learners"]), broker=broker)
        reporter.gauge("raymq_in_sync_replicas", len(group["in_sync"]), broker=broker)
        for replica in group["replicas"]:
            skew_s = replica.get("clock_skew_s")
            if skew_s is not None and replica["role"] != "SILENT":
                storage = str(StorageName(broker, replica["replica"]))
                reporter.gauge("raymq_clock_skew_seconds", skew_s, broker=broker, storage=storage)
            if replica["lag_bytes"] is None:
                continue  # skip: the group's master does not report this replica's lag
            labels = {
                "broker": broker,
                "storage": str(StorageName(broker, replica["replica"])),
                "role": replica["role"].lower(),
            }
            reporter.gauge("raymq_replica_lag_bytes", replica["lag_bytes"], **labels)
            reporter.gauge("raymq_replica_lag_milliseconds", round(replica["lag_s"] * 1000), **labels)


def _has_master(group: dict[str, Any]) -> bool:
    return group["master"] is not None and not group["reason"]
