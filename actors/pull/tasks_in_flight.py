"""The tasks of one push-consumer instance that its Listener has, or will get next.

    add ─▶ ready ─▶ next_batch ─▶ with the Listener ─▶ note_report: ended
             ▲                            │
             └── note_unread: as bytes ◀──┘

The Listener confirms each batch with its next request. Without this confirmation the same batch is sent again. So no
task is lost or duplicated if an answer is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from actors.core.access.meter import ReadLimit
from actors.core.consume.process_queue import ConsumeTask
from actors.core.consume.records_in_place import RecordsInPlace
from raymq.common.protocol.consume_result import LogPlaces, ShippedTask, StoreLog, TaskBatch
from raymq.records.format.compression import body_max_bytes
from raymq.remoting.lane.calls import encode_result

BATCH_MAX_BYTES: Final = 8 << 20
"""Maximum size, in bytes, of the records in one batch of tasks for a Listener. A single larger task is also
allowed."""
BYTES_FOR_S: Final = 10.0
"""After a Listener could not read a task from the store's files, it gets records as bytes for this many
seconds."""


class EncodedTasks(NamedTuple):
    """A batch of tasks as an encoded TaskBatch, with the size in bytes and the number of its messages."""

    payload: bytes
    size_bytes: int
    messages: int


class TasksInFlight:
    """The tasks of one instance that are in flight: ready for its Listener, or being processed by it. Not thread-safe.
    All times are values of time.monotonic, in seconds."""

    def __init__(self, epoch: int) -> None:
        """`epoch`: the number of the period in which a Pull actor hosts the instance."""
        self._epoch = epoch
        self._tasks: dict[int, ConsumeTask] = {}
        """All tasks in flight, by task number."""
        self._ready: deque[ConsumeTask] = deque()
        """The tasks in flight that have not been put into a batch for the Listener yet."""
        self._reported_s: dict[int, float] = {}
        """By number of each task that the Listener has: the time of the Listener's last report about the task. Before
        the first report, the time at which the task was put into its batch."""
        self._unread: set[int] = set()
        """The numbers of tasks that the Listener could not read from the store's files. Their records are sent as
        bytes."""
        self._bytes_until_s = 0.0
        """Until this time, all tasks contain the bytes of their records, because the Listener could not read records
        from the store's files."""
        self._number = 0
        """The number of the last batch."""
        self._unconfirmed: bytes | None = None
        """The last batch in encoded form, until the Listener confirms that it has received the batch."""

    def get(self, number: int) -> ConsumeTask | None:
        """Return the task in flight with this number; None if there is no such task."""
        return self._tasks.get(number)

    def add(self, tasks: Iterable[ConsumeTask]) -> None:
        """Add tasks that the Listener should get next."""
        for task in tasks:
            self._tasks[task.number] = task
            self._ready.append(task)

    def next_batch(self, portion: ReadLimit | None, now_s: float) -> EncodedTasks | None:
        """Put the first ready tasks into the next batch, at most `portion`, but at least one task. Returns None if no
        task is ready. If a task cannot be encoded, raises the error, and all tasks stay ready."""
        most_bytes = BATCH_MAX_BYTES if portion is None else portion.bytes_of(BATCH_MAX_BYTES)
        most_messages = 0 if portion is None else portion.messages
        shipped: list[ShippedTask] = []
        size_bytes = messages = 0
        for task in self._ready:
            more_bytes, more_messages = size_bytes + task.messages.size_bytes, messages + len(task.messages)
            if shipped and (more_bytes > most_bytes or more_messages > most_messages > 0):
                break
            size_bytes, messages = more_bytes, more_messages
            in_place = now_s >= self._bytes_until_s and task.number not in self._unread
            shipped.append(ship_task(task, in_place=in_place))
        if not shipped:
            return None
        payload = encode_result(TaskBatch(self._epoch, self._number + 1, tuple(shipped)))
        for one in shipped:
            self._ready.popleft()
            self._reported_s[one.number] = now_s
        self._number, self._unconfirmed = self._number + 1, payload
        return EncodedTasks(payload, size_bytes, messages)

    def empty_batch(self) -> bytes:
        """Return an encoded batch without tasks. It has the number of the last batch."""
        return encode_result(TaskBatch(self._epoch, self._number))

    def lost_batch(self, epoch: int, got: int) -> bytes | None:
        """Return the last batch if it must be sent again, because the Listener's process has not received it: the
        process has received all batches of the period `epoch` up to number `got`. Otherwise returns None, and the batch
        counts as received."""
        if self._unconfirmed is not None and not (epoch == self._epoch and got == self._number):
            return self._unconfirmed
        self._unconfirmed = None
        return None

    def note_unread(self, task: ConsumeTask, now_s: float) -> None:
        """Make a task ready again, with the bytes of its records, because the Listener could not read the records from
        the store's files. A repeated call for a task changes nothing: the records are already being sent."""
        if task.number not in self._unread:
            self._unread.add(task.number)
            self._reported_s.pop(task.number, None)
            self._bytes_until_s = now_s + BYTES_FOR_S
            self._ready.append(task)

    def note_report(self, task: ConsumeTask, now_s: float, *, ended: bool) -> None:
        """Note that the Listener has reported a task. With `ended`, the task is no longer in flight."""
        if ended:
            del self._tasks[task.number]
            self._reported_s.pop(task.number, None)
            self._unread.discard(task.number)
        else:
            self._reported_s[task.number] = now_s

    def lose_all(self) -> list[ConsumeTask]:
        """Forget all tasks, because the Listener's process has ended, and return them. The next process may be able to
        read the store's files."""
        tasks, self._tasks, self._unconfirmed = list(self._tasks.values()), {}, None
        self._ready.clear()
        self._reported_s.clear()
        self._unread.clear()
        self._bytes_until_s = 0.0
        return tasks

    def silent_s(self, now_s: float) -> float:
        """Return for how many seconds the Listener has sent no report about a task that it has. If it has several
        tasks, return the longest of these times; 0 if it has no task. Any thread may call this method."""
        reported_s = list(self._reported_s.values())
        return now_s - min(reported_s) if reported_s else 0.0


def ship_task(task: ConsumeTask, *, in_place: bool) -> ShippedTask:
    """Build a task to send to the Listener. If `in_place` is True and the records are in a store's files, the task
    contains the records' positions instead of their bytes."""
    messages = task.messages
    if not in_place or not isinstance(messages, RecordsInPlace):
        memory = messages.in_memory()
        sizes = np.diff(np.array(memory.starts, np.int64)).tobytes()
        offsets = np.array(memory.offsets, np.int64).tobytes()
        return ShippedTask(
            task.number,
            task.queue,
            len(memory),
            memory.data,
            sizes=sizes,
            offsets=offsets,
            body_max_bytes=body_max_bytes(),
        )
    places = [
        LogPlaces((part.position + part.starts).tobytes(), part.sizes.tobytes(), part.offsets.tobytes())
        for part in messages.parts
    ]
    log = StoreLog(*messages.files)
    return ShippedTask(task.number, task.queue, len(messages), b"", tuple(places), log, body_max_bytes=body_max_bytes())
