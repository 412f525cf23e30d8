"""The command `raymq`, to which each command module adds its commands, and the exit codes of `raymq` and of every job.

Exit codes: 0 success; 1 refused or failed (one line on standard error gives the reason and the remedy); 2 wrong usage;
130 interrupted.
"""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version as package_version
from typing import Final, NoReturn

import click

from raymq.common.errors import RaymqError
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.output import Group, address_option_before, namespace_option_before, out, say_error

SECTIONS: Final = {
    "Start": "up down demo console completion version",
    "Produce and consume": "send consume receive recall",
    "Look": "status top tail browse query track trace delayed transactions producers",
    "Administer": "topic group dlq replay config kv user acl export import job",
    "Operate": "doctor check bench store broker balance drain gateway metrics k8s",
}
"""The titles in the help of `raymq`, with the commands below each title."""


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="raymq", prog_name="raymq")
@address_option_before
@namespace_option_before
def cli() -> None:
    """Run and use raymq, a durable message queue inside a Ray cluster.

    \b
    raymq up                                  start it on this machine (or in the running Ray cluster)
    raymq topic create orders --queues 8
    echo '{"id": 17}' | raymq send orders --tags paid --key o-17
    raymq consume billing orders --max 10
    """


cli.sections = {title: names.split() for title, names in SECTIONS.items()}


@command(cli)
def version() -> CommandResult:
    """Show the versions of raymq and of the packages that decide how it behaves. Example: raymq version --json"""
    names = ("raymq", "ray", "pyarrow", "numpy", "pyspark", "raydp")
    found = {}
    for name in names:
        # leave out a package that is not installed, because it belongs to an optional extra of raymq
        with suppress(PackageNotFoundError):
            found[name] = package_version(name)
    found["python"] = platform.python_version()
    return CommandResult(found, *(f"{name} {text}" for name, text in found.items()))


def main() -> NoReturn:
    """Run the command `raymq`. The installed console script calls this function."""
    run_command(cli)


def run_command(command: click.Command) -> NoReturn:
    """Run a command with the process's arguments, and exit the process with the command's exit code."""
    if not sys.stdout.isatty():
        # Output to a file or a pipe has no terminal width. Use wide lines, because text that is wrapped in a table cell
        # is hard to search for.
        out.width = 200
    try:
        code = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except RaymqError as error:
        say_error(str(error))
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        say_error("interrupted")
        sys.exit(130)
    finally:
        # Ray may print until the process exits. Send Ray's lines to standard error, so that they do not mix with the
        # command's output.
        sys.stdout = sys.stderr
    sys.exit(code if isinstance(code, int) else 0)
