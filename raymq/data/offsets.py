"""The options `start_offset` and `end_offset` of a read, their offset ranges, and the ranges of each read task.

The options are as in `ray.data.read_kafka`, with two differences. They are resolved once, and a queue is named by its
broker group and its id: ``{"orders": {"broker-a:3": 1500}}``. Ranges are divided among read tasks so that all tasks
read about the same number of bytes. The module has no side effects: `ScanSource` provides the queues and their bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from raymq.client.scan.offsets import timestamp_ms
from raymq.client.scan.ranges import OffsetRange, ScanSource, bounded_range, select_topics
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.numbers import shown

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

OffsetsByQueue = Mapping[str, int | str] | Mapping[int, int | str]
"""Offsets by queue; each is a number or the word "earliest" or "latest": ``{"broker-a:3": 1500}``, or ``{3: 1500}`` if
there is only one broker group."""
Offsets = int | datetime | str | Mapping[str, OffsetsByQueue]
"""Value of `start_offset` or `end_offset`: one offset for all queues, a time, the word "earliest" or "latest", or
`OffsetsByQueue` by topic."""

_Place = int | datetime | None
"""Value of the option `start_offset` or `end_offset` for one queue. An int is an offset. A time means the first message
stored at that time or later. None means the first offset of the queue for "earliest", and the last offset for "latest".
"""


def resolve_ranges(
    source: ScanSource, topics: str | Sequence[str], start_offset: Offsets, end_offset: Offsets, *, lenient: bool
) -> list[OffsetRange]:
    """Return the offset ranges to read, without empty ranges, sorted by queue. The bounds of each queue are read once.

    An end offset beyond a queue's end means the queue's end. If `lenient`, a start below the first offset of a queue
    means the first offset, and a warning is logged. Raises IllegalNameError for an illegal topic name,
    TopicNotExistError if a topic does not exist, and InvalidArgumentError for contradictory options or an unknown
    queue. If not `lenient`, raises DataLossError for a start below the first offset of a queue, and
    OffsetOutOfRangeError for a start beyond the queue's end.
    """
    names = select_topics(source, topics)
    _check(start_offset, "start_offset", word=EARLIEST, other=LATEST, topics=names)
    _check(end_offset, "end_offset", word=LATEST, other=EARLIEST, topics=names)
    starts: dict[MessageQueue, _Place] = {}
    ends: dict[MessageQueue, _Place] = {}
    for topic in names:
        queues = sorted(source.queues(topic))
        starts |= _by_queue("start_offset", start_offset, topic, queues)
        ends |= _by_queue("end_offset", end_offset, topic, queues)
    bounds = source.bounds(list(starts))
    first = _offsets(source, starts, {queue: bounds[queue].min_offset for queue in starts}, "start_offset")
    last = _offsets(source, ends, {queue: bounds[queue].max_offset for queue in ends}, "end_offset")
    ranges = []
    for queue in starts:
        _check_times(queue, starts[queue], ends[queue])
        if isinstance(starts[queue], int) and isinstance(ends[queue], int) and first[queue] > last[queue]:
            raise InvalidArgumentError(f"queue {queue}: start_offset {first[queue]} is after end_offset {last[queue]}")
        end = min(last[queue], bounds[queue].max_offset)
        ranges.append(bounded_range(queue, bounds[queue], first[queue], end, fail_on_data_loss=not lenient))
    return [found for found in ranges if found.size]


def _check_times(queue: MessageQueue, start: _Place, end: _Place) -> None:
    """Check the start and the end of a read in a queue. Raises InvalidArgumentError if both are times, and the start is
    later than the end."""
    if not (isinstance(start, datetime) and isinstance(end, datetime)):
        return
    if timestamp_ms("start_offset", start) > timestamp_ms("end_offset", end):
        raise InvalidArgumentError(
            f"start_offset {start} is later than end_offset {end}, so nothing of queue {queue} is read: exchange the "
            "two times"
        )


def _offsets(
    source: ScanSource, places: Mapping[MessageQueue, _Place], ends: Mapping[MessageQueue, int], option: str
) -> dict[MessageQueue, int]:
    """Convert each queue's position into an offset. `ends`: the offsets for the queues whose position is None."""
    times = {queue: timestamp_ms(option, place) for queue, place in places.items() if isinstance(place, datetime)}
    found = dict(ends)
    found |= {queue: place for queue, place in places.items() if isinstance(place, int)}
    found |= source.offsets_by_time(times) if times else {}
    return found


def _check(value: Offsets, option: str, *, word: str, other: str, topics: Sequence[str]) -> None:
    """Check the option `start_offset` or `end_offset` as far as possible without reading the queues. Raises
    InvalidArgumentError if the value is not allowed."""
    if not isinstance(value, Mapping):
        if not isinstance(value, datetime):
            _check_one(value, option, word, other)
        return
    for topic, offsets in value.items():
        if topic not in topics:
            raise InvalidArgumentError(f"{option} names topic {topic!r}, which this read does not include")
        if not isinstance(offsets, Mapping):
            raise _not_offsets(option, word, offsets)
        for offset in offsets.values():
            _check_one(offset, option, word, other)


def _check_one(value: Any, option: str, word: str, other: str) -> None:
    if value == other:
        raise InvalidArgumentError(f"{option} cannot be {other!r} in a bounded read")
    is_offset = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if value != word and not is_offset:
        raise _not_offsets(option, word, value)


def _not_offsets(option: str, word: str, value: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{option} must be {word!r}, an offset from 0, a datetime, or offsets by topic and queue such as "
        f'{{"orders": {{"broker-a:3": 1500}}}}, not {shown(value)}'
    )


def _by_queue(option: str, value: Offsets, topic: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, _Place]:
    """Return the value of the option `start_offset` or `end_offset` for each queue of a topic."""
    groups = sorted({queue.broker_name for queue in queues})
    if isinstance(value, int) and len(groups) > 1:
        raise InvalidArgumentError(
            f"{option}={value}: offsets count in each queue, and topic {topic!r} has queues in the broker groups "
            f'{", ".join(groups)}; pass offsets by queue, as in {{"{topic}": {{"{groups[0]}:0": {value}}}}}'
        )
    if not isinstance(value, Mapping):
        return dict.fromkeys(queues, None if isinstance(value, str) else value)
    names: dict[Any, MessageQueue] = {f"{queue.broker_name}:{queue.queue_id}": queue for queue in queues}
    listed = ", ".join(names)
    if len(groups) == 1:  # if the topic has only one broker group, the user may name a queue by its id alone
        names |= {queue.queue_id: queue for queue in queues}
    places: dict[MessageQueue, _Place] = dict.fromkeys(queues)
    for name, offset in value.get(topic, {}).items():
        if name not in names:
            raise InvalidArgumentError(f"{option}: topic {topic!r} has no queue {name!r}; its queues are {listed}")
        places[names[name]] = offset if isinstance(offset, int) else None
    return places


@dataclass(frozen=True, slots=True)
class SizedRange:
    """An offset range of a queue, with the size of its records in bytes (1 or more). All records in the range are
    assumed to have the same size."""

    range: OffsetRange
    size_bytes: int


def sized(ranges: Sequence[OffsetRange], profiles: Sequence[Sequence[int]]) -> list[SizedRange]:
    """Cut each offset range into pieces with about equal numbers of offsets. A range's profile has the size in bytes of
    each piece (ScanSource.range_bytes). The pieces are sorted by broker group, so that in most cases one node has all
    data of a task."""
    pieces = []
    for one, profile in sorted(zip(ranges, profiles, strict=True), key=lambda item: item[0].broker_name):
        edges = [one.start_offset + one.size * index // len(profile) for index in range(len(profile) + 1)]
        for index, size_bytes in enumerate(profile):
            piece = replace(one, start_offset=edges[index], end_offset=edges[index + 1])
            if piece.size:
                pieces.append(SizedRange(piece, max(1, size_bytes)))
    return pieces


def divide(pieces: Sequence[SizedRange], tasks: int) -> list[list[SizedRange]]:
    """Divide pieces of offset ranges into at most `tasks` parts, in the order of `pieces`. No part is empty, and each
    offset is in exactly one part.

    The pieces are concatenated and cut into parts of equal bytes. So a long queue is divided among several tasks, and
    several short queues share a task.
    """
    parts: list[list[SizedRange]] = [[] for _ in range(max(1, tasks))]
    total_bytes = sum(piece.size_bytes for piece in pieces)
    before_bytes = 0
    for piece in pieces:
        _lay(piece, before_bytes, total_bytes, parts)
        before_bytes += piece.size_bytes
    return [_joined(part) for part in parts if part]


def at_most(parts: Sequence[Sequence[SizedRange]], rows: int) -> list[list[SizedRange]]:
    """Split each part (the offset ranges that one task reads) into smaller parts of at most `rows` messages."""
    smaller: list[list[SizedRange]] = []
    for part in parts:
        smaller.append([])
        left = rows
        for item in part:
            first = item.range.start_offset
            while first < item.range.end_offset:
                if not left:
                    smaller.append([])
                    left = rows
                last = min(item.range.end_offset, first + left)
                size_bytes = max(1, item.size_bytes * (last - first) // item.range.size)
                smaller[-1].append(SizedRange(replace(item.range, start_offset=first, end_offset=last), size_bytes))
                first, left = last, left - (last - first)
    return smaller


def _lay(piece: SizedRange, before_bytes: int, total_bytes: int, parts: list[list[SizedRange]]) -> None:
    """Put one piece of an offset range into the part of the read to which it belongs. All parts have equal bytes. If
    the piece extends over several parts, divide it among them. `before_bytes`: the total bytes of all previous pieces.
    """
    whole = piece.range
    first = whole.start_offset
    index = before_bytes * len(parts) // total_bytes
    while first < whole.end_offset:
        # `edge_bytes`: the end of the read's part `index`, in bytes from the beginning of `piece`, the offset range
        # that is being distributed over the parts.
        edge_bytes = -(-(index + 1) * total_bytes // len(parts)) - before_bytes
        last = min(whole.end_offset, whole.start_offset + -(-whole.size * edge_bytes // piece.size_bytes))
        if last > first:
            size_bytes = max(1, piece.size_bytes * (last - first) // whole.size)
            parts[index].append(SizedRange(replace(whole, start_offset=first, end_offset=last), size_bytes))
            first = last
        index += 1


def _joined(part: Sequence[SizedRange]) -> list[SizedRange]:
    """Merge adjacent ranges of the same queue."""
    joined: list[SizedRange] = []
    for piece in part:
        last = joined[-1] if joined else None
        if last and last.range.queue == piece.range.queue and last.range.end_offset == piece.range.start_offset:
            whole = replace(last.range, end_offset=piece.range.end_offset)
            joined[-1] = SizedRange(whole, last.size_bytes + piece.size_bytes)
        else:
            joined.append(piece)
    return joined
