"""Fixes what a repeat of a batch relies on, before the batch is written: in a file, once and for ever.

    PLACE/TOPIC/17.json    {"version": 1, "queues": "broker-a:4;broker-b:4", "time_ms": 1795378333520, "partitions": 8}

PLACE is in a streaming query's checkpoint. Whoever comes first writes the file, with Spark's own way of writing its
checkpoint's files (CheckpointFileManager: whole or not there, on each file system that Spark knows); all others read
it. The file of a batch goes when its hundredth successor is planned: Spark repeats only the last one.
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
"""Batches whose files are kept, as many as Spark keeps of its own."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The `queues` that a batch's rows may go to, the time in ms since 1970 from which their deliver times count, None
    if that is not fixed, and the number of partitions, 0 if that is not known."""

    queues: tuple[MessageQueue, ...]
    time_ms: int | None
    partitions: int

    def encode(self) -> str:
        """The plan as the text of its file."""
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
        """The plan in the file at `path`. InvalidArgumentError for a file that raymq has not written."""
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
    """The plans of one query's writes to one topic, in directory `place` of a file system that Spark knows."""

    def __init__(self, spark: SparkSession, place: str) -> None:
        self._jvm: Any = spark._jvm
        self._place = place
        conf = spark._jsparkSession.sessionState().newHadoopConf()
        companion = getattr(self._jvm.org.apache.spark.sql.execution.streaming, "CheckpointFileManager$")
        self._files = getattr(companion, "MODULE$").create(self._path(place), conf)

    def fix(self, topic: str, batch: int, planned: WritePlan) -> WritePlan:
        """The plan of a batch: the one that was written first, which may be `planned`. On return it is on disk."""
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
            if not self._files.exists(self._path(path)):  # else another driver came first, and its plan counts
                raise

    def _read(self, path: str) -> str:
        stream = self._files.open(self._path(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()
