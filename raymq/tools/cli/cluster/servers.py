"""`raymq up`, `down`, `status`, `drain`, `balance` and `demo`: the servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from raymq.common.names import BROKER_GROUPS_MAX
from raymq.common.numbers import POSITIVE, TIME_S, NumberRange
from raymq.tools.cli.known_names import saw_all
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    duration,
    json_option,
    out,
    print_value,
    quiet_option,
    say,
    table,
)
from raymq.tools.cli.terminal.progress import steps


@click.command(cls=Command)
@click.option("--config", type=click.Path(path_type=Path), help="Settings; default: raymq.yaml here, if there is one.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the stores are kept.")
@click.option(
    "--broker-groups",
    type=NumberType(NumberRange(1, BROKER_GROUPS_MAX)),
    help="How many broker groups share the queues.",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="NAME",
    help="Do not start this broker group (broker-b) or replica (broker-a-2) that is on disk. Repeatable.",
)
@click.option(
    "--wait-nodes", type=NumberType(POSITIVE), help="First wait until Ray has so many nodes, the head included."
)
@click.option("--wait-s", type=NumberType(TIME_S), help="How long; then nothing is started. Default: half an hour.")
@address_option
@json_option
@quiet_option
def up(
    config: Path | None,
    data_dir: Path | None,
    broker_groups: int | None,
    leave_out: tuple[str, ...],
    wait_nodes: int | None,
    wait_s: float | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Start raymq with the stores on disk. Starts Ray on this machine first when none runs.

    Running it again changes nothing and says so. Refuses options that leave out a store on disk, unless --leave-out
    names it.
    Example: raymq up --data-dir /var/lib/raymq --broker-groups 2
    """
    from raymq.client.cluster.local_server import WAIT_NODES_TIMEOUT_S, up as start

    with steps() as progress:
        started = start(
            config,
            data_dir,
            broker_groups,
            address,
            progress,
            wait_nodes=wait_nodes,
            wait_timeout_s=WAIT_NODES_TIMEOUT_S if wait_s is None else wait_s,
            leave_out=leave_out,
        )

    def show() -> None:
        say(f"raymq is up: {', '.join(started.actors)}")
        for note in started.notes:
            say(note)

    print_value(as_json, {"actors": started.actors, "notes": started.notes}, show)


@click.command(cls=Command)
@address_option
@json_option
@quiet_option
def down(address: str | None, as_json: bool) -> None:
    """Stop raymq, stores last; and Ray, if `raymq up` started it. Messages stay on disk.

    Example: raymq down
    """
    from raymq.client.cluster.local_server import down as stop

    with steps() as progress:
        actors = stop(address, progress)
    print_value(as_json, {"stopped": actors}, lambda: say(f"raymq is down: stopped {', '.join(actors) or 'nothing'}"))


@click.command(cls=Command)
@address_option
@json_option
@quiet_option
def status(address: str | None, as_json: bool) -> None:
    """Show what is broken or damaged and what to do about it, then broker groups, their replicas and stores, and the
    consumer groups that are connected.

    Exit code 1 when something that should run does not answer, a broker group has no master, or a store that leads
    takes no messages. Where access is on, an ordinary user sees brokers and services; stores are for super users.
    Example: raymq status --json
    """
    from raymq.client.cluster.local_server import status as ask

    with steps() as progress:
        progress("asking the servers")
        report = ask(address)
    _note_names(report["brokers"])
    broken = [
        entry
        for kind in ("brokers", "stores", "rebalances", "pulls", "replication")
        for entry in report[kind]
        if entry["error"]
    ]
    broken += [group for entry in report["replication"] for group in entry["groups"] if group["reason"]]
    broken += [store for store in report["stores"] if not store["error"] and _refuses(store)]
    print_value(as_json, report, lambda: _print_status(report))
    if broken:
        raise click.exceptions.Exit(1)


@click.command(cls=Command)
@click.argument("node")
@click.option("--undo", is_flag=True, help="Allow replicas there again.")
@address_option
@json_option
@quiet_option
def drain(node: str, undo: bool, address: str | None, as_json: bool) -> None:
    """Move every replica off a node, before it is taken away. NODE is its address, or the beginning of its id.

    Its replicas begin anew on other nodes and are filled from their masters; a master hands over first. Exit code 1
    when some are left after four minutes: the cluster goes on moving them. Example: raymq drain 10.0.0.7
    """
    from raymq.client.cluster.local_server import drain as empty

    with steps() as progress:
        result = empty(node, undo, address, progress)
    left = ", ".join(result["left"])
    done = "may keep replicas again" if undo else f"still has, or still fills: {left}" if left else "keeps no replica"
    print_value(as_json, result, lambda: say(f"node {result['node_id'][:8]} {done}"))
    if left:
        raise click.exceptions.Exit(1)


@click.command(cls=Command)
@address_option
@json_option
@quiet_option
def balance(address: str | None, as_json: bool) -> None:
    """Have the first replica by priority lead each broker group again, as after a start. No message is lost by it.

    Exit code 1 when one could not, because it is not in sync. Example: raymq balance
    """
    from raymq.client.cluster.local_server import balance as hand_over

    with steps() as progress:
        result = hand_over(address, progress)
    moved = ", ".join(f"{group} to replica {replica}" for group, replica in sorted(result["wanted"].items()))
    left = ", ".join(result["left"])
    text = f"handed over: {moved or 'nothing'}" + (f"; not yet: {left}" if left else "")
    print_value(as_json, result, lambda: say(text))
    if left:
        raise click.exceptions.Exit(1)


@click.command(cls=Command)
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


def _refuses(store: dict[str, Any]) -> bool:
    """True if a store's disk has failed, or if the store should take messages and does not."""
    leads = store.get("role", "MASTER") == "MASTER"
    return bool(store.get("disk_failure")) or (leads and not store["writable"])


def _note_names(brokers: Sequence[dict[str, Any]]) -> None:
    """Keep the names of topics and groups for completion, if every broker has told its own."""
    saw_all("brokers", [broker["actor"] for broker in brokers])
    if not any(broker["error"] for broker in brokers):
        saw_all("topics", {topic for broker in brokers for topic in broker["topics"]})
        saw_all("groups", {group for broker in brokers for group in broker["groups"]})


def _print_status(report: dict[str, Any]) -> None:
    if report.get("refused"):
        out.print(f"super users see more: {', '.join(report['refused'])} do not show this user how they are")
    if report.get("problems"):
        table(
            ["problem at", "state", "seen", "do"],
            [[one["where"], one["state"], one["seen"], one["do"]] for one in report["problems"]],
        )
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
    changed = [
        [b["actor"], name, str(value)] for b in report["brokers"] for name, value in b.get("settings", {}).items()
    ]
    if changed:
        table(["broker", "setting unlike raymq.yaml", "value"], changed)
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
    if report.get("stopped_stores"):
        table(
            ["store on disk that does not run", "broker", "directory"],
            [[one["store"], one["broker"], one["directory"]] for one in report["stopped_stores"]],
        )
    for controller in report["replication"]:
        _print_replication(controller)
    _print_transactions(report)
    _print_deletions(report)
    _print_refusals(report)
    table(
        ["service", "state", "serves"],
        [
            [r["actor"], r["error"] or f"slots {_listed(r['slots'])}", _served(report, "groups", r)]
            for r in report["rebalances"]
        ]
        + [[p["actor"], p["error"] or f"node {p['node']}", _served(report, "instances", p)] for p in report["pulls"]]
        + [[c["actor"], c["error"] or "runs", c.get("url", "-")] for c in report.get("consoles", ())],
    )
    if report["groups"]:
        table(
            ["group", "generation", "members", "queues held"],
            [[g["group"], g["generation"], len(g["members"]), len(g["holders"])] for g in report["groups"]],
        )
    if report["instances"]:
        table(
            ["instance", "queues", "buffered", "consumed", "failures"],
            [
                [i["instance"], len(i["holding"]), i["buffered"], i["consumed"], i["failures"]]
                for i in report["instances"]
            ],
        )


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "-"


def _served(report: dict[str, Any], kind: str, service: dict[str, Any]) -> str:
    """The number of groups or instances at an actor."""
    return f"{sum(entry['actor'] == service['actor'] for entry in report[kind])} {kind}"


def _print_deletions(report: dict[str, Any]) -> None:
    """Print how many log files a full disk took before their time, and which groups had not read their messages."""
    files = sum(s["retention"]["young_files_deleted"] for s in report["stores"] if s.get("retention"))
    if not files:
        return
    out.print(f"a full disk took {files} log files before their time (clean_file_forcibly_enable)")
    unread = [entry for b in report["brokers"] for entry in b.get("deleted_unread", ())]
    if unread:
        table(
            ["group", "topic", "messages deleted unread"],
            [[entry["group"], entry["topic"], entry["messages"]] for entry in unread],
        )


def _print_transactions(report: dict[str, Any]) -> None:
    """Print the transactions that wait for their outcome, by the stores that lead, and how old the oldest is."""
    now_ms = time.time_ns() // 1_000_000
    waiting = [
        [
            *(store["actor"], row["topic"], row["producer_group"], row["waiting"]),
            max(now_ms - row["oldest_born_timestamp_ms"], 0) // 1000,
        ]
        for store in report["stores"]
        if store.get("writable")
        for row in store.get("transactions", {}).get("waiting", ())
    ]
    if waiting:
        table(["open transactions", "topic", "group", "waiting", "oldest s"], waiting)


def _print_refusals(report: dict[str, Any]) -> None:
    """Print the kinds of requests of which some were refused as busy."""
    refused = [
        [
            server["actor"],
            kind["kind"],
            kind["refused_full"],
            kind["refused_late"],
            kind["most"],
            round(kind["longest_ms"]),
        ]
        for server in [*report["brokers"], *report["stores"]]
        for kind in server.get("requests", ())
        if kind["refused_full"] or kind["refused_late"]
    ]
    if refused:
        table(["refused as busy", "requests", "too many", "too late", "most", "longest ms"], refused)


def _led(group: dict[str, Any]) -> str:
    """The state of a broker group: led, and what its master lacked when it was elected; or why nobody leads."""
    lost = group.get("loss", "")
    return group["reason"] or (f"led; elected although {lost}" if lost else "led")


def _print_replication(controller: dict[str, Any]) -> None:
    """Print the master of each broker group of several replicas, and the state of each replica."""
    groups = controller["groups"]
    table(
        ["broker", "master", "epoch", "in sync", "state"],
        [[g["broker"], g["master"], g["epoch"], " ".join(map(str, g["in_sync"])), _led(g)] for g in groups]
        + ([["controller", None, None, "-", controller["error"]]] if controller["error"] else []),
    )
    table(
        ["replica", "role", "node", "lag bytes", "lag", "state"],
        [
            [
                f"{g['broker']}-{r['replica']}",
                r["role"],
                r["node"],
                r["lag_bytes"],
                None if r["lag_s"] is None else duration(round(r["lag_s"] * 1000)),
                r["note"] or r["error"] or ("in sync" if r["replica"] in g["in_sync"] else "catching up"),
            ]
            for g in groups
            for r in g["replicas"]
        ],
    )
