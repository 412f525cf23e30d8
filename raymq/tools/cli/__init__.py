"""The command `raymq`: servers, topics, groups, and messages from a shell.

Tables are for people; every command takes `--json` for machines. Exit codes: 0 done, 1 refused or failed (one line on
standard error says why and what to do), 2 wrong usage, 130 interrupted. One module per noun; all of them print through
`raymq.tools.cli.terminal.output`.
"""

from __future__ import annotations

from typing import NoReturn

import click

from raymq.tools.cli.browsing import browse, delayed, track
from raymq.tools.cli.cluster.console import console
from raymq.tools.cli.cluster.doctor import doctor
from raymq.tools.cli.cluster.kubernetes import k8s
from raymq.tools.cli.cluster.metrics import metrics
from raymq.tools.cli.cluster.servers import balance, demo, down, drain, status, up
from raymq.tools.cli.cluster.stores import store
from raymq.tools.cli.cluster.top import top
from raymq.tools.cli.completion import completion
from raymq.tools.cli.dead_letters import dlq
from raymq.tools.cli.entry import run_command
from raymq.tools.cli.groups import group
from raymq.tools.cli.jobs import job
from raymq.tools.cli.members.connections import group_connections, producers
from raymq.tools.cli.members.questions import group_consume_directly, group_running_info
from raymq.tools.cli.messages import consume, query, recall, send
from raymq.tools.cli.open_transactions import transactions
from raymq.tools.cli.receives import receive
from raymq.tools.cli.replays import replay
from raymq.tools.cli.terminal.output import Group
from raymq.tools.cli.topics import topic
from raymq.tools.cli.traces import trace
from raymq.tools.cli.upkeep.acl import acl
from raymq.tools.cli.upkeep.broker import broker
from raymq.tools.cli.upkeep.check import check
from raymq.tools.cli.upkeep.config import config
from raymq.tools.cli.upkeep.kv import kv
from raymq.tools.cli.upkeep.metadata import export, import_
from raymq.tools.cli.upkeep.users import user


def main() -> NoReturn:
    """The console script."""
    run_command(cli)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="raymq", prog_name="raymq")
@click.option(
    "--namespace",
    envvar="RAYMQ_NAMESPACE",
    metavar="NAME",
    help="Topics and groups of this namespace only, by their names there: raymq --namespace team-a topic list",
)
def cli(namespace: str | None) -> None:
    """A durable message queue inside a Ray cluster.

    \b
    raymq up                                  start it on this machine (or in the Ray cluster that runs)
    raymq topic create orders --queues 8
    echo '{"id": 17}' | raymq send orders --tags paid --key o-17
    raymq consume billing orders --max 10
    """


for command in (
    up,
    down,
    status,
    drain,
    balance,
    demo,
    doctor,
    top,
    metrics,
    k8s,
    topic,
    group,
    producers,
    send,
    consume,
    receive,
    query,
    recall,
    replay,
    dlq,
    job,
    store,
    transactions,
    browse,
    track,
    trace,
    delayed,
    console,
    config,
    broker,
    check,
    kv,
    export,
    import_,
    user,
    acl,
    completion,
):
    cli.add_command(command)
for command in (group_connections, group_running_info, group_consume_directly):
    group.add_command(command)
