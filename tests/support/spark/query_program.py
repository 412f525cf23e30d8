"""A program with a streaming query, for tests that kill the program: `python -m tests.support.spark.query_program TOPIC
DIRECTORY [end]`.

Its Spark session runs on two threads of its own JVM and starts within seconds. The topic is in this machine's Ray
cluster. With `end` the query reads all present messages and ends; otherwise the query never ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray

from raydp_jobs import stream_topic
from raymq.client.client import connect
from tests.support.spark.batch_files import BatchFiles
from tests.support.spark.local_spark import local_spark


def main(topic: str, directory: Path, *, end: bool) -> None:
    """Run the streaming query from `topic` to DIRECTORY/sink, with the checkpoint DIRECTORY/checkpoint."""
    with connect(os.environ["RAYMQ_TEST_ADDRESS"]) as client, local_spark(directory / "spark") as spark:
        frame = stream_topic(
            spark, topic, starting_offsets="earliest", max_offsets_per_trigger=400, min_partitions=2, client=client
        )
        writer = frame.writeStream.foreachBatch(BatchFiles(directory / "sink"))
        writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
        query = (writer.trigger(availableNow=True) if end else writer).start()
        query.awaitTermination()
    assert not ray.is_initialized()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), end=sys.argv[3:] == ["end"])
