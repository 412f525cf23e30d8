"""Tests that idle connections to a store's Unix socket or port do not disturb other clients. The tests use no
Ray."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from raymq.common.protocol.store import FetchRequest
from raymq.remoting import storage_client
from raymq.remoting.lane import server as lane_server
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.frames import FrameKind, pack_header
from raymq.remoting.storage_client import StorageClient
from tests.support.clients.fakes import WAIT_S, FakeActor, description
from tests.support.clients.lanes import StorageDouble, make_certificates, unix_only
from tests.support.history.waiting import eventually
from tests.support.stores.stores import bodies_of, make_batch, open_store

IDLE = 256
FOREVER_S = 3600.0


@pytest.fixture(params=["unix", "tcp", "tls"])
def actor(request, monkeypatch, tmp_path) -> Iterator[StorageDouble]:
    """Yield a store that accepts connections over a Unix socket, TCP, or TCP with TLS. The handshake timeout never
    expires."""
    monkeypatch.setattr(lane_server, "HANDSHAKE_TIMEOUT_S", FOREVER_S)
    files = None
    if request.param == "tls":
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command that makes the certificates is not installed")
        files = make_certificates(tmp_path)
        monkeypatch.setenv("RAY_USE_TLS", "1")
        monkeypatch.setenv("RAY_TLS_SERVER_CERT", files.certificate)
        monkeypatch.setenv("RAY_TLS_SERVER_KEY", files.key)
        monkeypatch.setenv("RAY_TLS_CA_CERT", files.authority)
    host = "" if request.param == "unix" else "127.0.0.1"
    actor = StorageDouble(open_store(tmp_path / "store"), host=host, tls=files)
    yield actor
    actor.close()


@pytest.fixture
def use(actor, monkeypatch) -> Iterator[Callable[[], tuple[StorageClient, FakeActor]]]:
    """Yield a function that creates a client of the store. The new client has no open connection."""
    clients: list[StorageClient] = []

    def use() -> tuple[StorageClient, FakeActor]:
        node = "elsewhere" if actor.lanes.address.port else "here"
        fake = FakeActor({"describe": lambda: description(actor.lanes.address, node_id=node, root="/not-here")})
        monkeypatch.setattr(storage_client, "ActorRef", lambda name: fake)
        clients.append(StorageClient("storage-a-0", "here"))
        return clients[-1], fake

    yield use
    for client in clients:
        client.close()


def knock(actor: StorageDouble, stack: ExitStack, count: int) -> list[socket.socket]:
    """Open `count` connections to the store, and send nothing over them. Returns their sockets."""
    address = actor.lanes.address
    family, target = (socket.AF_INET, (address.host, address.port)) if address.port else (socket.AF_UNIX, address.name)
    streams = [stack.enter_context(closing(socket.socket(family))) for _ in range(count)]
    for stream in streams:
        stream.settimeout(WAIT_S)
        stream.connect(target)
    return streams


def sends_and_reads(client: StorageClient, fake: FakeActor, body: bytes, queue_id: int) -> None:
    """Check that the client can send a batch and read it back over its lane (direct socket connection), without Ray
    calls."""
    [result] = client.append([make_batch([body], queue_id=queue_id)], WAIT_S)
    request = FetchRequest("orders", queue_id, result.queue_offset, 10)
    [found] = client.fetch([request], 1 << 20, WAIT_S, WAIT_S)
    assert found.count == 1
    assert set(fake.calls) == {"describe"}, "no lane could be opened"


def test_connections_without_a_handshake_do_not_disturb_other_clients(actor, use):
    before, fake = use()
    sends_and_reads(before, fake, b"before", 0)
    threads = threading.active_count()
    with ExitStack() as stack:
        streams = knock(actor, stack, IDLE)
        sends_and_reads(before, fake, b"meanwhile", 0)
        for number in range(1, 9):
            sends_and_reads(*use(), b"new", number)
        for stream in streams:
            stream.setblocking(False)
        assert not any(map(has_ended, streams)), "they still stand there"
        # The process may now have fewer threads than before the test, because threads of an earlier test may end during
        # this test.
        assert threading.active_count() <= threads
    assert bodies_of(actor.store) == [b"before", b"meanwhile"]


def has_ended(stream: socket.socket) -> bool:
    try:
        while stream.recv(1000):
            pass  # Discard the greeting that the server sends.
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_idle_open_lanes_do_not_disturb_other_clients(actor, use):
    """Many idle lanes (direct socket connections) are open, and half of them have sent an incomplete frame. Another
    client sends and reads as usual."""
    remote = bool(actor.lanes.address.port)
    client, fake = use()
    sends_and_reads(client, fake, b"0", 0)
    threads, mine = threading.active_count(), actor.lanes.server.connections
    with ExitStack() as stack:
        for number in range(IDLE):
            lane = stack.enter_context(closing(Lane(actor.lanes.address, remote=remote, timeout_s=WAIT_S)))
            if number % 2:
                lane._stream.sendall(pack_header(100, FrameKind.APPEND, 0, 1, 1, checked=remote) + bytes(97))
        eventually(lambda: actor.lanes.server.connections >= IDLE + mine, "all are open")
        for number in range(1, 9):
            sends_and_reads(client, fake, b"%d" % number, 0)
        # The number of threads may be smaller than before, because threads of an earlier test may end during this test.
        assert threading.active_count() <= threads
        assert actor.lanes.server.connections == IDLE + mine
    assert bodies_of(actor.store) == [b"%d" % number for number in range(9)]


def test_a_full_port_does_not_affect_the_unix_socket(monkeypatch, tmp_path):
    monkeypatch.setattr(lane_server, "HANDSHAKES_MAX", 16)
    monkeypatch.setattr(lane_server, "HANDSHAKE_TIMEOUT_S", FOREVER_S)
    monkeypatch.setattr(lane_server, "HANDSHAKE_GRACE_S", FOREVER_S)
    actor = StorageDouble(open_store(tmp_path / "store"), host="127.0.0.1")
    try:
        with ExitStack() as stack:
            knock(actor, stack, IDLE)
            port = actor.lanes.server._listeners[1]
            eventually(lambda: not port.is_accepting, "the port takes no more")
            for _ in range(4):
                lane = stack.enter_context(closing(Lane(unix_only(actor.lanes.address), timeout_s=WAIT_S)))
                assert lane is not None
            with pytest.raises(BlockingIOError):
                Lane(actor.lanes.address, remote=True, timeout_s=0.05)
        with closing(Lane(actor.lanes.address, remote=True, timeout_s=WAIT_S)):
            pass
    finally:
        actor.close()
