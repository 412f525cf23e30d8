"""`raymq up`, `down`, `status`, `drain`, `balance` and `demo`: commands that manage the servers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from raymq.common.names import BROKER_GROUPS_MAX
from raymq.common.numbers import POSITIVE, TIME_S, NumberRange
from raymq.tools.cli.cluster.brokers import verified_text
from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import remember_all_names
from raymq.tools.cli.options import RenamedOption, config_option
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import Table, duration, err, out

if TYPE_CHECKING:
    from raymq.client.cluster.launcher import ProgressCallback
    from raymq.common.protocol.status import BrokerReport, ClusterStatus, ReplicaGroupReport, ReplicaReport, StoreReport


@command(cli, lines=True)
@config_option
@click.option("--data-dir", type=click.Path(path_type=Path), help="Directory of the stores.")
@click.option(
    "--broker-groups",
    type=NumberType(NumberRange(1, BROKER_GROUPS_MAX)),
    help="Number of broker groups, which share the queues.",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="NAME",
    help="Do not start this broker group (broker-b) or replica (broker-a-2) that is on disk. Repeatable.",
)
@click.option(
    "--wait-nodes",
    type=NumberType(POSITIVE),
    help="First wait until Ray has this number of nodes, including the head node.",
)
@click.option(
    "--timeout",
    "wait_s",
    cls=RenamedOption,
    former=["--wait-s"],
    type=NumberType(TIME_S),
    help="Maximum wait for the nodes in seconds; if nodes are then missing, nothing is started. Default: half an hour.",
)
def up(
    address: str | None,
    progress: ProgressCallback,
    config: Path | None,
    data_dir: Path | None,
    broker_groups: int | None,
    leave_out: tuple[str, ...],
    wait_nodes: int | None,
    wait_s: float | None,
) -> CommandResult:
    """Start raymq with the stores on disk. Starts Ray on this machine first if no Ray runs.

    A second run changes nothing and says so. The command refuses options that leave out a store on disk, unless
    --leave-out names the store. Example: raymq up --data-dir /var/lib/raymq --broker-groups 2
    """
    from raymq.client.cluster.local_server import WAIT_NODES_TIMEOUT_S, up as start

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
    value = {"actors": started.actors, "notes": started.notes, "data_dir": started.data_dir}
    first = () if started.data_dir is None else (f"messages are stored in {started.data_dir}", *NEXT_COMMANDS)
    return CommandResult(value, f"raymq is up: {', '.join(started.actors)}", *started.notes, *first)


SKEW_SHOWN_S: Final = 0.5
"""Smallest certain difference in s between the clock of a replica's node and the Controller's clock that `raymq status`
shows."""
NEXT_COMMANDS: Final = (
    "next: raymq topic create orders && raymq send orders hello",
    "      raymq consume billing orders --from first --timeout 5",
    "      raymq console           shows topics, groups and messages in a browser",
)
"""The lines of `raymq up` that say what a new user can do next."""


@command(cli)
def down(address: str | None, progress: ProgressCallback) -> CommandResult:
    """Stop raymq. The stores stop last. Also stops Ray if `raymq up` started it. Messages stay on disk.

    Example: raymq down
    """
    from raymq.client.cluster.local_server import down as stop

    actors = stop(address, progress)
    return CommandResult({"stopped": actors}, f"raymq is down: stopped {', '.join(actors) or 'nothing'}")


@command(cli)
def status(address: str | None, progress: ProgressCallback) -> CommandResult:
    """Show faults with their remedies, then broker groups, their replicas and stores, and connected consumer groups.

    Exit code 1 if a server does not answer, a broker group has no master, or a master refuses messages. With access
    control, an ordinary user sees brokers and services; only super users see stores. Example: raymq status --json
    """
    from raymq.client.cluster.local_server import status as ask

    progress("asking the servers")
    found = ask(address)
    _remember_names(found.brokers)
    broken = any(server.error for server in found.servers)
    broken |= any(group.reason for group in found.replica_groups)
    broken |= any(_refuses(store) for store in found.stores if not store.error)
    shown = [part for section in _SECTIONS for part in section(found)]
    return CommandResult(found.report, *shown, failed=broken)


@command(cli)
@click.argument("node")
@click.option("--undo", is_flag=True, help="Allow replicas on the node again.")
def drain(address: str | None, progress: ProgressCallback, node: str, undo: bool) -> CommandResult:
    """Move every replica off a node, before the node is removed. NODE is its address, or the beginning of its id.

    New replicas on other nodes copy the logs, and then replace them. A master hands over its role first. Exit code 1
    if replicas are left after four minutes: the cluster continues to move them. Example: raymq drain 10.0.0.7
    """
    from raymq.client.cluster.local_server import drain as empty

    result = empty(node, undo, address, progress)
    left = ", ".join(result["left"])
    done = "may keep replicas again" if undo else f"still has, or still fills: {left}" if left else "keeps no replica"
    return CommandResult(result, f"node {result['node_id'][:8]} {done}", failed=bool(left))


@command(cli)
def balance(address: str | None, progress: ProgressCallback) -> CommandResult:
    """Make the first replica by priority the master of each broker group again, as after a start. No message is lost.

    Exit code 1 if a replica cannot become the master because it is not in sync. Example: raymq balance
    """
    from raymq.client.cluster.local_server import balance as hand_over

    result = hand_over(address, progress)
    moved = ", ".join(f"{group} to replica {replica}" for group, replica in sorted(result["wanted"].items()))
    left = ", ".join(result["left"])
    text = f"handed over: {moved or 'nothing'}" + (f"; not yet: {left}" if left else "")
    return CommandResult(result, text, failed=bool(left))


@command(cli)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the store here; a second run reopens the store.")
@click.option("--kill/--no-kill", default=True, help="Kill one storage process while producing (default: yes).")
def demo(keep: Path | None, kill: bool, as_json: bool) -> CommandResult:
    """Send the 336,776 flights of 2013 through raymq and check every figure against the file.

    The demo starts everything on this machine, kills a storage process while it sends, and leaves nothing behind.
    Example: raymq demo --keep /tmp/flights
    """
    from raydp_jobs.demo import run

    equal = run(keep, kill=kill, console=err if as_json else out)
    return CommandResult({"equal": equal}, failed=not equal)


def _refuses(store: StoreReport) -> bool:
    """Return True if a store's disk has failed, or if the store belongs to a master that refuses messages."""
    leads = store.role in ("", "MASTER")
    return bool(store.disk_failure) or (leads and not store.writable)


def _remember_names(brokers: Sequence[BrokerReport]) -> None:
    """Cache the names of topics and groups for shell completion, but only if every broker has answered."""
    remember_all_names("brokers", [broker.actor for broker in brokers])
    if not any(broker.error for broker in brokers):
        remember_all_names("topics", {topic for broker in brokers for topic in broker.topics})
        remember_all_names("groups", {group for broker in brokers for group in broker.groups})


# Each section of `raymq status` is a function that yields texts and tables, or nothing.

Shown = Iterator[str | Table]


def _some(names: list[str], rows: list[list[Any]]) -> list[Table]:
    """Return a list with one table of `rows`, or an empty list if there are no rows."""
    return [Table(names, rows)] if rows else []


def _problems(status: ClusterStatus) -> Shown:
    """Yield the cluster's faults with their remedies. If some servers show their state only to super users, also yield
    a note with the names of these servers."""
    if status.refused:
        yield f"super users see more: {', '.join(status.refused)} do not show this user their state"
    yield from _some(
        ["problem at", "state", "seen", "do"], [[one.where, one.state, one.seen, one.do] for one in status.problems]
    )


def _brokers(status: ClusterStatus) -> Shown:
    """Yield the table of brokers, and the broker settings that differ from raymq.yaml."""
    yield Table(
        ["broker", "state", "topics", "groups"],
        [
            [b.actor, b.error, None, None]
            if b.error
            else [b.actor, "ready" if b.ready else b.waiting_for, len(b.topics), len(b.groups)]
            for b in status.brokers
        ],
    )
    changed = [[b.actor, name, str(value)] for b in status.brokers for name, value in b.settings.items()]
    yield from _some(["broker", "setting unlike raymq.yaml", "value"], changed)


def _stores(status: ClusterStatus) -> Shown:
    """Yield the tables of running stores, and of stores on disk that do not run."""
    yield Table(
        ["store", "state", "queues", "log bytes", "not flushed", "verified", "directory"],
        [
            [s.actor, s.error, None, None, None, "-", "-"]
            if s.error
            else [
                s.actor,
                "writable" if s.writable else s.not_writable_reason,
                s.queues,
                s.log_bytes,
                s.unflushed_bytes,
                verified_text(s.scrub),
                s.root,
            ]
            for s in status.stores
        ],
    )
    stopped = [[one.store, one.broker, one.directory] for one in status.stopped_stores]
    yield from _some(["store on disk that does not run", "broker", "directory"], stopped)


def _replication(status: ClusterStatus) -> Shown:
    """Yield a table of the replicated broker groups: the master of each, and the state of each replica."""
    for controller in status.replication:
        groups = controller.groups
        yield Table(
            ["broker", "master", "epoch", "in sync", "state"],
            [[g.broker, g.master, g.epoch, " ".join(map(str, g.in_sync)), _led(g)] for g in groups]
            + ([["controller", None, None, "-", controller.error]] if controller.error else []),
        )
        yield Table(
            ["replica", "role", "node", "lag bytes", "lag", "clock", "state"],
            [
                [
                    f"{g.broker}-{r.replica}",
                    r.role,
                    r.node,
                    r.lag_bytes,
                    None if r.lag_s is None else duration(round(r.lag_s * 1000)),
                    _clock(r),
                    r.note or r.error or ("in sync" if r.replica in g.in_sync else "catching up"),
                ]
                for g in groups
                for r in g.replicas
            ],
        )


def _clock(replica: ReplicaReport) -> str | None:
    """Return how far the clock of a replica's node is surely ahead of the Controller's clock, or behind it; "right" if
    the difference is below SKEW_SHOWN_S."""
    if replica.clock_skew_s is None:
        return None
    surely_s = max(abs(replica.clock_skew_s) - (replica.clock_error_s or 0.0), 0.0)
    if surely_s < SKEW_SHOWN_S:
        return "right"
    return f"{'+' if replica.clock_skew_s > 0 else '-'}{duration(round(surely_s * 1000))}"


def _led(group: ReplicaGroupReport) -> str:
    """Return a text about the master of a broker group: the reason why there is no master, or "led" if there is one. If
    the master lacked data when it was elected, the text names this loss."""
    led = group.reason or (f"led; elected although {group.loss}" if group.loss else "led")
    return f"{led}; {group.change}" if group.change else led


def _transactions(status: ClusterStatus) -> Shown:
    """Yield a table of the open transactions in the masters' stores, with the age of the oldest transaction."""
    now_ms = time.time_ns() // 1_000_000
    waiting = [
        [
            *(store.actor, row.topic, row.producer_group, row.waiting),
            max(now_ms - row.oldest_born_timestamp_ms, 0) // 1000,
        ]
        for store in status.stores
        if store.writable
        for row in store.transactions.waiting
    ]
    yield from _some(["open transactions", "topic", "group", "waiting", "oldest s"], waiting)


def _deletions(status: ClusterStatus) -> Shown:
    """Yield the number of log files that a store deleted early because its disk was full, and the groups that lost
    unread messages."""
    files = sum(store.retention.young_files_deleted for store in status.stores if store.retention)
    if not files:
        return
    yield f"a full disk took {files} log files before their time (clean_file_forcibly_enable)"
    unread = [[one.group, one.topic, one.messages] for b in status.brokers for one in b.deleted_unread]
    yield from _some(["group", "topic", "messages deleted unread"], unread)


def _refusals(status: ClusterStatus) -> Shown:
    """Yield a table of the requests that servers refused because they were busy, by kind."""
    servers: tuple[BrokerReport | StoreReport, ...] = (*status.brokers, *status.stores)
    refused = [
        [server.actor, kind.kind, kind.refused_full, kind.refused_late, kind.most, round(kind.longest_ms)]
        for server in servers
        for kind in server.requests
        if kind.refused_full or kind.refused_late
    ]
    yield from _some(["refused as busy", "requests", "too many", "too late", "most", "longest ms"], refused)


def _services(status: ClusterStatus) -> Shown:
    """Yield tables of the Rebalance, Pull, console and gateway actors, the connected groups, and the push-consumer
    instances."""
    served = Counter(one.actor for one in (*status.groups, *status.instances))
    yield Table(
        ["service", "state", "serves"],
        [
            [r.actor, r.error or f"slots {' '.join(map(str, r.slots)) or '-'}", f"{served[r.actor]} groups"]
            for r in status.rebalances
        ]
        + [[p.actor, p.error or f"node {p.node}", f"{served[p.actor]} instances"] for p in status.pulls]
        + [[c.actor, c.error or "runs", c.url] for c in status.consoles]
        + [
            [g.actor, g.error or f"listens at {g.listens}", f"{sum(g.clients.values())} clients"]
            for g in status.gateways
        ],
    )
    yield from _some(
        ["group", "generation", "members", "queues held"],
        [[g.group, g.generation, len(g.members), len(g.holders)] for g in status.groups],
    )
    yield from _some(
        ["instance", "queues", "buffered", "consumed", "failures"],
        [[i.instance, len(i.holding), i.buffered, i.consumed, i.failures] for i in status.instances],
    )


_SECTIONS: Final[tuple[Callable[[ClusterStatus], Shown], ...]] = (
    *(_problems, _brokers, _stores, _replication, _transactions, _deletions, _refusals, _services),
)
