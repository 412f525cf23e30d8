"""A program that answers requests with a Spark 4 session, for tests whose own process has Spark 3.5.

    python spark4_program.py ADDRESS DIRECTORY

It runs in an environment with Spark 4 and an installed raymq, and imports no module of the tests. Each line of its
input is a request in JSON: the name of a function of `Requests`, and the function's arguments. Each line of its output
is the answer: the path of a pickled result, or the text of an error. The session ends with the input.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import raymq
from raydp_jobs import register_raymq

Rows = list[dict[str, Any]]
QUERY_S = 120
"""Maximum time of a query, in seconds."""


def rows_of(frame: DataFrame) -> Rows:
    """Return the rows of a DataFrame as mappings. Bodies are bytes, as Spark 3.5 and Spark 4 return different types."""
    rows = [row.asDict() for row in frame.collect()]
    return [{**row, "body": bytes(row["body"])} if row.get("body") is not None else row for row in rows]


class BatchRows:
    """A sink for `foreachBatch` that keeps the rows of each batch in a file: DIRECTORY/NUMBER. It also counts the
    partitions of a batch. A repeated batch must have the same rows and partitions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, batch: DataFrame, number: int) -> None:
        found = sorted(rows_of(batch), key=repr), batch.rdd.getNumPartitions()
        file = self.directory / str(number)
        if file.exists() and pickle.loads(file.read_bytes()) != found:
            file = self.directory / f"{number}.different"
        file.write_bytes(pickle.dumps(found))


def run_query(frame: DataFrame, checkpoint: Path, sink: Path) -> list[dict[str, Any]]:
    """Read all present messages of a streaming DataFrame into `sink`. Returns the sources of the query's last progress.
    Raises the error of the query, and TimeoutError if the query does not end."""
    writer = frame.writeStream.foreachBatch(BatchRows(sink)).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        if not query.awaitTermination(QUERY_S):
            raise TimeoutError(f"the query did not end within {QUERY_S} s")
        progress = query.lastProgress
        return [] if progress is None else list(progress["sources"])
    finally:
        query.stop()


class FailsOnce:
    """A function for `mapInArrow` that returns its input. The first attempt of each task that has rows fails after all
    but one of its rows were returned. `directory`: remembers the tasks that have failed."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        batch = context.getLocalProperty("streaming.sql.batchId")
        failed = Path(self._directory) / f"{batch}-{context.partitionId()}"
        for one in batches:
            if one.num_rows and not failed.exists():
                yield one.slice(0, one.num_rows - 1)
                failed.touch()
                raise RuntimeError("the first attempt fails")
            yield one


class Requests:
    """The functions that a test can call."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def read(self, options: Mapping[str, str], schema: str | None = None) -> tuple[Rows, int]:
        """Read a batch. Returns its rows and its number of partitions."""
        reader = self._spark.read.format("raymq").options(**options)
        frame = (reader.schema(schema) if schema else reader).load()
        return rows_of(frame), frame.rdd.getNumPartitions()

    def filtered(
        self, options: Mapping[str, str], conditions: list[str], *, push_filters: bool
    ) -> list[tuple[Rows, Rows, int]]:
        """Read a batch with each condition. Returns the rows that pass the condition, the rows if the source takes no
        part in the evaluation, and the number of rows that the source returned for the condition.

        Without `push_filters` all conditions use the same DataFrame. With `push_filters` each has its own DataFrame.
        """
        with raymq.connect(os.environ["RAY_ADDRESS"]) as mq:
            register_raymq(self._spark, client=mq, push_filters=push_filters)
        reader = self._spark.read.format("raymq").options(**options)
        frame = reader.load()
        alone = reader.load().localCheckpoint()
        found = []
        for condition in conditions:
            chosen = (reader.load() if push_filters else frame).where(condition)
            execution = chosen._jdf.queryExecution()
            execution.toRdd().count()
            metrics = execution.executedPlan().collectLeaves().head().metrics()
            scanned = metrics.apply("numOutputRows").value()
            found.append((rows_of(chosen), rows_of(alone.where(condition)), scanned))
        return found

    def open(self, options: Mapping[str, str]) -> None:
        """Load a DataFrame for `count` and `count_both`."""
        self._frame = self._spark.read.format("raymq").options(**options).load()

    def count(self) -> int:
        """Return the number of rows of the loaded DataFrame."""
        return self._frame.count()

    def count_both(self, one: str, other: str) -> int:
        """Return the number of rows of the loaded DataFrame that pass one condition or the other, by a union of two
        filtered reads in one query."""
        return self._frame.where(one).union(self._frame.where(other)).count()

    def stream(self, options: Mapping[str, str], checkpoint: str, sink: str) -> list[dict[str, Any]]:
        """Run a streaming query, as `run_query` does."""
        frame = self._spark.readStream.format("raymq").options(**options).load()
        sources = run_query(frame, Path(checkpoint), Path(sink))
        return [{name: source[name] for name in ("startOffset", "endOffset", "latestOffset")} for source in sources]

    def write(self, sql: str, options: Mapping[str, str], *, mode: str = "append", fail: str | None = None) -> int:
        """Write the rows of a query in SQL with ``df.write.format("raymq")``. Returns the number of partitions.

        `fail`: a directory. The first attempt of each task that has rows fails after all but one of its rows.
        """
        frame = self._spark.sql(sql)
        if fail is not None:
            frame = frame.mapInArrow(FailsOnce(fail), frame.schema)
        frame.write.format("raymq").options(**options).mode(mode).save()
        return frame.rdd.getNumPartitions()

    def write_stream(
        self,
        source: Mapping[str, str],
        columns: list[str],
        options: Mapping[str, str],
        *,
        mode: str = "append",
        fail: str | None = None,
    ) -> int:
        """Copy a topic to another with ``writeStream.format("raymq")``, until all present messages were read.
        `columns`: expressions in SQL. `fail`: as for `write`. Returns the number of batches."""
        frame = self._spark.readStream.format("raymq").options(**source).load()
        frame = frame.groupBy("tags").count() if mode == "complete" else frame
        frame = frame.selectExpr(*columns)
        if fail is not None:
            frame = frame.mapInArrow(FailsOnce(fail), frame.schema)
        writer = frame.writeStream.format("raymq").options(**options).outputMode(mode)
        query = writer.trigger(availableNow=True).start()
        try:
            if not query.awaitTermination(QUERY_S):
                raise TimeoutError(f"the query did not end within {QUERY_S} s")
            return len([one for one in query.recentProgress if one["numInputRows"]])
        finally:
            query.stop()

    def run(self, code: str) -> None:
        """Run a program, such as a snippet of a page. Its SparkSession is the session of this program."""
        exec(compile(code, "snippet", "exec"), {})

    def version(self) -> str:
        """Return the version of Spark."""
        return str(self._spark.version)


def main(address: str, directory: Path) -> None:
    """Answer requests until the input ends."""
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "RAY_ADDRESS": address}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever else prints must not disturb the answers.
    java = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={directory}"
    builder = SparkSession.builder.master("local[2, 2]")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": java,
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    with raymq.connect(address) as mq:
        register_raymq(spark, client=mq)
    requests = Requests(spark)
    for number, line in enumerate(sys.stdin):
        name, arguments = json.loads(line)
        function: Callable[..., Any] = getattr(requests, name)
        try:
            result = directory / f"result-{number}"
            result.write_bytes(pickle.dumps(function(**arguments)))
            answer = {"result": str(result)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
