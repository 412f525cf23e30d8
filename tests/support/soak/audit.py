"""Decides whether a soak test has lost a message or stored one twice. Its memory does not grow with the number of
messages.

A message is a producer and a sequence number. The readers of one group report each message with its queue and offset.
After a kill, a reader may report messages again; then queue and offset are the same.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.soak.number_set import NumberSet

EXAMPLES: Final = 5


class ReadRows(NamedTuple):
    """Messages that a consumer has read, as columns of equal length. `latencies_ms`: the time from the moment at which
    a message was due to be sent until the consumer had the message."""

    queue_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    producers: NDArray[np.int64]
    sequences: NDArray[np.int64]
    latencies_ms: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an audit, in numbers of messages, each violation with some examples.

    `lost`: acknowledged, and never read. `stored_twice`: one message at two places. `changed`: a place that had another
    message when it was read again. `skipped`: offsets that were never read, although a later offset of the queue was.
    `repeated`: messages that were read again at the same place, which is allowed after a kill.
    """

    acknowledged: int
    stored: int
    repeated: int
    lost: int
    stored_twice: int
    changed: int
    skipped: int
    examples: tuple[str, ...]

    @property
    def violations(self) -> dict[str, int]:
        """Return the number of violations of each kind; kinds without a violation are left out."""
        counts = {name: getattr(self, name) for name in ("lost", "stored_twice", "changed", "skipped")}
        return {name: count for name, count in counts.items() if count}


class Audit:
    """The messages that producers have sent and consumers have read so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acknowledged: defaultdict[int, NumberSet] = defaultdict(NumberSet)
        self._read: defaultdict[int, NumberSet] = defaultdict(NumberSet)
        self._places: defaultdict[int, NumberSet] = defaultdict(NumberSet)
        self._twice = self._changed = self._repeated = 0
        self._examples: list[str] = []
        self.acknowledged = 0
        """The number of acknowledged messages so far."""
        self.stored = 0
        """The number of places, each a queue and an offset, that consumers have read so far."""

    def add_acknowledged(self, producer: int, first: int, count: int) -> None:
        """Record that the messages `first` to `first + count - 1` of a producer were acknowledged."""
        with self._lock:
            self._acknowledged[producer].add(np.arange(first, first + count, dtype=np.int64))
            self.acknowledged += count

    def add_read(self, rows: ReadRows) -> int:
        """Record messages that a consumer has read. Returns the number of rows that no consumer had read before."""
        with self._lock:
            new_place = self._add(self._places, rows.queue_ids, rows.offsets)
            new_message = self._add(self._read, rows.producers, rows.sequences)
            self._twice += self._count("stored twice", new_place & ~new_message, rows)
            self._changed += self._count("changed", ~new_place & new_message, rows)
            self._repeated += int((~new_place & ~new_message).sum())
            new = int(new_place.sum())
            self.stored += new
            return new

    def verdict(self) -> Verdict:
        """Return the result. Call this method after consumers have read everything."""
        with self._lock:
            lost, examples = 0, list(self._examples)
            for producer, numbers in sorted(self._acknowledged.items()):
                missing = numbers.missing_in(self._read[producer])
                lost += len(missing)
                examples += [f"lost: message {number} of producer {producer}" for number in missing[:EXAMPLES].tolist()]
            skipped = sum(offsets.end - len(offsets) for offsets in self._places.values())
            return Verdict(
                self.acknowledged,
                self.stored,
                self._repeated,
                lost,
                self._twice,
                self._changed,
                skipped,
                tuple(examples),
            )

    def _add(
        self, sets: defaultdict[int, NumberSet], keys: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        new = np.zeros(len(keys), np.bool_)
        for key in np.unique(keys).tolist():
            mine = keys == key
            new[mine] = sets[key].add(numbers[mine])
        return new

    def _count(self, violation: str, rows: Any, read: ReadRows) -> int:
        """Return the number of `rows` that are True, and keep some of them as examples."""
        found = np.flatnonzero(rows)
        for row in found[: max(0, EXAMPLES - len(self._examples))].tolist():
            self._examples.append(
                f"{violation}: message {read.sequences[row]} of producer {read.producers[row]} "
                f"at {read.queue_ids[row]}:{read.offsets[row]}"
            )
        return len(found)
