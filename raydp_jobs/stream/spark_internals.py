"""The internal classes of Spark's streaming engine that raymq uses, and a check of Spark's version.

No other module names these classes. They are not part of Spark's public interface, so another version of Spark may
change them. `check_spark` runs before the first of them is used.

    Source, SupportsTriggerAvailableNow, ReportsSourceMetrics    the interfaces that SparkSource implements
    StreamingExecutionRelation, SerializedOffset, ReadLimit      a source in a plan, its offsets, and limits of a batch
    internalCreateDataFrame                                      the DataFrame of a batch
    CheckpointFileManager, resolvedCheckpointRoot                files in a query's checkpoint, and its directory
"""

from __future__ import annotations

from typing import Any, Final

import pyspark
from pyspark.sql import DataFrame, SparkSession

from raymq.common.errors import ClientStateError

SPARK_VERSION: Final = "3.5.7"
"""The version of Spark with which this module was checked. Other versions with the same first two numbers are
accepted."""
SOURCE_INTERFACES: Final = [
    "org.apache.spark.sql.execution.streaming.Source",
    "org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow",
    "org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics",
]
"""The Java interfaces of a streaming source."""
_READ_ALL: Final = "ReadAllAvailable"
"""Class name of the read limit that Spark passes if a query's trigger reads everything in one batch."""


def check_spark(installed: str | None = None) -> None:
    """Raise ClientStateError unless the installed Spark has the version with which this module was checked.
    `installed`: the version of the installed Spark; by default the version of pyspark."""
    found = pyspark.__version__ if installed is None else installed
    if found.split(".")[:2] != SPARK_VERSION.split(".")[:2]:
        raise ClientStateError(
            f"Spark {found} is installed, and this raymq was checked with Spark {SPARK_VERSION}, whose internal "
            f"classes its streams use: pip install 'pyspark=={SPARK_VERSION}'"
        )


def source_frame(spark: SparkSession, source: Any, empty: Any) -> DataFrame:
    """Return the streaming DataFrame of a Python object that implements SOURCE_INTERFACES. `empty`: a JVM DataFrame
    with the columns of the source."""
    jvm: Any = spark.sparkContext._jvm
    relation = jvm.org.apache.spark.sql.execution.streaming.StreamingExecutionRelation(
        source, empty.queryExecution().analyzed().output(), jvm.scala.Option.empty(), spark._jsparkSession
    )
    return DataFrame(jvm.org.apache.spark.sql.Dataset.ofRows(spark._jsparkSession, relation), spark)


def batch_frame(spark: SparkSession, messages: Any) -> Any:
    """Return the JVM DataFrame of a micro-batch, with the rows of the JVM DataFrame `messages`. The plan of the result
    begins with these rows, so Spark counts them as the batch's input rows."""
    session: Any = spark._jsparkSession
    return session.internalCreateDataFrame(messages.queryExecution().toRdd(), messages.schema(), True)


def offset_of(jvm: Any, text: str) -> Any:
    """Return a Spark offset object that contains `text`, the JSON text of a source's offsets."""
    return jvm.org.apache.spark.sql.execution.streaming.SerializedOffset(text)


def default_read_limit(jvm: Any, *, limited: bool) -> Any:
    """Return the read limit that Spark uses by default for a source. `limited`: True if an option of the source limits
    its batches."""
    limits = jvm.org.apache.spark.sql.connector.read.streaming.ReadLimit
    # A read limit with a maximum tells Spark that the source itself limits its batches. Spark does not use the number,
    # so 1 is as good as any other.
    return limits.maxRows(1) if limited else limits.allAvailable()


def reads_everything(limit: Any) -> bool:
    """True if this read limit of Spark requests all messages that exist, without a maximum."""
    return bool(limit.getClass().getSimpleName() == _READ_ALL)


def checkpoint_files(spark: SparkSession, path: Any) -> Any:
    """Return Spark's manager of the files below `path` (a Hadoop Path), which writes each file completely or not at
    all."""
    check_spark()
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    jvm: Any = spark._jvm
    companion = getattr(jvm.org.apache.spark.sql.execution.streaming, "CheckpointFileManager$")
    return getattr(companion, "MODULE$").create(path, conf)


def checkpoint_of(spark: SparkSession, query: str) -> str | None:
    """Return the directory of the checkpoint of a running query; None if this SparkSession did not start it."""
    found: Any = spark._jsparkSession.streams().get(query)
    return None if found is None else str(found.streamingQuery().resolvedCheckpointRoot())
