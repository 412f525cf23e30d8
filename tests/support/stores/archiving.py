"""Program that archives a topic without Spark: ``python archiving.py DIRECTORY``. The program computes the topic's
messages itself. Tests kill the program during the archiving."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from raydp_jobs.jobs.archive import archive, locked
from raydp_jobs.jobs.archive_writer import Written, write_range
from raymq.client.scan.ranges import OffsetRange
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from tests.support.stores.topic_batches import messages_of

QUEUES = {MessageQueue("orders", "broker-a", queue_id): QueueBounds(0, 400, 0) for queue_id in range(3)}


def stage(ranges: Sequence[OffsetRange], staging: Path) -> list[Written]:
    return [written for item in ranges for written in write_range(item, messages_of(item), staging)]


def archive_all(directory: Path, on_written: Callable[[int], None] = lambda count: None) -> int:
    """Archive all messages that the archive in `directory` lacks. Returns the number of archived messages."""
    with locked(directory / "orders") as folder:
        return archive(folder, "orders", QUEUES, stage, round_messages=60, on_written=on_written).messages


if __name__ == "__main__":
    print("begun", flush=True)
    archive_all(Path(sys.argv[1]), lambda count: print("a round", flush=True))
    print("done", flush=True)
