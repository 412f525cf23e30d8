"""Command-line arguments and options that several commands share, and the types of their values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from raymq.common.delay import parse_duration_ms, parse_time
from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import POSITIVE, NumberRange
from raymq.common.places import parse_position, parse_queue
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType

if TYPE_CHECKING:
    from raymq.common.message import ConsumeFromWhere, MessageQueue

topic_argument = click.argument("topic_name", metavar="TOPIC", shell_complete=completes("topics"))
group_argument = click.argument("group_name", metavar="GROUP", shell_complete=completes("groups"))
broker_argument = click.argument("broker_name", metavar="BROKER", shell_complete=completes("brokers"))
config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings file. Default: raymq.yaml in the current directory, if it exists.",
)


class ParsedType(click.ParamType[Any]):
    """Option type for a text of a given form, such as a time. `parse` converts the text to the option's value, and
    raises InvalidArgumentError for a text of another form. Such a text is a usage error with exit code 2, which names
    the option."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of an option's text. Raises BadParameter if the text has another form."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except InvalidArgumentError as error:
            self.fail(str(error), param, ctx)


TIME: Final = ParsedType("time", lambda text: parse_time(text, time.time_ns() // 1_000_000))
"""Option type for a time in ms since 1970, given as ISO 8601 or relative to now, such as -2h or +30m."""
DURATION: Final = ParsedType("time", lambda text: parse_duration_ms(text) // 1000)
"""Option type for a length of time in whole seconds, given as 30s, 5m, 2h or 1d."""
POSITION: Final = ParsedType("position", lambda text: parse_position("", text))
"""Option type for an offset of a queue, given as BROKER:QUEUE:OFFSET: a pair of a queue without a topic, and the
offset."""

QUEUE: Final = ParsedType("queue", lambda text: parse_queue("", text))
"""Option type for a queue, given as BROKER:QUEUE: a MessageQueue without a topic."""

queue_option = click.option(
    "--queue",
    type=QUEUE,
    metavar="BROKER:QUEUE",
    help="Only this queue, for example broker-a:3.",
)
"""The option --queue. The command's function gets a MessageQueue without a topic, or None."""


def queue_of(topic_name: str, queue: MessageQueue | None) -> MessageQueue | None:
    """Return the queue of a topic that the option --queue selects; None without the option."""
    return None if queue is None else replace(queue, topic=topic_name)


class RenamedOption(click.Option):
    """An option that had other names in earlier versions (`former`). The former names still work, but help and
    completion do not list them."""

    def __init__(self, *args: Any, former: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.former = list(former)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser accept the option's present and former names."""
        listed = self.opts
        self.opts = [*listed, *self.former]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = listed


def number_option(
    option: str,
    bounds: NumberRange,
    text: str,
    default: float | None = None,
    *,
    name: str | None = None,
    former: Sequence[str] = (),
) -> Callable[[Any], Any]:
    """Return an option whose value is a number within `bounds`. `text`: help text. `name`: name of the function's
    argument, if it differs from the option's. `former`: names of the option in earlier versions."""
    names = [option] if name is None else [option, name]
    kind = NumberType(bounds)
    return click.option(
        *names, cls=RenamedOption, former=former, type=kind, default=default, show_default=True, help=text
    )


def given_options(**options: Any) -> dict[str, Any]:
    """Return the command-line options that the user gave: the options whose value is not None."""
    return {name: value for name, value in options.items() if value is not None}


def max_option(text: str, bounds: NumberRange = POSITIVE, default: int | None = None) -> Callable[[Any], Any]:
    """Return the command-line option `--max`. The command's function gets its value as the argument `limit`."""
    return number_option("--max", bounds, text, default, name="limit")


def subscription_options(verb: str) -> Callable[[Any], Any]:
    """Return the command-line options --tags and --sql, which filter messages. The command's function gets their values
    as the arguments `tags` and `condition`."""

    def decorate(function: Any) -> Any:
        sql = click.option(
            "--sql", "condition", help="""Condition on properties, for example "price > 5 AND region = 'eu'"."""
        )
        tags = click.option(
            "--tags", default="*", show_default=True, help=f'Tags to {verb}, for example "paid || refunded".'
        )
        return tags(sql(function))

    return decorate


def subscription(tags: str, condition: str | None) -> Any:
    """Return the filter expression for the values of --tags and --sql. Raises UsageError if both options are
    given."""
    from raymq.records.filters.sql import sql

    if condition is None:
        return tags
    if tags != "*":
        raise click.UsageError("--tags and --sql exclude each other: write TAGS = 'paid' in the condition")
    return sql(condition)


_STARTS: Final = {
    "first": "CONSUME_FROM_FIRST_OFFSET",
    "last": "CONSUME_FROM_LAST_OFFSET",
    "end": "CONSUME_FROM_END",
}
"""Values of `start_option`, with the name of each value's ConsumeFromWhere."""

start_option = click.option(
    "--from",
    "start",
    type=click.Choice(list(_STARTS)),
    default="last",
    show_default=True,
    help="Where a new group starts. last: at the end of an old topic, but at the first message of a young topic, whose "
    "first message is still in the store's memory. end: at the end of every topic.",
)


def consume_from(start: str) -> ConsumeFromWhere:
    """Return the position at which a new group begins to consume. `start` is the value of the option that
    `start_option` defines."""
    from raymq.common.message import ConsumeFromWhere

    return ConsumeFromWhere[_STARTS[start]]
