"""The Controller's metrics: masters, epochs, in-sync replicas, their lag, and elections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from placement.election import Record
from raymq.common.names import StorageName
from raymq.telemetry.metrics.reporter import Reporter

ELECTED: Final = "new_master_elected"
NO_MASTER: Final = "no_master_elected"


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
