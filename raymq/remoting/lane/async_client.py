"""The client's end of a lane (direct socket connection) for asyncio: several calls wait at the same time, without a
thread.

The server answers the requests of one connection in any order, and stops to read while PIPELINE_MAX requests of the
connection are unanswered. A lane carries fewer calls, so that the server also reads LEAVE frames and the end of the
connection. A call that was cancelled or timed out counts until its answer arrives, which is then dropped.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

from raymq.common import identity
from raymq.common.closing import close_in_child
from raymq.common.errors import RequestTimeoutError
from raymq.remoting.lane import handshake
from raymq.remoting.lane.address import LaneAddress, rays_tls
from raymq.remoting.lane.client import (
    BACKLOG_PAUSE_S,
    OPEN_TIMEOUT_S,
    Answer,
    answer_of,
    check_port,
    enlarge_buffer,
    not_connected,
    tls_of_client,
    tls_refused,
)
from raymq.remoting.lane.connection import PIPELINE_MAX
from raymq.remoting.lane.frames import CORRELATION, Buffer, FrameKind, ReceivedBytes, pack_header
from raymq.remoting.lane.handshake import TlsRefusedError

LANE_CALLS_MAX: Final = PIPELINE_MAX - 1
"""Maximum number of unanswered requests of a lane."""
LANE_ANSWER_MAX_BYTES: Final = 64 << 20
"""Maximum payload in bytes of an answer. A lane with a longer answer is closed."""


class AsyncLane(asyncio.Protocol):
    """One client connection to a LaneServer, in one event loop. Several tasks may call at the same time; a caller
    starts no call if the lane is not `is_free`. `open_lane` and `open_lane_anywhere` make lanes.

    `on_change`: called with the lane when a call has got its answer, and once after the connection has closed.
    """

    def __init__(self, *, checked: bool, on_change: Callable[[AsyncLane], None] = lambda lane: None) -> None:
        self.on_change = on_change
        self.closed = False
        self._checked = checked
        self._received = ReceivedBytes(checked=checked, payload_max=LANE_ANSWER_MAX_BYTES)
        self._process = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._stream: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._correlation = 0
        self._calls: dict[int, tuple[asyncio.Future[Answer], Callable[[], None]]] = {}
        """The requests without an answer, by correlation: the answer, and what to call when the request has ended. The
        future of a call that was cancelled or timed out is done."""
        self._wanted: tuple[int, asyncio.Future[bytes]] | None = None
        """The number of bytes that the handshake waits for, and their future."""
        self._is_open = self._is_retired = False

    @property
    def is_free(self) -> bool:
        """True if the lane takes another call."""
        return self._is_open and not (self.closed or self._is_retired) and len(self._calls) < LANE_CALLS_MAX

    @property
    def calls(self) -> int:
        """Number of requests without an answer."""
        return len(self._calls)

    async def call(
        self,
        kind: int,
        parts: Sequence[Buffer],
        timeout_s: float,
        *,
        flags: int = 0,
        count: int = 0,
        on_end: Callable[[], None] = lambda: None,
        leave: asyncio.Future[None] | None = None,
    ) -> Answer:
        """Send a request, whose payload is the joined `parts`, and return the server's answer. `on_end`: called once,
        when the server has answered or the connection has closed; if the call was cancelled, this is later. `leave`:
        when this future is done, the server is asked to answer at once, if the request waits for something.

        Raises the server's error. Raises RequestTimeoutError if no answer arrives in time, and OSError or EOFError if
        the connection broke. After one of these three errors the call may have run. After a timeout, the lane takes no
        further calls, and closes when its other calls have ended.
        """
        assert self.is_free
        assert self._transport is not None
        self._correlation = correlation = self._correlation + 1
        answer: asyncio.Future[Answer] = self._loop.create_future()
        # If the caller is cancelled after the answer has arrived, nobody reads an error in it, and asyncio would log
        # the error.
        answer.add_done_callback(_read_error)
        header = pack_header(sum(map(len, parts)), kind, flags, count, correlation, checked=self._checked)
        self._calls[correlation] = answer, on_end
        late = RequestTimeoutError(f"the request of kind {kind}", timeout_s)
        timer = self._loop.call_later(timeout_s, _expire, answer, late)
        on_leave = partial(self._ask_to_end, correlation)
        try:
            self._transport.write(b"".join((header, *parts)))
            if leave is not None:
                leave.add_done_callback(on_leave)
            return await answer
        finally:
            timer.cancel()
            if leave is not None:
                leave.remove_done_callback(on_leave)
            if correlation in self._calls and not self.closed:
                self._gave_up(answer)

    def _ask_to_end(self, correlation: int, _: asyncio.Future[None]) -> None:
        """Ask the server to answer a request at once, because nobody waits for what the request waits for."""
        if correlation in self._calls and not self.closed:
            assert self._transport is not None
            payload = CORRELATION.pack(correlation)
            self._transport.write(pack_header(len(payload), FrameKind.LEAVE, 0, 0, 0, checked=self._checked) + payload)

    def _gave_up(self, answer: asyncio.Future[Answer]) -> None:
        """Note that a call has ended before its answer. After a timeout the server may be unreachable."""
        if not answer.cancelled():
            self.retire()
        elif self._is_retired:
            self._close_unused()

    def retire(self) -> None:
        """Take no further calls, and close the connection when nobody waits for an answer."""
        self._is_retired = True
        self._close_unused()

    def _close_unused(self) -> None:
        if all(answer.done() for answer, _ in self._calls.values()):
            self.close()

    def close(self) -> None:
        """Close the connection. The calls that wait raise EOFError. Idempotent.

        In a forked child, only the child's copy of the socket is closed: the event loop's epoll object is shared with
        the parent.
        """
        if os.getpid() != self._process:
            self.closed = True
            if self._stream is not None:
                self._stream.close()
            return
        if self._transport is not None:
            self._transport.abort()
        self._end(EOFError("the connection was closed by this process"))

    def _end(self, error: Exception) -> None:
        """End the calls that wait, because the connection has closed."""
        if self.closed:
            return
        self.closed = True
        calls, self._calls = self._calls, {}
        if self._wanted is not None and not self._wanted[1].done():
            self._wanted[1].set_exception(error)
        for answer, on_end in calls.values():
            if not answer.done():
                answer.set_exception(error)
            on_end()
        self.on_change(self)

    # The methods that asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # the transports of uvloop, which Ray gives to actors, do not inherit from asyncio's classes
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or EOFError("the server has closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received.add(data)
        try:
            if self._is_open:
                self._take_answers()
            else:
                self._take_wanted()
        except OSError as error:
            assert self._transport is not None
            self._transport.abort()
            self._end(error)

    def _take_answers(self) -> None:
        while not self.closed and (found := self._received.take_frame()) is not None:
            fields, payload = found
            answer, on_end = self._calls.pop(fields[-1], (None, None))
            if answer is None or on_end is None:
                continue
            if not answer.done():
                try:
                    answer.set_result(answer_of(fields, memoryview(payload)))
                # every error in a frame is the answer to its call
                except Exception as error:
                    answer.set_exception(error)
            on_end()
            self.on_change(self)
            if self._is_retired:
                self._close_unused()

    # The handshake

    async def shake_hands(self, stream: socket.socket, secret: bytes) -> None:
        """Authenticate over the connected `stream`, as the user of this process if it has one. Afterwards the lane
        takes calls. Raises like `Lane`."""
        self._stream = stream
        close_in_child(self)
        hello = await self._exactly(handshake.HELLO_BYTES)
        reply = handshake.make_reply(secret, hello, identity.present())
        assert self._transport is not None
        self._transport.write(reply)
        handshake.check_verdict(secret, hello, reply, await self._exactly(handshake.VERDICT_BYTES))
        if self.closed:
            raise EOFError("the server has closed the connection")
        self._is_open = True

    async def _exactly(self, size: int) -> bytes:
        if self.closed:
            raise EOFError("the server has closed the connection")
        self._wanted = size, self._loop.create_future()
        wanted = self._wanted[1]
        self._take_wanted()
        return await wanted

    def _take_wanted(self) -> None:
        if self._wanted is not None and not self._wanted[1].done():
            size, wanted = self._wanted
            found = self._received.take(size)
            if found is not None:
                wanted.set_result(found)


async def open_lane(address: LaneAddress, *, remote: bool = False, timeout_s: float = OPEN_TIMEOUT_S) -> AsyncLane:
    """Connect to the lane server (server of direct socket connections), over TCP if `remote`, and authenticate, within
    `timeout_s`. Raises like `Lane`."""
    async with asyncio.timeout(timeout_s):
        lane = AsyncLane(checked=remote)
        if not remote:
            stream = await _connect_unix(address)
            return await _opened(lane, stream, address, None)
        check_port(address)
        try:
            stream = await _connect_tcp(address)
            try:
                tls = tls_of_client() if address.tls else None
            except BaseException:
                stream.close()
                raise
        except (OSError, KeyError) as error:
            raise not_connected(address, error) from error
        return await _opened(lane, stream, address, None if tls is None else tls[0])


async def open_lane_anywhere(address: LaneAddress, timeout_s: float) -> AsyncLane:
    """Open a lane (direct socket connection) over the server's Unix socket if this socket is on this node, else over
    TCP. Raises like `Lane`."""
    try:
        return await open_lane(address, timeout_s=timeout_s)
    except ConnectionRefusedError:  # The server's socket is not on this node: the server is elsewhere, or has ended.
        if not address.port:
            raise
        return await open_lane(address, remote=True, timeout_s=timeout_s)


async def _opened(
    lane: AsyncLane, stream: socket.socket, address: LaneAddress, context: ssl.SSLContext | None
) -> AsyncLane:
    """Return the lane over a connected socket, after the handshakes of TLS and of the lane."""
    loop = asyncio.get_running_loop()
    try:
        name = None if context is None else address.host
        await loop.create_connection(lambda: lane, sock=stream, ssl=context, server_hostname=name)
    # From here on asyncio closes the socket, after errors too.
    except ssl.SSLError as error:
        refused = tls_refused(error, address, rays_tls())
        raise refused if isinstance(refused, TlsRefusedError) else not_connected(address, error) from error
    try:
        await lane.shake_hands(stream, address.secret)
    # In TLS 1.3 the server can still refuse the client after the client's part of the TLS handshake has succeeded.
    except ssl.SSLError as error:
        lane.close()
        raise tls_refused(error, address, rays_tls()) from error
    except BaseException:
        lane.close()
        raise
    return lane


async def _connect_tcp(address: LaneAddress) -> socket.socket:
    stream = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(stream, (address.host, address.port))
    except BaseException:
        stream.close()
        raise
    return stream


async def _connect_unix(address: LaneAddress) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        enlarge_buffer(stream)
        stream.setblocking(False)
        while True:
            try:
                # A Unix socket connects at once or not at all. asyncio's sock_connect would take a full backlog for a
                # connection in progress.
                stream.connect(address.name)
                return stream
            except BlockingIOError:
                await asyncio.sleep(BACKLOG_PAUSE_S)
    except BaseException:
        stream.close()
        raise


def _expire(answer: asyncio.Future[Answer], error: RequestTimeoutError) -> None:
    if not answer.done():
        answer.set_exception(error)


def _read_error(answer: asyncio.Future[Answer]) -> None:
    if not answer.cancelled():
        answer.exception()
