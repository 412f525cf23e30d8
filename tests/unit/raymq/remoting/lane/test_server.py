"""Tests of a real server of lanes (direct socket connections beside Ray's calls) and its clients: answers, refusals,
peers that send nothing, and the limits that protect the server."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from itertools import repeat

import pytest

from raymq.common.errors import (
    InvalidArgumentError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.identity import Identity, acting_as
from raymq.remoting.lane import client as lane_client, connection, handshake, server as lane_server
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import pack_header
from raymq.remoting.lane.handshake import LaneRefusedError, LaneSecretError
from raymq.remoting.lane.server import LaneServer
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.lanes import BREAK, ECHO, LATER, REFUSE, SILENT, echo_server, make_certificates
from tests.support.history.waiting import eventually

LOST = (EOFError, OSError)


def test_each_of_several_requests_in_flight_gets_its_answer(server, way):
    with closing(Lane(server.address, timeout_s=WAIT_S, **way[1])) as lane:
        deadline_s = time.monotonic() + WAIT_S
        for body in (b"one", b"two"):
            lane.send(ECHO, (body,), deadline_s)
        assert [bytes(lane.receive_next(deadline_s).payload) for _ in range(2)] == [b"one", b"two"]


@pytest.fixture(params=["unix", "tcp", "tls"])
def way(request, monkeypatch, tmp_path):
    """Return the options of a server of lanes (direct socket connections) and of its clients, for the test's kind of
    connection: Unix socket, TCP or TLS."""
    if request.param == "unix":
        return {}, {}
    if request.param == "tcp":
        return {"host": "127.0.0.1"}, {"remote": True}
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command that makes the certificates is not installed")
    files = make_certificates(tmp_path)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", files.certificate)
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", files.key)
    monkeypatch.setenv("RAY_TLS_CA_CERT", files.authority)
    return {"host": "127.0.0.1", "tls": files}, {"remote": True}


@pytest.fixture
def late():
    return []


@pytest.fixture(autouse=True)
def patient_handshakes(monkeypatch):
    """Let a handshake take so long that no pause of the machine ends it."""
    monkeypatch.setattr(lane_server, "HANDSHAKE_TIMEOUT_S", WAIT_S)


@pytest.fixture
def impatient_handshakes(monkeypatch, patient_handshakes):
    """Let the server drop a connection that has not authenticated within 2 s."""
    monkeypatch.setattr(lane_server, "HANDSHAKE_TIMEOUT_S", 2.0)


@pytest.fixture
def server(way, late):
    server = echo_server(OffsetOutOfRangeError("orders@a:0", 9, 1, 5), late=late, **way[0])
    yield server
    server.close()


@pytest.fixture
def connect(server, way):
    lanes = []

    def connect(address=None, **options):
        lanes.append(Lane(address or server.address, timeout_s=WAIT_S, **way[1], **options))
        return lanes[-1]

    yield connect
    for opened in lanes:
        opened.close()


def echo(opened: Lane, data: bytes) -> bytes:
    return bytes(opened.call(ECHO, (data,), WAIT_S).payload)


@pytest.mark.parametrize("size", [0, 1, 70, 20_000, 65_535, 65_536, 65_537, 200_000, 5_000_000])
def test_a_call_returns_the_answer_of_its_handler(connect, size):
    opened = connect()
    for _ in range(2):
        answer = opened.call(ECHO, (os.urandom(7), bytes(size)), WAIT_S, flags=6, count=65535)
        assert (len(answer.payload), answer.flags, answer.count) == (size + 7, 6, 65535)
    assert not opened.closed


@pytest.mark.parametrize("size", [0, 1, 70, 16_000, 20_000, 65_000, 200_000])
def test_a_small_call_is_a_call(connect, size):
    opened = connect()
    for timeout_s in (WAIT_S, WAIT_S, WAIT_S / 2):
        data = os.urandom(size)
        answer = opened.call_small(ECHO, (data, b"end"), size + 3, timeout_s)
        assert (bytes(answer.payload), answer.flags, answer.count) == (data + b"end", 0, 1)
        assert echo(opened, b"between") == b"between"
    with pytest.raises(OffsetOutOfRangeError):
        opened.call_small(REFUSE, (), 0, WAIT_S)
    assert bytes(opened.call_small(ECHO, (b"1",), 1, WAIT_S).payload) == b"1"


def test_a_small_call_ignores_answers_to_earlier_requests(connect, server, late):
    opened = connect()
    for _ in range(3):
        opened.send(ECHO, (b"old",), time.monotonic() + WAIT_S)
    assert bytes(opened.call_small(ECHO, (b"new",), 3, WAIT_S).payload) == b"new"


def test_a_small_call_without_an_answer_is_a_timeout_and_ends_the_lane(connect, server):
    opened = connect()
    with pytest.raises(RequestTimeoutError):
        opened.call_small(SILENT, (), 0, 0.05)
    assert opened.closed
    late = connect()
    with pytest.raises(RequestTimeoutError):
        late.call_small(ECHO, (), 0, 0.0)
    assert late.closed
    other = connect()
    server.close()
    with pytest.raises(LOST):
        other.call_small(ECHO, (), 0, WAIT_S)
    assert other.closed


def test_answers_of_many_threads_arrive_once_and_whole(connect, late):
    opened = [connect() for _ in range(8)]
    answering = threading.Event()

    def answer() -> None:
        while not answering.is_set():
            try:
                request = late.pop()
            except IndexError:
                answering.wait(0.0005)
                continue
            request.answer(b"%d " % request.count * (1 + request.count % 50 * 20), count=request.count)

    threads = [threading.Thread(target=answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    failures = []

    def ask(lane, number) -> None:
        for index in range(200):
            count = 1000 * number + index
            answer = lane.call(LATER, (), WAIT_S, count=count)
            if (answer.count, bytes(answer.payload)) != (count, b"%d " % count * (1 + count % 50 * 20)):
                failures.append((number, index))

    askers = [threading.Thread(target=ask, args=(lane, number)) for number, lane in enumerate(opened)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join(WAIT_S)
    answering.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    assert not any(thread.is_alive() for thread in askers)


def test_a_call_for_now_is_made_at_once_while_the_loop_waits_and_its_timers_run(server):
    loop, made = server.loop, threading.Event()
    seen = []

    def call() -> None:
        seen.append((threading.current_thread(), loop.is_own_thread))
        loop.call_at(time.monotonic() + 0.01, made.set)

    eventually(lambda: (loop.call_now(call), bool(seen))[1], "the call is made")
    eventually(lambda: (loop.call_now(call), seen[-1][0] is threading.current_thread())[1], "it is made by its caller")
    assert all(own for _, own in seen)
    assert made.wait(WAIT_S)


def test_a_call_that_asks_for_itself_at_once_keeps_no_other_waiting(server):
    loop, made, ended = server.loop, threading.Event(), threading.Event()

    def again() -> None:
        if not ended.is_set():
            loop.call_at(0.0, again)

    loop.call_soon(again)
    loop.call_soon(lambda: loop.call_soon(made.set))
    assert made.wait(WAIT_S)
    ended.set()


def test_a_payload_of_many_parts_arrives_whole(connect):
    parts = [bytes([index % 256]) * index for index in range(2000)]
    assert bytes(connect().call(ECHO, parts, WAIT_S).payload) == b"".join(parts)


def test_an_error_of_the_store_arrives_unchanged_and_the_lane_stays_open(connect):
    opened = connect()
    with pytest.raises(OffsetOutOfRangeError) as caught:
        opened.call(REFUSE, (), WAIT_S)
    assert (caught.value.queue_offset, caught.value.max_offset) == (9, 5)
    assert echo(opened, b"1") == b"1"


def test_a_bug_in_the_server_is_a_retryable_error(connect):
    opened = connect()
    with pytest.raises(ServiceNotAvailableError, match=r"kind 20 failed in test: KeyError\('a bug'\)"):
        opened.call(BREAK, (), WAIT_S)
    assert echo(opened, b"1") == b"1"


@pytest.mark.parametrize("size", [0, 100_000])
def test_a_kind_that_is_not_served_is_refused(connect, size):
    opened = connect()
    for kind in (0, 255):
        with pytest.raises(ServiceNotAvailableError, match="does not serve requests of kind"):
            opened.call(kind, (bytes(size),), WAIT_S)


def test_lanes_do_not_wait_for_each_other(connect, late):
    slow, quick = connect(), connect()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(slow.call(LATER, (), WAIT_S)))
    thread.start()
    eventually(lambda: late, "the slow call is there")
    assert echo(quick, b"1") == b"1"
    assert answers == []
    late[0].answer(b"at last", count=3)
    thread.join(WAIT_S)
    assert answers[0].count == 3


def test_a_request_is_answered_once_by_any_thread(connect, late):
    opened = connect()
    thread = threading.Thread(
        target=lambda: [
            eventually(lambda: late, "the call is there"),
            late[0].answer(b"first"),
            late[0].answer(b"second"),
            late[0].fail(ValueError("third")),
        ]
    )
    thread.start()
    assert bytes(opened.call(LATER, (), WAIT_S).payload) == b"first"
    thread.join(WAIT_S)
    assert echo(opened, b"next") == b"next"


def test_without_an_answer_in_time_the_call_fails_and_the_lane_is_closed(connect):
    opened = connect()
    with pytest.raises(RequestTimeoutError, match=r"did not complete within 0\.01 s"):
        opened.call(SILENT, (), 0.01)
    # the connection is closed, because a late answer could be taken for the answer to the next call
    assert opened.closed
    with pytest.raises(OSError, match=r"closed|Bad file"):
        opened.call(ECHO, (), WAIT_S)


def test_an_answer_to_a_request_that_another_took_the_place_of_is_passed_over(connect, late):
    opened = connect()
    deadline_s = float("inf")
    opened.send(LATER, (), deadline_s)
    eventually(lambda: late, "the first request is there")
    opened.send(ECHO, (b"new",), deadline_s)
    late[0].answer(b"old")
    assert bytes(opened.receive(deadline_s).payload) == b"new"
    opened.send(ECHO, (b"newer",), deadline_s)
    assert bytes(opened.receive(deadline_s).payload) == b"newer"


# Tests of the clients that the server of lanes (direct socket connections) accepts or refuses


def test_a_wrong_secret_opens_nothing(server, connect, way):
    address = server.address
    wrong = LaneAddress(address.name, b"y" * 32, address.host, address.port, address.tls)
    with pytest.raises((LaneSecretError, *LOST)):
        connect(wrong)
    assert echo(connect(), b"1") == b"1"


def test_a_server_that_does_not_know_the_secret_is_not_trusted():
    hello = handshake.make_hello()
    reply = handshake.make_reply(b"s" * 32, hello)
    for secret in (b"t" * 32, b""):
        verdict = handshake.make_verdict(secret, hello, reply, handshake.HandshakeStatus.OPEN)
        with pytest.raises(LaneSecretError):
            handshake.check_verdict(b"s" * 32, hello, reply, verdict)
    # A server does not authenticate itself if it only sends the client's own proof back to the client.
    with pytest.raises(LaneSecretError):
        handshake.check_verdict(b"s" * 32, hello, reply, b"\x01" + reply[-32:])


def test_a_client_of_another_version_gets_an_error(monkeypatch, connect, server):
    hello = handshake.make_hello(version=7)
    with pytest.raises(LaneRefusedError, match="uses version 7 of the lane protocol, and this client uses version 3"):
        handshake.make_reply(b"s" * 32, hello)

    def other_version(secret, hello, identity):
        return handshake.make_hello(7) + bytes(32)

    monkeypatch.setattr(lane_client.handshake, "make_reply", other_version)
    monkeypatch.setattr(lane_client.handshake, "check_verdict", lambda secret, hello, reply, answer: reject(answer))

    def reject(answer):
        raise LaneRefusedError(f"verdict {answer[0]}")

    with pytest.raises(LaneRefusedError, match="verdict 3"):
        connect()


ALICE, BOB = Identity("alice", b"a" * 32), Identity("bob", b"b" * 32)


@pytest.fixture
def server_with_users(way):
    keys = {ALICE.user: ALICE.key}
    seen = []

    def tell(request: LaneRequest) -> None:
        seen.append((request.user, request.address))
        request.answer(b"ok")

    server = LaneServer("test", {ECHO: tell}, users=keys.get, **way[0])
    server.seen, server.keys = seen, keys
    yield server
    server.close()


def test_a_lane_is_its_users_from_the_handshake_on(server_with_users, connect, way):
    with acting_as(ALICE):
        lane = connect(server_with_users.address)
    lane.call(ECHO, (b"",), WAIT_S)
    assert server_with_users.seen == [("alice", "127.0.0.1" if way[1] else "")]


@pytest.mark.parametrize(
    "wrong", [None, BOB, Identity("alice", BOB.key), Identity("", ALICE.key)], ids=["nobody", "unknown", "key", "empty"]
)
def test_a_client_without_a_signature_gets_no_lane_and_a_reason(server_with_users, connect, wrong):
    name = "" if wrong is None else wrong.user
    with acting_as(wrong), pytest.raises(LaneRefusedError, match=f"refuses user '{name}'"):
        connect(server_with_users.address)
    with acting_as(ALICE):
        connect(server_with_users.address).call(ECHO, (b"",), WAIT_S)
    assert server_with_users.connections == 1


def test_a_replayed_handshake_reply_opens_no_second_lane(server_with_users, connect, monkeypatch):
    heard = []
    make = handshake.make_reply
    monkeypatch.setattr(handshake, "make_reply", lambda *given: heard.append(make(*given)) or heard[0])
    with acting_as(ALICE):
        connect(server_with_users.address)
        with pytest.raises(LOST):
            connect(server_with_users.address)


def test_while_the_users_are_not_known_nobody_gets_a_lane(server_with_users, connect):
    def not_yet(name):
        raise ServiceNotAvailableError("not yet")

    server_with_users.users = not_yet
    with acting_as(ALICE), pytest.raises(LaneRefusedError, match="has not loaded the users yet"):
        connect(server_with_users.address)


def test_a_server_without_users_accepts_every_client_with_its_secret(server, connect):
    with acting_as(BOB):
        assert echo(connect(), b"1") == b"1"


def test_a_name_that_a_handshake_cannot_carry_is_refused_by_the_client(server, connect):
    with acting_as(Identity("x" * 128, b"k")), pytest.raises(LaneRefusedError, match="has 128 bytes; at most"):
        connect()


def test_every_server_has_a_name_and_a_secret_of_its_own(server):
    other = echo_server()
    other.close()
    assert other.address.name != server.address.name
    assert other.address.secret != server.address.secret


def test_where_nobody_listens_no_lane_is_opened():
    with pytest.raises(OSError, match="refused"):
        Lane(LaneAddress("\0raymq-nobody", b"x" * 32))
    with pytest.raises(OSError, match="accepts connections from its own node only"):
        Lane(LaneAddress("\0raymq-nobody", b"x" * 32), remote=True)


def test_a_server_that_is_closed_ends_its_lanes_and_takes_no_more(server, connect):
    opened = connect()
    assert echo(opened, b"1") == b"1"
    server.close()
    server.close()
    with pytest.raises(LOST):
        echo(opened, b"1")
    assert opened.closed
    with pytest.raises(LOST):
        connect()


def test_a_call_under_way_when_the_server_is_closed_fails_and_a_late_answer_is_dropped(server, connect, late):
    opened = connect()
    failures = []

    def call():
        try:
            opened.call(LATER, (), WAIT_S)
        except LOST as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: late, "the call is there")
    server.close()
    late[0].answer(b"nobody hears it")
    thread.join(WAIT_S)
    assert len(failures) == 1


def test_a_request_is_told_once_that_its_connection_has_ended(way):
    gone: list[int] = []
    late: list[LaneRequest] = []

    def keep(request: LaneRequest) -> None:
        request.when_gone(lambda: gone.append(request.count))
        late.append(request)

    with closing(LaneServer("test", {LATER: keep}, **way[0])) as server:
        lanes = [Lane(server.address, timeout_s=WAIT_S, **way[1]) for _ in range(2)]
        deadline_s = time.monotonic() + WAIT_S
        for count in (1, 2):
            lanes[0].send(LATER, (b"",), deadline_s, count=count)
        lanes[1].send(LATER, (b"",), deadline_s, count=3)
        eventually(lambda: len(late) == 3, "all requests to arrive")
        [first] = [one for one in late if one.count == 1]
        first.answer(b"answer")
        assert bytes(lanes[0].receive_next(deadline_s).payload) == b"answer"
        assert gone == []
        lanes[0].close()
        eventually(lambda: gone == [2], "the request without an answer")
        for one in late:
            one.answer(b"too late")
        assert bytes(lanes[1].receive_next(deadline_s).payload) == b"too late"
        lanes[1].close()
        eventually(lambda: server.connections == 0, "the end of both connections")
    assert gone == [2]


def test_a_stopped_server_does_not_hang_its_clients():
    """A stopped server process does not block its clients. The kernel still accepts connections for it, up to the
    backlog, but the process never answers."""
    name = f"\0raymq-test-stopped-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(name)
        stopped.listen(4)
        with pytest.raises(LOST):
            Lane(LaneAddress(name, b"x" * 32), timeout_s=0.05)


@pytest.mark.usefixtures("impatient_handshakes")
def test_a_client_that_never_authenticates_is_dropped():
    server = echo_server()
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.settimeout(WAIT_S)
            silent.connect(server.address.name)
            while silent.recv(1000):
                pass  # read the server's first message (hello), and then the end of the stream
    finally:
        server.close()


def test_beyond_the_limit_a_connection_is_refused_and_a_closed_one_frees_its_slot(monkeypatch, server, connect):
    monkeypatch.setattr(lane_server, "CONNECTIONS_MAX", 2)
    first, second = connect(), connect()
    assert echo(first, b"1") == echo(second, b"1") == b"1"
    with pytest.raises(LaneRefusedError, match="reached its maximum number of connections"):
        connect()
    first.close()
    eventually(lambda: server.connections < 2, "the server notices", WAIT_S)
    assert echo(connect(), b"1") == b"1"


def test_a_moment_without_a_free_descriptor_does_not_end_the_server(caplog, server, connect):
    caplog.set_level(logging.WARNING)
    opened = connect()
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(WAIT_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(waiting.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            waiting.connect(server.address.name)
            eventually(lambda: "Too many open files" in caplog.text, "the server has met the limit", WAIT_S)
            assert echo(opened, b"1") == b"1"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert waiting.recv(1000)
        assert echo(connect(), b"1") == b"1"


@pytest.mark.usefixtures("impatient_handshakes")
def test_slow_connections_are_dropped_and_do_not_block_other_clients(monkeypatch, server, connect):
    """Connections that send only a byte now and then are dropped, and do not keep other clients from connecting. The
    test opens twice as many such connections as may authenticate at the same time."""
    monkeypatch.setattr(lane_server, "HANDSHAKES_MAX", 64)
    streams = [socket.socket(socket.AF_UNIX) for _ in range(2 * lane_server.HANDSHAKES_MAX)]
    stop = threading.Event()
    talker = threading.Thread(target=trickle, args=(streams, stop))
    try:
        for stream in streams:
            stream.settimeout(WAIT_S)
            stream.connect(server.address.name)
        talker.start()
        assert echo(connect(), b"1") == b"1"
        eventually(lambda: all(map(is_dropped, streams)), "all of them are dropped", WAIT_S)
        assert echo(connect(), b"1") == b"1"
    finally:
        stop.set()
        talker.join(WAIT_S)
        for stream in streams:
            stream.close()


@pytest.mark.usefixtures("impatient_handshakes")
def test_silent_connections_that_fill_the_backlog_keep_nobody_from_a_lane(monkeypatch, server, connect):
    """Silent connections that fill the server's backlog do not keep other clients from connecting. The test opens so
    many connections that some can neither authenticate nor wait in the backlog."""
    monkeypatch.setattr(lane_server, "HANDSHAKES_MAX", 16)
    server._listeners[0].listener.listen(32)
    streams = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    try:
        refused = 0
        for stream in streams:
            stream.setblocking(False)
            try:
                stream.connect(server.address.name)
            except BlockingIOError:
                refused += 1
        # A lane (direct socket connection) waits until the server's backlog has space. A plain connect fails at once
        # while the backlog is full.
        assert echo(connect(), b"1") == b"1"
        print(f"the backlog was full for {refused} connections")
        eventually(lambda: not server._listeners[0].handshakes, "all of them are dropped", WAIT_S)
    finally:
        for stream in streams:
            stream.close()


def trickle(streams: list[socket.socket], stop: threading.Event) -> None:
    """Send a byte now and then on every open socket, as if the rest of a message would follow."""
    for stream in streams:
        stream.setblocking(False)
    parts = iter(handshake.make_hello() + bytes(20))
    while not stop.wait(0.2):
        part = bytes([next(parts)])
        for stream in streams:
            try:
                stream.send(part)
            except OSError:
                continue  # the server has dropped this connection


def is_dropped(stream: socket.socket) -> bool:
    try:
        while stream.recv(1000):
            pass  # skip the hello message that the server sends first on a new connection
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process of another user")
def test_a_process_of_another_user_is_turned_away():
    """The server closes a connection from a process of another user without sending anything."""
    server = echo_server()
    script = (
        "import os, socket, sys; os.setuid(65534); stream = socket.socket(socket.AF_UNIX); stream.settimeout(60);"
        "stream.connect('\\0' + sys.argv[1]); print(stream.recv(1000))"
    )
    command = [sys.executable, "-c", script, server.address.name[1:]]
    try:
        told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert told.stdout.strip() == "b''", told
        with_secret = Lane(server.address, timeout_s=WAIT_S)
        assert echo(with_secret, b"1") == b"1"
        with_secret.close()
    finally:
        server.close()


# Tests of large frames and slow clients


def test_a_frame_over_the_limit_is_refused_and_the_lane_stays_open(way):
    server = echo_server(frame_max_bytes=100_000, **way[0])
    opened = Lane(server.address, timeout_s=WAIT_S, **way[1])
    try:
        with pytest.raises(InvalidArgumentError, match="a request has 300000 bytes; at most 100000 are allowed"):
            opened.call(ECHO, (bytes(300_000),), WAIT_S)
        assert echo(opened, bytes(100_000)) == bytes(100_000)
    finally:
        opened.close()
        server.close()


def test_large_frames_wait_for_their_turn_and_all_come_through(monkeypatch, way):
    monkeypatch.setattr(lane_server, "LARGE_FRAMES_BYTES", 1 << 20)
    monkeypatch.setattr(lane_server, "LONGEST_TURN_WAIT_S", WAIT_S)
    server = echo_server(**way[0])
    lanes = [Lane(server.address, timeout_s=WAIT_S, **way[1]) for _ in range(8)]
    answers: list[bytes] = []

    def call(lane, number):
        answers.append(echo(lane, bytes([number]) * 700_000))

    try:
        threads = [
            threading.Thread(
                target=lambda lane, data: answers.append(echo(lane, data)), args=(lane, bytes([n]) * 700_000)
            )
            for n, lane in enumerate(lanes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(answers) == [bytes([n]) * 700_000 for n in range(8)]
        eventually(lambda: not len(server.turns), "all turns are given back")
        assert server.turns.granted_bytes == server.turns.waiting_bytes == 0
    finally:
        for lane in lanes:
            lane.close()
        server.close()


def half_a_frame(opened: Lane, size: int) -> None:
    """Send the first bytes of a large frame, but not the rest of the frame."""
    opened._stream.sendall(pack_header(size, ECHO, 0, 0, 99, checked=opened._checked) + bytes(70_000))


def test_a_client_whose_turn_would_be_late_gets_the_delay(monkeypatch):
    monkeypatch.setattr(lane_server, "LARGE_FRAMES_BYTES", 1 << 20)
    monkeypatch.setattr(lane_server, "LONGEST_TURN_WAIT_S", 0.0)
    server = echo_server()
    holder, other = Lane(server.address, timeout_s=WAIT_S), Lane(server.address, timeout_s=WAIT_S)
    try:
        half_a_frame(holder, 1 << 20)
        eventually(lambda: server.turns.granted_bytes, "the turn is taken")
        with pytest.raises(SystemBusyError, match="nothing was stored, send again") as caught:
            echo(other, bytes(500_000))
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 0
        assert echo(other, b"small") == b"small"
        holder.close()
        eventually(lambda: not len(server.turns), "the turn is given back")
        assert echo(other, bytes(500_000)) == bytes(500_000)
    finally:
        holder.close()
        other.close()
        server.close()


def test_a_frame_that_waits_too_long_for_its_turn_is_refused(monkeypatch):
    monkeypatch.setattr(lane_server, "LARGE_FRAMES_BYTES", 1 << 20)
    monkeypatch.setattr(lane_server, "LONGEST_TURN_WAIT_S", 0.2)
    server = echo_server()
    holder, other = Lane(server.address, timeout_s=WAIT_S), Lane(server.address, timeout_s=WAIT_S)
    try:
        half_a_frame(holder, 1 << 20)
        eventually(lambda: server.turns.granted_bytes, "the turn is taken")
        with pytest.raises(SystemBusyError):
            echo(other, bytes(500_000))
    finally:
        holder.close()
        other.close()
        server.close()


def test_a_client_that_stands_still_within_a_large_frame_is_dropped(monkeypatch, server, connect):
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.1)
    stalled = connect()
    half_a_frame(stalled, 1 << 20)
    with pytest.raises(LOST):
        stalled.receive(float("inf"))
    eventually(lambda: not len(server.turns), "its turn is given back")
    assert echo(connect(), bytes(200_000)) == bytes(200_000)


def test_a_client_that_does_not_read_its_answers_is_dropped(monkeypatch, server, connect):
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.2)
    deaf, other = connect(), connect()
    try:
        for _ in repeat(None, 40):
            deaf.send(ECHO, (bytes(3_000_000),), float("inf"))
    except LOST:
        pass  # the server has dropped this connection, because the client read no answers
    eventually(lambda: server.connections == 1, "it is dropped")
    assert server.unsent_bytes == 0
    assert echo(other, b"1") == b"1"


def test_a_client_may_have_many_requests_under_way(server, connect):
    opened = connect()
    frames = b"".join(
        pack_header(3, ECHO, 0, 0, number, checked=opened._checked) + b"%03d" % number for number in range(200)
    )
    opened._stream.sendall(frames)
    opened._correlation = 199
    assert bytes(opened.receive(float("inf")).payload) == b"199"


def test_more_requests_than_a_connection_may_have_without_an_answer_wait_in_the_socket(server, connect, late):
    opened, other = connect(), connect()
    count = 3 * connection.PIPELINE_MAX
    for number in range(count):
        opened._stream.sendall(pack_header(1, LATER, 0, 0, number, checked=opened._checked) + b"x")
    eventually(lambda: len(late) == connection.PIPELINE_MAX, "as many as are allowed are there")
    assert echo(other, b"1") == b"1"
    assert len(late) == connection.PIPELINE_MAX
    for number in range(count):
        eventually(partial(late.__getitem__, slice(number, None)), "one more is there")
        late[number].answer(b"")
    opened._correlation = count - 1
    assert bytes(opened.receive(float("inf")).payload) == b""


def test_a_server_process_may_open_as_many_files_as_its_hard_limit_allows(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 900), hard))
    try:
        lane_server.allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, lane_server.DESCRIPTORS_MAX), hard)
        monkeypatch.setattr(lane_server, "DESCRIPTORS_MAX", 100)
        lane_server.allow_descriptors()  # `allow_descriptors` never lowers the limit of open files
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_that_cannot_listen_for_other_nodes_reports_why_and_retries(caplog):
    with closing(LaneServer("test", {ECHO: lambda request: request.answer(b"yes")})) as server:
        for _ in range(2):
            # The server cannot listen at 203.0.113.7, because it is not an address of this machine.
            address = server.open_to_nodes("203.0.113.7", lambda: None)
            assert address.port == 0
            assert "test cannot listen at 203.0.113.7" in address.own_node_only
            with pytest.raises(ConnectionRefusedError, match=r"from its own node only: test cannot listen"):
                Lane(address, remote=True)
            with closing(Lane(address)) as lane:
                assert bytes(lane.call(ECHO, (), WAIT_S).payload) == b"yes"
        assert len([one for one in caplog.records if "cannot listen at 203.0.113.7" in one.getMessage()]) == 1
        opened = server.open_to_nodes("127.0.0.1", lambda: None)
        assert server.open_to_nodes("127.0.0.1", lambda: None) == server.address == opened
        with closing(Lane(opened, remote=True)) as lane:
            assert bytes(lane.call(ECHO, (), WAIT_S).payload) == b"yes"


def test_a_server_whose_tls_files_are_missing_opens_its_port_once_they_are_named(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.delenv("RAY_TLS_SERVER_CERT", raising=False)
    with closing(LaneServer("tls-test", {})) as server:
        address = server.open_to_nodes("127.0.0.1")
        assert (address.port, "RAY_TLS_SERVER_CERT" in address.own_node_only) == (0, True)
        monkeypatch.setenv("RAY_USE_TLS", "0")
        assert server.open_to_nodes("127.0.0.1").port > 0


def test_a_server_that_is_closed_opens_no_port():
    server = LaneServer("test", {})
    server.close()
    assert server.open_to_nodes("127.0.0.1", lambda: None).port == 0
