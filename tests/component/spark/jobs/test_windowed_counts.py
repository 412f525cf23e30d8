"""Tests of the windowed-counts job on a stream of files and on a stream of a topic: each count of a time window is
correct and is sent once, also when a run closes the last windows."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions as sf
from pyspark.sql.types import ArrayType, StringType, StructField, StructType, TimestampType

from raydp_jobs.jobs import windowed_counts
from raydp_jobs.jobs.count_checkpoint import CountState, state_of
from raydp_jobs.jobs.windowed_counts import (
    Counted,
    StoredCounts,
    Windows,
    as_messages,
    await_end,
    begin,
    counted,
)
from raydp_jobs.sink.columns import check_columns
from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.progress import StreamOffsets, WindowClosing
from raydp_jobs.stream.source import TopicSource
from raydp_jobs.stream.spark_source import stream_frame
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from tests.support.spark.fake_topics import FakeTopics

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)
SCHEMA = StructType(
    [
        StructField("topic", StringType()),
        StructField("tags", StringType()),
        StructField("keys", ArrayType(StringType())),
        StructField("store_timestamp", TimestampType()),
    ]
)
Row = tuple[int, str | None, list[str]]
MINUTE = Windows(60, 60, 10)


class Stream:
    """A streaming query that reads files instead of messages, and the counts that the query sends.

    Each row of a file stands for a message: (seconds after noon, tag, keys).
    """

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark, self._directory = spark, directory
        self._files = 0
        self.sent: dict[int, list[dict[str, Any]]] = {}
        (directory / "rows").mkdir()

    def append(self, *rows: Row) -> None:
        lines = [
            json.dumps(
                {
                    "topic": "orders",
                    "tags": tags,
                    "keys": keys,
                    "store_timestamp": (NOON + timedelta(seconds=seconds)).isoformat(),
                }
            )
            for seconds, tags, keys in rows
        ]
        self._files += 1
        path = self._directory / f"rows/{self._files}.json"
        path.write_text("\n".join(lines))
        # Spark reads files in the order of their modification times, so each file gets a later time.
        os.utime(path, (self._files, self._files))

    def run(self, windows: Windows = MINUTE) -> Counted:
        """Run one query that counts the rows of all present files, with one micro-batch per file."""
        messages = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(f"{self._directory}/rows")
        stored = StoredCounts(lambda count: None)

        def sink(df: DataFrame, batch: int) -> None:
            check_columns(df)
            self.sent[batch] = [row.asDict() for row in df.collect()]
            stored.add(batch, SimpleNamespace(rows=len(self.sent[batch])))  # type: ignore[arg-type]  # a stand-in

        query = begin(messages, windows, sink, self._directory / "checkpoint", trigger_s=1, available_now=True)
        return await_end(query, "counts", stored)

    def counts(self) -> dict[tuple[int, str | None], int]:
        """Return the counts that the query has sent, by window start (seconds after noon) and tag. Fails if a count was
        sent twice."""
        found: dict[tuple[int, str | None], int] = {}
        for row in (row for rows in self.sent.values() for row in rows):
            body = json.loads(row["body"])
            key = (body["start_ms"] - NOON_MS) // 1000, body["tags"]
            assert key not in found
            found[key] = body["messages"]
        return found


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def test_closed_windows_are_sent_once_and_a_restart_continues(stream: Stream) -> None:
    stream.append((0, "paid", []), (59, "paid", []), (30, None, []), (60, "late", []))
    stream.append((75, "late", []))
    stream.run()
    assert stream.counts() == {(0, "paid"): 2, (0, None): 1}
    stream.append((119, "late", []), (80, "paid", []))
    stream.append((140, "paid", []))
    done = stream.run()
    assert stream.counts() == {(0, "paid"): 2, (0, None): 1, (60, "late"): 3, (60, "paid"): 1}
    assert (done.target, done.counts, done.late) == ("counts", 2, 0)


def test_late_messages_of_sent_windows_are_dropped_and_counted(stream: Stream) -> None:
    stream.append((10, "paid", []))
    stream.append((100, "paid", []))
    stream.append((110, "paid", []))  # The row at 110 s closes the first window, so that the window's counts are sent.
    stream.append((20, "paid", []), (65, "paid", []))
    stream.append((300, "paid", []))
    done = stream.run()
    assert stream.counts() == {(0, "paid"): 1, (60, "paid"): 3}
    assert done.late == 1


def rows(spark: SparkSession, some: Sequence[Row]) -> DataFrame:
    full = [("orders", tags, keys, NOON + timedelta(seconds=seconds)) for seconds, tags, keys in some]
    return spark.createDataFrame(full, SCHEMA)


def test_a_message_with_several_keys_counts_for_each_once(spark: SparkSession) -> None:
    frame = counted(rows(spark, [(0, None, ["a", "b", "a"]), (1, None, ["a"]), (2, None, [])]), Windows(by="keys"))
    assert {row["value"]: row["messages"] for row in frame.collect()} == {"a": 2, "b": 1, None: 1}


def test_windows_that_overlap_each_count_a_message(spark: SparkSession) -> None:
    frame = counted(rows(spark, [(65, "paid", [])]), Windows(60, 20))
    starts = sorted(int(row[0]) - NOON_MS // 1000 for row in frame.selectExpr("unix_seconds(start)").collect())
    assert starts == [20, 40, 60]


def test_counts_are_messages_of_their_tag_or_key(spark: SparkSession) -> None:
    frame = counted(rows(spark, [(0, "paid", ["a"])]), MINUTE)
    [row] = as_messages(frame, "tags").collect()
    assert json.loads(row["body"]) == {
        "topic": "orders",
        "start_ms": NOON_MS,
        "end_ms": NOON_MS + 60_000,
        "tags": "paid",
        "messages": 1,
    }
    assert (row["tags"], row["keys"], row["sharding_key"]) == ("paid", ["paid"], "orders\npaid")
    [row] = as_messages(counted(rows(spark, [(0, None, [])]), Windows(by="keys")), "keys").collect()
    assert json.loads(row["body"])["keys"] is None
    assert (row["tags"], row["keys"]) == (None, None)


def test_windows_with_gaps_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="set --slide to at most --window"):
        Windows(60, 61)


# Closing the last windows of a topic

TOPIC_SCHEMA = StructType([*SCHEMA, StructField("born_timestamp", TimestampType())])
QUEUES = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)
DISORDER_S = 60
"""The times of a topic's messages are at most this number of seconds out of order."""
PATIENT = Windows(60, 60, DISORDER_S)
"""Time windows with so long a watermark that no message of the topic is late, so each message is counted."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message of a Topic. Times are in ms after noon."""

    store_ms: int
    born_ms: int
    tags: str | None
    keys: tuple[str, ...]


class Topic:
    """A topic of two queues with random messages, and the counts that the job's queries over the topic send.

    `die`: decides whether a query fails before (False) or after (True) it has stored the counts of a batch.
    """

    def __init__(self, spark: SparkSession, checkpoint: Path, windows: Windows) -> None:
        self._spark, self._windows, self.checkpoint = spark, windows, checkpoint
        self._messages: dict[MessageQueue, list[Sent]] = {queue: [] for queue in QUEUES}
        seed = int(os.environ.get("WINDOWS_SEED", random.randrange(2**32)))
        print(f"WINDOWS_SEED={seed}")
        self._random = random.Random(seed)
        self.sent: dict[int, list[dict[str, Any]]] = {}
        self.die: Callable[[WindowClosing, bool], bool] = lambda closing, stored: False

    def send(self, count: int) -> None:
        """Send `count` messages to each queue, about three seconds apart."""
        for messages in self._messages.values():
            for _ in range(count):
                store_ms = len(messages) * 3000 + self._random.randrange(20_000)
                born_ms = max(0, store_ms - self._random.randrange(20_000))
                keys = tuple(key for key in "abc" if self._random.random() < 0.4)
                messages.append(Sent(store_ms, born_ms, self._random.choice(["paid", "late", None]), keys))

    def expected(self) -> dict[tuple[int, str | None], int]:
        """Count all messages of the topic by window start (seconds after noon) and by tag or key."""
        slide, length = self._windows.slide_s, self._windows.length_s
        counts: Counter[tuple[int, str | None]] = Counter()
        for one in (one for messages in self._messages.values() for one in messages):
            second = (one.store_ms if self._windows.time == "store" else one.born_ms) // 1000
            last = second - second % slide
            values = [one.tags] if self._windows.by == "tags" else one.keys or [None]
            counts.update((start, value) for start in range(last, second - length, -slide) for value in values)
        return dict(counts)

    def run(self, *, close: bool = False) -> Counted:
        """Count the present messages, in batches of 50. With `close`, close the windows."""
        topics = FakeTopics({queue: (0, len(messages)) for queue, messages in self._messages.items()})
        source = TopicSource(topics, BatchLimits(max_offsets=50), max_trigger_delay_s=900.0, closes=close)
        messages = stream_frame(self._spark, source, reader(self._messages), TOPIC_SCHEMA, "orders")
        stored = StoredCounts(lambda count: None)

        def sink(df: DataFrame, batch: int) -> None:
            check_columns(df)
            text = (self.checkpoint / f"offsets/{batch}").read_text().split("\n")[2]
            closing = StreamOffsets.from_json(text).closing
            assert not self.die(closing, False), f"the query dies before it has stored batch {batch}"
            rows = sorted((row.asDict() for row in df.collect()), key=lambda row: row["body"])
            assert self.sent.get(batch, rows) == rows, f"repeated batch {batch} differs from its first run"
            self.sent[batch] = rows
            stored.add(batch, SimpleNamespace(rows=len(rows)))  # type: ignore[arg-type]  # a stand-in
            assert not self.die(closing, True), f"the query dies after it has stored batch {batch}"

        query = begin(messages, self._windows, sink, self.checkpoint, trigger_s=1, available_now=True)
        return await_end(query, "counts", stored)

    def counts(self) -> dict[tuple[int, str | None], int]:
        """Return the sent counts, as `expected` does. Fails if a count was sent twice."""
        bodies = [json.loads(row["body"]) for rows in self.sent.values() for row in rows]
        pairs = [
            (((body["start_ms"] - NOON_MS) // 1000, body[self._windows.by]), int(body["messages"])) for body in bodies
        ]
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)


def reader(
    messages: dict[MessageQueue, list[Sent]],
) -> Callable[[Sequence[OffsetRange], str, str], Iterable[pa.RecordBatch]]:
    """Return a function that reads offset ranges of `messages` in a Spark worker."""
    kind = pa.timestamp("us", tz="UTC")

    def read(ranges: Sequence[OffsetRange], tags: str, sql: str) -> Iterator[pa.RecordBatch]:
        for one in ranges:
            found = messages[one.queue][one.start_offset : one.end_offset]
            assert len(found) == one.size
            columns: dict[str, Any] = {
                "topic": [one.topic] * len(found),
                "tags": pa.array([sent.tags for sent in found], pa.string()),
                "keys": pa.array([list(sent.keys) for sent in found], pa.list_(pa.string())),
                "store_timestamp": pa.array([(NOON_MS + sent.store_ms) * 1000 for sent in found], kind),
                "born_timestamp": pa.array([(NOON_MS + sent.born_ms) * 1000 for sent in found], kind),
            }
            yield pa.RecordBatch.from_pydict(columns)

    return read


@pytest.mark.parametrize(
    "windows",
    [PATIENT, Windows(60, 20, DISORDER_S, "keys", "born")],
    ids=["tags-by-store-time", "keys-by-born-time-sliding"],
)
def test_closing_sends_exactly_the_missing_counts(spark: SparkSession, tmp_path: Path, windows: Windows) -> None:
    topic = Topic(spark, tmp_path / "checkpoint", windows)
    topic.send(70)
    topic.run()
    before, expected = topic.counts(), topic.expected()
    assert {key: count for key, count in expected.items() if key in before} == before
    assert 0 < len(before) < len(expected)
    assert state_of(topic.checkpoint) is CountState.OPEN
    done = topic.run(close=True)
    assert topic.counts() == expected
    assert (done.counts, done.late) == (len(expected) - len(before), 0)
    assert state_of(topic.checkpoint) is CountState.CLOSED


def test_a_closed_count_sends_nothing_more(spark: SparkSession, tmp_path: Path) -> None:
    """The first run on a new checkpoint also counts and closes. A later run with `close` reads no message."""
    topic = Topic(spark, tmp_path / "checkpoint", PATIENT)
    topic.send(40)
    topic.run(close=True)
    assert topic.counts() == topic.expected()
    closed = dict(topic.sent)
    topic.send(10)
    done = topic.run(close=True)
    assert (done.batches, done.counts, topic.sent) == (0, 0, closed)
    with pytest.raises(StreamingQueryException, match="the checkpoint is closed"):
        topic.run()
    assert topic.sent == closed


def test_closing_continues_wherever_a_run_was_killed(spark: SparkSession, tmp_path: Path) -> None:
    topic = Topic(spark, tmp_path / "checkpoint", PATIENT)
    topic.send(40)
    expected = topic.expected()
    for closing, stored in (
        (WindowClosing.NO, True),
        (WindowClosing.ROW, False),
        (WindowClosing.ROW, True),
        (WindowClosing.LAST, False),
        (WindowClosing.LAST, True),
    ):
        topic.die = lambda now, after, closing=closing, stored=stored: (now, after) == (closing, stored)
        with pytest.raises(StreamingQueryException, match="the query dies"):
            topic.run(close=True)
        assert state_of(topic.checkpoint) is (CountState.CLOSING if closing else CountState.OPEN)
        if closing:
            topic.send(1)  # No further message is counted after the query has begun to close.
        if (closing, stored) == (WindowClosing.LAST, False):
            # Go back to the moment after the end of the batch with the row, before the last batch was planned.
            last = max(int(path.name) for path in (topic.checkpoint / "offsets").glob("[0-9]*"))
            for name in (f"{last}", f".{last}.crc"):
                (topic.checkpoint / "offsets" / name).unlink()
            assert (topic.checkpoint / f"commits/{last - 1}").exists()
    topic.die = lambda closing, stored: False
    topic.run(close=True)
    assert topic.counts() == expected
    assert state_of(topic.checkpoint) is CountState.CLOSED


def counted_before(messages: DataFrame, windows: Windows) -> DataFrame:
    """The steps of `counted` in the versions of raymq that could not close windows."""
    window = sf.window("time", f"{windows.length_s} seconds", f"{windows.slide_s} seconds")
    counts = (
        messages.select("topic", sf.col("store_timestamp").alias("time"), sf.col("tags").alias("value"))
        .withWatermark("time", f"{windows.late_s} seconds")
        .groupBy("topic", window, "value")
        .agg(sf.count("*").alias("messages"))
    )
    return counts.select("topic", "window.start", "window.end", "value", "messages")


def test_a_checkpoint_of_an_earlier_version_continues_and_can_be_closed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Topic(spark, tmp_path / "checkpoint", PATIENT)
    topic.send(50)
    with monkeypatch.context() as earlier:
        earlier.setattr(windowed_counts, "counted", counted_before)
        topic.run()
    topic.send(20)
    topic.run()
    assert 0 < len(topic.counts()) < len(topic.expected())
    topic.send(10)
    topic.run(close=True)
    assert topic.counts() == topic.expected()
