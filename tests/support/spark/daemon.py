"""A changed version of Spark's Python daemon. Its workers read a store's files (tests.support.spark.near_store) instead
of connecting to a cluster."""

from __future__ import annotations

from pyspark.daemon import manager

from raydp_jobs.source import reader
from tests.support.spark.near_store import worker_client

if __name__ == "__main__":
    reader.worker_client = worker_client  # type: ignore[assignment]  # another client of the same calls
    manager()
