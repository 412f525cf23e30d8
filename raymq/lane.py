"""Lanes: a stream into a storage actor's process, for calls that are too frequent for actor calls.

A storage actor answers its data-plane methods both as actor methods and over a lane, with the same meaning (design §4).
A lane is a connection of `multiprocessing.connection`: frames with a length, pickled, authenticated by a shared secret
(HMAC challenge in both directions). One connection carries one request at a time:

    client → server   (method name, positional arguments)
    server → client   (True, result)  or  (False, exception)

The address is an abstract Unix socket: it needs no file, so nothing is left behind by a killed process, and no path is
too long. Address and secret come from an actor call (`Storage.describe`), so whoever may call the actor may open a
lane. Nothing here survives a process; a client that loses its lane asks the actor for the new address.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Final

from raymq.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError

_log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 256
IO_TIMEOUT_S: Final = 5.0
_LOST: Final = (EOFError, OSError, AuthenticationError, struct.error)


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """Where a lane's server listens, and the secret that opens it. `name` is an abstract Unix socket's."""

    name: str
    secret: bytes


class LaneServer:
    """Serves `methods` to every connection, each in a thread of its own, at most CONNECTIONS_MAX of them.

    A connection beyond the limit is closed at once; its client falls back to actor methods. `close` ends all threads.
    """

    def __init__(self, methods: Mapping[str, Callable[..., Any]], label: str) -> None:
        self._methods = dict(methods)
        self.address = LaneAddress(f"\0raymq-{label}-{secrets.token_hex(8)}", secrets.token_bytes(32))
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address.name)
        self._socket.listen(64)
        threading.Thread(target=self._accept, name=f"lane-{label}", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and end every connection. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        # shutdown, not only close: it wakes a thread that blocks in accept or read.
        _shut_down(self._socket)
        for connection in connections:
            _shut_down_fd(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # closed
            connection = Connection(client.detach())
            with self._lock:
                refused = self._closed or len(self._connections) >= CONNECTIONS_MAX
                if not refused:
                    self._connections.add(connection)
            if refused:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="lane-connection", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            _set_timeouts(connection, read_s=IO_TIMEOUT_S, write_s=IO_TIMEOUT_S)
            deliver_challenge(connection, self.address.secret)
            answer_challenge(connection, self.address.secret)
            _set_timeouts(connection, read_s=0, write_s=IO_TIMEOUT_S)  # a client may be idle for as long as it likes
            while True:
                method, arguments = connection.recv()
                answer = self._answer(method, arguments)
                try:
                    connection.send(answer)
                except _LOST:
                    raise
                except Exception as error:  # it cannot be pickled; nothing was written yet
                    _log.exception("the answer to lane call %s cannot be sent", method)
                    connection.send((False, ServiceNotAvailableError(f"{method} gave no answer to send: {error!r}")))
        except _LOST:
            pass  # the client went away or was refused: its own business
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        target = self._methods.get(method)
        if target is None:
            return False, ServiceNotAvailableError(f"a lane does not serve {method!r}")
        try:
            return True, target(*arguments)
        except RaymqError as error:
            return False, error
        except Exception as error:
            _log.exception("lane call %s failed", method)
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
        self._connection.close()

    @property
    def closed(self) -> bool:
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


def _shut_down(stream: socket.socket) -> None:
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more
    stream.close()


def _shut_down_fd(connection: Connection) -> None:
    try:
        stream = socket.socket(fileno=connection.fileno())
    except OSError:
        return  # closed by its own thread meanwhile
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer was faster
    finally:
        stream.detach()
