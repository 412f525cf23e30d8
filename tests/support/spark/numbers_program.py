"""A program with a streaming query over computed topics, for tests that kill the program. It needs no Ray and no store:

    python -m tests.support.spark.numbers_program DIRECTORY [end]

The queues grow from the time in the file DIRECTORY/began to the time in the file DIRECTORY/ended. With `end` the query
reads all present messages and ends; otherwise the query never ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.source import TopicSource
from raydp_jobs.stream.spark_source import stream_frame
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from tests.support.spark.batch_files import PLACE, BatchFiles
from tests.support.spark.fake_topics import SCHEMA, FakeTopics, read
from tests.support.spark.local_spark import local_spark

RATES = {MessageQueue("orders", "a", 0): 60, MessageQueue("orders", "a", 1): 20, MessageQueue("orders", "b", 0): 35}
"""Number of new messages per second, by queue."""
LATER = MessageQueue("orders", "b", 1)
LATER_AFTER_S = 10.0
"""Seconds after the program's start at which the queue LATER appears. This queue grows by 10 messages per
second."""


class GrowingTopics(FakeTopics):
    """Fake topics whose messages are computed, and whose queues grow with time. The file `began` in `directory`
    contains the time at which the growth starts. The file `ended`, if it exists, contains the time at which the growth
    ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        super().__init__(self._now())

    def queues(self) -> Sequence[MessageQueue]:
        self.held = self._now()
        return super().queues()

    def bounds(self, queues: Sequence[MessageQueue], *, all_of_them: bool) -> Mapping[MessageQueue, QueueBounds]:
        self.held |= self._now()
        return super().bounds(queues, all_of_them=all_of_them)

    def _now(self) -> dict[MessageQueue, tuple[int, int]]:
        ended = self._directory / "ended"
        now_s = float(ended.read_text()) if ended.exists() else time.time()
        age_s = max(0.0, now_s - float((self._directory / "began").read_text()))
        held = {queue: (0, int(age_s * rate)) for queue, rate in RATES.items()}
        if age_s > LATER_AFTER_S:
            held[LATER] = (0, int((age_s - LATER_AFTER_S) * 10))
        return held


def main(directory: Path, *, end: bool) -> None:
    """Run the streaming query from the computed topics to DIRECTORY/sink, with the checkpoint
    DIRECTORY/checkpoint."""
    with local_spark(directory / "spark") as spark:
        limits = BatchLimits(max_offsets=20_000 if end else 400, min_partitions=2)
        source = TopicSource(GrowingTopics(directory), limits, max_trigger_delay_s=1.0)
        frame = stream_frame(spark, source, read, SCHEMA, "numbers")
        writer = frame.writeStream.foreachBatch(BatchFiles(directory / "sink", PLACE))
        writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
        query = (writer.trigger(availableNow=True) if end else writer).start()
        query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), end=sys.argv[2:] == ["end"])
