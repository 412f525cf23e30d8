"""Assigns preferred hosts to Spark tasks, so that a task runs on the node whose disk it reads, if that node has a free
executor.

The host name of a RayDP executor is its node's IP address. So the preferred host of a broker group is the address of
the Ray node with the master's storage actor. Spark waits `spark.locality.wait` for a free core on that node, and then
uses another executor, which reads over a lane (direct socket connection).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import ray
from pyspark.sql import DataFrame, SparkSession

from raymq.client.scan.partitions import ScanPartition
from raymq.common.protocol.route import MASTER_ID
from raymq.remoting.master_locator import RouteSource

_SCHEMA: Final = '{"type":"struct","fields":[{"name":"partition","type":"integer","nullable":false,"metadata":{}}]}'


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
    return placed_rows(spark, spark._jsparkSession.parseDataType(_SCHEMA), list(enumerate(hosts)))


def placed_rows(spark: SparkSession, schema: Any, rows: Sequence[tuple[object, Sequence[str]]]) -> DataFrame:
    """Return a DataFrame with one partition for each pair in `rows`. A pair is the value of the partition's only row,
    and the partition's preferred hosts.

    `schema`: a JVM schema with one column.
    """
    context, jvm = spark.sparkContext, spark.sparkContext._jvm
    assert jvm is not None
    # Look up the JVM's classes once, not for each row: a lookup costs several Py4J calls of 0.3 ms each.
    new_list, new_pair, new_row = jvm.java.util.ArrayList, jvm.scala.Tuple2, jvm.org.apache.spark.sql.RowFactory.create
    to_seq, any_object = jvm.org.apache.spark.api.python.PythonUtils.toSeq, jvm.java.lang.Object

    def seq(values: Iterable[Any]) -> Any:
        items = new_list()
        for value in values:
            items.add(value)
        return to_seq(items)

    def row(value: object) -> Any:
        array = context._gateway.new_array(any_object, 1)
        array[0] = value
        return new_row(array)

    places = {hosts: seq(hosts) for hosts in {tuple(hosts) for _, hosts in rows}}
    pairs = seq(new_pair(row(value), places[tuple(hosts)]) for value, hosts in rows)
    rdd = context._jsc.sc().makeRDD(pairs, jvm.scala.reflect.ClassTag.AnyRef())
    return DataFrame(spark._jsparkSession.createDataFrame(rdd, schema), spark)
