"""Tests of the gateway's gRPC server with clients that read slowly, send too much, go silent or break the protocol."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from raymq.gateway.calls import AnswerStream, BothStreams, CallContext, UnaryCall
from raymq.gateway.front import server
from raymq.gateway.front.certificates import CertificateFiles
from raymq.gateway.front.connection import STREAM_WINDOW_BYTES
from raymq.gateway.front.frames import (
    DATA_FRAME,
    END_STREAM,
    GOAWAY_FRAME,
    HEADERS_FRAME,
    PING_FRAME,
    RESET_FRAME,
    SETTINGS_FRAME,
    WINDOW_MAX,
    Http2Code,
    Setting,
    frame,
    reset_frame,
    window_frame,
)
from raymq.gateway.front.messages import GrpcStatus
from raymq.gateway.front.server import GrpcFront
from tests.support.clients.lanes import make_certificates
from tests.support.gateway.http2_client import GRPC, NEEDED, FrameOf, Http2Bytes, frames_in, message

HOST = "127.0.0.1"
BYTES_MAX = 1 << 20
ANSWER_S = 60.0
LARGE = bytes(8 << 20)
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Calls:
    """Handlers of a server. `started`, `closed`: the names of the handlers that have begun, and that have ended."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        self.go_on = asyncio.Event()
        self.written = 0

    async def echo(self, call: CallContext, data: bytes) -> bytes:
        return data

    async def large(self, call: CallContext, data: bytes) -> bytes:
        return LARGE

    async def wait(self, call: CallContext, data: bytes) -> bytes:
        self.started.put_nowait("wait")
        try:
            await self.go_on.wait()
        finally:
            self.closed.put_nowait("wait")
        return data

    async def fail(self, call: CallContext, data: bytes) -> bytes:
        raise KeyError("secret")

    async def pour(self, call: CallContext, data: bytes) -> AsyncGenerator[bytes, None]:
        try:
            while self.written < 500:
                self.written += 1
                yield bytes(100_000)
        finally:
            self.closed.put_nowait("pour")

    async def slow(self, call: CallContext, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        self.started.put_nowait("slow")
        await self.go_on.wait()
        async for request in requests:
            yield b"%d" % len(request)

    def table(self) -> Any:
        return {
            "/s/echo": UnaryCall(self.echo),
            "/s/large": UnaryCall(self.large),
            "/s/wait": UnaryCall(self.wait),
            "/s/fail": UnaryCall(self.fail),
            "/s/pour": AnswerStream(self.pour),
            "/s/slow": BothStreams(self.slow),
        }


class Served:
    """A running server, and the ways to connect to it. `port`: the server's port."""

    def __init__(self, front: GrpcFront, calls: Calls, port: int) -> None:
        self.front, self.calls, self.port = front, calls, port

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"{HOST}:{self.port}", options) as channel:
            yield channel

    @asynccontextmanager
    async def raw(self, values: dict[Setting, int] | None = None) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            yield RawClient(reader, writer, values)
        finally:
            writer.close()


class RawClient:
    """A client that sends and reads single frames."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, values: dict[Setting, int] | None
    ) -> None:
        self._reader, self._writer = reader, writer
        self.bytes = Http2Bytes(values)
        writer.write(self.bytes.greeting)

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def send_all(self, parts: Iterable[bytes]) -> None:
        """Send one part after the other. Raises ConnectionError when the server has closed the connection."""
        async with asyncio.timeout(ANSWER_S):
            for part in parts:
                self.send(part)
                await self.drain()

    async def next(self) -> FrameOf | None:
        """Return the next frame; None at the end of the connection."""
        async with asyncio.timeout(ANSWER_S):
            try:
                head = await self._reader.readexactly(9)
                body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
        [one] = frames_in(head + body)
        return one

    async def until(self, kind: int, stream_id: int, flags: int = 0) -> FrameOf:
        """Skip frames up to one of `kind` and `stream_id` that has all `flags`."""
        while (one := await self.next()) is not None:
            if (one.kind, one.stream_id, one.flags & flags) == (kind, stream_id, flags):
                return one
        raise AssertionError("the connection has ended")

    async def status(self, stream_id: int) -> dict[str, str]:
        """Return the headers of the answer to a call, together."""
        fields: dict[str, str] = {}
        while (one := await self.next()) is not None:
            if one.kind == HEADERS_FRAME:
                found = self.bytes.fields(one)
                fields |= found if one.stream_id == stream_id else {}
                if one.stream_id == stream_id and one.flags & END_STREAM:
                    return fields
        raise AssertionError("the connection has ended")

    async def ended(self) -> None:
        """Wait until the server closes the connection."""
        while await self.next() is not None:
            pass


def run(
    scenario: Callable[[Served], Awaitable[None]], loop: str = "asyncio", tls: CertificateFiles | None = None
) -> None:
    async def main() -> None:
        calls = Calls()
        front = GrpcFront(calls.table(), request_bytes_max=BYTES_MAX)
        port = await front.start(HOST, 0, tls)
        try:
            await scenario(Served(front, calls, port))
        finally:
            await front.stop(0)
        assert front.connections == set()
        assert front.pending.held == 0

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(ANSWER_S):
        while not condition():
            await asyncio.sleep(0.01)


def path(name: str) -> tuple[tuple[str, str], ...]:
    """Return the headers of a call of the method `name`."""
    return tuple((field, f"/s/{name}" if field == ":path" else value) for field, value in GRPC)


@pytest.mark.parametrize("loop", LOOPS)
def test_many_calls_of_one_client_run_at_the_same_time(loop: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.channel() as channel:
            echo, large = channel.unary_unary("/s/echo"), channel.unary_unary("/s/large")
            bodies = [b"%d" % number * 2000 for number in range(100)]
            answers = await asyncio.gather(*(echo(body, timeout=ANSWER_S) for body in bodies))
            assert list(answers) == bodies
            whole = bytes(BYTES_MAX)
            assert await echo(whole, timeout=ANSWER_S) == whole
            assert await asyncio.gather(*(large(b"", timeout=ANSWER_S) for _ in range(3))) == [LARGE] * 3
            zipped = channel.unary_unary("/s/echo")(b"z" * 100_000, timeout=ANSWER_S, compression=grpc.Compression.Gzip)
            assert await zipped == b"z" * 100_000
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/s/fail")(b"", timeout=ANSWER_S)
            assert caught.value.code() == grpc.StatusCode.INTERNAL
            assert "secret" not in caught.value.details()

    run(scenario, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_reads_slowly_holds_up_only_its_own_answers(loop: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.raw({Setting.INITIAL_WINDOW_SIZE: 250_000}) as client, served.channel() as channel:
            client.send(window_frame(0, WINDOW_MAX // 2) + client.bytes.call(1, b"", *path("pour")))
            got = 0
            while got < 250_000:
                got += len((await client.until(DATA_FRAME, 1)).payload)
            assert served.calls.written <= 4, "the handler waits for the client"
            client.send(client.bytes.call(3, b"other"))
            assert (await client.until(DATA_FRAME, 3)).payload == message(b"other")
            assert await channel.unary_unary("/s/echo")(b"x", timeout=ANSWER_S) == b"x"
            client.send(reset_frame(1, Http2Code.CANCEL))
            async with asyncio.timeout(ANSWER_S):
                assert await served.calls.closed.get() == "pour"

    run(scenario, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_socket_that_nobody_reads_stops_the_answers(loop: str) -> None:
    async def scenario(served: Served) -> None:
        with socket.create_connection((HOST, served.port)) as client:
            made = Http2Bytes({Setting.INITIAL_WINDOW_SIZE: WINDOW_MAX})
            client.sendall(made.greeting + window_frame(0, WINDOW_MAX // 2) + made.call(1, b"", *path("pour")))
            await eventually(lambda: any(not one.http2.is_writable for one in served.front.connections))
            written = served.calls.written
            async with served.channel() as channel:
                for _ in range(20):
                    assert await channel.unary_unary("/s/echo")(b"x", timeout=ANSWER_S) == b"x"
            # the kernel may take one more part of the answer, but the server does not go on by itself
            assert served.calls.written <= written + 100 < 500
        async with asyncio.timeout(ANSWER_S):
            assert await served.calls.closed.get() == "pour"

    run(scenario, loop)


def test_a_client_sends_no_more_than_a_handler_reads() -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.request(1, *path("slow")))
            assert await served.calls.started.get() == "slow"
            count = STREAM_WINDOW_BYTES // 10_005
            for _ in range(count):
                client.send(frame(DATA_FRAME, 0, 1, message(bytes(10_000))))
            await eventually(lambda: served.front.pending.held == count * 10_005)
            client.send(frame(DATA_FRAME, 0, 1, message(bytes(10_000))))
            reset = await client.until(RESET_FRAME, 1)
            assert reset.number == Http2Code.FLOW_CONTROL_ERROR
            await eventually(lambda: served.front.pending.held == 0)
            # after a handler has read, the client gets credit again
            served.calls.go_on.set()
            client.send(client.bytes.request(3, *path("slow")))
            for _ in range(3 * count):
                client.send(frame(DATA_FRAME, 0, 3, message(bytes(10_000))))
                await client.until(DATA_FRAME, 3)
            client.send(frame(DATA_FRAME, END_STREAM, 3))
            assert (await client.status(3))["grpc-status"] == "0"

    run(scenario)


def test_requests_of_all_clients_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PENDING_BYTES_MIN", 0)
    monkeypatch.setattr(server, "_PENDING_REQUESTS", 1)

    async def scenario(served: Served) -> None:
        part = frame(DATA_FRAME, 0, 1, (message(bytes(BYTES_MAX)))[:100_000])
        async with served.raw() as first, served.raw() as second:
            for client in (first, second):
                client.send(client.bytes.request(1))
                for _ in range(6):
                    client.send(part)
            waiting = {asyncio.create_task(client.status(1)) for client in (first, second)}
            done, others = await asyncio.wait(waiting, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result()["grpc-status"] for task in done] == [str(int(GrpcStatus.RESOURCE_EXHAUSTED))]
            for task in others:
                task.cancel()

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((("content-type", "text/plain"),), {":status": "415"}),
        ((("content-type", "application/grpc"), ("grpc-timeout", "soon")), {"grpc-status": "13"}),
        ((("content-type", "application/grpc"), ("grpc-encoding", "br")), {"grpc-status": "12"}),
        ((("content-type", "application/grpc"), ("x", "y" * 20_000)), {"grpc-status": "8"}),
    ],
)
def test_a_request_that_is_no_proper_call_is_refused(
    fields: tuple[tuple[str, str], ...], expected: dict[str, str]
) -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.request(1, *NEEDED, *fields))
            assert expected.items() <= (await client.status(1)).items()
            assert (await client.until(RESET_FRAME, 1)).number == Http2Code.NO_ERROR
            client.send(client.bytes.call(3, b"next"))
            assert (await client.status(3))["grpc-status"] == "0"

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        message(b"one") + message(b"two"),
        message(b"one")[:-1],
        message(b"rubbish", compressed=True),
    ],
)
def test_a_unary_call_needs_one_whole_message(data: bytes) -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.request(1) + frame(DATA_FRAME, END_STREAM, 1, data))
            assert (await client.status(1))["grpc-status"] == "13"
            client.send(client.bytes.request(3, end=True))
            assert (await client.status(3))["grpc-status"] == "13"
            # a second message ends the call before the end of the request
            client.send(client.bytes.request(5) + frame(DATA_FRAME, 0, 5, message(b"one") + b"x"))
            assert (await client.status(5))["grpc-status"] == "13"

    run(scenario)


def test_a_message_that_grows_too_much_is_refused() -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            for number, (size, status) in enumerate(((BYTES_MAX, "0"), (BYTES_MAX + 1, "8"), (100 << 20, "8"))):
                data = message(gzip.compress(bytes(size)), compressed=True)
                fields = (*GRPC, ("grpc-encoding", "gzip"))
                stream_id = 2 * number + 1
                client.send(client.bytes.request(stream_id, *fields) + window_frame(0, BYTES_MAX * 2))
                client.send(window_frame(stream_id, BYTES_MAX * 2))
                for first in range(0, len(data), 16_384):
                    client.send(frame(DATA_FRAME, 0, stream_id, data[first : first + 16_384]))
                client.send(frame(DATA_FRAME, END_STREAM, stream_id))
                assert (await client.status(stream_id))["grpc-status"] == status

    run(scenario)


def test_a_call_ends_with_its_deadline() -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.call(1, b"", *path("wait"), ("grpc-timeout", "10m")))
            assert (await client.status(1))["grpc-status"] == str(int(GrpcStatus.DEADLINE_EXCEEDED))
            assert await served.calls.closed.get() == "wait"
            # also before its request has arrived
            client.send(client.bytes.request(3, *path("wait"), ("grpc-timeout", "10m")))
            assert (await client.status(3))["grpc-status"] == str(int(GrpcStatus.DEADLINE_EXCEEDED))
            # and while the client does not accept the answer: then it would not accept the status, either
            client.send(client.bytes.call(5, b"", *path("pour"), ("grpc-timeout", "10m")))
            assert (await client.until(RESET_FRAME, 5)).number == Http2Code.CANCEL
            assert await served.calls.closed.get() == "pour"

    run(scenario)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_goes_ends_its_calls(loop: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.call(1, b"", *path("wait")) + client.bytes.request(3, *path("slow")))
            assert {await served.calls.started.get(), await served.calls.started.get()} == {"wait", "slow"}
        async with asyncio.timeout(ANSWER_S):
            assert await served.calls.closed.get() == "wait"
        await eventually(lambda: not served.front.connections)

    run(scenario, loop)


def test_a_client_that_breaks_the_protocol_learns_why() -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.call(1, b"", *path("wait")))
            assert await served.calls.started.get() == "wait"
            client.send(frame(DATA_FRAME, 0, 99, b"x"))
            end = await client.until(GOAWAY_FRAME, 0)
            assert int.from_bytes(end.payload[4:8], "big") == Http2Code.PROTOCOL_ERROR
            await client.ended()
            assert await served.calls.closed.get() == "wait"
        _, writer = await asyncio.open_connection(HOST, served.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await eventually(lambda: not served.front.connections)
        writer.close()

    run(scenario)


def test_a_flood_ends_only_its_own_connection() -> None:
    def resets(client: RawClient, first: int) -> bytes:
        ids = range(first, first + 200, 2)
        return b"".join(client.bytes.request(one) + reset_frame(one, Http2Code.CANCEL) for one in ids)

    floods: tuple[Callable[[RawClient, int], bytes], ...] = (
        lambda client, first: frame(SETTINGS_FRAME, 0, 0) * 1000,
        lambda client, first: frame(PING_FRAME, 0, 0, bytes(8)),
        lambda client, first: frame(DATA_FRAME, 0, 1) * 1000,
        resets,
    )

    async def scenario(served: Served) -> None:
        async with served.channel() as channel:
            echo = channel.unary_unary("/s/echo")
            for flood in floods:
                async with served.raw() as client:
                    client.send(client.bytes.request(1))
                    # the budgets rise with time, so only a flood that goes on reaches their end
                    with pytest.raises(ConnectionError):
                        await client.send_all(flood(client, first) for first in itertools.count(3, 200))
                assert await echo(b"x", timeout=ANSWER_S) == b"x"
            await eventually(lambda: len(served.front.connections) == 1)

    run(scenario)


def test_silent_idle_and_ungreeted_connections_end() -> None:
    async def scenario(served: Served) -> None:
        now_s = time.monotonic()
        async with served.raw() as idle, served.raw() as busy:
            busy.send(busy.bytes.call(1, b"", *path("wait")))
            await served.calls.started.get()
            await eventually(lambda: sum(one.http2.is_greeted for one in served.front.connections) == 2)
            _, writer = await asyncio.open_connection(HOST, served.port)
            await eventually(lambda: len(served.front.connections) == 3)
            [silent] = [one for one in served.front.connections if not one.http2.is_greeted]
            silent.tick(now_s + server.GREETING_S - 1)
            assert silent in served.front.connections
            silent.tick(now_s + server.GREETING_S + ANSWER_S)
            await eventually(lambda: silent not in served.front.connections)
            writer.close()
            [one] = [one for one in served.front.connections if not one.http2.stream_count]
            one.tick(now_s + server.CONNECTION_IDLE_S - 1)
            # a short call counts, too
            before_s = time.monotonic()
            idle.send(idle.bytes.call(1, b"x"))
            assert (await idle.status(1))["grpc-status"] == "0"
            one.tick(before_s + server.CONNECTION_IDLE_S - 0.001)
            assert not one.http2.is_closing
            one.tick(now_s + server.CONNECTION_IDLE_S + ANSWER_S)
            assert int.from_bytes((await idle.until(GOAWAY_FRAME, 0)).payload[4:8], "big") == Http2Code.NO_ERROR
            await idle.ended()
            [one] = [one for one in served.front.connections if one.http2.stream_count]
            later_s = now_s + server.CLIENT_SILENCE_S + ANSWER_S
            one.tick(later_s)
            await busy.until(PING_FRAME, 0)
            one.tick(later_s + server.SIGN_OF_LIFE_S - 1)
            assert one in served.front.connections
            one.tick(later_s + server.SIGN_OF_LIFE_S)
            await busy.ended()
            assert await served.calls.closed.get() == "wait"

    run(scenario)


def test_further_connections_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRPC_CONNECTIONS_MAX", 1)

    async def scenario(served: Served) -> None:
        async with served.raw() as first:
            first.send(first.bytes.call(1, b"x"))
            assert (await first.status(1))["grpc-status"] == "0"
            async with served.raw() as second:
                await second.ended()
            first.send(first.bytes.call(3, b"x"))
            assert (await first.status(3))["grpc-status"] == "0"

    run(scenario)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_refuses_new_calls_and_answers_the_running_ones(loop: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.call(1, b"last", *path("large")))
            await client.until(DATA_FRAME, 1)
            stopping = asyncio.create_task(served.front.stop(ANSWER_S))
            end = await client.until(GOAWAY_FRAME, 0)
            assert int.from_bytes(end.payload[4:8], "big") == Http2Code.NO_ERROR
            client.send(client.bytes.call(3, b"too late"))
            client.send(window_frame(0, WINDOW_MAX // 2) + window_frame(1, WINDOW_MAX // 2))
            assert (await client.status(1))["grpc-status"] == "0"
            await client.ended()
        await stopping

    run(scenario, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_without_grace_ends_the_running_calls(loop: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.raw() as client:
            client.send(client.bytes.call(1, b"", *path("wait")))
            await served.calls.started.get()
            stopping = asyncio.create_task(served.front.stop(0))
            assert (await client.status(1))["grpc-status"] == str(int(GrpcStatus.UNAVAILABLE))
            assert await served.calls.closed.get() == "wait"
        await stopping

    run(scenario, loop)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes up to the end of a connection; none if it ends with an error."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("loop", LOOPS)
def test_encrypted_connections_need_http2_in_their_handshake(loop: str, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)

    async def scenario(served: Served) -> None:
        # since Python 3.13, the default context refuses certificates without key usage, as tests make them
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(files.authority)
        context.check_hostname = False
        _, writer = await asyncio.open_connection(HOST, served.port, ssl=context)
        await eventually(lambda: not served.front.connections)
        writer.close()
        context.set_alpn_protocols(["http/1.1", "h2"])
        reader, writer = await asyncio.open_connection(HOST, served.port, ssl=context)
        client = RawClient(reader, writer, None)
        client.send(client.bytes.call(1, bytes(100_000)))
        await client.drain()
        assert await client.until(DATA_FRAME, 1)
        writer.close()

    run(scenario, loop, CertificateFiles(Path(files.certificate), Path(files.key)))
