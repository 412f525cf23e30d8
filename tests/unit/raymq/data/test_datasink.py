"""Tests of the Ray Data datasink in the driver and in its tasks, without Ray. A fake replaces the cluster and records
the arguments of the writers."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pandas as pd
import pyarrow as pa
import pytest
from ray.data import Dataset
from ray.data._internal.execution.interfaces import TaskContext
from ray.data._internal.planner.plan_write_op import WRITE_UUID_KWARG_NAME
from ray.data.datasource.datasink import Datasink, WriteResult

from raymq.client.producer.table import QueueRange
from raymq.common.errors import IllegalNameError, InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.namespaces import NO_NAMESPACE
from raymq.data import datasink as module
from raymq.data.datasink import TopicDatasink, WriteSummary, write_topic

QUEUES = tuple(MessageQueue("orders", "broker-a", number) for number in range(3))


class FakeCluster:
    """Fake cluster that replaces driver_client and worker_client. `writers`: the arguments of each writer. `tables`:
    the rows that each writer received."""

    def __init__(self) -> None:
        self.names = NO_NAMESPACE
        self.queues = QUEUES
        self.writers: list[dict[str, Any]] = []
        self.tables: list[pa.Table] = []
        self.closed = 0
        self.failure: Exception | None = None

    @contextmanager
    def client(self, address: object = None, namespace: str | None = None) -> Iterator[FakeCluster]:
        yield self

    def write_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return self.queues

    @contextmanager
    def repeatable_writer(self, topic: str, **options: Any) -> Iterator[Any]:
        self.writers.append({"topic": topic, **options})
        try:
            yield SimpleNamespace(write=self.write, finish=self.finish)
        finally:
            self.closed += 1

    def write(self, table: pa.Table) -> None:
        if self.failure:
            raise self.failure
        self.tables.append(table)

    def finish(self) -> Any:
        rows = sum(table.num_rows for table in self.tables)
        return SimpleNamespace(count=rows, stored_before=1, ranges=(QueueRange(QUEUES[0], 5, rows - 1),))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(module, "driver_client", fake.client)
    monkeypatch.setattr(module, "worker_client", lambda: SimpleNamespace(use=fake.client))
    return fake


def context(task_idx: int = 4, write_id: str = "w" * 32) -> TaskContext:
    return TaskContext(task_idx=task_idx, op_name="Write", kwargs={WRITE_UUID_KWARG_NAME: write_id})


BLOCKS: list[Any] = [pa.table({"x": ["a", "b"]}), pd.DataFrame({"x": ["c"]}), pa.table({}), pa.table({"x": ["d"]})]


def test_a_task_writes_its_rows_in_order_under_its_own_identity(cluster: FakeCluster) -> None:
    sink = TopicDatasink("orders", body_field="x")
    sink.on_write_start(pa.schema([("x", pa.string())]))
    summary = pickle.loads(cloudpickle.dumps(sink)).write(iter(BLOCKS), context())
    assert [body for table in cluster.tables for body in table["body"].to_pylist()] == ["a", "b", "c", "d"]
    [writer] = cluster.writers
    assert (writer["topic"], writer["producer_id"]) == ("orders", f"ray-data/{'w' * 32}/4")
    assert writer["queues"] == QUEUES
    assert len(f"{'g' * module.GROUP_MAX_BYTES}/{'w' * 32}/{10**9}".encode()) <= 64
    assert summary == WriteSummary(4, 1, (QueueRange(QUEUES[0], 5, 3),))
    assert cluster.closed == 1


def test_the_tasks_of_a_write_begin_with_different_queues_and_writes_do_too(cluster: FakeCluster) -> None:
    first_queues = set()
    for _ in range(100):
        sink = TopicDatasink("orders", body_field="x")
        cluster.writers.clear()
        for task_idx in range(3):
            pickle.loads(cloudpickle.dumps(sink)).write(iter(BLOCKS), context(task_idx))
        of_tasks = [writer["first_queue"] for writer in cluster.writers]
        assert sorted(of_tasks) == [0, 1, 2]
        first_queues.add(of_tasks[0])
    assert first_queues == {0, 1, 2}


def test_a_retried_task_has_the_same_values(cluster: FakeCluster) -> None:
    sink = TopicDatasink("orders", body_field="x")
    sink.on_write_start()
    shipped = cloudpickle.dumps(sink)
    for _ in range(2):
        pickle.loads(shipped).write(iter(BLOCKS), context())
    # the topic's list of queues becomes shorter after `on_write_start`; a retried write task must not change its queues
    cluster.queues = QUEUES[:2]
    pickle.loads(shipped).write(iter(BLOCKS), context())
    first, second, third = cluster.writers
    assert first == second == third


def test_tasks_and_writes_differ(cluster: FakeCluster) -> None:
    sink = TopicDatasink("orders", body_field="x")
    for task_idx, write_id in ((0, "v"), (1, "v"), (0, "w")):
        sink.write(iter(BLOCKS), context(task_idx, write_id))
    assert len({writer["producer_id"] for writer in cluster.writers}) == 3


def test_without_idempotence_each_attempt_is_another_producer(cluster: FakeCluster) -> None:
    sink = TopicDatasink("orders", body_field="x", idempotent=False)
    for _ in range(2):
        sink.write(iter(BLOCKS), context())
    first, second = cluster.writers
    assert first["producer_id"] != second["producer_id"]
    assert "w" * 32 not in first["producer_id"]


def test_a_failure_closes_the_writer(cluster: FakeCluster) -> None:
    cluster.failure = ServiceNotAvailableError("away")
    with pytest.raises(ServiceNotAvailableError):
        TopicDatasink("orders", body_field="x").write(iter(BLOCKS), context())
    assert cluster.closed == 1


def test_each_start_checks_the_fields_and_looks_up_the_queues(cluster: FakeCluster) -> None:
    sink = TopicDatasink("orders", body_field="y")
    with pytest.raises(InvalidArgumentError, match="body_field='y'; their fields are x"):
        sink.on_write_start(pa.schema([("x", pa.string())]))
    sink.on_write_start(pa.schema([]))  # Ray Data passes an empty schema if the dataset's columns are not known yet
    with pytest.raises(InvalidArgumentError, match="body_field='y'"):
        sink.write(iter(BLOCKS), context())
    cluster.queues = QUEUES[:1]
    sink.on_write_start()
    with pytest.raises(InvalidArgumentError):
        sink.write(iter(BLOCKS), context())
    assert cluster.writers[-1]["queues"] == QUEUES[:1]


def test_results_are_added_up(cluster: FakeCluster) -> None:
    sink = TopicDatasink("orders")
    a, b, _ = QUEUES
    parts = [
        WriteSummary(5, 1, (QueueRange(a, 10, 2), QueueRange(b, 0, 2))),
        WriteSummary(3, 0, (QueueRange(a, 7, 3),)),
        WriteSummary(1, 0, (QueueRange(a, 20, 1),)),
    ]
    sink.on_write_complete(WriteResult(9, 0, parts))
    assert sink.summary == WriteSummary(9, 1, (QueueRange(a, 7, 5), QueueRange(a, 20, 1), QueueRange(b, 0, 2)))
    sink.on_write_complete(WriteResult(0, 0, []))
    assert sink.summary == WriteSummary(0, 0, ())


def test_options_that_make_no_sense_are_refused(cluster: FakeCluster) -> None:
    with pytest.raises(IllegalNameError):
        TopicDatasink("or ders")
    with pytest.raises(InvalidArgumentError, match="at most 20 bytes"):
        TopicDatasink("orders", producer_group="g" * 21)


def test_the_interface_is_that_of_this_ray() -> None:
    for name in ("on_write_start", "write", "on_write_complete"):
        theirs, ours = (inspect.signature(getattr(one, name)) for one in (Datasink, TopicDatasink))
        assert list(theirs.parameters) == list(ours.parameters), name
    instance = TopicDatasink.__new__(TopicDatasink)
    assert (instance.get_name(), instance.supports_distributed_writes) == ("Topic", True)


def test_the_options_match_write_kafka_plus_raymqs_own() -> None:
    theirs = set(inspect.signature(Dataset.write_kafka).parameters)
    ours = set(inspect.signature(write_topic).parameters)
    assert theirs - ours == {"self", "bootstrap_servers", "producer_config"}
    assert ours - theirs == {
        *("dataset", "address", "body_field", "tags_field", "keys_field", "properties_field", "sharding_key_field"),
        *("deliver_at_field", "producer_group", "idempotent", "namespace"),
    }
