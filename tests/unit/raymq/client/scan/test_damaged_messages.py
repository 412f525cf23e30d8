"""Tests of a scan of a topic in which every second message is unreadable. Spark, Ray Data and jobs use such
scans."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.consumer import repair_wait
from raymq.client.scan import batches as scan_batches
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import BodyUnreadableError, InvalidArgumentError
from raymq.common.protocol.store import QueuePosition, RepairState
from raymq.records.format.compression import CompressionType, compress
from storage.message_store import MessageStore
from tests.support.stores.damaged_topic import (
    FILE_BYTES,
    TOPIC,
    DamagedTopic,
    damaged_topic,
    one_broker_routes,
    repair_after_reports,
)
from tests.support.stores.lying_bodies import lying_batch
from tests.support.stores.stores import open_store


@pytest.fixture(scope="module")
def topics(tmp_path_factory) -> Iterator[dict[str, DamagedTopic]]:
    root = tmp_path_factory.mktemp("damaged")
    with damaged_topic(root / "near") as near, damaged_topic(root / "far") as far:
        yield {"near": near, "far": far}


@pytest.fixture(params=["near", "far"])
def damaged(request, topics) -> DamagedTopic:
    topic = topics[request.param]
    topic.storage.reader = lambda: topic.store._parts.reader if request.param == "near" else None
    return topic


def scan(damaged: Any, end: int, **options: Any) -> Iterator[pa.RecordBatch]:
    whole = OffsetRange(TOPIC, "broker-a", 0, 0, end)
    return scan_batches.open_ranges(damaged.routes, damaged.storages, [whole], fail_on_data_loss=True, **options)


def read(damaged: DamagedTopic, **options: Any) -> list[dict[str, Any]]:
    return [row for batch in scan(damaged, len(damaged.bodies), **options) for row in batch.to_pylist()]


@pytest.mark.parametrize("tags", [frozenset[str](), frozenset({"paid"})])
def test_a_damaged_message_is_a_row_with_a_null_body_in_its_place(damaged, tags, caplog):
    with caplog.at_level(logging.WARNING):
        rows = read(damaged, columns=["queue_offset", "queue_id", "topic", "body", "error"], tags=tags)
    assert [row["queue_offset"] for row in rows] == list(range(len(damaged.bodies)))
    for row, body in zip(rows, damaged.bodies, strict=True):
        kind = damaged.kinds.get(row["queue_offset"])
        assert (row["topic"], row["queue_id"]) == (TOPIC, 0), kind
        assert row["body"] == body, kind
        assert (row["error"] is None) == (body is not None), kind
    assert "cannot be read" in caplog.text


def test_the_default_columns_have_null_bodies(damaged):
    assert [row["body"] for row in read(damaged)] == damaged.bodies
    assert len(read(damaged, columns=["queue_offset"])) == len(damaged.bodies)


def test_other_tags_leave_intact_messages_out(damaged):
    rows = read(damaged, columns=["queue_offset", "body"], tags=frozenset({"refunded"}))
    assert all(row["body"] is None for row in rows)


def test_raise_names_the_first_damaged_message(damaged):
    for columns in (["queue_offset", "body"], ["queue_offset"]):
        with pytest.raises(BodyUnreadableError) as caught:
            read(damaged, columns=columns, unreadable="raise")
        assert (caught.value.queue, caught.value.queue_offset) == ("orders@broker-a:0", 1)
    with pytest.raises(InvalidArgumentError, match="must be one of null, raise"):
        scan_batches.check_unreadable("skip")


def test_batches_of_small_records_with_long_bodies_are_bounded(tmp_path):
    store: MessageStore = open_store(tmp_path / "store", mapped_file_size_commit_log_bytes=FILE_BYTES)
    body = compress(bytes(3 << 20), CompressionType.ZSTD)
    store.append([lying_batch([(body, 0x201)] * 60)])
    storage = SimpleNamespace(reader=lambda: store._parts.reader)
    cluster = SimpleNamespace(routes=one_broker_routes(), storages=SimpleNamespace(get=lambda name: storage))
    rows, largest = 0, 0
    tracemalloc.start()
    for batch in scan(cluster, 60):
        rows, largest = rows + batch.num_rows, max(largest, batch.nbytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    store.close()
    assert rows == 60
    assert largest <= scan_batches.BATCH_DECOMPRESSED_BYTES + (1 << 20)
    assert peak < 4 * scan_batches.BATCH_DECOMPRESSED_BYTES


@pytest.mark.parametrize("unreadable", ["null", "raise"])
@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
def test_a_scan_reads_damaged_messages_after_their_repair(tmp_path, near, unreadable):
    with damaged_topic(tmp_path, lying=False) as damaged:
        damaged.storage.reader = lambda: damaged.store._parts.reader if near else None
        repair_after_reports(damaged, tmp_path)
        rows = read(damaged, columns=["queue_offset", "body"], unreadable=unreadable)
        assert [row["queue_offset"] for row in rows] == list(range(len(damaged.bodies)))
        assert [row["body"] for row in rows] == [b"intact %03d " % number * 20 for number in range(len(rows))]


def test_a_scan_without_bodies_reads_damaged_records_after_their_repair(tmp_path):
    with damaged_topic(tmp_path, lying=False) as damaged:
        reports = repair_after_reports(damaged, tmp_path)
        rows = read(damaged, columns=["queue_offset", "tags"])
        assert [row["tags"] for row in rows] == ["paid"] * len(damaged.bodies)
        assert reports


def test_the_ranges_of_one_read_share_the_limit_of_the_wait(tmp_path, monkeypatch):
    """After a wait without success, a reader waits for no other record of the queue for a while, also in the next range
    of the queue. It reports each of these records once."""
    monkeypatch.setattr(repair_wait, "READ_REPAIR_WAIT_S", 0.2)
    reported: list[int] = []

    def report(positions: list[QueuePosition], timeout_s: float) -> list[RepairState]:
        reported.extend(position.queue_offset for position in positions)
        return [RepairState.PENDING] * len(positions)

    with damaged_topic(tmp_path, lying=False) as damaged:
        damaged.storage.report_damage = report
        first, *rest = sorted(damaged.kinds)
        ranges = [OffsetRange(TOPIC, "broker-a", 0, at, at + 1) for at in range(len(damaged.bodies))]
        batches = scan_batches.open_ranges(damaged.routes, damaged.storages, ranges, fail_on_data_loss=True)
        rows = [row for batch in batches for row in batch.column("queue_offset").to_pylist()]
    assert rows == list(range(len(ranges)))
    assert first in reported
    assert [at for at in reported if at != first] == rest
