"""Tests of `format("raymq")` on Spark 4, in an environment without RayDP: it reads the rows that `read_topic` and
`stream_topic` read on Spark 3.5, and both continue from each other's checkpoints."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any

import pytest
from pyspark.sql import SparkSession

import raymq
from raydp_jobs import read_topic, stream_topic
from raydp_jobs.source.reader import MORE_SPARK_COLUMNS, SPARK_SCHEMA
from tests.support.cases import chaos_seed
from tests.support.history.waiting import eventually
from tests.support.spark.local_spark import local_spark
from tests.support.spark.spark4 import Spark4Error, Spark4Session
from tests.support.spark.spark4_program import Rows, rows_of, run_query

pytestmark = pytest.mark.timeout(1800)  # The first run downloads Spark 4 and builds its wheel.

PAGE = Path(__file__).parents[3] / "docs" / "spark.md"
ALL_COLUMNS = [*SPARK_SCHEMA.names, *MORE_SPARK_COLUMNS.names]
TAGS = [None, "paid", "refunded", "lost"]
QUEUES = 4
ENDS = ("endOffset", "latestOffset")
"""The ends of a batch and of the queues in Spark's progress."""


@pytest.fixture(scope="module")
def spark(mq: raymq.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with local_spark(tmp_path_factory.mktemp("spark")) as session:
        yield session


def send(mq: raymq.Client, topic: str, numbers: range) -> None:
    """Send messages with all kinds of columns, in several batches with different store times."""
    with mq.producer("spark4-test") as producer:
        for first in range(numbers.start, numbers.stop, 50):
            producer.send_batch(
                [
                    raymq.Message(
                        topic,
                        b"%d " % number * (1 + number % 7 * 200),
                        tags=TAGS[number % 4],
                        keys=[f"k{number}", "all"] if number % 3 else (),
                        properties={"price": str(number % 10), "ä": "ö"} if number % 5 else {},
                    )
                    for number in range(first, min(first + 50, numbers.stop))
                ]
            )


@pytest.fixture(scope="module")
def orders(mq: raymq.Client) -> str:
    """Return a topic with 600 messages that no test changes."""
    mq.admin.create_topic("spark4-orders", queues=QUEUES)
    send(mq, "spark4-orders", range(600))
    return "spark4-orders"


def in_order(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: (row["broker_name"], row["queue_id"], row["queue_offset"]))


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of `read_topic` as the texts that Spark passes to a data source."""
    return {
        name: ",".join(value)
        if isinstance(value, list)
        else json.dumps(value)
        if isinstance(value, dict)
        else str(value)
        for name, value in options.items()
    }


def test_a_batch_has_the_rows_of_read_topic(
    mq: raymq.Client, spark: SparkSession, spark4: Spark4Session, orders: str
) -> None:
    frame = read_topic(spark, orders, columns=ALL_COLUMNS, min_partitions=6, client=mq)
    expected = rows_of(frame)
    assert len(expected) == 600
    rows, partitions = spark4.call(
        "read", options=texts({"topic": orders, "columns": ALL_COLUMNS, "min_partitions": 6})
    )
    assert in_order(rows) == in_order(expected)
    assert partitions == frame.rdd.getNumPartitions() >= 6
    rows, _ = spark4.call("read", options={"topic": orders})
    assert in_order(rows) == in_order([{name: row[name] for name in SPARK_SCHEMA.names} for row in expected])
    rows, _ = spark4.call("read", options={"topic": orders}, schema="queue_offset long, tags string")
    assert sorted(rows, key=repr) == sorted(
        ({"queue_offset": row["queue_offset"], "tags": row["tags"]} for row in expected), key=repr
    )


def test_each_option_chooses_the_rows_that_it_chooses_in_read_topic(
    mq: raymq.Client, spark: SparkSession, spark4: Spark4Session, orders: str
) -> None:
    everything = in_order(rows_of(read_topic(spark, orders, client=mq)))
    middle = sorted(row["store_timestamp"] for row in everything)[len(everything) // 2]
    middle_ms = int(middle.timestamp() * 1000)
    starts: dict[str, dict[str, int]] = {}
    for queue in mq.admin.describe_topic(orders):
        starts.setdefault(queue.queue.broker_name, {})[str(queue.queue.queue_id)] = queue.queue.queue_id + 3
    cases: list[dict[str, Any]] = [
        {"tags": "paid || lost", "columns": ["broker_name", "queue_id", "queue_offset", "body_size"]},
        {"expression": "price > 5"},
        {"tags": "refunded", "expression": "price > 5"},
        {"starting_offsets": starts, "ending_timestamp": middle_ms},
        {"starting_timestamp": middle_ms, "starting_offsets_by_timestamp_strategy": "latest"},
        {"max_offsets": 37, "partition_bytes": 20_000},
        {"starting_offsets": "group:nobody", "fail_on_data_loss": False, "unreadable": "raise"},
    ]
    for case in cases:
        given = {name: raymq.sql(value) if name == "expression" else value for name, value in case.items()}
        frame = read_topic(spark, orders, client=mq, **given)
        rows, partitions = spark4.call("read", options=texts({"topic": orders, **case}))
        assert (in_order(rows), partitions) == (in_order(rows_of(frame)), frame.rdd.getNumPartitions()), case
        assert rows, case
    rows, _ = spark4.call("read", options={"topic_pattern": "spark4-ord.*"})
    assert in_order(rows) == everything


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        ("read", {"startingOffsets": "earliest"}, "write starting_offsets"),
        ("read", {"columns": "tags,price"}, "price"),
        ("read", {"fail_on_data_loss": "maybe"}, "must be true or false"),
        ("read", {"starting_offsets": "{"}, "starting_offsets"),
        ("read", {"max_offsets_per_trigger": "5"}, "spark.readStream"),
        ("read", {"topic": "no-such-topic"}, "no-such-topic"),
        ("stream", {"max_offsets": "5"}, "spark.read"),
        ("stream", {"ending_offsets": "latest"}, "spark.read"),
        ("stream", {"starting_offsets": '{"broker-a": {"0": 1}}'}, "must name all queues"),
        ("stream", {"topic": "no-such-topic"}, "no-such-topic"),
    ],
)
def test_damaged_and_unknown_options_are_refused(
    spark4: Spark4Session, orders: str, tmp_path: Path, call: str, options: dict[str, str], message: str
) -> None:
    more = {"checkpoint": str(tmp_path / "checkpoint"), "sink": str(tmp_path / "sink")} if call == "stream" else {}
    with pytest.raises(Spark4Error) as caught:
        spark4.call(call, options={"topic": orders, **options}, **more)
    assert message in str(caught.value)
    assert "raymq.common.errors" in str(caught.value)


def test_a_schema_with_a_wrong_type_is_refused(spark4: Spark4Session, orders: str) -> None:
    with pytest.raises(Spark4Error, match="column queue_id of schema"):
        spark4.call("read", options={"topic": orders}, schema="queue_id long")


def test_the_snippet_of_the_page_runs(mq: raymq.Client, spark4: Spark4Session, tmp_path: Path) -> None:
    for topic in ("orders", "orders-copy"):
        mq.admin.create_topic(topic, queues=2)
    send(mq, "orders", range(40))
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE.read_text(), re.MULTILINE)
    [snippet] = [dedent(block) for block in blocks if "register_raymq" in block]
    assert "/data/" in snippet
    spark4.call("run", code=snippet.replace("/data/", f"{tmp_path}/"))
    files = list((tmp_path / "checkpoints" / "orders" / "offsets").glob("[0-9]*"))
    assert len(files) == 1
    assert json.loads(files[0].read_text().splitlines()[-1])["version"] == 1
    rows, _ = spark4.call("read", options={"topic": "orders-copy", "columns": "tags"})
    assert sorted(row["tags"] or "" for row in rows) == sorted((tag or "") for tag in TAGS * 10)


def random_condition(random: Random, times: list[str]) -> str:
    """Return a random condition in SQL on one or two columns."""
    time = f"timestamp '{random.choice(times)}'"
    compare = random.choice(("=", "<", "<=", ">", ">="))
    text = random.choice(("'paid'", "'lost'", "'nothing'", "''"))
    ones = [
        f"tags = {text}",
        f"tags <=> {text}",
        f"tags in ({text}, 'refunded', null)",
        f"tags <> {text}",
        "tags is null",
        f"broker_name = 'broker-{random.choice('abc')}'",
        "topic in ('spark4-orders', 'other')",
        f"queue_id {compare} {random.randrange(QUEUES)}",
        f"queue_id in (0, {random.randrange(QUEUES)})",
        f"queue_offset {compare} {random.randrange(-5, 160)}",
        f"store_timestamp {compare} {time}",
        f"born_timestamp {compare} {time}",
        "properties['price'] = '3'",
        "size(keys) > 1",
    ]
    one, other = random.choice(ones), random.choice(ones)
    return random.choice((one, f"{one} and {other}", f"{one} and {other}", f"{one} or {other}", f"not ({one})"))


def test_a_filter_gives_the_rows_of_sparks_own_evaluation(
    mq: raymq.Client, spark: SparkSession, spark4: Spark4Session, orders: str
) -> None:
    random = Random(chaos_seed())
    everything = rows_of(read_topic(spark, orders, client=mq))
    times = sorted({f"{row['store_timestamp'].astimezone().isoformat()}" for row in everything})
    certain = {
        "tags = 'paid'": 150,
        "queue_offset < 10": 10 * QUEUES,
        "broker_name = 'broker-a' and queue_id in (0, 9)": None,
        f"store_timestamp <= timestamp '{times[0]}'": None,
        f"store_timestamp > timestamp '{times[-1]}'": None,
        "tags = 'paid' and tags = 'lost'": 0,
    }
    with_spark = ["properties['price'] > 5", "properties['price'] = '3' or tags = 'paid'", "size(keys) > 1"]
    conditions = [*certain, *with_spark, *(random_condition(random, times) for _ in range(6))]
    narrowed = 0
    for push_filters in (True, False):
        found = spark4.call("filtered", options={"topic": orders}, conditions=conditions, push_filters=push_filters)
        for condition, (chosen, alone, scanned) in zip(conditions, found, strict=True):
            assert in_order(chosen) == in_order(alone), condition
            assert len(chosen) <= scanned <= 600, condition
            narrowed += scanned < 600
            if condition in certain and push_filters:
                assert scanned < 600, condition
                assert certain[condition] in (None, scanned), condition
            # Spark passes no filter on an element of a map, and no OR.
            assert condition not in with_spark or scanned == 600, condition
            # Spark reads nothing for a contradiction that it sees itself.
            assert push_filters or scanned in (0, 600), condition
    print(f"{narrowed} of {len(conditions)} conditions made the store return fewer messages")


def test_a_dataframe_keeps_its_plan_and_may_be_filtered_in_several_ways(
    mq: raymq.Client, spark4: Spark4Session
) -> None:
    topic = "spark4-kept-plan"
    mq.admin.create_topic(topic, queues=2)
    send(mq, topic, range(100))
    spark4.call("open", options={"topic": topic})
    assert spark4.call("count_both", one="tags = 'paid'", other="tags = 'lost'") == 50
    assert spark4.call("count") == 100
    send(mq, topic, range(100, 130))
    assert spark4.call("count") == 100
    spark4.call("open", options={"topic": topic})
    assert spark4.call("count") == 130


def test_a_query_continues_from_the_checkpoint_of_the_other_spark(
    mq: raymq.Client, spark: SparkSession, spark4: Spark4Session, tmp_path: Path
) -> None:
    topic, group, checkpoint, sink = "spark4-stream", "spark4-progress", tmp_path / "checkpoint", tmp_path / "sink"
    mq.admin.create_topic(topic, queues=3)
    options = {"topic": topic, "starting_offsets": "earliest", "max_offsets_per_trigger": "100", "commit_group": group}

    def on_spark4(**more: str) -> list[dict[str, Any]]:
        sources: list[dict[str, Any]] = spark4.call(
            "stream", options={**options, **more}, checkpoint=str(checkpoint), sink=str(sink)
        )
        return sources

    def on_spark35() -> None:
        frame = stream_topic(spark, topic, max_offsets_per_trigger=100, commit_group=group, client=mq)
        run_query(frame, checkpoint, sink)

    def received() -> Rows:
        assert list(sink.glob("*.different")) == []
        return [row for file in sink.iterdir() for row in pickle.loads(file.read_bytes())[0]]

    def check(count: int) -> None:
        expected = rows_of(read_topic(spark, topic, client=mq))
        assert len(expected) == count
        assert in_order(received()) == in_order(expected)
        eventually(lambda: mq.admin.group_summary(group).lag == 0, "the commit of the last batch")

    def forget_last_commit() -> None:
        """Make the checkpoint look as if the driver had died in the last batch."""
        commits = sorted((int(file.name) for file in (checkpoint / "commits").glob("[0-9]*")), reverse=True)
        (checkpoint / "commits" / str(commits[0])).unlink()
        (checkpoint / "commits" / f".{commits[0]}.crc").unlink(missing_ok=True)

    send(mq, topic, range(250))
    [source] = on_spark4()
    ends = [fields if isinstance(fields := source[name], dict) else json.loads(fields) for name in ENDS]
    assert ends[0]["offsets"] == ends[1]["offsets"]
    check(250)
    assert len(list(sink.iterdir())) == 3
    forget_last_commit()
    send(mq, topic, range(250, 400))
    on_spark35()
    check(400)
    forget_last_commit()
    mq.admin.update_topic(topic, queues=4)
    send(mq, topic, range(400, 560))
    on_spark4(starting_offsets="latest", max_offsets_per_trigger="70", tags="paid || refunded || lost")
    assert len(received()) == 400 + 120
    batches = len(list(sink.iterdir()))
    on_spark4()
    assert len(list(sink.iterdir())) == batches, "a query without new messages has a batch"

    # The checkpoint of another source must not be read as offsets of raymq.
    last = max((file for file in (checkpoint / "offsets").glob("[0-9]*")), key=lambda file: int(file.name))
    intact = last.read_text()
    last.write_text("\n".join([*intact.splitlines()[:-1], '{"partition-1":5}']))
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    with pytest.raises(Spark4Error, match="does not contain the offsets of a raymq stream"):
        on_spark4()
    last.write_text(intact)

    mq.admin.delete_topic(topic)
    mq.admin.create_topic(topic, queues=4)
    send(mq, topic, range(2000))
    with pytest.raises(Spark4Error, match="deleted and created again"):
        on_spark4()
    for file in sink.iterdir():
        file.unlink()
    on_spark4(fail_on_data_loss="false")
    check(2000)
