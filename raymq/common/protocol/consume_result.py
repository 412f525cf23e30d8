"""Tasks from a Pull actor to its Listener actor, the answers of listeners, and the Listener's reports.

On the store's node a task names the positions of its records in the store's log, which the Listener maps too. On other
nodes the task contains the records' bytes.
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
"""The delay level after which a message is delivered again if its listener call timed out (spec/messaging.md §5.8)."""


_RANGES: Final = {
    "delay_level": NumberRange(-1, DELAY_LEVELS_MAX),
    "suspend_ms": NumberRange(-1, INT32_MAX),
    "first": NOT_NEGATIVE,
}


@dataclass(frozen=True, slots=True)
class ConsumeLater:
    """A listener's answer: consume the message later. ConsumeStatus.RECONSUME_LATER means ConsumeLater with the
    defaults.

    `delay_level`, for a concurrent consumer: 1 to 18; 0 for the broker's choice (3 + reconsume_times); -1 for the
    dead-letter topic at once. `suspend_ms`, for an orderly consumer: how long its queue waits, 10 to 30000; -1 for the
    consumer's setting. `first`, for a list of messages: messages before this index are consumed. Raises
    InvalidArgumentError.
    """

    delay_level: int = 0
    suspend_ms: int = -1
    first: int = 0

    def __post_init__(self) -> None:
        check_fields(self, _RANGES)


@dataclass(frozen=True, slots=True)
class Failure:
    """Messages `first` to `first + count - 1` of a task, which were not consumed.

    `error`: the reason. `raised`: the listener raised the error. `unknown`: the listener returned an invalid answer.
    `unreadable`: why a message cannot be read, which no further attempt can change; empty for a readable message.
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

    `unfinished`: indices of messages that the listener has not finished. Other messages are consumed, or are in the
    `failures` of this report or an earlier report. `ended`: the listener will do nothing more for this task: everything
    is finished, or an orderly task stopped at a failure, or the task was taken away. `consume_s`: the total time of its
    calls, 0 before the end. `stuck`: calls, of any task, that have outlived their timeout and still run. `unread`: the
    listener has not begun, because it cannot read the records in the mapped files; it needs their bytes.
    """

    unfinished: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    ended: bool = True
    consume_s: float = 0.0
    stuck: int = 0
    unread: bool = False


class LogPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Records of one queue in one file of a store's log: `positions`, their physical offsets, `sizes` in bytes, and
    queue `offsets`, all as int64 in the machine's byte order. Empty `offsets` are unknown."""

    positions: bytes
    sizes: bytes
    offsets: bytes = b""


class StoreLog(msgspec.Struct, frozen=True, array_like=True):
    """The files of a store's log: `root` and sizes, as in raymq.records.logfiles.log_reader.StoreFiles."""

    root: str
    commit_log_file_size: int
    consume_queue_file_size: int
    commit_log_directories: tuple[str, ...] = ()


class ShippedTask(msgspec.Struct, frozen=True, array_like=True):
    """`count` messages of one queue for the listener: `places` in `log`, or else whole `records` back to back.

    `sizes`: the bytes of each record, and `offsets` their queue offsets, both as int64 in the machine's byte order.
    `number`: the number of the task in one life of the instance at its Pull actor. `body_max_bytes`: the Pull actor's
    limit of a decompressed body, from the stores.
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
        """The bytes of the task's records, here or in the log."""
        return len(self.records) or sum(int(np.frombuffer(one.sizes, np.int64).sum()) for one in self.places)


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """Tasks that a Pull actor sends to a Listener together; there may be none.

    `epoch` grows from one life of the instance at a Pull actor to the next, `number` from one batch of that life to the
    next. The Listener names both when it asks for the next batch; a batch that it does not name is sent again.
    """

    epoch: int
    number: int
    tasks: tuple[ShippedTask, ...] = ()
