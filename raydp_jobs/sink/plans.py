"""Stores the values that a repeated batch depends on, in a file, before the batch is written.

    PLACE/TOPIC/17.json    {"version": 1, "queues": "broker-a:4;broker-b:4", "time_ms": 1795378333520, "partitions": 8}

PLACE is in a streaming query's checkpoint. The first driver writes the file, as Spark writes its checkpoint's files
(CheckpointFileManager: whole or not at all, on each file system that Spark supports); other drivers read it. The file
of a batch is deleted when its hundredth successor is planned. Spark only repeats the last batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.common.protocol.route import format_order_config, parse_order_config

VERSION: Final = 1
KEPT: Final = 100
"""The number of batches whose files are kept, as many as Spark keeps of its own files."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The values that a batch's write depends on. `queues`: the queues for the batch's rows. `time_ms`: the time in ms
    since 1970 from which deliver times count; None if it is not fixed. `partitions`: 0 if their number is unknown."""

    queues: tuple[MessageQueue, ...]
    time_ms: int | None
    partitions: int

    def encode(self) -> str:
        """Return the plan as the text of its file."""
        counts: dict[str, int] = {}
        for queue in self.queues:
            counts[queue.broker_name] = counts.get(queue.broker_name, 0) + 1
        return json.dumps(
            {
                "version": VERSION,
                "queues": format_order_config(counts),
                "time_ms": self.time_ms,
                "partitions": self.partitions,
            }
        )

    @classmethod
    def decode(cls, topic: str, text: str, path: str) -> WritePlan:
        """Parse the plan in the file at `path`. Raises InvalidArgumentError for a file that raymq has not written."""
        try:
            values = json.loads(text)
            if values["version"] != VERSION:
                raise ValueError(f"its version is {values['version']}, not {VERSION}")
            counts = parse_order_config(values["queues"])
            queues = tuple(
                MessageQueue(topic, name, number) for name in sorted(counts) for number in range(counts[name])
            )
            return cls(queues, values["time_ms"], int(values["partitions"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"{path} is no plan of a write to {topic!r} ({error}); it was written by another version, or by others"
            ) from error


class PlanFiles:
    """The plans of one query's writes to one topic, in directory `place` of a file system that Spark supports."""

    def __init__(self, spark: SparkSession, place: str) -> None:
        self._jvm: Any = spark._jvm
        self._place = place
        conf = spark._jsparkSession.sessionState().newHadoopConf()
        companion = getattr(self._jvm.org.apache.spark.sql.execution.streaming, "CheckpointFileManager$")
        self._files = getattr(companion, "MODULE$").create(self._path(place), conf)

    def fix(self, topic: str, batch: int, planned: WritePlan) -> WritePlan:
        """Return the plan of a batch: the first plan that was written, which may be `planned`. On return it is on
        disk."""
        path = f"{self._place}/{batch}.json"
        if not self._files.exists(self._path(path)):
            self._files.mkdirs(self._path(self._place))
            self._write(path, planned.encode())
            if batch >= KEPT:
                self._files.delete(self._path(f"{self._place}/{batch - KEPT}.json"))
        return WritePlan.decode(topic, self._read(path), path)

    def _path(self, text: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(text)

    def _write(self, path: str, text: str) -> None:
        stream = self._files.createAtomic(self._path(path), False)
        try:
            stream.write(bytearray(text.encode()))
            stream.close()
        except Py4JJavaError:
            stream.cancel()
            if not self._files.exists(self._path(path)):  # another driver wrote its plan first, and that plan counts
                raise

    def _read(self, path: str) -> str:
        stream = self._files.open(self._path(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()
