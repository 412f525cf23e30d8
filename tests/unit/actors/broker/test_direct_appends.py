"""Tests of direct appends: the thread of a broker's lane (direct socket connection) sends state records to the storage
actor itself. The tests use a real lane.

They check the replies. They also check that the lane's thread leaves records to the writer thread if storing them may
block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from actors.broker import direct_appends as module
from actors.broker.direct_appends import DirectAppends, SentRecords
from actors.broker.state_records import StateRecords, StoredRecords
from raymq.common.config.store import FlushDiskType
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.names import STATE_TOPIC
from raymq.records.format.encode import EncodedBatch
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.appends import ServerHandles, decode_append
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.loop import Loop
from raymq.remoting.lane.server import LaneServer
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.lanes import StorageDouble
from tests.support.stores.stores import bodies_of, open_store

BORN: tuple[str, int] = ("10.0.0.1", 0)


class Storage:
    """Fake client of a storage actor on the broker's node. `appended`: batches that were sent through this client, not
    directly by the thread of the lane (direct socket connection)."""

    name = "storage-broker-a-0"

    def __init__(self, lane: LaneAddress, node_id: str = "here") -> None:
        self.description = SimpleNamespace(node_id=node_id, lane=lane)
        self.appended: list[EncodedBatch] = []

    def describe(self) -> Any:
        return self.description

    def append(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Any:
        self.appended += batches
        return [SimpleNamespace(queue_offset=7, queue_offsets=None, status=None)]


class Broker:
    """Runs the event loop of a broker's lane (direct socket connection), with direct appends to a storage actor at
    `address`."""

    def __init__(self, address: LaneAddress, node_id: str = "here") -> None:
        self.storage: Any = Storage(address, node_id)
        self.loop = Loop("test")
        self.loop.start()
        self.direct = DirectAppends(self.loop, StateRecords(lambda: self.storage, BORN), "here")
        self.ends: Queue[SentRecords] = Queue()

    def in_loop(self, call: Callable[[], Any]) -> Any:
        results: Queue[Any] = Queue()
        self.loop.call_soon(lambda: results.put(call()))
        return results.get(timeout=WAIT_S)

    def connect(self) -> None:
        self.direct.connect(self.storage)
        self.in_loop(lambda: None)

    def send(self, *bodies: bytes) -> bool:
        sent: bool = self.in_loop(lambda: self.direct.send(self.storage, bodies, self.ends.put))
        return sent

    def end(self) -> SentRecords:
        return self.ends.get(timeout=WAIT_S)

    def close(self) -> None:
        self.direct.close()
        self.loop.stop(lambda: None)


@pytest.fixture
def broker() -> Iterator[Callable[..., Broker]]:
    made: list[Broker] = []

    def make(*args: Any, **kwargs: Any) -> Broker:
        made.append(Broker(*args, **kwargs))
        made[-1].connect()
        return made[-1]

    yield make
    for one in made:
        one.close()


class Silent:
    """Fake storage actor that receives appends, and replies only when a test makes it reply."""

    def __init__(self) -> None:
        self.taken: Queue[tuple[LaneRequest, list[bytes], Any]] = Queue()
        handles = ServerHandles()

        def open_handle(request: LaneRequest) -> None:
            handles.open(request.payload)
            request.drop()

        def append(request: LaneRequest) -> None:
            [batch] = decode_append(request.payload, request.count, handles)
            self.taken.put((request, [bytes(batch.records)], batch.producer))

        self.server = LaneServer("test", {FrameKind.OPEN: open_handle, FrameKind.APPEND: append}, host="127.0.0.1")

    def take(self) -> tuple[LaneRequest, list[bytes], Any]:
        return self.taken.get(timeout=WAIT_S)


@pytest.fixture
def silent() -> Iterator[Silent]:
    silent = Silent()
    yield silent
    silent.server.close()


@pytest.mark.parametrize("flush", [FlushDiskType.ASYNC_FLUSH, FlushDiskType.SYNC_FLUSH])
@pytest.mark.parametrize("node_id", ["here", "elsewhere"])
def test_records_get_their_places_and_are_in_the_store(
    tmp_path: Path, broker: Callable[..., Broker], flush: FlushDiskType, node_id: str
) -> None:
    double = StorageDouble(open_store(tmp_path, flush_disk_type=flush), host="127.0.0.1")
    try:
        one = broker(double.lanes.address, node_id)
        bodies = [b"first", b"second", b"third"]
        assert one.send(bodies[0])
        assert one.end().stored == StoredRecords(0, 1, durable=True)
        assert one.send(*bodies[1:])
        sent = one.end()
        assert sent.stored == sent.finish() == StoredRecords(1, 3, durable=True)
        assert bodies_of(double.store, STATE_TOPIC) == bodies
        assert one.storage.appended == []
    finally:
        double.close()


def lost_lane(silent: Silent, one: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    silent.server.close()


def refusal(silent: Silent, one: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    request, *_ = silent.taken.queue[0]
    request.fail(ServiceNotAvailableError("not now"))


def stop(silent: Silent, one: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    one.direct.close()


@pytest.mark.parametrize("happens", [lost_lane, refusal, stop])
def test_without_an_answer_the_very_same_records_are_for_the_thread_that_may_wait(
    silent: Silent, broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch, happens: Callable[..., None]
) -> None:
    one = broker(silent.server.address)
    assert one.send(b"body")
    request, records, producer = silent.take()
    silent.taken.put((request, records, producer))
    happens(silent, one, monkeypatch)
    sent = one.end()
    assert sent.stored is None
    assert sent.finish() == StoredRecords(7, 8, durable=False)
    [again] = one.storage.appended
    assert ([bytes(again.records)], again.producer) == (records, producer)


def test_an_answer_that_is_late_is_given_up_and_so_is_the_lane(
    silent: Silent, broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPT_TIMEOUT_S", 0.01)
    one = broker(silent.server.address)
    assert one.send(b"body")
    assert one.end().stored is None
    assert not one.direct.leads_to(one.storage)
    assert not one.send(b"next")


def test_a_lane_that_ended_is_opened_again(silent: Silent, broker: Callable[..., Broker]) -> None:
    one = broker(silent.server.address)
    assert one.send(b"body")
    silent.server.close()
    one.end()
    other = Silent()
    try:
        one.storage.description = SimpleNamespace(node_id="here", lane=other.server.address)
        one.connect()
        assert one.send(b"next")
        other.take()
    finally:
        other.server.close()


def test_after_close_no_append_is_sent_and_callbacks_run_at_once(silent: Silent, broker: Callable[..., Broker]) -> None:
    one = broker(silent.server.address)
    one.close()
    assert not one.direct.send(one.storage, [b"body"], one.ends.put)
    done: list[str] = []
    one.direct.call_soon(lambda: done.append("called"))
    assert done == ["called"]


def test_long_records_other_stores_and_tls_are_not_for_this_way(silent: Silent, broker: Callable[..., Broker]) -> None:
    one = broker(silent.server.address)
    assert not one.send(b"x" * (module.DIRECT_MAX_BYTES + 1))
    other: Any = Storage(silent.server.address)
    assert not one.in_loop(lambda: one.direct.send(other, [b"body"], one.ends.put))
    address = silent.server.address
    encrypted = broker(LaneAddress(address.name, address.secret, address.host, address.port, tls=True), "elsewhere")
    assert not encrypted.direct.leads_to(encrypted.storage)
    assert not encrypted.send(b"body")
