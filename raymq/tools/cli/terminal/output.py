r"""Output of commands: tables for people, `--json` for machines, one line on standard error for an error.

Every text is printed literally, and nothing in it is markup. A body, a key or an error may hold any text. A control
character that is sent to a terminal moves the cursor, renames the window or turns the direction of writing, so that
text looks like something else. Such characters are shown as Python writes them in a string: \x1b, \n, \u202e.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
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
"""Unicode's control, format (directions among them), surrogate, line and paragraph separator characters."""

_JOINERS: Final = frozenset("\u200c\u200d")
"""Format characters that ordinary text needs: Persian words, and emoji made of several."""


def printable(text: str) -> str:
    """`text` in one line, with every control character escaped; all other characters are unchanged."""
    if text.isprintable():
        return text
    return "".join(_python_escape(char) if _is_unsafe(char) else char for char in text)


def json_text(value: Any) -> str:
    """`value` as JSON in one line, readable and without control characters; it can be read back unchanged."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(_json_escape(char) if _is_unsafe(char) else char for char in text)


def error_text(text: str) -> str:
    """`text` for an error: as `printable`, but its lines are kept, those after the first indented."""
    return "\n  ".join(printable(line) for line in text.rstrip("\n").split("\n"))


def _is_unsafe(char: str) -> bool:
    return unicodedata.category(char) in _ESCAPED_CATEGORIES and char not in _JOINERS


def _python_escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    """The JSON escape of one character; two, if it is outside Unicode's first plane."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


out = Console(markup=False, emoji=False, highlight=False)
err = Console(markup=False, emoji=False, highlight=False, stderr=True, soft_wrap=True)


class Command(click.Command):
    """A command that has nothing but its own answers on standard output.

    Ray prints its raylets' messages on `sys.stdout`, so that is standard error while the command runs; the command's
    answers go through `out`. Help, version and completion are printed before, as click does it.
    """

    def invoke(self, ctx: click.Context) -> Any:
        out.file = stdout = sys.stdout
        if isinstance(stdout, TextIOWrapper):  # a terminal that cannot show a character still gets the others
            stdout.reconfigure(errors="backslashreplace")
        sys.stdout = sys.stderr
        try:
            return super().invoke(ctx)
        finally:
            sys.stdout = stdout


class Group(click.Group):
    """The commands about one thing, such as `raymq topic`: a noun with its verbs."""

    command_class = Command


_QUIET: Final = "raymq.quiet"
"""The key of a click context's `meta` that says that no progress is to be shown."""


def _hush(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if value:
        ctx.meta[_QUIET] = True
    return value


def is_quiet() -> bool:
    """True if the command that runs was told --json or --quiet, so that it shows no progress."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and _QUIET in ctx.meta


json_option = click.option("--json", "as_json", is_flag=True, callback=_hush, help="Print JSON instead of a table.")
quiet_option = click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=_hush, help="Show no progress.")
address_option = click.option("--address", help="Ray cluster to use, host:port. Default: the one on this machine.")


@contextmanager
def client_of(address: str | None) -> Iterator[Any]:
    """A client for one command, closed at its end."""
    from raymq.client.client import connect

    context = click.get_current_context(silent=True)  # none in a job that is no command of raymq's
    namespace = None if context is None else context.find_root().params.get("namespace")
    with connect(address, namespace=namespace) as client:
        yield client


def say(text: str) -> None:
    """Print a line, literally."""
    click.echo(printable(text), file=out.file)


def say_error(text: str) -> None:
    """Print the error of a command on standard error."""
    err.print(Text(f"raymq: {error_text(text)}"))


def print_value(as_json: bool, value: Any, otherwise: Callable[[], None]) -> None:
    """Print `value` as one line of JSON, or let `otherwise` print what people read."""
    if as_json:
        click.echo(json_text(value), file=out.file)
    else:
        otherwise()


@dataclass(frozen=True, slots=True)
class Table:
    """The names of the columns, the rows, and an optional last row with sums."""

    names: Sequence[str]
    rows: Sequence[Sequence[Any]]
    footer: Sequence[Any] | None = None


def show(*shown: str | Table | RenderableType) -> None:
    """Print texts, each in lines of its own, tables, and drawings of rich."""
    for part in shown:
        if isinstance(part, str):
            say(part)
        elif isinstance(part, Table):
            table(part.names, part.rows, part.footer)
        else:
            out.print(part)


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], footer: Sequence[Any] | None = None) -> None:
    """Print a table; columns of numbers are aligned to the right."""
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
    """A message's fields as commands show them. `body` is None for a message that cannot be read, and only such a
    message has an `error`, which says why."""
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
    return fields if error is None else {**fields, "error": str(error)}


def message_line(message: Any, as_json: bool) -> str:
    """A message in one line."""
    fields = message_dict(message)
    if as_json:
        return json_text(fields)
    return printable(f"{fields['queue']}:{fields['queue_offset']}  {fields['tags'] or '-'}  {shown_body(fields)}")


def shown_body(fields: dict[str, Any]) -> str:
    """The body of a message's fields (`message_dict`), or why it cannot be read."""
    return f"! {fields['error']}" if "error" in fields else str(fields["body"])


def duration(milliseconds: int) -> str:
    """A length of time as people say it: 0 s, 850 ms, 12 s, 3 m 5 s, 2 h 10 m, 4 d 3 h."""
    if milliseconds < 1000:
        return f"{milliseconds} ms" if milliseconds else "0 s"
    seconds = milliseconds // 1000
    for unit, size, below, smaller in (("d", 86400, 3600, "h"), ("h", 3600, 60, "m"), ("m", 60, 1, "s")):
        if seconds >= size:
            rest = seconds % size // below
            return f"{seconds // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"


def iso(milliseconds: int) -> str:
    """A time as people write it, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
