"""Options for the begin and the end of a scan in each queue: offsets, timestamps, or a consumer group's offsets.

Names and meanings are the same as in Spark's Kafka source, if RocketMQ has an equivalent (design §6). A Kafka partition
corresponds to a queue, which is named by broker group and queue id. Values per queue are nested by topic, broker group
and queue id, as a mapping or as JSON. For a single topic, the topic level may be omitted:

    {"orders": {"broker-a": {"0": 12, "1": -2}}}        {"broker-a": {"0": 12, "1": -2}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.names import check_group
from raymq.common.numbers import POINT_IN_TIME_MS, number_in, shown

LATEST: Final = -1
EARLIEST: Final = -2
GROUP_PREFIX: Final = "group:"
_WORDS: Final = {EARLIEST: "earliest", LATEST: "latest"}

OffsetsOption = str | Mapping[str, Any]
"""Option value for offsets: ``"earliest"``, ``"latest"``, ``"group:NAME"`` (only as a start), or an offset per queue
(-2: earliest, -1: latest)."""
TimestampOption = int | datetime
"""Option value for a time: milliseconds since 1970, or a datetime. A datetime without a time zone is in UTC."""
TimestampsOption = str | Mapping[str, Any]
"""Type of an option that gives a time for each queue, as a mapping or as JSON text."""
TimestampStrategy = Literal["error", "latest"]
"""Action for a queue that has no message at or after its starting timestamp: raise an error, or start at the queue's
end."""


class OffsetLookups(Protocol):
    """Interface for the lookups in the cluster that resolve offset options."""

    def offsets_by_time(self, times: Mapping[MessageQueue, int]) -> Mapping[MessageQueue, int]:
        """Return, for each queue, the offset of the first message stored at or after a time (ms since 1970). If a queue
        has no such message, the result is the queue's end."""
        ...

    def committed_offsets(self, group: str, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        """Return the offsets that a group has committed. Queues without a committed offset are omitted."""
        ...


@dataclass(frozen=True, slots=True)
class ScanBoundary:
    """One boundary of a scan, its begin or its end, for all queues. `default` is the offset option (EARLIEST or LATEST)
    that applies if no offsets, times or group are given."""

    option: str
    """Name of the option that set this begin or end of a scan, for error messages."""
    default: int
    offsets: Mapping[MessageQueue, int] | None = None
    times: Mapping[MessageQueue, int] | None = None
    time_ms: int | None = None
    group: str | None = None

    @property
    def by_time(self) -> bool:
        """True if the begin or end of the scan is defined by timestamps, not by offsets or a group."""
        return self.times is not None or self.time_ms is not None

    def time_ms_of(self, queue: MessageQueue) -> int:
        """Return the time in ms since 1970 at which this begin or end of a scan lies in a queue. Call this method only
        if the begin or end is given as a time (`by_time`)."""
        return (self.time_ms or 0) if self.times is None else self.times[queue]

    def resolve(self, lookups: OffsetLookups, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return this boundary of a scan (its begin or its end) in each queue: an offset, or EARLIEST or LATEST. Raises
        InvalidArgumentError if this boundary gives offsets or times, but not for exactly `queues`."""
        named = self.times if self.times is not None else self.offsets
        if named is not None:
            self._check_queues(named, queues)
        found: Mapping[MessageQueue, int] = {}
        if self.offsets is not None:
            found = self.offsets
        elif self.by_time:
            times = self.times if self.times is not None else dict.fromkeys(queues, self.time_ms or 0)
            found = lookups.offsets_by_time(times)
        elif self.group is not None:
            found = lookups.committed_offsets(self.group, queues)
        return {queue: found.get(queue, self.default) for queue in queues}

    def _check_queues(self, named: Mapping[MessageQueue, int], queues: Sequence[MessageQueue]) -> None:
        """Raise InvalidArgumentError if `named`, the queues in an option's value, contains unknown queues or omits some
        of `queues`."""
        for problem, found in (("unknown", named.keys() - set(queues)), ("missing", set(queues) - named.keys())):
            if not found:
                continue
            several = len({queue.topic for queue in [*queues, *named]}) > 1
            listed = ", ".join(_name(queue, several) for queue in sorted(found))
            topics = ", ".join(repr(topic) for topic in sorted({queue.topic for queue in queues}))
            hint = "" if self.times is not None else " (-2 is earliest, -1 latest)"
            raise InvalidArgumentError(
                f"{self.option} must name all queues of topic {topics}{hint}; {problem}: {listed}"
            )


def starting_boundary(options: Mapping[str, Any], topics: Sequence[str]) -> ScanBoundary:
    """Return the begin of a scan of these topics, from the options whose names begin with `starting_`. Raises
    InvalidArgumentError if an option is not valid."""
    return _boundary("starting", options, topics, default=EARLIEST, refused=LATEST)


def streaming_boundary(options: Mapping[str, Any], topics: Sequence[str]) -> ScanBoundary:
    """Return the begin of a stream of these topics, from the options whose names begin with `starting_`. Without such
    options the stream begins at the latest offset. This also holds for a group without committed offsets. Raises
    InvalidArgumentError if an option is not valid."""
    return _boundary("starting", options, topics, default=LATEST, refused=None)


def ending_boundary(options: Mapping[str, Any], topics: Sequence[str]) -> ScanBoundary:
    """Return the end of a scan of these topics, from the options whose names begin with `ending_`. Raises
    InvalidArgumentError if an option is not valid."""
    return _boundary("ending", options, topics, default=LATEST, refused=EARLIEST)


def timestamp_ms(option: str, value: object) -> int:
    """Convert an option's value to milliseconds since 1970. Raises InvalidArgumentError, which names the option, if the
    value is not a time, or is a number of ms before 2001 other than 0."""
    if isinstance(value, datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        value = (aware - datetime(1970, 1, 1, tzinfo=UTC)) // _MILLISECOND
    elif type(value) is int and 0 < value < POINT_IN_TIME_MS.low:
        number_in(option, value, POINT_IN_TIME_MS)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise InvalidArgumentError(f"{option} must be milliseconds since 1970 or a datetime, not {shown(value)}")
    return value


_MILLISECOND: Final = datetime(1970, 1, 1, 0, 0, 0, 1000) - datetime(1970, 1, 1)


def _boundary(
    side: str, options: Mapping[str, Any], topics: Sequence[str], *, default: int, refused: int | None
) -> ScanBoundary:
    names = [f"{side}_timestamp", f"{side}_offsets_by_timestamp", f"{side}_offsets"]
    given = [name for name in names if options.get(name) is not None]
    if len(given) > 1 and not (given[-1] == names[-1] and _word(options[names[-1]]) == _WORDS[default]):
        raise InvalidArgumentError(f"{' and '.join(given)} exclude each other: pass only one of them")
    option = given[0] if given else names[-1]
    value = options.get(option)
    if option == names[0]:
        return ScanBoundary(option, default, time_ms=timestamp_ms(option, value))
    if option == names[1]:
        times = _by_queue(option, value, topics, lambda queue, found: timestamp_ms(f"{option} of queue {queue}", found))
        return ScanBoundary(option, default, times=times)
    return _offsets_boundary(option, _WORDS[default] if value is None else value, topics, default, refused)


def _offsets_boundary(
    option: str, value: Any, topics: Sequence[str], default: int, refused: int | None
) -> ScanBoundary:
    for offset, word in _WORDS.items():
        if _word(value) == word:
            if offset == refused:
                raise InvalidArgumentError(f"{option} cannot be {word!r} in a batch read")
            return ScanBoundary(option, offset)
    if isinstance(value, str) and value.startswith(GROUP_PREFIX):
        if refused == EARLIEST:
            raise InvalidArgumentError(f"{option} cannot be the offsets of a group; only starting_offsets can be")
        return ScanBoundary(option, default, group=check_group(value.removeprefix(GROUP_PREFIX).strip()))

    def check(queue: str, offset: Any) -> int:
        if isinstance(offset, bool) or not isinstance(offset, int) or offset < EARLIEST or offset >= 2**63:
            raise InvalidArgumentError(
                f"{option}: the offset of queue {queue} must be a number from 0, -1 (latest) or -2 (earliest), "
                f"not {shown(offset)}"
            )
        if offset == refused:
            raise InvalidArgumentError(f"{option} of queue {queue} cannot be {_WORDS[refused]!r} in a batch read")
        return offset

    return ScanBoundary(option, default, offsets=_by_queue(option, value, topics, check))


def _word(value: object) -> str | None:
    return value.strip().lower() if isinstance(value, str) else None


def _name(queue: MessageQueue, with_topic: bool) -> str:
    name = f"{queue.broker_name}:{queue.queue_id}"
    return f"{queue.topic}:{name}" if with_topic else name


def _by_queue(
    option: str, value: Any, topics: Sequence[str], check: Callable[[str, Any], int]
) -> dict[MessageQueue, int]:
    """Return an option's values per queue. `check` receives a queue's name and value. It returns the checked value, or
    raises an error."""
    given = _json(option, value) if isinstance(value, str) else value
    result: dict[MessageQueue, int] = {}
    for topic, by_broker in _by_topic(option, given, topics):
        for broker_name, by_id in _items(option, by_broker):
            for text, found in _items(option, by_id):
                queue = MessageQueue(topic, broker_name, _queue_id(option, text))
                name = _name(queue, len(topics) > 1)
                if queue in result:
                    raise InvalidArgumentError(f"{option} names queue {name} twice")
                result[queue] = check(name, found)
    return result


def _by_topic(option: str, given: Any, topics: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield an option's values for each topic. For a single topic, the topic's name may be omitted."""
    items = list(_items(option, given))
    deep = items and all(
        isinstance(below, Mapping) and below and all(isinstance(one, Mapping) for one in below.values())
        for _, below in items
    )
    if deep or len(topics) != 1:
        yield from items
    else:
        yield topics[0], given


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _not_values(option, f"{text!r} ({error})") from None


def _items(option: str, value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise _not_values(option, repr(value))
    return value.items()


def _not_values(option: str, found: str) -> InvalidArgumentError:
    if option.endswith("timestamp"):
        return InvalidArgumentError(
            f'{option} must be times per queue such as {{"broker-a": {{"0": 1700000000000}}}}, not {found}'
        )
    return InvalidArgumentError(
        f"{option} must be 'earliest', 'latest' or offsets per queue such as "
        f'{{"broker-a": {{"0": 12, "1": -2}}}} (for several topics {{"orders": {{"broker-a": {{"0": 12}}}}}}), '
        f"not {found}"
    )


def _queue_id(option: str, text: Any) -> int:
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    if isinstance(text, str) and text.isascii() and text.isdigit():
        return int(text)
    raise InvalidArgumentError(f'{option}: {text!r} is not a queue id; write for example "0"')
