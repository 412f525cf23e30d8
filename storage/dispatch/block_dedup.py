"""Finds the producers of a block of log records, and adds their sequences to the dedup table and the delivery progress.

The result is the same as if the records were added one by one. A delayed message that RocketMQ's scheduler delivered
still carries the sequence that its producer assigned in the delay queue. This sequence has no meaning in the queue to
which the message was delivered, so it is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.common.delay import delivery_source
from raymq.records.format.dispatch import DispatchView
from raymq.records.format.encode import ProducerSequence
from raymq.records.format.inner_batch import inner_batch
from storage.dispatch.batch_dispatch import is_good_batch
from storage.dispatch.dedup import DedupTable
from storage.dispatch.delivery_progress import DeliveryProgress, Source
from storage.dispatch.record_blocks import Block, was_moved


class ProducerRange(NamedTuple):
    """A range of messages of one producer in one queue, with consecutive sequences at consecutive offsets."""

    # Index of the range's last message among the block's records. This field is the first, so that ranges sort by it.
    last_row: int
    # The producer that sent the range's messages, and the sequence number of the range's first message.
    producer: ProducerSequence
    topic: str
    queue_id: int
    # The queue offset of the first message in the range.
    queue_offset: int
    # The number of messages in the range.
    messages: int


@dataclass(frozen=True, slots=True)
class BlockProducers:
    """Facts about the producers of a block of log records: the ranges of messages that producers sent, and the messages
    that the scheduler delivered."""

    # Ranges of messages that producers sent, sorted by the log position of each range's last message.
    ranges: list[ProducerRange]
    # Messages that the scheduler delivered, in log order: source queue, epoch and next offset
    # (`DeliveryProgress.advance`).
    delivered: list[tuple[Source, int, int]]

    @property
    def topics(self) -> set[str]:
        """Return the topics that the producers sent messages to."""
        return {sent.topic for sent in self.ranges}

    def fits_into(self, dedup: DedupTable) -> bool:
        """True if the dedup table can add all these producers without evicting a producer. If it had to evict one, the
        order in which the producers are added would decide which one."""
        return dedup.can_take(len({(sent.producer.producer_id, sent.topic, sent.queue_id) for sent in self.ranges}))

    def remember_in(self, dedup: DedupTable, deliveries: DeliveryProgress) -> None:
        """Add the messages that producers sent to the dedup table, and the messages that the scheduler delivered to the
        delivery progress."""
        # Add the producers' sequence ranges in the order of each range's last message. The dedup table then evicts the
        # producer that has been idle longest.
        for sent in self.ranges:
            dedup.record_messages(sent.producer, sent.topic, sent.queue_id, sent.messages, sent.queue_offset)
        for source, epoch, next_offset in self.delivered:
            deliveries.advance(source, epoch, next_offset)


def producers_of(block: Block, counted: NDArray[np.bool_]) -> BlockProducers:
    """Find the producers of the records that `counted` selects in a block of the log. `counted`: one bool for each
    record of the block."""
    rows, codes, sequences, instances = block.producers
    # For each producer instance: the delay queue from which the scheduler delivers with this producer id. None if the
    # instance is not the scheduler.
    sources = [delivery_source(producer_id) for producer_id, _ in instances]
    of_scheduler = np.array([source is not None for source in sources], bool)
    delivered = []
    # Visit each selected record that the scheduler stored, by its index in `rows`.
    for index in np.flatnonzero(of_scheduler[codes] & counted[rows]).tolist():
        code = int(codes[index])
        source = sources[code]
        assert source is not None
        delivered.append((source, instances[code][1], int(sequences[index]) + 1))
    return BlockProducers(sorted(_ranges(block, counted & ~block.was_moved, ~of_scheduler)), delivered)


def remember_producer(view: DispatchView, dedup: DedupTable | None, deliveries: DeliveryProgress) -> None:
    """Record the producer of a log record. If the producer is the scheduler, record it in the delivery progress,
    otherwise in the dedup table. For an inner batch, record all its messages. If `dedup` is None, record only the
    scheduler's deliveries."""
    producer = view.producer
    source = None if producer is None else delivery_source(producer.producer_id)
    if producer is not None and source is not None:
        deliveries.advance(source, producer.epoch, producer.first_sequence + 1)
    elif producer is not None and dedup is not None and not was_moved(view):
        messages = inner_batch(view).messages if is_good_batch(view) else 1
        dedup.record_messages(producer, view.topic, view.queue_id, messages, view.queue_offset)


def _ranges(block: Block, counted: NDArray[np.bool_], of_producer: NDArray[np.bool_]) -> Iterator[ProducerRange]:
    """Yield the messages that producers sent, as ranges. `counted`: a mask that selects records of the block.
    `of_producer` is true for producer instances that are not the scheduler."""
    rows, codes, sequences, instances = block.producers
    # Keep only the records in `counted` that were sent by producers. Drop the records that the scheduler has delivered.
    chosen = np.flatnonzero(of_producer[codes] & counted[rows])
    rows, codes, sequences = rows[chosen], codes[chosen], sequences[chosen]
    if not len(rows):
        return
    queues, offsets = block.queue_keys[rows], block.queue_offsets[rows]
    # Sort by queue, then producer, then row, so that records with consecutive sequence numbers of one producer (a
    # range) are adjacent.
    order = np.lexsort((rows, codes, queues))
    rows, codes, sequences, queues, offsets = (column[order] for column in (rows, codes, sequences, queues, offsets))
    # True for each record that belongs to the same range as the record before it: same queue and producer, and the next
    # sequence and queue offset. False for the first record of a range.
    goes_on = (np.diff(queues) == 0) & (np.diff(codes) == 0) & (np.diff(sequences) == 1) & (np.diff(offsets) == 1)
    firsts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    lasts = np.concatenate((firsts[1:], [len(rows)])) - 1
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        row, (producer_id, epoch) = int(rows[first]), instances[int(codes[first])]
        yield ProducerRange(
            int(rows[last]),
            ProducerSequence(producer_id, epoch, int(sequences[first])),
            block.topics[int(block.topic_codes[row])],
            int(block.queue_ids[row]),
            int(offsets[first]),
            last - first + 1,
        )
