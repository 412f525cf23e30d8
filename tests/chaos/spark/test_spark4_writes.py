"""Tests of the writes of `format("raymq")` on Spark 4: each row is stored once, if tasks and batches are repeated, if
the rows arrive in another order, and if the topic gets queues before the repeat.

RAYMQ_SOAK=1 also runs the tests of orders of rows and of whole results of a stream.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import raymq
from tests.support.history.waiting import eventually
from tests.support.spark.spark4 import Spark4Error, Spark4Session
from tests.support.spark.spark4_program import Rows

pytestmark = pytest.mark.timeout(1800)  # The first run downloads Spark 4 and builds its wheel.

in_soak = pytest.mark.skipif(os.environ.get("RAYMQ_SOAK") != "1", reason="one of the long runs: `make soak`")

BODY = "cast(id as string) as body"
NUMBERS = "select cast(id as string) as body from range(0, {rows}, 1, {partitions})"


@pytest.fixture(scope="module")
def refused(mq: raymq.Client) -> str:
    """Return an empty topic. Another topic, spark4-one-message, has one message."""
    new_topic(mq, "spark4-one-message")
    with mq.producer("spark4-writes") as producer:
        producer.send(raymq.Message("spark4-one-message", b"x", tags="paid"))
    return new_topic(mq, "spark4-refused")


def new_topic(mq: raymq.Client, topic: str, queues: int = 4) -> str:
    mq.admin.create_topic(topic, queues=queues)
    return topic


def stored(spark4: Spark4Session, topic: str) -> Rows:
    rows, _ = spark4.call("read", options={"topic": topic})
    return rows


def queue_of(row: dict[str, Any]) -> tuple[str, int]:
    return row["broker_name"], row["queue_id"]


def bodies(spark4: Spark4Session, topic: str) -> list[int]:
    return sorted(int(row["body"]) for row in stored(spark4, topic))


def forget_last_commit(checkpoint: Path) -> None:
    """Make the checkpoint look as if the driver had died after the last batch was written."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def test_a_write_stores_all_columns_and_uses_all_queues(mq: raymq.Client, spark4: Spark4Session) -> None:
    topic = new_topic(mq, "spark4-columns")
    partitions = spark4.call(
        "write",
        sql=f"select {BODY}, if(id % 3 = 0, null, 'paid') as tags, array('k', cast(id as string)) as keys, "
        "map('price', cast(id % 10 as string)) as properties from range(0, 5000, 1, 3)",
        options={"topic": topic, "compression": "lz4", "send_timeout_s": "60"},
    )
    rows = sorted(stored(spark4, topic), key=lambda row: int(row["body"]))
    assert [row["body"] for row in rows] == [b"%d" % number for number in range(5000)]
    for number, row in enumerate(rows):
        assert row["tags"] == (None if number % 3 == 0 else "paid")
        assert row["keys"] == ["k", str(number)]
        assert row["properties"]["price"] == str(number % 10)
    assert partitions == 3
    assert len({queue_of(row) for row in rows}) == 4


def test_a_row_is_stored_once_if_tasks_and_writes_are_repeated(
    mq: raymq.Client, spark4: Spark4Session, tmp_path: Path
) -> None:
    topic = new_topic(mq, "spark4-repeats")
    options = {"topic": topic, "write_id": "load-7"}
    spark4.call("write", sql=NUMBERS.format(rows=6000, partitions=3), options=options, fail=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3, "a task did not fail"
    assert bodies(spark4, topic) == list(range(6000))
    spark4.call("write", sql=NUMBERS.format(rows=6000, partitions=3), options=options)
    assert bodies(spark4, topic) == list(range(6000))
    with pytest.raises(Spark4Error, match="an earlier attempt of this write stored"):
        spark4.call("write", sql=NUMBERS.format(rows=600, partitions=3), options=options)
    assert bodies(spark4, topic) == list(range(6000))
    spark4.call("write", sql=NUMBERS.format(rows=600, partitions=3), options={"topic": topic})
    assert Counter(bodies(spark4, topic)) == Counter([*range(6000), *range(600)])


def test_a_write_waits_for_room_in_a_full_topic_or_fails(mq: raymq.Client, spark4: Spark4Session) -> None:
    topic, group, limit = "spark4-bounded", "spark4-bounded-readers", 40
    mq.admin.create_group(group)
    mq.admin.create_topic(topic, queues=1, max_backlog=limit, backlog_policy="refuse", backlog_groups=[group])
    sql = NUMBERS.format(rows=200, partitions=10)
    with pytest.raises(Spark4Error, match=f"topic '{topic}' is full: group '{group}' has not consumed 40 messages"):
        spark4.call("write", sql=sql, options={"topic": topic})
    assert len(bodies(spark4, topic)) <= limit
    mq.admin.update_topic(topic, backlog_policy="block")
    received = list[int]()
    first = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    with ThreadPoolExecutor(1) as pool, mq.simple_consumer(group, consume_from=first) as consumer:
        consumer.subscribe(topic)
        write = pool.submit(spark4.call, "write", sql=sql, options={"topic": topic})

        def consume() -> bool:
            messages = consumer.receive(10, invisible_s=60.0, wait_s=0.5)
            received.extend(int(message.body) for message in messages)
            consumer.ack(messages)
            return write.done() and not messages

        eventually(consume, "the write is stored and consumed", 240.0)
        write.result()
    # The failed write may have stored some rows, too.
    counts = Counter(received)
    counts.subtract(range(200))
    assert set(counts) == set(range(200))
    assert min(counts.values()) == 0
    assert counts.total() <= limit


@in_soak
def test_a_repeat_may_have_its_rows_in_another_order_and_meet_more_queues(
    mq: raymq.Client, spark4: Spark4Session, tmp_path: Path
) -> None:
    topic = new_topic(mq, "spark4-shuffled", queues=3)
    options = {"topic": topic, "write_id": "other-order", "plan_location": f"file://{tmp_path}/plans"}
    sql = f"select /*+ REPARTITION(3, bucket) */ body, properties from (select {BODY}, map('a', 'b') as properties, "
    sql += "id % 7 as bucket from range(0, 4000, 1, 4) order by id {order})"
    spark4.call("write", sql=sql.format(order="asc"), options=options)
    mq.admin.update_topic(topic, queues=5)
    spark4.call("write", sql=sql.format(order="desc"), options=options)
    assert bodies(spark4, topic) == list(range(4000))
    assert len({queue_of(row) for row in stored(spark4, topic)}) == 3
    spark4.call("write", sql=sql.format(order="desc"), options={**options, "write_id": "another"})
    assert len({queue_of(row) for row in stored(spark4, topic)}) == 5


@in_soak
def test_rows_with_a_sharding_key_keep_their_order(mq: raymq.Client, spark4: Spark4Session) -> None:
    topic = new_topic(mq, "spark4-keys")
    sql = f"select {BODY}, id % 5 as sharding_key from range(0, 500, 1, 1)"
    with pytest.raises(Spark4Error, match="sortWithinPartitions"):
        spark4.call("write", sql=sql, options={"topic": topic})
    spark4.call("write", sql=sql, options={"topic": topic, "sort": "never"})
    rows = sorted(stored(spark4, topic), key=lambda row: (queue_of(row), row["queue_offset"]))
    for key in range(5):
        mine = [(queue_of(row), int(row["body"])) for row in rows if int(row["body"]) % 5 == key]
        assert [number for _, number in mine] == list(range(key, 500, 5))
        assert len({queue for queue, _ in mine}) == 1


@pytest.mark.parametrize(
    ("sql", "options", "mode", "message"),
    [
        ("select 'x' as body", {}, "overwrite", "only appends"),
        ("select 'x' as body", {}, "error", "Append"),
        ("select 'x' as body, 1 as price", {}, "append", "a message has no 'price'"),
        ("select '' as body", {}, "append", "partition 0: "),
        ("select 'x' as body", {"topic": "no-such-topic"}, "append", "no-such-topic"),
        ("select 'x' as body", {"check_first": "true"}, "append", "rows to a data source only once"),
    ],
)
def test_a_wrong_write_is_refused(
    spark4: Spark4Session, refused: str, sql: str, options: dict[str, str], mode: str, message: str
) -> None:
    with pytest.raises(Spark4Error) as caught:
        spark4.call("write", sql=sql, options={"topic": refused, **options}, mode=mode)
    assert message in str(caught.value)
    assert stored(spark4, refused) == []


def test_a_stream_stores_each_row_once_if_tasks_and_batches_are_repeated(
    mq: raymq.Client, spark4: Spark4Session, tmp_path: Path
) -> None:
    orders, copy = new_topic(mq, "spark4-from"), new_topic(mq, "spark4-to", queues=3)
    source = {"topic": orders, "starting_offsets": "earliest", "max_offsets_per_trigger": "1000"}
    checkpoint, failed = tmp_path / "checkpoint", tmp_path / "failed"
    options = {
        "topic": copy,
        "checkpointLocation": str(checkpoint),
        "plan_location": str(tmp_path / "plans"),
    }
    columns = ["body", "tags", "properties"]
    failed.mkdir()

    def send(first: int, end: int) -> None:
        with mq.producer("spark4-writes") as producer:
            producer.send_batch([raymq.Message(orders, b"%d" % number, tags="paid") for number in range(first, end)])

    def run() -> int:
        batches: int = spark4.call("write_stream", source=source, columns=columns, options=options, fail=str(failed))
        return batches

    send(0, 2500)
    assert run() == 3
    assert len(list(failed.iterdir())) >= 3, "no task failed"
    assert bodies(spark4, copy) == list(range(2500))
    first = {(queue_of(row), row["queue_offset"]) for row in stored(spark4, copy)}
    forget_last_commit(checkpoint)
    mq.admin.update_topic(copy, queues=5)
    send(2500, 3000)
    assert run() >= 1
    rows = stored(spark4, copy)
    assert sorted(int(row["body"]) for row in rows) == list(range(3000))
    assert first <= {(queue_of(row), row["queue_offset"]) for row in rows}
    assert {row["tags"] for row in rows} == {"paid"}
    for file in (tmp_path / "plans").rglob("*"):
        assert file.is_dir() or file.suffix == ".json"


FOR_EACH_BATCH = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
orders = spark.readStream.format("raymq").options(topic="spark4-counted", starting_offsets="earliest").load()
totals = orders.groupBy("tags").count().selectExpr("concat(tags, ' ', count) as body", "tags")
query = totals.writeStream.outputMode("complete").foreachBatch(
    lambda df, number: df.write.format("raymq").option("topic", "spark4-totals")
    .option("write_id", f"totals-{number}").mode("append").save()
).option("checkpointLocation", "CHECKPOINT").trigger(availableNow=True).start()
assert query.awaitTermination(120)
"""


@in_soak
def test_the_whole_result_of_a_batch_is_written_once_in_for_each_batch(
    mq: raymq.Client, spark4: Spark4Session, tmp_path: Path
) -> None:
    new_topic(mq, "spark4-counted")
    totals = new_topic(mq, "spark4-totals")
    with mq.producer("spark4-writes") as producer:
        tags = ["paid", "lost", "paid"]
        producer.send_batch([raymq.Message("spark4-counted", b"x", tags=tag) for tag in tags])
    code = FOR_EACH_BATCH.replace("CHECKPOINT", str(tmp_path))
    for _ in range(2):
        spark4.call("run", code=code)
        assert sorted(row["body"] for row in stored(spark4, totals)) == [b"lost 1", b"paid 2"]
        forget_last_commit(tmp_path)


@pytest.mark.parametrize(
    ("columns", "options", "mode", "message"),
    [
        (["tags as body"], {}, "complete", "only appends"),
        (["body"], {"write_id": "w"}, "append", "has no option"),
        (["body"], {"topic": "no-such-topic"}, "append", "no-such-topic"),
    ],
)
def test_a_wrong_stream_is_refused(
    spark4: Spark4Session,
    refused: str,
    tmp_path: Path,
    columns: list[str],
    options: dict[str, str],
    mode: str,
    message: str,
) -> None:
    given = {"topic": refused, "checkpointLocation": str(tmp_path), **options}
    source = {"topic": "spark4-one-message", "starting_offsets": "earliest"}
    with pytest.raises(Spark4Error) as caught:
        spark4.call("write_stream", source=source, columns=columns, options=given, mode=mode)
    assert message in str(caught.value)
