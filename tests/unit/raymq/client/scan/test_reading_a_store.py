"""Tests of reading offset ranges of a real store, in place and by calls. They cover columns, tags, a failover, and
files that retention deletes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

import raymq
import raymq.client.scan.batches
import raymq.records.kernels.columns
from raymq.client.scan import range_reader
from raymq.client.scan.batches import open_ranges
from raymq.client.scan.ranges import OffsetRange, text_of
from raymq.common.errors import DataLossError, InvalidArgumentError, NotMasterError, ServiceNotAvailableError
from raymq.common.protocol.store import QueueSpan
from raymq.records.filters.sql import sql
from raymq.records.format.hashing import java_hash
from raymq.records.kernels.columns import SCHEMA
from raymq.records.logfiles.log_reader import LogReader
from storage.message_store import MessageStore
from storage.retention import cleaner
from tests.support.clients.fakes import FakeRoutes, topic_route
from tests.support.stores.clocks import let_pass
from tests.support.stores.stores import LOG_FILE_BYTES, QUEUE_FILE_UNITS, make_batch, open_store

COUNT = 900
TAGS = ("paid", "late", "AaAa", "BBBB")  # the tags AaAa and BBBB have the same tag code (Java hash)
WHOLE = OffsetRange("orders", "a", 0, 0, COUNT)


def fill(store: MessageStore) -> MessageStore:
    for first in range(0, COUNT, 4):
        batches = [
            make_batch([b"%05d" % number + b"x" * 300], tags=TAGS[number % 4]) for number in range(first, first + 4)
        ]
        store.append([*batches[:2], make_batch([b"other"], queue_id=1), *batches[2:]])
    return store


class Replica:
    """Storage client of a store on the reader's node or on another node. The client's next calls raise the errors in
    `failures`."""

    def __init__(self, store: MessageStore, *, near: bool) -> None:
        self._store, self._near = store, near
        self.failures: list[Exception] = []
        self.tag_codes: list[frozenset[int] | None] = []

    def reader(self) -> LogReader | None:
        self._fail()
        if not self._near:
            return None
        root = self._store.status().root
        return LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=QUEUE_FILE_UNITS * 20)

    def fetch(self, requests: Any, max_bytes: int, wait_s: float, timeout_s: float) -> Any:
        self._fail()
        self.tag_codes += [request.tag_codes for request in requests]
        return self._store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s)

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> Any:
        return self._store.queues.bounds(topic, queue_id)

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class Cluster:
    """Fake cluster with the broker group `a`. The test chooses which of its replicas is the master."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)
        self.routes: Any = FakeRoutes(topic_route(a=2))
        self.storages: Any = SimpleNamespace(get=lambda name: self.replicas[0])

    def read(self, wanted: OffsetRange = WHOLE, **options: Any) -> Iterator[Any]:
        return open_ranges(self.routes, self.storages, [wanted], **{"fail_on_data_loss": True, **options})

    def offsets(self, wanted: OffsetRange = WHOLE, **options: Any) -> list[int]:
        return [offset for batch in self.read(wanted, **options) for offset in batch.column("queue_offset").to_pylist()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MessageStore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        store = fill(open_store(tmp_path_factory.mktemp("scan") / "store"))
        yield store
        store.close()


@pytest.fixture(params=["near", "far"])
def cluster(request: pytest.FixtureRequest, store: MessageStore) -> Cluster:
    return Cluster(Replica(store, near=request.param == "near"))


@pytest.mark.parametrize(
    "columns", [["tags"], ["queue_offset", "tags"], ["message_id", "topic"], [n for n in SCHEMA.names if n != "body"]]
)
def test_columns_without_body_are_the_same_and_no_body_is_touched(
    cluster: Cluster, columns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [row for batch in cluster.read() for row in batch.to_pylist()]

    read_bodies = raymq.records.kernels.columns.read_bodies

    def no_bodies(*arguments: Any, decompresses: bool, keeps: bool) -> Any:
        crcs = arguments[4]
        assert crcs is None, "a body was read"
        assert not decompresses, "a body was decompressed"
        assert not keeps, "a body was read"
        return read_bodies(*arguments, decompresses=decompresses, keeps=keeps)

    monkeypatch.setattr(raymq.records.kernels.columns, "read_bodies", no_bodies)
    batches = list(cluster.read(columns=columns))
    assert [row for batch in batches for row in batch.to_pylist()] == [
        {name: row[name] for name in columns} for row in whole
    ]
    assert all(batch.schema.names == columns for batch in batches)
    # The record batches that the scan returns do not keep the message bodies in memory. Each body has 300 bytes.
    assert sum(batch.get_total_buffer_size() for batch in batches) < COUNT * 200
    with pytest.raises(AssertionError, match="a body was read"):
        list(cluster.read(columns=["body"]))


@pytest.mark.parametrize("columns", [[], ["bodies"], ["tags", "tags"], "tags"])
def test_columns_that_there_are_not_are_refused(cluster: Cluster, columns: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a list of different names from topic, broker_name"):
        list(cluster.read(columns=columns))


@pytest.mark.parametrize("columns", [None, ["queue_offset"], ["queue_offset", "tags"]])
def test_tags_are_chosen_by_their_codes_and_then_exactly(cluster: Cluster, columns: list[str] | None) -> None:
    assert java_hash("AaAa") == java_hash("BBBB")
    batches = list(cluster.read(tags=frozenset({"AaAa", "late"}), columns=columns))
    found = [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()]
    assert found == [number for number in range(COUNT) if number % 4 in (1, 2)]
    assert all(batch.schema.names == (columns or SCHEMA.names) for batch in batches)


def test_records_whose_tags_are_not_wanted_are_not_decoded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    original = raymq.client.scan.batches.decode_columns

    def counting(buffer: Any, starts: Any, **options: Any) -> Any:
        decoded.append(len(starts))
        return original(buffer, starts, **options)

    monkeypatch.setattr(raymq.client.scan.batches, "decode_columns", counting)
    assert len(cluster.offsets(tags=frozenset({"late"}))) == sum(decoded) == COUNT // 4


@pytest.mark.parametrize(
    ("sql", "tags", "wanted"),
    [
        ("TAGS = 'late'", (), {1}),
        ("TAGS <> 'late' and TAGS contains 'a'", (), {0, 2}),
        ("TAGS in ('late', 'paid')", ("paid", "BBBB"), {0}),
        ("TAGS = 'nothing'", (), set()),
        ("TAGS > 5", (), set()),
    ],
)
@pytest.mark.parametrize("columns", [None, ["queue_offset"]])
def test_a_filter_expression_chooses_before_a_record_is_decoded(
    cluster: Cluster,
    sql: str,
    tags: tuple[str, ...],
    wanted: set[int],
    columns: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded = []
    original = raymq.client.scan.batches.decode_columns

    def counting(buffer: Any, starts: Any, **options: Any) -> Any:
        decoded.append(len(starts))
        return original(buffer, starts, **options)

    monkeypatch.setattr(raymq.client.scan.batches, "decode_columns", counting)
    expected = [number for number in range(COUNT) if number % 4 in wanted]
    assert cluster.offsets(sql=sql, tags=frozenset(tags), columns=columns) == expected
    assert sum(decoded) == len(expected)
    part = OffsetRange("orders", "a", 0, 101, 303)
    assert cluster.offsets(part, sql=sql, tags=frozenset(tags)) == [one for one in expected if 101 <= one < 303]


def test_an_expression_that_is_no_filter_expression_is_refused() -> None:
    assert text_of(None) is None
    assert text_of(sql("price > 5")) == "price > 5"
    for other in ("price > 5", raymq.predicate(len)):
        with pytest.raises(InvalidArgumentError, match=r"raymq\.sql"):
            text_of(other)  # type: ignore[arg-type]  # what a program may pass


def test_several_ranges_come_one_after_another(cluster: Cluster) -> None:
    ranges = [OffsetRange("orders", "a", 0, 700, 720), OffsetRange("orders", "a", 1, 3, 5)]
    batches = open_ranges(cluster.routes, cluster.storages, ranges, fail_on_data_loss=True)
    rows = [(row["queue_id"], row["queue_offset"]) for batch in batches for row in batch.to_pylist()]
    assert rows == [*((0, offset) for offset in range(700, 720)), (1, 3), (1, 4)]


def created_as(cluster: Cluster, creation_id: str) -> None:
    """Make the routes state that broker group a has created the topic with `creation_id`."""
    route = topic_route(a=2)
    queues = tuple(replace(data, creation_id=creation_id) for data in route.queues)
    cluster.routes = FakeRoutes(replace(route, queues=queues))


@pytest.mark.parametrize(("planned", "now"), [("1", "1"), ("1", ""), ("", "")])
def test_a_topic_that_is_the_same_one_or_has_no_id_is_read(cluster: Cluster, planned: str, now: str) -> None:
    created_as(cluster, now)
    plan = {"orders": {"a": planned}}
    batches = open_ranges(cluster.routes, cluster.storages, [WHOLE], fail_on_data_loss=True, creations=plan)
    assert sum(batch.num_rows for batch in batches) == COUNT


@pytest.mark.parametrize("planned", ["1", ""])
def test_a_topic_recreated_after_the_plan_is_an_error_or_is_skipped(cluster: Cluster, planned: str) -> None:
    created_as(cluster, "2")
    lost: list[OffsetRange] = []
    options: Any = {"creations": {"orders": {"a": planned}}, "on_loss": lost.append}
    with pytest.raises(DataLossError, match="deleted and created again after the read was planned"):
        next(open_ranges(cluster.routes, cluster.storages, [WHOLE], fail_on_data_loss=True, **options))
    assert list(open_ranges(cluster.routes, cluster.storages, [WHOLE], fail_on_data_loss=False, **options)) == []
    assert lost == [WHOLE]


# Tests of reads during which another replica becomes the master


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("new_near", [True, False])
def test_the_rest_of_a_range_comes_from_the_new_master(
    store: MessageStore, near: bool, new_near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "RANGE_CHUNK_MESSAGES", 100)
    old, new = Replica(store, near=near), Replica(store, near=new_near)
    cluster = Cluster(old, new)
    batches = cluster.read()
    seen = next(batches).column("queue_offset").to_pylist()
    # The old master's process has ended and its files are deleted: calls fail, and its log cannot be found.
    old.failures = [ServiceNotAvailableError("killed"), NotMasterError("a", 2)]
    monkeypatch.setattr(LogReader, "find", _gone_for(store, LogReader.find) if near else LogReader.find)
    monkeypatch.setattr(cluster.routes, "invalidate", lambda topic: _fail_over(cluster))
    seen += [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()]
    assert seen == list(range(COUNT))
    assert cluster.replicas == [new]


def _gone_for(store: MessageStore, find: Any) -> Any:
    def gone(reader: LogReader, request: Any, end: int, max_bytes: int) -> Any:
        if request.queue_offset >= 100 and end == COUNT:
            raise DataLossError("the directory was removed")
        return find(reader, request, end, max_bytes)

    return gone


def _fail_over(cluster: Cluster) -> None:
    cluster.replicas = cluster.replicas[-1:]


def test_a_new_master_that_does_not_show_its_end_yet_is_waited_for(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(store, near=False)
    answers = []
    original = replica.fetch

    def late(requests: Any, max_bytes: int, wait_s: float, timeout_s: float) -> Any:
        [result] = original(requests, max_bytes, wait_s, timeout_s)
        answers.append(result)
        # replace the store's first answer by the answer of a store that does not show its end yet: the queue ends at
        # offset 40, before the range 50 to 60 that is read
        if len(answers) == 1:
            [result] = store.fetch([type(requests[0])("orders", 0, 10**6, 1)], max_bytes=1, wait_s=0)
            result = type(result)(result.status, 40, 0, 40, b"", 0)
        return [result]

    monkeypatch.setattr(replica, "fetch", late)
    assert Cluster(replica).offsets(OffsetRange("orders", "a", 0, 50, 60)) == list(range(50, 60))
    assert len(answers) == 2


def test_a_message_that_never_returns_is_a_loss_after_the_timeout(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "RANGE_READ_TIMEOUT_S", 0.2)
    with pytest.raises(
        DataLossError, match=f"offsets {COUNT} to {COUNT + 9} of queue .* the queue has offsets 0 to {COUNT}"
    ):
        Cluster(Replica(store, near=False)).offsets(OffsetRange("orders", "a", 0, COUNT - 5, COUNT + 10))


# Tests of reads during which retention deletes files


@pytest.fixture
def aging(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageStore]:
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    store = fill(open_store(tmp_path / "store"))
    yield store
    store.close()


def delete_oldest(store: MessageStore, files: int) -> int:
    """Make retention delete the first log files. Returns the first remaining offset of queue 0."""
    now = datetime(2023, 11, 15, 3)
    log = os.path.join(store.status().root, "commitlog")
    for name in sorted(os.listdir(log))[:files]:
        os.utime(os.path.join(log, name), (now.timestamp() - 360_000,) * 2)
    store.cleaner._by_hand = 1
    let_pass(store)
    assert store.cleaner.run_once(now) == files
    return store.queues.bounds("orders", 0).min_offset


@pytest.mark.parametrize("near", [True, False])
def test_files_deleted_during_a_read_fail_it_with_the_range_that_is_lost(
    aging: MessageStore, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "RANGE_CHUNK_MESSAGES", 30)
    batches = Cluster(Replica(aging, near=near)).read()
    assert next(batches).column("queue_offset").to_pylist() == list(range(30))
    kept = delete_oldest(aging, 3)
    assert kept > 100
    with pytest.raises(
        DataLossError,
        match=rf"offsets \d+ to 899 of queue orders@a:0 no longer exist; the queue has offsets {kept} to 900",
    ):
        list(batches)


@pytest.mark.parametrize("near", [True, False])
def test_files_deleted_during_a_read_are_left_out_and_named(
    aging: MessageStore, near: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(range_reader, "RANGE_CHUNK_MESSAGES", 30)
    lost: list[OffsetRange] = []
    batches = Cluster(Replica(aging, near=near)).read(fail_on_data_loss=False, on_loss=lost.append)
    seen = next(batches).column("queue_offset").to_pylist()
    kept = delete_oldest(aging, 3)
    with caplog.at_level(logging.WARNING):
        seen += [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()]
    [gone] = lost
    assert gone.end_offset == kept
    assert seen == [*range(gone.start_offset), *range(kept, COUNT)]
    assert f"queue orders@a:0: offsets {gone.start_offset} to {kept - 1} no longer exist" in caplog.text


def test_a_range_that_is_gone_as_a_whole_is_empty(aging: MessageStore) -> None:
    kept = delete_oldest(aging, 3)
    lost: list[OffsetRange] = []
    wanted = OffsetRange("orders", "a", 0, 0, kept - 10)
    cluster = Cluster(Replica(aging, near=True))
    assert cluster.offsets(wanted, fail_on_data_loss=False, on_loss=lost.append) == []
    assert lost == [wanted]


# Tests of the sizes of offset ranges in bytes


@pytest.mark.parametrize(("start", "end"), [(0, COUNT), (0, 1), (95, 105), (500, 890)])
def test_the_bytes_of_a_short_span_are_exact(store: MessageStore, start: int, end: int) -> None:
    parts = store.queues.bytes_of_span(QueueSpan("orders", 0, start, end))
    assert len(parts) == min(32, end - start)
    sizes = [int(store._parts.reader.units("orders", 0, offset, 1)["size"][0]) for offset in range(start, end)]
    assert sum(parts) == sum(sizes)
