"""Options of Spark's ``format("raymq")``: texts, which this module converts to the options of `read_topic`,
`stream_topic`, `write_topic` and `topic_sink`.

Spark passes each option of a data source as a text, and ignores the case of its name. The names and the meanings are
the names and meanings of these four functions. A list is a text with commas, and offsets per queue are JSON. An option
that a reader or a writer does not use is refused, because a misspelled option would otherwise read other messages. The
module uses neither Spark nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from raymq.client.consumer.subscription import Subscription
from raymq.client.producer.settings import ProducerOptions, check_repeatable
from raymq.client.scan.batches import check_unreadable
from raymq.client.scan.offsets import ending_boundary, starting_boundary, streaming_boundary
from raymq.client.scan.ranges import ScanOptions, check_options
from raymq.common.errors import InvalidArgumentError
from raymq.common.names import check_group, check_topic, check_user_topic
from raymq.common.numbers import POSITIVE, TIME_S, number_of_text, seconds, shown
from raymq.records.filters.sql import SqlFilter
from raymq.records.format.compression import Compression, CompressionType
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


def _directory(option: str, text: str) -> Path:
    """Convert the path of a directory, which may begin with ``file:``. Raises InvalidArgumentError for a relative path
    and for other file systems, such as ``s3a:``."""
    path = urlsplit(text).path if text.startswith("file:") else text
    if not path.startswith("/"):
        raise InvalidArgumentError(
            f"{option} must be an absolute path of a directory that Spark's driver and executors share, not "
            f"{shown(text)}: raymq writes there without Spark's file systems"
        )
    return Path(path)


def _compression(option: str, text: str) -> Compression:
    kind = {one.name.lower(): one for one in CompressionType}.get(text.strip().lower())
    if kind is None:
        names = ", ".join(one.name.lower() for one in CompressionType)
        raise InvalidArgumentError(f"{option} must be one of {names}, not {shown(text)}")
    return Compression(kind)


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
SORTS: Final = ("auto", "always", "never")
_OF_BOTH_WRITES: Final[Mapping[str, Convert]] = {
    "topic": _text,
    "sort": _text,
    "plan_location": _directory,
    "send_timeout_s": _delay_s,
    "attempt_timeout_s": _delay_s,
    "max_buffered_bytes": _count,
    "max_buffered_messages": _count,
    "max_message_size_bytes": _count,
    "compression": _compression,
}
BATCH_WRITE_OPTIONS: Final[Mapping[str, Convert]] = {**_OF_BOTH_WRITES, "write_id": _text}
"""The options of a batch write, by name, each with the conversion of its text."""
STREAM_WRITE_OPTIONS: Final[Mapping[str, Convert]] = {**_OF_BOTH_WRITES, "checkpointlocation": _text}
"""The options of a stream's write, by name, each with the conversion of its text. Spark uses `checkpointLocation`
itself."""
_NOT_WRITTEN: Final[Mapping[str, str]] = {
    "check_first": "Spark gives the rows to a data source only once",
    "name": "each writeStream has a query of its own",
    "on_batch": "an option of Spark is a text, not a function: use a listener of Spark's streaming queries",
    "hooks": "an option of Spark is a text, not a function",
    "check_forbidden": "an option of Spark is a text, not a function",
    "client": "register_raymq has chosen the cluster",
    "when_full": "the write waits for buffer space",
    "send_latency_enable": "the queue of each row is fixed",
    "retry_when_not_store_ok": "rows are always sent again until they are stored safely",
    "default_topic_queue_nums": "the topic must exist",
}
"""The options of `write_topic` and `topic_sink` that the format does not have, each with the reason."""
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


def batch_write_options(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert the texts of the options of a batch write. An option without a value counts as omitted.

    Raises InvalidArgumentError for an unknown option, for an illegal value, and for a `plan_location` without a
    `write_id`. Raises IllegalNameError for an illegal topic name.
    """
    options = _write_options(given, BATCH_WRITE_OPTIONS, "df.write")
    if options.get("write_id") == "":
        raise InvalidArgumentError("write_id must be a text that names the write")
    if "plan_location" in options and "write_id" not in options:
        raise InvalidArgumentError(
            "plan_location stores what a repeat of the write needs, and without write_id the write is not repeated: "
            "pass write_id, too"
        )
    return options


def stream_write_options(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert the texts of the options of a stream's write. Raises the errors of `batch_write_options`."""
    options = _write_options(given, STREAM_WRITE_OPTIONS, "df.writeStream")
    options.pop("checkpointlocation", None)
    return options


def producer_options(options: Mapping[str, Any]) -> ProducerOptions:
    """Return the converted options of a write that are settings of its producers."""
    return cast("ProducerOptions", {name: options[name] for name in ProducerOptions.__annotations__ if name in options})


def _write_options(given: Mapping[str, str | None], known: Mapping[str, Convert], writer: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in given.items():
        option = name.lower()
        if option in _NOT_WRITTEN:
            raise InvalidArgumentError(f'{writer}.format("raymq") has no option {option}: {_NOT_WRITTEN[option]}')
        if option not in known:
            raise _unknown(name, known, f'{writer}.format("raymq")', "save()")
        if text is not None:
            options[option] = known[option](option, text)
    if "topic" not in options:
        raise InvalidArgumentError('choose the topic of the rows: pass the option topic, .option("topic", "orders")')
    check_user_topic(options["topic"])
    if options.setdefault("sort", "auto") not in SORTS:
        raise InvalidArgumentError(f"sort must be one of {', '.join(SORTS)}, not {shown(options['sort'])}")
    check_repeatable(producer_options(options))
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


def _unknown(
    name: str, known: Mapping[str, Convert] = _ALL, user: str = 'format("raymq")', call: str = "load()"
) -> InvalidArgumentError:
    """Return the error for an unknown option. The error names the option that differs only in underscores, such as
    `starting_offsets` for `startingOffsets`. `known`: the options of `user`. `call`: the call that begins its work."""
    if name.lower() == "path":
        hint = f'pass the topic as an option, .option("topic", "orders"), and call {call} without a path'
    else:
        plain = name.lower().replace("_", "").replace("-", "").replace(".", "")
        alike = next((one for one in sorted(known) if one.replace("_", "") == plain), None)
        hint = f"write {alike}" if alike else f"its options are {', '.join(sorted(known))}"
    return InvalidArgumentError(f"{user} has no option {shown(name)}: {hint}")
