"""Helper program of test_store_kill.py: kills a process that appends to a store, repeatedly.

    python tests/chaos/store/kill_server.py DIRECTORY FLUSH SEED KILLS

This process imports everything once, has one thread, and forks a child for each kill. The child opens the store that
the previous child left, checks the store, and appends until it is killed, with a thread per queue. The child reports
acknowledgements through a pipe, and resends the messages that the previous child had in flight. This process kills half
of the children at a random moment. The other children kill themselves at a random disk call, after half of a write.

FLUSH POOL is ASYNC_FLUSH with a transient store pool. In that case only a prefix of the acknowledged messages must be
stored, and the next child resends the other messages.

If a child finds that a message is lost, stored twice or out of order, it reports the message, and both processes end.
Otherwise this program prints a summary.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import storage.checkpoint_service
import storage.log.transient_store_pool
import storage.log.warm_up
from raymq.common.config.store import FlushDiskType
from storage.files import disk
from storage.message_store import MessageStore
from tests.support.stores.stores import make_batch, open_store, read_queue

POOL = "POOL"
QUEUES = 4
BATCH_MAX = 100
LONGEST_LIFE_S = 0.06
SELF_KILL_WITHIN_S = 0.5
PIPE_BYTES = 1 << 20
DIRECTORY_ROLLS_OVER_BYTES = 3 << 20
"""Log size, in bytes, at which the test begins a new store directory. If the log grew larger, reading it after each
kill would take most of the test's time."""
KILLED_IN = ("open_file", "preallocate", "pwrite_all", "flush", "rename", "unlink", "sync_directory")


class AcknowledgedCounts(NamedTuple):
    """The numbers of messages that the store has acknowledged, by queue.

    `acknowledged`: all acknowledged messages. `safe`: the acknowledged messages that must be stored; set only if the
    store has a transient store pool. `lost`: the total number of acknowledged messages that a transient store pool has
    lost.
    """

    acknowledged: list[int]
    safe: list[int] | None
    lost: int = 0


def nothing(flush: str) -> AcknowledgedCounts:
    return AcknowledgedCounts([0] * QUEUES, [0] * QUEUES if flush == POOL else None)


def body(queue_id: int, sequence: int) -> bytes:
    """Return the body of a message: its queue id, its sequence number, and padding whose length depends on the sequence
    number."""
    return b"%d:%d:" % (queue_id, sequence) + b"x" * (sequence * 7919 % 1500)


def die_at(call: int, dice: random.Random) -> None:
    """Make this process kill itself at the disk call number `call`, counted from now on."""
    lock, counted = threading.Lock(), 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            nonlocal counted
            with lock:
                counted += 1
                dies = counted == call
            if dies:
                if name == "pwrite_all":
                    descriptor, position, data = arguments
                    os.pwrite(descriptor, memoryview(data)[: dice.randint(0, len(data))], position)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return counting

    for name in KILLED_IN:
        setattr(disk, name, wrap(name, getattr(disk, name)))


def options_of(flush: str) -> dict[str, Any]:
    """Return the store settings that the program's argument FLUSH selects (the flush mode)."""
    if flush == POOL:
        return {"flush_disk_type": FlushDiskType.ASYNC_FLUSH, "transient_store_pool_enable": True}
    return {"flush_disk_type": FlushDiskType(flush)}


def check(
    store: MessageStore, acknowledged: list[int], batch_max: int = BATCH_MAX, safe: list[int] | None = None
) -> list[int]:
    """Check that the store has all acknowledged messages, exactly once and in order. With `safe`, only the first `safe`
    messages of each queue must be stored.

    Some messages in flight may be stored too, beginning with the first. Returns the number of messages in each queue.
    """
    found = []
    for queue_id, end in enumerate(acknowledged):
        bodies = [message.body for message in read_queue(store, queue_id=queue_id)]
        assert bodies == [body(queue_id, sequence) for sequence in range(len(bodies))], f"queue {queue_id}: disorder"
        least = end if safe is None else safe[queue_id]
        assert len(bodies) >= least, f"queue {queue_id}: {least} were safe, {len(bodies)} are there"
        assert len(bodies) <= end + batch_max, f"queue {queue_id}: {len(bodies)} are there, of {end} acknowledged"
        found.append(len(bodies))
    return found


def append_for_ever(store: MessageStore, queue_id: int, sequence: int, dice: random.Random, pipe: int) -> None:
    try:
        while True:
            count = dice.choice((1, 1, 2, 5, 20, BATCH_MAX))
            bodies = [body(queue_id, sequence + index) for index in range(count)]
            [result] = store.append([make_batch(bodies, queue_id=queue_id, producer=(f"p{queue_id}", 0, sequence))])
            assert result.queue_offset == sequence, f"queue {queue_id}: {sequence} is at {result.queue_offset}"
            sequence += count
            os.write(pipe, b"%d %d\n" % (queue_id, sequence))
    except BaseException:
        fail()


def fail() -> None:
    traceback.print_exc()
    os._exit(1)


def live(root: Path, flush: str, dice: random.Random, known: AcknowledgedCounts, pipe: int, call: int) -> None:
    """Run a child process that opens the store, checks it, and appends until it is killed."""
    try:
        if call:
            die_at(call, dice)
        store = open_store(root, flush_interval_consume_queue_ms=10, **options_of(flush))
        found = check(store, known.acknowledged, safe=known.safe)
        if flush == POOL:
            os.write(pipe, b"".join(b"%d %d safe\n" % row for row in enumerate(found)))
        for queue_id, sequence in enumerate(known.acknowledged if flush != POOL else found):
            thread_dice = random.Random(dice.random())
            arguments = (store, queue_id, sequence, thread_dice, pipe)
            threading.Thread(target=append_for_ever, args=arguments, daemon=True).start()
        signal.pause()
    except BaseException:
        fail()


def run_and_kill(root: Path, flush: str, dice: random.Random, known: AcknowledgedCounts) -> AcknowledgedCounts:
    """Run one child process and kill it. Returns the numbers of acknowledged messages after the kill."""
    kills_itself = dice.random() < 0.5
    call = int(dice.choice((30, 100, 400)) * dice.random()) + 1 if kills_itself else 0
    life_s = SELF_KILL_WITHIN_S if kills_itself else dice.uniform(0, LONGEST_LIFE_S)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        live(root, flush, dice, known, writing, call)
    os.close(writing)
    child = os.pidfd_open(pid)
    # Wait for `life_s` seconds, or until the child process has ended by itself. Then kill it.
    select.select([child], [], [], life_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(child)
    with open(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    if not os.WIFSIGNALED(status):
        sys.exit(f"the child found something wrong in {root}")
    ends, safe, lost = list(known.acknowledged), known.safe and list(known.safe), known.lost
    for line in lines:
        queue_id, end = map(int, line.split()[:2])
        if line.endswith(b"safe") and safe is not None:
            lost += max(ends[queue_id] - end, 0)
            safe[queue_id] = end
        ends[queue_id] = end
    return AcknowledgedCounts(ends, safe, lost)


def finish(root: Path, flush: str, known: AcknowledgedCounts) -> None:
    """Run a last child process after all kills. It opens the store, checks it and closes it cleanly, twice."""
    pid = os.fork()
    if pid == 0:
        try:
            for _ in range(2):
                store = open_store(root, **options_of(flush))
                check(store, known.acknowledged, safe=known.safe)
                store.close()
        except BaseException:
            fail()
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"the last child found something wrong in {root}")


def main() -> None:
    directory, flush, seed, kills = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    storage.checkpoint_service.STORE_SNAPSHOT_INTERVAL_BYTES = 100_000  # type: ignore[misc]
    # Make appends use prefaulted (warm) pages through memory maps, even with small files and a slow writer.
    storage.log.warm_up.SEGMENT_BYTES = 16384  # type: ignore[misc]
    storage.log.warm_up.FAST_S = 60.0  # type: ignore[misc]
    # Make the buffers of the transient store pool so small that they fill up between two commits.
    storage.log.transient_store_pool.BUFFER_BYTES = 50_000  # type: ignore[misc]
    dice = random.Random(f"{seed}-{flush}")
    root, known, total = directory / "0", nothing(flush), 0
    for kill in range(kills):
        known = run_and_kill(root, flush, dice, known)
        log = root / "commitlog"
        files = len(os.listdir(log)) if log.is_dir() else 0
        if files * 65536 > DIRECTORY_ROLLS_OVER_BYTES:
            finish(root, flush, known)
            total += sum(known.acknowledged)
            root, known = directory / str(kill + 1), nothing(flush)._replace(lost=known.lost)
    finish(root, flush, known)
    messages = f"{total + sum(known.acknowledged)} messages acknowledged"
    lost = f"{known.lost} from the end" if flush == POOL else "0"
    print(f"{kills} kills, {messages}: lost {lost}, out of order 0, duplicated 0")


if __name__ == "__main__":
    main()
