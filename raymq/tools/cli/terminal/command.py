"""`command` makes a function a command of `raymq`: its options, its client, and its output as a table or as JSON.

A new command needs one function, in the module of its noun:

    @command(topic, "stats")
    @topic_argument
    def topic_stats(admin: Admin, topic_name: str) -> CommandResult:
        \"\"\"Show how many messages are sent to a topic. Example: raymq topic stats orders\"\"\"
        return stats_result([("messages", admin.topic_stats(topic_name).messages)])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, wraps
from typing import Any

import click
from rich.console import RenderableType

from raymq.tools.cli.terminal.output import (
    Command,
    Table,
    address_option,
    client_of,
    json_option,
    namespace_option,
    options_of,
    print_value,
    quiet_option,
    say_error,
    show,
)
from raymq.tools.cli.terminal.progress import steps


class CommandResult:
    """The output of a command: `value` is printed as JSON, and `shown` (texts, tables and drawings) is printed for
    people.

    `errors` are printed on standard error after the output. If `failed` is true, the command exits with code 1.
    """

    def __init__(
        self, value: Any, *shown: str | Table | RenderableType, errors: Sequence[str] = (), failed: bool = False
    ) -> None:
        self.value, self.shown = value, shown
        self.errors, self.failed = errors, failed

    def print(self, *, as_json: bool) -> None:
        """Print the command's output: with `as_json`, `value` as JSON, otherwise `shown` for people. Then print the
        errors. Raises click's Exit if the command has failed."""
        print_value(as_json, self.value, lambda: show(*self.shown))
        for error in self.errors:
            say_error(error)
        if self.failed:
            raise click.exceptions.Exit(1)


def rows_result(
    key: str,
    names: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    total: int | None = None,
    more: Mapping[str, Any] | None = None,
    errors: Sequence[str] = (),
    failed: bool = False,
) -> CommandResult:
    """Return a command result that shows rows as one table for people, or as JSON objects below the key `key`.

    `total` is the index of the column whose sum is printed below the table. The JSON output also contains the fields of
    `more`.
    """
    listed = list(rows)
    footer = None
    if total is not None and listed:
        footer = ["total", *[""] * (len(names) - 2), sum(row[total] for row in listed)]
    table = Table(names, listed, footer)
    return CommandResult({key: table.objects(), **(more or {})}, table, errors=errors, failed=failed)


def fields_result(fields: Mapping[str, Any], *, failed: bool = False) -> CommandResult:
    """Return a command result that shows the fields of one object: a table with a row for each field, or a JSON
    object."""
    return CommandResult(fields, Table(["field", "value"], [list(field) for field in fields.items()]), failed=failed)


def stats_result(counters: Iterable[tuple[str, Any]]) -> CommandResult:
    """Return a command result that shows the counters (raymq.common.protocol.stats) with their names, one row each.
    `per_second` is the rate of the last minute."""
    rows = [[name, one.total, one.minute, one.hour, one.day, round(one.minute_tps, 1)] for name, one in counters]
    return rows_result("stats", ["of", "total", "minute", "hour", "day", "per_second"], rows)


def command(
    group: click.Group, name: str | None = None, *, quiet: bool = False, json: bool = True, lines: bool = False
) -> Callable[[Callable[..., CommandResult | None]], click.Command]:
    """Turn a function into a command of `group`. The command prints the CommandResult that the function returns.

    The function gets its own options and arguments, and the following values if it has parameters for them:

    - `admin`, `client`: the connection to the cluster, closed when the function has returned. The command connects when
      the function uses the connection first, so the function can refuse options without a cluster;
    - `address`: the value of --address, for functions that connect themselves;
    - `progress`: a function to call with the name of each step, which the terminal then shows;
    - `as_json`: true with --json, for functions that print while they run.

    The command has the option --address if the function has one of the first three parameters, --namespace if it has
    `admin` or `client`, and --json unless `json` is false. It has --quiet if the function has `progress`, or if `quiet`
    is true. If `lines` is true, the steps are printed as lines if standard error is no terminal.
    """

    def decorate(function: Callable[..., CommandResult | None]) -> click.Command:
        wanted = set(inspect.signature(function).parameters)

        @wraps(function)
        def run(address: str | None = None, as_json: bool = False, **given: Any) -> None:
            given |= {key: value for key, value in (("address", address), ("as_json", as_json)) if key in wanted}
            with ExitStack() as opened:
                connect = cache(lambda: opened.enter_context(client_of(address)))
                if "client" in wanted:
                    given["client"] = _Lazy(connect)
                if "admin" in wanted:
                    given["admin"] = _Lazy(lambda: connect().admin)
                if "progress" in wanted:
                    given["progress"] = opened.enter_context(steps(lines=lines))
                result = function(**given)
            if result is not None:
                result.print(as_json=as_json)

        common = [quiet_option] if quiet or "progress" in wanted else []
        common += [json_option] if json else []
        common += [namespace_option] if wanted & {"admin", "client"} else []
        common += [address_option] if wanted & {"admin", "client", "address"} else []
        made = click.command(name, cls=Command)(run)
        made.params += options_of(common)
        group.add_command(made)
        return made

    return decorate


class _Lazy:
    """Proxy for an object that is created only when one of its attributes is first read. `make` creates the
    object."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)
