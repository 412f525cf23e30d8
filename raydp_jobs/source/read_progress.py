"""Tells the driver how many messages of a read Spark's tasks have read, so that a job can show its progress.

A Spark accumulator sends the numbers from the tasks to the driver. The driver gets a task's number after the task has
succeeded. If Spark runs a task twice, its messages count twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from pyspark import TaskContext
from pyspark.accumulators import Accumulator
from pyspark.sql import SparkSession

from raymq.client.scan.ranges import OffsetRange

_LISTENERS: Final[dict[str, Callable[[int], object]]] = {}
"""For each read of this driver that shows its progress: the function that gets the numbers of messages. Tasks get only
the key, because the function may belong to the driver's terminal."""


class ReadProgress:
    """The progress of one read, for the driver. `on_plan` is called with the number of offsets of the plan, `on_read`
    with the number of offsets that a task has read. Another thread calls `on_read`. A `with` block ends the calls."""

    def __init__(self, on_plan: Callable[[int], object], on_read: Callable[[int], object]) -> None:
        self.on_plan, self._key = on_plan, uuid.uuid4().hex
        _LISTENERS[self._key] = on_read

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        _LISTENERS.pop(self._key, None)

    def counter(self, spark: SparkSession) -> Accumulator[int]:
        """Create the accumulator to which the tasks of a read add the offsets that they have read."""
        # Typed as Any, because Spark accepts any object with the attributes `zero` and `addInPlace` as accumulator
        # parameter.
        parameter: Any = SimpleNamespace(zero=_zero, addInPlace=partial(_add, self._key))
        accumulator: Accumulator[int] = spark.sparkContext.accumulator(0, parameter)
        return accumulator


def counted(ranges: Iterable[OffsetRange], add: Callable[[int], object]) -> Iterator[OffsetRange]:
    """Yield the offset ranges that a task reads, and call `add` with the size of each range that the task has read."""
    for one in ranges:
        yield one
        add(one.size)


def _zero(value: int) -> int:
    return 0


def _add(key: str, before: int, more: int) -> int:
    if TaskContext.get() is None and (tell := _LISTENERS.get(key)) is not None:
        tell(more)
    return before + more
