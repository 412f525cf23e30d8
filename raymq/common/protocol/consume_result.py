"""The answers of a listener, and the reports about them from its Listener actor to its Pull actor.

Tasks on their way from a Pull actor to its Listener, and the answer that carries them: values that both ends know.

On the store's node a task names the places of its records in the store's log, which the Listener maps, too; else it
has their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from raymq.common.delay import DELAY_LEVELS_MAX
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MessageQueue
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


class LogPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Records of one queue that lie in one file of a store's log: `positions`, their physical offsets, `sizes` in
    bytes, and queue `offsets`, all as int64 in the machine's order. Without `offsets` these are not known."""

    positions: bytes
    sizes: bytes
    offsets: bytes = b""


class StoreLog(msgspec.Struct, frozen=True, array_like=True):
    """The files of a store's log: `root` and sizes as raymq.records.logfiles.log_reader.StoreFiles has them."""

    root: str
    commit_log_file_size: int
    consume_queue_file_size: int
    commit_log_directories: tuple[str, ...] = ()


class ShippedTask(msgspec.Struct, frozen=True, array_like=True):
    """`count` messages of one queue for the listener: `places` in `log`, or else `records`, whole ones back to back.
    `sizes` are the bytes of each of these records, and `offsets` their queue offsets, as int64 in the machine's order.
    `number` is the number of the task in a life of the instance at its Pull actor. `body_max_bytes`: the bound on a
    decompressed body at the Pull actor, which has asked the stores for it."""

    number: int
    queue: MessageQueue
    count: int
    records: bytes = b""
    places: tuple[LogPlaces, ...] = ()
    log: StoreLog | None = None
    sizes: bytes = b""
    offsets: bytes = b""
    body_max_bytes: int = MAX_MESSAGE_SIZE_BYTES

    @property
    def size_bytes(self) -> int:
        """The bytes of its records, here or in the log."""
        return len(self.records) or sum(int(np.frombuffer(one.sizes, np.int64).sum()) for one in self.places)


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """Tasks that go to a Listener together; there may be none.

    `epoch` grows from one life of the instance at a Pull actor to the next, `number` from one hand-over of that life to
    the next. The Listener names both when it asks for the next one; a hand-over that it does not name comes again.
    """

    epoch: int
    number: int
    tasks: tuple[ShippedTask, ...] = ()
