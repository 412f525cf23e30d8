"""Tests of StorageClient and its lanes (direct socket connections). Some lanes cannot be opened or break, and some
answers are lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from raymq.common.errors import (
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.common.protocol.store import QueueBounds, QueueSpan
from raymq.common.retry import persist_until
from raymq.remoting import lane_pool, storage_client
from raymq.remoting.lane import server as lane_server
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.calls import ControlCalls
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import HEADER, FrameKind
from raymq.remoting.lane.handshake import HELLO_BYTES, VERDICT_BYTES
from raymq.remoting.lane.server import LaneServer
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.clients.lanes import CuttingProxy

BOUNDS = QueueBounds(1, 9, 1)


@pytest.fixture
def servers():
    opened: list[LaneServer] = []

    def serve(methods) -> LaneServer:
        """Run a server of lanes (direct socket connections) that serves `methods` as control calls. The server passes
        APPEND requests to methods["append"]."""
        handlers = {
            FrameKind.OPEN: lambda request: request.drop(),
            FrameKind.CALL: ControlCalls(methods, lambda name, call, fail: call()),
        }
        opened.append(
            LaneServer("test", handlers | {FrameKind.APPEND: methods.get("append", LaneRequest.drop)}, host="127.0.0.1")
        )
        return opened[-1]

    yield serve
    for server in opened:
        server.close()


@pytest.fixture
def client(monkeypatch):
    """Return a function that makes a client of a fake storage actor with the given methods. The actor is on the node
    "here"."""
    clients = []

    def make(**methods) -> tuple[StorageClient, FakeActor]:
        actor = FakeActor(methods)
        monkeypatch.setattr(storage_client, "ActorRef", lambda name: actor)
        clients.append(StorageClient("storage-a-0", "here"))
        return clients[-1], actor

    yield make
    for made in clients:
        made.close()


def test_the_bytes_of_spans_go_over_a_lane(client, servers):
    def bytes_of_spans(spans: Sequence[QueueSpan]) -> list[list[int]]:
        return [[span.queue_id, span.end_offset - span.start_offset] for span in spans]

    server = servers({"bytes_of_spans": bytes_of_spans})
    storage, actor = client(describe=lambda: description(server.address))
    assert storage.bytes_of_spans([QueueSpan("orders", 3, 5, 9), QueueSpan("bills", 0, 0, 2)], WAIT_S) == [
        [3, 4],
        [0, 2],
    ]
    assert actor.calls == ["describe"]


def test_on_the_stores_node_calls_go_over_a_lane_that_is_kept(client, servers):
    server = servers({"queue_bounds": lambda topic, queue_id: BOUNDS})
    storage, actor = client(describe=lambda: description(server.address))
    for _ in range(3):
        assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
        assert server.connections == 1
    assert actor.calls == ["describe"]


@pytest.fixture
def patience(monkeypatch):
    """Return a function that sets the time limit, in seconds, within which a call retries to open a lane (direct socket
    connection)."""

    def patience(seconds: float) -> None:
        monkeypatch.setattr(lane_pool, "OPEN_PATIENCE_S", seconds)

    return patience


def test_a_server_without_a_port_is_a_clear_error_on_other_nodes(client, patience):
    patience(0.2)
    address = LaneAddress("\0raymq-a", b"x" * 32, own_node_only="storage-a-0 cannot listen at node-9: no address")
    storage, actor = client(describe=lambda: description(address, node_id="elsewhere"))
    assert storage.reader() is None
    with pytest.raises(ServiceNotAvailableError, match=r"nothing was sent .*cannot listen at node-9") as caught:
        storage.queue_bounds("orders", 0, WAIT_S)
    assert "queue_bounds" in str(caught.value)
    assert "raymq doctor" in str(caught.value)
    assert set(actor.calls) == {"describe"}


def test_a_port_that_refuses_is_an_error_that_names_the_address(client, patience):
    patience(0.2)
    with closing(socket.socket()) as bound:  # the socket does not listen, so the kernel refuses connections
        bound.bind(("127.0.0.1", 0))
        address = LaneAddress("\0raymq-a", b"x" * 32, *bound.getsockname())
        storage, actor = client(describe=lambda: description(address, node_id="elsewhere"))
        with pytest.raises(
            ServiceNotAvailableError, match=rf"cannot open a lane .* at 127.0.0.1:{address.port}, .*refused"
        ):
            storage.append([], WAIT_S)
    # each connection attempt looks up the server's address again
    assert actor.calls.count("describe") == len(actor.calls) > 1


def test_a_port_that_never_answers_costs_no_more_than_the_calls_timeout(client, monkeypatch):
    monkeypatch.setattr(lane_pool, "OPEN_TIMEOUT_S", 0.05)
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        address = LaneAddress("\0raymq-a", b"x" * 32, *silent.getsockname())
        storage, _ = client(describe=lambda: description(address, node_id="elsewhere"))
        with pytest.raises(ServiceNotAvailableError, match=r"cannot open a lane .* to storage-a-0"):
            storage.append([], 0.3)


def test_a_call_waits_until_the_server_takes_connections_again(client, servers, patience, monkeypatch):
    patience(WAIT_S)
    server = servers({"queue_bounds": lambda topic, queue_id: BOUNDS})
    monkeypatch.setattr(lane_server, "CONNECTIONS_MAX", 0)
    asked = threading.Semaphore(0)

    def describe():
        asked.release()
        return description(server.address)

    storage, _ = client(describe=describe)
    found = []
    thread = threading.Thread(target=lambda: found.append(storage.queue_bounds("orders", 0, WAIT_S)))
    thread.start()
    # Wait until the client has requested the store's address three times. Then the store has refused at least two of
    # its connections.
    for _ in range(3):
        assert asked.acquire(timeout=WAIT_S)
    monkeypatch.setattr(lane_server, "CONNECTIONS_MAX", 1)
    thread.join(WAIT_S)
    assert found == [BOUNDS]


@pytest.mark.parametrize("node_id", ["here", "elsewhere"])
@pytest.mark.parametrize("fault", ["nobody listens", "another secret"])
def test_a_call_finds_the_new_address_of_a_restarted_server(client, servers, node_id, fault):
    server = servers({"queue_bounds": lambda topic, queue_id: BOUNDS})
    with closing(LaneServer("old", {}, host="127.0.0.1")) as other:
        old = replace(other.address, secret=b"x" * 32)
    if fault == "another secret":
        old = replace(server.address, secret=b"x" * 32)
    described = [description(old, node_id=node_id), description(server.address, node_id=node_id)]
    storage, actor = client(describe=lambda: described.pop(0))
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    assert actor.calls == ["describe"] * 2


def test_an_actor_that_ends_while_a_lane_is_tried_is_reported(client):
    described = [description()]

    def describe():
        if not described:
            raise ServiceNotAvailableError("storage-a-0 is not reachable now")
        return described.pop()

    storage, _ = client(describe=describe)
    with pytest.raises(ServiceNotAvailableError, match="is not reachable now"):
        storage.queue_bounds("orders", 0, WAIT_S)


HANDSHAKE_BYTES = HELLO_BYTES + VERDICT_BYTES


@pytest.mark.parametrize("cut_bytes", [1, HELLO_BYTES, HANDSHAKE_BYTES - 1])
def test_a_lane_that_is_cut_in_its_handshake_is_opened_again(client, servers, cut_bytes):
    server = servers({"queue_bounds": lambda topic, queue_id: BOUNDS})
    with closing(CuttingProxy(server.address, cut_bytes)) as proxy:
        addresses = [proxy.address, server.address]
        storage, _ = client(describe=lambda: description(addresses.pop(0), node_id="elsewhere"))
        assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS


@pytest.mark.parametrize("more_bytes", [1, HEADER.size, HEADER.size + 7])
def test_a_lane_that_is_cut_in_an_answer_is_an_error_once_and_the_next_call_works(client, servers, more_bytes):
    server = servers({"queue_bounds": lambda topic, queue_id: BOUNDS})
    with closing(CuttingProxy(server.address, HANDSHAKE_BYTES + more_bytes)) as proxy:
        addresses = [proxy.address, server.address]
        storage, _ = client(describe=lambda: description(addresses.pop(0), node_id="elsewhere"))
        with pytest.raises(ServiceNotAvailableError, match="broke during the call queue_bounds"):
            storage.queue_bounds("orders", 0, WAIT_S)
        assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS


def test_after_a_restart_of_the_actor_its_new_lane_is_used(client, servers):
    old, new = (
        servers({"queue_bounds": lambda topic, queue_id: BOUNDS}),
        servers({"queue_bounds": lambda topic, queue_id: QueueBounds(2, 3, 2)}),
    )
    addresses = [old.address, new.address]
    storage, actor = client(describe=lambda: description(addresses.pop(0)))
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS
    old.close()
    with pytest.raises(ServiceNotAvailableError, match="to storage-a-0 broke during the call queue_bounds"):
        storage.queue_bounds("orders", 0, WAIT_S)
    assert storage.queue_bounds("orders", 0, WAIT_S) == QueueBounds(2, 3, 2)
    assert actor.calls == ["describe"] * 2


def test_a_refusal_of_the_store_is_raised_as_it_is_and_the_lane_is_kept(client, servers):
    def refuse(request):
        raise StoreNotWritableError("the disk is full")

    server = servers({"append": refuse})
    storage, actor = client(describe=lambda: description(server.address))
    for _ in range(2):
        with pytest.raises(StoreNotWritableError, match="the disk is full"):
            storage.append([], WAIT_S)
    assert actor.calls == ["describe"]


def test_a_lane_call_without_an_answer_is_a_timeout_and_the_next_call_takes_another_lane(client, servers):
    kept = []
    server = servers({"append": kept.append, "queue_bounds": lambda topic, queue_id: BOUNDS})
    storage, _ = client(describe=lambda: description(server.address))
    # Open the lane (direct socket connection) now, because opening it would otherwise take part of the next call's
    # timeout.
    storage.queue_bounds("orders", 0, WAIT_S)
    with pytest.raises(RequestTimeoutError):
        storage.append([], 0.2)
    assert storage.queue_bounds("orders", 0, WAIT_S) == BOUNDS


def test_control_calls_always_go_to_the_actor(client):
    storage, actor = client(read_config=lambda name: f"text of {name}")
    assert storage.control("read_config", "topics.json", timeout_s=WAIT_S) == "text of topics.json"
    assert actor.calls == ["read_config"]


def test_an_actor_whose_store_did_not_open_gives_the_reason(client):
    def describe():
        raise StoreNotWritableError("read-only file system")

    storage, _ = client(describe=describe)
    with pytest.raises(StoreNotWritableError, match="read-only"):
        storage.fetch([], 1000, 0.0, WAIT_S)


# Tests of StorageClient.persist_until


class Clock:
    """Fake clock that only sleeping advances."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(lane_pool.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(lane_pool.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_retryable_failure_is_tried_again_until_it_succeeds(clock):
    failures: list[RaymqError] = [ServiceNotAvailableError("1"), RequestTimeoutError("2", 1.0), SystemBusyError("3")]
    lefts = []

    def call(left_s):
        lefts.append(left_s)
        if failures:
            raise failures.pop(0)
        return "done"

    assert persist_until(clock.now_s + 10.0, call) == "done"
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[0] == 10.0


def test_the_last_failure_is_raised_before_the_time_is_up(clock):
    deadline_s = clock.now_s + 3.0

    def call(left_s):
        raise ServiceNotAvailableError(f"left {left_s > 1}")

    with pytest.raises(ServiceNotAvailableError, match="left False"):
        persist_until(deadline_s, call)
    assert clock.now_s < deadline_s


def test_a_failure_that_trying_again_cannot_help_is_raised_at_once(clock):
    calls = []

    def call(left_s):
        calls.append(left_s)
        raise MessageIllegalError("no")

    with pytest.raises(MessageIllegalError):
        persist_until(clock.now_s + 10.0, call)
    assert len(calls) == 1


def test_a_deadline_that_has_passed_still_gives_one_attempt(clock):
    assert persist_until(clock.now_s - 5.0, lambda left_s: left_s) == 0.1
