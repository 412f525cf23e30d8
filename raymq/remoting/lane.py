"""Lanes: a stream into a storage actor's process, for calls that are too frequent for actor calls.

A storage actor answers its data-plane methods both as actor methods and over a lane, with the same meaning (design §4).
A lane is a connection of `multiprocessing.connection`: frames with a length, pickled, authenticated by a shared secret
(HMAC challenge in both directions). One connection carries one request at a time:

    client → server   (method name, positional arguments)
    server → client   (True, result)  or  (False, exception)

The address is an abstract Unix socket: it needs no file, so nothing is left behind by a killed process, and no path is
too long. Address and secret come from an actor call (`Storage.describe`), so whoever may call the actor may open a
lane. Nothing here survives a process; a client that loses its lane asks the actor for the new address.

Every process of the machine may connect to such a socket. Only those of the server's own user are let in, and root's,
which could read the server's memory anyway. Handshakes have a deadline and a limit of their own: connections that say
little cannot keep a client that knows the secret from its lane.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Final

from raymq.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 256
"""The most authenticated connections of a server."""
HANDSHAKES_MAX: Final = 64
"""The most connections of a server that are not authenticated yet."""
HANDSHAKE_TIMEOUT_S: Final = 2.0
"""Bounds a handshake; a connection that takes longer is closed."""
HANDSHAKE_GRACE_S: Final = 0.2
"""Bounds a handshake while HANDSHAKES_MAX are under way. A handshake takes about a millisecond."""
ACCEPT_PAUSE_S: Final = 0.1
"""Pause after a connection could not be accepted, for want of a descriptor or a thread."""
IO_TIMEOUT_S: Final = 5.0
"""Bounds connecting, and each read and write that should not have to wait for the other side."""
_CONNECTION_LOST: Final = (EOFError, OSError, AuthenticationError, struct.error)


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """The address of a lane's server: the `name` of its abstract Unix socket, and the secret that opens it."""

    name: str
    secret: bytes


class LaneServer:
    """Serves `methods` to every connection, each in a thread of its own, at most CONNECTIONS_MAX of them.

    A connection beyond the limit is closed once it is authenticated; its client falls back to actor methods. At most
    HANDSHAKES_MAX are being authenticated. Without a free descriptor or thread, connections wait until there is one.
    `close` ends all threads. `label` is part of the socket's name.
    """

    def __init__(self, methods: Mapping[str, Callable[..., Any]], label: str) -> None:
        self._methods = dict(methods)
        self.address = LaneAddress(f"\0raymq-{label}-{secrets.token_hex(8)}", secrets.token_bytes(32))
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()
        self._handshakes: dict[Connection, float] = {}
        """The connections that are not authenticated yet, by the monotonic time of their start, oldest first."""
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address.name)
        self._socket.listen(64)
        threading.Thread(target=self._accept_all, name=f"lane-{label}", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and end every connection. Idempotent."""
        with self._changed:
            self._closed = True
            # shutdown, not close: it wakes a thread that blocks in poll or read.
            _shut_down(self._socket)
            for connection in (*self._connections, *self._handshakes):
                _shut_down_fd(connection)
            self._changed.notify_all()

    def _accept_all(self) -> None:
        listener = select.poll()
        listener.register(self._socket, select.POLLIN)
        failing = False
        with self._socket:
            while True:
                with self._changed:
                    if self._closed:
                        return
                    left_s = self._drop_overdue()
                    if len(self._handshakes) >= HANDSHAKES_MAX:
                        self._changed.wait(left_s)
                        continue
                if not listener.poll(None if left_s is None else left_s * 1000):
                    continue
                try:
                    self._accept_one()
                    failing = False
                except (OSError, RuntimeError) as error:  # no descriptor is free, or no thread can be started
                    with self._changed:
                        if not self._closed and not failing:
                            logger.warning("the lane cannot accept connections now and goes on trying: %s", error)
                        failing = True
                        self._changed.wait_for(lambda: self._closed, ACCEPT_PAUSE_S)

    def _drop_overdue(self) -> float | None:
        """End the handshakes that take too long. Returns the seconds until the next one does, None if there is none.
        Called with the lock."""
        patience_s = HANDSHAKE_TIMEOUT_S if len(self._handshakes) < HANDSHAKES_MAX else HANDSHAKE_GRACE_S
        now_s = time.monotonic()
        for connection, start_s in list(self._handshakes.items()):
            if start_s + patience_s > now_s:
                return start_s + patience_s - now_s
            del self._handshakes[connection]
            _shut_down_fd(connection)
        return None

    def _accept_one(self) -> None:
        client, _ = self._socket.accept()
        if _peer_uid(client) not in (os.geteuid(), 0):
            client.close()
            return
        connection = Connection(client.detach())
        with self._changed:
            self._handshakes[connection] = time.monotonic()
        try:
            threading.Thread(target=self._serve, args=(connection,), name="lane-connection", daemon=True).start()
        except RuntimeError:
            self._drop_connection(connection)
            raise

    def _drop_connection(self, connection: Connection) -> None:
        """Close a connection, with the lock: otherwise `close` might shut down a descriptor that was reused by then."""
        with self._changed:
            self._handshakes.pop(connection, None)
            self._connections.discard(connection)
            connection.close()
            self._changed.notify_all()

    def _admit(self, connection: Connection) -> bool:
        """Count a connection whose client knows the secret as authenticated. False if there are too many, or if its
        handshake took too long."""
        with self._changed:
            in_time = self._handshakes.pop(connection, None) is not None
            admitted = in_time and not self._closed and len(self._connections) < CONNECTIONS_MAX
            if admitted:
                self._connections.add(connection)
            self._changed.notify_all()
            return admitted

    def _serve(self, connection: Connection) -> None:
        try:
            _set_timeouts(connection, read_s=IO_TIMEOUT_S, write_s=IO_TIMEOUT_S)
            deliver_challenge(connection, self.address.secret)
            if not self._admit(connection):
                return
            answer_challenge(connection, self.address.secret)
            _set_timeouts(connection, read_s=0, write_s=IO_TIMEOUT_S)  # a client may be idle for as long as it likes
            while True:
                method, arguments = connection.recv()
                answer = self._answer(method, arguments)
                try:
                    connection.send(answer)
                except _CONNECTION_LOST:
                    raise
                except Exception as error:  # it cannot be pickled; nothing was written yet
                    logger.exception("the answer to lane call %s cannot be sent", method)
                    connection.send((False, ServiceNotAvailableError(f"{method} gave no answer to send: {error!r}")))
        except _CONNECTION_LOST:
            pass  # the client went away or was refused; nobody waits for an answer
        finally:
            self._drop_connection(connection)

    def _answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        target = self._methods.get(method)
        if target is None:
            return False, ServiceNotAvailableError(f"a lane does not serve {method!r}")
        try:
            return True, target(*arguments)
        except RaymqError as error:
            return False, error
        except Exception as error:
            logger.exception("lane call %s failed", method)
            return False, ServiceNotAvailableError(f"{method} failed in the storage actor: {error!r}")


class Lane:
    """One connection to a LaneServer. Not shared between threads at the same time."""

    def __init__(self, address: LaneAddress) -> None:
        """Connect and authenticate. Raises OSError, EOFError or AuthenticationError when that fails."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(IO_TIMEOUT_S)
            stream.connect(address.name)
            stream.settimeout(None)
        except OSError:
            stream.close()
            raise
        self._connection = Connection(stream.detach())
        try:
            # A stopped server accepts (its backlog does) and never answers: every read and write is bounded.
            _set_timeouts(self._connection, read_s=IO_TIMEOUT_S, write_s=IO_TIMEOUT_S)
            answer_challenge(self._connection, address.secret)
            deliver_challenge(self._connection, address.secret)
        except BaseException:
            self._connection.close()
            raise

    def call(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """One request. Raises what the server raised; RequestTimeoutError without an answer in time, OSError or
        EOFError when the connection broke: after these three the lane is closed and the call may have run."""
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(timeout_s):
                raise RequestTimeoutError(f"lane call {method}", timeout_s)
            succeeded, result = self._connection.recv()
        except BaseException:
            self.close()
            raise
        if succeeded:
            return result
        raise result

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    @property
    def closed(self) -> bool:
        """True after `close`, and after a call that failed without an answer."""
        return bool(self._connection.closed)


def _set_timeouts(connection: Connection, *, read_s: float, write_s: float) -> None:
    """Bound each blocking read and write on the connection; 0 means no bound."""
    stream = socket.socket(fileno=connection.fileno())
    try:
        for option, seconds in ((socket.SO_RCVTIMEO, read_s), (socket.SO_SNDTIMEO, write_s)):
            timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            stream.setsockopt(socket.SOL_SOCKET, option, timeval)
    finally:
        stream.detach()


def _peer_uid(stream: socket.socket) -> int:
    """The user that the process at the other end had when it connected."""
    _, uid, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _shut_down(stream: socket.socket) -> None:
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer was faster, or it is closed


def _shut_down_fd(connection: Connection) -> None:
    stream = socket.socket(fileno=connection.fileno())
    try:
        _shut_down(stream)
    finally:
        stream.detach()
