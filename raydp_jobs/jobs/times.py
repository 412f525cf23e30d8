"""Command-line options for times: the period of store times that a job reads, and the time interval for which it counts
messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click

from raymq.client.scan.ranges import ScanOptions
from raymq.common.errors import InvalidArgumentError
from raymq.tools.cli.options import DURATION, TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Period:
    """A period of time from `start_ms` up to, not including, `end_ms`, in ms since 1970. None means no bound."""

    start_ms: int | None = None
    end_ms: int | None = None

    def __post_init__(self) -> None:
        if self.start_ms is not None and self.end_ms is not None and self.start_ms >= self.end_ms:
            raise InvalidArgumentError("--from must be before --to")

    def has(self, time_ms: int) -> bool:
        """Return True if the period contains the time `time_ms`."""
        return (self.start_ms is None or time_ms >= self.start_ms) and (self.end_ms is None or time_ms < self.end_ms)

    def scan_options(self) -> ScanOptions:
        """Return options for a batch read of the messages that were stored in this period of time. The read may return
        a few other messages, too.

        If a clock was set back, offsets do not ascend with store times, so the offset range of the period is only
        approximate. So the messages must also be filtered with the method `of` of this class.
        """
        options: ScanOptions = {}
        if self.start_ms is not None:
            options["starting_timestamp"] = self.start_ms
            options["starting_offsets_by_timestamp_strategy"] = "latest"
        if self.end_ms is not None:
            options["ending_timestamp"] = self.end_ms
        return options

    def of(self, messages: DataFrame) -> DataFrame:
        """Return the rows of `messages` that were stored between the start and the end of this Period."""
        from pyspark.sql import functions as sf

        stored_ms = sf.unix_millis("store_timestamp")
        if self.start_ms is not None:
            messages = messages.where(stored_ms >= self.start_ms)
        return messages if self.end_ms is None else messages.where(stored_ms < self.end_ms)


ALWAYS: Final = Period()
"""The period that contains every time: it has no start and no end."""


def period_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options --from and --to. The command gets their values as one argument,
    `period`."""

    @click.option(
        "--from", "start_ms", type=TIME, help="Only messages stored at this time or later: ISO 8601, or -2h, -7d."
    )
    @click.option("--to", "end_ms", type=TIME, help="Only messages stored before this time.")
    @wraps(command)
    def with_period(*args: Any, start_ms: int | None, end_ms: int | None, **options: Any) -> Any:
        return command(*args, period=Period(start_ms, end_ms), **options)

    return with_period


def every_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the option --every to a command: the time interval for which the job counts
    messages. The command gets the interval in seconds as `every_s`."""
    return click.option(
        "--every",
        "every_s",
        type=DURATION,
        default=default,
        show_default=True,
        help="Length of the intervals to count in, such as 10s, 1m, 1h or 1d.",
    )


def iso_time(moment: datetime | None) -> str | None:
    """Format a time in ISO form, in UTC. Returns None for None."""
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="milliseconds")
