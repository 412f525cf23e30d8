"""Frames that a predicate's process and its runner exchange (raymq.client.predicates.process), and their shared memory.

A frame is the length of its payload in 4 bytes, big-endian, and the payload, encoded by msgpack. The runner never
unpickles data from the process.

SharedProgress is the memory that a predicate's process shares with its runner. The memory still exists if the process
dies during its work. The runner then reads which message was being checked, and which earlier messages match.

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
"""Maximum bytes of a frame that a runner accepts from a predicate's process."""
T = TypeVar("T", bound=msgspec.Struct)


class Load(msgspec.Struct, frozen=True, array_like=True):
    """First frame to a predicate's process: the pickled function, and the options of its calls."""

    payload: bytes
    on_error: str
    timeout_s: float


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a Load frame. `failure`: the traceback if the predicate function could not be loaded."""

    failure: str = ""


class Evaluate(msgspec.Struct, frozen=True, array_like=True):
    """Frame that requests calls of the predicate function for some records. `budget_s`: the time for these calls. The
    frame has either the `places` of the records in the files of `log`, or the complete `records` themselves. `records`
    has no gaps between the records; `sizes` has their sizes in bytes (int64). `body_max_bytes`: the runner's limit for
    a decompressed body."""

    broker_name: str
    budget_s: float
    log: StoreLog | None = None
    places: LogPlaces | None = None
    records: bytes = b""
    sizes: bytes = b""
    body_max_bytes: int = MAX_MESSAGE_SIZE_BYTES


class PredicateAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer of a predicate process to an Evaluate request, with the fields of
    raymq.client.predicates.evaluation.Calls. The mask of matching messages is in the shared memory. `unreadable`: True
    if the log's mapped files do not show the records, so the predicate was not called."""

    decided: int = 0
    failure: str = ""
    failures: int = 0
    last_failure: str = ""
    unreadable: bool = False


def send_frame(connection: socket.socket, frame: msgspec.Struct) -> None:
    """Send one frame. Raises OSError if the other process has closed the connection."""
    payload = msgspec.msgpack.encode(frame)
    connection.sendall(len(payload).to_bytes(4) + payload)


def receive_frame(connection: socket.socket, kind: type[T], max_bytes: int | None = None) -> T:
    """Receive one frame. Raises EOFError at the end of the connection. Raises ValueError if the frame is longer than
    `max_bytes` or of another kind than `kind`."""
    size = int.from_bytes(_receive(connection, 4))
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"a predicate's process sent a frame of {size} bytes; at most {max_bytes} are allowed")
    return msgspec.msgpack.decode(_receive(connection, size), type=kind)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the process at the other end has closed the connection")
        data += part
    return bytes(data)


EVALUATED_MAX: Final = 4096
"""Maximum number of records in one Evaluate frame."""
PROGRESS_BYTES: Final = 8 + EVALUATED_MAX


class SharedProgress:
    """Memory shared by a predicate's process and its runner; both use this class."""

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self._index = view[:8].cast("q")
        self.matches = view[8:]
        """For each message, 1 if it matches, otherwise 0. Only the predicate's process writes these bytes."""

    def at(self, index: int) -> None:
        """Record that the predicate function is called next for the message with index `index`."""
        self._index[0] = index

    @property
    def index(self) -> int:
        """Index of the message for which the predicate function was last called."""
        return self._index[0]

    def matching(self, count: int) -> NDArray[np.bool_]:
        """Return a copy of the predicate's results for the first `count` messages: True for each message that
        matches."""
        matches: NDArray[np.bool_] = np.frombuffer(self.matches, np.uint8, count) == 1
        return matches
