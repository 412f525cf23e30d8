"""The child process of test_store_schedule_kill.py: stores delayed messages and delivers them until it is killed.

    python tests/chaos/store/delayed_appender.py DIRECTORY NEXT_LEVEL NEXT_TIMER

The program writes the line `open` before it opens the store, and then the line `level END` or `timer END` for each
acknowledged batch. All timer messages use one queue, so the sequence numbers of one producer cover all of them.
Normally the hour of delivery decides the queue of a timer message.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from raymq.common.delay import TIMER_TOPIC
from raymq.common.message import Message
from raymq.common.names import SCHEDULE_TOPIC
from raymq.records.format.encode import ProducerSequence, WaitingBatch, encode_batch
from tests.support.stores.stores import open_store

TARGET_QUEUES = 3


def main() -> None:
    directory, *following = sys.argv[1:]
    sequences = dict(zip(("level", "timer"), map(int, following), strict=True))
    os.write(1, b"open\n")
    store = open_store(Path(directory), flush_interval_consume_queue_ms=50)
    store.schedule.start_delivery()
    dice = random.Random()
    while True:
        for kind, topic in (("level", SCHEDULE_TOPIC), ("timer", TIMER_TOPIC)):
            numbers = range(sequences[kind], sequences[kind] + dice.choice((1, 5, 40)))
            now_ms = time.time_ns() // 1_000_000
            messages = [
                Message("orders", b"%s:%d" % (kind.encode(), number), delay_level=1)
                if kind == "level"
                else Message("orders", b"%s:%d" % (kind.encode(), number), deliver_at_ms=now_ms + dice.randrange(400))
                for number in numbers
            ]
            batch = encode_batch(
                messages,
                0,
                born_host=("127.0.0.1", 1),
                born_timestamp_ms=now_ms,
                message_ids=[""] * len(messages),
                producer=ProducerSequence(kind, 0, numbers.start),
                waiting=WaitingBatch(topic, [number % TARGET_QUEUES for number in numbers]),
            )
            store.append([batch])
            sequences[kind] = numbers.stop
            os.write(1, b"%s %d\n" % (kind.encode(), numbers.stop))


if __name__ == "__main__":
    main()
