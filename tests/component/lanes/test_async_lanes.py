"""Tests of the asyncio client of lanes (direct socket connections) against a real server: many calls without threads,
and connections that break, lose bytes, answer slowly or lead to a restarted server."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from raymq.common.errors import (
    ClientStateError,
    GroupNotExistError,
    NotMasterError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.protocol.pop import LeasedRange, LeasePart, ReceiveAnswer, ReceiveRequest
from raymq.remoting import async_lane_pool, broker_client, lane_pool
from raymq.remoting.async_lane_pool import AsyncLanePool
from raymq.remoting.broker_client import AsyncBrokerClient
from raymq.remoting.lane import async_client, server as lane_server
from raymq.remoting.lane.address import LaneAddress, TlsFiles, client_tls
from raymq.remoting.lane.async_client import LANE_CALLS_MAX, AsyncLane, open_lane
from raymq.remoting.lane.calls import ControlCalls, encode_result
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import CHECKED_HEADER, FrameKind
from raymq.remoting.lane.handshake import HELLO_BYTES, VERDICT_BYTES, TlsRefusedError
from raymq.remoting.lane.server import LaneServer
from tests.support.clients.fakes import WAIT_S, FakeActor
from tests.support.clients.forks import in_child
from tests.support.clients.lanes import (
    BREAK,
    ECHO,
    LATER,
    REFUSE,
    SILENT,
    CuttingProxy,
    echo_server,
    make_certificates,
    unix_only,
)

HANDSHAKE_BYTES = HELLO_BYTES + VERDICT_BYTES


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give handshakes more time, because the machine may be busy."""
    monkeypatch.setattr(async_lane_pool, "OPEN_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(async_lane_pool, "OPEN_PATIENCE_S", WAIT_S)
    monkeypatch.setattr(lane_server, "HANDSHAKE_TIMEOUT_S", WAIT_S)


class Served:
    """A server, the requests that it has not answered, and the pool of a client. `address`: the address that the actor
    describes; None for the server's own."""

    def __init__(self, *, remote: bool, error: Exception | None = None) -> None:
        self._remote, self._error = remote, error
        self.loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
        self.late: list[LaneRequest] = []
        self.address: LaneAddress | None = None
        self.actor = FakeActor({"describe": self._describe})
        self.server = self._serve()
        self.pool = AsyncLanePool(self.actor, "broker-a")  # type: ignore[arg-type]  # a fake

    def _serve(self) -> LaneServer:
        return echo_server(self._error, late=self.late, host="127.0.0.1" if self._remote else "")

    def _describe(self) -> Any:
        own = self.server.address
        # an address without a Unix socket is on another node
        own = replace(own, name="\0raymq-elsewhere") if self._remote else unix_only(own)
        return SimpleNamespace(lane=self.address or own)

    def restart(self) -> None:
        """Close all connections, and accept new ones at another address."""
        self.server.close()
        self.late.clear()
        self.server = self._serve()

    async def call(self, kind: int, payload: bytes = b"", timeout_s: float = WAIT_S) -> bytes:
        return bytes((await self.pool.call("call", kind, (payload,), timeout_s)).payload)

    async def waiting(self, count: int) -> None:
        """Wait until the server holds `count` requests without an answer."""
        await until(lambda: len(self.late) >= count)

    def close(self) -> None:
        self.server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def run(served: Served, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario in an event loop. Fails if asyncio logged an error that no caller read."""
    unread: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
        try:
            await scenario()
        finally:
            served.pool.close()

    with asyncio.Runner(loop_factory=served.loop_factory) as runner:
        runner.run(main())
    assert unread == []


@pytest.fixture(params=["unix", "tcp"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(remote=request.param == "tcp")
    yield served
    served.close()


@pytest.fixture
def served_in_actor(served: Served) -> Served:
    """Return a server whose client runs in the event loop that Ray gives to actors."""
    served.loop_factory = uvloop.new_event_loop
    return served


@pytest.fixture
def remote() -> Iterator[Served]:
    served = Served(remote=True)
    yield served
    served.close()


def test_a_lane_works_in_the_event_loop_of_an_actor(served_in_actor: Served) -> None:
    served = served_in_actor

    async def scenario() -> None:
        assert await served.call(ECHO, b"first") == b"first"
        call = asyncio.ensure_future(served.call(LATER, b"second"))
        await served.waiting(1)
        served.late[0].answer(b"late")
        assert await call == b"late"
        assert await served.call(ECHO, b"x" * (1 << 20)) == b"x" * (1 << 20)
        served.restart()
        with pytest.raises(ServiceNotAvailableError):
            await served.call(ECHO, b"broken")
        assert await served.call(ECHO, b"third") == b"third"

    run(served, scenario)


def test_a_thousand_calls_wait_without_threads_and_each_gets_its_own_answer(served: Served) -> None:
    async def scenario() -> None:
        assert await served.call(ECHO, b"first") == b"first"
        threads = set(threading.enumerate())
        calls = [asyncio.ensure_future(served.call(LATER, b"%d" % number)) for number in range(1000)]
        await served.waiting(1000)
        # Compare the threads, not their number: a thread of an earlier test may end during this test.
        assert [thread.name for thread in threading.enumerate() if thread not in threads] == []
        assert served.pool.lanes == -(-1000 // LANE_CALLS_MAX)
        for place, request in enumerate(reversed(served.late)):
            request.answer(b"answer %d" % place)
        answers = await asyncio.gather(*calls)
        assert sorted(answers) == sorted(b"answer %d" % place for place in range(1000))
        await until(lambda: served.pool.lanes <= lane_pool.IDLE_LANES_MAX)
        assert served.pool.calls == 0
        assert served.actor.calls == ["describe"]

    run(served, scenario)


def test_answers_in_any_order_and_of_any_size_reach_their_callers(served: Served) -> None:
    payloads = [os.urandom(size) for size in (0, 1, 16 << 10, 70_000, 3 << 20, 5)]

    async def scenario() -> None:
        assert await asyncio.gather(*(served.call(ECHO, one) for one in payloads)) == payloads
        assert served.pool.lanes == 1

    run(served, scenario)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(NotMasterError("storage-a-1", 7), NotMasterError), (SystemBusyError("full", 1.5), SystemBusyError)],
)
def test_an_error_of_the_server_is_raised_and_the_lane_stays(error: RaymqError, expected: type[RaymqError]) -> None:
    served = Served(remote=False, error=error)

    async def scenario() -> None:
        with pytest.raises(expected) as raised:
            await served.call(REFUSE)
        assert (str(raised.value), raised.value.retry_after_s) == (str(error), error.retry_after_s)
        with pytest.raises(ServiceNotAvailableError, match="a bug"):
            await served.call(BREAK)
        assert await served.call(ECHO, b"still there") == b"still there"
        assert served.pool.lanes == 1

    run(served, scenario)
    served.close()


def test_a_call_without_an_answer_times_out_and_its_neighbours_go_on(served: Served) -> None:
    async def scenario() -> None:
        neighbour = asyncio.ensure_future(served.call(LATER, b"n"))
        await served.waiting(1)
        with pytest.raises(RequestTimeoutError):
            await served.call(SILENT, timeout_s=0.2)
        assert await served.call(ECHO, b"new lane") == b"new lane"
        assert served.pool.lanes == 2, "the lane of the lost answer takes no further call"
        served.late[0].answer(b"late but there")
        assert await neighbour == b"late but there"
        await until(lambda: served.pool.lanes == 1)
        assert served.pool.calls == 0

    run(served, scenario)


def test_the_answer_of_a_cancelled_call_is_dropped(served: Served) -> None:
    async def scenario() -> None:
        calls = [asyncio.ensure_future(served.call(LATER)) for _ in range(LANE_CALLS_MAX)]
        await served.waiting(LANE_CALLS_MAX)
        for call in calls[1:]:
            call.cancel()
        await asyncio.wait(calls[1:])
        assert all(call.cancelled() for call in calls[1:])
        assert served.pool.calls == LANE_CALLS_MAX, "the server still has their requests"
        assert await served.call(ECHO, b"other") == b"other"
        assert served.pool.lanes == 2
        for place, request in enumerate(served.late):
            request.answer(b"%d" % place)
        assert len(await calls[0]) == 1
        await until(lambda: served.pool.calls == 0)
        assert await served.call(ECHO, b"again") == b"again"

    run(served, scenario)


def test_a_call_that_leaves_is_answered_at_once_and_its_neighbours_wait_on(served: Served) -> None:
    gone: list[LaneRequest] = []

    def keep(request: LaneRequest) -> None:
        def leave() -> None:
            gone.append(request)
            request.answer(b"left")

        request.when_gone(leave)
        served.late.append(request)

    served.server.handlers = {**served.server.handlers, SILENT: keep}

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        leaves: list[asyncio.Future[None]] = [loop.create_future() for _ in range(LANE_CALLS_MAX)]
        calls = [
            asyncio.ensure_future(served.pool.call("call", SILENT, (b"",), WAIT_S, leave)) for leave in leaves
        ]  # fmt: skip
        await served.waiting(LANE_CALLS_MAX)
        leaves[2].set_result(None)
        assert bytes((await calls[2]).payload) == b"left"
        assert (len(gone), served.pool.lanes, served.pool.calls) == (1, 1, LANE_CALLS_MAX - 1)
        assert not any(call.done() for call in calls if call is not calls[2])
        # a request that is answered before the server reads that its caller has left is answered once
        for request in served.late:
            request.answer(b"answer")
        for leave in leaves[3:]:
            leave.set_result(None)
        answers = [bytes((await call).payload) for call in calls]
        assert answers == [b"answer", b"answer", b"left", *[b"answer"] * (LANE_CALLS_MAX - 3)]
        assert await served.call(ECHO, b"the lane serves on") == b"the lane serves on"
        assert (len(gone), served.pool.lanes, served.pool.calls) == (1, 1, 0)

    run(served, scenario)


def test_calls_that_wait_end_when_the_server_restarts_and_the_next_call_finds_it(served: Served) -> None:
    async def scenario() -> None:
        calls = [asyncio.ensure_future(served.call(LATER)) for _ in range(20)]
        await served.waiting(20)
        await asyncio.to_thread(served.restart)
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, ServiceNotAvailableError)
            assert "broke during the call" in str(error)
        assert served.pool.calls == 0
        assert await asyncio.gather(*(served.call(ECHO, b"%d" % number) for number in range(20))) == [
            b"%d" % number for number in range(20)
        ]
        assert served.actor.calls == ["describe"] * 2, "all calls share one description"

    run(served, scenario)


@pytest.mark.parametrize("more_bytes", [0, 1, CHECKED_HEADER.size - 1, CHECKED_HEADER.size, CHECKED_HEADER.size + 3])
def test_a_connection_that_breaks_inside_an_answer_fails_its_calls(remote: Served, more_bytes: int) -> None:
    proxy = CuttingProxy(remote.server.address, HANDSHAKE_BYTES + more_bytes)
    remote.address = replace(proxy.address, name="\0raymq-elsewhere")

    async def scenario() -> None:
        for error in await asyncio.gather(*(remote.call(ECHO, b"half") for _ in range(3)), return_exceptions=True):
            assert isinstance(error, ServiceNotAvailableError), error
        remote.address = None
        assert await remote.call(ECHO, b"whole") == b"whole"

    try:
        run(remote, scenario)
    finally:
        proxy.close()


@asynccontextmanager
async def relayed(served: Served, change: Callable[[bytes], list[bytes]]) -> AsyncIterator[None]:
    """Start a relay before the server, which sends the server's bytes in other parts, and let the actor describe the
    relay's address."""
    own, open_relays = served.server.address, 0

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: Any) -> None:
        try:
            while data := await reader.read(1 << 16):
                for part in parts(data):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_relays
        open_relays += 1
        to_reader, to_writer = await asyncio.open_connection(own.host, own.port)
        await asyncio.gather(copy(reader, to_writer, lambda data: [data]), copy(to_reader, writer, change))
        open_relays -= 1

    relay = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = relay.sockets[0].getsockname()[1]
    served.address = replace(own, name="\0raymq-elsewhere", port=port)
    try:
        yield
    finally:
        served.pool.close()
        relay.close()
        await until(lambda: not open_relays)


def test_answers_that_arrive_byte_by_byte_are_whole(remote: Served) -> None:
    async def scenario() -> None:
        async with relayed(remote, lambda data: [data[at : at + 1] for at in range(len(data))]):
            payloads = [b"x" * size for size in (0, 1, 40, 200)]
            assert await asyncio.gather(*(remote.call(ECHO, one) for one in payloads)) == payloads

    run(remote, scenario)


def test_a_damaged_header_closes_the_lane(remote: Served) -> None:
    seen = 0

    def damage(data: bytes) -> list[bytes]:
        nonlocal seen
        at = HANDSHAKE_BYTES - seen
        seen += len(data)
        return [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]] if 0 <= at < len(data) else [data]

    async def scenario() -> None:
        async with relayed(remote, damage):
            with pytest.raises(ServiceNotAvailableError, match="header of a received frame is damaged"):
                await remote.call(ECHO, b"payload")
            assert remote.pool.lanes == 0

    run(remote, scenario)


def test_an_answer_that_is_too_long_closes_the_lane(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_client, "LANE_ANSWER_MAX_BYTES", 100)

    async def scenario() -> None:
        assert await served.call(ECHO, b"x" * 100) == b"x" * 100
        with pytest.raises(ServiceNotAvailableError, match="at most 100 are allowed"):
            await served.call(ECHO, b"x" * 101)

    run(served, scenario)


def nobody_listens(address: LaneAddress) -> LaneAddress:
    return replace(address, port=1, name="\0raymq-nobody")


def wrong_secret(address: LaneAddress) -> LaneAddress:
    return replace(address, secret=b"x" * 32)


def no_port(address: LaneAddress) -> LaneAddress:
    return replace(address, port=0, name="\0raymq-nobody")


@pytest.mark.parametrize("fault", [nobody_listens, wrong_secret, no_port])
def test_a_lane_that_does_not_open_fails_all_calls_that_wait_for_it(
    remote: Served, fault: Callable[[LaneAddress], LaneAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_lane_pool, "OPEN_PATIENCE_S", 0.5)

    async def scenario() -> None:
        remote.address = fault(remote.server.address)
        for error in await asyncio.gather(*(remote.call(ECHO) for _ in range(30)), return_exceptions=True):
            assert isinstance(error, ServiceNotAvailableError)
            assert "nothing was sent" in str(error)
        assert len(remote.actor.calls) < 30, "the calls share attempts"
        assert remote.pool.calls == 0
        remote.address = None
        assert await remote.call(ECHO, b"opened") == b"opened"

    run(remote, scenario)


def test_a_call_goes_on_once_a_lane_opens(remote: Served) -> None:
    async def scenario() -> None:
        remote.address = nobody_listens(remote.server.address)
        call = asyncio.ensure_future(remote.call(ECHO, b"patient"))
        await until(lambda: len(remote.actor.calls) >= 3)
        remote.address = None
        assert await call == b"patient"

    run(remote, scenario)


def test_a_server_that_does_not_shake_hands_is_given_up(remote: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_lane_pool, "OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(async_lane_pool, "OPEN_PATIENCE_S", 0.3)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            remote.address = replace(remote.server.address, name="\0raymq-nobody", port=port)
            with pytest.raises(ServiceNotAvailableError, match="nothing was sent"):
                await remote.call(ECHO)

    run(remote, scenario)


def test_an_actor_that_has_gone_fails_each_waiting_call_with_an_error_of_its_own() -> None:
    served = Served(remote=False)

    def describe() -> None:
        raise ServiceNotAvailableError("broker-a is away")

    served.actor.methods["describe"] = describe

    async def scenario() -> None:
        errors = await asyncio.gather(*(served.call(ECHO) for _ in range(30)), return_exceptions=True)
        assert {(type(one), str(one)) for one in errors} == {(ServiceNotAvailableError, "broker-a is away")}
        assert len(set(map(id, errors))) == 30
        assert len(served.actor.calls) < 30, "the calls share attempts"
        assert served.pool.calls == 0

    run(served, scenario)
    served.close()


def test_an_actor_that_does_not_answer_ends_the_call_at_its_timeout() -> None:
    served, go_on = Served(remote=False), threading.Event()
    served.actor.methods["describe"] = lambda: go_on.wait(WAIT_S)

    async def scenario() -> None:
        try:
            with pytest.raises(RequestTimeoutError):
                await served.call(ECHO, timeout_s=0.2)
            assert served.pool.calls == 0
        finally:
            go_on.set()

    run(served, scenario)
    served.close()


def test_the_number_and_the_bytes_of_calls_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_lane_pool, "ASYNC_CALLS_MAX", 3)
    monkeypatch.setattr(async_lane_pool, "ASYNC_CALLS_MAX_BYTES", 1000)

    async def scenario() -> None:
        assert await served.call(ECHO, b"x" * 2000) == b"x" * 2000, "a lone call may be larger"
        calls = [asyncio.ensure_future(served.call(LATER, b"x" * 300)) for _ in range(2)]
        await served.waiting(2)
        with pytest.raises(SystemBusyError, match="already has 2 running calls of 600 bytes"):
            await served.call(ECHO, b"x" * 401)
        calls.append(asyncio.ensure_future(served.call(LATER)))
        await served.waiting(3)
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        with pytest.raises(SystemBusyError, match="already has 3 running calls"):
            await served.call(ECHO)
        for request in served.late:
            request.answer(b"")
        await asyncio.wait(calls)
        await until(lambda: served.pool.calls == 0)
        assert await served.call(ECHO, b"free") == b"free"

    run(served, scenario)


def test_closing_ends_all_calls(served: Served) -> None:
    async def scenario() -> None:
        calls = [asyncio.ensure_future(served.call(LATER)) for _ in range(20)]
        await served.waiting(20)
        served.pool.close()
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, ServiceNotAvailableError)
        assert (served.pool.lanes, served.pool.calls) == (0, 0)
        with pytest.raises(ClientStateError, match="closed"):
            await served.call(ECHO)
        await until(lambda: served.server.connections == 0)

    run(served, scenario)


def test_closing_ends_a_call_that_waits_for_a_lane(remote: Served) -> None:
    async def scenario() -> None:
        remote.address = nobody_listens(remote.server.address)
        call = asyncio.ensure_future(remote.call(ECHO))
        await until(lambda: bool(remote.actor.calls))
        remote.pool.close()
        with pytest.raises((ClientStateError, ServiceNotAvailableError)):
            await call

    run(remote, scenario)


def test_a_broker_client_calls_methods_and_decodes_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    leased = ReceiveAnswer((LeasedRange("orders", 0, 40, 2, 1, 60_000, 1),), 16, ("orders",))
    late: list[LaneRequest] = []

    def receive_soon(lane: LaneRequest, request: ReceiveRequest) -> None:
        assert request == ReceiveRequest("billing", ("orders",), 32, 60_000, 20.0, None, "at")
        late.append(lane)

    def extend_invisible(group: str, parts: list[LeasePart], invisible_ms: int) -> list[bool]:
        if group != "billing":
            raise GroupNotExistError(group)
        return [part.offsets == "1" for part in parts]

    handler = ControlCalls(
        {"extend_invisible": extend_invisible}, lambda name, run, fail: run(), {"receive_messages": receive_soon}
    )
    server = LaneServer("test", {FrameKind.CALL: handler})
    actor = FakeActor({"describe": lambda: SimpleNamespace(lane=server.address)})
    monkeypatch.setattr(broker_client, "ActorRef", lambda name: actor)

    async def scenario() -> None:
        client = AsyncBrokerClient("broker-a")
        request = ReceiveRequest("billing", ("orders",), 32, 60_000, 20.0, None, "at")
        receiving = asyncio.ensure_future(client.call("receive_messages", request, timeout_s=WAIT_S))
        await until(lambda: bool(late))
        parts = [LeasePart("orders", 0, 40, 1, offsets) for offsets in ("1", "2")]
        assert await client.call("extend_invisible", "billing", parts, 1000, timeout_s=WAIT_S) == [True, False]
        with pytest.raises(GroupNotExistError, match="reports"):
            await client.call("extend_invisible", "reports", parts, 1000, timeout_s=WAIT_S)
        late[0].answer(encode_result(leased))
        assert await receiving == leased
        client.close()

    try:
        asyncio.run(scenario())
    finally:
        server.close()


def test_a_forked_child_closes_its_copy_and_the_parent_goes_on() -> None:
    served = Served(remote=False)

    async def scenario() -> None:
        lane = await open_lane(served.server.address, timeout_s=WAIT_S)
        assert bytes((await lane.call(ECHO, (b"one",), WAIT_S)).payload) == b"one"
        assert in_child(lambda: lane.closed)
        assert bytes((await lane.call(ECHO, (b"two",), WAIT_S)).payload) == b"two"
        lane.close()

    run(served, scenario)
    served.close()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsFiles]:
    """Make certificates, and let this process use them."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command that makes the certificates is not installed")
    client_tls.cache_clear()
    files = make_certificates(tmp_path)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", files.certificate)
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", files.key)
    monkeypatch.setenv("RAY_TLS_CA_CERT", files.authority)
    yield files
    client_tls.cache_clear()


def over_tls(server: LaneServer, scenario: Callable[[AsyncLane], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        lane = await open_lane(server.address, remote=True, timeout_s=WAIT_S)
        try:
            await scenario(lane)
        finally:
            lane.close()

    try:
        asyncio.run(main())
    finally:
        server.close()


def test_a_lane_uses_tls(files: TlsFiles) -> None:
    payload = os.urandom(1 << 20)

    async def scenario(lane: AsyncLane) -> None:
        answers = await asyncio.gather(*(lane.call(ECHO, (b"a", payload), WAIT_S) for _ in range(4)))
        assert {bytes(one.payload) for one in answers} == {b"a" + payload}

    over_tls(echo_server(host="127.0.0.1", tls=files), scenario)


def test_a_server_with_another_authority_is_refused_with_the_reason(files: TlsFiles, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    server = echo_server(host="127.0.0.1", tls=make_certificates(tmp_path / "other"))

    async def never(lane: AsyncLane) -> None:
        raise AssertionError("the lane opened")

    with pytest.raises(TlsRefusedError, match="certificate"):
        over_tls(server, never)


def test_a_process_without_tls_is_refused_with_the_reason(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    server = echo_server(host="127.0.0.1", tls=files)
    monkeypatch.setenv("RAY_USE_TLS", "0")

    async def never(lane: AsyncLane) -> None:
        raise AssertionError("the lane opened")

    with pytest.raises(ConnectionRefusedError, match="RAY_USE_TLS is off"):
        over_tls(server, never)
