"""Tests of a long read of offset ranges: it returns each row once, even if the broker group fails over during
the read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.scan import range_reader
from raymq.client.scan.batches import open_ranges
from raymq.client.scan.ranges import OffsetRange
from raymq.common.errors import ServiceNotAvailableError
from raymq.records.logfiles.log_reader import LogReader
from tests.support.clients.fakes import FakeRoutes, topic_route
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.stores import LOG_FILE_BYTES, QUEUE_FILE_UNITS, make_batch

QUEUES, COUNT, BATCH = 2, 600, 10
RANGES = [OffsetRange("orders", "a", queue_id, 0, COUNT) for queue_id in range(QUEUES)]


class Master:
    """Storage client that sends each read to the replica that is the master at the time of the read."""

    def __init__(self, group: LocalReplicas, *, near: bool) -> None:
        self._group, self._near = group, near
        self.read_from: list[int] = []

    def _leads(self) -> int:
        record = self._group.control_state.record
        if record is None or record.master is None or record.master not in self._group.replicas:
            raise ServiceNotAvailableError("nobody leads now")
        self.read_from.append(record.master)
        return record.master

    def reader(self) -> LogReader | None:
        root = self._group.directory(self._leads())
        if not self._near:
            return None
        return LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=QUEUE_FILE_UNITS * 20)

    def fetch(self, requests: Any, max_bytes: int, wait_s: float, timeout_s: float) -> Any:
        return self._group.replicas[self._leads()].fetch(requests, max_bytes=max_bytes, wait_s=wait_s)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalReplicas]:
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(range_reader, "RANGE_CHUNK_MESSAGES", 25)
    group = LocalReplicas(tmp_path, 3)
    group.settle()
    appends = [
        group.master.start_append([make_batch(bodies_from(first), queue_id=queue_id)])
        for first in range(0, COUNT, BATCH)
        for queue_id in range(QUEUES)
    ]
    group.settle()
    assert len(appends) == COUNT // BATCH * QUEUES
    eventually(lambda: group.master.store.queues.bounds("orders", 1).max_offset == COUNT, "all messages visible")
    group.settle()
    yield group
    group.end()


def bodies_from(first: int) -> list[bytes]:
    return [b"%05d" % number + b"x" * 200 for number in range(first, first + BATCH)]


def fail_over(group: LocalReplicas) -> None:
    """Stop the master, delete its files, and elect another replica."""
    record = group.control_state.record
    assert record is not None
    assert record.master is not None
    ended = record.master
    group.close(ended)
    shutil.rmtree(group.directory(ended))
    group.control_state._lease_until_s = 0.0
    group.control_state._accounts.pop(ended)

    def led() -> bool:
        group.control(2)
        now = group.control_state.record
        return now is not None and now.master in group.replicas

    eventually(led, "another master")
    group.settle()


@pytest.mark.parametrize("near", [True, False], ids=["in place", "over calls"])
def test_the_rows_do_not_change_when_the_master_and_its_files_are_gone(group: LocalReplicas, near: bool) -> None:
    master = Master(group, near=near)
    routes: Any = FakeRoutes(topic_route(a=QUEUES))
    storages: Any = SimpleNamespace(get=lambda name: master)
    batches = open_ranges(
        routes, storages, RANGES, fail_on_data_loss=True, columns=["queue_id", "queue_offset", "body"]
    )
    seen = [next(batches) for _ in range(3)]
    fail_over(group)
    seen += batches
    rows = [tuple(row.values()) for batch in seen for row in batch.to_pylist()]
    assert rows == [
        (queue_id, offset, b"%05d" % offset + b"x" * 200) for queue_id in range(QUEUES) for offset in range(COUNT)
    ]
    assert len(set(master.read_from)) == 2
