"""Tests that each option of `format("raymq")` reaches the part that applies it, in all four entry points. Fakes replace
Spark 4 and the cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import raymq
from raydp_jobs.data_source import options as known
from raydp_jobs.sink.partitions import BATCH_ID, QUERY_ID
from raydp_jobs.sink.plans import PlanDirectory
from raydp_jobs.worker_client import ClusterAddress
from raymq.client.scan.ranges import OffsetRange
from raymq.common import identity
from raymq.common.identity import Identity
from raymq.common.message import MessageQueue
from tests.support.clients.scan_source import T0_MS, Queues
from tests.support.spark.fake_spark4 import in_task, with_fake_spark4
from tests.unit.raydp_jobs.test_options_are_used import QUEUES, Recorder

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

ROWS = [pa.RecordBatch.from_pylist([{"body": b"%d" % number} for number in range(20)])]
SCHEMA = StructType([StructField("body", BinaryType())])
ALICE = Identity("alice", b"a")
MADE = SimpleNamespace(hex="random", int=1)


class Client:
    """Fake of a client. It is a `with` block, too."""

    routes = storages = names = None

    def __repr__(self) -> str:
        return "client"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def write_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return QUEUES


class Entry:
    """The four entry points of the format. Each records all that it passes to the parts that apply the options."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.recorder, self._patch = Recorder(), patch
        self.connects: list[Any] = []

    def source(self, **options: str) -> Any:
        """Return a data source with these options."""
        settings = self._partitions.SourceSettings(ClusterAddress("here", ALICE, "team"), 2, False)
        session = type("Session", (self._module.TopicDataSource,), {"settings": settings})
        topic = {} if "topic_pattern" in options else {"topic": "orders"}
        return session({**topic, **options})

    @property
    def seen(self) -> str:
        return repr(self.recorder.seen)

    def connect(self, address: str, *, namespace: str) -> Client:
        """Stand in for `raymq.connect`, which acts as the present user of the process."""
        self.connects.append((address, namespace, identity.present()))
        return Client()

    def load(self, module: Any, stream: Any, writers: Any, partitions: Any) -> None:
        """Replace the cluster and the reads and writes in these modules."""
        self._module, self._stream, self._writers, self._partitions = module, stream, writers, partitions
        patch, seen = self._patch, self.recorder.seen
        for one in (module, stream, writers):
            patch.setattr(one, "connect", self.connect)
        patch.setattr(module, "check_spark4", lambda needed, user: None)
        patch.setattr(module, "ClusterQueues", self.recorder.queues())
        patch.setattr(Queues, "creations", lambda queues, topics: {}, raising=False)

        def read_ranges(ranges: Any, *arguments: Any, **more: Any) -> Iterator[Any]:
            seen.append((ranges, arguments, more))
            return iter(())

        patch.setattr(partitions, "read_ranges", read_ranges)
        patch.setattr(stream, "UnplacedTopicCluster", self.recorder.replacing())
        part = SimpleNamespace(ranges=[OffsetRange("orders", "broker-a", 0, 0, 9)]), []
        topics = SimpleNamespace(
            is_closing_row=lambda end: False, batch=lambda start, end: ([part], "*", ""), stop=lambda query: None
        )
        patch.setattr(stream, "TopicSource", self.recorder.replacing(topics))
        patch.setattr(writers.time, "time_ns", lambda: T0_MS * 1_000_000)
        patch.setattr(writers.uuid, "uuid4", lambda: MADE)

        def task_write(*arguments: Any) -> Any:
            seen.append(arguments)
            return SimpleNamespace(write=lambda rows: seen.append([one.to_pylist() for one in rows]) or [])

        patch.setattr(writers, "TaskWrite", task_write)

        class Plans(PlanDirectory):
            def fix(self, topic: str, batch: int, planned: Any) -> Any:
                seen.append((str(self._place), batch))
                return planned

        patch.setattr(writers, "PlanDirectory", Plans)
        in_task(patch, writers, **{QUERY_ID: "q1", BATCH_ID: "3"})

    def read(self, **options: str) -> None:
        """Plan and read a batch."""
        source = self.source(**options)
        reader = source.reader(source.schema())
        parts = reader.partitions()
        self.recorder.seen.append([(part.ranges, part.tags, part.sql) for part in parts])
        list(reader.read(parts[0]))

    def read_stream(self, **options: str) -> None:
        """Read a batch of a stream."""
        source = self.source(**options)
        reader = source.streamReader(source.schema())
        [part] = reader.partitions(reader.initialOffset(), {"end": 1})
        list(reader.read(part))
        reader.stop()

    def write(self, **options: str) -> None:
        """Write a batch."""
        self.source(**options).writer(SCHEMA, False).write(iter(ROWS))

    def write_stream(self, **options: str) -> None:
        """Write a batch of a stream."""
        writer = self.source(**options).streamWriter(SCHEMA, False)
        writer.__getstate__()
        writer.write(iter(ROWS))


RUNS: dict[str, tuple[Callable[..., None], set[str]]] = {
    "read": (Entry.read, set(known.BATCH_OPTIONS)),
    "readStream": (Entry.read_stream, set(known.STREAM_OPTIONS)),
    "write": (Entry.write, set(known.BATCH_WRITE_OPTIONS)),
    "writeStream": (Entry.write_stream, set(known.STREAM_WRITE_OPTIONS) - {"checkpointlocation"}),
}
VALUES: dict[str, str] = {
    "topic": "orders-eu",
    "topic_pattern": "orders.*",
    "columns": "tags,queue_offset",
    "tags": "paid",
    "expression": "price > 5",
    "unreadable": "raise",
    "starting_offsets": json.dumps({"broker-a": {"0": 20, "1": 5}}),
    "starting_timestamp": str(T0_MS + 20_000),
    "starting_offsets_by_timestamp": json.dumps({"broker-a": {"0": T0_MS + 20_000, "1": T0_MS + 5_000}}),
    "starting_offsets_by_timestamp_strategy": "latest",
    "ending_offsets": json.dumps({"broker-a": {"0": 50, "1": 5}}),
    "ending_timestamp": str(T0_MS + 20_000),
    "ending_offsets_by_timestamp": json.dumps({"broker-a": {"0": T0_MS + 20_000, "1": T0_MS + 5_000}}),
    "max_offsets": "7",
    "min_partitions": "9",
    "partition_bytes": "300",
    "fail_on_data_loss": "false",
    "max_offsets_per_trigger": "9",
    "min_offsets_per_trigger": "9",
    "max_trigger_delay_s": "9",
    "commit_group": "progress",
    "sort": "never",
    "write_id": "load-1",
    "plan_location": "/plans",
    "send_timeout_s": "9",
    "attempt_timeout_s": "2",
    "max_buffered_bytes": "1048576",
    "max_buffered_messages": "77",
    "max_message_size_bytes": "1048576",
    "compression": "zlib",
}
"""A value of each option, other than its default."""
NEEDED: dict[tuple[str, str], dict[str, str]] = {
    ("read", "starting_offsets_by_timestamp_strategy"): {"starting_timestamp": str(T0_MS + 50_000)},
    ("write", "plan_location"): {"write_id": "load-1"},
}
"""Other options that a test must set with an option, because the option has no effect or is refused alone."""


def done(run: Callable[..., None], **options: str) -> Any:
    """Return all that an entry point did with these options, or the class of its error."""
    with pytest.MonkeyPatch.context() as patch:
        entry = Entry(patch)
        modules = ("topic_data_source", "stream_reader", "topic_writers", "partitions")
        with with_fake_spark4(patch, *modules) as loaded:
            entry.load(*loaded)
            try:
                run(entry, **options)
            except raymq.RaymqError as error:
                return type(error)
            assert entry.connects, "the entry point did not connect"
            assert set(entry.connects) == {("here", "team", ALICE)}, "another user or namespace than the session's"
            assert identity.present() is None
            return entry.seen


@pytest.mark.parametrize(
    ("entry", "option"), [(entry, option) for entry, (_, options) in RUNS.items() for option in sorted(options)]
)
def test_each_option_changes_what_is_done(entry: str, option: str) -> None:
    run, _ = RUNS[entry]
    more = NEEDED.get((entry, option), {})
    with_option, without = done(run, **{option: VALUES[option]}, **more), done(run, **more)
    assert with_option != without
    assert isinstance(with_option, str), f"{option} is refused: {with_option}"


@pytest.mark.parametrize("entry", RUNS)
def test_a_second_run_does_the_same(entry: str) -> None:
    run, _ = RUNS[entry]
    assert isinstance(done(run), str)
    assert done(run) == done(run)


@pytest.mark.parametrize(
    ("entry", "option"), [(entry, name) for entry, (_, names) in RUNS.items() for name in VALUES if name not in names]
)
def test_each_option_of_another_entry_point_is_refused(entry: str, option: str) -> None:
    assert done(RUNS[entry][0], **{option: VALUES[option]}) is raymq.InvalidArgumentError
