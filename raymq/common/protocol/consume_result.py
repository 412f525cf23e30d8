"""Tasks that a Pull actor sends to its Listener actor, the results that listeners return, and the Listener's reports.

If the Listener runs on the store's node, a task contains only the positions of its records in the store's log, because
the Listener maps the log too. On other nodes the task contains the records' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from raymq.common.message import DELAY_LEVELS_MAX, MAX_MESSAGE_SIZE_BYTES, MessageQueue
from raymq.common.numbers import INT32_MAX, NOT_NEGATIVE, NumberRange, check_fields

TIMEOUT_DELAY_LEVEL: Final = 3
"""The delay level of a retry after a listener call timed out (spec/messaging.md §5.8)."""
SUSPEND_MIN_MS: Final = 10
SUSPEND_MAX_MS: Final = 30_000
"""Bounds in ms of the pause after a failure in order mode."""


_RANGES: Final = {
    "delay_level": NumberRange(-1, DELAY_LEVELS_MAX),
    "suspend_ms": NumberRange(-1, INT32_MAX),
    "first": NOT_NEGATIVE,
}


@dataclass(frozen=True, slots=True)
class ConsumeLater:
    """A listener's result that requests another delivery of the message later. ConsumeStatus.RECONSUME_LATER means
    ConsumeLater with the defaults.

    `delay_level`, for a concurrent consumer: 1 to 18; 0 lets the broker choose (3 + reconsume_times); -1 sends the
    message to the dead-letter topic at once. `suspend_ms`, for an orderly consumer: how long its queue waits, 10 to
    30000; -1 means the consumer's setting. `first`, for a list of messages: messages before this index are consumed.
    Raises InvalidArgumentError if a number is out of its range.
    """

    delay_level: int = 0
    suspend_ms: int = -1
    first: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _RANGES)


@dataclass(frozen=True, slots=True)
class Failure:
    """Consecutive messages of a task that were not consumed: messages `first` to `first + count - 1`.

    `error`: the reason. `raised`: the listener raised the error. `unknown`: the listener returned an invalid result.
    `unreadable`: why a message cannot be read, so that a retry is useless; empty for a readable message.
    `record_damaged`: the record itself is damaged, so the message cannot be sent back.
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

    `unfinished`: indices of messages that the listener has not finished. All other messages are consumed, or are in the
    `failures` of this report or an earlier report. `ended`: the listener will do nothing more for this task. The reason
    is that everything is finished, that an orderly task stopped at a failure, or that the task was withdrawn.
    `consume_s`: the total time of the task's listener calls, 0 before the end. `stuck`: number of listener calls, for
    any task, that still run after their timeout. `unread`: the listener has not begun, because it cannot read the
    records in the mapped files and needs the records' bytes.
    """

    unfinished: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    ended: bool = True
    consume_s: float = 0.0
    stuck: int = 0
    unread: bool = False


class LogPlaces(msgspec.Struct, frozen=True, array_like=True):
    """The places of a queue's records in one file of a store's log. `positions`: physical offsets; `sizes`: bytes;
    `offsets`: queue offsets. All three arrays are int64 in the machine's byte order. If `offsets` is empty, the queue
    offsets are unknown."""

    positions: bytes
    sizes: bytes
    offsets: bytes = b""


class StoreLog(msgspec.Struct, frozen=True, array_like=True):
    """The directory and file sizes of a store's log, as in raymq.records.logfiles.log_reader.StoreFiles."""

    root: str
    commit_log_file_size: int
    consume_queue_file_size: int
    commit_log_directories: tuple[str, ...] = ()


class ShippedTask(msgspec.Struct, frozen=True, array_like=True):
    """A task for the listener: `count` messages of one queue. They are given either as `places` in the store's `log`,
    or as whole `records`, one after another.

    `sizes`: the bytes of each record; `offsets`: the records' queue offsets; both are int64 in the machine's byte
    order. `number`: the task's number, counted from the start of the instance at its Pull actor. `body_max_bytes`: the
    Pull actor's limit for a decompressed body, from the stores' settings.
    """

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
        """The total size, in bytes, of the task's records, if the task contains them or refers to them in the store's
        log."""
        return len(self.records) or sum(int(np.frombuffer(one.sizes, np.int64).sum()) for one in self.places)


class TaskBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch of tasks that a Pull actor sends to a Listener; the batch may be empty.

    `epoch` grows with each start of the instance at a Pull actor. `number` grows with each batch of the same epoch. The
    Listener's next request acknowledges a batch by its epoch and number. The Pull actor sends a batch again if the
    request does not acknowledge it.
    """

    epoch: int
    number: int
    tasks: tuple[ShippedTask, ...] = ()
