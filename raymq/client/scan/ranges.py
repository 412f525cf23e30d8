"""Plan of a read: the offset ranges of the topics, and the text of the filter expression.

The functions have no side effects: they read queues, bounds and offsets through `ScanSource`. Every queue contributes
one range [start, end). The limit of the whole read, `max_offsets`, is divided among the ranges.
`raymq.client.scan.partitions` creates the partitions that tasks read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypedDict, Unpack

from raymq.client.scan.offsets import (
    EARLIEST,
    LATEST,
    OffsetLookups,
    OffsetsOption,
    ScanBoundary,
    TimestampOption,
    TimestampsOption,
    TimestampStrategy,
    ending_boundary,
    starting_boundary,
)
from raymq.common.errors import DataLossError, InvalidArgumentError, NoTopicMatchesError, OffsetOutOfRangeError
from raymq.common.message import MessageQueue
from raymq.common.names import check_topic
from raymq.common.numbers import whole_number
from raymq.common.protocol.store import QueueBounds
from raymq.records.filters.sql import SqlFilter

logger = logging.getLogger(__name__)

Creations = Mapping[str, Mapping[str, str]]
"""Creation ids of topics (raymq.common.protocol.route.TopicConfig), by topic and broker group."""
NO_CREATIONS: Final[Creations] = {}


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The messages of one queue from `start_offset` up to, not including, `end_offset`."""

    topic: str
    broker_name: str
    queue_id: int
    start_offset: int
    end_offset: int

    @property
    def queue(self) -> MessageQueue:
        """The queue to which this offset range belongs."""
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    @property
    def size(self) -> int:
        """Number of offsets in this offset range."""
        return self.end_offset - self.start_offset


class RangeSizes(Protocol):
    """Interface that returns how many bytes of records lie in offset ranges. Partitions are planned from these
    sizes."""

    def range_bytes(self, ranges: Sequence[OffsetRange]) -> Sequence[Sequence[int]]:
        """Divide each range into several equal parts. Return, for each range, the number of bytes of the records in
        each of its parts, in order. For long ranges the numbers are estimates."""
        ...


class ScanSource(OffsetLookups, RangeSizes, Protocol):
    """Interface for the cluster data from which a read is planned: topics, queues and the queues' bounds."""

    def topics(self) -> Sequence[str]:
        """Return the names of the users' topics. A topic pattern is matched against these names."""
        ...

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the topic's readable queues. Raises TopicNotExistError if the topic does not exist."""
        ...

    def bounds(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, QueueBounds]:
        """Return, for each queue, the bounds of the offsets that consumers can read now."""
        ...


def is_created_anew(queue: MessageQueue, before: Creations, now: Creations) -> bool:
    """Return True if the queue's topic was deleted and created again in its broker group. If so, its creation ids in
    `before` and `now` are known and differ."""
    known, present = (ids.get(queue.topic, {}).get(queue.broker_name) for ids in (before, now))
    return known is not None and bool(present) and known != present


class ScanOptions(TypedDict, total=False):
    """Options that choose the messages of a read (docs/spark.md). An option that is omitted or None has its default. By
    default, a read covers all messages from the earliest to the latest, and lost messages are an error."""

    topic_pattern: str | None
    starting_offsets: OffsetsOption | None
    starting_timestamp: TimestampOption | None
    starting_offsets_by_timestamp: TimestampsOption | None
    starting_offsets_by_timestamp_strategy: TimestampStrategy
    ending_offsets: OffsetsOption | None
    ending_timestamp: TimestampOption | None
    ending_offsets_by_timestamp: TimestampsOption | None
    max_offsets: int | None
    fail_on_data_loss: bool


_OPTION_NAMES: Final = frozenset(ScanOptions.__annotations__)
_STRATEGIES: Final = ("error", "latest")


def plan_ranges(
    source: ScanSource, topic: str | Sequence[str] | None = None, **options: Unpack[ScanOptions]
) -> list[OffsetRange]:
    """Return the offset ranges of one batch read, sorted by queue, without empty ranges. The bounds of each queue are
    read once.

    `topic`: one topic, or several; or `topic_pattern`, a regular expression that must match a whole name. Offsets and
    times per queue must name every queue of the topics. A batch cannot start at the latest offset or end at the
    earliest offset. With `fail_on_data_loss` false, offsets that are deleted or do not exist yet are skipped with a
    warning.

    Raises IllegalNameError if a name is illegal, and TopicNotExistError for a missing topic or a pattern that matches
    no topic. Raises InvalidArgumentError for contradictory options, for queues that the topics do not have, and for a
    starting timestamp without a message in a queue, unless the strategy is "latest". Raises DataLossError for offsets
    below the first offset of a queue, and OffsetOutOfRangeError for offsets beyond the queue's end.
    """
    check_options(options)
    topics = select_topics(source, topic, options.get("topic_pattern"))
    start, end = starting_boundary(options, topics), ending_boundary(options, topics)
    queues = sorted(queue for name in topics for queue in source.queues(name))
    starts, ends = start.resolve(source, queues), end.resolve(source, queues)
    for queue in queues:
        if starts[queue] > ends[queue] >= 0 and not start.by_time and not end.by_time:
            raise InvalidArgumentError(
                f"queue {queue}: starting offset {starts[queue]} is after ending offset {ends[queue]}"
            )
    check_times(start, end, queues)
    bounds = source.bounds(queues)
    if start.by_time and options.get("starting_offsets_by_timestamp_strategy", "error") == "error":
        require_matches(start, starts, bounds)
    fail_on_data_loss = options.get("fail_on_data_loss", True)
    ranges = [
        bounded_range(queue, bounds[queue], starts[queue], ends[queue], fail_on_data_loss=fail_on_data_loss)
        for queue in queues
    ]
    return limit_ranges([one for one in ranges if one.size], options.get("max_offsets"))


def check_options(options: Mapping[str, Any], known: type = ScanOptions) -> None:
    """Check the options that a program passes to a read. `known`: the TypedDict of the options that this kind of read
    supports.

    Raises TypeError for an option that no kind of read supports. Raises InvalidArgumentError for an option that other
    kinds of read support, but not this one, and for invalid values.
    """
    names = frozenset(known.__annotations__)
    if unknown := sorted(options.keys() - _OPTION_NAMES):
        raise TypeError(f"a read has no option {', '.join(unknown)}; its options are {', '.join(sorted(names))}")
    if foreign := sorted(options.keys() - names):
        raise InvalidArgumentError(
            f"a stream has no option {', '.join(foreign)}, because it has no end: read_topic reads a part of a topic, "
            f"and max_offsets_per_trigger limits each batch of a stream. Its options are {', '.join(sorted(names))}"
        )
    strategy = options.get("starting_offsets_by_timestamp_strategy", "error")
    if strategy not in _STRATEGIES:
        raise InvalidArgumentError(
            f"starting_offsets_by_timestamp_strategy={strategy!r} must be one of {', '.join(_STRATEGIES)}"
        )
    check_count("max_offsets", options.get("max_offsets"))


def check_count(option: str, value: int | None) -> int | None:
    """Return the value of a count option: an integer of 1 or more, or None. Raises InvalidArgumentError for other
    values."""
    return None if value is None else whole_number(option, value, 1)


def select_topics(source: ScanSource, topic: str | Sequence[str] | None, topic_pattern: str | None = None) -> list[str]:
    """Return the topics that a read names, sorted, without duplicates. Raises InvalidArgumentError unless exactly one
    of `topic` and `topic_pattern` is given. Raises IllegalNameError for an illegal topic name, and TopicNotExistError
    for a pattern that matches no topic."""
    if (topic is None) == (topic_pattern is None):
        raise InvalidArgumentError(
            "choose the topics to read: pass exactly one of a topic, a list of topics, and topic_pattern"
        )
    if topic_pattern is not None:
        try:
            pattern = re.compile(topic_pattern)
        except (re.error, TypeError) as error:
            raise InvalidArgumentError(
                f"topic_pattern {topic_pattern!r} is not a regular expression: {error}"
            ) from None
        topics = sorted(name for name in source.topics() if pattern.fullmatch(name))
        if not topics:
            raise NoTopicMatchesError(topic_pattern)
        return topics
    names = [topic] if isinstance(topic, str) else list(topic or ())
    if not names:
        raise InvalidArgumentError("the list of topics to read is empty")
    return sorted({check_topic(name) for name in names})


def bounded_range(
    queue: MessageQueue, bounds: QueueBounds, start: int, end: int, *, fail_on_data_loss: bool
) -> OffsetRange:
    """Return the range of a queue from `start` to `end`; the arguments may also be EARLIEST and LATEST. Offsets that
    the queue does not hold are skipped with a warning. With `fail_on_data_loss`, deleted offsets raise DataLossError,
    and offsets that do not exist yet raise OffsetOutOfRangeError."""
    low, high = bounds.min_offset, bounds.max_offset
    start_offset = low if start == EARLIEST else start
    end_offset = high if end == LATEST else end
    lowest, highest = min(start_offset, end_offset), max(start_offset, end_offset)
    if lowest < low:
        lost = f"offsets {lowest} to {low - 1} of queue {queue} no longer exist; its first existing offset is {low}"
        if fail_on_data_loss:
            raise DataLossError(
                f"{lost}; start at a later offset, or pass fail_on_data_loss=False to read the remaining messages"
            )
        logger.warning("%s; reading from the first existing offset", lost)
    if highest > high:
        if fail_on_data_loss:
            raise OffsetOutOfRangeError(str(queue), highest, low, high)
        logger.warning(
            "queue %s: offset %d was requested, but the queue ends at %d; reading up to its end", queue, highest, high
        )
    start_offset = min(max(start_offset, low), high)
    end_offset = min(max(end_offset, start_offset), high)
    return OffsetRange(queue.topic, queue.broker_name, queue.queue_id, start_offset, end_offset)


def limit_ranges(ranges: Sequence[OffsetRange], max_offsets: int | None) -> list[OffsetRange]:
    """Shorten ranges to at most `max_offsets` offsets in total (None: no limit). Each range keeps its start. Empty
    ranges are omitted.

    The offsets are divided in proportion to the ranges' sizes, as Spark's Kafka source does with maxOffsetsPerTrigger.
    Each range gets at least one offset, so that larger ranges do not starve small ranges. If there are more ranges than
    offsets, the largest ranges get one offset each. The same arguments always give the same ranges.
    """
    max_offsets = check_count("max_offsets", max_offsets)
    left = sum(one.size for one in ranges)
    if max_offsets is None or left <= max_offsets:
        return [one for one in ranges if one.size]
    shares = [0] * len(ranges)
    largest_first = sorted(range(len(ranges)), key=lambda index: (-ranges[index].size, index))
    for index in largest_first[:max_offsets]:
        shares[index] = min(1, ranges[index].size)
    # Each range already has one offset, if `max_offsets` is large enough. Divide the remaining offsets in proportion to
    # the rest of each range. Offsets that remain after rounding go to the ranges with the largest remainders.
    rest, beyond = max_offsets - sum(shares), left - sum(shares)
    if rest:
        parts = [(one.size - share) * rest for one, share in zip(ranges, shares, strict=True)]
        shares = [share + part // beyond for share, part in zip(shares, parts, strict=True)]
        by_remainder = sorted(range(len(ranges)), key=lambda index: (-(parts[index] % beyond), index))
        for index in by_remainder[: max_offsets - sum(shares)]:
            shares[index] += 1
    return [
        replace(one, end_offset=one.start_offset + share) for one, share in zip(ranges, shares, strict=True) if share
    ]


def check_times(start: ScanBoundary, end: ScanBoundary, queues: Sequence[MessageQueue]) -> None:
    """Raise InvalidArgumentError if a queue's starting time is later than its ending time."""
    if not (start.by_time and end.by_time):
        return
    for queue in queues:
        first_ms, last_ms = start.time_ms_of(queue), end.time_ms_of(queue)
        if first_ms > last_ms:
            raise InvalidArgumentError(
                f"{start.option} {first_ms} is later than {end.option} {last_ms}, so nothing of queue {queue} is read: "
                "exchange the two times"
            )


def require_matches(
    start: ScanBoundary, starts: Mapping[MessageQueue, int], bounds: Mapping[MessageQueue, QueueBounds]
) -> None:
    """Raise InvalidArgumentError if a queue has no message at or after its starting timestamp. The caller must look up
    `starts` before `bounds`. In the other order, this function would also report a queue whose first such message
    arrives between the two lookups."""
    late = [queue for queue, offset in starts.items() if offset >= bounds[queue].max_offset]
    if late:
        listed = ", ".join(str(queue) for queue in late[:10]) + (" …" if len(late) > 10 else "")
        raise InvalidArgumentError(
            f"{start.option}: no message was stored at that time or later in queue {listed}; choose an earlier "
            'time, or pass starting_offsets_by_timestamp_strategy="latest" to read nothing from such queues'
        )


def text_of(expression: SqlFilter | None) -> str | None:
    """Return the text of a filter expression, or None if `expression` is None. Raises InvalidArgumentError if
    `expression` is not a filter expression."""
    if expression is None:
        return None
    if not isinstance(expression, SqlFilter):
        raise InvalidArgumentError(
            f'expression={expression!r} is not a filter expression; write expression=raymq.sql("price > 5"), or '
            'tags="paid || refunded"'
        )
    return expression.text
