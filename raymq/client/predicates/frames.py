"""The messages between a predicate's process and the runner that has started it (raymq.client.predicates.process).

A frame is the length of its payload in 4 bytes, big-endian, and the payload, msgpack. Nothing that the process says is
unpickled.

SharedProgress is the memory that a predicate's process shares with its runner.

It outlives the process: when that has ended in the middle of its work, the runner reads which message it was at, and
which messages before that one match.

    | index of the message 8 | 1 byte per message: 1 if it matches |
"""

from __future__ import annotations

import mmap
import socket
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.protocol.consume_result import LogPlaces, StoreLog

ANSWER_MAX_BYTES: Final = 1 << 20
"""The longest frame that a runner reads."""
T = TypeVar("T", bound=msgspec.Struct)


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The first frame to the process: the pickled function, and how to call it."""

    payload: bytes
    on_error: str
    timeout_s: float


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """The answer to Load. `failure`: the traceback if the function could not be loaded."""

    failure: str = ""


class Evaluate(msgspec.Struct, frozen=True, array_like=True):
    """Records to call the function for, for `budget_s` at most: `places` in the files of `log`, or `records`, whole
    ones back to back, of these `sizes` (int64, in bytes). `body_max_bytes`: the runner's bound on a decompressed
    body."""

    broker_name: str
    budget_s: float
    log: StoreLog | None = None
    places: LogPlaces | None = None
    records: bytes = b""
    sizes: bytes = b""
    body_max_bytes: int = MAX_MESSAGE_SIZE_BYTES


class PredicateAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The fields of raymq.client.predicates.evaluation.Calls. The memory that both processes share has the messages
    that match. `unreadable`: the files do not show the records, and the function was not called."""

    decided: int = 0
    failure: str = ""
    failures: int = 0
    last_failure: str = ""
    unreadable: bool = False


def send_frame(connection: socket.socket, frame: msgspec.Struct) -> None:
    """Send one frame; OSError when the other end is gone."""
    payload = msgspec.msgpack.encode(frame)
    connection.sendall(len(payload).to_bytes(4) + payload)


def receive_frame(connection: socket.socket, kind: type[T], max_bytes: int | None = None) -> T:
    """Receive one frame. EOFError at the end of the connection, ValueError for one that is longer than `max_bytes` or
    not of this kind."""
    size = int.from_bytes(_receive(connection, 4))
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"a frame of {size} bytes came from a predicate's process; {max_bytes} are allowed")
    return msgspec.msgpack.decode(_receive(connection, size), type=kind)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the other end has closed the connection")
        data += part
    return bytes(data)


EVALUATED_MAX: Final = 4096
"""The most records of one Evaluate frame."""
PROGRESS_BYTES: Final = 8 + EVALUATED_MAX


class SharedProgress:
    """The shared memory, from either side."""

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self._index = view[:8].cast("q")
        self.matches = view[8:]
        """For each message 1 if it matches, else 0; the process writes it."""

    def at(self, index: int) -> None:
        """Note that the function is called for this message next."""
        self._index[0] = index

    @property
    def index(self) -> int:
        """The message that the function was called for last."""
        return self._index[0]

    def matching(self, count: int) -> NDArray[np.bool_]:
        """A copy of the first `count` messages' matches."""
        matches: NDArray[np.bool_] = np.frombuffer(self.matches, np.uint8, count) == 1
        return matches
