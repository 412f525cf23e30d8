"""Topics of computed messages, for streaming queries without a cluster. A message is computed from its queue offset,
not stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from raydp_jobs.stream.source import StreamCluster
from raymq.client.consumer.subscription import Subscription
from raymq.client.scan.offsets import EARLIEST
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import DataLossError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from raymq.records.filters.sql import SqlFilter

SCHEMA = StructType(
    [
        StructField("topic", StringType()),
        StructField("broker_name", StringType()),
        StructField("queue_id", IntegerType()),
        StructField("queue_offset", LongType()),
        StructField("tags", StringType()),
        StructField("born_timestamp", TimestampType()),
    ]
)
BORN = datetime(2026, 1, 1, tzinfo=UTC)
"""Born time of the message at offset 0 of each queue. Each further message has a born time one second later. Messages
at even offsets have the tag "paid"."""

Row = tuple[str, str, int, int]
"""The location of a message: topic, broker name, queue id and queue offset."""


class FakeTopics(StreamCluster):
    """Fake cluster for tests of streaming queries. It stores no messages; it computes them from their queue and offset.

    `held`: first offset and next offset of each queue. `silent`: names of broker groups that do not answer.
    `absent`: names of broker groups with queues that are not in `held`.
    """

    def __init__(self, held: Mapping[MessageQueue, tuple[int, int]], *, start: int = EARLIEST) -> None:
        self.held, self.start = dict(held), start
        self.silent: set[str] = set()
        self.absent: set[str] = set()
        self.gone: set[MessageQueue] = set()
        self.ids: dict[str, dict[str, str]] = {}
        self.near: dict[str, Sequence[str]] = {}
        self.committed: list[dict[MessageQueue, int]] = []
        self.commits_fail = False
        self.asked = self.closed = 0

    def append(self, queue: MessageQueue, count: int) -> None:
        low, high = self.held.get(queue, (0, 0))
        self.held[queue] = low, high + count

    def queues(self) -> Sequence[MessageQueue]:
        return sorted(self.held)

    def bounds(self, queues: Sequence[MessageQueue], *, all_of_them: bool) -> Mapping[MessageQueue, QueueBounds]:
        self.asked += 1
        if all_of_them and self.silent:
            raise ServiceNotAvailableError(f"{sorted(self.silent)} do not answer")
        return {queue: QueueBounds(*self.held[queue], 0) for queue in queues if queue.broker_name not in self.silent}

    def creations(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        return {topic: dict(self.ids[topic]) for topic in topics if topic in self.ids}

    def starts(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        return dict.fromkeys(queues, self.start)

    def deleted(self, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        return [queue for queue in queues if queue in self.gone]

    def absent_brokers(self) -> Sequence[str]:
        return sorted(self.absent)

    def hosts(self, parts: Sequence[ScanPartition]) -> Sequence[Sequence[str]]:
        return [self.near.get(part.broker_name, ()) for part in parts]

    def commit(self, offsets: Mapping[MessageQueue, int]) -> bool:
        if not self.commits_fail:
            self.committed.append(dict(offsets))
        return not self.commits_fail

    def close(self) -> None:
        self.closed += 1

    @property
    def messages(self) -> set[Row]:
        return {row for queue, held in self.held.items() for row in rows(queue, *held)}


def rows(queue: MessageQueue, start: int, end: int) -> set[Row]:
    """Return the rows of a queue's messages at the offsets from `start` to `end` - 1."""
    return {(queue.topic, queue.broker_name, queue.queue_id, offset) for offset in range(start, end)}


def read(ranges: Iterable[OffsetRange], expression: str, sql: str) -> Iterator[pa.RecordBatch]:
    """Yield the messages of offset ranges, several batches per range, as a Spark worker reads them. Each message has a
    property with its offset."""
    tags = Subscription.parse("any", expression).tags
    for one in ranges:
        for first in range(one.start_offset, one.end_offset, 100):
            offsets = [
                offset
                for offset in range(first, min(first + 100, one.end_offset))
                if (not tags or _tag(offset) in tags) and (not sql or SqlFilter(sql).matches({"offset": str(offset)}))
            ]
            yield _batch(one, offsets)


def read_but_lost(ranges: Iterable[OffsetRange], expression: str, sql: str) -> Iterator[pa.RecordBatch]:
    """Stand-in for the function `read` that yields no rows, as if all messages in the ranges were deleted before a
    worker read them."""
    for one in ranges:
        raise DataLossError(f"{one.queue}: offsets {one.start_offset} to {one.end_offset - 1} are not on disk")
    yield from ()


def _batch(one: OffsetRange, offsets: list[int]) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "topic": [one.topic] * len(offsets),
        "broker_name": [one.broker_name] * len(offsets),
        "queue_id": pa.array([one.queue_id] * len(offsets), pa.int32()),
        "queue_offset": offsets,
        "tags": [_tag(offset) for offset in offsets],
        "born_timestamp": pa.array(
            [BORN + timedelta(seconds=offset) for offset in offsets], pa.timestamp("us", tz="UTC")
        ),
    }
    return pa.RecordBatch.from_pydict(columns)


def _tag(offset: int) -> str:
    return "late" if offset % 2 else "paid"
