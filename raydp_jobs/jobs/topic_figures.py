"""Shows the statistics that `topic_stats` computes: as JSON, as tables, and as a picture. raydp_jobs.jobs.topic_report
makes a page of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from raydp_jobs.jobs.pictures import bars_over_time, literal
from raydp_jobs.jobs.times import iso_time
from raymq.tools.cli.terminal.output import say, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_BUCKETS: Final = 30
"""Number of time buckets that the printed table shows; older buckets are omitted. The JSON output and the picture have
all buckets."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Statistics of a topic's messages in one time bucket, which begins at `start`. All buckets of a run are equally
    long.

    `tags`: the number of messages with each of the topic's most common tags; the tag None means messages without a tag.
    `keys`: the number of different keys.
    """

    start: datetime
    messages: int
    bytes: int
    keys: int
    tags: dict[str | None, int]


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """Statistics of one topic. `first` and `last`: the store times of the first and last message; None without
    messages. `bytes`: the size of all bodies.

    `tags`: the number of messages with each of the most common tags. `other_tags`: the number of messages with other
    tags.
    """

    topic: str
    messages: int
    bytes: int
    largest: int
    first: datetime | None
    last: datetime | None
    keys: int
    tags: dict[str | None, int]
    other_tags: int
    buckets: list[Bucket]

    @property
    def seconds(self) -> float:
        """The seconds between the store times of the topic's first and last message."""
        return (self.last - self.first).total_seconds() if self.first and self.last else 0.0

    def per_second(self, amount: int) -> float | None:
        """Return a rate: `amount` divided by the time, in seconds, between the topic's first and last message. None if
        that time is zero."""
        return round(amount / self.seconds, 3) if self.seconds else None


def figures_json(found: Iterable[TopicFigures], every_s: int) -> dict[str, Any]:
    """Return topic statistics as `--json` prints them. Rates are per second."""
    return {"every_s": every_s, "topics": [_topic_json(one, every_s) for one in found]}


def _topic_json(one: TopicFigures, every_s: int) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "messages": one.messages,
        "bytes": one.bytes,
        "largest_body": one.largest,
        "first": iso_time(one.first),
        "last": iso_time(one.last),
        "messages_per_second": one.per_second(one.messages),
        "bytes_per_second": one.per_second(one.bytes),
        "keys": one.keys,
        "tags": _tags_json(one.tags),
        "other_tags": one.other_tags,
        "over_time": [
            {
                "start": iso_time(bucket.start),
                "messages": bucket.messages,
                "bytes": bucket.bytes,
                "messages_per_second": round(bucket.messages / every_s, 3),
                "bytes_per_second": round(bucket.bytes / every_s, 3),
                "keys": bucket.keys,
                "tags": _tags_json({tag: count for tag, count in bucket.tags.items() if count}),
            }
            for bucket in one.buckets
        ],
    }


def _tags_json(tags: dict[str | None, int]) -> list[dict[str, Any]]:
    return [{"tags": tag, "messages": count} for tag, count in tags.items()]


def show(found: Sequence[TopicFigures], every_s: int) -> None:
    """Print topic statistics as tables: the topics, their tags, and the newest SHOWN_BUCKETS time buckets of each
    topic."""
    names = ["topic", "messages", "bytes", "largest body", "keys", "first", "last", "messages/s", "bytes/s"]
    rows = [
        [
            *(one.topic, one.messages, one.bytes, one.largest, one.keys, iso_time(one.first), iso_time(one.last)),
            *(one.per_second(one.messages), one.per_second(one.bytes)),
        ]
        for one in found
    ]
    table(names, rows)
    tags = []
    for one in found:
        tags += [(one.topic, tag, count) for tag, count in one.tags.items()]
        tags += [(one.topic, "(others)", one.other_tags)] if one.other_tags else []
    if tags:
        table(["topic", "tag", "messages"], tags)
    for one in found:
        if one.buckets:
            _show_buckets(one, every_s)


def _show_buckets(one: TopicFigures, every_s: int) -> None:
    newest = one.buckets[-SHOWN_BUCKETS:]
    if len(newest) < len(one.buckets):
        say(f"{one.topic}: the newest {len(newest)} of {len(one.buckets)} stretches of {every_s} s")
    names = [f"{one.topic}, from", "messages", "messages/s", "bytes", "keys", *[_tag_name(tag) for tag in one.tags]]
    rows = [
        [
            *(iso_time(bucket.start), bucket.messages, round(bucket.messages / every_s, 1), bucket.bytes, bucket.keys),
            *bucket.tags.values(),
        ]
        for bucket in newest
    ]
    table(names, rows)


def _tag_name(tag: str | None) -> str:
    return "(no tag)" if tag is None else tag


def draw(figure: Figure, found: Sequence[TopicFigures], every_s: int) -> None:
    """Draw message rates and numbers of keys over time. With one topic the rates are by tag, with several topics by
    topic."""
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    series = rates_by_tag(found[0], every_s) if len(found) == 1 else None
    times = sorted({bucket.start for one in found for bucket in one.buckets})
    of_topic = {one.topic: {bucket.start: bucket for bucket in one.buckets} for one in found}

    def over_time(amount: Callable[[Bucket], float]) -> dict[str, list[float]]:
        return {
            topic: [amount(by_start[start]) if start in by_start else 0.0 for start in times]
            for topic, by_start in of_topic.items()
        }

    figure.suptitle(literal(", ".join(one.topic for one in found)))
    messages = series or over_time(lambda bucket: bucket.messages / every_s)
    bars_over_time(upper, times, every_s, messages, "messages per second")
    bars_over_time(middle, times, every_s, over_time(lambda bucket: bucket.bytes / every_s), "bytes per second")
    bars_over_time(lower, times, every_s, over_time(lambda bucket: bucket.keys), f"different keys in {every_s} s")


def rates_by_tag(one: TopicFigures, every_s: int) -> dict[str, list[float]]:
    """Return the messages per second in each time bucket, for each common tag. If the topic also has rarer tags, the
    sum of their rates is one more series."""
    series = {_tag_name(tag): [bucket.tags[tag] / every_s for bucket in one.buckets] for tag in one.tags}
    if one.other_tags:
        rest = [bucket.messages - sum(bucket.tags.values()) for bucket in one.buckets]
        series["(others)"] = [count / every_s for count in rest]
    return series
