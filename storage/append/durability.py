"""The one module that decides what an append waits for: RocketMQ's WAIT (spec/storage.md §6, §11.1).

An append waits until its batches are as durable as the flush setting promises. On a master with replicas the append
then waits until the replicas have the batches (`ReplicaAcks`). A batch that does not wait (wait_store_msg_ok=False) is
acknowledged once it is written. If one append contains both kinds of batches, all of them return together, and the
batches that do not wait never get a timeout status.

No thread has to block for an append. A `StartedAppend` is already written. The thread that owns it calls `settle` each
time the disk or the replicas advance (`AppendProgress`), and at the append's deadline. A thread with nothing else to do
waits in `AppendProgress.wait_settled`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from raymq.common.errors import InSyncReplicasError, StoreFailedError
from raymq.common.message import SendStatus
from raymq.common.protocol.store import AppendResult
from raymq.records.format.encode import EncodedBatch

Written = tuple[list[AppendResult], int]
"""The result of writing batches: one AppendResult with SEND_OK for each batch, and the physical offset after the last
batch."""


class WriteBatches(Protocol):
    """Function that writes batches, and requests a flush if the flush setting needs one. `timeout_s` limits the wait
    for the append lock."""

    def __call__(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Written: ...


class WrittenItem(Protocol):
    """An item that was written to the log: a batch, or the end of a transaction. `wait_store_msg_ok`: True if its
    append waits until the item is durable."""

    @property
    def wait_store_msg_ok(self) -> bool: ...


class DiskState(Protocol):
    """The interface that tells up to which offset the log is durable."""

    def is_durable(self, end_offset: int, *, late: bool) -> bool:
        """Return True if all log bytes before `end_offset` are as durable as the store's flush setting promises.

        Raises StoreFailedError if the disk failed, so that the bytes can no longer become durable. `late`: True if the
        caller's wait has timed out, so that it reports a timeout if the result is False.
        """


@dataclass(frozen=True, slots=True)
class ReplicaAcks:
    """The replication part of an append's wait on a master. After the append is on the master's own disk, it waits
    until enough replicas have a copy."""

    # The error for too few replicas in sync; None if enough replicas are in sync. An append raises this error before it
    # writes anything, if one of its batches must wait to become durable.
    not_enough: InSyncReplicasError | None
    # Returns True if enough replicas have the log up to a given offset. Does not block. Raises an error if the replicas
    # can never reach this offset.
    has_copies: Callable[[int], bool]
    # Maximum time, in seconds, that an append waits until enough replicas have copied its records.
    timeout_s: float


class StartedAppend:
    """Written batches whose results may have to wait for the disk or for replicas. Only one thread at a time may use
    this object.

    `on_disk` is called once, when the wait for the disk ends. Its argument is the time (time.monotonic), or None if the
    disk has failed.
    """

    __slots__ = ("_acks", "_batches", "_disk", "_end_offset", "_on_disk", "_results", "deadline_s")

    def __init__(
        self,
        written: Written,
        batches: Sequence[WrittenItem],
        disk: DiskState | None,
        acks: ReplicaAcks | None,
        *,
        deadline_s: float,
        on_disk: Callable[[float | None], None] | None = None,
    ) -> None:
        """`disk`: tells if the batches are durable on disk; None if they do not wait for the disk. `acks`: tells if
        enough replicas have the batches; None if they do not wait for replicas. If both are set, the batches first wait
        for the disk. `deadline_s`: the deadline of the first wait."""
        self._results, self._end_offset = written
        self._batches, self._disk, self._acks, self._on_disk = batches, disk, acks, on_disk
        self.deadline_s = deadline_s
        """Deadline (time.monotonic) of the current wait, which the next call of `settle` ends if the wait has taken too
        long.

        The deadline changes once: when the wait for the disk ends and the wait for the replicas begins.
        """

    def settle(self, now_s: float) -> list[AppendResult] | None:
        """Return one result for each batch if all batches are durable enough or the deadline has passed; else None.
        Does not block.

        A batch that waits gets the status FLUSH_DISK_TIMEOUT if the disk was too slow, and FLUSH_SLAVE_TIMEOUT if the
        replicas were too slow. Raises StoreFailedError if the disk failed: it is unknown what is stored. Also raises
        the errors of `acks`. Do not call `settle` again after it returned results or raised an error.
        """
        disk, acks = self._disk, self._acks
        if disk is not None:
            late = now_s >= self.deadline_s
            try:
                durable = disk.is_durable(self._end_offset, late=late)
            except StoreFailedError:
                self._tell(None)
                raise
            if not durable:
                if not late:
                    return None
                self._degrade(SendStatus.FLUSH_DISK_TIMEOUT)
            self._disk = None
            if acks is not None:
                self.deadline_s = now_s + acks.timeout_s
            self._tell(now_s)
        if acks is not None and not acks.has_copies(self._end_offset):
            if now_s < self.deadline_s:
                return None
            self._degrade(SendStatus.FLUSH_SLAVE_TIMEOUT)
        return self._results

    def _tell(self, now_s: float | None) -> None:
        if self._on_disk is not None:
            self._on_disk(now_s)

    def _degrade(self, status: SendStatus) -> None:
        """Set the given timeout status in the results of the batches that wait to become durable
        (wait_store_msg_ok)."""
        self._results = [
            replace(result, status=status) if batch.wait_store_msg_ok else result
            for result, batch in zip(self._results, self._batches, strict=True)
        ]


class SettledAppend(StartedAppend):
    """A StartedAppend whose results are already final when it is created. No thread has to wait for them."""

    __slots__ = ()

    def __init__(self, results: list[AppendResult], deadline_s: float) -> None:
        self._results, self.deadline_s = results, deadline_s

    def settle(self, now_s: float) -> list[AppendResult]:
        return self._results


def waits_for(batches: Sequence[WrittenItem], acks: ReplicaAcks | None) -> bool:
    """Return True if one of the batches must be durable before its append ends (wait_store_msg_ok). In this case,
    raises InSyncReplicasError if too few replicas are in sync (`acks`)."""
    for batch in batches:
        if batch.wait_store_msg_ok:
            if acks is not None and acks.not_enough is not None:
                raise acks.not_enough
            return True
    return False


class AppendProgress:
    """Notifies threads that wait, and listeners, whenever the disk or a replica has advanced. Each of them owns started
    appends, and then calls `settle`. Thread-safe."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        # The number of calls of `notify` since this object was created.
        self._moves = 0
        self._listeners: tuple[Callable[[], None], ...] = ()

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which is called after each progress of the disk or of a replica, from any thread. The
        callback must not block."""
        with self._moved:
            self._listeners = (*self._listeners, callback)

    def notify(self) -> None:
        """Notify the waiting appends that the disk flushed or failed, or that a replica has a copy."""
        with self._moved:
            self._moves += 1
            self._moved.notify_all()
            listeners = self._listeners
        for callback in listeners:
            callback()

    def wait_settled(self, started: StartedAppend) -> list[AppendResult]:
        """Wait until the results of `started` are final, and return them. Raises the errors of
        `StartedAppend.settle`."""
        while True:
            moves, now_s = self._moves, time.monotonic()
            # Call `StartedAppend.settle` without holding the lock of `_moved`: `settle` may wait for a thread that is
            # about to call `notify`, which needs this lock.
            results = started.settle(now_s)
            if results is not None:
                return results
            left_s = max(started.deadline_s - now_s, 0.0)
            with self._moved:
                if self._moves == moves:
                    self._moved.wait(left_s)
