"""Stores the plan of a batch in a file before the batch is written. A repeated batch must use the same plan.

    PLACE/TOPIC/17.json    {"version": 1, "queues": "broker-a:4;broker-b:4", "time_ms": 1795378333520, "partitions": 8}

PLACE is a directory in the streaming query's checkpoint. The first driver writes the file as Spark writes its
checkpoint files: completely or not at all, on each file system that Spark supports (CheckpointFileManager). Other
drivers read the file. The file of a batch is deleted after 100 later batches were planned. Spark repeats only the last
batch.

``format("raymq")`` has no access to Spark's file systems: its processes write the files to a mounted directory
(PlanDirectory).
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from raydp_jobs.spark_internals import CheckpointFiles
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.protocol.route import format_order_config, parse_order_config

VERSION: Final = 2
"""Version of the plan files. Version 1 has no field `first_queue`, and its readers take the value 0. So a plan whose
`first_queue` is 0 is still written in version 1."""
KEPT: Final = 100
"""Number of batches whose plan files are kept. Spark also keeps its own checkpoint files for 100 batches."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The plan of a batch's write: the values that must not change if the batch is repeated.

    `queues`: the queues to which the rows are written. `time_ms`: the reference time for deliver times, in ms since
    1970; None if the time is not fixed. `partitions`: the number of partitions; 0 if unknown. `first_queue`: the index
    of the queue for the first rows of partition 0.
    """

    queues: tuple[MessageQueue, ...]
    time_ms: int | None
    partitions: int
    first_queue: int = 0

    def encode(self) -> str:
        """Return the plan as JSON text for its file."""
        counts: dict[str, int] = {}
        for queue in self.queues:
            counts[queue.broker_name] = counts.get(queue.broker_name, 0) + 1
        values = {
            "version": VERSION if self.first_queue else 1,
            "queues": format_order_config(counts),
            "time_ms": self.time_ms,
            "partitions": self.partitions,
        }
        return json.dumps(values | ({"first_queue": self.first_queue} if self.first_queue else {}))

    @classmethod
    def decode(cls, topic: str, text: str, path: str) -> WritePlan:
        """Decode the plan in the file at `path`, whose content is `text`. Raises InvalidArgumentError if raymq did not
        write the file."""
        try:
            values = json.loads(text)
            if values["version"] not in (1, VERSION):
                raise ValueError(f"the plan's version is {values['version']}, not 1 or {VERSION}")
            counts = parse_order_config(values["queues"])
            queues = tuple(
                MessageQueue(topic, name, number) for name in sorted(counts) for number in range(counts[name])
            )
            return cls(queues, values["time_ms"], int(values["partitions"]), int(values.get("first_queue", 0)))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"file {path} is not a plan of a write to topic {topic!r} ({error}): another version of "
                "raymq, or another program, wrote the file"
            ) from error


class PlanFiles:
    """The plan files of one query's writes to one topic. They are in directory `place`, on a file system that Spark
    supports."""

    def __init__(self, spark: SparkSession, place: str) -> None:
        self._place = place
        self._files = CheckpointFiles(spark, place)

    def fix(self, topic: str, batch: int, planned: WritePlan) -> WritePlan:
        """Store `planned` as the plan of a streaming batch, unless a plan of this batch is already stored. Returns the
        stored plan, which is durable."""
        path = f"{self._place}/{batch}.json"
        if not self._files.exists(path):
            self._files.write(path, planned.encode())
            if batch >= KEPT:
                self._files.delete(f"{self._place}/{batch - KEPT}.json")
        return WritePlan.decode(topic, self._files.read(path), path)


class PlanDirectory:
    """The plan files of one query's writes to one topic, in a directory `place` that all processes of the query see."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def fix(self, topic: str, batch: int, planned: WritePlan) -> WritePlan:
        """Store `planned` as the plan of a batch, unless a plan of this batch is already stored. Returns the stored
        plan, which is durable. Any number of processes may call this at the same time; all get the same plan. Raises
        OSError if the directory cannot be used."""
        path = self._place / f"{batch}.json"
        if not path.exists():
            self._place.mkdir(parents=True, exist_ok=True)
            self._write(path, planned.encode())
            if batch >= KEPT:
                (self._place / f"{batch - KEPT}.json").unlink(missing_ok=True)
        return WritePlan.decode(topic, path.read_text(), str(path))

    def _write(self, path: Path, text: str) -> None:
        partial = self._place / f".{uuid.uuid4().hex}.partial"
        try:
            with partial.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            # A hard link appears completely or not at all, and never replaces the plan of another process.
            os.link(partial, path)
            directory = os.open(self._place, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except FileExistsError:
            pass  # another process wrote the plan first
        finally:
            partial.unlink(missing_ok=True)
