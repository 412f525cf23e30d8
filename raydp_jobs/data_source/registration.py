"""`register_raymq`: makes ``format("raymq")`` known to a session of Spark 4.

The module can be imported with every version of Spark and without Spark, so that a missing or old Spark is one clear
error.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from raydp_jobs.data_source.versions import BATCH_SPARK, check_spark4
from raydp_jobs.worker_client import address_of_cluster
from raymq.client.client import Client, connect
from raymq.common.errors import ClientStateError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from raydp_jobs.data_source.partitions import SourceSettings

FILTER_SETTING: Final = "spark.sql.python.filterPushdown.enabled"
"""Spark's setting without which Spark refuses a data source in Python that takes filters."""


def register_raymq(spark: SparkSession, *, client: Client | None = None, push_filters: bool = False) -> None:
    """Make ``format("raymq")`` known to a session of Spark 4, to read and to write batches and streams.

    Needs Spark 4.1, and Spark 4.2 to read streams; RayDP is not needed. Options and columns are described in
    docs/spark.md; they have the names and meanings of `read_topic`, `stream_topic`, `write_topic` and `topic_sink`.
    `client`: the result of `raymq.connect()`; without it, a connection is opened to find the cluster. The client may be
    closed after this call: Spark's processes connect on their own, as the client's user and in the client's namespace.
    A second call replaces the first.

    `push_filters`: let Spark push the filters of a query down, so that fewer messages are read. Spark 4.1 to 4.3 keep
    the plan of the last pushed filter for all uses of a DataFrame. So with `push_filters` call `load()` anew for each
    filter; otherwise rows are missing. Sets Spark's setting `spark.sql.python.filterPushdown.enabled` to true.

    Raises MissingExtraError if pyspark is not installed, ClientStateError for an older Spark and for a session of Spark
    Connect, and the errors of `raymq.connect`. The session is unchanged after an error.
    """
    check_spark4(BATCH_SPARK, 'format("raymq")')
    context = getattr(spark, "sparkContext", None)  # a session of Spark Connect raises AttributeError
    if context is None:
        raise ClientStateError(
            "register_raymq needs a session whose driver runs in this program, but this is a session of Spark "
            "Connect: create it with SparkSession.builder without .remote(...)"
        )
    from raydp_jobs.data_source.partitions import SourceSettings

    with nullcontext(client) if client is not None else connect() as connection:
        address = address_of_cluster(connection)
    settings = SourceSettings(address, context.defaultParallelism, push_filters)
    spark.dataSource.register(source_class(settings))
    if push_filters:
        spark.conf.set(FILTER_SETTING, "true")


def source_class(settings: SourceSettings) -> type[Any]:
    """Return the data source of a session. The class is local, so that Spark pickles it with its settings, and Spark's
    processes need no other way to find the cluster."""
    from raydp_jobs.data_source.topic_data_source import TopicDataSource

    class SessionTopicSource(TopicDataSource):
        """Reads and writes the topics of the cluster to which the session was registered."""

    SessionTopicSource.settings = settings
    return SessionTopicSource
