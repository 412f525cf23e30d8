"""Spark with the settings of quick jobs: a few rows need one partition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.support.spark.local_spark import changed


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    with changed(spark, {"spark.sql.shuffle.partitions": "1"}):
        yield spark
