"""Spark settings that make the tests of jobs fast: one partition, because the tests have few rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.support.spark.local_spark import changed


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    with changed(spark, {"spark.sql.shuffle.partitions": "1"}):
        yield spark
