"""Offsets that tasks have left out because they are gone, told in the driver's log by way of an accumulator of Spark.

A task's losses come to the driver when it has succeeded. Spark may run a task twice; then they come twice.
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
    """An accumulator for the ranges that tasks leave out; each list that is added becomes warnings in the driver."""
    parameter: Any = SimpleNamespace(zero=_none, addInPlace=_tell)  # an AccumulatorParam, by its methods
    accumulator: Accumulator[list[OffsetRange]] = spark.sparkContext.accumulator([], parameter)
    return accumulator


def _none(value: list[OffsetRange]) -> list[OffsetRange]:
    return []


def _tell(before: list[OffsetRange], lost: list[OffsetRange]) -> list[OffsetRange]:
    if TaskContext.get() is not None:  # in a task, which collects them for the driver
        return [*before, *lost]
    for one in lost:
        logger.warning(
            "%s: a Spark task has left out offsets %d to %d, which are gone",
            one.queue,
            one.start_offset,
            one.end_offset - 1,
        )
    return []
