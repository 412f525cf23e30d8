"""Logs, in the driver, the offsets that Spark tasks skipped because their messages were deleted. A Spark accumulator
sends the offsets from the tasks to the driver.

The driver gets a task's lost offsets after the task has succeeded. If Spark runs a task twice, they are logged twice.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from pyspark import TaskContext
from pyspark.accumulators import Accumulator
from pyspark.sql import SparkSession

from raymq.client.scan.ranges import OffsetRange

logger = logging.getLogger(__name__)


def count_losses(spark: SparkSession) -> Accumulator[list[OffsetRange]]:
    """Create a Spark accumulator for the offset ranges that tasks skip because their messages are lost. The driver logs
    a warning for each range that a task adds."""
    # Typed as Any, because Spark accepts any object with the attributes `zero` and `addInPlace` as accumulator
    # parameter.
    parameter: Any = SimpleNamespace(zero=_none, addInPlace=_tell)
    accumulator: Accumulator[list[OffsetRange]] = spark.sparkContext.accumulator([], parameter)
    return accumulator


def _none(value: list[OffsetRange]) -> list[OffsetRange]:
    return []


def _tell(before: list[OffsetRange], lost: list[OffsetRange]) -> list[OffsetRange]:
    # In a Spark task, the lost ranges are only added to the accumulator. The driver logs them.
    if TaskContext.get() is not None:
        return [*before, *lost]
    for one in lost:
        logger.warning(
            "queue %s: a Spark task has skipped offsets %d to %d, which no longer exist",
            one.queue,
            one.start_offset,
            one.end_offset - 1,
        )
    return []
