"""Tests of the writers of a Spark 4 session, without Spark 4: what identifies a row, when the topic's queues are looked
up, and what a repeated batch keeps. Fakes replace Spark's modules, the tasks and the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from raydp_jobs.data_source.options import batch_write_options, stream_write_options
from raydp_jobs.sink.partitions import BATCH_ID, QUERY_ID, ResultRow
from raydp_jobs.worker_client import ClusterAddress
from raymq.common.errors import ClientStateError, InvalidArgumentError, MessageIllegalError
from raymq.common.message import MessageQueue
from tests.support.spark.fake_spark4 import in_task, with_fake_spark4

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

ADDRESS = ClusterAddress("10.0.0.1:6379", None, "team")
BODY = StructField("body", BinaryType())
SCHEMA = StructType([BODY])
ROWS = [pa.RecordBatch.from_pylist([{"body": b"%d" % number} for number in range(50)])]


class Cluster:
    """Fake of the cluster, of its connections and of the tasks' writes to it."""

    def __init__(self) -> None:
        self.queues, self.connects = 4, 0
        self.writes: list[Any] = []
        self.rows: list[bytes] = []

    def connect(self, address: str, *, namespace: str) -> Cluster:
        assert (address, namespace) == (ADDRESS.address, ADDRESS.namespace)
        self.connects += 1
        return self

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def write_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return tuple(MessageQueue(topic, "broker-a", number) for number in range(self.queues))

    def task_write(self, writers: Any, query: str, batch: int, first_queue: int) -> Any:
        self.writes.append(SimpleNamespace(writers=writers, query=query, batch=batch, first_queue=first_queue))

        def write(rows: Iterable[pa.RecordBatch]) -> list[ResultRow]:
            self.rows = [row["body"] for batch in rows for row in batch.to_pylist()]
            return [ResultRow(rows=len(self.rows), stored_before=0)]

        return SimpleNamespace(write=write)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Iterator[Any]:
    """Return the module of the writers, with empty classes in place of Spark 4's classes."""
    with with_fake_spark4(monkeypatch, "topic_writers") as [topic_writers]:
        monkeypatch.setattr(topic_writers, "connect", cluster.connect)
        monkeypatch.setattr(topic_writers, "TaskWrite", cluster.task_write)
        yield topic_writers


def stream_writer(module: Any, **options: str) -> Any:
    given = stream_write_options({"topic": "orders", **options})
    return module.TopicStreamWriter(module.row_write(ADDRESS, SCHEMA, False, given))


def batch_writer(module: Any, **options: str) -> Any:
    given = batch_write_options({"topic": "orders", **options})
    return module.TopicBatchWriter(module.row_write(ADDRESS, SCHEMA, False, given))


def test_a_stream_looks_queues_up_when_its_writer_is_pickled_and_not_to_commit(module: Any, cluster: Cluster) -> None:
    writer = stream_writer(module)
    assert cluster.connects == 0
    writer.commit([module.TaskRows([ResultRow(rows=1, stored_before=0)]), None], 7)
    assert cluster.connects == 0
    writer.__getstate__()
    cluster.queues = 5
    assert len(writer.__getstate__()["_plan"].queues) == 4
    assert cluster.connects == 1


def test_the_rows_of_a_stream_are_identified_by_its_query_and_batch(
    module: Any, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for query, batch in (("q1", "7"), ("q1", "7"), ("q1", "8"), ("q2", "7")):
        writer = stream_writer(module)
        writer.__getstate__()
        in_task(monkeypatch, module, **{QUERY_ID: query, BATCH_ID: batch})
        writer.write(iter(ROWS))
    first, again, later, other = cluster.writes
    assert (first.query, first.batch, first.first_queue) == (again.query, again.batch, again.first_queue)
    assert (first.batch, first.first_queue) == (7, 3)
    assert (later.query, later.batch, later.first_queue) == (first.query, 8, 0)
    assert (other.query != first.query, other.batch) == (True, 7)
    assert first.writers.now_ms is None, "a repeat would have another time"
    assert first.writers.address is ADDRESS


@pytest.mark.parametrize("properties", [{}, {QUERY_ID: "q1"}, {BATCH_ID: "7"}])
def test_a_stream_without_an_identity_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch, properties: dict[str, str]
) -> None:
    writer = stream_writer(module)
    writer.__getstate__()
    in_task(monkeypatch, module, **properties)
    with pytest.raises(ClientStateError, match="write in foreachBatch"):
        writer.write(iter(ROWS))


def test_a_repeated_batch_keeps_the_plan_in_its_place(
    module: Any, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for queues, batch in ((4, "7"), (6, "7"), (6, "8")):
        cluster.queues = queues
        writer = stream_writer(module, plan_location=str(tmp_path))
        writer.__getstate__()
        in_task(monkeypatch, module, **{QUERY_ID: "q1", BATCH_ID: batch})
        writer.write(iter(ROWS))
    first, again, later = cluster.writes
    assert first.writers == again.writers
    assert (first.first_queue, again.first_queue) == (3, 3)
    assert first.writers.now_ms is not None
    assert (len(later.writers.queues), later.first_queue) == (6, 2)


def test_a_batch_is_identified_by_its_write_id(module: Any, cluster: Cluster, tmp_path: Path) -> None:
    names: list[dict[str, str]] = [{"write_id": "w"}, {"write_id": "w"}, {"write_id": "v"}, {}, {}]
    for options in names:
        batch_writer(module, **options).write(iter(ROWS))
    first, again, other, alone, new = cluster.writes
    assert (first.query, first.batch, first.writers) == (again.query, again.batch, again.writers)
    assert (first.first_queue, first.writers.now_ms) == (0, None)
    assert len({one.query for one in cluster.writes}) == 4
    assert other.query not in (first.query, alone.query, new.query)
    assert alone.writers.now_ms is not None
    for queues in (4, 6):
        cluster.queues = queues
        batch_writer(module, write_id="w", plan_location=f"file:{tmp_path}").write(iter(ROWS))
    planned, repeated = cluster.writes[-2:]
    assert (planned.writers, planned.first_queue) == (repeated.writers, repeated.first_queue)
    assert planned.query == first.query


@pytest.mark.parametrize("sort", ["auto", "always", "never"])
def test_rows_are_ordered_by_their_content_unless_the_order_is_fixed(module: Any, cluster: Cluster, sort: str) -> None:
    given = [row["body"] for row in ROWS[0].to_pylist()]
    found = []
    for rows in (ROWS, [ROWS[0].take(list(reversed(range(50))))]):
        batch_writer(module, sort=sort).write(iter(rows))
        found.append(cluster.rows)
    assert found == [given, given[::-1]] if sort == "never" else found[0] == found[1] != given
    assert sorted(found[0]) == sorted(given)


def test_settings_of_the_producers_reach_the_tasks(module: Any, cluster: Cluster) -> None:
    batch_writer(module, send_timeout_s="7", max_buffered_bytes="1000000").write(iter(ROWS))
    assert cluster.writes[0].writers.settings == {"send_timeout_s": 7.0, "max_buffered_bytes": 1_000_000}


def test_the_error_of_a_task_is_raised_by_the_commit(module: Any) -> None:
    good = module.TaskRows([ResultRow(rows=5, stored_before=1)])
    bad = module.TaskRows([ResultRow(error="partition 1: too large", error_kind="MessageIllegalError")])
    batch_writer(module).commit([good, None])
    with pytest.raises(MessageIllegalError, match="partition 1: too large"):
        batch_writer(module).commit([good, bad])
    with pytest.raises(MessageIllegalError, match="partition 1: too large"):
        stream_writer(module).commit([bad, good], 3)


def test_another_mode_and_an_unknown_order_are_refused(module: Any) -> None:
    options = batch_write_options({"topic": "orders"})
    with pytest.raises(InvalidArgumentError, match="only appends"):
        module.row_write(ADDRESS, SCHEMA, True, options)
    keyed = StructType([BODY, StructField("sharding_key", LongType())])
    with pytest.raises(InvalidArgumentError, match=r'"sort", "never"'):
        module.row_write(ADDRESS, keyed, False, options)
    for sort, sorts in (("never", False), ("always", True)):
        assert module.row_write(ADDRESS, keyed, False, {**options, "sort": sort}).sorts is sorts
    with pytest.raises(InvalidArgumentError, match="'body' is missing"):
        module.row_write(ADDRESS, StructType([]), False, options)


def test_the_first_directory_of_spark_that_exists_takes_temporary_files(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(module.SPOOL_VARIABLE, f"/no/such,{tmp_path},/tmp")
    assert module._spool_directory() == str(tmp_path)
    monkeypatch.delenv(module.SPOOL_VARIABLE)
    assert module._spool_directory() is None
