"""The dedup table recognises a message that was sent twice, by the sequence that its producer assigned.

A producer numbers the messages that it sends to a queue. The numbers only grow; there are gaps for sends that the
producer gave up. Each record carries the three properties RMQ_PID, RMQ_EPOCH and RMQ_SEQ, so recovery can rebuild the
table from the log. With a snapshot (snapshot.py), recovery need not scan the whole log. The table is bounded: it evicts
the producer that has been idle longest. If that producer later resends its last batch, the store stores the batch
again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from raymq.common.errors import ClientStateError, MessageIllegalError
from raymq.records.format.encode import ProducerSequence

SEQUENCE_RANGES_KEPT: Final = 5
"""Number of sequence ranges that the dedup table keeps for each producer and queue; older ranges are dropped."""

Key = tuple[str, str, int]
"""Key of the dedup table: a producer id, a topic and a queue id."""


class ProducerRow(NamedTuple):
    """One row of the dedup table: the sequences of one producer in one queue, as texts and numbers that can be
    stored."""

    producer_id: str
    topic: str
    queue_id: int
    epoch: int
    # The ranges of sequence numbers that the producer has stored in the queue, oldest first. Each range is (first
    # sequence, next sequence, queue offset).
    ranges: list[tuple[int, int, int]]


@dataclass(slots=True)
class _SequenceRange:
    """A range of messages of one producer, with consecutive sequences at consecutive queue offsets."""

    first_sequence: int
    next_sequence: int
    queue_offset: int


@dataclass(slots=True)
class _Producer:
    """The epoch and newest sequence ranges of one producer in one queue, the oldest range first."""

    epoch: int
    ranges: list[_SequenceRange] = field(default_factory=list)


class DedupTable:
    """The dedup table of a store: the newest sequences that each producer has stored in each queue. Callers hold the
    store's append lock."""

    def __init__(self, max_producers: int) -> None:
        self._max_producers = max_producers
        # The producers, ordered by their last send; the producer that has been idle longest is first.
        self._producers: OrderedDict[Key, _Producer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._producers)

    def can_take(self, count: int) -> bool:
        """True if the dedup table can add `count` more producers without evicting a producer."""
        return len(self._producers) + count <= self._max_producers

    def stored_prefix(self, sequence: ProducerSequence, topic: str, queue_id: int, count: int) -> list[int]:
        """Return the queue offsets of a batch's first messages if these messages are stored already; empty for a new
        batch.

        Raises ClientStateError if the batch has an older epoch: a newer instance of the producer has written. Raises
        MessageIllegalError if the sequences are older than all ranges that the dedup table still has for the producer.
        It is then unknown whether the messages are stored.
        """
        producer = self._producers.get((sequence.producer_id, topic, queue_id))
        if producer is None or sequence.epoch > producer.epoch:
            return []
        if sequence.epoch < producer.epoch:
            raise _fenced(sequence.producer_id, sequence.epoch, producer.epoch, topic, queue_id)
        following = sequence.first_sequence
        if following >= producer.ranges[-1].next_sequence:
            return []
        end = following + count
        offsets: list[int] = []
        for known in producer.ranges:
            if known.first_sequence <= following < min(known.next_sequence, end):
                first = known.queue_offset + following - known.first_sequence
                length = min(known.next_sequence, end) - following
                offsets.extend(range(first, first + length))
                following += length
        if following < min(end, producer.ranges[-1].next_sequence):
            raise MessageIllegalError(
                f"the batch with sequence {following} of producer {sequence.producer_id!r} for queue "
                f"{topic}:{queue_id} is too old to check for repeats (the newest sequence is "
                f"{producer.ranges[-1].next_sequence - 1}); the batch was not stored"
            )
        return offsets

    def next_sequence(self, producer_id: str, epoch: int, topic: str, queue_id: int, end_offset: int) -> int:
        """Return the sequence number that follows the last sequence number that a producer has stored before
        `end_offset` of a queue. Returns 0 if the dedup table does not contain the producer with this epoch and queue.

        The producer's sequence numbers must have no gaps. Raises ClientStateError if a newer instance of the producer
        has written. The table keeps only the newest ranges of a producer. Messages at or after `end_offset` are
        excluded only if these ranges still contain them.
        """
        producer = self._producers.get((producer_id, topic, queue_id))
        if producer is None or epoch > producer.epoch:
            return 0
        if epoch < producer.epoch:
            raise _fenced(producer_id, epoch, producer.epoch, topic, queue_id)
        following = producer.ranges[0].first_sequence
        for known in producer.ranges:
            seen = min(end_offset - known.queue_offset, known.next_sequence - known.first_sequence)
            if seen > 0:
                following = known.first_sequence + seen
        return following

    def record_messages(
        self, sequence: ProducerSequence, topic: str, queue_id: int, count: int, queue_offset: int
    ) -> None:
        """Record that `count` messages of a producer were stored from `queue_offset` on. `sequence` is the sequence of
        the first message.

        Sequences that are already recorded, or have an older epoch, change nothing, because recovery may scan records
        twice.
        """
        key = (sequence.producer_id, topic, queue_id)
        producer = self._producers.get(key)
        if producer is None or producer.epoch < sequence.epoch:
            producer = self._producers[key] = _Producer(sequence.epoch)
        elif producer.epoch > sequence.epoch:
            return
        self._producers.move_to_end(key)
        first, ranges = sequence.first_sequence, producer.ranges
        if not ranges and len(self._producers) > self._max_producers:
            self._producers.popitem(last=False)
        known = max(ranges[-1].next_sequence - first, 0) if ranges else 0
        if known >= count:
            return
        first, count, queue_offset = first + known, count - known, queue_offset + known
        if ranges:
            newest = ranges[-1]
            if first == newest.next_sequence and queue_offset - newest.queue_offset == first - newest.first_sequence:
                newest.next_sequence += count
                return
        ranges.append(_SequenceRange(first, first + count, queue_offset))
        del ranges[:-SEQUENCE_RANGES_KEPT]

    def rows(self) -> list[ProducerRow]:
        """Return all rows of the dedup table. The producer that has been idle longest is first."""
        return [
            ProducerRow(
                *key, value.epoch, [(one.first_sequence, one.next_sequence, one.queue_offset) for one in value.ranges]
            )
            for key, value in self._producers.items()
        ]

    def clear(self) -> None:
        """Remove all producers from the dedup table."""
        self._producers.clear()

    def load_row(self, row: ProducerRow) -> None:
        """Add one row of a saved dedup table, as `rows` returns it, to this table. The row's producer then counts as
        the producer that sent last."""
        ranges = [_SequenceRange(*one) for one in row.ranges]
        self._producers[row.producer_id, row.topic, row.queue_id] = _Producer(row.epoch, ranges)

    def forget_topic(self, topic: str) -> None:
        """Remove the sequences of a deleted topic, whose messages are no longer stored."""
        for key in [key for key in self._producers if key[1] == topic]:
            del self._producers[key]

    def forget_queue(self, topic: str, queue_id: int) -> None:
        """Remove the producers' sequences for a deleted queue, because the queue's messages are no longer
        stored."""
        for key in [key for key in self._producers if key[1:] == (topic, queue_id)]:
            del self._producers[key]


def _fenced(producer_id: str, epoch: int, newest: int, topic: str, queue_id: int) -> ClientStateError:
    return ClientStateError(
        f"producer {producer_id!r} with epoch {epoch} is fenced, because an instance with epoch {newest} has "
        f"written to queue {topic}:{queue_id}; close this producer"
    )
