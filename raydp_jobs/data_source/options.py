"""Options of Spark's ``format("raymq")``: texts, which this module converts to the options of `read_topic` and
`stream_topic`.

Spark passes each option of a data source as a text, and ignores the case of its name. The names and the meanings are
the names and meanings of `read_topic` and `stream_topic`. A list is a text with commas, and offsets per queue are JSON.
An option that a reader does not use is refused, because a misspelled option would otherwise read other messages. The
module uses neither Spark nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from raymq.client.consumer.subscription import Subscription
from raymq.client.scan.batches import check_unreadable
from raymq.client.scan.offsets import ending_boundary, starting_boundary, streaming_boundary
from raymq.client.scan.ranges import ScanOptions, check_options
from raymq.common.errors import InvalidArgumentError
from raymq.common.names import check_group, check_topic
from raymq.common.numbers import POSITIVE, TIME_S, number_of_text, seconds, shown
from raymq.records.filters.sql import SqlFilter
from raymq.records.kernels.columns import schema_with

Convert = Callable[[str, str], Any]
"""Type of a function that converts an option's text. Its arguments are the option's name and the text."""


def _text(option: str, text: str) -> str:
    return text


def _names(option: str, text: str) -> list[str]:
    """Convert names that are separated by commas. Raises InvalidArgumentError if a name is empty."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InvalidArgumentError(f"{option} must be names separated by commas, not {shown(text)}")
    return names


def _count(option: str, text: str) -> int:
    return number_of_text(option, text.strip(), POSITIVE)


def _flag(option: str, text: str) -> bool:
    flag = {"true": True, "false": False}.get(text.strip().lower())
    if flag is None:
        raise InvalidArgumentError(f"{option} must be true or false, not {shown(text)}")
    return flag


def _delay_s(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise InvalidArgumentError(f"{option} must be a number of seconds, {TIME_S}, not {shown(text)}") from None
    return seconds(option, number)


def _time(option: str, text: str) -> int | datetime:
    """Convert a point in time: milliseconds since 1970, or a date and time in ISO format. Raises InvalidArgumentError
    for other texts."""
    if text.strip().isdecimal():
        return number_of_text(option, text.strip())
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidArgumentError(
            f"{option} must be milliseconds since 1970 or a time such as 2026-03-01T12:00:00+00:00, not {shown(text)}"
        ) from None


def _expression(option: str, text: str) -> SqlFilter:
    return SqlFilter(text)


_OF_BOTH: Final[Mapping[str, Convert]] = {
    "topic": _names,
    "topic_pattern": _text,
    "columns": _names,
    "tags": _text,
    "expression": _expression,
    "starting_offsets": _text,
    "starting_timestamp": _time,
    "starting_offsets_by_timestamp": _text,
    "starting_offsets_by_timestamp_strategy": _text,
    "min_partitions": _count,
    "fail_on_data_loss": _flag,
    "unreadable": _text,
}
BATCH_OPTIONS: Final[Mapping[str, Convert]] = {
    **_OF_BOTH,
    "ending_offsets": _text,
    "ending_timestamp": _time,
    "ending_offsets_by_timestamp": _text,
    "max_offsets": _count,
    "partition_bytes": _count,
}
"""The options of a batch read, by name, each with the conversion of its text."""
STREAM_OPTIONS: Final[Mapping[str, Convert]] = {
    **_OF_BOTH,
    "max_offsets_per_trigger": _count,
    "min_offsets_per_trigger": _count,
    "max_trigger_delay_s": _delay_s,
    "commit_group": _text,
}
"""The options of a stream, by name, each with the conversion of its text."""
_ALL: Final[Mapping[str, Convert]] = {**BATCH_OPTIONS, **STREAM_OPTIONS}
_SCAN_NAMES: Final = frozenset(ScanOptions.__annotations__)


def parse_options(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert the texts of all options that a user gave to `format("raymq")`, before it is known whether the user reads
    a batch or a stream. An option without a value counts as omitted.

    Raises InvalidArgumentError for an unknown option and for a value that no reader accepts. Raises IllegalNameError
    for an illegal topic name or group name, and FilterExpressionError for an `expression` that does not compile.
    """
    options: dict[str, Any] = {}
    for name, text in given.items():
        option = name.lower()
        if option not in _ALL:
            raise _unknown(name)
        if text is not None:
            options[option] = _ALL[option](option, text)
    if ("topic" in options) == ("topic_pattern" in options):
        raise InvalidArgumentError(
            "choose the topics to read: pass exactly one of the options topic and topic_pattern, such as "
            '.option("topic", "orders")'
        )
    if "topic" in options:
        options["topic"] = list(dict.fromkeys(options["topic"]))
        for topic in options["topic"]:
            check_topic(topic)
    Subscription.parse("any", options.get("tags", "*"))
    check_unreadable(options.get("unreadable", "null"))
    schema_with("binary", options.get("columns"))
    if "commit_group" in options:
        check_group(options["commit_group"])
    return options


def batch_options(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert the texts of the options of a batch read. Raises the errors of `parse_options`, and InvalidArgumentError
    for options of streams and for contradictory begins and ends."""
    options = parse_options(given)
    _refuse(options, BATCH_OPTIONS, "a batch read", "a stream: spark.readStream")
    check_options(scan_options(options))
    if "topic" in options:
        starting_boundary(options, options["topic"])
        ending_boundary(options, options["topic"])
    return options


def stream_options(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert the texts of the options of a stream. Raises the errors of `parse_options`, and InvalidArgumentError for
    options of batch reads and for contradictory begins."""
    options = parse_options(given)
    _refuse(options, STREAM_OPTIONS, "a stream, which has no end,", "a batch read: spark.read")
    check_options(scan_options(options))
    if "topic" in options:
        streaming_boundary(options, options["topic"])
    return options


def scan_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the converted options that are options of `plan_ranges`."""
    return {name: value for name, value in options.items() if name in _SCAN_NAMES}


def _refuse(options: Mapping[str, Any], known: Mapping[str, Convert], reader: str, other: str) -> None:
    foreign = sorted(options.keys() - known.keys())
    if foreign:
        raise InvalidArgumentError(
            f'format("raymq"): {reader} has no option {", ".join(foreign)}, which is for {other}. Its options are '
            f"{', '.join(sorted(known))}"
        )


def _unknown(name: str) -> InvalidArgumentError:
    """Return the error for an unknown option. The error names the option that differs only in underscores, such as
    `starting_offsets` for `startingOffsets`."""
    if name.lower() == "path":
        hint = 'pass the topic as an option, .option("topic", "orders"), and call load() without a path'
    else:
        plain = name.lower().replace("_", "").replace("-", "").replace(".", "")
        alike = next((known for known in sorted(_ALL) if known.replace("_", "") == plain), None)
        hint = f"write {alike}" if alike else f"its options are {', '.join(sorted(_ALL))}"
    return InvalidArgumentError(f'format("raymq") has no option {shown(name)}: {hint}')
