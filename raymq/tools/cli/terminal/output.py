r"""Output of commands: tables for people, `--json` for machines, one line on standard error for an error.

Every text is printed literally: no part of a text is markup. A body, a key or an error may hold any text. A control
character can move a terminal's cursor, rename its window or change the direction of writing, so that a text looks like
another text. Control characters are therefore printed as Python writes them in a string: \x1b, \n, \u202e.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, Final

import click
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

_ESCAPED_CATEGORIES: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories of the characters that are escaped in output: control, format, surrogate, line separator and
paragraph separator."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_JOINERS: Final = frozenset("\u200c\u200d")
"""Format characters that are not escaped in output, because Persian words and emoji of several characters need
them."""


def printable(text: str) -> str:
    """Return `text` as one line with every control character escaped. All other characters are unchanged."""
    if text.isprintable():
        return text
    return "".join(char.encode("unicode_escape").decode() if _is_unsafe(char) else char for char in text)


def json_text(value: Any) -> str:
    """Return `value` as one line of JSON in which control characters are escaped, so that a JSON parser returns the
    same value."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(_json_escape(char) if _is_unsafe(char) else char for char in text)


def error_text(text: str) -> str:
    """Format `text` as an error message: control characters are escaped in each line (`printable`), and all lines after
    the first are indented."""
    return "\n  ".join(printable(line) for line in text.rstrip("\n").split("\n"))


def _is_unsafe(char: str) -> bool:
    return unicodedata.category(char) in _ESCAPED_CATEGORIES and char not in _JOINERS


def _json_escape(char: str) -> str:
    """Return the JSON escape of one character. A character outside Unicode's first plane needs two escapes."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


out = Console(markup=False, emoji=False, highlight=False)
err = Console(markup=False, emoji=False, highlight=False, stderr=True, soft_wrap=True)


_RAYLET_COLOURS: Final = "RAY_COLOR_PREFIX"
"""The environment variable that tells Ray whether the messages of its raylets have colours. "0": no colours."""


def check_utf8(value: object, ctx: click.Context, parameter: click.Parameter) -> None:
    """Raise BadParameter if a text that the user gave is not UTF-8: Python then has an unpaired surrogate in it."""
    if isinstance(value, str) and _SURROGATE.search(value):
        raise click.BadParameter(f"{printable(value[:80])} is not UTF-8", ctx, parameter)


class Command(click.Command):
    """A click command that prints only its own results on standard output.

    Ray prints messages of its raylets to `sys.stdout`. Therefore `sys.stdout` is replaced by standard error while the
    command runs, and the command prints its results through `out`. click prints help, version and completion before
    `sys.stdout` is replaced. The messages of the raylets have colours only on a terminal.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises BadParameter if a text is not UTF-8. Paths of files, and options of the type
        UNPROCESSED, may have any bytes."""
        rest = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            if parameter.type is click.UNPROCESSED:
                continue
            value = ctx.params.get(parameter.name or "")
            for text in value if isinstance(value, tuple | list) else (value,):
                check_utf8(text, ctx, parameter)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        out.file = stdout = sys.stdout
        # If the terminal's encoding lacks a character, print an escape in its place instead of failing.
        if isinstance(stdout, TextIOWrapper):
            stdout.reconfigure(errors="backslashreplace")
        sys.stdout = sys.stderr
        if not err.is_terminal or err.no_color:
            os.environ.setdefault(_RAYLET_COLOURS, "0")
        try:
            return super().invoke(ctx)
        finally:
            sys.stdout = stdout


_META_PREFIX: Final = "raymq."
"""Prefix of this module's keys in the `meta` of a click context. A command shares this `meta` with its command groups,
and with other code."""


def _kept(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Keep the value of an option that may stand before or after the command. Returns the value that counts: the last
    one that the user gave."""
    check_utf8(value, ctx, parameter)
    key = f"{_META_PREFIX}{parameter.name}"
    if value is not None:
        ctx.meta[key] = value
    return ctx.meta.get(key)


class Group(click.Group):
    """A click group: the commands of one noun, such as `raymq topic`.

    The help has the whole first sentence of each command. If `sections` has titles with names of commands, the help
    groups the commands by these titles. Options that all commands of a cluster share may stand before the command, too.
    """

    command_class = Command
    group_class = type
    sections: Mapping[str, Sequence[str]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = {parameter.name for parameter in self.params}
        shared = options_of((_option_of_namespace(hidden=True), _option_of_address(hidden=True, expose_value=False)))
        self.params += [option for option in shared if option.name not in own]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before a command. Raises UsageError for an option of commands only, such as --json, which
        must stand after the command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in ("--json", "--quiet", "-q"):
                raise
            raise click.UsageError(
                f"{error.option_name} stands after the command, such as: raymq status {error.option_name}", ctx
            ) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the commands, by section, with the whole first sentence of each command's help."""
        listed = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        texts = {
            name: command.get_short_help_str(SENTENCE_MAX)
            for name, command in listed.items()
            if command is not None and not command.hidden
        }
        sections = {title: [name for name in names if name in texts] for title, names in self.sections.items()}
        rest = sorted(texts.keys() - {name for names in sections.values() for name in names})
        for title, names in (*sections.items(), ("Other" if sections else "Commands", rest)):
            if names:
                with formatter.section(title):
                    formatter.write_dl([(name, texts[name]) for name in names])


SENTENCE_MAX: Final = 1000
"""Maximum length, in characters, of a command's first sentence in the help of its command group. It is so large that no
sentence is cut."""


_QUIET: Final = f"{_META_PREFIX}quiet"
"""Key in the `meta` of a click context. If this key is set, the command shows no progress."""


def _hush(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if value:
        ctx.meta[_QUIET] = True
    return value


def is_quiet() -> bool:
    """Return True if the running command has --json or --quiet, and so shows no progress."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and _QUIET in ctx.meta


def _option_of_namespace(**how: Any) -> Callable[[Any], Any]:
    return click.option(
        "--namespace",
        # Internal name of the option's parameter. It must differ from the parameter names of all commands.
        "within_namespace",
        metavar="NAME",
        expose_value=False,
        callback=_kept,
        help="Use topics and groups of this namespace only, by their names in it.",
        **how,
    )


def _option_of_address(**how: Any) -> Callable[[Any], Any]:
    return click.option(
        "--address",
        metavar="HOST:PORT",
        callback=_kept,
        help="Ray cluster to use. Default: the Ray cluster on this machine.",
        **how,
    )


def options_of(decorators: Sequence[Callable[[Any], Any]]) -> list[click.Parameter]:
    """Return the command options that the click decorators in `decorators` add, in the order in which the help lists
    them."""

    def nothing() -> None: ...

    for decorate in decorators:
        decorate(nothing)
    return click.command()(nothing).params


json_option = click.option("--json", "as_json", is_flag=True, callback=_hush, help="Print JSON instead of a table.")
quiet_option = click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=_hush, help="Show no progress.")
address_option = _option_of_address()
namespace_option = _option_of_namespace()
address_option_before = _option_of_address(expose_value=False)
"""The option --address of `raymq` itself, before a command."""
namespace_option_before = _option_of_namespace(envvar="RAYMQ_NAMESPACE")
"""The option --namespace of `raymq` itself, before a command."""


@contextmanager
def client_of(address: str | None) -> Iterator[Any]:
    """Yield a connected client for one command, and close the client at the end."""
    from raymq.client.client import connect

    # The click context is None in a job that was not started by the command raymq.
    context = click.get_current_context(silent=True)
    namespace = None if context is None else context.meta.get(f"{_META_PREFIX}within_namespace")
    with connect(address, namespace=namespace) as client:
        yield client


def say(text: str) -> None:
    """Print `text` as one line, with control characters escaped and without markup."""
    click.echo(printable(text), file=out.file)


def say_error(text: str) -> None:
    """Print a command's error message on standard error."""
    err.print(Text(f"raymq: {error_text(text)}"))


def say_note(text: str) -> None:
    """Print a note of a running command on standard error, so that standard output has the command's results only."""
    err.print(Text(f"raymq: {printable(text)}"))


def print_value(as_json: bool, value: Any, otherwise: Callable[[], None]) -> None:
    """Print `value` as one line of JSON, or call `otherwise`, which prints it for people."""
    if as_json:
        click.echo(json_text(value), file=out.file)
    else:
        otherwise()


@dataclass(frozen=True, slots=True)
class Table:
    """A table in a command's output: the names of the columns, the rows, and an optional last row with sums."""

    names: Sequence[str]
    rows: Sequence[Sequence[Any]]
    footer: Sequence[Any] | None = None

    def objects(self) -> list[dict[str, Any]]:
        """Return each row of the table as a JSON object whose keys are the column names."""
        return [dict(zip(self.names, row, strict=True)) for row in self.rows]


def show(*shown: str | Table | RenderableType) -> None:
    """Print each argument: a text as one line, a table, or a renderable object of rich."""
    for part in shown:
        if isinstance(part, str):
            say(part)
        elif isinstance(part, Table):
            table(part.names, part.rows, part.footer)
        else:
            out.print(part)


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], footer: Sequence[Any] | None = None) -> None:
    """Print a table. Columns of numbers are aligned to the right."""
    view = RichTable(show_footer=footer is not None)
    for index, name in enumerate(names):
        numeric = bool(rows) and all(isinstance(row[index], int) or row[index] is None for row in rows)
        view.add_column(
            Text(name), _cell(footer[index]) if footer else "", justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        view.add_row(*[_cell(value) for value in row])
    out.print(view)


def _cell(value: Any) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(str(value)))


def message_dict(message: Any) -> dict[str, Any]:
    """Return a message's fields as a dict for the output of commands.

    If the message cannot be read, `body` is None and `error` is the reason. Readable messages have no field `error`.
    Messages without a priority have no field `priority`.
    """
    error = message.body_error
    fields = {
        "topic": message.topic,
        "queue": f"{message.broker_name}:{message.queue_id}",
        "queue_offset": message.queue_offset,
        "tags": message.tags,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "born": iso(message.born_timestamp_ms),
        "stored": iso(message.store_timestamp_ms),
        "body": None if error is not None else message.body.decode(errors="replace"),
    }
    if message.priority is not None:
        fields["priority"] = message.priority
    return fields if error is None else {**fields, "error": str(error)}


def message_line(message: Any, as_json: bool) -> str:
    """Return a message as one line of text or JSON."""
    fields = message_dict(message)
    if as_json:
        return json_text(fields)
    return printable(f"{fields['queue']}:{fields['queue_offset']}  {fields['tags'] or '-'}  {shown_body(fields)}")


def shown_body(fields: dict[str, Any]) -> str:
    """Return the body from the result of `message_dict`, or the reason why the message cannot be read."""
    return f"! {fields['error']}" if "error" in fields else str(fields["body"])


def duration(milliseconds: int) -> str:
    """Format a duration in ms as text: 0 s, 850 ms, 12 s, 3 m 5 s, 2 h 10 m, 4 d 3 h."""
    if milliseconds < 1000:
        return f"{milliseconds} ms" if milliseconds else "0 s"
    seconds = milliseconds // 1000
    for unit, size, below, smaller in (("d", 86400, 3600, "h"), ("h", 3600, 60, "m"), ("m", 60, 1, "s")):
        if seconds >= size:
            rest = seconds % size // below
            return f"{seconds // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"


def iso(milliseconds: int) -> str:
    """Format a time in ms since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
