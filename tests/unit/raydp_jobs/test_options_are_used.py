"""Tests that each option of the reads and writes of Spark and Ray Data reaches the part that applies it.

test_options_have_effect.py tests the options of scans, streams and jobs, and that all other options are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import raymq
from raydp_jobs.sink import writer
from raydp_jobs.source import reader
from raymq.client.producer.settings import ProducerOptions
from raymq.client.scan.ranges import OffsetRange, ScanOptions
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue
from raymq.data import datasink, datasource, iterating, reading
from raymq.records.format.compression import Compression, CompressionType
from tests.support.clients.scan_source import T0_MS, Queues
from tests.unit.raydp_jobs.test_options_have_effect import FRAME, ONE_QUEUE, SCAN_VALUES, SPARK, options_of

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

Run = Callable[..., Any]
SQL = raymq.sql("price > 5")
TOPICS = ["orders", "orders-eu"]
BATCH = pa.RecordBatch.from_pydict({"index": pa.array([0])})


def client_named(name: str) -> Any:
    return SimpleNamespace(
        name=name, routes=name, storages=name, names=SimpleNamespace(name=name), write_queues=lambda topic: QUEUES
    )


QUEUES = (MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-a", 1))
CONNECTED, GIVEN = client_named("connected"), client_named("given")


class Recorder:
    """Records what an entry point passes to the parts that apply its options, instead of calling them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def replacing(self, value: Any = None) -> Run:
        """Return a function that records its arguments and returns `value`."""

        def call(*arguments: Any, **options: Any) -> Any:
            self.seen.append((arguments, options))
            return value

        return call

    def connecting(self) -> Run:
        """Return a function in place of `connect`: it records its arguments, and is a `with` block of a client."""

        @contextmanager
        def connect(*arguments: Any, **options: Any) -> Iterator[Any]:
            self.seen.append((arguments, options))
            yield CONNECTED

        return connect

    def queues(self) -> Run:
        """Return a function that records for which client a scan is planned, and returns a fake of its topics."""

        def source(*client: Any) -> Queues:
            self.seen.append(client)
            return Queues(ONE_QUEUE, topics=TOPICS)

        return source


def spark_read(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Run `read_topic` of Spark with these options, and the read of its first partition. Return all that they used."""
    recorder = Recorder()
    patch.setattr(reader, "ClusterQueues", recorder.queues())
    patch.setattr(reader, "connect", recorder.connecting())
    patch.setattr(reader, "NamespacedRoutes", recorder.replacing())
    patch.setattr(Queues, "creations", lambda self, topics: {}, raising=False)
    patch.setattr(reader, "preferred_hosts", lambda routes, partitions: recorder.seen.append(list(partitions)))
    patch.setattr(reader, "address_of_cluster", lambda client: client.name)
    patch.setattr(reader, "count_losses", lambda spark: SimpleNamespace(add=None))

    def read_ranges(chosen: Any, *arguments: Any, **more: Any) -> list[Any]:
        described = [one for one in arguments if not callable(one)]
        recorder.seen.append((list(chosen), described, more))
        return []

    def in_arrow(read: Run, schema: Any) -> str:
        recorder.seen.append(schema.names)
        list(read([BATCH]))
        return "frame"

    patch.setattr(reader, "read_ranges", read_ranges)
    patch.setattr(reader, "numbered_partitions", lambda spark, hosts: SimpleNamespace(mapInArrow=in_arrow))
    topic = None if "topic_pattern" in options else "orders"
    reader.read_topic(SPARK, topic, **options)
    return recorder.seen


def spark_write(patch: pytest.MonkeyPatch, run: Run, **options: Any) -> Any:
    """Run `write_topic` or a batch of `topic_sink`. Return all that the write used."""
    recorder = Recorder()
    patch.setattr(writer.uuid, "uuid4", lambda: SimpleNamespace(hex="random"))
    patch.setattr(writer.secrets, "randbelow", lambda below: 1)
    patch.setattr(writer.time, "time_ns", lambda: T0_MS * 1_000_000)
    patch.setattr("raydp_jobs.sink.partitions.connect", recorder.connecting())
    patch.setattr("raydp_jobs.sink.partitions.address_of_cluster", lambda client: client.name)
    patch.setattr(writer, "_collect", recorder.replacing(SimpleNamespace(rows=1)))
    patch.setattr(writer, "check_columns", lambda frame: None)
    patch.setattr(writer, "partitions_of", lambda frame: 2)
    patch.setattr(writer, "_present_query", lambda frame: ("query", f"run-{next(RUNS)}"))
    patch.setattr(writer, "_checkpoint_of", lambda query: "/checkpoint")

    def in_fixed_order(frame: Any, sort: str) -> Any:
        recorder.seen.append(sort)
        return SimpleNamespace(
            mapInArrow=lambda task, schema: getattr(task, "func", task), sparkSession=None, isStreaming=False
        )

    def plan_files(spark: Any, place: str) -> Any:
        recorder.seen.append(place)
        return SimpleNamespace(fix=lambda topic, batch, plan: plan)

    patch.setattr(writer, "in_fixed_order", in_fixed_order)
    patch.setattr(writer, "PlanFiles", plan_files)
    told: list[Any] = []
    run(told, **options)
    return recorder.seen, told


RUNS = itertools.count()


def one_write(told: list[Any], **options: Any) -> None:
    writer.write_topic(FRAME, "orders", **options)


def one_batch(told: list[Any], **options: Any) -> None:
    if "on_batch" in options:
        options["on_batch"] = lambda *arguments: told.append(arguments)
    writer.topic_sink("orders", **options)(FRAME, 3)


def ray_source(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Make a TopicDatasource. Return its plan, its options, and how it connected."""
    recorder = Recorder()
    patch.setattr(datasource, "driver_client", recorder.connecting())
    patch.setattr(datasource, "ClusterQueues", recorder.queues())
    patch.setattr(datasource, "present_creations", lambda source, ranges: {})
    made = datasource.TopicDatasource("orders", **options)
    return recorder.seen, made.ranges, made._options


def ray_read(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Run `read_topic` of Ray Data. Return what it passes to its datasource and to Ray."""
    recorder = Recorder()
    patch.setattr(reading, "TopicDatasource", recorder.replacing("source"))
    patch.setattr(reading, "number_of_tasks", lambda source: 4)
    patch.setattr(reading.ray.data, "read_datasource", recorder.replacing())
    reading.read_topic("orders", **options)
    return recorder.seen


def ray_iterate(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Ask `iter_topic` for its first dataset. Return all that it used."""
    recorder = Recorder()
    patch.setattr(iterating, "driver_client", recorder.connecting())
    patch.setattr(iterating, "ClusterQueues", recorder.queues())
    patch.setattr(iterating, "BatchProgress", recorder.replacing())
    patch.setattr(iterating, "select_topics", lambda source, topics: [topics])

    def plans(source: Any, progress: Any, *arguments: Any, **more: Any) -> Iterator[list[OffsetRange]]:
        recorder.seen.append((arguments, more))
        yield []

    patch.setattr(iterating, "plans", plans)
    patch.setattr(iterating, "RangesDatasource", lambda source, ranges, *more: recorder.seen.append((ranges, more)))
    patch.setattr(iterating, "present_creations", lambda source, ranges: {})
    patch.setattr(iterating, "number_of_tasks", lambda source: 4)
    patch.setattr(iterating.ray.data, "read_datasource", lambda *arguments, **more: None)
    next(iterating.iter_topic("g", "orders", **options))
    return recorder.seen


def ray_write(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Run `write_topic` of Ray Data. Return the settings of its sink, and what it passes to Ray."""
    recorder = Recorder()
    patch.setattr(datasink, "driver_client", recorder.connecting())

    class Dataset:
        def schema(self, fetch_if_missing: bool) -> None:
            return None

        def write_datasink(self, sink: Any, **more: Any) -> None:
            recorder.seen.append((sink._fields, sink._group, sink._idempotent, more))
            sink.summary = "done"

    dataset: Any = Dataset()
    datasink.write_topic(dataset, "orders", **options)
    return recorder.seen


SETTINGS: dict[str, Any] = {
    "send_timeout_s": 9.0,
    "attempt_timeout_s": 2.0,
    "max_buffered_bytes": 1 << 20,
    "max_buffered_messages": 77,
    "compression": Compression(CompressionType.ZLIB),
    "max_message_size_bytes": 1 << 20,
    "hooks": ["a hook"],
    "check_forbidden": ["a check"],
}
REFUSED: dict[str, Any] = {
    "when_full": "raise",
    "send_latency_enable": True,
    "retry_when_not_store_ok": False,
    "default_topic_queue_nums": 3,
}
"""Settings of producers that a repeatable write refuses, because it would ignore them."""
COMMON_WRITE = {"plan_location": "/plans", "sort": "always", "check_first": True, "client": GIVEN, **SETTINGS}
FILTERS = {"tags": "paid", "expression": SQL, "unreadable": "raise", "columns": ["tags"]}
RAY_FILTERS = {
    **FILTERS,
    "fail_on_data_loss": False,
    "timeout_ms": 900,
    "namespace": "team",
    "address": "10.0.0.7:6379",
}
RAY_READ = {**RAY_FILTERS, "start_offset": 12, "end_offset": datetime.fromtimestamp(T0_MS / 1000 + 20, UTC)}
TASKS: dict[str, Any] = {
    "num_cpus": 2,
    "num_gpus": 1,
    "memory": 9.0,
    "override_num_blocks": 9,
    "label_selector": {"a": "b"},
    "fallback_strategy": [{}],
    "max_calls": 9,
    "resources": {"disk": 1.0},
    "accelerator_type": "T4",
    "runtime_env": {"env_vars": {}},
}
Case = tuple[Run, dict[str, Any], set[str]]
CASES: dict[str, Case] = {
    "spark read_topic": (
        spark_read,
        {**SCAN_VALUES, **FILTERS, "min_partitions": 9, "partition_bytes": 300, "client": GIVEN},
        options_of(reader.read_topic, ScanOptions),
    ),
    "spark write_topic": (
        lambda patch, **options: spark_write(patch, one_write, **options),
        {**COMMON_WRITE, "write_id": "load-1"},
        options_of(writer.write_topic, ProducerOptions) - REFUSED.keys(),
    ),
    "spark topic_sink": (
        lambda patch, **options: spark_write(patch, one_batch, **options),
        {**COMMON_WRITE, "name": "second", "on_batch": print},
        options_of(writer.topic_sink, ProducerOptions) - REFUSED.keys(),
    ),
    "ray TopicDatasource": (
        ray_source,
        {**RAY_READ, "rows_per_block": 9},
        options_of(datasource.TopicDatasource),
    ),
    "ray read_topic": (
        ray_read,
        {**RAY_READ, **TASKS, "rows_per_block": 9},
        # Only one value of `trigger` is accepted, as in `ray.data.read_kafka`.
        options_of(reading.read_topic) - {"trigger"},
    ),
    "ray iter_topic": (
        ray_iterate,
        {**RAY_FILTERS, "start_offset": "latest", "interval_s": 3.0, "max_rows": 9},
        options_of(iterating.iter_topic) | {"interval_s", "max_rows"},
    ),
    "ray write_topic": (
        ray_write,
        {
            **{f"{name}_field": "column" for name in ("body", "key", "tags", "keys", "properties", "sharding_key")},
            "deliver_at_field": "column",
            "value_serializer": "bytes",
            "key_serializer": "json",
            "producer_group": "mine",
            "idempotent": False,
            "namespace": "team",
            "address": "10.0.0.7:6379",
            "concurrency": 3,
            "ray_remote_args": {"num_cpus": 2},
        },
        options_of(datasink.write_topic),
    ),
}
NEEDED: dict[tuple[str, str], dict[str, Any]] = {
    ("spark read_topic", "starting_offsets_by_timestamp_strategy"): {"starting_timestamp": T0_MS + 50_000},
    ("spark read_topic", "fail_on_data_loss"): {"starting_offsets": {"broker-a": {"0": 1, "1": 5}}},
    ("ray write_topic", "value_serializer"): {"body_field": "body"},
    ("ray write_topic", "key_serializer"): {"key_field": "key"},
}
"""Other options that a test must set with an option, because the option has no effect alone."""


@pytest.mark.parametrize("entry", CASES)
def test_the_table_has_a_value_for_each_option(entry: str) -> None:
    _, values, names = CASES[entry]
    assert set(values) == names


@pytest.mark.parametrize(("entry", "option"), [(entry, name) for entry, (_, of, _) in CASES.items() for name in of])
def test_each_option_changes_what_is_done(monkeypatch: pytest.MonkeyPatch, entry: str, option: str) -> None:
    run, values, _ = CASES[entry]
    more = NEEDED.get((entry, option), {})

    def done(**options: Any) -> Any:
        try:
            return repr(run(monkeypatch, **options))
        except raymq.RaymqError as error:
            return type(error)

    with_option, without = done(**{option: values[option]}, **more), done(**more)
    assert with_option != without
    assert isinstance(with_option, str), f"{option} is refused: {with_option}"


@pytest.mark.parametrize("entry", CASES)
def test_a_second_run_without_options_does_the_same(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    run, *_ = CASES[entry]
    assert repr(run(monkeypatch)) == repr(run(monkeypatch))


@pytest.mark.parametrize("entry", ["spark write_topic", "spark topic_sink"])
@pytest.mark.parametrize("setting", REFUSED)
def test_a_write_refuses_each_setting_that_it_would_ignore(
    monkeypatch: pytest.MonkeyPatch, entry: str, setting: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=setting):
        CASES[entry][0](monkeypatch, **{setting: REFUSED[setting]})
