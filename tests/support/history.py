"""What a workload did, as it saw it: one operation per message, with its outcome.

An outcome is ok (acknowledged), failed (refused, and known not to be stored) or unknown (it may be stored).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from raymq.message import MessageQueue


class Outcome(Enum):
    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, order=True)
class Sent:
    """A message's identity: the `sequence`-th that `producer` handed over."""

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
    """How sending one message ended; `queue` and `queue_offset` are known where it is ok."""

    sent: Sent
    outcome: Outcome
    queue: MessageQueue | None = None
    queue_offset: int = -1
    error: str = ""


class History:
    """Operations in the order in which they ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: list[Operation] = []

    def add(self, operation: Operation) -> None:
        with self._lock:
            self._operations.append(operation)

    def __len__(self) -> int:
        with self._lock:
            return len(self._operations)

    def __iter__(self) -> Iterator[Operation]:
        with self._lock:
            return iter(list(self._operations))
