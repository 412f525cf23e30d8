"""Tests of faulty lanes (direct socket connections) of producers and readers: they cannot be opened, break in the
middle, or lead to a restarted server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raymq.client.producer.producer import Producer
from raymq.client.producer.settings import ProducerSettings
from raymq.common.message import Message
from raymq.common.protocol.store import FetchRequest
from raymq.common.retry import persist_until
from raymq.records.format.decode import decode_records
from raymq.remoting import storage_client
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.frames import CHECKED_HEADER
from raymq.remoting.lane.handshake import HELLO_BYTES, VERDICT_BYTES
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeRoutes, description, topic_route
from tests.support.clients.lanes import CuttingProxy, StorageDouble
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")
HANDSHAKE_BYTES = HELLO_BYTES + VERDICT_BYTES


class FaultyActor:
    """Stand-in for a storage actor on another node. Its `describe` returns the address in `address`, or its real
    address if `address` is None."""

    def __init__(self, directory: Path) -> None:
        self.store = open_store(directory)
        self.double = self._open()
        self.address: LaneAddress | None = None
        self.described = 0
        self._stack: list[Any] = []

    def _open(self) -> StorageDouble:
        return StorageDouble(self.store, host="127.0.0.1")

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        assert method == "describe", "the data plane has lanes only"
        self.described += 1
        return description(self.address or self.double.lanes.address, node_id="elsewhere", root="/not-here")

    def restart(self) -> None:
        """Close all lanes (direct socket connections), and accept new lanes at another port."""
        self.double.lanes.close()
        self.double = self._open()

    def cut(self, more_bytes: int) -> CuttingProxy:
        """Make clients connect through a proxy, which cuts each connection after the handshake and `more_bytes` further
        bytes. Returns the proxy."""
        proxy = CuttingProxy(self.double.lanes.address, HANDSHAKE_BYTES + more_bytes)
        self._stack.append(proxy)
        self.address = proxy.address
        return proxy

    def close(self) -> None:
        for proxy in self._stack:
            proxy.close()
        self.double.close()


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyActor]:
    actor = FaultyActor(tmp_path / "store")
    monkeypatch.setattr(storage_client, "ActorRef", lambda name: actor)
    yield actor
    actor.close()


@pytest.fixture
def client(actor: FaultyActor) -> Iterator[StorageClient]:
    client = StorageClient("storage-a-0", "here")
    yield client
    client.close()


@pytest.fixture
def producer(client: StorageClient) -> Iterator[Producer]:
    producer = Producer(
        "g",
        routes=FakeRoutes(topic_route(a=1)),
        storage=lambda name: client,
        born_host=("127.0.0.1", 0),
        settings=ProducerSettings(send_timeout_s=WAIT_S),
    )
    yield producer
    producer.close()


def nobody_listens(actor: FaultyActor) -> None:
    actor.double.lanes.close()
    actor.address = actor.double.lanes.address


def wrong_secret(actor: FaultyActor) -> None:
    actor.restart()
    actor.address = replace(actor.double.lanes.address, secret=b"x" * 32)


def no_port(actor: FaultyActor) -> None:
    actor.restart()
    actor.address = replace(actor.double.lanes.address, port=0)


NOT_OPENED: list[Callable[[FaultyActor], None]] = [nobody_listens, wrong_secret, no_port]


def bodies(client: StorageClient) -> list[bytes]:
    """Return the bodies of the queue's messages, fetched from another node. Retries failed fetches, as
    consumers do."""

    def fetch(left_s: float) -> list[bytes]:
        [found] = client.fetch([FetchRequest("orders", 0, 0, 1000)], 1 << 20, 0.0, left_s)
        return [message.body for message in decode_records(found.records)]

    return persist_until(time.monotonic() + WAIT_S, fetch)


@pytest.mark.parametrize("fault", NOT_OPENED)
def test_a_send_waits_until_a_lane_opens_and_stores_its_message_once(actor, client, producer, fault):
    producer.send(Message("orders", b"before"))
    fault(actor)
    seen = actor.described
    future = producer.send_async(Message("orders", b"during"))
    eventually(lambda: actor.described >= seen + 3, "the lane to be tried again", WAIT_S)
    assert not future.done()
    actor.address = None
    actor.restart()
    future.result(WAIT_S)
    producer.send(Message("orders", b"after"))
    assert bodies(client) == [b"before", b"during", b"after"]


@pytest.mark.parametrize("fault", NOT_OPENED)
def test_a_reader_continues_once_a_lane_opens(actor, client, fault):
    client.append([make_batch([b"one"])], WAIT_S)
    assert bodies(client) == [b"one"]
    fault(actor)
    seen, found = actor.described, []
    thread = threading.Thread(target=lambda: found.append(bodies(client)))
    thread.start()
    eventually(lambda: actor.described >= seen + 3, "the lane to be tried again", WAIT_S)
    actor.address = None
    actor.restart()
    thread.join(WAIT_S)
    assert found == [[b"one"]]


def test_lanes_that_are_cut_anywhere_in_an_answer_lose_and_repeat_no_message(actor, client, producer):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sent = []
    for round_ in range(12):
        proxy = actor.cut(dice.choice([1, CHECKED_HEADER.size, CHECKED_HEADER.size + dice.randrange(1, 32)]))
        client._lanes.drop()
        body = b"%d" % round_
        future = producer.send_async(Message("orders", body))
        eventually(lambda proxy=proxy: proxy.cuts, "a lane to be cut", WAIT_S)
        actor.address = None
        future.result(WAIT_S)
        sent.append(body)
        if dice.random() < 0.3:
            actor.restart()
    assert bodies(client) == sent


def test_a_fetch_that_is_cut_in_its_records_reads_them_all_again(actor, client):
    wanted = [b"%d" % number * 50 for number in range(200)]
    client.append([make_batch(wanted)], WAIT_S)
    for more_bytes in (1, CHECKED_HEADER.size, 5000):
        proxy = actor.cut(more_bytes)
        client._lanes.drop()
        found: list[list[bytes]] = []
        thread = threading.Thread(target=lambda found=found: found.append(bodies(client)))
        thread.start()
        eventually(lambda proxy=proxy: proxy.cuts, "a lane to be cut", WAIT_S)
        actor.address = None
        thread.join(WAIT_S)
        assert found == [wanted]
