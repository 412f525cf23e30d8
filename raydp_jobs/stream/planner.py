"""Decides where the next batch of a streaming query ends, and what each task of a batch reads.

The module uses no Spark, no cluster and no clock. Its inputs are the end of the previous batch and the queues' bounds,
its output is StreamOffsets. The parts of a batch depend only on the StreamOffsets of its beginning and its end.
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
"""The fewest messages that are worth a separate Spark task."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The options that bound a batch.

    `max_offsets`: the most offsets in a batch. `min_offsets`: the fewest offsets of a batch, until the longest delay
    has passed. `min_partitions`: the least number of Spark partitions. `parallelism`: the number of tasks that run at
    one time; a large batch is divided among them. `fail_on_data_loss`: lost messages are an error, else they are left
    out.
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
    """Offsets of a queue that the query should have read and never will: [`start_offset`, `end_offset`).

    `anew`: the queue's topic was deleted and created again, so offsets from `start_offset` on belong to an older topic.
    """

    queue: MessageQueue
    start_offset: int
    end_offset: int
    anew: bool = False

    def __str__(self) -> str:
        if self.anew:
            return f"{self.queue}: its topic was deleted and created anew, after offset {self.start_offset} was reached"
        return f"{self.queue}: offsets {self.start_offset} to {self.end_offset - 1} are gone"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The end of the next batch, and the lost messages that it leaves out. `offsets` None: there is nothing to read."""

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
    """Plan the batch after `previous` in the queues of `bounds`. `previous` None: the query's first batch, which always
    exists.

    A queue that `previous` does not contain begins at its offset in `starts`, which may be EARLIEST or LATEST, else at
    its first message. A queue that `bounds` does not contain, because its broker group does not answer or its topic was
    deleted, keeps its offset. `until`: the batch reads no offsets from these on, and no other queues. `patient`: a
    batch of fewer messages than `limits.min_offsets` is postponed. `creations`: the creation ids of the topics, read
    after `bounds`.

    With `limits.fail_on_data_loss`, raises DataLossError for deleted offsets, and for a topic that was created again
    since `previous`, because its offsets mean other messages; raises OffsetOutOfRangeError for a start beyond a queue's
    end. Without it, such a queue continues as in RocketMQ's consumers: at its first offset if older messages were
    deleted or the queue started again at 0, else at its end. A topic that was created again is read from its beginning.
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
            f"{'; '.join(map(str, lost))}. The query has not read them; pass fail_on_data_loss=False to go on with "
            "what is left, and with a new topic at its beginning"
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
    """Return `previous` without the queues of deleted topics."""
    kept = {queue: offset for queue, offset in previous.offsets.items() if queue not in queues}
    return replace(previous, offsets=kept, starts={}, creations=creations_of(kept, previous.creations, NO_CREATIONS))


def batch_ranges(previous: StreamOffsets | None, end: StreamOffsets) -> list[OffsetRange]:
    """Return the ranges of the batch that ends at `end`, sorted by queue. `previous`: the end of the previous batch."""
    known = previous.offsets if previous is not None else {}
    return [
        OffsetRange(*_names(queue), start, end.offsets[queue])
        for queue in sorted(end.offsets)
        if (start := end.starts.get(queue, known.get(queue, end.offsets[queue]))) < end.offsets[queue]
    ]


def batch_partitions(previous: StreamOffsets | None, end: StreamOffsets) -> list[ScanPartition]:
    """Return the parts of the batch, one for each Spark partition. Equal arguments always give equal parts."""
    ranges = batch_ranges(previous, end)
    per_part = -(-sum(one.size for one in ranges) // end.partitions)
    return plan_partitions(
        _Counts(), ranges, partition_bytes=max(1, per_part), min_partitions=end.partitions, parallelism=1
    )


class _Counts:
    """Reports one byte per message, so that parts depend on numbers of messages, which do not change."""

    def range_bytes(self, ranges: Sequence[OffsetRange]) -> Sequence[Sequence[int]]:
        return [[one.size] for one in ranges]


def _offsets_after(
    previous: StreamOffsets | None,
    begins: Mapping[MessageQueue, int],
    ranges: Sequence[OffsetRange],
    limits: BatchLimits,
) -> StreamOffsets:
    """Return the end of a batch of `ranges`, in queues that begin at `begins`."""
    offsets = dict(previous.offsets) if previous is not None else {}
    starts: dict[MessageQueue, int] = {}
    ends = {one.queue: one.end_offset for one in ranges}
    for queue, begin in begins.items():
        # A new queue without messages in this batch is still new in the next one. The first batch fixes the beginnings
        # of all queues.
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
    """Return the offset at which a queue begins that is new to the query."""
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
    """Return the offset at which the query continues in a queue that no longer has `position`."""
    return bounds.min_offset if position < bounds.min_offset or not bounds.min_offset else bounds.max_offset


def _end(queue: MessageQueue, bounds: QueueBounds, until: Mapping[MessageQueue, int] | None) -> int:
    return bounds.max_offset if until is None else min(bounds.max_offset, until.get(queue, 0))
