"""Benchmark of Spark and Ray Data on a topic, compared with the same rows in Parquet: reading, writing, streaming,
memory.

One executor has one core, so each value per second is also a value per core. Spark writes the Parquet files from the
topic, one file for each of the topic's queues. The topic and the Parquet files are in the page cache.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import ray

import raymq
from tests.bench.cluster import new_topic, workers
from tests.bench.figures import Figure, Goal, Sample

MESSAGES: Final = 1_000_000
BODY_BYTES: Final = 1024
TABLE_ROWS: Final = 10_000
TAGS: Final = ("paid", "refunded", "late", "new")
STREAM_PER_S: Final = 20_000
STREAM_S: Final = 20.0
WRITTEN: Final = 400_000
QUANTILES: Final = tuple((index + 0.5) / 20 for index in range(20))
PATIENCE_S: Final = 120.0
MEMORY_GROWTH_MB: Final = 128.0
SECTION: Final = "spark"


def spark(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield all measurements with Spark and Ray Data. `scale` multiplies the amount of data that is read, streamed and
    written."""
    from raydp_jobs import read_topic, spark_session

    count = max(TABLE_ROWS, int(MESSAGES * scale) // TABLE_ROWS * TABLE_ROWS)
    large, small = new_topic(client, "bench-spark"), new_topic(client, "bench-spark-tenth")
    fill(client, large, count)
    fill(client, small, max(TABLE_ROWS, count // 10))
    configs = {"spark.sql.shuffle.partitions": "4", "spark.sql.files.maxPartitionBytes": str(4 << 30)}
    with tempfile.TemporaryDirectory(prefix="rmqbs") as home:
        parquet = str(Path(home) / "rows.parquet")
        with spark_session("bench", executor_memory="1g", configs=configs) as session:
            read_topic(session, large, client=client).write.parquet(parquet)
            yield from reading(session, client, large, parquet, count, rounds)
            yield memory(session, client, small, large, count)
            yield from writing(session, client, int(WRITTEN * min(scale, 1.0)), rounds)
            yield from streaming(session, client, max(5.0, STREAM_S * min(scale, 1.0)), Path(home))
        yield ray_data(large, parquet, count, rounds)
        client.admin.delete_topic(large)
        client.admin.delete_topic(small)


def fill(client: raymq.Client, topic: str, count: int) -> None:
    """Send `count` incompressible messages of 1 KiB, each with one of four tags."""
    dice = np.random.default_rng(5)
    data = dice.integers(0, 256, TABLE_ROWS * BODY_BYTES, np.uint8)
    offsets = np.arange(0, data.nbytes + 1, BODY_BYTES, dtype=np.int32)
    bodies = pa.Array.from_buffers(pa.binary(), TABLE_ROWS, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    tags = pa.array([TAGS[index % len(TAGS)] for index in range(TABLE_ROWS)])
    with client.producer("bench") as producer:
        for _ in range(count // TABLE_ROWS):
            producer.send_table(topic, pa.table({"body": bodies, "tags": tags}))


# Measurements of reading


def reading(session: Any, client: raymq.Client, topic: str, parquet: str, count: int, rounds: int) -> Iterator[Figure]:
    """Yield the times and the processor times of three queries on the topic, each compared with the same query on the
    same rows in Parquet, and with the peer `bridge`. On Spark 4 the queries also run on ``format("raymq")``."""
    from raydp_jobs import read_topic, register_raymq

    def topic_columns(*columns: str) -> Any:
        return read_topic(session, topic, columns=list(columns), client=client)

    def format_columns(*columns: str) -> Any:
        return session.read.format("raymq").option("topic", topic).option("columns", ",".join(columns)).load()

    def parquet_columns(*columns: str) -> Any:
        return session.read.parquet(parquet).select(*columns)

    def counted(rows: Rows) -> None:
        check(sum(row["count"] for row in rows("tags").groupBy("tags").count().collect()), count)

    def projected(rows: Rows) -> None:
        drain(rows("queue_id", "queue_offset", "tags", "store_timestamp"))

    def whole(rows: Rows) -> None:
        drain(rows("queue_id", "queue_offset", "tags", "body"))

    ways = {"": topic_columns}
    if int(session.version.partition(".")[0]) >= 4:
        register_raymq(session, client=client)
        ways["format: "] = format_columns
    peers = {"parquet": parquet_columns, "bridge": ready_rows(session, count)}
    size = f"{count:,} x 1 KiB"
    queries: list[tuple[str, str, list[Goal], Query]] = [
        (f"count per tag of {size}", "s", [Goal("<=", 2, "parquet")], counted),
        (f"projection without body of {size}", "s", [Goal("<=", 1.2, "parquet")], projected),
        (f"with body, {size}, one core", "msg/s", [Goal(">=", 300_000)], whole),
    ]
    for way, columns in ways.items():
        for title, unit, goals, query in queries:
            figure = Figure(SECTION, way + title, unit, unit == "msg/s", goals)
            cpu = Figure(SECTION, f"{way}{title}: processor time", "s", False)
            query(columns)  # Run the query once without timing it, to load classes and connect the worker.
            for peer in peers.values():
                query(peer)
            for _ in range(rounds):
                ours, theirs = costs(query, columns), {name: costs(query, rows) for name, rows in peers.items()}
                per_s = unit == "msg/s"
                figure.ours.append(Sample(count / ours.wall_s if per_s else ours.wall_s))
                cpu.ours.append(Sample(ours.cpu_s))
                for name, one in theirs.items():
                    figure.peers.setdefault(name, []).append(Sample(count / one.wall_s if per_s else one.wall_s))
                    cpu.peers.setdefault(name, []).append(Sample(one.cpu_s))
            yield figure
            yield cpu


Rows = Callable[..., Any]
"""A function that returns a DataFrame with the given columns."""
Query = Callable[[Rows], None]


def ready_rows(session: Any, count: int) -> Rows:
    """Return the source of the peer `bridge`: Python workers pass `count` rows that they have already to Spark. A query
    on these rows costs what the way from Python to Spark costs. No source in Python can be cheaper."""
    from raydp_jobs.source.reader import spark_schema

    partitions, tags, body = 4, TAGS, bytes(BODY_BYTES)

    def columns_of(*columns: str) -> Any:
        size = 4_000 if "body" in columns else 32_000  # the rows of a batch of raymq

        def batches(rows: Any) -> Iterator[pa.RecordBatch]:
            numbers = np.arange(size)
            makers: dict[str, Callable[[], pa.Array]] = {
                "queue_id": lambda: pa.array(numbers.astype(np.int32)),
                "queue_offset": lambda: pa.array(numbers),
                "tags": lambda: pa.array(tags).take(pa.array(numbers % len(tags))),
                "store_timestamp": lambda: pa.array(numbers).cast(pa.timestamp("us", tz="UTC")),
                "body": lambda: pa.repeat(pa.scalar(body), size),
            }
            batch = pa.RecordBatch.from_arrays([makers[name]() for name in columns], names=list(columns))
            for _ in range(sum(row.num_rows for row in rows)):
                for first in range(0, count // partitions, size):
                    yield batch.slice(0, min(size, count // partitions - first))

        return session.range(0, partitions, 1, partitions).mapInArrow(batches, spark_schema(columns))

    return columns_of


class Costs(NamedTuple):
    """What a query has cost: seconds, and seconds of processor time of the executors and their Python workers."""

    wall_s: float
    cpu_s: float


def costs(query: Query, rows: Rows) -> Costs:
    """Run a query, and return what it has cost."""
    before_s = executors_cpu_s()
    wall_s = seconds(lambda: query(rows))
    return Costs(wall_s, executors_cpu_s() - before_s)


def executors_cpu_s() -> float:
    """Return the processor time of the executors and their Python workers so far, in s."""
    while True:
        try:
            found = [process for executor in executors() for process in (executor, *executor.children(recursive=True))]
            # The times of an ended worker are in the times of its parent.
            return sum(sum(process.cpu_times()[:4]) for process in found)
        except psutil.NoSuchProcess:
            continue  # A worker ended after the list of processes was taken.


def ray_data(topic: str, parquet: str, count: int, rounds: int) -> Figure:
    """Measure how fast Ray Data reads whole rows of the topic. The tasks that read the rows also count them, so no rows
    are transferred."""
    import ray.data

    import raymq.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def rows_per_s(dataset: Callable[[], Any]) -> float:
        def run() -> None:
            counts = dataset().map_batches(count_rows, batch_format="pyarrow", batch_size=None)
            check(sum(row["rows"] for row in counts.iter_rows()), count)

        return count / seconds(run)

    figure = Figure(SECTION, f"Ray Data, {count:,} x 1 KiB", "msg/s", True, [Goal(">=", 0.5, "parquet")])

    def ours() -> float:
        return rows_per_s(lambda: raymq.data.read_topic(topic))

    def theirs() -> float:
        return rows_per_s(lambda: ray.data.read_parquet(parquet))

    ours()  # Run each reader once without timing it, to start workers and import modules.
    theirs()
    for _ in range(rounds):
        figure.add_round(ours, {"parquet": theirs})
    return figure


def count_rows(batch: pa.Table) -> pa.Table:
    """Return a table with one row, the number of rows of a batch. The columns of the batch are not read."""
    return pa.table({"rows": [batch.num_rows]})


# Measurements of the executors' memory


def memory(session: Any, client: raymq.Client, small: str, large: str, count: int) -> Figure:
    """Measure the growth of the executors' peak memory: compare a read of the whole topic with a read of a tenth of the
    messages.

    The memory includes the executors' Python workers.
    """
    from raydp_jobs import read_topic

    def peak_mb(topic: str) -> float:
        with PeakMemory() as peak:
            drain(read_topic(session, topic, client=client))
        return peak.bytes / 1e6

    figure = Figure(
        SECTION, f"executor memory, {count:,} by a tenth, growth", "MB", False, [Goal("<=", MEMORY_GROWTH_MB)]
    )
    before = max(peak_mb(small) for _ in range(3))
    figure.add_round(lambda: max(0.0, peak_mb(large) - before), {})
    return figure


class PeakMemory:
    """Samples the private memory of the executors' JVMs and of their Python workers. `bytes`: the peak of the total.

    Private memory is resident memory without shared memory. A store's mapped files are shared memory: they belong to
    the page cache, not to the process that reads them.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        found = executors()
        while not self._stop.wait(0.05):
            self.bytes = max(self.bytes, sum(map(_private_bytes, found)))


def executors() -> list[psutil.Process]:
    """Return the JVMs of the executors that this program's Ray cluster runs."""
    return [process for process in psutil.Process().children(recursive=True) if _is_executor(process)]


def _is_executor(process: psutil.Process) -> bool:
    try:
        return process.name() == "java" and any("DefaultWorker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _private_bytes(executor: psutil.Process) -> int:
    total = 0
    try:
        for process in (executor, *executor.children(recursive=True)):
            info = process.memory_info()
            total += info.rss - info.shared
    except psutil.NoSuchProcess:
        pass  # Ignore a worker that ended while its memory was read.
    return total


# Measurements of Spark writing to topics, and of streaming queries


def writing(session: Any, client: raymq.Client, count: int, rounds: int) -> Iterator[Figure]:
    """Yield the speed of writing rows to a topic, compared with writing the same rows as Parquet. The executor
    generates the rows."""
    from pyspark.sql import functions as f

    from raydp_jobs import write_topic

    topic = new_topic(client, "bench-spark-written")
    rows = session.range(0, count, 1, 2).select(
        f.lit(bytes(os.urandom(BODY_BYTES))).alias("body"), f.lit("paid").alias("tags"), f.col("id")
    )

    def to_topic() -> float:
        return count / seconds(lambda: write_topic(rows.drop("id"), topic, client=client))

    def to_parquet() -> float:
        with tempfile.TemporaryDirectory(prefix="rmqbs") as home:
            return count / seconds(lambda: rows.write.parquet(str(Path(home) / "written")))

    figure = Figure(SECTION, "writing 1 KiB, one core", "msg/s", True, [Goal(">=", 100_000)])
    to_topic()
    for _ in range(rounds):
        figure.add_round(to_topic, {"parquet": to_parquet})
    yield figure
    client.admin.delete_topic(topic)


def streaming(session: Any, client: raymq.Client, length_s: float, home: Path) -> Iterator[Figure]:
    """Yield the measurements of a streaming query that reads 20,000 messages of 1 KiB a second.

    The measurements are the rate that the query sustains, and the age of the messages when the query has finished their
    batch.
    """
    from pyspark.sql import functions as f

    from raydp_jobs import stream_topic

    topic = new_topic(client, "bench-spark-stream")
    batches = list[Batch]()
    total = int(STREAM_PER_S * length_s)

    def take(batch: Any, _: int) -> None:
        born = f.percentile_approx(f.unix_millis("born_timestamp"), list(QUANTILES), 1000)
        [row] = batch.agg(f.count("*").alias("count"), born.alias("born")).collect()
        if row["count"]:
            now_s = time.time()
            batches.append(Batch(now_s, row["count"], [now_s - one / 1000 for one in row["born"]]))

    frame = stream_topic(session, topic, starting_offsets="earliest", client=client)
    checkpoint = str(home / "checkpoint")
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint).start()
    with workers(1) as [worker]:
        warm = int(STREAM_PER_S * 3)
        ray.get(worker.flow.remote(topic, BODY_BYTES, STREAM_PER_S, 3.0), timeout=PATIENCE_S)
        await_count(batches, warm, query)
        batches.clear()
        sending = worker.flow.remote(topic, BODY_BYTES, STREAM_PER_S, length_s)
        await_count(batches, total, query)
        ray.get(sending, timeout=PATIENCE_S)
    query.stop()
    first, span_s = batches[0], batches[-1].done_s - batches[0].done_s
    name = f"stream of {STREAM_PER_S:,} x 1 KiB a second"
    held = Figure(SECTION, f"{name}: done a second", "msg/s", True, [Goal(">=", 0.95 * STREAM_PER_S)])
    held.add_round(lambda: (total - first.count) / span_s if span_s else 0.0, {})
    yield held
    ages = sorted((age, batch.count / len(QUANTILES)) for batch in batches for age in batch.ages_s)
    so_far = accumulate(weight for _, weight in ages)
    median_s = next(age for (age, _), weight in zip(ages, so_far, strict=True) if weight >= total / 2)
    late = Figure(SECTION, f"{name}: end to end, p50", "s", False, [Goal("<=", 2)])
    late.add_round(lambda: median_s, {})
    yield late
    client.admin.delete_topic(topic)


class Batch(NamedTuple):
    """A finished batch of a streaming query: its end time in s since 1970, its number of messages, and the QUANTILES of
    the messages' age at the end time."""

    done_s: float
    count: int
    ages_s: list[float]


def await_count(batches: list[Batch], count: int, query: Any) -> None:
    """Wait until the finished batches have `count` messages in all. Raises the query's error if the query fails, and
    TimeoutError after PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    while sum(batch.count for batch in batches) < count:
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline_s:
            done = sum(batch.count for batch in batches)
            raise TimeoutError(f"{done:,} of {count:,} messages after {PATIENCE_S:.0f} s")
        time.sleep(0.02)


def drain(rows: Any) -> None:
    """Make Spark compute every column of every row, and discard the rows."""
    rows.write.format("noop").mode("overwrite").save()


def check(found: Any, expected: int) -> None:
    """Raise AssertionError unless `found` (a number of rows) equals `expected`."""
    if found != expected:
        raise AssertionError(f"{found:,} rows instead of {expected:,}")


def seconds(run: Callable[[], Any]) -> float:
    """Call `run` and return how long the call took, in s."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
