"""Assigns preferred hosts to Spark tasks, so that a task runs on the node whose disk it reads, if that node has a free
executor.

The host name of a RayDP executor is its node's IP address. So the preferred host of a broker group is the address of
the Ray node with the master's storage actor. Spark waits `spark.locality.wait` for a free core on that node, and then
uses another executor, which reads over a lane (direct socket connection).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import ray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, StructField, StructType

from raydp_jobs.spark_internals import jvm_schema, placed_rows
from raymq.client.scan.partitions import ScanPartition
from raymq.common.protocol.route import MASTER_ID
from raymq.remoting.master_locator import RouteSource

_SCHEMA: Final = StructType([StructField("partition", IntegerType(), nullable=False)])


def preferred_hosts(routes: RouteSource, partitions: Iterable[ScanPartition]) -> list[list[str]]:
    """Return the preferred hosts of each partition of a read: the host of the broker group's master; empty if that host
    is unknown."""
    nodes: dict[str, str] = {}
    places = []
    for partition in partitions:
        broker = routes.get(partition.ranges[0].topic).brokers.get(partition.broker_name)
        node = "" if broker is None else broker.nodes.get(MASTER_ID, "")
        nodes |= node_hosts() if node and not nodes else {}
        places.append([nodes[node]] if node in nodes else [])
    return places


def node_hosts() -> Mapping[str, str]:
    """Return the IP address of each live node of the Ray cluster, by node id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def numbered_partitions(spark: SparkSession, hosts: Sequence[Sequence[str]]) -> DataFrame:
    """Return a DataFrame with one partition for each list in `hosts`. Spark prefers to run the partition's task on one
    of the hosts in its list. Each partition has one row: the partition's number."""
    return placed_rows(spark, jvm_schema(spark, _SCHEMA), list(enumerate(hosts)))
