"""Tests of the gateway's gRPC server: it carries bytes between a gRPC client and handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from raymq.common.errors import ConfigError, ServiceNotAvailableError
from raymq.gateway.calls import AnswerStream, BothStreams, CallContext, StreamRefusedError, UnaryCall
from raymq.gateway.front.certificates import CertificateFiles
from raymq.gateway.front.server import GrpcFront
from tests.support.clients.lanes import make_certificates

HOST = "127.0.0.1"
BYTES_MAX = 1 << 20
ANSWER_S = 60.0


class Handlers:
    """Handlers that record their calls."""

    def __init__(self) -> None:
        self.contexts: list[CallContext] = []
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

    async def echo(self, call: CallContext, data: bytes) -> bytes:
        self.contexts.append(call)
        return data

    async def wait(self, call: CallContext, data: bytes) -> bytes:
        self.entered.set()
        await self.go_on.wait()
        return data

    async def count(self, call: CallContext, data: bytes) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(int(data)):
                yield b"%d" % number
            if data == b"3":
                return
            self.entered.set()
            await self.go_on.wait()
        finally:
            self.closed.put_nowait("count")

    async def both(self, call: CallContext, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            async for request in requests:
                if request == b"refuse":
                    raise StreamRefusedError("no such thing")
                if request == b"break":
                    raise KeyError("secret")
                yield request * 2
        finally:
            self.closed.put_nowait("both")

    def at_once(self, call: CallContext, data: bytes) -> bytes | None:
        """Answer at once, unless the request asks for a wait."""
        if data == b"break":
            raise KeyError("secret")
        return None if data == b"wait" else b"at once: " + data

    def table(self) -> Any:
        return {
            "/s/soon": UnaryCall(self.echo, self.at_once),
            "/s/echo": UnaryCall(self.echo),
            "/s/wait": UnaryCall(self.wait),
            "/s/count": AnswerStream(self.count),
            "/s/both": BothStreams(self.both),
        }


@asynccontextmanager
async def served(handlers: Handlers) -> AsyncIterator[tuple[grpc.aio.Channel, GrpcFront]]:
    front = GrpcFront(handlers.table(), request_bytes_max=BYTES_MAX)
    port = await front.start(HOST, 0)
    try:
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            yield channel, front
    finally:
        await front.stop(0)


def run(scenario: Callable[[Handlers, grpc.aio.Channel, GrpcFront], Awaitable[None]]) -> None:
    async def main() -> None:
        handlers = Handlers()
        async with served(handlers) as (channel, front):
            await scenario(handlers, channel, front)

    asyncio.run(main())


def test_a_handler_gets_the_bytes_headers_peer_and_deadline() -> None:
    async def scenario(handlers: Handlers, channel: grpc.aio.Channel, front: GrpcFront) -> None:
        call = channel.unary_unary("/s/echo")
        begin_s = time.monotonic()
        assert await call(b"\x00\xff", metadata=(("x-mq-client-id", "me"),), timeout=ANSWER_S) == b"\x00\xff"
        await call(b"", timeout=None)
        limited, unlimited = handlers.contexts
        assert limited.metadata["x-mq-client-id"] == "me"
        assert "127.0.0.1" in limited.peer
        assert begin_s + ANSWER_S - 5 < limited.deadline_s <= time.monotonic() + ANSWER_S
        assert unlimited.left_s() > 0

    run(scenario)


def test_a_call_that_needs_no_wait_is_answered_at_once() -> None:
    async def scenario(handlers: Handlers, channel: grpc.aio.Channel, front: GrpcFront) -> None:
        call = channel.unary_unary("/s/soon")
        assert await call(b"x", timeout=ANSWER_S) == b"at once: x"
        assert handlers.contexts == []
        assert await call(b"wait", timeout=ANSWER_S) == b"wait"
        # a compressed request takes the long way
        assert await call(b"x" * 1000, timeout=ANSWER_S, compression=grpc.Compression.Gzip) == b"x" * 1000
        assert len(handlers.contexts) == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"break", timeout=ANSWER_S)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert "secret" not in str(caught.value.details())
        assert await call(b"y", timeout=ANSWER_S) == b"at once: y"
        assert front.pending.held == 0

    run(scenario)


def test_a_method_without_a_handler_is_unimplemented_and_a_large_request_is_refused() -> None:
    async def scenario(handlers: Handlers, channel: grpc.aio.Channel, front: GrpcFront) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/other")(b"", timeout=ANSWER_S)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/echo")(b"x" * (BYTES_MAX + 1), timeout=ANSWER_S)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert handlers.contexts == []

    run(scenario)


def test_answers_stream_and_the_generator_is_closed_when_the_client_leaves() -> None:
    async def scenario(handlers: Handlers, channel: grpc.aio.Channel, front: GrpcFront) -> None:
        call = channel.unary_stream("/s/count")
        assert [answer async for answer in call(b"3", timeout=ANSWER_S)] == [b"0", b"1", b"2"]
        assert await handlers.closed.get() == "count"
        stream = call(b"2", timeout=ANSWER_S)
        assert [await stream.read(), await stream.read()] == [b"0", b"1"]
        await handlers.entered.wait()
        stream.cancel()
        assert await asyncio.wait_for(handlers.closed.get(), ANSWER_S) == "count"

    run(scenario)


def test_a_stream_of_both_ends_with_the_client_or_with_an_error() -> None:
    async def scenario(handlers: Handlers, channel: grpc.aio.Channel, front: GrpcFront) -> None:
        call = channel.stream_stream("/s/both")
        stream = call(timeout=ANSWER_S)
        await stream.write(b"a")
        assert await stream.read() == b"aa"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await handlers.closed.get() == "both"
        for request, code in ((b"refuse", "INVALID_ARGUMENT"), (b"break", "INTERNAL")):
            stream = call(timeout=ANSWER_S)
            await stream.write(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code().name == code
            assert "secret" not in caught.value.details()
            assert await asyncio.wait_for(handlers.closed.get(), ANSWER_S) == "both"

    run(scenario)


def test_a_stop_lets_running_calls_end() -> None:
    async def scenario(handlers: Handlers, channel: grpc.aio.Channel, front: GrpcFront) -> None:
        call = asyncio.ensure_future(_answer(channel.unary_unary("/s/wait")(b"late", timeout=ANSWER_S)))
        await handlers.entered.wait()
        stop = asyncio.ensure_future(front.stop(ANSWER_S))
        handlers.go_on.set()
        assert await call == b"late"
        await stop
        await front.stop()

    run(scenario)


async def _answer(call: Any) -> bytes:
    answer: bytes = await call
    return answer


def test_a_used_port_is_an_error_of_one_line() -> None:
    async def main() -> None:
        first, second = (GrpcFront({}, request_bytes_max=BYTES_MAX) for _ in range(2))
        port = await first.start(HOST, 0)
        with pytest.raises(ServiceNotAvailableError, match=f"cannot listen at {HOST}:{port}"):
            await second.start(HOST, port)
        await first.stop(0)
        await second.stop(0)

    asyncio.run(main())


def test_a_server_with_a_certificate_serves_only_encrypted_connections(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    authority = Path(files.authority).read_bytes()

    async def main() -> None:
        front = GrpcFront(Handlers().table(), request_bytes_max=BYTES_MAX)
        port = await front.start(HOST, 0, CertificateFiles(Path(files.certificate), Path(files.key)))
        credentials = grpc.ssl_channel_credentials(authority)
        # the certificate has the server's address as its name, but not as an address
        options = [("grpc.ssl_target_name_override", HOST)]
        async with grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options) as channel:
            assert await channel.unary_unary("/s/echo")(b"secret", timeout=ANSWER_S) == b"secret"
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/s/echo")(b"open", timeout=ANSWER_S)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await front.stop(0)

    asyncio.run(main())


def test_a_new_connection_gets_the_renewed_certificate_and_never_a_half_renewed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, second = (make_certificates(tmp_path / name) for name in ("first", "second"))
    used = CertificateFiles(Path(first.certificate), Path(first.key))

    async def served_by(port: int, authority: str) -> bool:
        """Return whether a new connection that trusts only `authority` is served."""
        credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes())
        # a channel with its own options has its own connection
        options = [("grpc.ssl_target_name_override", HOST), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options) as channel:
            call = channel.unary_unary("/s/echo")(b"secret", timeout=ANSWER_S)
            code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return bool(code == grpc.StatusCode.OK)

    async def main() -> None:
        front = GrpcFront(Handlers().table(), request_bytes_max=BYTES_MAX)
        port = await front.start(HOST, 0, used)
        assert await served_by(port, first.authority)
        Path(first.certificate).write_bytes(Path(second.certificate).read_bytes())
        # the key is still the former one
        assert await served_by(port, first.authority)
        assert await served_by(port, first.authority)
        Path(first.key).write_bytes(Path(second.key).read_bytes())
        assert await served_by(port, second.authority)
        assert not await served_by(port, first.authority)
        await front.stop(0)

    asyncio.run(main())
    assert len([one for one in caplog.messages if "former certificate" in one]) == 1


def test_files_that_are_no_certificate_are_an_error_before_the_port_is_open(tmp_path: Path) -> None:
    (tmp_path / "rubbish").write_text("no certificate")

    async def main() -> None:
        front = GrpcFront({}, request_bytes_max=BYTES_MAX)
        for name in ("rubbish", "missing"):
            with pytest.raises(ConfigError, match=r"gateway\.tls_cert"):
                await front.start(HOST, 0, CertificateFiles(tmp_path / name, tmp_path / name))
        await front.stop(0)

    asyncio.run(main())


def test_two_servers_share_a_port_only_if_both_ask_for_it() -> None:
    async def main() -> None:
        first, second, third = (
            GrpcFront({}, request_bytes_max=BYTES_MAX, shares_port=shares) for shares in (True, True, False)
        )
        port = await first.start(HOST, 0)
        assert await second.start(HOST, port) == port
        with pytest.raises(ServiceNotAvailableError, match="cannot listen"):
            await third.start(HOST, port)
        for front in (first, second, third):
            await front.stop(0)

    asyncio.run(main())
