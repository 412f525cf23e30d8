"""Finds the producers of a block's records, and notes them in the dedup table and the delivery progress.

The result is as if the records were noted one by one. A delayed message that RocketMQ's scheduler delivered still has
the sequence that its producer gave it in the queue where it waited. In the queue where it is now the sequence means
nothing, and is not noted.
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
    """Messages of one producer in one queue, with consecutive sequences at consecutive offsets."""

    # The row of the last message in its block: the first field, so that ranges sort by it.
    last_row: int
    # The producer, and the sequence of the first message.
    producer: ProducerSequence
    topic: str
    queue_id: int
    # The queue offset of the first message.
    queue_offset: int
    # The number of messages.
    messages: int


@dataclass(frozen=True, slots=True)
class BlockProducers:
    """The producers of a block's records."""

    # Messages that producers sent, in the order of each range's last message.
    ranges: list[ProducerRange]
    # Messages that the scheduler delivered, in order: source, epoch and next offset (`DeliveryProgress.advance`).
    delivered: list[tuple[Source, int, int]]

    @property
    def topics(self) -> set[str]:
        """The topics that producers sent to."""
        return {sent.topic for sent in self.ranges}

    def fits_into(self, dedup: DedupTable) -> bool:
        """True if the table can take all producers without forgetting one: otherwise their order would matter."""
        return dedup.can_take(len({(sent.producer.producer_id, sent.topic, sent.queue_id) for sent in self.ranges}))

    def remember_in(self, dedup: DedupTable, deliveries: DeliveryProgress) -> None:
        """Note the producers' messages in the table, and the scheduler's in the progress."""
        # In the order of their last messages: so the table knows which producer was silent longest.
        for sent in self.ranges:
            dedup.record_messages(sent.producer, sent.topic, sent.queue_id, sent.messages, sent.queue_offset)
        for source, epoch, next_offset in self.delivered:
            deliveries.advance(source, epoch, next_offset)


def producers_of(block: Block, counted: NDArray[np.bool_]) -> BlockProducers:
    """The producers of the records for which `counted` is true."""
    rows, codes, sequences, instances = block.producers
    # For each instance the queue that it delivers from, if it is the scheduler.
    sources = [delivery_source(producer_id) for producer_id, _ in instances]
    of_scheduler = np.array([source is not None for source in sources], bool)
    delivered = []
    # The counted records of the scheduler, as indices into `rows`.
    for index in np.flatnonzero(of_scheduler[codes] & counted[rows]).tolist():
        code = int(codes[index])
        source = sources[code]
        assert source is not None
        delivered.append((source, instances[code][1], int(sequences[index]) + 1))
    return BlockProducers(sorted(_ranges(block, counted & ~block.was_moved, ~of_scheduler)), delivered)


def remember_producer(view: DispatchView, dedup: DedupTable | None, deliveries: DeliveryProgress) -> None:
    """Note the producer of one record, and of an inner batch that of all its messages. Without `dedup` only a record
    that the scheduler delivered is noted."""
    producer = view.producer
    source = None if producer is None else delivery_source(producer.producer_id)
    if producer is not None and source is not None:
        deliveries.advance(source, producer.epoch, producer.first_sequence + 1)
    elif producer is not None and dedup is not None and not was_moved(view):
        messages = inner_batch(view).messages if is_good_batch(view) else 1
        dedup.record_messages(producer, view.topic, view.queue_id, messages, view.queue_offset)


def _ranges(block: Block, counted: NDArray[np.bool_], of_producer: NDArray[np.bool_]) -> Iterator[ProducerRange]:
    """The counted messages of producers, as ranges. `of_producer` is true for instances that are not the scheduler."""
    rows, codes, sequences, instances = block.producers
    # Only the counted records of producers.
    chosen = np.flatnonzero(of_producer[codes] & counted[rows])
    rows, codes, sequences = rows[chosen], codes[chosen], sequences[chosen]
    if not len(rows):
        return
    queues, offsets = block.queue_keys[rows], block.queue_offsets[rows]
    # Sorted by queue, then producer, then row: the records of one range are neighbours.
    order = np.lexsort((rows, codes, queues))
    rows, codes, sequences, queues, offsets = (column[order] for column in (rows, codes, sequences, queues, offsets))
    # True where a record continues the range of the one before it; a range starts wherever it is false.
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
