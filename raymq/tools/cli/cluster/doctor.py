"""`raymq doctor`: checks of this machine, the nodes, the cluster and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    json_option,
    print_value,
    quiet_option,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import steps
from raymq.tools.doctor.findings import Finding, State, folded, worst


@click.command(cls=Command)
@click.option("--config", type=click.Path(path_type=Path), help="Settings; default: raymq.yaml here, if there is one.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the stores will be; those that run are known.")
@click.option("--prometheus", metavar="URL", help="Also look if this Prometheus has the alert rules.")
@click.option("--fix", is_flag=True, help="Repair what is safe here: modes of files, missing directories.")
@click.option("--all", "everything", is_flag=True, help="Show also what is well, at every place.")
@address_option
@json_option
@quiet_option
def doctor(
    config: Path | None,
    data_dir: Path | None,
    prometheus: str | None,
    fix: bool,
    everything: bool,
    address: str | None,
    as_json: bool,
) -> None:
    """Look for what goes wrong in practice: on this machine, on each node, in the cluster and in its metrics.

    Exit code 1 when something fails; warnings alone are 0. Without a cluster it checks this machine only, and says so.

    Example: raymq doctor, or raymq doctor --fix --json
    """
    from raymq.common.config.cluster import load_settings
    from raymq.tools.doctor.examination import examine, fix as repair, take_snapshot

    settings = load_settings(config, data_dir=data_dir)
    with steps() as progress:
        snapshot = take_snapshot(settings, address, prometheus, progress)
        repairs = repair(snapshot.machine) if fix else []
        if repairs:
            snapshot = take_snapshot(settings, address, prometheus, progress)
    findings = examine(snapshot)
    print_value(as_json, _as_json(findings, repairs), lambda: _show(findings, repairs, everything))
    if worst(findings) is State.FAIL:
        raise click.exceptions.Exit(1)


def _as_json(findings: Sequence[Finding], repairs: Sequence[str]) -> dict[str, Any]:
    rows = [{**asdict(one), "state": one.state.value} for one in findings]
    return {"state": worst(findings).value, "findings": rows, "repairs": list(repairs)}


def _show(findings: Sequence[Finding], repairs: Sequence[str], everything: bool) -> None:
    for line in repairs:
        say(f"fixed: {line}")
    skipped = [one for one in findings if one.state is State.SKIP]
    rows = [one for one in findings if one.state is not State.SKIP]
    table(
        ["check", "state", "where", "seen", "do"],
        [[one.check, one.state.value, one.where, one.seen, one.do] for one in (rows if everything else folded(rows))],
    )
    reasons: dict[str, list[str]] = {}
    for one in skipped:
        reasons.setdefault(one.seen, []).append(one.check)
    for reason, names in reasons.items():
        say(f"not checked, because {reason}: {', '.join(names)}")
    counts = {state: sum(one.state is state for one in findings) for state in State}
    say(", ".join(f"{count} {state.value}" for state, count in counts.items() if count))
