"""Helper program of test_read_places.py: reads a topic with Spark on each node that stores a part of the topic.

    python tests/chaos/nodes/read_places.py DIRECTORY

The program connects to raymq in the Ray cluster that RAY_ADDRESS names, and creates a topic on all broker groups. It
reads the topic twice: first on read_topic's preferred nodes, and then each offset range on a node that does not store
the range. Each task writes a file to DIRECTORY/asked or DIRECTORY/elsewhere. The program prints, as JSON, the host of
each broker group's master, and the rows of each read.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

import raymq
from raydp_jobs import read_topic, spark_session
from raydp_jobs.source import locality, reader
from raymq.client.scan.ranges import OffsetRange
from raymq.common.protocol.route import MASTER_ID

TOPIC, MESSAGES = "places", 4000
PARTITION_BYTES = 256 << 10
read_ranges, preferred_hosts = reader.read_ranges, locality.preferred_hosts


def note_reads(directory: Path) -> None:
    """Change Spark's reading tasks so that each task writes a JSON file into `directory`.

    The file has the task's host, the broker groups of its ranges, the number of rows, and the broker groups whose log
    files its process has mapped.
    """
    directory.mkdir()

    def noted(ranges: Iterable[OffsetRange], *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        chosen, rows = list(ranges), 0
        for batch in read_ranges(chosen, *arguments, **options):
            rows += batch.num_rows
            yield batch
        maps = Path("/proc/self/maps").read_text()
        brokers = sorted({one.broker_name for one in chosen})
        note = {
            "host": psutil.net_if_addrs()["eth0"][0].address,
            "brokers": brokers,
            "rows": rows,
            "mapped": [broker for broker in brokers if f"/{broker}-0/commitlog/" in maps],
        }
        (directory / uuid.uuid4().hex).write_text(json.dumps(note))

    reader.read_ranges = noted


def main(directory: Path) -> None:
    # Redirect standard output to standard error, because only the result may be printed to standard output.
    os.dup2(2, 1)
    with raymq.connect() as mq:
        mq.admin.create_topic(TOPIC, queues=4)
        with mq.producer() as producer:
            producer.send_table(TOPIC, pa.table({"body": [f"{number} {'x' * 1000}" for number in range(MESSAGES)]}))
        hosts = locality.node_hosts()
        leaders = {name: hosts[broker.nodes[MASTER_ID]] for name, broker in mq.admin.brokers().items()}

        def hosts_of_others(*arguments: Any) -> list[list[str]]:
            return [[host for host in leaders.values() if host not in own] for own in preferred_hosts(*arguments)]

        rows = {}
        # Set spark.locality.wait so high that a task waits for its requested node, however busy this machine is.
        with spark_session(
            "places", executors=2, executor_memory="512m", configs={"spark.locality.wait": "60s"}
        ) as spark:
            for name, places in (("asked", preferred_hosts), ("elsewhere", hosts_of_others)):
                reader.preferred_hosts = places
                note_reads(directory / name)
                frame = read_topic(spark, TOPIC, partition_bytes=PARTITION_BYTES, client=mq)
                rows[name] = frame.select("broker_name", "queue_id", "queue_offset").distinct().count()
    print(json.dumps({"leaders": leaders, "messages": MESSAGES, "rows": rows}), file=answer)


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    main(Path(sys.argv[1]))
    answer.close()
