"""The client's end of a lane (direct socket connection). The thread that makes a call also writes the request and reads
the answer.

The socket blocks, and the kernel enforces the timeouts. So a call costs two system calls and no thread switch.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from raymq.common import identity
from raymq.common.closing import close_in_child
from raymq.common.errors import RequestTimeoutError
from raymq.remoting.lane import handshake
from raymq.remoting.lane.address import LaneAddress, TlsFiles, client_tls, rays_tls, refused_by_client
from raymq.remoting.lane.frames import (
    CHECKED_HEADER,
    CORRELATION,
    FLAG_ERROR,
    HEADER,
    Buffer,
    Fields,
    FrameKind,
    decode_error,
    pack_header,
    unpack_header,
)
from raymq.remoting.lane.handshake import TlsRefusedError

OPEN_TIMEOUT_S: Final = 2.0
"""Timeout in seconds for connecting to a lane server, including the handshake."""
BACKLOG_PAUSE_S: Final = 0.01
"""Pause in seconds before the client connects again to a server whose backlog is full."""
SMALL_ANSWER_BYTES: Final = 16 << 10
"""Size in bytes of the receive buffer of a lane (direct socket connection). The buffer is reused; an answer that is
longer gets a separate buffer."""
SEND_PARTS_MAX: Final = 512
"""Maximum number of buffers that one system call sends. The kernel accepts 1024."""
_SOCKET_BUFFER_BYTES: Final = 4 << 20
_TIMEVAL: Final = struct.Struct("ll")


@dataclass(slots=True)
class Answer:
    """The server's answer to a request over a lane. `payload` is valid until the next call on the same lane."""

    flags: int
    count: int
    payload: memoryview


class Lane:
    """One client connection to a LaneServer. Only one thread at a time may use it."""

    def __init__(self, address: LaneAddress, *, remote: bool = False, timeout_s: float = OPEN_TIMEOUT_S) -> None:
        """Connect to the lane server (server of direct socket connections), over TCP if `remote`, and authenticate. If
        this process has a user, authenticate as this user.

        Raises OSError or EOFError if connecting fails. Raises LaneSecretError, which is an OSError, if the client or
        the server lacks the lane's secret. Raises LaneRefusedError if the server refuses this connection or this user.
        """
        self._checked = remote
        self._header_bytes = CHECKED_HEADER.size if remote else HEADER.size
        self._buffer = memoryview(bytearray(SMALL_ANSWER_BYTES))
        self._have = 0
        """Number of bytes in the receive buffer that belong to answers which are not yet returned to the
        caller."""
        self._correlation = 0
        self._timeouts_s = [-1.0, -1.0]
        """The socket's current timeouts for receiving and for sending, in seconds."""
        self._small_timeout_s = -1.0
        """The socket's timeout, in seconds, for receiving and sending, if `call_small` was the last call that set it.
        -1 if another call has changed the timeout since then."""
        self.closed = False
        self._deadline_s = time.monotonic() + timeout_s
        self._is_tls = False
        self._stream = self._connect(address, timeout_s) if remote else _connect_unix(address, timeout_s)
        self._is_tls = isinstance(self._stream, ssl.SSLSocket)
        close_in_child(self)
        try:
            self._shake_hands(address.secret)
        # The handshake of a lane (direct socket connection) may also fail with a TLS error. In TLS 1.3 the server can
        # still refuse the client after the client's part of the TLS handshake has succeeded.
        except ssl.SSLError as error:
            self.close()
            raise tls_refused(error, address, rays_tls()) from error
        except BaseException:
            self.close()
            raise

    def _connect(self, address: LaneAddress, timeout_s: float) -> socket.socket:
        check_port(address)
        stream = socket.create_connection((address.host, address.port), timeout_s)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls:
                context, files = tls_of_client()
                try:
                    return context.wrap_socket(stream)
                except ssl.SSLError as error:
                    raise tls_refused(error, address, files) from error
            stream.settimeout(None)
        except TlsRefusedError:
            stream.close()
            raise
        except (OSError, KeyError) as error:
            stream.close()
            raise not_connected(address, error) from error
        return stream

    def _shake_hands(self, secret: bytes) -> None:
        hello = self._receive_exactly(handshake.HELLO_BYTES)
        reply = handshake.make_reply(secret, hello, identity.present())
        self._send((reply,), len(reply), self._deadline_s)
        handshake.check_verdict(secret, hello, reply, self._receive_exactly(handshake.VERDICT_BYTES))

    def call(
        self,
        kind: int,
        parts: Sequence[Buffer],
        timeout_s: float,
        *,
        flags: int = 0,
        count: int = 0,
        before: bytes = b"",
    ) -> Answer:
        """Send a request, whose payload is the joined `parts`, and return the server's answer. `before`: frames to send
        first, as in `send`.

        Raises the server's error. Raises RequestTimeoutError if no answer arrives in time, and OSError or EOFError if
        the connection broke. After one of these three errors, the lane is closed, and the call may have run.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            self.send(kind, parts, deadline_s, flags=flags, count=count, before=before)
            return self.receive(deadline_s)
        except BlockingIOError:
            self.close()
            raise RequestTimeoutError(f"the request of kind {kind}", timeout_s) from None

    def call_small(self, kind: int, parts: Sequence[Buffer], size: int, timeout_s: float) -> Answer:
        """Send one small request, with count 1 and a payload of `size` bytes, and return the server's answer.

        One system call writes the request and another reads the answer. If the socket accepts or returns only a part of
        the bytes, the general code of `call` continues. Raises like `call`.
        """
        self._correlation += 1
        try:
            if timeout_s != self._small_timeout_s:
                self._set_small_timeout(timeout_s)
            data = b"".join((pack_header(size, kind, 0, 1, self._correlation, checked=self._checked), *parts))
            sent = self._stream.send(data)
            if sent != len(data):
                self._send((memoryview(data)[sent:],), len(data) - sent, time.monotonic() + timeout_s)
            start = self._header_bytes
            # The fast path receives the answer here only if the receive buffer of the lane (direct socket connection)
            # is empty. A buffer with bytes holds answers to earlier requests; the general code then receives the
            # answer.
            if not self._have:
                self._have = have = self._stream.recv_into(self._buffer)
                if not have:
                    raise EOFError("the server has closed the connection")
                if have > start:
                    size, _, flags, count, correlation = unpack_header(self._buffer, 0, checked=self._checked)
                    if have == start + size and correlation == self._correlation and not flags & FLAG_ERROR:
                        self._have = 0
                        return Answer(flags, count, self._buffer[start:have])
        except (BlockingIOError, TimeoutError):
            self.close()
            raise RequestTimeoutError(f"the request of kind {kind}", timeout_s) from None
        except BaseException:
            self.close()
            raise
        try:
            return self.receive(time.monotonic() + timeout_s)
        except BlockingIOError:
            raise RequestTimeoutError(f"the request of kind {kind}", timeout_s) from None

    def send(
        self,
        kind: int,
        parts: Sequence[Buffer],
        deadline_s: float,
        *,
        flags: int = 0,
        count: int = 0,
        before: bytes = b"",
    ) -> None:
        """Send a request to the server. A later call of `receive` returns the answer, and drops answers to earlier
        requests.

        `before`: frames that the server does not answer; they are sent before the request. Raises BlockingIOError if
        the server does not accept the bytes before `deadline_s`.
        """
        self._correlation += 1
        size = sum(map(len, parts))
        try:
            header = pack_header(size, kind, flags, count, self._correlation, checked=self._checked)
            header = before + header if before else header
            self._send((header, *parts), len(header) + size, deadline_s)
        except BaseException:
            self.close()
            raise

    def receive(self, deadline_s: float) -> Answer:
        """Return the server's answer to the last request. Raises like `call`. Raises BlockingIOError if the answer does
        not arrive before `deadline_s`."""
        while True:
            answer = self.receive_one(deadline_s)
            if answer is not None:
                return answer

    def receive_one(self, deadline_s: float) -> Answer | None:
        """Receive one answer, as `receive` does. Returns None if it is not the answer to the last request, but a late
        answer to an earlier request."""
        return self._receive_answer(deadline_s, of_any=False)

    def receive_next(self, deadline_s: float) -> Answer:
        """Return the next answer that arrives, to any of the requests in flight. Raises like `receive`."""
        answer = self._receive_answer(deadline_s, of_any=True)
        assert answer is not None
        return answer

    def _receive_answer(self, deadline_s: float, *, of_any: bool) -> Answer | None:
        try:
            fields, payload = self._receive_frame(deadline_s)
        except BaseException:
            self.close()
            raise
        if fields[-1] != self._correlation and not of_any:
            return None
        return answer_of(fields, payload)

    def pack_unanswered(self, kind: int, payload: bytes) -> bytes:
        """Build a frame that the server does not answer. The caller passes the frame to `send` as the argument
        `before`."""
        return pack_header(len(payload), kind, 0, 0, 0, checked=self._checked) + payload

    def leave(self, deadline_s: float) -> None:
        """Ask the server to answer the last request at once, if the request waits for something. Raises the errors of
        `send`."""
        self.send_unanswered(FrameKind.LEAVE, CORRELATION.pack(self._correlation), deadline_s)

    def send_unanswered(self, kind: int, payload: bytes, deadline_s: float) -> None:
        """Send a frame that the server does not answer. Raises the errors of `send`."""
        frame = self.pack_unanswered(kind, payload)
        try:
            self._send((frame,), len(frame), deadline_s)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor of the lane's socket. The descriptor is readable if bytes have arrived."""
        return self._stream.fileno()

    @property
    def has_received(self) -> bool:
        """True if bytes of an answer are already in the buffer. The file descriptor does not show such bytes as
        readable."""
        return bool(self._have) or (isinstance(self._stream, ssl.SSLSocket) and self._stream.pending() > 0)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self.closed:
            self.closed = True
            self._stream.close()

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and hasattr(self, "_stream"):
            # The lane (direct socket connection) was garbage-collected, and the program did not call `close`.
            self._stream.close()

    # Methods that receive and send frames (messages on a direct socket connection)

    def _receive_frame(self, deadline_s: float) -> tuple[Fields, memoryview]:
        """Receive one frame. The returned payload is a view of the lane's buffer or, if the payload is large, of a
        separate buffer."""
        self._fill(self._header_bytes, deadline_s)
        fields = unpack_header(self._buffer, 0, checked=self._checked)
        size, start = fields[0], self._header_bytes
        stop = start + size
        if stop <= SMALL_ANSWER_BYTES:
            self._fill(stop, deadline_s)
            payload, self._have = self._buffer[start:stop], self._have - stop
            # The receive buffer also holds bytes of the next frames, which move to its front. So the payload is copied
            # out first.
            if self._have:
                payload = memoryview(bytes(payload))
                self._buffer[: self._have] = self._buffer[stop : stop + self._have]
            return fields, payload
        large = memoryview(bytearray(size))
        have = self._have - start
        large[:have] = self._buffer[start : self._have]
        self._have = 0
        while have < size:
            have += self._receive(large[have:], deadline_s)
        return fields, large

    def _fill(self, size: int, deadline_s: float) -> None:
        """Receive bytes from the server until the buffer of this lane (direct socket connection) holds `size`
        bytes."""
        while self._have < size:
            self._have += self._receive(self._buffer[self._have :], deadline_s)

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray(size)
        have = 0
        while have < size:
            have += self._receive(memoryview(data)[have:], self._deadline_s)
        return bytes(data)

    def _receive(self, buffer: memoryview, deadline_s: float) -> int:
        self._set_timeout(0, socket.SO_RCVTIMEO, deadline_s)
        try:
            count = self._stream.recv_into(buffer)
        except TimeoutError:
            raise BlockingIOError from None
        if not count:
            raise EOFError("the server has closed the connection")
        return count

    def _send(self, parts: Sequence[Buffer], size: int, deadline_s: float) -> None:
        self._set_timeout(1, socket.SO_SNDTIMEO, deadline_s)
        if self._is_tls:
            try:
                self._stream.sendall(b"".join(parts))
            except TimeoutError:
                raise BlockingIOError from None
            return
        sent = self._stream.sendmsg(parts[:SEND_PARTS_MAX])
        if sent == size:
            return
        left = [memoryview(part) for part in parts]
        while True:
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if not left:
                return
            left[0] = left[0][sent:]
            self._set_timeout(1, socket.SO_SNDTIMEO, deadline_s)
            sent = self._stream.sendmsg(left[:SEND_PARTS_MAX])

    def _set_small_timeout(self, timeout_s: float) -> None:
        """Set the socket's timeouts so that each read and each write of a small call takes at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        self._set_timeout(0, socket.SO_RCVTIMEO, deadline_s)
        self._set_timeout(1, socket.SO_SNDTIMEO, deadline_s)
        self._small_timeout_s = timeout_s

    def _set_timeout(self, index: int, option: int, deadline_s: float) -> None:
        """Set the timeout of the socket's next read or write, so that it ends at the deadline. Raises BlockingIOError
        if the deadline has passed."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise BlockingIOError
        if abs(left_s - self._timeouts_s[index]) <= left_s * 0.02:
            # Keep the socket's present timeout, because it is within 2 % of the wanted timeout. This saves a system
            # call.
            return
        self._small_timeout_s = -1.0
        if self._is_tls:
            self._stream.settimeout(left_s)
            self._timeouts_s = [left_s, left_s]
            return
        self._timeouts_s[index] = left_s
        self._stream.setsockopt(socket.SOL_SOCKET, option, timeval(left_s))


def open_anywhere(address: LaneAddress, timeout_s: float) -> Lane:
    """Open a lane (direct socket connection) over the server's Unix socket if this socket is on this node, else over
    TCP. Raises like `Lane`."""
    try:
        return Lane(address, timeout_s=timeout_s)
    except ConnectionRefusedError:  # The server's socket is not on this node: the server is elsewhere, or has ended.
        if not address.port:
            raise
        return Lane(address, remote=True, timeout_s=timeout_s)


def timeval(timeout_s: float) -> bytes:
    """Encode a positive timeout as the kernel's timeval, rounded up to whole microseconds, because zero would mean no
    timeout."""
    return _TIMEVAL.pack(*divmod(int(timeout_s * 1e6) + 1, 1_000_000))


def answer_of(fields: Fields, payload: memoryview) -> Answer:
    """Return the answer that a frame carries. Raises the server's error, if the frame carries an error."""
    _, _, flags, count, _ = fields
    if flags & FLAG_ERROR:
        raise decode_error(payload)
    return Answer(flags, count, payload)


def check_port(address: LaneAddress) -> None:
    """Raise ConnectionRefusedError if the server accepts connections from its own node only."""
    if not address.port:
        raise ConnectionRefusedError(f"the server accepts connections from its own node only: {address.own_node_only}")


def not_connected(address: LaneAddress, error: Exception) -> ConnectionRefusedError:
    """Return the error to raise after connecting over TCP has failed with `error`."""
    return ConnectionRefusedError(f"cannot connect to {address.host}:{address.port}: {error}")


def tls_of_client() -> tuple[ssl.SSLContext, TlsFiles]:
    """Return the TLS context of a new connection to a server that uses TLS, and the context's files. Raises
    ConnectionRefusedError if this process does not use TLS, and KeyError or OSError if a file is missing."""
    files = rays_tls()
    if files is None:
        raise ConnectionRefusedError("the server uses TLS, but RAY_USE_TLS is off in this process")
    return client_tls(files).current(), files


def tls_refused(error: ssl.SSLError, address: LaneAddress, files: TlsFiles | None) -> OSError:
    """Return the error to raise after a TLS error during the handshake. If the server merely disconnected, return
    `error` unchanged."""
    if files is None or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return error
    return TlsRefusedError(refused_by_client(error, f"{address.host}:{address.port}", files))


def _connect_unix(address: LaneAddress, timeout_s: float) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        enlarge_buffer(stream)
        stream.settimeout(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                stream.connect(address.name)
                break
            # If the server's backlog is full, connecting to its Unix socket raises BlockingIOError at once instead of
            # waiting.
            except BlockingIOError:
                if time.monotonic() + BACKLOG_PAUSE_S >= deadline_s:
                    raise
                time.sleep(BACKLOG_PAUSE_S)
        stream.settimeout(None)
    except OSError:
        stream.close()
        raise
    return stream


def enlarge_buffer(stream: socket.socket) -> None:
    """Enlarge the kernel's buffer for the bytes that a Unix socket sends."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
