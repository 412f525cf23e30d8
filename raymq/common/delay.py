"""Delayed messages: the internal topics in which messages wait, by RocketMQ's delay levels or by a delivery time.

A delayed message is stored in a queue of an internal topic. Its properties REAL_TOPIC and REAL_QID name the real queue.
When the message is due, the store's scheduler copies it to the real queue (storage.schedule.schedule_service). The
message's consume-queue unit (entry) contains the time, in ms, at which the scheduler must act.

    SCHEDULE_TOPIC_XXXX   queue level - 1        stored + the level's delay (spec/storage.md §1, §2, §12)
    rmq_sys_timer         queue 0 to 31          TIMER_DELIVER_MS: due within about a day
                          queue 32               stored + one day: due later; the message is then filed again
                          queue 33               stored + one day: recalls (raymq.common.protocol.recall), likewise

A timer queue has the messages that are due in one hour (modulo 32 hours), so that the scheduler reads few queues.
Queues of RocketMQ's levels are FIFO, but the units of a timer queue are not sorted by time. A unit's time is always
later than the store time of its record. Therefore a message that is appended later is due later than every message that
was delivered before (storage.schedule.delay_queues).

The record contains all of these values, so that the unit can be rebuilt from the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from raymq.common.errors import InvalidArgumentError
from raymq.common.java_text import parse_number
from raymq.common.message import DELAY_LEVELS_MAX, PROPERTY_DELAY, PROPERTY_TIMER_DELIVER_MS
from raymq.common.names import HALF_TOPIC, SCHEDULE_TOPIC, SYSTEM_PREFIX
from raymq.common.numbers import POINT_IN_TIME_MS

DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

TIMER_TOPIC: Final = SYSTEM_PREFIX + "timer"
TIMER_BUCKETS: Final = 32
TIMER_ROLL_QUEUE: Final = TIMER_BUCKETS
TIMER_RECALL_QUEUE: Final = TIMER_BUCKETS + 1
TIMER_ROLL_MS: Final = 86_400_000
TIMER_ROLL_MARGIN_MS: Final = 3_600_000
"""Margin in ms for the choice between a delivery hour's queue and the roll queue, whose messages are filed again later.
A message goes to the roll queue if it is due later than one day plus this margin. The margin allows for differences
between the producers' clocks."""

_BUCKET_MS: Final = 3_600_000
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNIT_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNKNOWN_LEVEL_MS: Final = 1000
_DELIVERY_PRODUCER: Final = "rmq_sys_delivery/"


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Parse RocketMQ's text ``"1s 5s 1m 2h 1d"`` into the delays of levels 1, 2 and so on, in ms.

    Raises InvalidArgumentError if the text has another format or more than 18 levels.
    """
    levels = []
    for word in text.split():
        match = _DURATION.fullmatch(word)
        if match is None or not int(match[1]):
            raise InvalidArgumentError(
                f"{word!r} is not a delay: write a number and a unit (s, m, h or d), such as 30s"
            )
        levels.append(int(match[1]) * _UNIT_MS[match[2]])
    if not 1 <= len(levels) <= DELAY_LEVELS_MAX:
        raise InvalidArgumentError(
            f"the list of delay levels must have 1 to {DELAY_LEVELS_MAX} entries, not {len(levels)}"
        )
    return tuple(levels)


def parse_duration_ms(text: str) -> int:
    """Parse one length of time such as ``"30s"``, ``"5m"``, ``"2h"`` or ``"1d"`` into ms. Raises InvalidArgumentError
    for other text."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise InvalidArgumentError(
            f"{text!r} is not a length of time: write one number and s, m, h or d, such as 30s, 5m, 2h or 1d"
        )
    return int(match[1]) * _UNIT_MS[match[2]]


def parse_time(text: str, now_ms: int) -> int:
    """Parse a time into ms since 1970. ``"+30s"`` and ``"-2h"`` (s, m, h or d) are relative to `now_ms`. An ISO 8601
    time such as ``"2026-03-01T12:00:00+01:00"`` is UTC if it has no UTC offset. A time before 2001 is returned as 0,
    because no message is that old. Raises InvalidArgumentError for other text."""
    if text[:1] in ("+", "-"):
        distance_ms = parse_duration_ms(text[1:])
        return _since_2001(now_ms + distance_ms if text[0] == "+" else now_ms - distance_ms)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgumentError(
            f"{text!r} is not a time: write ISO 8601 such as 2026-03-01T12:00:00+01:00, or +30s, +5m, +2h, +1d from "
            "now, -2h ago"
        ) from None
    return _since_2001(int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000))


def _since_2001(time_ms: int) -> int:
    return time_ms if POINT_IN_TIME_MS.has(time_ms) else 0


DELAY_LEVELS_MS: Final = parse_delay_levels(DELAY_LEVELS)
"""The delays of RocketMQ's default levels, in ms (spec/storage.md §13, fact 19)."""


def level_delay_ms(level: int, levels_ms: tuple[int, ...]) -> int:
    """Return the delay of a delay level in ms. A level below 1 means 1 s. A level above the last level means the last
    level's delay (spec §2)."""
    return levels_ms[min(level, len(levels_ms)) - 1] if level > 0 else _UNKNOWN_LEVEL_MS


def timer_queue(deliver_at_ms: int, now_ms: int) -> int:
    """Return the queue of `rmq_sys_timer` for a message that is due at `deliver_at_ms`. The result is the queue of the
    delivery hour, or the roll queue if the message is due much later than in one day."""
    if deliver_at_ms - now_ms > TIMER_ROLL_MS + TIMER_ROLL_MARGIN_MS:
        return TIMER_ROLL_QUEUE
    return deliver_at_ms // _BUCKET_MS % TIMER_BUCKETS


def timer_queue_hours(queue_id: int, now_ms: int) -> int:
    """Return the number of full hours from now until the messages of a timer queue are due; 0 for the current
    hour."""
    return (queue_id - now_ms // _BUCKET_MS) % TIMER_BUCKETS


def is_waiting_topic(topic: str) -> bool:
    """True if the messages in `topic` are delayed messages, which wait there for their delivery to another
    topic."""
    return topic in (SCHEDULE_TOPIC, TIMER_TOPIC)


def names_real_topic(topic: str) -> bool:
    """True if the messages in `topic` belong to other topics: each message names its real topic. This holds for delayed
    messages and half messages."""
    return is_waiting_topic(topic) or topic == HALF_TOPIC


def waiting_code(
    topic: str,
    queue_id: int,
    properties: Mapping[str, str],
    store_timestamp_ms: int,
    levels_ms: tuple[int, ...] = DELAY_LEVELS_MS,
) -> int | None:
    """Return the value of the third field of a consume-queue unit (entry) in a topic of delayed messages: the delivery
    time in ms. Returns None if the field contains the tag's code, as in other topics."""
    if topic == SCHEDULE_TOPIC:
        level = parse_number(properties.get(PROPERTY_DELAY)) or 0
        return store_timestamp_ms + level_delay_ms(level, levels_ms) if level > 0 else None
    if topic == TIMER_TOPIC:
        if queue_id in (TIMER_ROLL_QUEUE, TIMER_RECALL_QUEUE):
            return store_timestamp_ms + TIMER_ROLL_MS
        return max(parse_number(properties.get(PROPERTY_TIMER_DELIVER_MS)) or 0, store_timestamp_ms + 1)
    return None


def delivery_producer_id(topic: str, queue_id: int) -> str:
    """Return the producer id of messages that the scheduler delivers from a queue of delayed messages. The sequence
    number of such a message is its offset in the queue of delayed messages."""
    return f"{_DELIVERY_PRODUCER}{topic}/{queue_id}"


def delivery_source(producer_id: str) -> tuple[str, int] | None:
    """Return the queue of delayed messages from which the scheduler delivered messages with this producer id. Returns
    None for the ids of other producers."""
    if not producer_id.startswith(_DELIVERY_PRODUCER):
        return None
    topic, _, queue_id = producer_id.removeprefix(_DELIVERY_PRODUCER).rpartition("/")
    return (topic, int(queue_id)) if is_waiting_topic(topic) and queue_id.isdecimal() else None
