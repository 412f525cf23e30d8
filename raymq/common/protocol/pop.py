"""Questions of simple consumers to a broker, and its answers: messages that are leased, and settled one by one.

A *lease* hands a range of a queue's offsets out for a time: until then no other consumer gets them. It is named by its
first offset and its pop time, which RocketMQ's receipt handle holds, too
(raymq.client.consumer.simple.received_message). Sets of offsets of a lease travel as a hexadecimal number: bit i
stands for the offset `start + i`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raymq.common.numbers import NumberRange

RECEIVE_MAX_MESSAGES: Final = 4096
"""The most messages of one receive. RocketMQ's bound is 32; here a lease costs as much for one message as for many."""
INVISIBLE_MIN_MS: Final = 100
INVISIBLE_MAX_MS: Final = 12 * 3600 * 1000
RECEIVE_MAX_WAIT_S: Final = 30.0
RECEIVE_MESSAGES: Final = NumberRange(1, RECEIVE_MAX_MESSAGES)
INVISIBLE: Final = NumberRange(INVISIBLE_MIN_MS / 1000, INVISIBLE_MAX_MS / 1000)
INVISIBLE_AGAIN: Final = NumberRange(0.0, INVISIBLE_MAX_MS / 1000)
"""The values of the arguments of `receive` and `change_invisible`; times are in seconds."""

ALL_OFFSETS: Final = ""
"""The set of all offsets of a lease."""


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """A wish for up to `max_messages` messages of some topics, each to be `invisible_ms` for all others.

    Waits up to `wait_s` for the first. `ordered`: a queue that has messages which are handed out and not settled gives
    no more. `attempt_id` names the request: one that is repeated gets the same leases again, as long as they hold.
    """

    group: str
    topics: tuple[str, ...]
    max_messages: int
    invisible_ms: int
    wait_s: float = 0.0
    ordered: bool = False
    attempt_id: str = ""


@dataclass(frozen=True, slots=True)
class LeasedRange:
    """`count` offsets of a queue from `start` on, handed out at `pop_ms` (ms since 1970) for `invisible_ms`.

    `attempts` counts how often they were handed out, this time included. `without`: the offsets among them that are not
    handed out, because they are settled, or in other leases.
    """

    topic: str
    queue_id: int
    start: int
    count: int
    pop_ms: int
    invisible_ms: int
    attempts: int
    without: str = "0"


@dataclass(frozen=True, slots=True)
class ReceiveAnswer:
    """The ranges that a receive hands out: none if none came in time. `retry_max_times`: the group's."""

    ranges: tuple[LeasedRange, ...]
    retry_max_times: int


@dataclass(frozen=True, slots=True)
class LeasePart:
    """Offsets of one lease: those in the set `offsets`."""

    topic: str
    queue_id: int
    start: int
    pop_ms: int
    offsets: str = ALL_OFFSETS
