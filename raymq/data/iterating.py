"""`iter_topic`: new messages of topics as a sequence of datasets. The offsets of the datasets are committed for a
consumer group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import ray
from ray.data import Dataset

from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.consumer.subscription import ALL
from raymq.client.scan.queue_bounds import ClusterQueues
from raymq.client.scan.ranges import OffsetRange, ScanSource, bounded_range, limit_ranges, select_topics
from raymq.common.errors import ClientStateError, InvalidArgumentError, NoPermissionError, TopicNotExistError
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.names import check_group
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.numbers import POSITIVE, bounded, checked
from raymq.common.protocol.group import OffsetCommit, QueueOffset, StartOffsetQuery
from raymq.data.datasource import TASK_TIMEOUT_MS, RangesDatasource, ReadOptions, present_creations, read_options
from raymq.data.reading import number_of_tasks
from raymq.data.shared_client import driver_client
from raymq.records.filters.sql import SqlFilter
from raymq.records.kernels.columns import Unreadable

PASSER_BY_GENERATION: Final = 0
"""Generation number of the offset commits of a program that is no member of the consumer group: the broker fences no
commit with generation 0."""
_WORDS: Final = {
    "earliest": ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    "latest": ConsumeFromWhere.CONSUME_FROM_END,
}


@checked
@bounded(max_rows=POSITIVE, timeout_ms=TASK_TIMEOUT_MS)
def iter_topic(
    group: str,
    topics: str | Sequence[str],
    interval_s: float = 1.0,
    max_rows: int | None = None,
    *,
    address: str | None = None,
    start_offset: str = "earliest",
    tags: str = ALL,
    expression: SqlFilter | None = None,
    columns: Sequence[str] | None = None,
    fail_on_data_loss: bool = True,
    unreadable: Unreadable = "null",
    timeout_ms: int | None = None,
    namespace: str | None = None,
) -> Iterator[Dataset]:
    """Yield a dataset with the messages that topics received since the previous dataset, each with at most `max_rows`
    messages. The iterator never ends.

        for dataset in raymq.data.iter_topic("scoring", "orders", max_rows=100_000):
            dataset.map_batches(score).write_parquet(path)

    Each dataset has fixed offsets, like a dataset of `read_topic`. Its offsets are committed for `group` when the
    caller requests the next dataset. If a program ends before that or leaves the loop, it receives the same messages
    again after a restart. A group without committed offsets begins at `start_offset`, ``"earliest"`` or ``"latest"``.
    The iterator yields at most one dataset every `interval_s` seconds, and waits while there are no messages. With
    `tags` or an `expression`, or without `fail_on_data_loss`, a dataset may be empty. The program is not a member of
    the group, and the group must have no members.

    Raises the errors of `read_topic` at the first dataset. Raises ClientStateError if members of the group consume the
    queues. If a broker is unavailable, the iterator raises the error of the read or the commit, and ends.
    """
    check_group(group)
    if start_offset not in _WORDS:
        raise InvalidArgumentError(f"start_offset={start_offset!r} must be one of {', '.join(_WORDS)}")
    options = read_options(tags, expression, columns, fail_on_data_loss, None, timeout_ms, unreadable)
    begin = _WORDS[start_offset]
    return _iterate(group, begin, topics, interval_s, max_rows, address, options, namespace)


def _iterate(
    group: str,
    begin: ConsumeFromWhere,
    topics: str | Sequence[str],
    interval_s: float,
    max_rows: int | None,
    address: str | None,
    options: ReadOptions,
    namespace: str | None,
) -> Iterator[Dataset]:
    with driver_client(address, namespace) as client:
        progress = BatchProgress(group, begin, client.names)
        source = ClusterQueues(client.routes, client.storages, client.names)
        names = select_topics(source, topics)
        for ranges in plans(source, progress, names, interval_s, max_rows, lenient=not options.fail_on_data_loss):
            planned = RangesDatasource(source, ranges, options, client.names.name, present_creations(source, ranges))
            yield ray.data.read_datasource(planned, override_num_blocks=number_of_tasks(planned))
            progress.commit(ranges)


class BatchProgress:
    """The committed offsets of a consumer group, for `iter_topic`. Raises the errors of GroupOffsets."""

    def __init__(self, group: str, begin: ConsumeFromWhere, names: Namespace = NO_NAMESPACE) -> None:
        """Create an object for the committed offsets of a consumer group. `group` and the topics of all queues are
        names inside the namespace `names`."""
        self._group, self._names = group, names
        self._offsets, self._query = GroupOffsets(names.wrap(group)), StartOffsetQuery(begin)
        self._starts: dict[MessageQueue, QueueOffset] = {}

    def starts(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return, for each queue, the offset of the next message to read. If the group has no offset for a queue, the
        offset is created at the position given by `begin`. If this position is the queue's end, this call commits the
        offset, because the end moves with each message."""
        new = {queue for queue in queues if queue not in self._starts}
        for broker_name in sorted({queue.broker_name for queue in new}):
            self._offsets.ensure_group(broker_name)
        stored = {self._names.queue(queue): queue for queue in queues}
        found = self._offsets.start_offsets(dict.fromkeys(stored, PASSER_BY_GENERATION), self._query)
        self._starts |= {stored[queue]: offset for queue, offset in found.items()}
        for queue in [queue for queue in stored if stored[queue] not in self._starts][:1]:
            # No start offset was returned for this queue. Ask for it alone: unless the topic was deleted, this call
            # raises the error that explains why the group may not read the queue.
            with suppress(TopicNotExistError):
                self._offsets.start_offset(queue, self._query, PASSER_BY_GENERATION)
        if self._query.where is ConsumeFromWhere.CONSUME_FROM_END:
            self._commit({queue: self._starts[queue].queue_offset for queue in new & self._starts.keys()})
        return {queue: self._starts[queue].queue_offset for queue in queues if queue in self._starts}

    def commit(self, ranges: Sequence[OffsetRange]) -> None:
        """Commit the end offsets of `ranges` durably. If a queue's offset was reset after the ranges were planned, the
        commit leaves the reset offset unchanged."""
        self._commit({one.queue: one.end_offset for one in ranges})

    def _commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        if not offsets:
            return
        commits = {
            self._names.queue(queue): OffsetCommit(offset, PASSER_BY_GENERATION, self._starts[queue].reset_version)
            for queue, offset in offsets.items()
        }
        answer = self._offsets.commit_offsets(commits)
        if answer.stopped:
            raise NoPermissionError(next(iter(answer.stopped.values())))
        if fenced := answer.fenced:
            raise ClientStateError(
                f"group {self._group!r} has members that consume "
                f"{', '.join(map(str, sorted(self._names.shown_queues(fenced))))}; iterate with a group that no "
                "consumer uses"
            )


def plans(
    source: ScanSource,
    progress: BatchProgress,
    topics: Sequence[str],
    interval_s: float,
    max_rows: int | None,
    *,
    lenient: bool,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[list[OffsetRange]]:
    """Yield the offset ranges of each new dataset, at most once every `interval_s` seconds. Ranges without messages are
    skipped."""
    next_s = clock()
    while True:
        pause_s = next_s - clock()
        if pause_s > 0:
            sleep(pause_s)
        next_s = clock() + max(interval_s, PAUSE_MIN_S)
        queues = sorted(queue for topic in topics for queue in source.queues(topic))
        starts, bounds = progress.starts(queues), source.bounds(queues)
        ranges = [
            bounded_range(
                queue,
                bounds[queue],
                starts[queue],
                max(starts[queue], bounds[queue].max_offset),
                fail_on_data_loss=not lenient,
            )
            for queue in queues
            if queue in starts
        ]
        chosen = limit_ranges([one for one in ranges if one.size], max_rows)
        if chosen:
            yield chosen


PAUSE_MIN_S: Final = 0.05
"""Minimum time in seconds between two checks of the topics for new messages."""
