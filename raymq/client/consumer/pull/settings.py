"""PullSettings are the settings of a pull consumer, with their bounds; PullOptions are the keyword arguments that users
pass.

Names and numbers are taken from RocketMQ's lite pull consumer (spec/messaging.md §6). The exceptions are
`threshold_all_bytes`, which bounds the memory of one consumer, and `poll_interval_max_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypedDict, Unpack

from raymq.common.errors import InvalidArgumentError, check_option_names
from raymq.common.message import DELAY_LEVELS_MAX, ConsumeFromWhere
from raymq.common.names import check_group
from raymq.common.numbers import INT32_MAX, NumberRange, check_fields
from raymq.common.protocol.group import StartOffsetQuery
from raymq.common.protocol.membership import AllocateStrategy, Allocation

RANGES: Final = {
    "auto_commit_interval_s": NumberRange(1.0, 3600.0),
    "poll_interval_max_s": NumberRange(10.0, 86_400.0),
    "queue_check_interval_s": NumberRange(1.0, 3600.0),
    "threshold_count": NumberRange(1, 65_535),
    "threshold_bytes": NumberRange(1 << 20, 1 << 30),
    "threshold_all_count": NumberRange(1, 6_553_500),
    "threshold_all_bytes": NumberRange(1 << 20, 1 << 40),
    "span_max": NumberRange(1, 65_535),
}
"""Allowed range of each numeric setting of a pull consumer."""

DELAY_LEVEL: Final = NumberRange(-1, DELAY_LEVELS_MAX)
RECONSUME_TIMES: Final = NumberRange(0, INT32_MAX, otherwise=-1)
"""Allowed range of `max_reconsume_times`, an argument of `send_back`."""


class PullOptions(TypedDict, total=False):
    """The keyword arguments of `Client.pull_consumer` and `Client.async_pull_consumer`; PullSettings explains them."""

    consume_from: ConsumeFromWhere
    consume_timestamp_ms: int
    auto_commit: bool
    auto_commit_interval_s: float
    acknowledge_each: bool
    allocate_strategy: AllocateStrategy | Allocation
    poll_interval_max_s: float
    queue_check_interval_s: float
    threshold_count: int
    threshold_bytes: int
    threshold_all_count: int
    threshold_all_bytes: int
    span_max: int


@dataclass(frozen=True, slots=True)
class PullSettings:
    """The settings of one pull consumer.

    `start`: the start offset in a queue in which the group has committed nothing. `auto_commit`: when the program polls
    again, the messages that earlier polls returned count as done, and are committed every `auto_commit_interval_s`.
    `acknowledge_each`: a message counts as done when the program acknowledges it, in any order, and not when the
    program polls again; requires auto_commit. If the group then gives a queue to another member, this consumer keeps
    the queue until all messages that polls returned are acknowledged and committed. `allocation` (the option
    `allocate_strategy`): how the group shares its queues. `poll_interval_max_s`: a program that does not poll for
    longer than this leaves its group until it polls again. `queue_check_interval_s`: the time between two checks of the
    topics that have a queue-change listener.

    The thresholds limit the records that are buffered for polls, which come from storage actors on other nodes. Each
    queue may buffer `threshold_count` messages, `threshold_bytes` of records, and `span_max` between the first and the
    last offset. All queues together may buffer `threshold_all_count` messages and `threshold_all_bytes`. A queue is
    fetched again when less than half of its share is buffered. Records that are in flight when a threshold is reached
    are added, up to 8 MiB per storage actor. Records of storage actors on this node are not buffered: polls read them
    in place.
    """

    group: str
    start: StartOffsetQuery = field(default_factory=StartOffsetQuery)
    auto_commit: bool = True
    auto_commit_interval_s: float = 5.0
    acknowledge_each: bool = False
    allocation: Allocation = field(default_factory=Allocation)
    poll_interval_max_s: float = 300.0
    queue_check_interval_s: float = 30.0
    threshold_count: int = 65_535
    threshold_bytes: int = 100 * 1024 * 1024
    threshold_all_count: int = 655_350
    threshold_all_bytes: int = 8 * 1024 * 1024
    span_max: int = 65_535

    def __post_init__(self) -> None:
        check_group(self.group)
        check_fields(self, RANGES)
        if self.acknowledge_each and not self.auto_commit:
            raise InvalidArgumentError(
                "acknowledge_each=True commits acknowledged messages by itself: do not set auto_commit=False"
            )

    @classmethod
    def of(cls, group: str, **options: Unpack[PullOptions]) -> PullSettings:
        """Create settings from keyword arguments. Raises TypeError for an unknown option, IllegalNameError if the group
        name is illegal, and InvalidArgumentError if a value is out of bounds."""
        check_option_names("a pull consumer", options, PullOptions.__annotations__)
        values: dict[str, Any] = dict(options)
        where = values.pop("consume_from", ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
        start = StartOffsetQuery(where, values.pop("consume_timestamp_ms", 0))
        strategy = values.pop("allocate_strategy", AllocateStrategy.AVG)
        allocation = strategy if isinstance(strategy, Allocation) else Allocation(strategy)
        return cls(group, start=start, allocation=allocation, **values)
