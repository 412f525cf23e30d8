"""Tests of reading one offset range in a Spark worker, with real records and a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from raydp_jobs.source import reader
from raymq.client.scan import batches as scan_batches
from raymq.client.scan.range_reader import RecordsChunk
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import DataLossError
from raymq.common.message import Message, MessageQueue
from raymq.common.namespaces import NO_NAMESPACE
from raymq.common.protocol.store import QueueBounds
from raymq.records.format.check import record_starts
from raymq.records.format.encode import encode_batch
from raymq.records.kernels.stamp import stamp

RANGE = OffsetRange("orders", "broker-a", 3, 0, 100)


def records(first: int, last: int, body: bytes = b"") -> bytes:
    """Return one record for each queue offset from `first` to `last - 1`. Messages at even offsets have the tag "paid",
    messages at odd offsets have the tag "late"."""
    messages = [
        Message("orders", body or b"%d" % offset, tags="late" if offset % 2 else "paid")
        for offset in range(first, last)
    ]
    batch = encode_batch(
        messages,
        3,
        born_host=("127.0.0.1", 0),
        born_timestamp_ms=1_600_000_000_123,
        message_ids=[f"{offset:032X}" for offset in range(first, last)],
    )
    buffer = np.frombuffer(bytearray(batch.records), np.uint8)
    stamp(
        buffer,
        batch.sizes,
        first_queue_offset=first,
        first_physical_offset=0,
        store_timestamp_ms=1_700_000_000_456,
        store_host=bytes(8),
    )
    return buffer.tobytes()


def chunk_of(data: bytes, next_offset: int) -> RecordsChunk:
    starts = record_starts(data)
    offsets = np.arange(next_offset - len(starts), next_offset)
    return RecordsChunk(data, starts, np.diff(starts, append=len(data)), next_offset, offsets)


class Cluster:
    """Fake client and fake range reader in one object. It reads `step` offsets at a time, and cannot read the offsets
    in `gone`."""

    def __init__(self, *, step: int = 40, gone: range = range(0)) -> None:
        self.step, self.gone = step, gone
        self.routes = self.storages = self
        self.names = NO_NAMESPACE

    def get(self, name: str) -> Cluster:
        return self

    def master_storage(self, broker_name: str) -> str:
        return f"storage-{broker_name}-0"

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        return QueueBounds(self.gone.stop, 100, 0)

    def read(
        self, queue: MessageQueue, start: int, end: int, tag_codes: frozenset[int] | None = None, sql: str | None = None
    ) -> Iterator[RecordsChunk]:
        for first in range(start, end, self.step):
            last = min(end, first + self.step)
            if any(offset in self.gone for offset in range(first, last)):
                raise DataLossError(f"{queue}: some of {first} to {last - 1} are gone")
            chunk = records(first, last)
            yield chunk_of(chunk, last)


@pytest.fixture(autouse=True)
def _fake_range_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_batches, "RangeReader", lambda routes, storages: storages)


def offsets(cluster: Any, *, fail_on_data_loss: bool = True) -> list[int]:
    batches = scan_batches.open_ranges(cluster, cluster, [RANGE], fail_on_data_loss=fail_on_data_loss)
    return [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()]


def test_a_range_is_read_once_and_in_order() -> None:
    assert offsets(Cluster()) == list(range(100))


def test_messages_that_are_gone_fail_the_read() -> None:
    with pytest.raises(DataLossError):
        offsets(Cluster(gone=range(10)))


def test_without_fail_on_data_loss_reading_continues_at_the_first_message() -> None:
    assert offsets(Cluster(gone=range(10)), fail_on_data_loss=False) == list(range(10, 100))


def test_messages_that_vanish_during_the_read_are_left_out_without_repeating_any() -> None:
    assert offsets(Cluster(gone=range(60)), fail_on_data_loss=False) == list(range(60, 100))
    cluster = Cluster()
    batches = scan_batches.open_ranges(cluster, cluster, [RANGE], fail_on_data_loss=False)  # type: ignore[arg-type]  # a stand-in
    seen = next(batches).column("queue_offset").to_pylist()
    cluster.gone = range(70)
    seen += [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()]
    assert seen == [*range(40), *range(70, 100)]


def test_a_loss_that_the_bounds_do_not_explain_is_never_skipped() -> None:
    """A scan never skips lost messages whose offsets lie within the queue's bounds. Such a loss is damage: retention
    deletes only messages before these bounds."""
    cluster = Cluster(gone=range(50, 60))
    cluster.queue_bounds = lambda topic, queue_id, timeout_s: QueueBounds(0, 100, 0)  # type: ignore[method-assign]
    with pytest.raises(DataLossError):
        offsets(cluster, fail_on_data_loss=False)


def test_large_chunks_become_batches_of_bounded_size() -> None:
    chunk = chunk_of(records(0, 10, body=b"x" * 1000), 10)
    size = int(chunk.sizes[0])
    assert list(scan_batches._slices(chunk, 2 * size)) == [slice(at, at + 2) for at in range(0, 10, 2)]
    assert list(scan_batches._slices(chunk, 1)) == [slice(at, at + 1) for at in range(10)]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (frozenset[str](), list(range(100))),
        (frozenset({"paid"}), list(range(0, 100, 2))),
        (frozenset({"paid", "late"}), list(range(100))),
        (frozenset({"refunded"}), []),
    ],
)
def test_tags_filter_like_a_subscription(
    tags: frozenset[str], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "worker_client", lambda address: Cluster())
    batches = reader.read_ranges([RANGE], "127.0.0.1:1", tags, True)
    assert [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()] == expected


# Ignore PySpark's deprecation warning about distutils.
@pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")
def test_rows_have_the_types_that_spark_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "worker_client", lambda address: Cluster())
    batch = next(reader.read_ranges([RANGE], "127.0.0.1:1", frozenset(), True))
    promised: Mapping[str, pa.DataType] = {field.name: field.type for field in to_arrow_schema(reader.SPARK_SCHEMA)}
    assert {field.name: field.type for field in batch.schema} == promised
    assert batch.schema.names == reader.SPARK_SCHEMA.names
    row = batch.slice(7, 1).to_pylist()[0]
    assert (row["body"], row["tags"], row["message_id"]) == (b"7", "late", f"{7:032X}")
    assert (row["broker_name"], row["queue_id"], row["queue_offset"]) == ("broker-a", 3, 7)
    assert [int(row[name].timestamp() * 1000) for name in ("born_timestamp", "store_timestamp")] == [
        1_600_000_000_123,
        1_700_000_000_456,
    ]
