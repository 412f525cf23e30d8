"""`raymq doctor`: checks this machine, the nodes, the cluster and its metrics for common faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raymq.tools.cli.entry import cli
from raymq.tools.cli.options import config_option
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.output import Table
from raymq.tools.doctor.findings import Finding, State, folded, worst

if TYPE_CHECKING:
    from raymq.client.cluster.launcher import ProgressCallback


@command(cli)
@config_option
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Directory of stores that will be created. The command finds running stores itself.",
)
@click.option("--prometheus", metavar="URL", help="Also check that this Prometheus has the alert rules.")
@click.option("--fix", is_flag=True, help="Make safe repairs on this machine: modes of files, missing directories.")
@click.option("--all", "everything", is_flag=True, help="Also show the checks that passed, at every place.")
def doctor(
    address: str | None,
    progress: ProgressCallback,
    config: Path | None,
    data_dir: Path | None,
    prometheus: str | None,
    fix: bool,
    everything: bool,
) -> CommandResult:
    """Check for common faults: on this machine, on each node, in the cluster and in its metrics.

    Exit code 1 if a check fails; 0 if there are only warnings. Without a cluster the command checks this machine only.

    Example: raymq doctor, or raymq doctor --fix --json
    """
    from raymq.common.config.cluster import load_settings
    from raymq.tools.doctor.examination import examine, fix as repair, take_snapshot

    settings = load_settings(config, data_dir=data_dir)
    snapshot = take_snapshot(settings, address, prometheus, progress)
    repairs = repair(snapshot.machine) if fix else []
    if repairs:
        snapshot = take_snapshot(settings, address, prometheus, progress)
    findings = examine(snapshot)
    state = worst(findings)
    rows = [{**asdict(one), "state": one.state.value} for one in findings]
    return CommandResult(
        {"state": state.value, "findings": rows, "repairs": list(repairs)},
        *(f"fixed: {line}" for line in repairs),
        *_shown(findings, everything),
        failed=state is State.FAIL,
    )


def _shown(findings: Sequence[Finding], everything: bool) -> Iterator[str | Table]:
    """Yield the output of `raymq doctor`: the table of findings, the skipped checks by reason, and a line with the
    number of findings in each state."""
    rows = [one for one in findings if one.state is not State.SKIP]
    yield Table(
        ["check", "state", "where", "seen", "do"],
        [[one.check, one.state.value, one.where, one.seen, one.do] for one in (rows if everything else folded(rows))],
    )
    reasons: dict[str, list[str]] = {}
    for one in findings:
        if one.state is State.SKIP:
            reasons.setdefault(one.seen, []).append(one.check)
    for reason, names in reasons.items():
        yield f"not checked, because {reason}: {', '.join(names)}"
    counts = {state: sum(one.state is state for one in findings) for state in State}
    yield ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
