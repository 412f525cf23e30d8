"""Tasks on their way from a Pull actor to its Listener, and the answer that carries them: values that both ends know.

On the store's node a task names the places of its records in the store's log, which the Listener maps, too; else it
has their bytes.
"""

from __future__ import annotations

import msgspec
import numpy as np

from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MessageQueue


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
