"""The server's end of one lane (direct socket connection): receives bytes, passes frames to the handlers, and sends
answers.

Only the thread that runs the event loop's current turn uses a connection. Small frames are received into a buffer that
all connections share, so an idle connection has no buffer. A large frame gets a separate buffer when it gets its turn
(turns.py). Nothing in this module blocks. If a connection's socket accepts no more bytes, the connection buffers its
answers. The server reads nothing from this connection until the answers are sent.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError, SystemBusyError
from raymq.remoting.lane import handshake
from raymq.remoting.lane.address import LaneAddress, TlsFiles, failure_text, rate_limited_log, refused_by_server
from raymq.remoting.lane.buffers import FrameBuffers
from raymq.remoting.lane.frames import (
    CHECKED_HEADER,
    CORRELATION,
    FLAG_ERROR,
    HEADER,
    Buffer,
    Fields,
    FrameKind,
    ProtocolError,
    encode_error,
    pack_header,
    unpack_header,
)
from raymq.remoting.lane.handshake import HELLO_BYTES, REPLY_BYTES, VERSION, HandshakeStatus
from raymq.remoting.lane.loop import Loop
from raymq.remoting.lane.turns import Turn

logger = logging.getLogger(__name__)

SMALL_FRAME_BYTES: Final = 64 << 10
"""Maximum payload, in bytes, of a frame that is received into the shared buffer."""
SHARED_BUFFER_BYTES: Final = SMALL_FRAME_BYTES + CHECKED_HEADER.size
"""Size in bytes of the receive buffer that all connections of a server share."""
PIPELINE_MAX: Final = 8
"""Maximum number of unanswered requests of a connection. At this number the server stops reading from the
connection."""
LARGE_READS_MAX: Final = 16
"""Maximum number of reads for one large frame in one turn of the event loop. The limit lets other connections be
served."""
STALL_TIMEOUT_S: Final = 5.0
"""Maximum time in seconds without progress while a large frame arrives, or while a client reads its answers. After this
time the server closes the connection."""
FRAME_TIMEOUT_S: Final = 30.0
"""Maximum time in seconds for receiving a large frame, from the connection's turn (its permission to send the frame) to
the frame's last byte."""
ANSWER_PARTS_MAX: Final = 64
"""Maximum number of parts of an answer that are written separately. More parts are joined into one buffer
first."""

_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT
_GONE: Final = select.EPOLLHUP | select.EPOLLERR


Users = Callable[[str], bytes | None]
"""A function that returns a user's key by name, or None if the user has no access. Raises RaymqError while the server
does not have the users yet."""


class Context(Protocol):
    """Interface of the state that a server's handlers keep for one connection."""

    def close(self) -> None:
        """Free the state that a connection's handlers keep. Called after the connection has ended."""


class Host(Protocol):
    """Interface of the server as its connections use it: the data that all connections share, and the server's
    decisions about a connection."""

    label: str
    address: LaneAddress
    users: Users | None
    handlers: Mapping[int, Callable[[LaneRequest], None]]
    bulk_kinds: frozenset[int]
    frame_max_bytes: int
    scratch: memoryview
    buffers: FrameBuffers
    unsent_bytes: int
    loop: Loop

    def admit(self, connection: Connection) -> bool: ...
    def note_closed(self, connection: Connection) -> None: ...
    def ask_turn(self, connection: Connection, size: int) -> Turn: ...
    def finish_turn(self, connection: Connection) -> None: ...
    def turn_wait_s(self) -> float: ...
    def told(self, error: Exception, what: str) -> RaymqError: ...


class Stream(Protocol):
    """Interface of a non-blocking socket, with methods to receive and to send. They raise BlockingIOError instead of
    blocking."""

    def fileno(self) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def send(self, data: bytes, /) -> int: ...
    def sendmsg(self, buffers: Sequence[Buffer], /) -> int: ...
    def close(self) -> None: ...


class TlsStream:
    """The TLS socket of a server's connection, with the interface Stream."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, files: TlsFiles) -> None:
        """`context` is a TLS context that was built from `files`. Log messages about a failed handshake name these
        files."""
        self._files, self._peer = files, str(plain.getpeername()[0])
        self._stream = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self.fileno, self.close, self.pending = self._stream.fileno, self._stream.close, self._stream.pending

    def shake_hands(self) -> None:
        """Continue the TLS handshake. Raises BlockingIOError while the handshake is not finished."""
        try:
            self._stream.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def tell_refusal(self, error: ssl.SSLError, label: str) -> None:
        """Log why the TLS handshake with the server `label` failed, in one line."""
        line = refused_by_server(error, self._peer, label, self._files)
        if line:
            rate_limited_log.warn(("peer", self._peer, label, failure_text(error)), line)

    def recv_into(self, buffer: memoryview) -> int:
        try:
            return self._stream.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        return self.send(b"".join(buffers))

    def send(self, data: bytes) -> int:
        try:
            return self._stream.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


class LaneRequest:
    """One request frame of a client. `payload` is valid only while the handler runs.

    Any thread calls `answer` or `fail` once, while the handler runs or later; further calls are ignored. `context` is
    the state that the server's handlers keep for the connection.
    """

    __slots__ = ("_connection", "_correlation", "count", "flags", "kind", "payload")

    def __init__(
        self, connection: Connection, kind: int, flags: int, count: int, correlation: int, payload: memoryview
    ) -> None:
        self._connection: Connection | None = connection
        self.kind, self.flags, self.count, self._correlation = kind, flags, count, correlation
        self.payload = payload

    @property
    def context(self) -> Any:
        """The object in which the server's handlers keep state for this connection. None after the request is
        answered."""
        return None if self._connection is None else self._connection.context

    @property
    def user(self) -> str:
        """The name of the user who owns the lane (direct socket connection). Empty if the server has no users, and
        after the request is answered."""
        return "" if self._connection is None else self._connection.user

    @property
    def address(self) -> str:
        """The client's IP address; empty if the client is on the server's node."""
        return "" if self._connection is None else self._connection.peer

    def answer(self, *parts: Buffer, flags: int = 0, count: int = 0) -> None:
        """Send the answer to the request. The caller must not change the `parts` afterwards."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        loop = connection.server.loop
        if loop.is_own_thread:
            connection.reply(self.kind, flags, count, self._correlation, parts)
        else:
            loop.call_now(lambda: connection.reply(self.kind, flags, count, self._correlation, parts))

    def fail(self, error: BaseException) -> None:
        """Send an error as the answer to the request. The client receives an error of raymq.common.errors unchanged,
        and any other error as ServiceNotAvailableError."""
        self.answer(encode_error(error), flags=FLAG_ERROR)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call `call` once, in the server's thread, if nobody waits for the answer any more: the connection ends, or
        the client sends a LEAVE frame, before the request is answered. `call` must not block. The request must be
        answered all the same.

        Only the handler may call this method, while it runs; a second call replaces the first.
        """
        if self._connection is not None:
            self._connection.on_gone[self._correlation] = call

    def told(self, error: Exception, what: str) -> RaymqError:
        """Return the error with which the caller must fail this request (`fail`), after the operation `what` failed
        with `error`. An `error` that is not a RaymqError is a bug and is logged."""
        connection = self._connection
        return ServiceNotAvailableError(f"{what} failed") if connection is None else connection.server.told(error, what)

    def drop(self) -> None:
        """Finish the request without an answer, because the client expects none."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.server.loop.is_own_thread:
            connection.finish_request(self._correlation)
        else:
            connection.server.loop.call_soon(partial(connection.finish_request, self._correlation))


class Connection:
    """The server's end of one client connection. The object exists from the handshake until the connection
    closes."""

    def __init__(self, server: Host, stream: Stream, *, checked: bool, peer: str = "") -> None:
        """`checked`: true if the frame headers of this connection have a CRC. `peer`: the client's IP address, empty if
        the client is on this node."""
        self.server, self.peer = server, peer
        self._stream, self._checked = stream, checked
        self._header_bytes = CHECKED_HEADER.size if checked else HEADER.size
        self._scratch = server.scratch[: self._header_bytes + SMALL_FRAME_BYTES]
        self.context: Any = None
        self.user = ""
        """The name of the user who owns the lane (direct socket connection); empty if the server has no users."""
        self.is_open = False
        """True after the client has been authenticated."""
        self.is_closed = False
        self._tls = stream if isinstance(stream, TlsStream) else None
        self._read: Callable[[], None] = self._read_handshake if self._tls is None else self._read_tls_handshake
        self._hello = handshake.make_hello()
        self._rest = b""
        """The received bytes of an incomplete frame, or of the incomplete handshake."""
        self._large: memoryview | None = None
        """The buffer of the large frame that is being received."""
        self._large_fields: Fields = (0, 0, 0, 0, 0)
        self._filled = 0
        """Number of received bytes of the large frame. For a refused large frame: number of discarded bytes."""
        self._moved_s = 0.0
        """Time, in seconds, of this connection's last progress with a large transfer: bytes of a large frame were
        received, or bytes of buffered answers were sent."""
        self._began_s = 0.0
        """The time, in seconds, at which the server allowed the client to send its large frame (granted the
        turn)."""
        self._is_checked = False
        """True while a timer runs. The timer checks the progress of the large frame or of the buffered answers."""
        self._refusal: BaseException | None = None
        self._is_waiting = False
        """True while a large frame waits for its turn, and while a completely received large frame waits for the
        handler."""
        self._requests = 0
        """Number of requests of this connection that are not yet answered."""
        self.on_gone: dict[int, Callable[[], None]] = {}
        """Functions to call if nobody waits for the answer any more, by the correlation of a request that is not yet
        answered."""
        self._out: deque[memoryview] = deque()
        self._events = 0

    def start(self) -> None:
        """Send the server's hello to the client, and wait for the client's reply."""
        self._events = _READ
        self.server.loop.watch(self._stream.fileno(), _READ, self._on_events)
        if self._tls is None:
            self._send((self._hello,), len(self._hello))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.server.loop.forget(self._stream.fileno())
        self._stream.close()
        self.server.unsent_bytes -= sum([part.nbytes for part in self._out])
        self._out.clear()
        self._rest = b""
        if self._large is not None:
            self.server.buffers.give_back(self._large)
            self._large = None
        self.server.note_closed(self)
        while self.on_gone:
            self.on_gone.popitem()[1]()
        if self.context is not None:
            self.context.close()

    # Reading requests from the client

    def _on_events(self, events: int) -> None:
        try:
            if events == _READ and self._tls is None:
                self._read()
                return
            if events & _WRITE:
                self._flush()
            if events & _GONE and self._is_paused:
                self.close()  # The client has closed the connection.
            elif events & ~_WRITE and not self.is_closed:
                self._read()
                self._read_decrypted()
        except (OSError, EOFError) as error:
            if isinstance(error, ProtocolError):
                logger.warning("%s closes a client's connection: %s", self.server.label, error)
            self.close()
        except Exception:
            logger.exception("%s closes a client's connection after an internal error", self.server.label)
            self.close()

    def _receive(self, buffer: memoryview) -> int:
        """Receive bytes into `buffer` and return their number; 0 if none are available. Raises EOFError if the client
        has closed the connection."""
        try:
            count = self._stream.recv_into(buffer)
        except BlockingIOError:
            return 0
        if not count:
            raise EOFError
        return count

    def _read_decrypted(self) -> None:
        """Schedule another read if the TLS layer holds decrypted bytes, because epoll does not report these
        bytes."""
        if self._tls is not None and not self.is_closed and not self._is_paused and self._tls.pending():
            self.server.loop.call_soon(lambda: None if self.is_closed else self._on_events(_READ))

    def _read_tls_handshake(self) -> None:
        assert self._tls is not None
        try:
            self._tls.shake_hands()
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._tls.tell_refusal(error, self.server.label)
            raise
        self._read = self._read_handshake
        self._send((self._hello,), len(self._hello))

    def _read_handshake(self) -> None:
        view = self.server.scratch[: REPLY_BYTES - len(self._rest)]
        count = self._receive(view)
        if count:
            self._rest += view[:count]
        if len(self._rest) >= HELLO_BYTES and handshake.version_of(self._rest) != VERSION:
            self._give_verdict(HandshakeStatus.OTHER_VERSION)
            raise EOFError
        if len(self._rest) < REPLY_BYTES:
            return
        if not handshake.check_reply(self.server.address.secret, self._hello, self._rest):
            raise EOFError
        verdict = self._judge_user()
        if verdict is HandshakeStatus.OPEN and not self.server.admit(self):
            verdict = HandshakeStatus.FULL
        self._give_verdict(verdict)
        if verdict is not HandshakeStatus.OPEN:
            raise EOFError
        self.is_open = True
        self._rest, self._hello = b"", b""
        self._read = self._read_frames

    def _judge_user(self) -> HandshakeStatus:
        """Check the user who requests the lane (direct socket connection), and store the user's name. Returns the
        status for the handshake; OPEN if the server has no users."""
        if self.server.users is None:
            return HandshakeStatus.OPEN
        self.user = handshake.user_of(self._rest)
        try:
            key = self.server.users(self.user)
        except RaymqError:  # The server has not loaded its users (access control) yet; the client retries.
            return HandshakeStatus.NOT_READY
        if key is None or not handshake.check_user(key, self._hello, self._rest):
            logger.warning(
                "%s refuses a connection of user %r: the user is unknown, or the secret is wrong",
                self.server.label,
                self.user,
            )
            return HandshakeStatus.NOT_THIS_USER
        return HandshakeStatus.OPEN

    def _give_verdict(self, verdict: HandshakeStatus) -> None:
        reply = self._rest.ljust(REPLY_BYTES, b"\0")
        answer = handshake.make_verdict(self.server.address.secret, self._hello, reply, verdict)
        self._send((answer,), len(answer))

    def _read_frames(self) -> None:
        # All connections share this receive buffer. It has space for a whole small frame, or for the first bytes of a
        # large frame.
        scratch, have = self.server.scratch, len(self._rest)
        if have:
            scratch[:have] = self._rest
        received = self._receive(scratch[have : self._header_bytes + SMALL_FRAME_BYTES] if have else self._scratch)
        if received:
            self._take_frames(have + received)

    def _take_frames(self, end: int) -> None:
        """Handle the request frames in the server's shared receive buffer. The first `end` bytes of the buffer are from
        this connection."""
        scratch, header_bytes, at = self.server.scratch, self._header_bytes, 0
        while end - at >= header_bytes and not (at and self._is_paused):
            fields = unpack_header(scratch, at, checked=self._checked)
            start = at + header_bytes
            stop = start + fields[0]
            if fields[0] > SMALL_FRAME_BYTES:
                self._begin_large(fields, scratch[start:end])
                return
            if stop > end:
                break
            at = stop
            self._dispatch(fields, scratch[start:stop])
            if self.is_closed:
                return
        self._rest = bytes(scratch[at:end]) if at < end else b""
        if self._requests or self._out:
            self._watch()

    def _dispatch(self, fields: Fields, payload: memoryview) -> None:
        _, kind, flags, count, correlation = fields
        request = LaneRequest(self, kind, flags, count, correlation, payload)
        self._requests += 1
        handler = self.server.handlers.get(kind)
        try:
            if handler is None and kind == FrameKind.LEAVE:
                self._leave(payload)
                request.drop()
                return
            if handler is None:
                raise ServiceNotAvailableError(
                    f"{self.server.label} does not serve requests of kind {kind}; use the same version of raymq "
                    "on both ends"
                )
            handler(request)
        except ProtocolError:
            raise
        except Exception as error:
            request.fail(self.server.told(error, f"a request of kind {kind}"))

    def _leave(self, payload: memoryview) -> None:
        """End a request whose answer nobody waits for any more. Does nothing if the request is answered already."""
        if len(payload) != CORRELATION.size:
            raise ProtocolError(f"a LEAVE frame has {len(payload)} bytes, not {CORRELATION.size}")
        call = self.on_gone.pop(CORRELATION.unpack(payload)[0], None)
        if call is not None:
            call()

    # Receiving large frames

    def _begin_large(self, fields: Fields, first: memoryview) -> None:
        """Start to receive a large frame, or refuse it. `first`: the bytes of the frame that are already
        received."""
        self._large_fields, self._rest, size = fields, bytes(first), fields[0]
        if size > self.server.frame_max_bytes:
            most = self.server.frame_max_bytes
            self._refuse(InvalidArgumentError(f"a request has {size} bytes; at most {most} are allowed"))
            return
        turn = self.server.ask_turn(self, size)
        if turn is Turn.GRANTED:
            self.begin_turn()
        elif turn is Turn.WAITING:
            self._is_waiting = True
            self._watch()
        else:
            self.refuse_turn()

    def begin_turn(self) -> None:
        """Start to receive the connection's large frame, because the server has granted its turn (the permission to
        send it)."""
        size = self._large_fields[0]
        self._large = self.server.buffers.take(size)
        self._filled = len(self._rest)
        self._large[: self._filled] = self._rest
        self._rest, self._is_waiting = b"", False
        self._read = self._read_large
        self._began_s = time.monotonic()
        self._note_move()
        self._watch()

    def refuse_turn(self) -> None:
        """Refuse the large frame that waits for its turn, and discard its bytes, because it would wait too
        long."""
        wait_s = round(self.server.turn_wait_s(), 3)
        self._is_waiting = False
        self._refuse(
            SystemBusyError(
                f"{self.server.label} is busy: requests in flight have reached its limit of bytes; nothing was "
                f"stored, send again in {wait_s} s",
                wait_s,
            )
        )

    def _refuse(self, error: BaseException) -> None:
        self._refusal, self._filled, self._rest = error, len(self._rest), b""
        self._began_s = time.monotonic()
        self._requests += 1
        self._read = self._read_refused
        self._note_move()
        self._watch()

    def _read_large(self) -> None:
        assert self._large is not None
        frame = self._large[: self._large_fields[0]]
        if not self._read_rest(lambda: frame[self._filled :]):
            return
        self._is_waiting = True
        self._watch()
        if self._large_fields[1] in self.server.bulk_kinds:
            self.server.loop.background.append(self._take_large)
        else:
            self._take_large()

    def _take_large(self) -> None:
        """Pass the large frame to its handler, and return the frame's buffer to the pool."""
        buffer = self._large
        if buffer is None:
            return  # The connection was closed before its large frame was handled.
        self._large = None
        try:
            self._dispatch(self._large_fields, buffer[: self._large_fields[0]])
        except ProtocolError:
            self.close()
        self.server.buffers.give_back(buffer)
        self.server.finish_turn(self)
        self._is_waiting = False
        self._read = self._read_frames
        if not self.is_closed:
            self._watch()

    def _read_rest(self, free: Callable[[], memoryview]) -> bool:
        """Receive the available bytes of the large frame. `free` returns the memory into which the missing bytes are
        received.

        Returns True if the frame is complete.
        """
        for _ in range(LARGE_READS_MAX):
            received = self._receive(free())
            if not received:
                return False
            self._filled += received
            self._moved_s = time.monotonic()
            if self._filled == self._large_fields[0]:
                return True
        return False

    def _read_refused(self) -> None:
        if not self._read_rest(lambda: self.server.scratch[: self._large_fields[0] - self._filled]):
            return
        error, self._refusal = self._refusal, None
        assert error is not None
        self._read = self._read_frames
        _, kind, _, _, correlation = self._large_fields
        self.reply(kind, FLAG_ERROR, 0, correlation, (encode_error(error),))

    # Sending answers to the client

    def reply(self, kind: int, flags: int, count: int, correlation: int, parts: Sequence[Buffer]) -> None:
        """Send the answer to one request."""
        if self.is_closed:
            return
        try:
            if len(parts) == 1 and len(parts[0]) < SMALL_FRAME_BYTES:
                size = len(parts[0])
                header = pack_header(size, kind, flags, count, correlation, checked=self._checked)
                self._send_one(header + parts[0])
                self.finish_request(correlation)
                return
            size = sum(map(len, parts))
            header = pack_header(size, kind, flags, count, correlation, checked=self._checked)
            size += len(header)
            if len(parts) < ANSWER_PARTS_MAX:
                self._send((header, *parts), size)
            else:
                self._send((header + b"".join(parts),), size)
        except OSError:
            self.close()
            return
        self.finish_request(correlation)

    def finish_request(self, correlation: int) -> None:
        """Note that a request of this connection was answered or dropped. If the connection had the maximum number of
        unanswered requests, continue to read from it."""
        if self.on_gone:
            self.on_gone.pop(correlation, None)
        was_paused = self._requests >= PIPELINE_MAX
        self._requests -= 1
        if was_paused and not self.is_closed:
            self._go_on()

    def _send_one(self, data: bytes) -> None:
        """Send an answer that has only one part. The socket usually accepts all its bytes at once."""
        sent = 0
        if not self._out:
            try:
                sent = self._stream.send(data)
            except BlockingIOError:
                pass
            if sent == len(data):
                return
        self._keep((data,), len(data), sent)

    def _send(self, parts: Sequence[Buffer], size: int) -> None:
        """Write an answer of `size` bytes to the socket, and buffer the bytes that the socket does not accept
        now."""
        sent = 0
        if not self._out:
            try:
                sent = self._stream.sendmsg(parts)
            except BlockingIOError:
                pass
            if sent == size:
                return
        self._keep(parts, size, sent)

    def _keep(self, parts: Sequence[Buffer], size: int, sent: int) -> None:
        """Buffer the bytes of an answer that were not sent, until the socket accepts them. The first `sent` bytes were
        sent."""
        if not self._out:
            self._note_move()
        self.server.unsent_bytes += size - sent
        for part in parts:
            if sent < len(part):
                self._out.append(memoryview(part)[sent:])
            sent = max(sent - len(part), 0)
        self._watch()

    def _flush(self) -> None:
        """Write as many bytes of the buffered answers as the socket accepts."""
        while self._out:
            parts = [self._out[index] for index in range(min(len(self._out), ANSWER_PARTS_MAX))]
            try:
                sent = self._stream.sendmsg(parts)
            except BlockingIOError:
                return
            self._moved_s = time.monotonic()
            self.server.unsent_bytes -= sent
            while sent:
                first = self._out[0]
                if sent < first.nbytes:
                    self._out[0] = first[sent:]
                    break
                sent -= first.nbytes
                self._out.popleft()
        self._go_on()

    # The events for which the loop watches this connection

    @property
    def _is_paused(self) -> bool:
        return bool(self._out) or self._requests >= PIPELINE_MAX or self._is_waiting

    def _watch(self) -> None:
        """Set the events for which the loop watches this connection."""
        if self.is_closed:
            return
        events = (0 if self._is_paused else _READ) | (_WRITE if self._out else 0)
        if events != self._events:
            self._events = events
            self.server.loop.change(self._stream.fileno(), events)

    def _go_on(self) -> None:
        """Resume reading from the connection after a pause. Bytes that were received before the pause are handled
        first."""
        self._watch()
        if self._rest and self.is_open and not self._is_paused and self._read == self._read_frames:
            self.server.loop.call_soon(self._take_rest)

    def _take_rest(self) -> None:
        if self.is_closed or self._is_paused or self._read != self._read_frames or not self._rest:
            return
        have = len(self._rest)
        self.server.scratch[:have] = self._rest
        try:
            self._take_frames(have)
        except (OSError, EOFError):
            self.close()

    def _note_move(self) -> None:
        """Record that the connection made progress now, and start the connection's timer. The timer closes the
        connection if receiving its large frame, or sending its answers, makes no progress for too long."""
        self._moved_s = time.monotonic()
        if not self._is_checked:
            self._is_checked = True
            self.server.loop.call_at(self._moved_s + STALL_TIMEOUT_S, self._check_moves)

    def _check_moves(self) -> None:
        self._is_checked = False
        receives = self._read in (self._read_large, self._read_refused) and not self._is_waiting
        if self.is_closed or not (self._out or receives):
            return
        due_s, now_s = self._moved_s + STALL_TIMEOUT_S, time.monotonic()
        if receives:
            due_s = min(due_s, self._began_s + FRAME_TIMEOUT_S)
        if now_s < due_s:
            self._is_checked = True
            self.server.loop.call_at(due_s, self._check_moves)
            return
        logger.warning("%s closes a client's connection: the client no longer reads its answers", self.server.label)
        self.close()
