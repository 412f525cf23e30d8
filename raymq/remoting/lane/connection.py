"""The server's end of one lane: bytes in, frames to the handlers, answers back. For the thread with the loop's turn.

Small frames are received into a buffer that all connections of the server share, so an idle connection holds none. A
large frame gets a buffer of its own when it is its turn (turns.py). Nothing here blocks: a connection whose socket
takes no more keeps its answers, and is read again once they are gone.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError, SystemBusyError
from raymq.remoting.lane import handshake
from raymq.remoting.lane.address import LaneAddress, TlsFiles, failure_text, refused_by_server, told_seldom
from raymq.remoting.lane.buffers import FrameBuffers
from raymq.remoting.lane.frames import (
    CHECKED_HEADER,
    FLAG_ERROR,
    HEADER,
    Buffer,
    Fields,
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
"""The longest payload that is received into the shared buffer."""
SHARED_BUFFER_BYTES: Final = SMALL_FRAME_BYTES + CHECKED_HEADER.size
"""The size of the buffer that all connections share."""
PIPELINE_MAX: Final = 8
"""The most requests of a connection without an answer. It is not read while there are so many."""
LARGE_READS_MAX: Final = 16
"""Reads of a large frame in one turn."""
STALL_TIMEOUT_S: Final = 5.0
"""How long a large frame may stand still, and how long a client may leave its answers unread."""
FRAME_TIMEOUT_S: Final = 30.0
"""How long a large frame may take, from its turn to its last byte."""
ANSWER_PARTS_MAX: Final = 64
"""Parts of an answer that are written without a copy."""

_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT
_GONE: Final = select.EPOLLHUP | select.EPOLLERR


Users = Callable[[str], bytes | None]
"""Gives the key of a user by name; None for one that may not come. Raises RaymqError while the users are not known."""


class Context(Protocol):
    """The state that a server's handlers keep of one connection."""

    def close(self) -> None:
        """The connection has ended."""


class Host(Protocol):
    """The server of a connection: the parts that all its connections share, and the decisions about them."""

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
    """A socket that does not block. Both methods raise BlockingIOError when they would have to."""

    def fileno(self) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def send(self, data: bytes, /) -> int: ...
    def sendmsg(self, buffers: Sequence[Buffer], /) -> int: ...
    def close(self) -> None: ...


class TlsStream:
    """A TLS socket of a server as a Stream."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, files: TlsFiles) -> None:
        """`context` was made from `files`, which the lines about a refusal name."""
        self._files, self._peer = files, str(plain.getpeername()[0])
        self._stream = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self.fileno, self.close, self.pending = self._stream.fileno, self._stream.close, self._stream.pending

    def shake_hands(self) -> None:
        """Go on with the handshake of TLS. BlockingIOError: it is not at its end."""
        try:
            self._stream.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def tell_refusal(self, error: ssl.SSLError, label: str) -> None:
        """Log the one line that says why this connection to the server `label` comes to nothing."""
        line = refused_by_server(error, self._peer, label, self._files)
        if line:
            told_seldom.warn(("peer", self._peer, label, failure_text(error)), line)

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
    """One frame of a client. `payload` is valid only while the handler runs.

    `answer` or `fail` is called once, by any thread, then or later; what comes after that is ignored. `context` is what
    the server's handlers keep of the connection.
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
        """The state that the handlers keep of the connection; None once the request is answered."""
        return None if self._connection is None else self._connection.context

    @property
    def user(self) -> str:
        """The user whose lane this is; empty where the server asks for none, and once the request is answered."""
        return "" if self._connection is None else self._connection.user

    @property
    def address(self) -> str:
        """The IP address that the client came from; empty on the server's own node."""
        return "" if self._connection is None else self._connection.peer

    def answer(self, *parts: Buffer, flags: int = 0, count: int = 0) -> None:
        """Send the answer. The parts must not change any more."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        loop = connection.server.loop
        if loop.is_own_thread:
            connection.reply(self.kind, flags, count, self._correlation, parts)
        else:
            loop.call_now(lambda: connection.reply(self.kind, flags, count, self._correlation, parts))

    def fail(self, error: BaseException) -> None:
        """Send an error: one of raymq.common.errors arrives as it is, others as ServiceNotAvailableError."""
        self.answer(encode_error(error), flags=FLAG_ERROR)

    def told(self, error: Exception, what: str) -> RaymqError:
        """The error to `fail` with when `what` failed; one that is not raymq's is a bug, and logged."""
        connection = self._connection
        return ServiceNotAvailableError(f"{what} failed") if connection is None else connection.server.told(error, what)

    def drop(self) -> None:
        """Send no answer, because the client waits for none."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.server.loop.is_own_thread:
            connection.finish_request()
        else:
            connection.server.loop.call_soon(connection.finish_request)


class Connection:
    """One client's connection, from its handshake to its end."""

    def __init__(self, server: Host, stream: Stream, *, checked: bool, peer: str = "") -> None:
        """`checked`: headers have a CRC. `peer`: the IP address of the client, empty on this node."""
        self.server, self.peer = server, peer
        self._stream, self._checked = stream, checked
        self._header_bytes = CHECKED_HEADER.size if checked else HEADER.size
        self._scratch = server.scratch[: self._header_bytes + SMALL_FRAME_BYTES]
        self.context: Any = None
        self.user = ""
        """The user whose lane this is; empty where the server asks for none."""
        self.is_open = False
        """True once the client is authenticated."""
        self.is_closed = False
        self._tls = stream if isinstance(stream, TlsStream) else None
        self._read: Callable[[], None] = self._read_handshake if self._tls is None else self._read_tls_handshake
        self._hello = handshake.make_hello()
        self._rest = b""
        """The beginning of the next frame, or of the handshake."""
        self._large: memoryview | None = None
        """The buffer of a large frame under way."""
        self._large_fields: Fields = (0, 0, 0, 0, 0)
        self._filled = 0
        """The bytes of the large frame that are there; of one that is refused, those that were thrown away."""
        self._moved_s = 0.0
        """When the large frame, or the answers that wait, moved last."""
        self._began_s = 0.0
        """When the large frame got its turn."""
        self._is_checked = False
        """True while a timer looks after those."""
        self._refusal: BaseException | None = None
        self._is_waiting = False
        """True while a large frame waits for its turn, or is whole and waits for the handler."""
        self._requests = 0
        """The requests without an answer."""
        self._out: deque[memoryview] = deque()
        self._events = 0

    def start(self) -> None:
        """Send the first bytes and wait for the client's."""
        self._events = _READ
        self.server.loop.watch(self._stream.fileno(), _READ, self._on_events)
        if self._tls is None:
            self._send((self._hello,), len(self._hello))

    def close(self) -> None:
        """End the connection. Idempotent."""
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
        if self.context is not None:
            self.context.close()

    # Reading

    def _on_events(self, events: int) -> None:
        try:
            if events == _READ and self._tls is None:
                self._read()
                return
            if events & _WRITE:
                self._flush()
            if events & _GONE and self._is_paused:
                self.close()  # nobody is there for whom to go on
            elif events & ~_WRITE and not self.is_closed:
                self._read()
                self._read_decrypted()
        except (OSError, EOFError) as error:
            if isinstance(error, ProtocolError):
                logger.warning("a lane of %s is closed: %s", self.server.label, error)
            self.close()
        except Exception:
            logger.exception("a lane of %s is closed", self.server.label)
            self.close()

    def _receive(self, buffer: memoryview) -> int:
        """The bytes received; 0 if there are none now. EOFError at the end."""
        try:
            count = self._stream.recv_into(buffer)
        except BlockingIOError:
            return 0
        if not count:
            raise EOFError
        return count

    def _read_decrypted(self) -> None:
        """Come back for what TLS has decrypted already, of which epoll does not know."""
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
        """Note whose lane this is, if the server asks for users."""
        if self.server.users is None:
            return HandshakeStatus.OPEN
        self.user = handshake.user_of(self._rest)
        try:
            key = self.server.users(self.user)
        except RaymqError:  # nobody knows the users now; an actor call tells the client
            return HandshakeStatus.NOT_READY
        if key is None or not handshake.check_user(key, self._hello, self._rest):
            logger.warning(
                "a lane of %s was asked for by %r, who is not known, or not so", self.server.label, self.user
            )
            return HandshakeStatus.NOT_THIS_USER
        return HandshakeStatus.OPEN

    def _give_verdict(self, verdict: HandshakeStatus) -> None:
        reply = self._rest.ljust(REPLY_BYTES, b"\0")
        answer = handshake.make_verdict(self.server.address.secret, self._hello, reply, verdict)
        self._send((answer,), len(answer))

    def _read_frames(self) -> None:
        # A frame that fits in here is small; of a larger one its beginning fits.
        scratch, have = self.server.scratch, len(self._rest)
        if have:
            scratch[:have] = self._rest
        received = self._receive(scratch[have : self._header_bytes + SMALL_FRAME_BYTES] if have else self._scratch)
        if received:
            self._take_frames(have + received)

    def _take_frames(self, end: int) -> None:
        """Deal with the frames in the shared buffer, whose first `end` bytes are this connection's."""
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
            if handler is None:
                raise ServiceNotAvailableError(f"the lane of {self.server.label} does not serve frames of kind {kind}")
            handler(request)
        except ProtocolError:
            raise
        except Exception as error:
            request.fail(self.server.told(error, f"a frame of kind {kind}"))

    # Large frames

    def _begin_large(self, fields: Fields, first: memoryview) -> None:
        """Begin with a frame that needs its own buffer, or is refused; `first` came of it already."""
        self._large_fields, self._rest, size = fields, bytes(first), fields[0]
        if size > self.server.frame_max_bytes:
            most = self.server.frame_max_bytes
            self._refuse(InvalidArgumentError(f"a frame of {size} bytes is longer than the {most} allowed"))
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
        """Receive the large frame now."""
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
        """Throw the large frame away, because its turn would come late."""
        wait_s = round(self.server.turn_wait_s(), 3)
        self._is_waiting = False
        self._refuse(
            SystemBusyError(
                f"{self.server.label} has as many bytes under way as it can deal with; nothing was stored, send again "
                f"in {wait_s} s",
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
        """Hand the large frame to its handler, and its buffer back."""
        buffer = self._large
        if buffer is None:
            return  # closed meanwhile
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
        """Receive what has come of the large frame into the memory that `free` gives for the rest. True if it is all
        there."""
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

    # Answers

    def reply(self, kind: int, flags: int, count: int, correlation: int, parts: Sequence[Buffer]) -> None:
        """Send one request's answer."""
        if self.is_closed:
            return
        try:
            if len(parts) == 1 and len(parts[0]) < SMALL_FRAME_BYTES:
                size = len(parts[0])
                header = pack_header(size, kind, flags, count, correlation, checked=self._checked)
                self._send_one(header + parts[0])
                self.finish_request()
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
        self.finish_request()

    def finish_request(self) -> None:
        """Note that a request has its answer, or gets none."""
        was_paused = self._requests >= PIPELINE_MAX
        self._requests -= 1
        if was_paused and not self.is_closed:
            self._go_on()

    def _send_one(self, data: bytes) -> None:
        """`_send` of one part, which most often the socket takes whole."""
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
        """Write `size` bytes, or keep what the socket does not take now."""
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
        """Keep all but the first `sent` bytes of an answer until the socket takes them."""
        if not self._out:
            self._note_move()
        self.server.unsent_bytes += size - sent
        for part in parts:
            if sent < len(part):
                self._out.append(memoryview(part)[sent:])
            sent = max(sent - len(part), 0)
        self._watch()

    def _flush(self) -> None:
        """Write what the socket takes of the answers that wait."""
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

    # What to wait for

    @property
    def _is_paused(self) -> bool:
        return bool(self._out) or self._requests >= PIPELINE_MAX or self._is_waiting

    def _watch(self) -> None:
        """Have the loop watch for what this connection waits for now."""
        if self.is_closed:
            return
        events = (0 if self._is_paused else _READ) | (_WRITE if self._out else 0)
        if events != self._events:
            self._events = events
            self.server.loop.change(self._stream.fileno(), events)

    def _go_on(self) -> None:
        """Read on after a pause: first what was received before it."""
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
        """Start to look after the large frame, or the answers that wait: they must not stand still."""
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
        logger.warning("a lane of %s is closed: its client stands still", self.server.label)
        self.close()
