"""Tests of reading a fixed offset range, from mapped files and from a store on another node."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from raymq.client.scan import range_reader
from raymq.client.scan.range_reader import RangeReader
from raymq.common.errors import DataLossError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.records.format.decode import decode_record
from raymq.records.logfiles.log_reader import LogReader
from tests.support.clients.fakes import FakeRoutes, topic_route
from tests.support.stores.stores import LOG_FILE_BYTES, QUEUE_FILE_UNITS, make_batch, open_store

QUEUE = MessageQueue("orders", "a", 0)
COUNT = 450


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Write a store with 450 messages of one queue in several log files and five queue files. Messages of another queue
    lie between these messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        store = open_store(tmp_path_factory.mktemp("range") / "store")
        for start in range(0, COUNT, 30):
            bodies = [b"%05d" % number + b"x" * 300 for number in range(start, start + 30)]
            store.append([make_batch(bodies[:13]), make_batch([b"other"], queue_id=1), make_batch(bodies[13:])])
        yield store
        store.close()


class Storage:
    """Fake storage client. Its storage actor is on the node that holds the files if `near` is true, otherwise on
    another node."""

    def __init__(self, store, near: bool) -> None:
        self.store = store
        self.failures: list[Exception] = []
        self.mapped = None
        if near:
            self.mapped = LogReader(
                store.status().root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=QUEUE_FILE_UNITS * 20
            )

    def reader(self):
        self._fail()
        return self.mapped

    def fetch(self, requests, max_bytes, wait_s, timeout_s):
        self._fail()
        return self.store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s)

    def _fail(self):
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture(params=["near", "far"])
def storage(request, store):
    return Storage(store, request.param == "near")


@pytest.fixture
def read(storage):
    client = SimpleNamespace(routes=FakeRoutes(topic_route(a=2)), storages=SimpleNamespace(get=lambda name: storage))

    def read(start: int, end: int) -> list[int]:
        offsets = []
        for data, starts, *_ in RangeReader(client.routes, client.storages).read(QUEUE, start, end):
            messages = [decode_record(data, int(position)) for position in starts]
            assert all(message.body == b"%05d" % message.queue_offset + b"x" * 300 for message in messages)
            offsets += [message.queue_offset for message in messages]
        return offsets

    return read


@pytest.mark.parametrize(("start", "end"), [(0, COUNT), (0, 1), (COUNT - 1, COUNT), (95, 105), (130, 400)])
def test_a_range_is_read_whole_and_in_order(read, start, end):
    assert read(start, end) == list(range(start, end))


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_size_of_the_chunks_does_not_matter(read, monkeypatch, chunk):
    monkeypatch.setattr(range_reader, "RANGE_CHUNK_MESSAGES", chunk)
    monkeypatch.setattr(range_reader, "RANGE_FETCH_MAX_BYTES", 1000)
    assert read(90, 140) == list(range(90, 140))


def test_an_empty_range_is_empty(read):
    assert read(17, 17) == []


def test_a_range_that_is_not_there_is_a_loss_of_data(read, monkeypatch):
    # The range begins after the queue's visible end, so the reader waits RANGE_READ_TIMEOUT_S for a new master that has
    # the messages.
    monkeypatch.setattr(range_reader, "RANGE_READ_TIMEOUT_S", 0.1)
    with pytest.raises(DataLossError, match=r"offsets (450|600) to 699 of queue orders@a:0 no longer exist"):
        read(600, 700)


def test_a_storage_actor_that_is_being_restarted_is_waited_for(read, storage):
    storage.failures = [ServiceNotAvailableError("restarting"), ServiceNotAvailableError("restarting")]
    assert read(10, 20) == list(range(10, 20))
