"""`raymq up`, `down`, `status` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from raymq.cli.output import address_option, json_option, out, print_value, steps, table


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings; default: raymq.yaml here, if there is one.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the stores are kept.")
@click.option("--broker-groups", type=int, help="How many broker groups share the queues.")
@address_option
@json_option
def up(
    config: Path | None, data_dir: Path | None, broker_groups: int | None, address: str | None, as_json: bool
) -> None:
    """Start raymq. Starts Ray on this machine first when none runs. Running it again changes nothing.

    Example: raymq up --data-dir /var/lib/raymq --broker-groups 2
    """
    from raymq.local_server import up as start

    with steps(as_json) as progress:
        actors = start(config, data_dir, broker_groups, address, progress)
    print_value(as_json, {"actors": actors}, lambda: out.print(f"raymq is up: {', '.join(actors)}"))


@click.command()
@address_option
@json_option
def down(address: str | None, as_json: bool) -> None:
    """Stop raymq, stores last; and Ray, if `raymq up` started it. Messages stay on disk.

    Example: raymq down
    """
    from raymq.local_server import down as stop

    with steps(as_json) as progress:
        actors = stop(address, progress)
    print_value(
        as_json, {"stopped": actors}, lambda: out.print(f"raymq is down: stopped {', '.join(actors) or 'nothing'}")
    )


@click.command()
@address_option
@json_option
def status(address: str | None, as_json: bool) -> None:
    """Show broker groups, stores, and the consumer groups that are connected.

    Exit code 1 when something that should run does not answer. Example: raymq status --json
    """
    from raymq.local_server import status as ask

    report = ask(address)
    broken = [
        entry for kind in ("brokers", "stores", "groups", "instances") for entry in report[kind] if entry["error"]
    ]
    print_value(as_json, report, lambda: _print_status(report))
    if broken:
        raise click.exceptions.Exit(1)


@click.command()
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the store here; a second run reopens it.")
@click.option("--kill/--no-kill", default=True, help="Kill one storage process while producing (default: yes).")
def demo(keep: Path | None, kill: bool) -> None:
    """Send the 336,776 flights of 2013 through raymq and check every figure against the file.

    Starts everything on this machine, kills a storage process in between, and leaves nothing behind.
    Example: raymq demo --keep /tmp/flights
    """
    from raydp_jobs.demo import run

    if not run(keep, kill=kill, console=out):
        raise click.exceptions.Exit(1)


def _print_status(report: dict[str, Any]) -> None:
    table(
        ["broker", "state", "topics", "groups"],
        [
            [
                b["actor"],
                b["error"] or ("ready" if b["ready"] else b["waiting_for"]),
                *map(len, (b["topics"], b["groups"])),
            ]
            if not b["error"]
            else [b["actor"], b["error"], None, None]
            for b in report["brokers"]
        ],
    )
    table(
        ["store", "state", "queues", "log bytes", "not flushed", "directory"],
        [
            [
                s["actor"],
                "writable" if s["writable"] else s["not_writable_reason"],
                s["queues"],
                s["max_physical_offset"] - s["min_physical_offset"],
                s["max_physical_offset"] - s["flushed_physical_offset"],
                s["root"],
            ]
            if not s["error"]
            else [s["actor"], s["error"], None, None, None, "-"]
            for s in report["stores"]
        ],
    )
    if report["groups"]:
        table(
            ["group", "generation", "members", "queues held"],
            [
                [g["group"], g["generation"], len(g["members"]), len(g["holders"])]
                if not g["error"]
                else [g["actor"], None, None, g["error"]]
                for g in report["groups"]
            ],
        )
    if report["instances"]:
        table(
            ["instance", "queues", "buffered", "consumed", "failures"],
            [
                [i["instance"], len(i["holding"]), i["buffered"], i["consumed"], i["failures"]]
                if not i["error"]
                else [i["actor"], None, None, None, i["error"]]
                for i in report["instances"]
            ],
        )
