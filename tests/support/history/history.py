"""The history of a workload as the clients see it: one operation per message, with the outcome of its send.

An outcome is ok (acknowledged), failed (refused, and certainly not stored) or unknown (possibly stored).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from raymq.common.message import MessageQueue

Entry = TypeVar("Entry")


class Outcome(Enum):
    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, order=True)
class Sent:
    """The identity of a sent message: the producer, and the message's sequence number among the producer's
    messages."""

    producer: int
    sequence: int

    def body(self) -> bytes:
        return b"%d:%d" % (self.producer, self.sequence)

    @classmethod
    def parse(cls, body: bytes) -> Sent:
        producer, _, sequence = body.partition(b":")
        return cls(int(producer), int(sequence))


@dataclass(frozen=True, slots=True)
class Operation:
    """The outcome of sending one message. `queue` and `queue_offset` are set if the outcome is ok. `error`: the class
    and the text of the error. `end_s`: the monotonic time at which the sender got the outcome; 0 if not recorded."""

    sent: Sent
    outcome: Outcome
    queue: MessageQueue | None = None
    queue_offset: int = -1
    error: str = ""
    end_s: float = 0.0


class Recording(Generic[Entry]):
    """A list of what a chaos test records, in the order in which the entries were added. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._entries.append(entry)

    def extend(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            self._entries.extend(entries)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._entries))


class History(Recording[Operation]):
    """The send operations of a workload, in the order in which the sends ended."""


class HistoryFile:
    """A history in a file, for a program that a test kills. Entries that were written before the kill survive
    it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> HistoryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def handed_over(self, run: Sequence[Sent]) -> None:
        """Write an entry with the outcome "unknown" for each message, before the messages are sent."""
        self._write([[*astuple(sent), Outcome.UNKNOWN.value, "", 0.0] for sent in run])

    def ended(self, operations: Sequence[Operation]) -> None:
        """Write the outcomes of sent messages to the history file."""
        lines = []
        for operation in operations:
            queue = [] if operation.queue is None else [*astuple(operation.queue), operation.queue_offset]
            outcome = operation.outcome.value, operation.error, operation.end_s
            lines.append([*astuple(operation.sent), *outcome, *queue])
        self._write(lines)

    def _write(self, lines: list[list[object]]) -> None:
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def acknowledged_in(path: Path) -> int:
    """Return the number of acknowledged sends in a history file."""
    return sum(operation.outcome is Outcome.OK for operation in read_history_file(path).values())


def read_history_file(path: Path) -> dict[Sent, Operation]:
    """Return the last operation of each message in a history file. An incomplete last line is ignored."""
    operations: dict[Sent, Operation] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        producer, sequence, outcome, error, end_s, *place = json.loads(line)
        queue, offset = (MessageQueue(*place[:3]), place[3]) if place else (None, -1)
        sent = Sent(producer, sequence)
        operations[sent] = Operation(sent, Outcome(outcome), queue, offset, error, end_s)
    return operations
