"""GrpcFront serves a table of handlers (`raymq.gateway.calls`) with gRPC over HTTP/2, in the running event loop.

A method without a handler answers UNIMPLEMENTED. Requests, headers, streams, connections and silent clients are
bounded. The protocol itself is in `Http2Connection`, which has no socket; this module connects it with the event loop,
of asyncio or of uvloop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any, Final

from raymq.common.errors import ServiceNotAvailableError
from raymq.gateway.calls import LEFT_S, CallContext, Handlers
from raymq.gateway.front.certificates import CertificateFiles
from raymq.gateway.front.connection import STREAMS_MAX, Http2Connection, RequestData, RequestOpened
from raymq.gateway.front.frames import Http2Code
from raymq.gateway.front.messages import (
    CallEndedError,
    CallMetadata,
    GrpcStatus,
    encoding_is_known,
    no_grpc,
    only_trailers,
    timeout_s,
)
from raymq.gateway.front.running_calls import PendingBytes, RunningCall

GRPC_CONNECTIONS_MAX: Final = 10_000
"""Maximum number of connections of one process. Further ones are closed at once."""
CONNECTION_TASKS_MAX: Final = 2 * STREAMS_MAX
"""Number of handlers of one connection that may run, also while they end, before new calls are refused."""
CONNECTION_IDLE_S: Final = 120.0
"""Time in s after which a connection without a call is closed."""
GREETING_S: Final = 20.0
"""Time in s that a new connection has for its TLS handshake, and again for its first bytes of HTTP/2."""
CLIENT_SILENCE_S: Final = 120.0
"""Time in s without a byte from a client with open calls, after which the server asks for a sign of life."""
SIGN_OF_LIFE_S: Final = 20.0
"""Time in s that a silent client has to answer before its connection ends."""
FRONT_TICK_S: Final = 1.0
"""Time in s between two checks of deadlines and of silent clients."""
LINGER_S: Final = 1.0
"""Time in s that a client has to close a connection that has ended. So it reads the last answers first."""
STOP_GRACE_S: Final = 5.0
_PENDING_REQUESTS: Final = 4
"""Number of largest requests whose bytes one process holds at the same time."""
_PENDING_BYTES_MIN: Final = 64 << 20
_BACKLOG: Final = 512

logger = logging.getLogger(__name__)


class GrpcFront:
    """A gRPC server. `start` opens the port, `stop` closes it. One object serves once."""

    def __init__(self, handlers: Handlers, *, request_bytes_max: int, shares_port: bool = False) -> None:
        """`request_bytes_max`: the maximum size of a request in bytes. A larger request is answered
        RESOURCE_EXHAUSTED. `shares_port`: True if several processes of the same user listen at one port, and share its
        connections."""
        self.handlers = {path.encode(): handler for path, handler in handlers.items()}
        self.request_bytes_max = request_bytes_max
        self.pending = PendingBytes(max(_PENDING_BYTES_MIN, _PENDING_REQUESTS * request_bytes_max))
        self.connections: set[ClientConnection] = set()
        self._shares_port = shares_port
        self._server: asyncio.Server | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        """Set when the last connection has ended."""
        self._is_stopping = False
        self._leaving: set[asyncio.Task[None]] = set()
        """Cancelled handlers of connections that have ended."""

    async def start(self, host: str, port: int, tls: CertificateFiles | None = None) -> int:
        """Listen at `host` and `port`, and return the port. `port` 0: any free port. `tls`: the files of the
        server's certificate; None for connections without encryption. New connections use a changed certificate.

        Raises ServiceNotAvailableError if the address cannot be used, and ConfigError if the certificate cannot be
        used.
        """
        context = None if tls is None else tls.context(["h2"])
        listening = _listening(host, port, reuse_port=self._shares_port)
        opened: int = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        tls_options: dict[str, Any] = {} if context is None else {"ssl_handshake_timeout": GREETING_S}
        try:
            self._server = await loop.create_server(
                lambda: ClientConnection(self, encrypted=context is not None),
                sock=listening,
                ssl=context,
                backlog=_BACKLOG,
                **tls_options,
            )
        except BaseException:
            listening.close()
            raise
        self._tick_handle = loop.call_later(FRONT_TICK_S, self._tick)
        return opened

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse new calls, wait up to `grace_s` seconds for running calls, then cancel the rest. Idempotent."""
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.go_away()
        await self._until_empty(grace_s)
        tasks = self._leaving.union(*(connection.tasks for connection in self.connections))
        for connection in list(self.connections):
            connection.end_calls(GrpcStatus.UNAVAILABLE, "the gateway stops")
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_GRACE_S)
        await self._until_empty(LINGER_S)
        for connection in list(self.connections):
            connection.abort()
        await self._until_empty(LINGER_S)
        if self._tick_handle is not None:
            self._tick_handle.cancel()

    def admit(self, connection: ClientConnection) -> bool:
        """Add a new connection. Returns False if it must be closed at once."""
        if self._is_stopping or len(self.connections) >= GRPC_CONNECTIONS_MAX:
            return False
        self.connections.add(connection)
        self._empty.clear()
        return True

    def forget(self, connection: ClientConnection) -> None:
        """Remove a connection that has ended."""
        self.connections.discard(connection)
        for task in connection.tasks:
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        if not self.connections:
            self._empty.set()

    async def _until_empty(self, limit_s: float) -> None:
        """Wait until all connections have ended, up to `limit_s` seconds."""
        if self.connections:
            try:
                async with asyncio.timeout(limit_s):
                    await self._empty.wait()
            except TimeoutError:
                return

    def _tick(self) -> None:
        self._tick_handle = asyncio.get_running_loop().call_later(FRONT_TICK_S, self._tick)
        now_s = time.monotonic()
        for connection in list(self.connections):
            connection.tick(now_s)


class ClientConnection(asyncio.Protocol):
    """One connection of a client: `Http2Connection`, the socket's transport, and the running calls."""

    def __init__(self, front: GrpcFront, *, encrypted: bool) -> None:
        self._front, self._encrypted = front, encrypted
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._flushes = self._ends = False
        """`_flushes`: the output is written in this turn of the event loop. `_ends`: the socket is being closed."""
        now_s = time.monotonic()
        self._opened_s = self._heard_s = self._active_s = now_s
        self._asked_s = float("-inf")
        """The time of the last question for a sign of life."""
        self.http2 = Http2Connection(now_s)
        self.calls: dict[int, RunningCall] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    # Called by the event loop.

    # uvloop's transports are no instances of asyncio's class
    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if not self._front.admit(self):
            transport.abort()
            return
        if self._encrypted and _protocol_of(transport) != "h2":
            logger.info("a client of the gateway offers no HTTP/2 in its TLS handshake")
            transport.abort()
            return
        self._peer = _peer_text(transport.get_extra_info("peername"))
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard_s = now_s = time.monotonic()
        # the calls need no turn of the event loop for their output: it is written below
        self._flushes = True
        for event in self.http2.receive(data, now_s):
            call = self.calls.get(event.stream_id)
            if isinstance(event, RequestData):
                if call is not None:
                    call.receive(event.data, ended=event.ended)
            elif isinstance(event, RequestOpened):
                self._open(event, now_s)
            elif call is not None:
                call.gone()
        self._flush()

    def pause_writing(self) -> None:
        self.http2.is_writable = False

    def resume_writing(self) -> None:
        self.http2.is_writable = True
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._leave_calls()
        self._front.forget(self)

    # Called by the calls and by the front.

    def flush_soon(self) -> None:
        """Write the new output in this turn of the event loop, together with the output of other calls."""
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def go_away(self) -> None:
        """Refuse new calls, and end the connection after its last call."""
        self.http2.go_away()
        self._flush()

    def end_calls(self, status: GrpcStatus, reason: str) -> None:
        """End all calls with an error."""
        for call in list(self.calls.values()):
            call.end(status, reason)
        self._flush()

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    def tick(self, now_s: float) -> None:
        """End calls after their deadlines. End the connection if it is idle, or if its client has gone silently."""
        if self.calls:
            self._active_s = now_s
            late = [call for call in self.calls.values() if call.ends_s is not None and call.ends_s <= now_s]
            for call in late:
                call.end(GrpcStatus.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        if not self.http2.is_greeted and now_s - self._opened_s >= GREETING_S:
            self.abort()
        elif not self.http2.stream_count and now_s - self._active_s >= CONNECTION_IDLE_S:
            self.go_away()
        elif now_s - self._heard_s >= CLIENT_SILENCE_S:
            if self._asked_s < self._heard_s:
                self._asked_s = now_s
                self.http2.ping()
                self._flush()
            elif now_s - self._asked_s >= SIGN_OF_LIFE_S:
                self.abort()

    def _open(self, opened: RequestOpened, now_s: float) -> None:
        """Begin the call of a request, or answer it at once if it is no call."""
        stream_id, fields = opened.stream_id, opened.fields
        self._active_s = now_s
        if opened.is_large:
            block = only_trailers(GrpcStatus.RESOURCE_EXHAUSTED, "the headers of the call are too large")
        elif fields[b":method"] != b"POST":
            block = no_grpc(405)
        elif not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            block = no_grpc(415)
        elif len(self.tasks) >= CONNECTION_TASKS_MAX:
            self.http2.reset(stream_id, Http2Code.REFUSED_STREAM)
            return
        else:
            try:
                call = self._call(stream_id, fields, now_s)
            except CallEndedError as error:
                block = only_trailers(error.status, error.reason)
            else:
                if opened.ended:
                    call.receive(b"", ended=True)
                return
        self.http2.send_tail(stream_id, block)

    def _call(self, stream_id: int, fields: dict[bytes, bytes], now_s: float) -> RunningCall:
        """Return the call of a request. Raises CallEndedError if it cannot begin."""
        front = self._front
        handler = front.handlers.get(fields[b":path"])
        if handler is None:
            raise CallEndedError(GrpcStatus.UNIMPLEMENTED, "the gateway has no such method")
        metadata = CallMetadata(fields)
        encoding = metadata.get("grpc-encoding", "identity")
        if not encoding_is_known(encoding):
            raise CallEndedError(GrpcStatus.UNIMPLEMENTED, "the gateway cannot read this grpc-encoding")
        ends_s = now_s + timeout_s(metadata["grpc-timeout"]) if b"grpc-timeout" in fields else None
        context = CallContext(metadata, self._peer, now_s + LEFT_S if ends_s is None else ends_s)
        return RunningCall(
            self,
            stream_id,
            handler,
            context,
            ends_s=ends_s,
            encoding=encoding,
            bytes_max=front.request_bytes_max,
            pending=front.pending,
        )

    def _flush(self) -> None:
        """Write the output, as far as the socket accepts it, and let the calls go on that waited for this."""
        self._flushes = False
        transport, http2 = self._transport, self.http2
        if transport is None:
            return
        while http2.has_next():
            transport.write(http2.take())
        for stream_id in http2.take_drained():
            call = self.calls.get(stream_id)
            if call is not None:
                call.drained()
        if http2.is_closing and not self._ends:
            self._end(transport)

    def _end(self, transport: asyncio.Transport) -> None:
        """Close the socket, after all output is written."""
        self._leave_calls()
        if self.http2.has_failed:
            transport.close()
            self._ends = True
        elif self.http2.is_writable:
            # Unread bytes of the client would make the socket's end discard the last answers. So the client closes the
            # socket first, if it does so in time.
            self._ends = True
            try:
                if transport.can_write_eof():
                    transport.write_eof()
            except OSError:
                # the client has closed the socket
                transport.abort()
        self._loop.call_later(LINGER_S, transport.abort)

    def _leave_calls(self) -> None:
        """Cancel all calls: their streams have ended."""
        for call in list(self.calls.values()):
            call.gone()


def _protocol_of(transport: Any) -> str | None:
    """Return the protocol on which client and server agreed in the TLS handshake."""
    found: str | None = transport.get_extra_info("ssl_object").selected_alpn_protocol()
    return found


def _peer_text(name: Any) -> str:
    """Return the address of a caller as gRPC writes it, such as ``ipv4:10.0.0.7:4711``; empty if it has none."""
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    host, port = str(name[0]), name[1]
    # a socket for both families shows an IPv4 address inside an IPv6 address
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _listening(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port, dualstack_ipv6=both
        )
    except OSError:
        raise ServiceNotAvailableError(
            f"the gateway cannot listen at {address}: another program uses the port, or the address is not one of "
            "this machine; see gateway.host and gateway.port"
        ) from None
