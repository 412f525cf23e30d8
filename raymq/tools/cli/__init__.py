"""The command `raymq`: manages servers, topics, groups and messages from a shell.

Commands print tables for people, and JSON with `--json`. The commands of each noun (`raymq topic`, `raymq group`) are
in one module. The decorator `raymq.tools.cli.terminal.command.command` turns a function into a command.

`raymq job` contains the ready-made jobs of raydp_jobs.jobs. Each job is a file with its own command, so ``python -m
raydp_jobs.jobs.archive`` has the same options and help. A job's file is imported when its command is used, so that
other commands do not load Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Final

import click

from raymq.tools.cli import (  # noqa: F401  (each module adds its commands to `cli` when it is imported)
    browsing,
    dead_letters,
    groups,
    known_names,
    members,
    messages,
    topics,
)
from raymq.tools.cli.cluster import bench, brokers, doctor, gateways, manifests, servers, top  # noqa: F401
from raymq.tools.cli.entry import cli, main
from raymq.tools.cli.upkeep import acl, config, metadata, users  # noqa: F401

__all__ = ["JobCommands", "cli", "main"]

_MODULES: Final = {
    "archive": "raydp_jobs.jobs.archive",
    "dead-letters": "raydp_jobs.jobs.dead_letters",
    "replay": "raydp_jobs.jobs.replay",
    "topic-stats": "raydp_jobs.jobs.topic_stats",
    "windowed-counts": "raydp_jobs.jobs.windowed_counts",
}


class JobCommands(MutableMapping[str, click.Command]):
    """The commands of `raymq job`, by name; each command is imported when it is first used. The mapping is mutable
    because click may add commands to it."""

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


@cli.group(commands=JobCommands())
def job() -> None:
    """Run a Spark job on a topic: statistics, archive, replay, dead letters, windowed counts.

    \b
    raymq job topic-stats orders --picture orders.png
    """
