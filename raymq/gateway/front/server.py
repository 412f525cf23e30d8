"""GrpcFront serves a table of handlers (`raymq.gateway.calls`) with grpc.aio, in the running event loop.

A method without a handler answers UNIMPLEMENTED. Requests, headers, streams and idle connections are bounded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc

from raymq.common.errors import ServiceNotAvailableError
from raymq.gateway.calls import LEFT_S, AnswerStream, BothStreams, CallContext, Handlers, StreamRefusedError, UnaryCall
from raymq.gateway.front.certificates import CertificateFiles, ServerCertificate

HEADERS_BYTES_MAX: Final = 16 * 1024
STREAMS_MAX: Final = 1000
"""Maximum number of calls at the same time on one connection."""
IDLE_MS: Final = 120_000
"""Time in ms after which a connection without a call is closed."""
PING_INTERVAL_MIN_MS: Final = 10_000
"""Shortest time in ms between the pings of a client whose connection is idle."""
STOP_GRACE_S: Final = 5.0

logger = logging.getLogger(__name__)


class GrpcFront:
    """A gRPC server. `start` opens the port, `stop` closes it. One object serves once."""

    def __init__(self, handlers: Handlers, *, request_bytes_max: int, shares_port: bool = False) -> None:
        """`request_bytes_max`: the maximum size of a request in bytes. A larger request is refused by gRPC.
        `shares_port`: True if several processes of the same user listen at one port, and share its connections."""
        self._server = grpc.aio.server(
            handlers=[_Table(handlers)],
            options=[
                ("grpc.max_receive_message_length", request_bytes_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", HEADERS_BYTES_MAX),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", int(shares_port)),
            ],
        )

    async def start(self, host: str, port: int, tls: CertificateFiles | None = None) -> int:
        """Listen at `host` and `port`, and return the port. `port` 0: any free port. `tls`: the files of the
        server's certificate; None for connections without encryption. New connections use a changed certificate.

        Raises ServiceNotAvailableError if the address cannot be used, and ConfigError if the certificate cannot be
        used.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                opened: int = self._server.add_insecure_port(address)
            else:
                opened = self._server.add_secure_port(address, _credentials(tls))
        except RuntimeError:
            raise ServiceNotAvailableError(
                f"the gateway cannot listen at {address}: another program uses the port, or the address is not one of "
                "this machine; see gateway.host and gateway.port"
            ) from None
        await self._server.start()
        return opened

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse new calls, wait up to `grace_s` seconds for running calls, then cancel the rest. Idempotent."""
        await self._server.stop(grace_s)


def _credentials(files: CertificateFiles) -> Any:
    """Return grpc's credentials of a server. grpc calls `changed` before each TLS handshake."""

    def changed() -> Any:
        found = files.changed()
        return None if found is None else _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(files.read()), changed)


def _configuration(certificate: ServerCertificate) -> Any:
    return grpc.ssl_server_certificate_configuration([(certificate.private_key, certificate.certificate_chain)])


class _Table(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, handlers: Handlers) -> None:
        self._methods = {path: _method(handler) for path, handler in handlers.items()}

    def service(self, handler_call_details: Any) -> Any:
        return self._methods.get(handler_call_details.method)


def _context(context: Any) -> CallContext:
    headers = {name: text for name, text in context.invocation_metadata() or () if isinstance(text, str)}
    left_s = context.time_remaining()
    # without a deadline, grpc returns None or a time of many years
    limited_s = LEFT_S if left_s is None else left_s
    return CallContext(headers, context.peer(), time.monotonic() + limited_s)


def _method(handler: UnaryCall | AnswerStream | BothStreams) -> Any:
    """Return grpc's handler of a method. Without a serializer, grpc passes bytes."""
    if isinstance(handler, UnaryCall):
        return grpc.unary_unary_rpc_method_handler(_unary(handler))
    if isinstance(handler, AnswerStream):
        return grpc.unary_stream_rpc_method_handler(_answers(handler))
    return grpc.stream_stream_rpc_method_handler(_both(handler))


def _unary(handler: UnaryCall) -> Callable[[bytes, Any], Any]:
    async def call(request: bytes, context: Any) -> bytes:
        return await handler.handle(_context(context), request)

    return call


def _answers(handler: AnswerStream) -> Callable[[bytes, Any], Any]:
    async def call(request: bytes, context: Any) -> None:
        async with aclosing(handler.handle(_context(context), request)) as answers:
            async for answer in answers:
                await context.write(answer)

    return call


def _both(handler: BothStreams) -> Callable[[AsyncIterator[bytes], Any], Any]:
    async def call(requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            async with aclosing(handler.handle(_context(context), requests)) as answers:
                async for answer in answers:
                    await context.write(answer)
        except StreamRefusedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            logger.exception("a stream of %s ended with an unexpected error", context.peer())
            await context.abort(grpc.StatusCode.INTERNAL, "unexpected error; the gateway's log has it")

    return call
