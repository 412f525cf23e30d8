"""The rows of a soak test's report: one row for each minute, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.soak.readings import MEASURES, Growth, Reading, change, total

WINDOW_MAX: Final = 10
WARM_MINUTES: Final = 4
"""Number of first minutes that say nothing about growth: the stores fill up until the topic's messages expire."""
HEADINGS: Final = (
    "min",
    "sent/s",
    "read/s",
    "send p50",
    "p99 ms",
    "read p50",
    "p99 ms",
    "backlog",
    "MiB",
    "fds",
    "threads",
    "maps",
    "disk MiB",
    "load",
    "killed",
)


@dataclass(frozen=True, slots=True)
class Minute:
    """One row. `sent` and `read` are numbers of messages: acknowledged in this row's `seconds`, and read for the first
    time. `send_ms` and `read_ms` are p50 and p99: of one send call, and from the time at which a message was due until
    a consumer had the message. `backlog`: messages acknowledged, and not yet read. `failed`: sends without SEND_OK."""

    number: int
    seconds: float
    sent: int
    read: int
    send_ms: tuple[float, float]
    read_ms: tuple[float, float]
    backlog: int
    failed: int
    killed: str
    disk_mib: float
    load: float
    processes: tuple[Reading, ...]

    def cells(self) -> list[str]:
        """Return this row's cells, below HEADINGS. Memory, descriptors, threads and maps are sums over all servers."""
        return [
            str(self.number),
            f"{self.sent / self.seconds:,.0f}",
            f"{self.read / self.seconds:,.0f}",
            *(f"{value:,.0f}" for value in (*self.send_ms, *self.read_ms, self.backlog)),
            *(f"{total(self.processes, measure):,.0f}" for measure in MEASURES),
            f"{self.disk_mib:,.0f}",
            f"{self.load:.1f}",
            self.killed,
        ]

    def as_json(self) -> dict[str, Any]:
        """Return this row as JSON values."""
        names = ("number", "seconds", "sent", "read", "send_ms", "read_ms", "backlog", "failed", "killed")
        values = {name: getattr(self, name) for name in (*names, "disk_mib", "load")}
        return {**values, "processes": [one._asdict() for one in self.processes]}


def window_of(minutes: Sequence[Minute]) -> int:
    """Return how many first minutes are compared with as many last minutes: ten, or a third of a short run."""
    return max(1, min(WINDOW_MAX, len(minutes) // 3))


def rate_changes(minutes: Sequence[Minute]) -> dict[str, float]:
    """Return the change of the rates of sent and read messages from the first minutes to the last ones, as a share."""
    window, result = window_of(minutes), {}
    for name in ("sent", "read"):
        first, last = (
            sum(getattr(one, name) for one in part) / sum(one.seconds for one in part)
            for part in (minutes[:window], minutes[-window:])
        )
        result[f"{name}/s"] = (last - first) / first if first else 0.0
    return result


def size_changes(minutes: Sequence[Minute]) -> dict[str, float]:
    """Return the change of each measure's sum over all servers from the first minutes to the last ones, as a share.
    The first WARM_MINUTES do not count, except in a run that has no others."""
    window, warm = window_of(minutes), minutes[WARM_MINUTES:] or minutes
    totals = {measure: [total(one.processes, measure) for one in warm] for measure in MEASURES}
    return {measure: change(values[:window], values[-window:]) for measure, values in totals.items()}


def as_text(minutes: Sequence[Minute]) -> str:
    """Return the rows as a table."""
    rows = [list(HEADINGS), *(one.cells() for one in minutes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def save(path: Path, facts: Mapping[str, Any], minutes: Sequence[Minute], growth: Sequence[Growth]) -> None:
    """Write the report as JSON. `facts`: the settings and the results of the run."""
    report = {
        **facts,
        "changes": rate_changes(minutes) | size_changes(minutes) if minutes else {},
        "growth": [one._asdict() for one in growth],
        "minutes": [one.as_json() for one in minutes],
    }
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
