"""The offset ranges that a read of a topic covers, and their split into Spark partitions.

Pure: the queues and their bounds come in through `QueueBoundsSource`. Option names and meanings are those of Spark's
Kafka source where RocketMQ has the same thing (design §6), so a partition of Kafka is a queue here, named by broker
group and queue id. Every queue contributes one range [start, end); with `min_partitions` the largest are cut into
pieces.
"""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

from raymq.errors import DataLossError, InvalidArgumentError, OffsetOutOfRangeError
from raymq.message import MessageQueue
from raymq.names import check_topic
from raymq.protocol.store import QueueBounds

LATEST: Final = -1
EARLIEST: Final = -2

OffsetsOption = str | Mapping[str, Mapping[str, int]]
"""``"earliest"``, ``"latest"``, or offsets per queue, ``{"broker-a": {"0": 12, "1": -2}}``, as a mapping or as JSON."""

logger = logging.getLogger(__name__)


class QueueBoundsSource(Protocol):
    """The cluster's queues and their bounds, as planning needs them."""

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The topic's readable queues. TopicNotExistError if there is no such topic."""
        ...

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        """The offsets that can be read from a queue now."""
        ...


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
        """The queue of the range."""
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    @property
    def size(self) -> int:
        """The number of offsets that it covers."""
        return self.end_offset - self.start_offset


def plan_ranges(
    source: QueueBoundsSource,
    topic: str,
    *,
    starting_offsets: OffsetsOption = "earliest",
    ending_offsets: OffsetsOption = "latest",
    min_partitions: int | None = None,
    fail_on_data_loss: bool = True,
) -> list[OffsetRange]:
    """The ranges of one batch read, none of them empty, sorted by queue and offset. The bounds of each queue are read
    once.

    Offsets per queue name every queue of the topic; -2 stands for earliest, -1 for latest. A batch cannot start at the
    latest offset nor end at the earliest. With `fail_on_data_loss` false, offsets that are gone or not there yet are
    left out with a warning.

    Raises IllegalNameError, TopicNotExistError; InvalidArgumentError for options that make no sense or name other
    queues than the topic has; DataLossError for offsets below what a queue still holds; OffsetOutOfRangeError for
    offsets beyond its end.
    """
    check_topic(topic)
    starts = _parse("starting_offsets", starting_offsets, default=EARLIEST, refused=LATEST)
    ends = _parse("ending_offsets", ending_offsets, default=LATEST, refused=EARLIEST)
    if min_partitions is not None and (isinstance(min_partitions, bool) or min_partitions < 1):
        raise InvalidArgumentError(f"min_partitions={min_partitions!r} must be at least 1")
    queues = sorted(source.queues(topic))
    starts.check_queues(topic, queues)
    ends.check_queues(topic, queues)
    ranges = []
    for queue in queues:
        start, end = starts.of(queue), ends.of(queue)
        if start > end >= 0:
            raise InvalidArgumentError(f"{queue}: starting offset {start} is beyond ending offset {end}")
        queue_range = _resolve(queue, source.bounds(queue), start, end, fail_on_data_loss)
        if queue_range.size:
            ranges.append(queue_range)
    return split_ranges(ranges, min_partitions or 1)


def split_ranges(ranges: Sequence[OffsetRange], min_partitions: int) -> list[OffsetRange]:
    """Cut ranges until there are `min_partitions` of them, or one per offset if that is fewer.

    Each cut goes to the range whose pieces are largest, so pieces end up in proportion to sizes, as in Spark's Kafka
    source; unlike there, rounding never leaves fewer than asked for. Pieces of one range differ by at most one.
    """
    pieces = [1] * len(ranges)
    largest = [(-float(item.size), index) for index, item in enumerate(ranges)]
    heapq.heapify(largest)
    for _ in range(min(min_partitions, sum(item.size for item in ranges)) - len(ranges)):
        index = largest[0][1]
        pieces[index] += 1
        heapq.heapreplace(largest, (-ranges[index].size / pieces[index], index))
    return [piece for item, count in zip(ranges, pieces, strict=True) for piece in _cut(item, count)]


def _cut(item: OffsetRange, count: int) -> Iterable[OffsetRange]:
    edges = [item.start_offset + item.size * index // count for index in range(count + 1)]
    for start, end in pairwise(edges):
        yield OffsetRange(item.topic, item.broker_name, item.queue_id, start, end)


def _resolve(queue: MessageQueue, bounds: QueueBounds, start: int, end: int, fail_on_data_loss: bool) -> OffsetRange:
    low, high = bounds.min_offset, bounds.max_offset
    start_offset = low if start == EARLIEST else start
    end_offset = high if end == LATEST else end
    lowest, highest = min(start_offset, end_offset), max(start_offset, end_offset)
    if lowest < low:
        lost = f"{queue}: offsets {lowest} to {low - 1} were asked for and are gone, the first one kept is {low}"
        if fail_on_data_loss:
            raise DataLossError(f"{lost}; start later, or pass fail_on_data_loss=False to read what is left")
        logger.warning("%s; reading from there", lost)
    if highest > high:
        if fail_on_data_loss:
            raise OffsetOutOfRangeError(str(queue), highest, low, high)
        logger.warning(
            "%s: offset %d was asked for and the queue ends at %d; reading up to there", queue, highest, high
        )
    start_offset = min(max(start_offset, low), high)
    end_offset = min(max(end_offset, start_offset), high)
    return OffsetRange(queue.topic, queue.broker_name, queue.queue_id, start_offset, end_offset)


@dataclass(frozen=True, slots=True)
class _Offsets:
    """A parsed offsets option. `by_queue` None: `default` for every queue."""

    option: str
    default: int
    by_queue: Mapping[tuple[str, int], int] | None

    def of(self, queue: MessageQueue) -> int:
        """The offset of a queue, EARLIEST or LATEST."""
        if self.by_queue is None:
            return self.default
        return self.by_queue[queue.broker_name, queue.queue_id]

    def check_queues(self, topic: str, queues: Sequence[MessageQueue]) -> None:
        """Refuse offsets that name queues the topic does not have, or leave out some that it has."""
        if self.by_queue is None:
            return
        there = {(queue.broker_name, queue.queue_id) for queue in queues}
        for problem, found in (("unknown", self.by_queue.keys() - there), ("missing", there - self.by_queue.keys())):
            if found:
                listed = ", ".join(f"{broker_name}:{queue_id}" for broker_name, queue_id in sorted(found))
                raise InvalidArgumentError(
                    f"{self.option} must name the queues of topic {topic!r}, all of them (-2 is earliest, -1 latest); "
                    f"{problem}: {listed}"
                )


def _parse(option: str, value: OffsetsOption, *, default: int, refused: int) -> _Offsets:
    """Read an offsets option. `default` is the word that the option may be, `refused` the one it may not."""
    words = {EARLIEST: "earliest", LATEST: "latest"}
    word = value.strip().lower() if isinstance(value, str) else None
    if word == words[default]:
        return _Offsets(option, default, None)
    if word == words[refused]:
        raise InvalidArgumentError(f"{option} of a batch read cannot be {word!r}")
    given = _json(option, value) if isinstance(value, str) else value
    by_queue: dict[tuple[str, int], int] = {}
    for broker_name, offsets in _items(option, given):
        for queue_text, offset in _items(option, offsets):
            key = broker_name, _queue_id(option, queue_text)
            if isinstance(offset, bool) or not isinstance(offset, int) or offset < EARLIEST or offset >= 2**63:
                raise InvalidArgumentError(
                    f"{option}: the offset of {key[0]}:{key[1]} must be a number from 0, -1 (latest) or -2 (earliest), "
                    f"not {offset!r}"
                )
            if offset == refused:
                raise InvalidArgumentError(
                    f"{option} of a batch read cannot be {words[refused]!r}, as for {key[0]}:{key[1]}"
                )
            if key in by_queue:
                raise InvalidArgumentError(f"{option} names queue {key[0]}:{key[1]} twice")
            by_queue[key] = offset
    return _Offsets(option, default, by_queue)


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _not_offsets(option, f"{text!r} ({error})") from None


def _items(option: str, value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise _not_offsets(option, repr(value))
    return value.items()


def _not_offsets(option: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{option} must be 'earliest', 'latest' or offsets per queue such as "
        f'{{"broker-a": {{"0": 12, "1": -2}}}}, not {what}'
    )


def _queue_id(option: str, text: Any) -> int:
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    if isinstance(text, str) and text.isascii() and text.isdigit():
        return int(text)
    raise InvalidArgumentError(f'{option}: {text!r} is not a queue id; write for example "0"')
