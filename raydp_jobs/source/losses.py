"""Logs, in the driver, the offsets that tasks left out because their messages were deleted. A Spark accumulator carries
the offsets.

The driver gets a task's losses after the task has succeeded. If Spark runs a task twice, the losses are logged twice.
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
    """Create an accumulator for the offset ranges that tasks leave out. The driver logs a warning for each
    added range."""
    # Any: Spark accepts any object with these two attributes
    parameter: Any = SimpleNamespace(zero=_none, addInPlace=_tell)
    accumulator: Accumulator[list[OffsetRange]] = spark.sparkContext.accumulator([], parameter)
    return accumulator


def _none(value: list[OffsetRange]) -> list[OffsetRange]:
    return []


def _tell(before: list[OffsetRange], lost: list[OffsetRange]) -> list[OffsetRange]:
    if TaskContext.get() is not None:  # In a task, only collect the ranges, for the driver.
        return [*before, *lost]
    for one in lost:
        logger.warning(
            "%s: a Spark task has left out offsets %d to %d, which are gone",
            one.queue,
            one.start_offset,
            one.end_offset - 1,
        )
    return []
