"""Tasks run on the node whose disk holds what they read, if an executor there is free: that is asked of Spark.

RayDP's executors have their node's IP address as their host, so a broker group's host is that of the Ray node on which
its master's storage actor runs. Spark waits `spark.locality.wait` for a free core there, then takes another executor,
which reads over a lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import ray
from pyspark.sql import DataFrame, SparkSession

from raymq.protocol.route import MASTER_ID
from raymq.remoting.master_locator import RouteSource
from raymq.scan.partitions import ScanPartition

_SCHEMA: Final = '{"type":"struct","fields":[{"name":"partition","type":"integer","nullable":false,"metadata":{}}]}'


def preferred_hosts(routes: RouteSource, partitions: Iterable[ScanPartition]) -> list[list[str]]:
    """The hosts on which each partition is best read: none, or that of its broker group's master."""
    nodes: dict[str, str] = {}
    places = []
    for partition in partitions:
        broker = routes.get(partition.ranges[0].topic).brokers.get(partition.broker_name)
        node = "" if broker is None else broker.nodes.get(MASTER_ID, "")
        nodes |= node_hosts() if node and not nodes else {}
        places.append([nodes[node]] if node in nodes else [])
    return places


def node_hosts() -> Mapping[str, str]:
    """The IP address of each live node of the Ray cluster, by its id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def numbered_partitions(spark: SparkSession, hosts: Sequence[Sequence[str]]) -> DataFrame:
    """A DataFrame with a partition for each of `hosts`, to run there if there are any: its one row has its number."""
    return placed_rows(spark, spark._jsparkSession.parseDataType(_SCHEMA), list(enumerate(hosts)))


def placed_rows(spark: SparkSession, schema: Any, rows: Sequence[tuple[object, Sequence[str]]]) -> DataFrame:
    """A DataFrame with a partition for each of `rows`, of one value, to run on one of the row's hosts if it has any.
    `schema` is the JVM's, of one column."""
    context, jvm = spark.sparkContext, spark.sparkContext._jvm
    assert jvm is not None
    pairs = jvm.java.util.ArrayList()
    for value, places in rows:
        row = jvm.org.apache.spark.sql.RowFactory.create(_objects(context, [value]))
        pairs.add(jvm.scala.Tuple2(row, _scala_seq(jvm, places)))
    any_class = jvm.scala.reflect.ClassTag.AnyRef()
    rdd = context._jsc.sc().makeRDD(_scala_seq(jvm, pairs), any_class)
    return DataFrame(spark._jsparkSession.createDataFrame(rdd, schema), spark)


def _objects(context: Any, values: Sequence[Any]) -> Any:
    """A Java array of these values."""
    array = context._gateway.new_array(context._jvm.java.lang.Object, len(values))
    for index, value in enumerate(values):
        array[index] = value
    return array


def _scala_seq(jvm: Any, values: Any) -> Any:
    """A Scala Seq of the elements of a Java list, or of a Python sequence of texts."""
    items = values
    if not hasattr(values, "_get_object_id"):
        items = jvm.java.util.ArrayList()
        for value in values:
            items.add(value)
    return jvm.org.apache.spark.api.python.PythonUtils.toSeq(items)
