"""Who sent the records of a block, told to the dedup table and to the deliveries as if record by record.

A delayed message that RocketMQ's scheduler delivered still has the sequence that its producer gave it in the queue
where it waited. In the queue where it is now that says nothing: it does not count there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.delay import delivery_source
from raymq.record.dispatch import DispatchView
from raymq.record.encode import ProducerSequence
from storage.dispatch.dedup import DedupTable
from storage.dispatch.delivery_progress import DeliveryProgress, Source
from storage.dispatch.record_blocks import Block, was_moved


class _Run(NamedTuple):
    """Messages of one producer in one queue, with consecutive sequences at consecutive offsets."""

    last_row: int
    producer: ProducerSequence
    topic: str
    queue_id: int
    queue_offset: int
    messages: int


@dataclass(frozen=True, slots=True)
class BlockProducers:
    """The producers of a block's records: `runs` by their last messages, and what the scheduler delivered, in order,
    as `DeliveryProgress.advance` takes it."""

    runs: list[_Run]
    delivered: list[tuple[Source, int, int]]

    @property
    def topics(self) -> set[str]:
        """Where producers sent to."""
        return {run.topic for run in self.runs}

    def fit(self, dedup: DedupTable) -> bool:
        """Whether the table takes them without forgetting somebody: then their order would count."""
        return dedup.has_room_for(len({(run.producer.producer_id, run.topic, run.queue_id) for run in self.runs}))

    def remember(self, dedup: DedupTable, deliveries: DeliveryProgress) -> None:
        """Tell both."""
        # In the order of their last messages: so the table knows who was silent longest.
        for run in self.runs:
            dedup.record(run.producer, run.topic, run.queue_id, run.messages, run.queue_offset)
        for source, epoch, next_offset in self.delivered:
            deliveries.advance(source, epoch, next_offset)


def producers_of(block: Block, counted: NDArray[np.bool_]) -> BlockProducers:
    """The producers of the records for which `counted` is true."""
    rows, codes, sequences, instances = block.producers
    sources = [delivery_source(producer_id) for producer_id, _ in instances]
    of_scheduler = np.array([source is not None for source in sources], bool)
    delivered = []
    for place in np.flatnonzero(of_scheduler[codes] & counted[rows]).tolist():
        code = int(codes[place])
        source = sources[code]
        assert source is not None
        delivered.append((source, instances[code][1], int(sequences[place]) + 1))
    return BlockProducers(sorted(_runs(block, counted & ~block.was_moved, ~of_scheduler)), delivered)


def remember_producer(view: DispatchView, dedup: DedupTable | None, deliveries: DeliveryProgress) -> None:
    """Tell who sent one record. Without `dedup` only what the scheduler delivered counts."""
    producer = view.producer
    source = None if producer is None else delivery_source(producer.producer_id)
    if producer is not None and source is not None:
        deliveries.advance(source, producer.epoch, producer.first_sequence + 1)
    elif producer is not None and dedup is not None and not was_moved(view):
        dedup.record(producer, view.topic, view.queue_id, 1, view.queue_offset)


def _runs(block: Block, counted: NDArray[np.bool_], of_producer: NDArray[np.bool_]) -> Iterator[_Run]:
    """The messages of producers, as runs. `of_producer` tells which instances are not the scheduler."""
    rows, codes, sequences, instances = block.producers
    chosen = np.flatnonzero(of_producer[codes] & counted[rows])
    rows, codes, sequences = rows[chosen], codes[chosen], sequences[chosen]
    if not len(rows):
        return
    queues, offsets = block.queue_keys[rows], block.queue_offsets[rows]
    order = np.lexsort((rows, codes, queues))
    rows, codes, sequences, queues, offsets = (column[order] for column in (rows, codes, sequences, queues, offsets))
    goes_on = (np.diff(queues) == 0) & (np.diff(codes) == 0) & (np.diff(sequences) == 1) & (np.diff(offsets) == 1)
    firsts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    lasts = np.concatenate((firsts[1:], [len(rows)])) - 1
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        row, (producer_id, epoch) = int(rows[first]), instances[int(codes[first])]
        yield _Run(
            int(rows[last]),
            ProducerSequence(producer_id, epoch, int(sequences[first])),
            block.topics[int(block.topic_codes[row])],
            int(block.queue_ids[row]),
            int(offsets[first]),
            last - first + 1,
        )
