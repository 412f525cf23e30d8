"""Tests of the windowed-counts job on a stream of files: each count of a time window is correct and is sent
once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, StringType, StructField, StructType, TimestampType

from raydp_jobs.jobs.windowed_counts import (
    Counted,
    StoredCounts,
    Windows,
    as_messages,
    await_end,
    begin,
    counted,
    fix_options,
)
from raydp_jobs.sink.columns import check_columns
from raymq.common.errors import InvalidArgumentError

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
    """A stream of files that stand for messages, and the counts that a streaming query over the files sends.

    Each row of a file is (seconds after noon, tag, keys).
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


def test_a_checkpoint_is_of_one_count(tmp_path: Path) -> None:
    fix_options(tmp_path / "c", {"by": "tags", "length_s": 60})
    fix_options(tmp_path / "c", {"length_s": 60, "by": "tags"})
    with pytest.raises(InvalidArgumentError, match=r"belongs to another count \(length_s=60\)"):
        fix_options(tmp_path / "c", {"by": "tags", "length_s": 300})
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["raymq-windowed-counts.json"]
