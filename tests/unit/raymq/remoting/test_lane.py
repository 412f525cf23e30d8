"""A real lane server and its clients: answers, refusals, silence."""

from __future__ import annotations

import logging
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest

from raymq.errors import OffsetOutOfRangeError, RequestTimeoutError, ServiceNotAvailableError
from raymq.remoting import lane
from raymq.remoting.lane import Lane, LaneAddress, LaneServer
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

LOST = (EOFError, OSError)


@pytest.fixture
def released():
    """Set at the end, so that no server thread stays in a slow method."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def server(released):
    def refuse():
        raise OffsetOutOfRangeError("orders@a:0", 9, 1, 5)

    def break_down():
        raise KeyError("a bug")

    methods = {
        "double": lambda value: value * 2,
        "refuse": refuse,
        "break_down": break_down,
        "wait": lambda: released.wait(WAIT_S),
        "unpicklable": threading.Lock,
    }
    server = LaneServer(methods, "test")
    yield server
    server.close()


@pytest.fixture
def connect(server):
    lanes = []

    def connect(address=None):
        lanes.append(Lane(address or server.address))
        return lanes[-1]

    yield connect
    for opened in lanes:
        opened.close()


def test_a_call_returns_the_result_of_the_method(connect):
    opened = connect()
    assert opened.call("double", (21,), WAIT_S) == 42
    assert opened.call("double", (b"x" * 3_000_000,), WAIT_S) == b"x" * 6_000_000
    assert not opened.closed


def test_an_error_of_the_store_arrives_as_it_is_and_the_lane_goes_on(connect):
    opened = connect()
    with pytest.raises(OffsetOutOfRangeError) as caught:
        opened.call("refuse", (), WAIT_S)
    assert (caught.value.queue_offset, caught.value.max_offset) == (9, 5)
    assert opened.call("double", (1,), WAIT_S) == 2


def test_a_bug_in_the_server_is_a_retryable_error(connect):
    opened = connect()
    with pytest.raises(ServiceNotAvailableError, match=r"break_down failed in the storage actor: KeyError\('a bug'\)"):
        opened.call("break_down", (), WAIT_S)
    assert opened.call("double", (1,), WAIT_S) == 2


def test_a_method_that_is_not_served_is_refused(connect):
    opened = connect()
    for method in ("close", "__init__", ""):
        with pytest.raises(ServiceNotAvailableError, match="does not serve"):
            opened.call(method, (), WAIT_S)


def test_lanes_do_not_wait_for_each_other(connect, released):
    slow, quick = connect(), connect()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(slow.call("wait", (), WAIT_S)))
    thread.start()
    assert quick.call("double", (1,), WAIT_S) == 2
    assert answers == []
    released.set()
    thread.join(WAIT_S)
    assert answers == [True]


def test_without_an_answer_in_time_the_call_fails_and_the_lane_is_closed(connect):
    opened = connect()
    with pytest.raises(RequestTimeoutError, match=r"lane call wait gave no answer within 0\.01 s"):
        opened.call("wait", (), 0.01)
    assert opened.closed  # the answer may still come: it must not be taken for that of the next call
    with pytest.raises(OSError, match="closed"):
        opened.call("double", (1,), WAIT_S)


def test_a_wrong_secret_opens_nothing(server, connect):
    with pytest.raises((lane.AuthenticationError, *LOST)):
        connect(LaneAddress(server.address.name, b"y" * 32))
    assert connect().call("double", (1,), WAIT_S) == 2


def test_a_server_that_does_not_know_the_secret_is_not_trusted(connect):
    impostor = LaneServer({"double": lambda value: 0}, "impostor")
    try:
        with pytest.raises((lane.AuthenticationError, *LOST)):
            connect(LaneAddress(impostor.address.name, b"y" * 32))
    finally:
        impostor.close()


def test_every_server_has_a_name_and_a_secret_of_its_own(server):
    other = LaneServer({}, "test")
    other.close()
    assert other.address.name != server.address.name
    assert other.address.secret != server.address.secret


def test_where_nobody_listens_no_lane_is_opened(connect):
    with pytest.raises(OSError, match="refused"):
        connect(LaneAddress("\0raymq-nobody", b"x" * 32))


def test_a_server_that_is_closed_ends_its_lanes_and_takes_no_more(server, connect):
    opened = connect()
    assert opened.call("double", (1,), WAIT_S) == 2
    server.close()
    server.close()
    with pytest.raises(LOST):
        opened.call("double", (1,), WAIT_S)
    assert opened.closed
    with pytest.raises(LOST):
        connect()


def test_a_call_under_way_when_the_server_is_closed_fails(server, connect, released):
    opened = connect()
    failures = []

    def call():
        try:
            opened.call("wait", (), WAIT_S)
        except LOST as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    server.close()
    released.set()
    thread.join(WAIT_S)
    assert len(failures) == 1


def test_a_stopped_server_does_not_hang_its_clients(monkeypatch, connect):
    """A stopped process still accepts, because its backlog does, and never answers."""
    monkeypatch.setattr(lane, "IO_TIMEOUT_S", 0.05)
    name = f"\0raymq-test-stopped-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(name)
        stopped.listen(4)
        with pytest.raises(LOST):
            connect(LaneAddress(name, b"x" * 32))


def test_a_client_that_never_authenticates_is_dropped():
    server = LaneServer({}, "test")
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.settimeout(WAIT_S)
            silent.connect(server.address.name)
            while silent.recv(1000):
                pass  # the challenge; then the end
    finally:
        server.close()


def test_beyond_the_limit_a_connection_is_refused_and_a_closed_one_frees_its_slot(monkeypatch, server, connect):
    monkeypatch.setattr(lane, "CONNECTIONS_MAX", 2)
    first, second = connect(), connect()
    assert first.call("double", (1,), WAIT_S) == second.call("double", (1,), WAIT_S) == 2
    with pytest.raises(LOST):
        connect()
    first.close()
    eventually(lambda: len(server._connections) < 2, "the server notices", WAIT_S)
    assert connect().call("double", (1,), WAIT_S) == 2


def test_an_answer_that_cannot_be_sent_is_an_error_and_the_lane_goes_on(connect):
    opened = connect()
    with pytest.raises(ServiceNotAvailableError, match="unpicklable gave no answer to send: TypeError"):
        opened.call("unpicklable", (), WAIT_S)
    assert opened.call("double", (1,), WAIT_S) == 2


def test_a_moment_without_a_free_descriptor_does_not_end_the_server(caplog, server, connect):
    caplog.set_level(logging.WARNING)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(WAIT_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(waiting.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            waiting.connect(server.address.name)
            eventually(lambda: "Too many open files" in caplog.text, "the server has met the limit", WAIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert waiting.recv(1000)
        assert connect().call("double", (21,), WAIT_S) == 42


def trickle(streams: list[socket.socket], stop: threading.Event) -> None:
    """Send a byte now and then, as if more were to come, on every socket that is still open."""
    for stream in streams:
        stream.setblocking(False)
    parts = iter(b"\0\0\0\x30" + b"x" * 1000)
    while not stop.wait(0.2):
        part = bytes([next(parts)])
        for stream in streams:
            try:
                stream.send(part)
            except OSError:
                continue  # dropped


def test_connections_that_say_little_keep_nobody_from_a_lane_and_are_dropped(server, connect):
    """As many connections as there are lanes, each of which sends a byte now and then."""
    streams = [socket.socket(socket.AF_UNIX) for _ in range(lane.CONNECTIONS_MAX)]
    stop = threading.Event()
    talker = threading.Thread(target=trickle, args=(streams, stop))
    try:
        for stream in streams:
            stream.settimeout(WAIT_S)
            connect_raw(stream, server.address.name)
        talker.start()

        def connected() -> Lane | None:
            try:
                return connect()
            except BlockingIOError:
                return None  # the backlog is full for a moment

        assert eventually(connected, "a lane", WAIT_S).call("double", (21,), WAIT_S) == 42
        eventually(lambda: all(map(is_dropped, streams)), "all of them are dropped", WAIT_S)
        assert connect().call("double", (21,), WAIT_S) == 42
    finally:
        stop.set()
        talker.join(WAIT_S)
        for stream in streams:
            stream.close()


def connect_raw(stream: socket.socket, name: str) -> None:
    """Connect, also while the server's backlog is full."""

    def connected() -> bool:
        try:
            stream.connect(name)
        except BlockingIOError:
            return False
        return True

    eventually(connected, "the server takes the connection", WAIT_S)


def is_dropped(stream: socket.socket) -> bool:
    try:
        while stream.recv(1000):
            pass  # the challenge
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process of another user")
def test_a_process_of_another_user_is_turned_away(server, connect):
    """It is closed without an answer: not even the challenge is sent."""
    script = (
        "import os, socket, sys; os.setuid(65534); stream = socket.socket(socket.AF_UNIX); stream.settimeout(60);"
        "stream.connect('\\0' + sys.argv[1]); print(stream.recv(1000))"
    )
    command = [sys.executable, "-c", script, server.address.name[1:]]
    told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert told.stdout.strip() == "b''", told
    assert connect().call("double", (21,), WAIT_S) == 42
