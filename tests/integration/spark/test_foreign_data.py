"""Tests that Spark on a topic equals pandas on a foreign data set, for each option of `read_topic` and `stream_topic`,
for `write_topic` and `topic_sink`, and for the jobs that read topics.

The data set is a table of 26,428 salaries (tests/integration/spark/lahman.py). A salary is a message: its body is the
row as JSON, its tag is the league, its keys are the player and the team, and its properties are the year and the
salary. The salaries since 2000 are stored later than all others.

RAYMQ_SOAK=1 also runs the tests of the jobs, and the test of the order of rows and of refused rows.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

import raymq
from raydp_jobs import read_topic, stream_topic, topic_sink, write_topic
from raydp_jobs.jobs import archive, replay, topic_stats, windowed_counts
from raydp_jobs.jobs.archive_check import verify
from raydp_jobs.jobs.replay_source import Selection
from raydp_jobs.jobs.times import Period
from raydp_jobs.stream.topic_stream import StartingOptions
from raymq.client.producer.settings import ProducerOptions
from raymq.client.scan.ranges import ScanOptions
from raymq.common.errors import MessageIllegalError
from raymq.common.message import ConsumeFromWhere
from raymq.records.format.compression import Compression, CompressionType
from tests.integration.spark.lahman import salaries
from tests.support.history.waiting import eventually

pytestmark = pytest.mark.long
in_soak = pytest.mark.skipif(os.environ.get("RAYMQ_SOAK") != "1", reason="one of the long runs: `make soak`")

TOPIC = "lahman-salaries"
QUEUES = 4
GROUP = "lahman-readers"
PLACE = ["broker_name", "queue_id", "queue_offset"]
COLUMNS = ["body", "tags", "keys", "properties", "sharding_key"]
SINCE = 2000
"""The year with which the later half of the table begins."""
RICH = raymq.sql("year > 2005 AND salary >= 10000000")
Mask = Callable[[pd.DataFrame], Any]


def as_messages(spark: SparkSession, table: pd.DataFrame, path: Path) -> DataFrame:
    """Return the rows of a table as messages. The rows pass through a Parquet file."""
    table.to_parquet(path, index=False)
    return spark.read.parquet(str(path)).selectExpr(
        "to_json(struct(*)) AS body",
        "lgID AS tags",
        "array(playerID, teamID) AS keys",
        "map('year', cast(yearID AS string), 'salary', cast(salary AS string)) AS properties",
        "teamID AS sharding_key",
    )


def table_of(rows: list[Any]) -> pd.DataFrame:
    """Return a table of messages: their places and the values of their bodies, sorted by place."""
    values = [{**json.loads(bytes(row.body)), **{name: row[name] for name in PLACE}} for row in rows]
    return pd.DataFrame(values).sort_values(PLACE, ignore_index=True)


def plain(table: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Return the rows of the data set in a table, sorted."""
    return sorted(map(tuple, table[["yearID", "teamID", "lgID", "playerID", "salary"]].to_numpy().tolist()))


@dataclass
class Stored:
    """The stored topic. `table`: the rows with their places. `middle_ms`: all salaries since SINCE, and no others, were
    stored at this time or later."""

    table: pd.DataFrame
    middle_ms: int

    def per_queue(self, value: Callable[[int], int]) -> dict[str, dict[str, int]]:
        """Return an option's value per queue: `value` is called with the number of the queue's messages."""
        found: dict[str, dict[str, int]] = {}
        for (broker, queue_id), rows in self.table.groupby(["broker_name", "queue_id"]):
            found.setdefault(broker, {})[str(queue_id)] = value(len(rows))
        return found

    def places(self, mask: Mask) -> set[tuple[Any, ...]]:
        """Return the places of the rows that pandas selects."""
        return set(map(tuple, self.table[mask(self.table)][PLACE].to_numpy().tolist()))


@pytest.fixture(scope="module")
def stored(mq: raymq.Client, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Write the data set to the topic in two halves, read it, and check that it is equal to the source."""
    source, folder = salaries(), tmp_path_factory.mktemp("lahman")
    mq.admin.create_topic(TOPIC, queues=QUEUES)
    early, late = source[source.yearID < SINCE], source[source.yearID >= SINCE]
    assert write_topic(as_messages(spark, early, folder / "early"), TOPIC, client=mq).rows == len(early)
    rows = read_topic(spark, TOPIC, columns=["store_timestamp"], client=mq)
    [row] = rows.selectExpr("max(unix_millis(store_timestamp)) AS newest").collect()
    assert write_topic(as_messages(spark, late, folder / "late"), TOPIC, client=mq).rows == len(late)
    read = read_topic(spark, TOPIC, client=mq).collect()
    table = table_of(read)
    assert plain(table) == plain(source)
    for row_read in read:
        body = json.loads(bytes(row_read.body))
        assert (row_read.tags, row_read.keys) == (body["lgID"], [body["playerID"], body["teamID"]])
        assert row_read.properties == {"year": str(body["yearID"]), "salary": str(body["salary"])}
    return Stored(table, row.newest + 1)


ALL: Mask = lambda table: table.yearID > 0  # noqa: E731
LATE: Mask = lambda table: table.yearID >= SINCE  # noqa: E731
EARLY: Mask = lambda table: table.yearID < SINCE  # noqa: E731
FAR_MS = int((datetime.now(UTC) + timedelta(days=1)).timestamp() * 1000)


def half(table: pd.DataFrame) -> Any:
    """Select the rows from the middle of each queue on."""
    return table.queue_offset >= table.groupby(["broker_name", "queue_id"]).queue_offset.transform("size") // 2


READS: dict[str, tuple[Callable[[Stored], dict[str, Any]], Mask]] = {
    "topic": (lambda stored: {"topic": [TOPIC]}, ALL),
    "topic_pattern": (lambda stored: {"topic": None, "topic_pattern": "lahman-sal.*"}, ALL),
    "tags": (lambda stored: {"tags": "AL"}, lambda table: table.lgID == "AL"),
    "expression": (
        lambda stored: {"expression": RICH},
        lambda table: (table.yearID > 2005) & (table.salary >= 10_000_000),
    ),
    "starting_offsets": (lambda stored: {"starting_offsets": stored.per_queue(lambda count: count // 2)}, half),
    "starting_timestamp": (lambda stored: {"starting_timestamp": stored.middle_ms}, LATE),
    "starting_offsets_by_timestamp": (
        lambda stored: {"starting_offsets_by_timestamp": stored.per_queue(lambda count: stored.middle_ms)},
        LATE,
    ),
    "starting_offsets_by_timestamp_strategy": (
        lambda stored: {"starting_timestamp": FAR_MS, "starting_offsets_by_timestamp_strategy": "latest"},
        lambda table: table.yearID < 0,
    ),
    "ending_offsets": (
        lambda stored: {"ending_offsets": stored.per_queue(lambda count: count // 2)},
        lambda table: ~half(table),
    ),
    "ending_timestamp": (lambda stored: {"ending_timestamp": stored.middle_ms}, EARLY),
    "ending_offsets_by_timestamp": (
        lambda stored: {"ending_offsets_by_timestamp": stored.per_queue(lambda count: stored.middle_ms)},
        EARLY,
    ),
    "fail_on_data_loss": (lambda stored: {"fail_on_data_loss": False}, ALL),
    "unreadable": (lambda stored: {"unreadable": "raise"}, ALL),
    "client": (lambda stored: {"client": None}, ALL),
}
OF_THEIR_OWN = {"columns", "max_offsets", "min_partitions", "partition_bytes"}
"""Options of `read_topic` that have a test of their own."""


def options_of(function: Callable[..., Any], more: type) -> set[str]:
    kinds = signature(function).parameters.items()
    return {name for name, one in kinds if one.kind is not Parameter.VAR_KEYWORD and name != "spark"} | set(
        more.__annotations__
    )


def test_the_tables_have_each_option() -> None:
    assert READS.keys() | OF_THEIR_OWN == options_of(read_topic, ScanOptions)
    assert options_of(stream_topic, StartingOptions) == STREAMED
    assert options_of(write_topic, ProducerOptions) - {"df", "topic"} == WRITTEN | NOT_OF_WRITES


@pytest.mark.parametrize("option", READS)
def test_a_read_has_the_rows_that_pandas_selects(
    mq: raymq.Client, spark: SparkSession, stored: Stored, option: str
) -> None:
    options, mask = READS[option]
    chosen = {"topic": TOPIC, "client": mq, "columns": PLACE, **options(stored)}
    rows = read_topic(spark, **chosen).collect()
    assert (len(rows), set(map(tuple, rows))) == (len(stored.places(mask)), stored.places(mask))


def test_a_read_begins_at_the_offsets_of_a_group(mq: raymq.Client, spark: SparkSession, stored: Stored) -> None:
    mq.admin.create_group(GROUP)
    mq.admin.reset_offsets(GROUP, TOPIC, timestamp_ms=stored.middle_ms)
    rows = read_topic(spark, TOPIC, columns=PLACE, starting_offsets=f"group:{GROUP}", client=mq).collect()
    assert set(map(tuple, rows)) == stored.places(LATE)


def test_columns_and_partitions_are_as_asked_for(mq: raymq.Client, spark: SparkSession, stored: Stored) -> None:
    assert read_topic(spark, TOPIC, columns=["tags", "body_size"], client=mq).columns == ["tags", "body_size"]
    first = read_topic(spark, TOPIC, columns=PLACE, max_offsets=1000, client=mq).collect()
    assert len(first) == 1000
    ends = Counter((row.broker_name, row.queue_id) for row in first)
    assert set(map(tuple, first)) == {(*queue, offset) for queue, end in ends.items() for offset in range(end)}
    usual = read_topic(spark, TOPIC, client=mq).rdd.getNumPartitions()
    for more in ({"min_partitions": 4 * usual}, {"partition_bytes": 1 << 20}):
        frame = read_topic(spark, TOPIC, client=mq, **more)
        assert frame.rdd.getNumPartitions() > usual
        assert frame.count() == len(stored.table)
    counts = read_topic(spark, TOPIC, columns=["tags"], client=mq).groupBy("tags").count().collect()
    assert {row.tags: row["count"] for row in counts} == stored.table.lgID.value_counts().to_dict()


class Batches:
    """A sink for `foreachBatch` that keeps the places of each batch's rows, and its number of partitions."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[Any, ...]]] = []
        self.partitions: list[int] = []

    def __call__(self, batch: DataFrame, number: int) -> None:
        self.partitions.append(batch.rdd.getNumPartitions())
        self.rows.append([tuple(row) for row in batch.select(PLACE).collect()])

    @property
    def all(self) -> list[tuple[Any, ...]]:
        return [row for batch in self.rows for row in batch]


def begin(frame: DataFrame, path: Path) -> tuple[Batches, DataStreamWriter]:
    sink = Batches()
    return sink, frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(path))


def run_to_end(frame: DataFrame, path: Path) -> Batches:
    """Run a query on the present messages, and return its batches."""
    sink, writer = begin(frame, path)
    assert writer.trigger(availableNow=True).start().awaitTermination(240)
    return sink


STREAMS: dict[str, tuple[Callable[[Stored], dict[str, Any]], Mask]] = {
    "offsets": (
        lambda stored: {
            "starting_offsets": stored.per_queue(lambda count: count // 2),
            "expression": RICH,
            "unreadable": "raise",
            "fail_on_data_loss": False,
            "client": None,
        },
        lambda table: half(table) & (table.yearID > 2005) & (table.salary >= 10_000_000),
    ),
    "time": (lambda stored: {"starting_timestamp": stored.middle_ms}, LATE),
    "times": (
        lambda stored: {"starting_offsets_by_timestamp": stored.per_queue(lambda count: stored.middle_ms)},
        LATE,
    ),
    "no time": (
        lambda stored: {"starting_timestamp": FAR_MS, "starting_offsets_by_timestamp_strategy": "latest"},
        lambda table: table.yearID < 0,
    ),
}
STREAMED = {
    *("topic", "topic_pattern", "columns", "tags", "expression", "max_offsets_per_trigger", "min_offsets_per_trigger"),
    *("max_trigger_delay_s", "min_partitions", "fail_on_data_loss", "unreadable", "commit_group", "client"),
    *("starting_offsets", "starting_timestamp", "starting_offsets_by_timestamp"),
    "starting_offsets_by_timestamp_strategy",
}
"""The options of `stream_topic` that the following three tests use."""


@pytest.mark.parametrize("start", STREAMS)
def test_a_stream_has_the_rows_that_pandas_selects(
    mq: raymq.Client, spark: SparkSession, stored: Stored, tmp_path: Path, start: str
) -> None:
    options, mask = STREAMS[start]
    frame = stream_topic(spark, **{"topic": TOPIC, "client": mq, "columns": PLACE, **options(stored)})
    sink = run_to_end(frame, tmp_path)
    assert (len(sink.all), set(sink.all)) == (len(stored.places(mask)), stored.places(mask))


def test_batches_of_a_stream_are_as_asked_for(
    mq: raymq.Client, spark: SparkSession, stored: Stored, tmp_path: Path
) -> None:
    mask: Mask = lambda table: table.lgID == "NL"  # noqa: E731
    group = "lahman-stream"
    frame = stream_topic(
        spark,
        topic_pattern="lahman-sal.*",
        starting_offsets="earliest",
        columns=[*PLACE, "tags"],
        tags="NL",
        max_offsets_per_trigger=10_000,
        min_partitions=6,
        commit_group=group,
        client=mq,
    )
    assert frame.columns == [*PLACE, "tags"]
    sink = run_to_end(frame, tmp_path)
    assert (len(sink.all), set(sink.all)) == (len(stored.places(mask)), stored.places(mask))
    assert len(sink.rows) == -(-len(stored.table) // 10_000)
    assert min(sink.partitions) >= 6
    eventually(lambda: mq.admin.group_summary(group).lag == 0, "the commit of the last batch")


def test_a_batch_waits_for_its_messages_no_longer_than_its_delay(
    mq: raymq.Client, spark: SparkSession, stored: Stored, tmp_path: Path
) -> None:
    frame = stream_topic(
        spark,
        TOPIC,
        starting_offsets="earliest",
        columns=PLACE,
        min_offsets_per_trigger=10**9,
        max_trigger_delay_s=0.5,
        client=mq,
    )
    sink, writer = begin(frame, tmp_path)
    query = writer.start()
    try:
        eventually(lambda: query.exception() or len(sink.all) == len(stored.table), "a batch after the delay", 120)
        assert query.exception() is None
    finally:
        query.stop()
    assert set(sink.all) == stored.places(ALL)


WRITTEN = {
    *("write_id", "plan_location", "sort", "check_first", "client", "send_timeout_s", "attempt_timeout_s"),
    *("max_buffered_bytes", "max_buffered_messages", "max_message_size_bytes", "compression"),
    *("when_full", "hooks", "check_forbidden"),
}
"""The options of `write_topic` that the following test uses."""
NOT_OF_WRITES = {"send_latency_enable", "retry_when_not_store_ok", "default_topic_queue_nums"}
"""Settings of producers that `write_topic` refuses."""


def test_a_write_with_each_option_is_stored_once(
    mq: raymq.Client, spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    source = salaries().head(3000)
    rows = as_messages(spark, source, tmp_path / "rows").coalesce(1)
    notes = tmp_path / "notes"

    # The hooks are nested, so that they are pickled by value for the executors. They note the sends in a file.
    def note(line: str) -> None:
        with notes.open("a") as file:
            file.write(f"{line}\n")

    class Hook:
        def before_send(self, context: object) -> None:
            note("before")

        def after_send(self, context: object) -> None:
            note("after")

    options: dict[str, Any] = {
        "write_id": "lahman",
        "plan_location": str(tmp_path / "plans"),
        "sort": "always",
        "check_first": True,
        "client": None,
        "send_timeout_s": 60.0,
        "attempt_timeout_s": 10.0,
        "max_buffered_bytes": 1 << 20,
        "max_buffered_messages": 500,
        "max_message_size_bytes": 1 << 20,
        "compression": Compression(CompressionType.ZLIB),
        "when_full": "block",
        "hooks": [Hook()],
        "check_forbidden": [lambda context: note("allowed")],
    }
    assert options.keys() == WRITTEN
    summary = write_topic(rows.sortWithinPartitions("keys"), topic, **options)
    assert (summary.rows, summary.stored_before) == (3000, 0)
    assert Counter(notes.read_text().splitlines()) == dict.fromkeys(("before", "after", "allowed"), 3000)
    mq.admin.update_topic(topic, queues=6)
    # Other queues and another order of the rows are no other write.
    again = write_topic(rows.sortWithinPartitions("tags"), topic, **options)
    assert (again.rows, again.stored_before) == (3000, 3000)
    assert plain(table_of(read_topic(spark, topic, client=mq).collect())) == plain(source)


@in_soak
def test_rows_keep_their_order_and_refused_rows_are_not_stored(
    mq: raymq.Client, spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    source = salaries().head(2000)
    rows = as_messages(spark, source, tmp_path / "rows").coalesce(1)
    longest = max(len(row.body) for row in rows.select("body").collect())
    with pytest.raises(MessageIllegalError):
        write_topic(rows, topic, check_first=False, max_message_size_bytes=longest - 1, client=mq)
    bad = rows.selectExpr("if(tags = 'NL', '', body) AS body", "tags")
    before = read_topic(spark, topic, columns=PLACE, client=mq).count()
    with pytest.raises(MessageIllegalError):
        write_topic(bad, topic, check_first=True, client=mq)
    assert read_topic(spark, topic, columns=PLACE, client=mq).count() == before

    def forbid(context: Any) -> None:  # This function is nested, so that it is pickled by value for the executors.
        raise PermissionError("no sends today")

    with pytest.raises(Exception, match="no sends today"):
        write_topic(rows, topic, check_forbidden=[forbid], client=mq)
    mq.admin.create_topic("lahman-ordered", queues=3)
    write_topic(rows, "lahman-ordered", sort="never", client=mq)
    written = table_of(read_topic(spark, "lahman-ordered", client=mq).collect())
    for team, of_team in source.groupby("teamID"):
        found = written[written.teamID == team]
        assert found.groupby(["broker_name", "queue_id"]).ngroups == 1
        assert found.playerID.tolist() == of_team.playerID.tolist()


def test_two_sinks_of_a_stream_have_the_rows_that_pandas_selects(
    mq: raymq.Client, spark: SparkSession, stored: Stored, topic: str, tmp_path: Path
) -> None:
    frame = stream_topic(spark, TOPIC, starting_timestamp=stored.middle_ms, tags="AL", client=mq)
    told: list[int] = []
    place = str(tmp_path / "plans")
    options: dict[str, Any] = {"plan_location": place, "sort": "never", "client": mq, "send_timeout_s": 60.0}
    first = topic_sink(topic, name="first", on_batch=lambda batch, summary: told.append(summary.rows), **options)
    second = topic_sink(topic, name="second", check_first=True, **options)

    def both(batch: DataFrame, number: int) -> None:
        rows = batch.select("body", "tags", "keys", "properties")
        first(rows, number)
        second(rows, number)

    writer = frame.writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert writer.trigger(availableNow=True).start().awaitTermination(240)
    chosen = stored.table[(stored.table.yearID >= SINCE) & (stored.table.lgID == "AL")]
    written = table_of(read_topic(spark, topic, client=mq).collect())
    assert plain(written) == sorted(2 * plain(chosen))
    assert sum(told) == len(chosen)
    assert {path.name for path in Path(place, topic).iterdir()} == {"first", "second"}


@in_soak
def test_an_archive_and_its_replay_have_the_rows_that_pandas_selects(
    mq: raymq.Client, spark: SparkSession, stored: Stored, topic: str, tmp_path: Path
) -> None:
    table = stored.table
    late = LATE(table)
    early = archive.run(spark, mq, TOPIC, tmp_path, before_ms=stored.middle_ms, skip_lost=True, round_messages=5000)
    rest = archive.run(spark, mq, TOPIC, tmp_path)
    assert (early.messages, rest.messages) == ((~late).sum(), late.sum())
    assert verify(tmp_path, TOPIC).problems == ()
    broker_name, queue_id = table.broker_name.iloc[0], int(table.queue_id.iloc[0])
    chosen = table[late & (table.lgID == "AL") & (table.broker_name == broker_name) & (table.queue_id == queue_id)]
    selection = Selection(Period(stored.middle_ms), frozenset({(broker_name, queue_id)}), frozenset({"AL"}))
    for expected in ((len(chosen), 0), (0, len(chosen))):
        done = replay.run(mq, tmp_path / TOPIC, topic, rate=20_000, selection=selection, name="lahman")
        assert (done.selected, (done.sent, done.stored_before)) == (len(chosen), expected)
    replayed = table_of(read_topic(spark, topic, client=mq).collect())
    assert len(chosen)
    assert plain(replayed) == plain(chosen)


@in_soak
def test_topic_stats_equal_pandas(mq: raymq.Client, spark: SparkSession, stored: Stored) -> None:
    period = Period(stored.middle_ms, FAR_MS)
    [found] = topic_stats.run(spark, mq, [TOPIC], every_s=3600, top=1, tags="AL || NL", period=period)
    chosen = stored.table[stored.table.yearID >= SINCE]
    tags = chosen.lgID.value_counts()
    assert (found.messages, found.tags) == (len(chosen), {tags.index[0]: tags.iloc[0]})
    assert found.other_tags == tags.iloc[1:].sum()
    keys = len({*chosen.playerID, *chosen.teamID})
    assert found.keys == pytest.approx(keys, rel=0.05)
    assert sum(bucket.messages for bucket in found.buckets) == len(chosen)
    [few] = topic_stats.run(spark, mq, [TOPIC], every_s=3600, top=8, tags="AL")
    assert few.tags == {"AL": int((stored.table.lgID == "AL").sum())}


@in_soak
def test_windowed_counts_equal_pandas(mq: raymq.Client, spark: SparkSession, stored: Stored, tmp_path: Path) -> None:
    target = "lahman-counts"
    mq.admin.create_topic(target, queues=2)
    windows = windowed_counts.Windows(length_s=86_400, slide_s=43_200, late_s=3600, by="keys", time="born")
    done = windowed_counts.run(
        spark,
        mq,
        [TOPIC],
        target,
        tmp_path / "checkpoint",
        windows=windows,
        available_now=True,
        close=True,
        max_offsets_per_trigger=15_000,
        commit_group="lahman-counted",
    )
    counts = Counter[str]()
    with mq.pull_consumer("lahman-results", consume_from=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET) as consumer:
        consumer.subscribe(target)
        seen = 0

        def all_read() -> bool:
            nonlocal seen
            for message in consumer.poll(timeout_s=1.0):
                body = json.loads(message.body)
                counts[body["keys"]] += body["messages"]
                seen += 1
            return seen >= done.counts

        eventually(all_read, "all counts", 120)
    # Each message is in two windows, because a window begins every half day.
    expected = Counter[str]()
    for name in ("playerID", "teamID"):
        for key, count in stored.table[name].value_counts().items():
            expected[key] += 2 * int(count)
    assert counts == expected
    assert (done.closed, done.late) == (True, 0)
    eventually(lambda: mq.admin.group_summary("lahman-counted").lag == 0, "the commit of the last batch")
