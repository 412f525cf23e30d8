"""The command `raymq`: servers, topics, groups, and messages from a shell.

Tables are for people; every command takes `--json` for machines. Exit codes: 0 done, 1 refused or failed (one line on
standard error says why and what to do), 2 wrong usage, 130 interrupted. One module per noun; all of them print through
`raymq.tools.cli.terminal.output`.

`raymq job`: the finished jobs of raydp_jobs.jobs, under one noun.

Each job is a file with its own command, so that ``python -m raydp_jobs.jobs.archive`` has the same options and help. A
file is imported when its command is asked for: Spark is not for everybody who says `raymq`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Final, NoReturn

import click

from raymq.tools.cli.browsing import browse, delayed, trace, track, transactions
from raymq.tools.cli.cluster.brokers import broker, check, store
from raymq.tools.cli.cluster.doctor import doctor
from raymq.tools.cli.cluster.manifests import k8s, metrics
from raymq.tools.cli.cluster.servers import balance, demo, down, drain, status, up
from raymq.tools.cli.cluster.top import console, top
from raymq.tools.cli.dead_letters import dlq, replay
from raymq.tools.cli.entry import run_command
from raymq.tools.cli.groups import group
from raymq.tools.cli.known_names import completion
from raymq.tools.cli.members import group_connections, group_consume_directly, group_running_info, producers
from raymq.tools.cli.messages import consume, query, recall, receive, send
from raymq.tools.cli.terminal.output import Group
from raymq.tools.cli.topics import topic
from raymq.tools.cli.upkeep.acl import acl
from raymq.tools.cli.upkeep.config import config, kv
from raymq.tools.cli.upkeep.metadata import export, import_
from raymq.tools.cli.upkeep.users import user

_MODULES: Final = {
    "archive": "raydp_jobs.jobs.archive",
    "dead-letters": "raydp_jobs.jobs.dead_letters",
    "replay": "raydp_jobs.jobs.replay",
    "topic-stats": "raydp_jobs.jobs.topic_stats",
    "windowed-counts": "raydp_jobs.jobs.windowed_counts",
}


class JobCommands(MutableMapping[str, click.Command]):
    """The commands of the jobs by name, each imported on first use. Commands can be added, as click may want to."""

    def __init__(self) -> None:
        self._loaded: dict[str, click.Command | None] = dict.fromkeys(_MODULES)

    def __getitem__(self, name: str) -> click.Command:
        command = self._loaded[name]
        if command is None:
            loaded: click.Command = import_module(_MODULES[name]).command
            command = self._loaded[name] = loaded
        return command

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


@click.group(cls=Group, commands=JobCommands())
def job() -> None:
    """Run a finished job on a topic: figures, archive, replay, dead letters, counts.

    \b
    raymq job topic-stats orders --picture orders.png
    """


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
