"""Requests of simple consumers to a broker, and the broker's answers. Messages are leased, and acknowledged one by one.

A *lease* gives a range of a queue's offsets to one consumer for a limited time. During this time no other consumer gets
the offsets. The lease's first offset and its pop time identify the lease. RocketMQ's receipt handle contains both
(raymq.client.consumer.simple.received_message). A set of a lease's offsets is sent as a hexadecimal number: bit i
stands for the offset `start + i`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raymq.common.numbers import NumberRange

RECEIVE_MAX_MESSAGES: Final = 4096
"""Maximum number of messages that one receive request returns. RocketMQ's limit is 32. In raymq the limit can be
higher, because a lease costs as much for one message as for many."""
INVISIBLE_MIN_MS: Final = 100
INVISIBLE_MAX_MS: Final = 12 * 3600 * 1000
RECEIVE_MAX_WAIT_S: Final = 30.0
RECEIVE_MESSAGES: Final = NumberRange(1, RECEIVE_MAX_MESSAGES)
INVISIBLE: Final = NumberRange(INVISIBLE_MIN_MS / 1000, INVISIBLE_MAX_MS / 1000)
INVISIBLE_AGAIN: Final = NumberRange(0.0, INVISIBLE_MAX_MS / 1000)
"""The allowed range, in seconds, for a new invisible time of a message that a consumer has already received. The value
0 makes the message visible at once."""

ALL_OFFSETS: Final = ""
"""Value of a LeasePart's `offsets` that stands for all offsets of the lease. Any other set of offsets is encoded as
text."""


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """A request for up to `max_messages` messages of some topics. The returned messages become invisible to other
    consumers for `invisible_ms`.

    The request waits up to `wait_s` for the first message. `ordered`: a queue with leased messages returns no further
    messages until the leased messages are acknowledged; None: as the group's setting and the topic's type say
    (raymq.common.protocol.group.is_ordered). `attempt_id` identifies the request: a repeated request gets
    the same leases again while the leases are valid.
    """

    group: str
    topics: tuple[str, ...]
    max_messages: int
    invisible_ms: int
    wait_s: float = 0.0
    ordered: bool | None = None
    attempt_id: str = ""


@dataclass(frozen=True, slots=True)
class LeasedRange:
    """A range of offsets that a lease covers: `count` offsets of a queue from `start` on, leased at `pop_ms` (ms since
    1970) for `invisible_ms`.

    `attempts`: how often the offsets were leased, including this lease. `without`: offsets of the range that this lease
    does not include, because they are already acknowledged or belong to other leases.
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
    """The answer to a ReceiveRequest: the leased ranges, empty if no message arrived in time. `retry_max_times`: the
    maximum number of retries, from the group's settings. `ordered_topics`: the topics that were received in order
    mode. `retry_intervals_s`: as in the group's settings."""

    ranges: tuple[LeasedRange, ...]
    retry_max_times: int
    ordered_topics: tuple[str, ...] = ()
    retry_intervals_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LeasePart:
    """A subset of one lease's offsets. `offsets`: the subset, encoded as a hexadecimal number in which bit i stands for
    offset `start + i`."""

    topic: str
    queue_id: int
    start: int
    pop_ms: int
    offsets: str = ALL_OFFSETS
