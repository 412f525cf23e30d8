"""The child of test_store_kill.py: appends to a store for ever, a thread per queue, and tells what was acknowledged.

    python tests/chaos/store_appender.py DIRECTORY FLUSH SEED NEXT_0 NEXT_1 ...

Writes the line `open` before it opens the store, then `QUEUE END` for each acknowledged batch: all messages of QUEUE
before sequence END are stored. The body of a message tells its queue and its sequence.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raymq.config import FlushDiskType
from storage.message_store import MessageStore
from tests.support.stores import make_batch, open_store


def body(queue_id: int, sequence: int) -> bytes:
    """The body of a message: its place, and padding whose length depends on it."""
    return b"%d:%d:" % (queue_id, sequence) + b"x" * (sequence * 7919 % 1500)


def append_for_ever(store: MessageStore, queue_id: int, sequence: int, dice: random.Random) -> None:
    while True:
        count = dice.choice((1, 1, 2, 5, 20, 100))
        bodies = [body(queue_id, sequence + index) for index in range(count)]
        [result] = store.append([make_batch(bodies, queue_id=queue_id, producer=(f"p{queue_id}", 0, sequence))])
        assert result.queue_offset == sequence, f"queue {queue_id}: {sequence} is at {result.queue_offset}"
        sequence += count
        os.write(1, b"%d %d\n" % (queue_id, sequence))


def main() -> None:
    directory, flush, seed, *following = sys.argv[1:]
    os.write(1, b"open\n")
    store = open_store(Path(directory), flush_disk_type=FlushDiskType(flush), flush_interval_consume_queue_ms=50)
    for queue_id, sequence in enumerate(following):
        dice = random.Random(f"{seed}-{queue_id}")
        threading.Thread(target=append_for_ever, args=(store, queue_id, int(sequence), dice)).start()


if __name__ == "__main__":
    main()
