"""Tests of the plan and of the read tasks of the Ray Data datasource, without Ray. A fake replaces the cluster behind
the client."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import ray.data
from ray.data import DataContext
from ray.data.datasource import Datasource, ReadTask

from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import DataLossError, InvalidArgumentError, RequestTimeoutError
from raymq.common.message import MessageQueue
from raymq.common.namespaces import NO_NAMESPACE
from raymq.data import datasource as module
from raymq.data.columns import SCHEMA
from raymq.data.datasource import TopicDatasource
from raymq.data.reading import read_topic
from raymq.records.kernels.columns import schema_with
from tests.unit.raymq.data.fake_source import FakeSource

# Ignore deprecation warnings that Ray itself raises.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning:ray.data.context")

QUEUES = {
    MessageQueue("orders", "broker-a", 0): (0, 1000),
    MessageQueue("orders", "broker-a", 1): (100, 300),
    MessageQueue("orders", "broker-b", 0): (0, 50),
}
ROWS = 1250
BATCH_ROWS = 64
BODY = b"x" * 1000


class FakeCluster:
    """Fake cluster that replaces driver_client, worker_client and open_ranges. `read`: for each read, the columns that
    it requested."""

    def __init__(self) -> None:
        self.names = NO_NAMESPACE
        self.bounds = dict(QUEUES)
        self.read: list[list[str]] = []
        self.creations: list[object] = []
        self.gone = range(0)
        self.routes = self.storages = self
        self.clients = 0

    @contextmanager
    def client(self, address: object = None, namespace: str | None = None) -> Iterator[FakeCluster]:
        self.clients += 1
        yield self

    def open_ranges(
        self, routes: Any, storages: Any, ranges: list[OffsetRange], *, columns: list[str], tags: Any, **more: Any
    ) -> Iterator[pa.RecordBatch]:
        self.read.append(columns)
        self.creations.append(more["creations"])
        for one in ranges:
            for first in range(one.start_offset, one.end_offset, BATCH_ROWS):
                last = min(one.end_offset, first + BATCH_ROWS)
                if set(range(first, last)) & set(self.gone):
                    raise DataLossError(f"{one.queue}: gone")
                batch = _batch(one, first, last)
                yield (
                    batch.filter(pa.compute.is_in(batch["tags"], value_set=pa.array(sorted(tags)))).select(columns)
                    if tags
                    else batch.select(columns)
                )


def _batch(one: OffsetRange, first: int, last: int) -> pa.RecordBatch:
    count = last - first
    values: dict[str, Any] = {
        "topic": [one.topic] * count,
        "broker_name": [one.broker_name] * count,
        "queue_id": [one.queue_id] * count,
        "queue_offset": range(first, last),
        "tags": ["late" if offset % 2 else "paid" for offset in range(first, last)],
        "keys": [[]] * count,
        "body": [BODY] * count,
        "properties": [[]] * count,
        "born_timestamp": [1_600_000_000_000] * count,
        "store_timestamp": [1_700_000_000_000] * count,
        "message_id": [f"{offset:032X}" for offset in range(first, last)],
    }
    schema = schema_with("binary")
    arrays = [pa.array(values[field.name], field.type) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return batch.append_column("reconsume_times", pa.array([0] * count, pa.int32()))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(module, "driver_client", fake.client)
    monkeypatch.setattr(module, "worker_client", lambda: SimpleNamespace(use=fake.client))
    monkeypatch.setattr(module, "open_ranges", fake.open_ranges)
    monkeypatch.setattr(module, "ClusterQueues", lambda routes, storages, names: FakeSource(fake.bounds))
    return fake


def blocks_of(tasks: list[ReadTask]) -> list[pa.Table]:
    return [block for task in tasks for block in task()]


def offsets_of(tasks: list[ReadTask]) -> list[tuple[str, int, int]]:
    rows = pa.concat_tables(blocks_of(tasks)).select(["broker_name", "partition", "offset"])
    return sorted(tuple(row.values()) for row in rows.to_pylist())


EVERYTHING = sorted(
    (queue.broker_name, queue.queue_id, offset) for queue, bounds in QUEUES.items() for offset in range(*bounds)
)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7, 2000])
def test_the_tasks_read_each_message_once_whatever_their_number(cluster: FakeCluster, parallelism: int) -> None:
    tasks = TopicDatasource("orders").get_read_tasks(parallelism)
    assert len(tasks) <= parallelism
    assert offsets_of(tasks) == EVERYTHING
    assert sum(task.metadata.num_rows for task in tasks) == ROWS
    assert all(task.schema == SCHEMA for task in tasks)


@pytest.mark.parametrize("options", [{}, {"columns": ["tags", "offset"]}])
def test_an_empty_topic_has_its_columns(cluster: FakeCluster, options: dict[str, Any]) -> None:
    cluster.bounds = dict.fromkeys(QUEUES, (7, 7))
    source = TopicDatasource("orders", **options)
    tasks = source.get_read_tasks(3)
    [block] = blocks_of(tasks)
    assert (block.num_rows, block.column_names) == (0, options.get("columns", SCHEMA.names))
    assert tasks[0].schema == block.schema
    assert (tasks[0].metadata.num_rows, source.estimate_inmemory_data_size()) == (0, 0)
    assert cluster.clients == 1, "the task connects to a cluster from which it reads nothing"


def test_a_read_whose_filter_matches_nothing_has_its_columns(cluster: FakeCluster) -> None:
    tables = blocks_of(TopicDatasource("orders", tags="gone").get_read_tasks(2))
    assert pa.concat_tables(tables).schema.names == SCHEMA.names
    assert sum(table.num_rows for table in tables) == 0


def test_the_ranges_are_fixed_when_the_datasource_is_made(cluster: FakeCluster) -> None:
    source = TopicDatasource("orders")
    cluster.bounds = {queue: (low, high + 500) for queue, (low, high) in QUEUES.items()}
    assert offsets_of(source.get_read_tasks(4)) == offsets_of(source.get_read_tasks(4)) == EVERYTHING
    assert len(offsets_of(TopicDatasource("orders").get_read_tasks(4))) == ROWS + 1500


def test_tasks_check_that_topics_were_not_recreated(cluster: FakeCluster) -> None:
    blocks_of(TopicDatasource("orders").get_read_tasks(2))
    assert cluster.creations == [{"orders": {queue.broker_name: "1" for queue in QUEUES}}] * 2


def test_planning_connects_once_and_tasks_do_not_plan(cluster: FakeCluster) -> None:
    source = TopicDatasource("orders")
    source.get_read_tasks(1)
    tasks = source.get_read_tasks(2)
    assert cluster.clients == 1
    blocks_of(tasks)
    assert cluster.clients == 3


def test_a_projection_reads_no_bodies(cluster: FakeCluster) -> None:
    source = TopicDatasource("orders")
    assert source.supports_projection_pushdown()
    pruned = source.apply_projection({"tags": "tags", "offset": "offset"})
    [table, *_] = blocks_of(pruned.get_read_tasks(1))
    assert table.column_names == ["tags", "offset"]
    assert cluster.read == [["queue_offset", "tags"]]
    assert pruned.estimate_inmemory_data_size() < source.estimate_inmemory_data_size()
    [counted, *_] = blocks_of(source.apply_projection({}).get_read_tasks(1))
    assert counted.num_rows == ROWS
    assert source.get_projection_map() is None  # `apply_projection` did not change the original datasource


def test_a_projection_keeps_within_the_columns_that_were_asked_for(cluster: FakeCluster) -> None:
    source = TopicDatasource("orders", columns=["offset", "value"])
    assert blocks_of(source.get_read_tasks(1))[0].column_names == ["offset", "value"]
    assert blocks_of(source.apply_projection({"offset": "offset"}).get_read_tasks(1))[0].column_names == ["offset"]


def test_blocks_have_about_the_context_s_size_and_at_most_so_many_rows(cluster: FakeCluster) -> None:
    context = DataContext()
    context.target_max_block_size = 200_000
    batch_bytes = BATCH_ROWS * 1200
    sizes = [table.nbytes for table in blocks_of(TopicDatasource("orders").get_read_tasks(1, data_context=context))]
    assert len(sizes) > 4
    assert max(sizes) < 200_000 + batch_bytes
    assert min(sizes[:-1]) >= 200_000
    tasks = TopicDatasource("orders", rows_per_block=100).get_read_tasks(2)
    assert offsets_of(tasks) == EVERYTHING
    rows = [task.metadata.num_rows for task in tasks]
    assert (max(rows), sum(rows), len(rows)) == (100, ROWS, 14)


def test_a_limit_on_the_rows_of_a_task_is_kept(cluster: FakeCluster) -> None:
    tasks = TopicDatasource("orders").get_read_tasks(3, per_task_row_limit=5)
    assert [sum(block.num_rows for block in task()) for task in tasks] == [5, 5, 5]


def test_tags_filter_and_the_number_of_rows_is_not_promised(cluster: FakeCluster) -> None:
    tasks = TopicDatasource("orders", tags="paid || gone").get_read_tasks(2)
    assert [task.metadata.num_rows for task in tasks] == [None, None]
    found = offsets_of(tasks)
    assert found == [place for place in EVERYTHING if place[2] % 2 == 0]


def test_messages_that_are_gone_fail_the_task(cluster: FakeCluster) -> None:
    tasks = TopicDatasource("orders").get_read_tasks(1)
    cluster.gone = range(40, 50)
    with pytest.raises(DataLossError):
        blocks_of(tasks)
    lenient = TopicDatasource("orders", fail_on_data_loss=False).get_read_tasks(1)
    assert lenient[0].metadata.num_rows is None


def test_a_task_that_takes_too_long_fails(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    [task] = TopicDatasource("orders", timeout_ms=60_000).get_read_tasks(1)
    assert len(pa.concat_tables(list(task()))) == ROWS
    times = iter([0.0, 30.0, 61.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with pytest.raises(RequestTimeoutError):
        list(task())


def test_datasource_and_tasks_travel(cluster: FakeCluster) -> None:
    source = TopicDatasource("orders", tags="paid")
    again = pickle.loads(cloudpickle.dumps(source))
    assert again.ranges == source.ranges
    task = source.get_read_tasks(4)[0]
    assert len(cloudpickle.dumps(task)) < 5000


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["body"]},
        {"columns": "offset"},
        {"columns": ["offset", "offset"]},
        {"rows_per_block": 0},
        {"timeout_ms": -1},
        {"tags": " || "},
        {"topics": []},
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_read(
    cluster: FakeCluster, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError):
        TopicDatasource(**{"topics": "orders", **options})


def test_the_interface_is_that_of_this_ray() -> None:
    assert issubclass(TopicDatasource, Datasource)
    for name in ("get_read_tasks", "estimate_inmemory_data_size", "supports_projection_pushdown"):
        theirs, ours = (inspect.signature(getattr(one, name)) for one in (Datasource, TopicDatasource))
        assert list(theirs.parameters) == list(ours.parameters), name
    instance = TopicDatasource.__new__(TopicDatasource)
    assert not instance.should_create_reader
    assert instance.get_name() == "Topic"


def test_the_options_match_read_kafka_plus_raymqs_own() -> None:
    theirs = list(inspect.signature(ray.data.read_kafka).parameters)
    ours = list(inspect.signature(read_topic).parameters)
    kafka_s_own = {"bootstrap_servers", "kafka_auth_config", "consumer_config", "ray_remote_args"}
    assert [name for name in theirs if name not in ours] == [name for name in theirs if name in kafka_s_own]
    assert [name for name in ours if name not in theirs] == [
        "address",
        "tags",
        "expression",
        "columns",
        "fail_on_data_loss",
        "unreadable",
        "rows_per_block",
        "namespace",
    ]
    assert [name for name in theirs if name in ours] == [name for name in ours if name in theirs]


def test_only_one_trigger_is_known() -> None:
    with pytest.raises(InvalidArgumentError, match="iter_topic"):
        read_topic("orders", trigger="continuous")  # type: ignore[arg-type]  # that is the point
    assert time.monotonic()
