"""Plans the batches of a streaming query: where the next batch ends, and what each task of a batch reads.

The module uses no Spark, no cluster and no clock. Its inputs are the end of the previous batch and the queues' bounds;
its output is StreamOffsets. The StreamOffsets at a batch's start and end alone determine how the batch is divided into
tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raydp_jobs.stream.progress import StreamOffsets, creations_of
from raymq.client.consumer.subscription import ALL
from raymq.client.scan.offsets import EARLIEST, LATEST
from raymq.client.scan.partitions import ScanPartition, plan_partitions
from raymq.client.scan.ranges import (
    NO_CREATIONS,
    Creations,
    OffsetRange,
    bounded_range,
    check_count,
    is_created_anew,
    limit_ranges,
)
from raymq.common.errors import DataLossError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds

TASK_MIN_MESSAGES = 2_000
"""Minimum number of messages for which one more Spark task is worth its cost. A batch has at most (messages / this
constant, rounded up) tasks, unless `min_partitions` is larger."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The options that limit a batch.

    `max_offsets`: maximum number of offsets in a batch. `min_offsets`: number of offsets for which a batch waits, until
    the longest delay has passed. `min_partitions`: minimum number of Spark partitions. `parallelism`: number of tasks
    that run at the same time; a large batch is divided among them. `fail_on_data_loss`: if True, lost messages raise an
    error; if False, they are skipped.
    """

    max_offsets: int | None = None
    min_offsets: int | None = None
    min_partitions: int | None = None
    parallelism: int = 1
    tags: str = ALL
    sql: str = ""
    fail_on_data_loss: bool = True

    def __post_init__(self) -> None:
        check_count("max_offsets_per_trigger", self.max_offsets)
        check_count("min_offsets_per_trigger", self.min_offsets)
        check_count("min_partitions", self.min_partitions)


@dataclass(frozen=True, slots=True)
class LostOffsets:
    """A range of a queue's offsets that the query can no longer read: [`start_offset`, `end_offset`).

    `anew`: True if the queue's topic was deleted and created again. Offsets from `start_offset` on then belong to the
    deleted topic.
    """

    queue: MessageQueue
    start_offset: int
    end_offset: int
    anew: bool = False

    def __str__(self) -> str:
        if self.anew:
            return (
                f"queue {self.queue}: the topic was deleted and created again after the query had reached offset "
                f"{self.start_offset}"
            )
        return f"queue {self.queue}: offsets {self.start_offset} to {self.end_offset - 1} no longer exist"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The end of the next batch, and the lost messages that the batch skips. `offsets` is None if there is nothing to
    read."""

    offsets: StreamOffsets | None
    lost: tuple[LostOffsets, ...] = ()


def plan_batch(
    previous: StreamOffsets | None,
    bounds: Mapping[MessageQueue, QueueBounds],
    limits: BatchLimits,
    *,
    starts: Mapping[MessageQueue, int] | None = None,
    until: Mapping[MessageQueue, int] | None = None,
    patient: bool = False,
    creations: Creations = NO_CREATIONS,
) -> BatchPlan:
    """Plan the batch after `previous` in the queues of `bounds`. If `previous` is None, plan the query's first batch,
    which exists even if it has no messages.

    `starts`: the first offset of each queue that `previous` does not contain; the offset may be EARLIEST or LATEST. A
    queue without an entry in `starts` begins at its first message. A queue that `bounds` does not contain keeps its
    offset, because its broker group does not answer or its topic was deleted. `until`: end offsets by queue, at which
    the batch stops; queues that `until` lacks are not read. `patient`: postpone a batch of fewer messages than
    `limits.min_offsets`. `creations`: the creation ids of the topics, read after `bounds`.

    Raises OffsetOutOfRangeError if a queue's start is beyond its end. Raises DataLossError if offsets were deleted, or
    if a topic was created again since `previous`, because its offsets now mean other messages.

    These errors are raised only with `limits.fail_on_data_loss`. Otherwise the queue continues as in RocketMQ's
    consumers. It continues at its first offset if older messages were deleted or the queue started again at 0, else at
    its end. A topic that was created again is read from its beginning.
    """
    known = previous.offsets if previous is not None else {}
    begins: dict[MessageQueue, int] = {}
    lost: list[LostOffsets] = []
    for queue in sorted(bounds):
        if queue in known and previous is not None and is_created_anew(queue, previous.creations, creations):
            begins[queue] = bounds[queue].min_offset
            lost.append(LostOffsets(queue, known[queue], known[queue], anew=True))
        elif queue in known:
            loss = _loss(queue, known[queue], bounds[queue])
            begins[queue] = known[queue] if loss is None else _go_on(known[queue], bounds[queue])
            lost += [loss] if loss is not None else []
        else:
            start = (starts or {}).get(queue, EARLIEST)
            begins[queue] = _begin(queue, bounds[queue], start, fail_on_data_loss=limits.fail_on_data_loss)
    if lost and limits.fail_on_data_loss:
        raise DataLossError(
            f"{'; '.join(map(str, lost))}. The query has not read them; pass fail_on_data_loss=False to continue "
            "with the remaining messages, and with the beginning of a new topic"
        )
    available = [
        OffsetRange(*_names(queue), begin, end)
        for queue, begin in begins.items()
        if (end := _end(queue, bounds[queue], until)) > begin
    ]
    total = sum(one.size for one in available)
    if previous is not None and not lost and (not total or (patient and total < (limits.min_offsets or 0))):
        return BatchPlan(None)
    after = _offsets_after(previous, begins, limit_ranges(available, limits.max_offsets), limits)
    before = previous.creations if previous is not None else NO_CREATIONS
    return BatchPlan(replace(after, creations=creations_of(after.offsets, before, creations)), tuple(lost))


def forget_queues(previous: StreamOffsets, queues: Sequence[MessageQueue]) -> StreamOffsets:
    """Return the stream offsets `previous` without the queues in `queues`, whose topics were deleted."""
    kept = {queue: offset for queue, offset in previous.offsets.items() if queue not in queues}
    return replace(previous, offsets=kept, starts={}, creations=creations_of(kept, previous.creations, NO_CREATIONS))


def batch_ranges(previous: StreamOffsets | None, end: StreamOffsets) -> list[OffsetRange]:
    """Return the offset ranges of a batch, sorted by queue. `previous`: the end of the previous batch. `end`: the end
    of this batch."""
    known = previous.offsets if previous is not None else {}
    return [
        OffsetRange(*_names(queue), start, end.offsets[queue])
        for queue in sorted(end.offsets)
        if (start := end.starts.get(queue, known.get(queue, end.offsets[queue]))) < end.offsets[queue]
    ]


def batch_partitions(previous: StreamOffsets | None, end: StreamOffsets) -> list[ScanPartition]:
    """Divide a batch into one part per Spark partition. Equal arguments always give the same division."""
    ranges = batch_ranges(previous, end)
    per_part = -(-sum(one.size for one in ranges) // end.partitions)
    return plan_partitions(
        _Counts(), ranges, partition_bytes=max(1, per_part), min_partitions=end.partitions, parallelism=1
    )


class _Counts:
    """Counts each message as one byte where a size estimate is expected. The number of messages in a range never
    changes, so a repeated batch is divided into the same partitions."""

    def range_bytes(self, ranges: Sequence[OffsetRange]) -> Sequence[Sequence[int]]:
        return [[one.size] for one in ranges]


def _offsets_after(
    previous: StreamOffsets | None,
    begins: Mapping[MessageQueue, int],
    ranges: Sequence[OffsetRange],
    limits: BatchLimits,
) -> StreamOffsets:
    """Return the stream's offsets at the end of a batch that reads `ranges`. `begins`: the offset at which the batch
    begins in each queue."""
    offsets = dict(previous.offsets) if previous is not None else {}
    starts: dict[MessageQueue, int] = {}
    ends = {one.queue: one.end_offset for one in ranges}
    for queue, begin in begins.items():
        # Omit a new queue that has no messages in this batch; the next batch treats it as new again. The first batch of
        # a query includes all queues, to fix their first offsets.
        if previous is not None and queue not in offsets and queue not in ends:
            continue
        if offsets.get(queue) != begin:
            starts[queue] = begin
        offsets[queue] = ends.get(queue, begin)
    worth = -(-sum(one.size for one in ranges) // TASK_MIN_MESSAGES)
    partitions = max(limits.min_partitions or 1, min(limits.parallelism, worth), 1)
    return StreamOffsets(offsets, starts, partitions, limits.tags, limits.sql)


def _names(queue: MessageQueue) -> tuple[str, str, int]:
    return queue.topic, queue.broker_name, queue.queue_id


def _begin(queue: MessageQueue, bounds: QueueBounds, start: int, *, fail_on_data_loss: bool) -> int:
    """Return the offset at which the query begins to read a new queue."""
    if start == LATEST:
        return bounds.max_offset
    return bounded_range(queue, bounds, start, LATEST, fail_on_data_loss=fail_on_data_loss).start_offset


def _loss(queue: MessageQueue, position: int, bounds: QueueBounds) -> LostOffsets | None:
    if position < bounds.min_offset:
        return LostOffsets(queue, position, bounds.min_offset)
    if position > bounds.max_offset:
        return LostOffsets(queue, bounds.max_offset, position)
    return None


def _go_on(position: int, bounds: QueueBounds) -> int:
    """Return the offset at which the streaming query continues in a queue that no longer contains the query's offset
    `position`."""
    return bounds.min_offset if position < bounds.min_offset or not bounds.min_offset else bounds.max_offset


def _end(queue: MessageQueue, bounds: QueueBounds, until: Mapping[MessageQueue, int] | None) -> int:
    return bounds.max_offset if until is None else min(bounds.max_offset, until.get(queue, 0))
