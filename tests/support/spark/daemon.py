"""A variant of Spark's Python daemon for tests. Its workers do not connect to a cluster, but read a store's files
(tests.support.spark.near_store)."""

from __future__ import annotations

from pyspark.daemon import manager

from raydp_jobs.source import reader
from tests.support.spark.near_store import worker_client

if __name__ == "__main__":
    reader.worker_client = worker_client  # type: ignore[assignment]  # another client of the same calls
    manager()
