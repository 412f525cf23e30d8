"""A program that runs in an environment with Spark 4 and RayDP: it starts raymq, and reads, writes, streams and runs
the Spark jobs in one session. It prints the results as one line of JSON.

The program imports nothing of the tests, because this environment has only raymq's wheel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import raydp
from pyspark.sql import functions

import raymq
from raydp_jobs import (
    read_topic,
    register_raymq,
    spark_session,
    stream_progress,
    stream_topic,
    topic_sink,
    write_topic,
)
from raydp_jobs.jobs import archive, replay, topic_stats, windowed_counts
from raydp_jobs.jobs.windowed_counts import Windows

MESSAGES = 1200
QUEUES = 4
BATCH = 500
TOPICS = {
    "orders": QUEUES,
    "copy": 2,
    "sorted": 1,
    "sunk": 2,
    "counts": 2,
    "replayed": 2,
    "formatted": 3,
    "streamed": 2,
}


def send(client: raymq.Client) -> None:
    with client.producer("raydp4") as producer:
        for first in range(0, MESSAGES, 100):
            producer.send_batch(
                [
                    raymq.Message("orders", b"%d" % number, tags="ab"[number % 2], keys=[f"k{number % 7}"])
                    for number in range(first, first + 100)
                ]
            )


def results(client: raymq.Client, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"raydp": raydp.__version__}

    def bodies(topic: str) -> bool:
        """Return whether the topic has the bodies of all messages, each once."""
        rows = read_topic(spark, topic, columns=["body"], client=client).collect()
        return sorted(int(row["body"]) for row in rows) == list(range(MESSAGES))

    with spark_session("raydp4", executor_memory="512m", configs={"spark.sql.shuffle.partitions": "2"}) as spark:
        found["spark"] = spark.version
        orders = read_topic(spark, "orders", min_partitions=3, client=client)
        found["tags"] = {row["tags"]: row["count"] for row in orders.groupBy("tags").count().collect()}
        found["rows_of_a_filter"] = read_topic(spark, "orders", tags="a", columns=["tags"], client=client).count()
        # The rows come out of a join, so `write_topic` sorts them.
        keys = orders.select(functions.explode("keys").alias("key")).distinct()
        joined = orders.join(keys, functions.array_contains(orders["keys"], keys["key"])).repartition(2, "key")
        summary = write_topic(joined.select("body", "tags"), "copy", client=client)
        found["written"] = [summary.rows, bodies("copy")]

        # Streams and these rows have no adaptive plan, so `write_topic` finds the order that they have.
        spark.conf.set("spark.sql.adaptive.enabled", "false")
        by_tag = orders.select("body", "tags").repartition(1).sortWithinPartitions(functions.desc("tags"))
        write_topic(by_tag, "sorted", client=client)
        spark.conf.set("spark.sql.adaptive.enabled", "true")
        in_order = read_topic(spark, "sorted", columns=["queue_offset", "tags"], client=client).orderBy("queue_offset")
        found["sorted"] = "".join(row["tags"] for row in in_order.collect()) == "b" * 600 + "a" * 600

        stream = stream_topic(
            spark,
            "orders",
            starting_offsets="earliest",
            max_offsets_per_trigger=BATCH,
            commit_group="sink",
            client=client,
        )
        for _ in range(2):  # the second query continues from the checkpoint, and so adds nothing
            query = (
                stream.select("body", "tags")
                .writeStream.foreachBatch(topic_sink("sunk", client=client))
                .option("checkpointLocation", str(folder / "sink"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            sizes = [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]
            found.setdefault("batches", []).append(sizes)
            found.setdefault("lag", []).append([one.lag for one in stream_progress(query)])
        found["sunk"] = bodies("sunk")

        [stats] = topic_stats.run(spark, client, ["orders"])
        found["topic-stats"] = [stats.messages, stats.keys]
        found["archive"] = [archive.run(spark, client, "orders", folder / "archive").messages for _ in range(2)]
        counted = windowed_counts.run(
            spark,
            client,
            ["orders"],
            "counts",
            folder / "counts",
            windows=Windows(3600, 3600, 60),
            available_now=True,
            close=True,
        )
        found["windowed-counts"] = counted.closed
        counts = read_topic(spark, "counts", columns=["body"], client=client).collect()
        found["counted"] = sum(json.loads(row["body"])["messages"] for row in counts)
        found["replay"] = replay.run(client, folder / "archive" / "orders", "replayed").sent
        found["replayed"] = bodies("replayed")

        register_raymq(spark, client=client)
        of_format = spark.read.format("raymq").option("topic", "orders").option("columns", "body,tags").load()
        found["format"] = [
            of_format.where("tags = 'b'").count(),
            of_format.schema == orders.select("body", "tags").schema,
        ]
        of_format.write.format("raymq").option("topic", "formatted").mode("append").save()
        found["formatted"] = bodies("formatted")
        # The format continues from the checkpoint of stream_topic, so it adds only the message that is new.
        with client.producer("raydp4") as producer:
            producer.send(raymq.Message("orders", b"%d" % MESSAGES))
        for checkpoint in ("sink", "streamed"):
            rows = spark.readStream.format("raymq").option("topic", "orders").option("columns", "body")
            query = (
                rows.option("starting_offsets", "earliest")
                .load()
                .writeStream.format("raymq")
                .option("topic", "streamed")
                .option("checkpointLocation", str(folder / checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        written = read_topic(spark, "streamed", columns=["body"], client=client).collect()
        found["streamed"] = sorted(int(row["body"]) for row in written) == [*range(MESSAGES + 1), MESSAGES]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    with raymq.connect(embedded=True, data_dir=folder / "store") as client:
        for topic, queues in TOPICS.items():
            client.admin.create_topic(topic, queues=queues)
        send(client)
        print(json.dumps(results(client, folder)), flush=True)


if __name__ == "__main__":
    main()
