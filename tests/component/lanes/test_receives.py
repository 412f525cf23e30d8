"""Tests of simple-consumer receives over each transport, with a real store. The broker watches the queue ends, and
clients read the leased messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.broker.pop import queue_ends
from actors.broker.pop.queue_ends import QueueEndsWatch
from raymq.client.consumer.simple.lease_reader import LeaseReader
from raymq.client.consumer.subscription import Subscription
from raymq.common.config.store import FlushDiskType
from raymq.common.protocol.pop import LeasedRange
from raymq.records.filters.sql import SqlFilter
from raymq.remoting import storage_client
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.clients.lanes import StorageDouble
from tests.support.stores.stores import make_batch, open_store
from tests.unit.actors.broker.test_receives import LONG_S, Broker, spans

WAYS = ["in place", "unix", "tcp"]
ALL = Subscription.parse("orders")


@pytest.fixture(params=WAYS)
def connect(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flushes: None
) -> Iterator[tuple[StorageDouble, StorageClient]]:
    """Yield a stand-in for a storage actor, and a client that is connected to it."""
    way = request.param
    actor = StorageDouble(open_store(tmp_path / "store", flush_disk_type=FlushDiskType.ASYNC_FLUSH), host="127.0.0.1")
    root = str(actor.store.status().root) if way == "in place" else str(tmp_path / "not-readable-from-here")
    where = description(actor.lanes.address, node_id="here" if way in ("in place", "unix") else "elsewhere", root=root)
    monkeypatch.setattr(storage_client, "ActorRef", lambda name: FakeActor({"describe": lambda: where}))
    monkeypatch.setattr(queue_ends, "FETCH_PAUSE_S", 0.01)
    client = StorageClient("storage-a-0", "here")
    yield actor, client
    client.close()
    actor.close()


@pytest.fixture
def broker(connect: tuple[StorageDouble, StorageClient]) -> Iterator[Broker]:
    _, client = connect
    broker = Broker(QueueEndsWatch(lambda: client))
    yield broker
    broker.receives.close()
    broker.log.close()


def reader_of(client: StorageClient) -> LeaseReader:
    routes: Any = SimpleNamespace(
        get=lambda topic: SimpleNamespace(master_storage=lambda name: client.name), invalidate=lambda topic: None
    )
    return LeaseReader(routes, SimpleNamespace(get=lambda name: client))  # type: ignore[arg-type]  # a fake


def test_a_message_that_arrives_in_the_store_ends_the_wait(
    connect: tuple[StorageDouble, StorageClient], broker: Broker
) -> None:
    _, client = connect
    waiting = broker.receive(5, wait_s=LONG_S)
    client.append([make_batch([b"one", b"two"])], WAIT_S)
    assert spans(waiting.result(WAIT_S)) == [(0, 2)]
    assert broker.receive(5, wait_s=0.05).result(WAIT_S).ranges == ()
    again = broker.receive(5, wait_s=LONG_S)
    client.append([make_batch([b"three"])], WAIT_S)
    assert spans(again.result(WAIT_S)) == [(2, 1)]


def test_only_leased_messages_are_read(
    connect: tuple[StorageDouble, StorageClient],
) -> None:
    _, client = connect
    client.append([make_batch([b"%d" % number for number in range(20)])], WAIT_S)
    given = LeasedRange("orders", 0, 4, 10, 1, 60_000, 1, f"{0b10_0000_0110:x}")
    found = reader_of(client).read("broker-a", given, ALL, 1 << 20)
    assert [int(message.body) for message in found.messages] == [4, 7, 8, 9, 10, 11, 12]
    assert found.end == 14
    assert b"12" in found.record(6)
    assert found.messages[0].broker_name == "broker-a"


def test_a_read_ends_at_its_byte_limit_and_returns_its_end(connect: tuple[StorageDouble, StorageClient]) -> None:
    _, client = connect
    client.append([make_batch([b"x" * 1000] * 20)], WAIT_S)
    found = reader_of(client).read("broker-a", LeasedRange("orders", 0, 0, 20, 1, 1, 1), ALL, 5000)
    assert 1 <= len(found.messages) < 10
    assert found.end == len(found.messages)


def test_messages_that_the_tags_exclude_are_skipped(connect: tuple[StorageDouble, StorageClient]) -> None:
    _, client = connect
    client.append([make_batch([b"open"] * 5)], WAIT_S)
    found = reader_of(client).read(
        "broker-a", LeasedRange("orders", 0, 0, 5, 1, 1, 1), Subscription.parse("orders", "paid"), 1 << 20
    )
    assert (found.messages, found.end) == ([], 5)


@pytest.mark.parametrize(("text", "passing"), [("price > 5", 0), ("price IS NULL", 5)])
def test_messages_that_a_filter_expression_excludes_are_skipped(
    connect: tuple[StorageDouble, StorageClient], text: str, passing: int
) -> None:
    _, client = connect
    client.append([make_batch([b"open"] * 5)], WAIT_S)
    wanted = Subscription.parse("orders", SqlFilter(text))
    found = reader_of(client).read("broker-a", LeasedRange("orders", 0, 0, 5, 1, 1, 1), wanted, 1 << 20)
    assert (len(found.messages), found.end) == (passing, 5)


@pytest.mark.parametrize("whole", [True, False])
def test_a_leased_message_that_cannot_be_read_does_not_hold_up_its_neighbours(
    connect: tuple[StorageDouble, StorageClient], whole: bool
) -> None:
    """A leased message is damaged: the client reads the other messages, and reports the damaged one as unreadable. With
    `whole`, only the message's body is damaged and its record is intact. Otherwise the field of the body's size is
    damaged."""
    actor, client = connect
    client.append([make_batch([b"body %d" % number for number in range(8)])], WAIT_S)
    log = Path(actor.store.status().root) / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        for number in (1, 3):
            body_at = log.read_bytes().index(b"body %d" % number)
            file.seek(body_at if whole else body_at - 2)
            file.write(b"X")
    given = LeasedRange("orders", 0, 0, 8, 1, 60_000, 1, f"{0b1000:x}")
    found = reader_of(client).read("broker-a", given, ALL, 1 << 20)
    assert [message.body for message in found.messages] == [b"body %d" % number for number in (0, 2, 4, 5, 6, 7)]
    [(offset, lost)] = found.unreadable.items()
    assert (offset, lost.error.queue, lost.error.queue_offset) == (1, "orders@broker-a:0", 1)
    assert lost.error.record_damaged == (not whole)
    assert (b"Xody 1" if whole else b"body 1") in lost.record
    assert b"body 7" in found.record(5)
    assert found.end == 8
