"""The server of lanes (direct socket connections): one thread for all connections, and the limits that protect the
server.

Every process of the machine can connect to an abstract socket. The server accepts only processes of its own user and of
root, who could read the server's memory anyway. Handshakes have a deadline. The Unix socket and the TCP port have
separate limits of concurrent handshakes. So idle connections cannot block a client that has the secret. Every machine
of the network can reach the port, but load on the port does not affect the Unix socket.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.remoting.lane.address import LaneAddress, TlsContext, TlsFiles, rate_limited_log, rays_tls
from raymq.remoting.lane.buffers import FrameBuffers
from raymq.remoting.lane.connection import (
    SHARED_BUFFER_BYTES,
    Connection,
    Context,
    LaneRequest,
    Stream,
    TlsStream,
    Users,
)
from raymq.remoting.lane.loop import Loop, Timer
from raymq.remoting.lane.turns import LargeFrames, Turn

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 4096
"""Maximum number of authenticated connections of a lane server."""
HANDSHAKES_MAX: Final = 512
"""Maximum number of unauthenticated connections of a listening socket. Each connection takes a file descriptor and TLS
buffers."""
HANDSHAKE_TIMEOUT_S: Final = 2.0
"""Maximum time of a handshake in seconds, after which the connection is closed."""
HANDSHAKE_GRACE_S: Final = 0.05
"""Maximum time of a handshake in seconds while HANDSHAKES_MAX handshakes are running. A handshake usually takes about a
millisecond."""
ACCEPT_PAUSE_S: Final = 0.1
"""Pause in seconds after the server could not accept a connection, because no file descriptor was free."""
ACCEPTS_MAX: Final = 16
"""Maximum number of connections that the server accepts in one turn of the event loop."""
BACKLOG: Final = 4096
"""Maximum number of connections that wait to be accepted; the kernel may allow fewer (net.core.somaxconn)."""
DESCRIPTORS_MAX: Final = 65_536
"""Limit of open files that a server process requests."""
FRAME_MAX_BYTES: Final = 64 << 20
"""Maximum payload of a frame in bytes, unless a server sets another limit."""
LARGE_FRAMES_BYTES: Final = 64 << 20
"""Maximum total size, in bytes, of the large frames that are being received at the same time."""
LONGEST_TURN_WAIT_S: Final = 1.0
"""Maximum time in seconds that a large frame waits for its turn. The server refuses a frame that would wait
longer."""

Handler = Callable[[LaneRequest], None]


class _ListeningSocket:
    """A listening socket of a lane server (server of direct socket connections), with the connections whose handshake
    is running."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.handshakes: dict[Connection, float] = {}
        """The connections whose handshake is running, with the start times in seconds, oldest first."""
        self.timer: Timer | None = None
        """The timer for the oldest running handshake. When this handshake's time is over, the timer closes the
        connection."""
        self.is_accepting = True
        self.is_failing = False

    @property
    def is_full(self) -> bool:
        return len(self.handshakes) >= HANDSHAKES_MAX

    @property
    def patience_s(self) -> float:
        """The maximum time of a handshake in seconds. It is short while HANDSHAKES_MAX handshakes of this listening
        socket are running."""
        return HANDSHAKE_GRACE_S if self.is_full else HANDSHAKE_TIMEOUT_S


class LaneServer:
    """Serves the frames of all lanes (direct socket connections) of one process. The server has one thread, which calls
    the `handlers`; they must not block.

    A handler raises to refuse a frame, or answers the frame, immediately or later (LaneRequest). `contexts` creates the
    handlers' state for each connection. Large frames of the kinds `bulk_kinds` are handled one at a time, after all
    other work.
    """

    def __init__(
        self,
        label: str,
        handlers: Mapping[int, Handler],
        *,
        contexts: Callable[[], Context | None] = lambda: None,
        bulk_kinds: frozenset[int] = frozenset(),
        frame_max_bytes: int = FRAME_MAX_BYTES,
        host: str = "",
        tls: TlsFiles | None = None,
        users: Users | None = None,
    ) -> None:
        """`label` is part of the Unix socket's name. `host`: an IP address of this node at which the server also
        listens on TCP; without it, the server has no TCP port.

        If `tls` is given, TCP connections use TLS; each new connection gets the certificate that is in the files at
        that moment. If `users` is given, only a client that signs as one of the users gets a lane. Raises OSError if
        the server cannot listen.
        """
        self.users = users
        self.label, self.bulk_kinds = label, bulk_kinds
        self.handlers: Mapping[int, Handler] = dict(handlers)
        self.frame_max_bytes = frame_max_bytes
        self.scratch = memoryview(bytearray(SHARED_BUFFER_BYTES))
        """The shared buffer into which all connections receive small frames."""
        self.buffers = FrameBuffers()
        self.turns: LargeFrames[Connection] = LargeFrames(LARGE_FRAMES_BYTES, longest_wait_s=LONGEST_TURN_WAIT_S)
        self.unsent_bytes = 0
        """Total number of bytes in the buffered answers of all connections: bytes that the clients' sockets have not
        accepted yet."""
        self.loop = Loop(f"lane-{label}")
        self._contexts = contexts
        self._connections: set[Connection] = set()
        self._turn_timer: Timer | None = None
        self._is_closed = False
        self._tls: TlsContext | None = None
        self._listening = threading.Lock()
        name = f"\0raymq-{label}-{secrets.token_hex(8)}"
        self._listeners: list[_ListeningSocket] = []
        self._listen(socket.AF_UNIX, name)
        self.address = LaneAddress(name, secrets.token_bytes(32))
        if host:
            self._listen_at(host, tls)
        self.loop.start()

    def open_to_nodes(self, host: str, tls: Callable[[], TlsFiles | None] = rays_tls) -> LaneAddress:
        """Listen at `host` for clients on other nodes, unless the server already listens there. Returns the server's
        address.

        If listening fails, the server keeps serving its own node, the address contains the reason, and the next call
        retries. Any thread may call this method.
        """
        with self._listening:
            if not self.address.port and not self._is_closed:
                try:
                    self._listen_at(host, tls())
                except (OSError, KeyError) as error:
                    reason = f"RAY_USE_TLS is set, but {error} is not" if isinstance(error, KeyError) else str(error)
                    text = f"{self.label} cannot listen at {host}: {reason}"
                    self.address = replace(self.address, own_node_only=text)
                    rate_limited_log.warn(
                        ("listen", self.label, reason),
                        f"{text}. Clients on other nodes cannot connect; the server retries",
                    )
            return self.address

    def _listen_at(self, host: str, tls: TlsFiles | None) -> None:
        if tls is not None:
            self._tls = TlsContext(tls, TlsFiles.server_context)
        port = self._listen(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0)).getsockname()[1]
        self.address = replace(self.address, host=host, port=port, tls=tls is not None)

    def _listen(self, family: int, address: str | tuple[str, int]) -> socket.socket:
        listening = _ListeningSocket(_listen(family, address))
        self._listeners.append(listening)
        self.loop.watch(listening.listener.fileno(), select.EPOLLIN, partial(self._accept, listening))
        return listening.listener

    def close(self) -> None:
        """Stop accepting connections, close every connection, and end the server's thread. Idempotent."""
        self.loop.stop(self._close_all)

    @property
    def connections(self) -> int:
        """Number of authenticated connections of this server."""
        return len(self._connections)

    def told(self, error: Exception, what: str) -> RaymqError:
        """Return the error to send to a client whose call `what` failed with `error`. An error that is not a RaymqError
        is a bug and is logged."""
        if isinstance(error, RaymqError):
            return error
        logger.error("%s failed in %s", what, self.label, exc_info=error)
        return ServiceNotAvailableError(f"{what} failed in {self.label}: {error!r}")

    def _close_all(self) -> None:
        self._is_closed = True
        for connection in (*self._connections, *(one for listening in self._listeners for one in listening.handshakes)):
            connection.close()
        for listening in self._listeners:
            self.loop.forget(listening.listener.fileno())
            listening.listener.close()

    # Accepting connections

    def _accept(self, listening: _ListeningSocket, _events: int) -> None:
        for _ in range(ACCEPTS_MAX):
            if listening.is_full:
                self._drop_overdue(listening)
                if listening.is_full:
                    self._set_accepting(listening, False)
                    return
            try:
                client, peer = listening.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # No file descriptor is free: stop accepting connections for a while.
                if not listening.is_failing:
                    logger.warning("the lane server cannot accept connections now, retrying: %s", error)
                listening.is_failing = True
                self._set_accepting(listening, False)
                self.loop.call_at(time.monotonic() + ACCEPT_PAUSE_S, lambda: self._set_accepting(listening, True))
                return
            listening.is_failing = False
            try:
                self._begin(client, peer, listening)
            except OSError as error:
                logger.info("a new connection to %s has ended: %s", self.label, error)
                client.close()

    def _begin(self, client: socket.socket, peer: Any, listening: _ListeningSocket) -> None:
        is_unix = client.family == socket.AF_UNIX
        if is_unix and _peer_uid(client) not in (os.geteuid(), 0):
            client.close()
            return
        client.setblocking(False)
        stream: Stream = client
        if not is_unix:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                stream = TlsStream(client, self._tls.current(), self._tls.files)
        connection = Connection(self, stream, checked=not is_unix, peer="" if is_unix else str(peer[0]))
        listening.handshakes[connection] = time.monotonic()
        self._look_after_handshakes(listening)
        try:
            connection.start()
        except OSError:
            connection.close()

    def _set_accepting(self, listening: _ListeningSocket, accepts: bool) -> None:
        if accepts != listening.is_accepting and not self._is_closed:
            listening.is_accepting = accepts
            self.loop.change(listening.listener.fileno(), select.EPOLLIN if accepts else 0)

    def _look_after_handshakes(self, listening: _ListeningSocket) -> None:
        """Start the timer that closes the connection with the oldest handshake, unless the timer is running."""
        if listening.timer is None and listening.handshakes:
            due_s = next(iter(listening.handshakes.values())) + listening.patience_s
            listening.timer = self.loop.call_at(due_s, partial(self._drop_overdue, listening))

    def _drop_overdue(self, listening: _ListeningSocket) -> None:
        if listening.timer is not None:
            self.loop.cancel(listening.timer)
            listening.timer = None
        now_s = time.monotonic()
        for connection, start_s in list(listening.handshakes.items()):
            if start_s + listening.patience_s > now_s:
                break
            connection.close()
        self._look_after_handshakes(listening)

    def admit(self, connection: Connection) -> bool:
        """Register a connection whose client has the secret of the lane server (server of direct socket connections).
        Returns False if the server already has CONNECTIONS_MAX connections."""
        if len(self._connections) >= CONNECTIONS_MAX:
            return False
        connection.context = self._contexts()
        self._connections.add(connection)
        self._end_handshake(connection)
        return True

    def note_closed(self, connection: Connection) -> None:
        """Remove a closed connection and its large frame. Start receiving the large frames that waited for this frame's
        end."""
        self._connections.discard(connection)
        self._end_handshake(connection)
        self._let_in(self.turns.leave(connection, time.monotonic()))

    def _end_handshake(self, connection: Connection) -> None:
        for listening in self._listeners:
            if listening.handshakes.pop(connection, None) is not None and not listening.is_failing:
                self._set_accepting(listening, True)

    # The turns in which large frames are received

    def ask_turn(self, connection: Connection, size: int) -> Turn:
        """Request a turn (permission to receive a large frame of `size` bytes) for a connection. Returns whether the
        turn is granted, must be waited for, or is refused."""
        turn = self.turns.ask(connection, size, time.monotonic())
        if turn is Turn.WAITING:
            self._look_after_turns()
        return turn

    def turn_wait_s(self) -> float:
        """Return the expected time, in seconds, from now until a new large frame gets its turn."""
        return self.turns.wait_s()

    def finish_turn(self, connection: Connection) -> None:
        """End the turn (permission to send a large frame) of a connection whose large frame was handled. Connections
        that wait for their turn can then send their large frames."""
        self._let_in(self.turns.finish(connection, time.monotonic()))

    def _let_in(self, connections: list[Connection]) -> None:
        for connection in connections:
            if not connection.is_closed:
                connection.begin_turn()

    def _look_after_turns(self) -> None:
        due_s = self.turns.next_overdue_s()
        if self._turn_timer is None and due_s is not None:
            self._turn_timer = self.loop.call_at(due_s + 0.01, self._refuse_overdue)

    def _refuse_overdue(self) -> None:
        self._turn_timer = None
        for connection in self.turns.take_overdue(time.monotonic()):
            if not connection.is_closed:
                connection.refuse_turn()
        self._look_after_turns()


def allow_descriptors() -> None:
    """Raise this process's limit of open files to the hard limit, at most DESCRIPTORS_MAX, because each connection is
    an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listen(family: int, address: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _peer_uid(stream: socket.socket) -> int:
    """Return the user id of the process that connected to the Unix socket."""
    _, uid, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
