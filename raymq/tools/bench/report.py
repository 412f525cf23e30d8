"""The report of `raymq bench`: the rows of its table, the lines below the table, and the value for --json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from raymq.tools.bench.plan import BenchPhase, BenchPlan
from raymq.tools.bench.run import PhaseResult
from raymq.tools.bench.surroundings import BrokerSetup, DiskFigures, MachineFigures

BENCH_COLUMNS: Final = ("measured", "messages", "messages/s", "MB/s", "p50 ms", "p99 ms", "p99.9 ms", "max ms")


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All figures of a run. `topic`: the topic's name. `queues`: number of its queues. `errors`: why a phase or the
    removal failed. `left`: the objects that were not removed, with the command that removes them."""

    plan: BenchPlan
    topic: str
    queues: int
    results: Sequence[PhaseResult]
    brokers: Sequence[BrokerSetup]
    disks: Sequence[DiskFigures]
    machine: MachineFigures
    errors: Sequence[str] = ()
    left: Sequence[str] = ()


def bench_rows(results: Sequence[PhaseResult]) -> list[list[str]]:
    """Return the cells of the table, one row for each phase. A phase without calls has "-" for its percentiles."""
    rows = []
    for one in results:
        times = ["-"] * 4 if one.latency is None else [_ms(value) for value in one.latency]
        rows.append(
            [str(one.phase), f"{one.messages:,}", f"{one.messages_per_s:,.0f}", f"{one.bytes_per_s / 1e6:,.1f}", *times]
        )
    return rows


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}" if value >= 100 else f"{value:,.3f}"


def bench_lines(report: BenchReport) -> Iterator[str]:
    """Yield the lines below the table: what was measured, on which brokers, on which machine, beside which disk."""
    plan = report.plan
    rate = "one after another" if plan.rate is None else f"at {plan.rate:,g}/s"
    delays = "".join(f", delays at {one.rate:,.0f}/s" for one in report.results if one.phase is BenchPhase.DELAY)
    yield (
        f"messages of {plan.size:,} bytes to {_count(report.queues, 'queue')}; {_count(plan.producers, 'producer')} "
        f"and {_count(plan.consumers, 'consumer')} in threads of one process; single sends {rate}, batches of "
        f"{plan.batch:,}{delays}"
    )
    for one in report.brokers:
        settings = f"settings unknown: {one.error}" if one.error else f"{one.flush}, min. {one.min_in_sync} in sync"
        place = "on this node" if one.local else "on another node"
        yield f"{one.broker}: {_count(one.replicas, 'replica')}, {settings}; its master is {place}"
    machine = report.machine
    yield (
        f"machine {machine.host}: {_count(machine.cores, 'core')}, {machine.memory_bytes / 2**30:.1f} GiB, load "
        f"{machine.load[0]:.1f} before and {machine.load[1]:.1f} after; {machine.kernel}, Python {machine.python}, "
        f"raymq {machine.raymq}"
    )
    for disk in report.disks:
        yield f"disk of {disk.directory}: " + (
            f"not measured: {disk.error}"
            if disk.error
            else f"{disk.write_bytes_per_s / 1e6:,.0f} MB/s in order, with fdatasync; a flush of 4 KiB "
            f"p50 {_ms(disk.flush_p50_ms)} ms, p99 {_ms(disk.flush_p99_ms)} ms"
        )
    if not report.disks:
        yield "no disk was measured: no store's directory is on this machine"
    for result in report.results:
        if result.note:
            yield f"note: {result.phase}: {result.note}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def bench_value(report: BenchReport) -> dict[str, Any]:
    """Return the report as plain data for --json. The keys of the phases are the names of BenchPhase in lower case."""
    plan = report.plan
    phases = {}
    for one in report.results:
        figures: dict[str, Any] = {
            "messages": one.messages,
            "seconds": round(one.seconds, 4),
            "messages_per_s": round(one.messages_per_s, 1),
            "bytes_per_s": round(one.bytes_per_s, 1),
        }
        if one.latency is not None:
            figures |= {name: round(value, 4) for name, value in one.latency._asdict().items()}
        if one.rate is not None:
            figures["rate"] = round(one.rate, 1)
        phases[BenchPhase(one.phase).name.lower()] = figures | ({"note": one.note} if one.note else {})
    return {
        "topic": report.topic,
        "temporary": plan.topic is None,
        "size": plan.size,
        "queues": report.queues,
        "producers": plan.producers,
        "consumers": plan.consumers,
        "batch": plan.batch,
        "rate": plan.rate,
        "phases": phases,
        "brokers": [asdict(one) for one in report.brokers],
        "disks": [asdict(one) for one in report.disks],
        "machine": asdict(report.machine),
        "errors": list(report.errors),
        "left": list(report.left),
    }
