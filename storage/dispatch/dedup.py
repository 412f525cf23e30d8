"""Recognising a message that was sent twice, by the sequence its producer gave it.

A producer numbers the messages it sends to a queue; the numbers only grow, with gaps where it gave up. The three
properties RMQ_PID, RMQ_EPOCH and RMQ_SEQ are in each record, so recovery can make the table again from the log; a
snapshot (snapshot.py) keeps it from having to walk far. The table is bounded: the producer that was silent longest is
forgotten, and a very late repeat of its last batch would be stored again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from raymq.errors import ClientStateError, MessageIllegalError
from raymq.record.encode import ProducerSequence

RUNS_KEPT: Final = 5

Key = tuple[str, str, int]


class ProducerRow(NamedTuple):
    """One producer in one queue as plain values: `runs` are (first sequence, next sequence, queue offset)."""

    producer_id: str
    topic: str
    queue_id: int
    epoch: int
    runs: list[tuple[int, int, int]]


@dataclass(slots=True)
class _Run:
    """Messages with consecutive sequences at consecutive queue offsets."""

    first_sequence: int
    next_sequence: int
    queue_offset: int


@dataclass(slots=True)
class _Producer:
    epoch: int
    runs: list[_Run] = field(default_factory=list)


class DedupTable:
    """What is stored of each producer in each queue. Used under the store's append lock."""

    def __init__(self, max_producers: int) -> None:
        self._max_producers = max_producers
        self._producers: OrderedDict[Key, _Producer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._producers)

    def has_room_for(self, count: int) -> bool:
        """Whether `count` more producers fit without one being forgotten."""
        return len(self._producers) + count <= self._max_producers

    def stored_prefix(self, sequence: ProducerSequence, topic: str, queue_id: int, count: int) -> list[int]:
        """The queue offsets of those first messages of a batch that are stored already; empty for a new batch.

        ClientStateError when a newer instance of the producer wrote since (older epoch). MessageIllegalError when the
        sequences are older than what is remembered, so that it cannot be told whether they are stored.
        """
        producer = self._producers.get((sequence.producer_id, topic, queue_id))
        if producer is None or sequence.epoch > producer.epoch:
            return []
        if sequence.epoch < producer.epoch:
            raise ClientStateError(
                f"producer {sequence.producer_id!r} with epoch {sequence.epoch} was fenced: an instance with epoch "
                f"{producer.epoch} has written to {topic}:{queue_id}; close this producer"
            )
        following, end = sequence.first_sequence, sequence.first_sequence + count
        offsets: list[int] = []
        for run in producer.runs:
            if run.first_sequence <= following < min(run.next_sequence, end):
                first = run.queue_offset + following - run.first_sequence
                length = min(run.next_sequence, end) - following
                offsets.extend(range(first, first + length))
                following += length
        if following < min(end, producer.runs[-1].next_sequence):
            raise MessageIllegalError(
                f"sequence {following} of producer {sequence.producer_id!r} in {topic}:{queue_id} is older than what "
                f"the store remembers (the last is {producer.runs[-1].next_sequence - 1}); the batch is not stored now"
            )
        return offsets

    def record(self, sequence: ProducerSequence, topic: str, queue_id: int, count: int, queue_offset: int) -> None:
        """Messages with `count` sequences from `sequence` on were stored at `queue_offset` and after.

        What is known already, or is of an older epoch, changes nothing: recovery may walk records twice.
        """
        key = (sequence.producer_id, topic, queue_id)
        producer = self._producers.get(key)
        if producer is None or producer.epoch < sequence.epoch:
            producer = self._producers[key] = _Producer(sequence.epoch)
        elif producer.epoch > sequence.epoch:
            return
        self._producers.move_to_end(key)
        if len(self._producers) > self._max_producers:
            self._producers.popitem(last=False)
        first, runs = sequence.first_sequence, producer.runs
        known = max(runs[-1].next_sequence - first, 0) if runs else 0
        if known >= count:
            return
        first, count, queue_offset = first + known, count - known, queue_offset + known
        newest = runs[-1] if runs else None
        if (
            newest is not None
            and first == newest.next_sequence
            and queue_offset - newest.queue_offset == first - newest.first_sequence
        ):
            newest.next_sequence += count
        else:
            runs.append(_Run(first, first + count, queue_offset))
            del runs[:-RUNS_KEPT]

    def rows(self) -> list[ProducerRow]:
        """The whole table, the producer that was silent longest first."""
        return [
            ProducerRow(
                *key, value.epoch, [(run.first_sequence, run.next_sequence, run.queue_offset) for run in value.runs]
            )
            for key, value in self._producers.items()
        ]

    def load(self, row: ProducerRow) -> None:
        """Add what `rows` gave."""
        runs = [_Run(*run) for run in row.runs]
        self._producers[row.producer_id, row.topic, row.queue_id] = _Producer(row.epoch, runs)

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted: its messages are no longer stored."""
        for key in [key for key in self._producers if key[1] == topic]:
            del self._producers[key]
