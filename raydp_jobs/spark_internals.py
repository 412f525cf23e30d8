"""Everything that raymq uses of Spark's private parts, for each version of Spark with which it was checked.

No other module uses Py4J, objects of the JVM, or private names of PySpark. Another version of Spark may change these
parts, so `check_spark` runs before a session or a stream uses the first of them.

    the driver's JVM      its process, its end, its Py4J gateway; PySpark's references to a SparkContext
    errors                classes of Py4J's errors, and of Spark's errors that ask the JVM for their texts
    rows and functions    one partition with preferred hosts for each row; a Python function as a column of the JVM
    plans of DataFrames   executedPlan, outputOrdering, the RDD of the rows
    streams               Source, StreamingExecutionRelation, SerializedOffset, ReadLimit, internalCreateDataFrame
    checkpoints           CheckpointFileManager, resolvedCheckpointRoot
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.rdd import PythonEvalType
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from raymq.common.errors import ClientStateError

CHECKED_SPARKS: Final = ("3.5.7", "4.2.1")
"""The versions of Spark with which this module was checked. Other versions with the same first two numbers are
accepted."""
CONNECTION_ERRORS: Final = (Py4JError, ConnectionError)
"""Classes of errors that mean that the driver's JVM or the connection to it has failed. PySpark converts the errors of
Spark itself into other classes."""
JVM_ERRORS: Final = (Py4JError,)
"""Classes of errors of Py4J. Besides them, PySpark raises subclasses of pyspark.errors.PySparkException."""
JVM_TEXT_ERRORS: Final = (CapturedException, Py4JJavaError)
"""Classes of errors that ask the JVM for their text each time the text is read."""
JVM_LOGGERS: Final = ("py4j.java_gateway", "py4j.clientserver")
"""Names of the loggers of Py4J."""
SOURCE_INTERFACES: Final = [
    "org.apache.spark.sql.execution.streaming.Source",
    "org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow",
    "org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics",
]
"""The Java interfaces of a streaming source."""
_READ_ALL: Final = "ReadAllAvailable"
"""Class name of the read limit that Spark passes if a query's trigger reads everything in one batch."""


def check_spark(installed: str | None = None) -> None:
    """Raise ClientStateError unless the installed Spark has a version with which this module was checked. `installed`:
    the version of the installed Spark; by default the version of pyspark."""
    found = pyspark.__version__ if installed is None else installed
    if _two_numbers(found) not in map(_two_numbers, CHECKED_SPARKS):
        packages = " or ".join(f"'pyspark=={one}'" for one in CHECKED_SPARKS)
        raise ClientStateError(
            f"Spark {found} is installed, and this raymq was checked with Spark {' and '.join(CHECKED_SPARKS)}, whose "
            f"private parts it uses: pip install {packages}"
        )


def _two_numbers(version: str) -> list[str]:
    return version.split(".")[:2]


def _is_spark4() -> bool:
    return not pyspark.__version__.startswith("3.")


# The driver's JVM


def driver_gateway() -> Any:
    """Return Py4J's gateway to the driver's JVM of this process; None if this process has no JVM."""
    return SparkContext._gateway


def process_of(gateway: Any) -> subprocess.Popen[bytes] | None:
    """Return the process of the JVM of a gateway; None if another program started the JVM."""
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    return process


def has_context() -> bool:
    """Return True if PySpark has a SparkContext that is not stopped in this process."""
    return SparkContext._active_spark_context is not None


def known_sessions() -> list[SparkSession]:
    """Return the SparkSessions of this process that PySpark knows: the session of this thread, and the first session
    of the process."""
    return [one for one in (SparkSession.getActiveSession(), SparkSession._instantiatedSession) if one is not None]


def forget_context() -> None:
    """Clear PySpark's reference to a SparkContext whose JVM has ended. PySpark itself clears the reference only after
    the JVM has answered."""
    with SparkContext._lock:
        SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def end_driver_jvm(gateway: Any, timeout_s: float) -> None:
    """End the driver's JVM, so that PySpark starts a new JVM for the next session. PySpark itself would keep the JVM
    until this process ends.

    The JVM is killed if it does not end within `timeout_s`. Later calls to the JVM raise ClientStateError.
    """
    SparkContext._gateway = None
    SparkContext._jvm = None
    process = gateway.proc
    gateway.shutdown()
    gateway._gateway_client.send_command = _refuse
    process.stdin.close()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _refuse(*_: Any, **__: Any) -> Any:
    raise ClientStateError("this Spark session has ended; use the session and its DataFrames inside the `with` block")


def count_executors(spark: SparkSession) -> int:
    """Return the number of executors that have registered with the driver."""
    context: Any = spark.sparkContext
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1  # Spark counts the driver as one more executor.


# Rows with preferred hosts, and Python functions that read them


def jvm_schema(spark: SparkSession, schema: StructType) -> Any:
    """Return the JVM's object of a schema."""
    session: Any = spark._jsparkSession
    return session.parseDataType(schema.json())


def placed_rows(spark: SparkSession, schema: Any, rows: Sequence[tuple[object, Sequence[str]]]) -> DataFrame:
    """Return a DataFrame with one partition for each pair in `rows`. A pair is the value of the partition's only row,
    and the partition's preferred hosts.

    `schema`: a schema of `jvm_schema` with one column.
    """
    context: Any = spark.sparkContext
    session: Any = spark._jsparkSession
    jvm = context._jvm
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
    return DataFrame(session.createDataFrame(rdd, schema), spark)


def arrow_columns(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects from a Python function whose rows have the columns of `schema`."""
    columns: pa.Schema = to_arrow_schema(schema, timezone="UTC") if _is_spark4() else to_arrow_schema(schema)
    return columns


class ArrowFunction:
    """A Python function from Arrow batches to Arrow batches, for `DataFrame.mapInArrow`. It is pickled once, so a use
    needs only a few calls from the driver to the JVM."""

    def __init__(
        self, function: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: StructType
    ) -> None:
        self._function: Any = pandas_udf(
            function, returnType=schema, functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF
        )

    def map(self, rows: DataFrame) -> Any:
        """Return the JVM DataFrame that the function makes of `rows`, which has one column."""
        column: Any = self._function(rows[rows.columns[0]])._jc
        frame: Any = rows._jdf
        return frame.mapInArrow(column, False, None) if _is_spark4() else frame.pythonMapInArrow(column.expr(), False)


# Plans of DataFrames


def plan_text(df: DataFrame) -> str:
    """Return the text of a DataFrame's physical plan."""
    return str(_plan(df).toString())


def rows_text(df: DataFrame) -> str:
    """Return the description of the RDD of a DataFrame's rows."""
    frame: Any = df._jdf
    return str(frame.queryExecution().toRdd().toDebugString())


def count_partitions(df: DataFrame) -> int:
    """Return the number of partitions of a DataFrame whose plan is not adaptive."""
    frame: Any = df._jdf
    return int(frame.queryExecution().toRdd().getNumPartitions())


def present_order(df: DataFrame) -> Sequence[Column] | None:
    """Return the columns by which the rows of each partition are sorted; None if the order depends on columns that no
    longer exist."""
    plan, sql = _plan(df), _jvm(df.sparkSession).org.apache.spark.sql
    ordering, output = plan.outputOrdering(), plan.outputSet()
    found = []
    for index in range(ordering.size()):
        order = ordering.apply(index)
        if not order.references().subsetOf(output):
            return None
        found.append(Column(sql.classic.ExpressionUtils.column(order) if _is_spark4() else sql.Column(order)))
    return found


def _plan(df: DataFrame) -> Any:
    frame: Any = df._jdf
    return frame.queryExecution().executedPlan()


# Streams


def serve_callbacks(spark: SparkSession) -> None:
    """Let the JVM call Python objects of this process."""
    context: Any = spark.sparkContext
    ensure_callback_server_started(context._gateway)


def source_frame(spark: SparkSession, source: Any, empty: Any) -> DataFrame:
    """Return the streaming DataFrame of a Python object that implements SOURCE_INTERFACES. `empty`: a JVM DataFrame
    with the columns of the source."""
    session: Any = spark._jsparkSession
    sql = _jvm(spark).org.apache.spark.sql
    relation, output = _engine(spark).StreamingExecutionRelation, empty.queryExecution().analyzed().output()
    catalog_table = _jvm(spark).scala.Option.empty()
    if not _is_spark4():
        return DataFrame(sql.Dataset.ofRows(session, relation(source, output, catalog_table, session)), spark)
    unnamed = getattr(relation, "apply$default$4")()
    plan = relation(source, output, catalog_table, unnamed, session)
    return DataFrame(sql.classic.Dataset.ofRows(session, plan), spark)


def batch_frame(spark: SparkSession, messages: Any) -> Any:
    """Return the JVM DataFrame of a micro-batch, with the rows of the JVM DataFrame `messages`. The plan of the result
    begins with these rows, so Spark counts them as the batch's input rows."""
    session: Any = spark._jsparkSession
    return session.internalCreateDataFrame(messages.queryExecution().toRdd(), messages.schema(), True)


def offset_of(spark: SparkSession, text: str) -> Any:
    """Return a Spark offset object that contains `text`, the JSON text of a source's offsets."""
    return _engine(spark).SerializedOffset(text)


def metrics_of(spark: SparkSession, values: dict[str, str]) -> Any:
    """Return the JVM's map of a source's metrics."""
    result = _jvm(spark).java.util.HashMap()
    for name, value in values.items():
        result.put(name, value)
    return result


def default_read_limit(spark: SparkSession, *, limited: bool) -> Any:
    """Return the read limit that Spark uses by default for a source. `limited`: True if an option of the source limits
    its batches."""
    limits = _jvm(spark).org.apache.spark.sql.connector.read.streaming.ReadLimit
    # A read limit with a maximum tells Spark that the source itself limits its batches. Spark does not use the number,
    # so 1 is as good as any other.
    return limits.maxRows(1) if limited else limits.allAvailable()


def reads_everything(limit: Any) -> bool:
    """True if this read limit of Spark requests all messages that exist, without a maximum."""
    return bool(limit.getClass().getSimpleName() == _READ_ALL)


# Checkpoints


class CheckpointFiles:
    """Small files in a directory below a checkpoint, on a file system that Spark supports. Spark's manager of
    checkpoint files writes each file completely or not at all. `directory`: the directory, which `write` creates."""

    def __init__(self, spark: SparkSession, directory: str) -> None:
        check_spark()
        session: Any = spark._jsparkSession
        self._jvm = _jvm(spark)
        self._directory = self._path(directory)
        streaming = self._jvm.org.apache.spark.sql.execution.streaming
        companion = getattr(streaming.checkpointing if _is_spark4() else streaming, "CheckpointFileManager$")
        conf = session.sessionState().newHadoopConf()
        self._files = getattr(companion, "MODULE$").create(self._directory, conf)

    def exists(self, path: str) -> bool:
        """Return True if the file exists."""
        return bool(self._files.exists(self._path(path)))

    def delete(self, path: str) -> None:
        """Delete a file. Does nothing if the file does not exist."""
        self._files.delete(self._path(path))

    def write(self, path: str, text: str) -> None:
        """Write a new file. If another process has written the file first, that file stays. On success the file
        exists."""
        self._files.mkdirs(self._directory)
        stream = self._files.createAtomic(self._path(path), False)
        try:
            stream.write(bytearray(text.encode()))
            stream.close()
        except Py4JJavaError:
            stream.cancel()
            if not self.exists(path):
                raise

    def read(self, path: str) -> str:
        """Return the text of a file."""
        stream = self._files.open(self._path(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def _path(self, text: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(text)


def checkpoint_of(spark: SparkSession, query: str) -> str | None:
    """Return the directory of the checkpoint of a running query; None if this SparkSession did not start it."""
    session: Any = spark._jsparkSession
    found = session.streams().get(query)
    return None if found is None else str(found.streamingQuery().resolvedCheckpointRoot())


def _jvm(spark: SparkSession) -> Any:
    context: Any = spark.sparkContext
    return context._jvm


def _engine(spark: SparkSession) -> Any:
    """Return the JVM package of the streaming engine's classes."""
    streaming = _jvm(spark).org.apache.spark.sql.execution.streaming
    return streaming.runtime if _is_spark4() else streaming
