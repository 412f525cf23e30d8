"""Tests of reading a topic as a Spark stream, on one machine: RayDP's executors read the topic, and a consumer group
shows the query's progress."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import raymq
from raydp_jobs import read_topic, stream_progress, stream_topic, write_topic
from tests.support.history.waiting import eventually


class Bodies:
    """A sink for `foreachBatch` that counts the received bodies."""

    def __init__(self) -> None:
        self.counts: Counter[bytes] = Counter()

    def __call__(self, batch: DataFrame, number: int) -> None:
        self.counts.update(bytes(row.body) for row in batch.select("body").collect())


def send(mq: raymq.Client, topic: str, bodies: range) -> None:
    with mq.producer("stream-test") as producer:
        producer.send_batch([raymq.Message(topic, b"%d" % number, tags="paid") for number in bodies])


def bodies(numbers: range) -> dict[bytes, int]:
    return {b"%d" % number: 1 for number in numbers}


def test_a_query_reads_new_messages_and_continues_from_its_checkpoint(
    mq: raymq.Client, spark: SparkSession, tmp_path: Path
) -> None:
    mq.admin.create_topic("stream-orders", queues=3)
    send(mq, "stream-orders", range(500))
    frame = stream_topic(
        spark, "stream-orders", starting_offsets="earliest", commit_group="stream-billing", client=mq, tags="paid"
    )
    sink = Bodies()
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.start()
    eventually(lambda: sink.counts == bodies(range(500)), "the messages sent before the query")
    send(mq, "stream-orders", range(500, 800))
    eventually(lambda: sink.counts == bodies(range(800)), "the messages sent during the query")
    eventually(lambda: mq.admin.group_summary("stream-billing").lag == 0, "the commit of the last batch")
    query.stop()
    [progress] = stream_progress(query)
    assert (progress.source, progress.lag) == ("raymq[stream-orders]", 0)
    assert progress.end_offsets == progress.latest_offsets
    assert sum(sum(by_id.values()) for by_id in progress.end_offsets["stream-orders"].values()) == 800

    mq.admin.update_topic("stream-orders", queues=4)
    send(mq, "stream-orders", range(800, 900))
    summary = mq.admin.group_summary("stream-billing")
    assert (summary.lag, {entry.queue.topic for entry in summary.queues}) == (100, {"stream-orders"})
    again = writer.trigger(availableNow=True).start()
    assert again.awaitTermination(60)
    assert sink.counts == bodies(range(900))
    assert mq.admin.group_summary("stream-billing").lag == 0

    mq.admin.delete_topic("stream-orders")
    mq.admin.create_topic("stream-orders", queues=4)
    # Send so many messages to the new topic that each queue's end passes the offset in the checkpoint. Then the offsets
    # alone do not show that the topic was deleted.
    send(mq, "stream-orders", range(2000))
    sink.counts.clear()
    with pytest.raises(StreamingQueryException, match="deleted and created again"):
        writer.trigger(availableNow=True).start().awaitTermination(60)
    assert not sink.counts
    lenient = stream_topic(spark, "stream-orders", fail_on_data_loss=False, client=mq, tags="paid").writeStream
    from_the_beginning = lenient.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert from_the_beginning.trigger(availableNow=True).start().awaitTermination(60)
    assert sink.counts == bodies(range(2000))


def test_tables_streams_and_written_rows_are_within_a_namespace(mq: raymq.Client, spark: SparkSession) -> None:
    with raymq.connect(namespace="team-a") as client, raymq.connect(namespace="team-b") as other:
        for one in (client, other):
            one.admin.create_topic("rows", queues=2)
        send(client, "rows", range(110))
        frame = read_topic(spark, "rows", client=client)
        assert frame.count() == 110
        assert [row.topic for row in frame.select("topic").distinct().collect()] == ["rows"]
        write_topic(frame.select("body").limit(5), "rows", client=client)
        stream = stream_topic(spark, "rows", starting_offsets="earliest", commit_group="reader", client=client)
        writer = stream.select("topic").writeStream.format("memory").queryName("streamed").trigger(availableNow=True)
        writer.start().awaitTermination()
        counts = spark.table("streamed").groupBy("topic").count().collect()
        assert [(row["topic"], row["count"]) for row in counts] == [("rows", 115)]
        assert sum(row.max_offset for row in client.admin.describe_topic("rows")) == 115
        assert "reader" in client.admin.list_groups()
        assert "reader" not in other.admin.list_groups()
        assert all(row.max_offset == 0 for row in other.admin.describe_topic("rows"))
