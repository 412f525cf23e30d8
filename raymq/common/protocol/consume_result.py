"""The answers of a listener, and the reports about them from its Listener actor to its Pull actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raymq.common.delay import DELAY_LEVELS_MAX
from raymq.common.numbers import INT32_MAX, NOT_NEGATIVE, NumberRange, check_fields

TIMEOUT_DELAY_LEVEL: Final = 3
"""A message whose listener call takes too long comes again after this level's delay (spec/messaging.md §5.8)."""


_RANGES: Final = {
    "delay_level": NumberRange(-1, DELAY_LEVELS_MAX),
    "suspend_ms": NumberRange(-1, INT32_MAX),
    "first": NOT_NEGATIVE,
}


@dataclass(frozen=True, slots=True)
class ConsumeLater:
    """A listener's answer: not now. ConsumeStatus.RECONSUME_LATER is the same with the defaults.

    `delay_level`, for a concurrent consumer: 1 to 18, 0 for the broker's choice (3 + reconsume_times), -1 for the
    dead-letter topic at once. `suspend_ms`, for an orderly one: how long its queue waits, 10 to 30000; -1 is the
    consumer's setting. `first`, for a list of messages: the ones before this index are done. InvalidArgumentError.
    """

    delay_level: int = 0
    suspend_ms: int = -1
    first: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _RANGES)


@dataclass(frozen=True, slots=True)
class Failure:
    """Messages `first` to `first + count - 1` of a task were not consumed. `error` says why. `raised`: the listener
    raised it. `unknown`: the listener returned something that is no answer. `unreadable`: the reason why a message
    cannot be read, which no other attempt can change; empty for a message that can be. `record_damaged`: the record
    itself is damaged, so it cannot be sent back either.
    """

    first: int
    count: int
    error: str
    delay_level: int = 0
    suspend_ms: int = -1
    timed_out: bool = False
    raised: bool = False
    unknown: bool = False
    unreadable: str = ""
    record_damaged: bool = False


@dataclass(frozen=True, slots=True)
class ConsumeReport:
    """The listener's progress with a task.

    `unfinished`: indices of the messages that it has not ended with; the others ended well, or are in the `failures`
    of this report or an earlier one. `ended`: it will do no more of this task: everything is finished, or an orderly
    task stopped at a failure, or it was taken away. `consume_s` is the time spent in its calls in all, 0 before it has
    ended. `stuck` calls, of any task, have outlived their timeout and still run. `unread`: the listener has not begun,
    because it cannot read the records in the mapped files: it is to be sent their bytes.
    """

    unfinished: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    ended: bool = True
    consume_s: float = 0.0
    stuck: int = 0
    unread: bool = False
