"""Tests of the progress bar of a Spark job, which shows the job's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql import SparkSession

from raydp_jobs.jobs import spark_job
from tests.support.history.waiting import eventually


class Bar:
    """Stand-in for a visible progress bar. Records the calls of its methods."""

    shown = True

    def __init__(self) -> None:
        self.expected = self.done = 0

    def expect(self, total: int) -> None:
        self.expected = total

    def advance(self, count: int) -> None:
        self.done += count


def test_the_bar_has_the_tasks_of_the_block_and_no_others(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Bar()

    @contextmanager
    def counting(description: str, *, talks: bool) -> Iterator[Any]:
        assert (description, talks) == ("reading", False)
        yield bar

    monkeypatch.setattr(spark_job, "counting", counting)
    spark.range(0, 100, 1, 7).collect()
    with spark_job.tasks_counted(spark, "reading", quiet=False):
        spark.range(0, 100, 1, 5).collect()
        eventually(lambda: bar.done >= 5, "five tasks")
    assert (bar.expected, bar.done) == (5, 5)
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
