"""Tests of inner batches and light queues over lanes (direct socket connections). A producer writes them; clients read
them from the store's files and from another node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import raymq
from raymq.client.producer.producer import Producer
from raymq.common.message import Message
from raymq.common.names import light_queue
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.remoting import storage_client
from raymq.remoting.storage_client import FoundInPlace, StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, FakeRoutes, description, topic_route
from tests.support.clients.lanes import StorageDouble
from tests.support.clients.store_client import BATCH
from tests.support.stores.stores import open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

ALICE = light_queue("alice")


@pytest.fixture(params=["here", "elsewhere"])
def client(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageClient]:
    """Yield a client of a store that runs in this process. The test's parameter decides if the client is on the store's
    node or on another node."""
    store = open_store(tmp_path / "store", enable_lmq=True, enable_multi_dispatch=True)
    actor = StorageDouble(store, capacity=10_000, host="127.0.0.1", tls=None)
    where = description(actor.lanes.address, node_id=request.param, root=str(store.status().root))
    fake = FakeActor({"describe": lambda: where})
    monkeypatch.setattr(storage_client, "ActorRef", lambda name: fake)
    client = StorageClient("storage-a-0", "here")
    yield client
    client.close()
    actor.close()


def read(client: StorageClient, topic: str, **wanted) -> list[bytes]:
    [found] = client.fetch([FetchRequest(topic, 0, 0, 100, **wanted)], 1 << 20, 0.0, WAIT_S)
    [in_place] = client.find([FetchRequest(topic, 0, 0, 100, **wanted)], 1 << 20, 0.0, WAIT_S)
    # The store builds the records of a batch queue or a light queue from the log's records, so a client cannot read
    # them from the store's files.
    assert not isinstance(in_place, FoundInPlace)
    assert in_place.records == found.records
    return [message.body for message in decode_records(found.records)]


def test_messages_sent_over_a_lane_are_read_from_all_their_queues(client):
    routes = FakeRoutes(BATCH, topic_route("orders", a=1))
    with Producer("g", routes=routes, storage=lambda name: client, born_host=("127.0.0.1", 1)) as producer:
        results = producer.send_batch([Message("batched", b"%d" % n) for n in range(50)], timeout_s=WAIT_S)
        assert [result.queue_offset for result in results] == list(range(50))
        lone = producer.send(Message("batched", b"50"), timeout_s=WAIT_S)
        assert lone.queue_offset == 50
        for n in range(10):
            message = Message("orders", b"%d" % n, properties={"n": str(n)}, light_queues=["alice"] if n % 2 else [])
            producer.send(message, timeout_s=WAIT_S)
    assert read(client, "batched") == [b"%d" % n for n in range(51)]
    assert read(client, ALICE) == [b"1", b"3", b"5", b"7", b"9"]
    assert read(client, ALICE, sql=raymq.sql("n > 4").text) == [b"5", b"7", b"9"]
    assert client.queue_bounds(ALICE, 0, WAIT_S).max_offset == 5
