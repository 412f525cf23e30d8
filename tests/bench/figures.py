"""Measurements of a benchmark: the samples of raymq and of its peers (other systems) in each round, and the goal.

A peer is measured in the same round, right after raymq, so that both run under the same conditions. A round's ratio is
raymq's value divided by the peer's. The table shows the best round, and the median ratio with its smallest and largest
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from rich.table import Table


class Sample(NamedTuple):
    """One sample of a measurement: the value in the measurement's unit, and the CPU time in µs per message, if
    measured."""

    value: float
    cpu_us: float | None = None


Measure = Callable[[], Sample | float]


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal of a benchmark: a bound on the ratio of raymq's value to a peer's value.

    If `peer` is "", the bound applies to raymq's own value. If `peer` is "cpu", the bound applies to raymq's CPU time
    in µs.
    """

    bound: Literal[">=", "<="]
    number: float
    peer: str = ""

    def holds(self, value: float) -> bool:
        """Return True if the measured `value` reaches the goal."""
        return value >= self.number if self.bound == ">=" else value <= self.number

    def __str__(self) -> str:
        what = {"": "", "cpu": "cpu "}.get(self.peer, f"{self.peer} ")
        return f"{what}{self.bound} {self.number:g}"


@dataclass(slots=True)
class Figure:
    """One row of the result table, with a sample of raymq and of each peer for each round."""

    section: str
    name: str
    unit: str
    more_is_better: bool
    goals: Sequence[Goal] = ()
    ours: list[Sample] = field(default_factory=list)
    peers: dict[str, list[Sample]] = field(default_factory=dict)

    def add_round(self, ours: Measure, peers: dict[str, Measure]) -> None:
        """Run one round of a measurement: measure raymq, then each peer."""
        self.ours.append(_sample(ours()))
        for name, measure in peers.items():
            self.peers.setdefault(name, []).append(_sample(measure()))

    @property
    def best(self) -> Sample:
        """Return raymq's best sample over all rounds of the measurement: the highest or the lowest value, as
        `more_is_better` demands."""
        return (max if self.more_is_better else min)(self.ours)

    def ratios(self, peer: str) -> list[float]:
        """Return the ratio of raymq's value to the peer's value for each round. Rounds in which the peer's value is 0
        are skipped. A short round can measure 0, for example as the processor time of a program that waits. Empty if no
        round is left or the peer was not measured."""
        samples = zip(self.ours, self.peers[peer], strict=True) if peer in self.peers else ()
        return [ours.value / theirs.value for ours, theirs in samples if theirs.value]

    @property
    def cpu_us(self) -> float | None:
        """Return raymq's lowest CPU time per message, in µs, among the rounds of the measurement. None if no round has
        a CPU time."""
        taken = [sample.cpu_us for sample in self.ours if sample.cpu_us is not None]
        return min(taken) if taken else None

    def reached(self) -> bool | None:
        """Return True if the measurement reaches all its goals. Goals that compare with a peer are ignored if there is
        no ratio to the peer. Returns None if all goals are ignored."""
        looked = []
        for goal in self.goals:
            if goal.peer == "cpu":
                looked += [] if self.cpu_us is None else [goal.holds(self.cpu_us)]
            elif not goal.peer:
                looked.append(goal.holds(self.best.value))
            elif ratios := self.ratios(goal.peer):
                looked.append(goal.holds(median(ratios)))
        return all(looked) if looked else None

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement as a dictionary for a JSON file."""
        return {
            "section": self.section,
            "figure": self.name,
            "unit": self.unit,
            "best": self.best.value,
            "rounds": [sample.value for sample in self.ours],
            "cpu_us_per_message": self.cpu_us,
            "peers": {
                peer: {
                    "rounds": [sample.value for sample in samples],
                    **_summary(self.ratios(peer)),
                }
                for peer, samples in self.peers.items()
            },
            "goals": [str(goal) for goal in self.goals],
            "reached": self.reached(),
        }


def as_table(figures: Sequence[Figure]) -> Table:
    """Return the result table of all measurements, section by section."""
    peers = _peers_of(figures)
    table = Table(title="raymq: the best of its rounds; beside each peer the median ratio and its spread")
    table.add_column("figure")
    for name in ("raymq", "cpu us/msg", *(f"x {peer}" for peer in peers), "goal", ""):
        table.add_column(name, justify="right")
    section = ""
    for figure in figures:
        if figure.section != section:
            section = figure.section
            table.add_section()
        table.add_row(*_cells(figure, peers))
    return table


def as_markdown(figures: Sequence[Figure]) -> str:
    """Return the result table of all measurements as Markdown."""
    peers = _peers_of(figures)
    names = ("figure", "raymq", "CPU µs/msg", *(f"x {peer}" for peer in peers), "goal", "reached")
    rows = [names, ("---",) * len(names), *(_cells(figure, peers) for figure in figures)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _peers_of(figures: Sequence[Figure]) -> list[str]:
    return sorted({peer for figure in figures for peer in figure.peers})


def _cells(figure: Figure, peers: Sequence[str]) -> list[str]:
    """Return the table cells of one measurement, for its row in the result table."""
    cpu = "" if figure.cpu_us is None else f"{figure.cpu_us:.2f}"
    reached = {None: "", True: "yes", False: "NO"}[figure.reached()]
    goals = ", ".join(map(str, figure.goals))
    value = f"{_number(figure.best.value)} {figure.unit}".strip()
    ratios = [_ratio(figure, peer) for peer in peers]
    return [f"{figure.section}: {figure.name}", value, cpu, *ratios, goals, reached]


def _ratio(figure: Figure, peer: str) -> str:
    ratios = figure.ratios(peer)
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""


def _summary(ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the median, the smallest and the largest of the ratios of all rounds, as fields for a JSON file. Each
    field is None if `ratios` is empty."""
    median_, least, most = (median(ratios), min(ratios), max(ratios)) if ratios else (None, None, None)
    return {"ratio": median_, "ratio_min": least, "ratio_max": most}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}" if abs(value) >= 1 else f"{value:,.3f}"


def _sample(value: Sample | float) -> Sample:
    return value if isinstance(value, Sample) else Sample(value)
