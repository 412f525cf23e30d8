"""A program with a streaming query that slowly writes the lines of files to a topic, for tests that kill the program.

python -m tests.support.spark.stream_driver ADDRESS DIRECTORY CHECKPOINT TOPIC
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

import raymq
from raydp_jobs import topic_sink
from raydp_jobs.session import spark_configs
from raymq.client.cluster.java import java_environment

PAUSE_S = 0.05
"""Pause before each of Spark's Arrow batches, in seconds. The pauses make a micro-batch so long that a test can kill
the driver during the batch."""
ARROW_ROWS = 50
FILES_PER_BATCH = 2


def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches unchanged, each after a pause. This function is passed to `DataFrame.mapInArrow`."""
    for batch in batches:
        time.sleep(PAUSE_S)
        yield batch


def main(address: str, directory: str, checkpoint: str, topic: str) -> None:
    """Run the streaming query until this process is killed."""
    os.environ.update(java_environment())
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master("local[2]")
    configs = {"spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS), "spark.sql.shuffle.partitions": "2"}
    for key, value in spark_configs(configs).items():
        builder = builder.config(key, value)
    with raymq.connect(address) as mq:
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        lines = (
            spark.readStream.option("maxFilesPerTrigger", FILES_PER_BATCH)
            .text(directory)
            .withColumnRenamed("value", "body")
        )
        rows = lines.mapInArrow(slowly, "body string")
        query = (
            rows.writeStream.foreachBatch(topic_sink(topic, client=mq)).option("checkpointLocation", checkpoint).start()
        )
        query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
