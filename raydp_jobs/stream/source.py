"""Decides for Spark's engine where the next batch of a streaming source ends, and what the batch contains.

The module uses neither Spark nor Ray: raydp_jobs.stream.spark_source adapts Spark's interface, and a StreamCluster
represents the cluster. One TopicSource serves all queries that are started from one DataFrame. Each query has an id and
a thread. A TopicSource has no state that a query needs after a restart: the JSON texts of the offsets contain
everything (raydp_jobs.stream.progress).

A source may close the time windows of a query that has the trigger availableNow. After the last message, the source
adds two batches. The first has one row, which moves the watermark past all windows. The second is empty; in it Spark
returns the windows. Spark can also start such an empty batch itself, but not after a restart between the two batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from raydp_jobs.stream.planner import BatchLimits, BatchPlan, batch_partitions, forget_queues, plan_batch
from raydp_jobs.stream.progress import StreamOffsets, WindowClosing, lag_metrics
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.ranges import Creations, is_created_anew
from raymq.common.errors import DataLossError, InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds

IDLE_POLL_INTERVAL_S: Final = 0.1
"""Minimum time in seconds between two requests of an idle query for the ends of its queues. Without this limit, Spark
would send a request every 10 ms."""

MAX_TRIGGER_DELAY_S: Final = 900.0
"""Default of the option max_trigger_delay_s, in seconds."""

logger = logging.getLogger(__name__)


class StreamCluster(Protocol):
    """Interface of the cluster to which a streaming source sends its requests. Thread-safe."""

    def queues(self) -> Sequence[MessageQueue]:
        """Return all queues, known so far, of the topics that the streaming source reads. A new queue of a topic
        becomes known within seconds."""
        ...

    def bounds(self, queues: Sequence[MessageQueue], *, all_of_them: bool) -> Mapping[MessageQueue, QueueBounds]:
        """Return the present bounds of queues. Queues of a broker group that does not answer are omitted; with
        `all_of_them`, an error is raised instead."""
        ...

    def creations(self, topics: Sequence[str]) -> Creations:
        """Return the present creation ids of topics, by topic and broker group. A topic whose id is unknown has no
        entry."""
        ...

    def starts(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        """Return the offset at which a new query starts in each queue, according to the source's options. The offset
        may be EARLIEST or LATEST."""
        ...

    def deleted(self, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        """Return the queues among `queues` whose topic was deleted."""
        ...

    def absent_brokers(self) -> Sequence[str]:
        """Return the names of the broker groups that hold queues of the source's topics, but that no route of these
        topics has now. Raises ServiceNotAvailableError or RequestTimeoutError if no NameServer answers."""
        ...

    def hosts(self, parts: Sequence[ScanPartition]) -> Sequence[Sequence[str]]:
        """Return, for each part of a batch, the hosts on which its Spark task should run."""
        ...

    def commit(self, offsets: Mapping[MessageQueue, int]) -> bool:
        """Commit `offsets`; the query has finished all messages before them. Returns False, without an error, if the
        cluster could not commit."""
        ...

    def close(self) -> None:
        """Release the resources of this connection to the cluster. Called when no streaming query is running. A query
        may start again later."""
        ...


@dataclass(slots=True)
class _Query:
    """The state of a running query. `until`: the query's fixed end offsets, if its trigger is availableNow. `latest`:
    the last known ends of the queues. `committed`: the last committed offsets."""

    until: Mapping[MessageQueue, int] | None = None
    latest: dict[MessageQueue, int] = field(default_factory=dict)
    polled_s: float = float("-inf")
    batch_s: float = float("-inf")
    committed: str | None = None


class TopicSource:
    """The streaming source of one DataFrame, for all queries of the DataFrame. Each method's `query_id` is Spark's id
    of the query that calls the method.

    `max_trigger_delay_s`: the longest time that a batch with fewer messages than `limits.min_offsets` is postponed.
    `closes`: whether a query with the trigger availableNow closes its time windows after its last message.
    """

    def __init__(
        self,
        cluster: StreamCluster,
        limits: BatchLimits,
        *,
        max_trigger_delay_s: float,
        closes: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cluster, self._limits, self._max_trigger_delay_s = cluster, limits, max_trigger_delay_s
        self._closes = closes
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}

    @property
    def limited(self) -> bool:
        """True if an option of the source limits the size of a batch."""
        return self._limits.max_offsets is not None or self._limits.min_offsets is not None

    def latest_offset(self, query_id: str, start: str | None, *, unlimited: bool) -> str | None:
        """Return the end of the batch that begins at `start`; returns `start` if there is nothing to read. `start` is
        None for the first batch.

        Spark calls this method after the batch that ends at `start` has finished, so this method commits `start`.
        `unlimited`: the batch should contain all messages. Raises DataLossError in the cases of
        raydp_jobs.stream.planner.plan_batch, and InvalidArgumentError if the query's windows are closed and the source
        does not close windows. Raises ServiceNotAvailableError instead of closing windows while a broker group may have
        messages that the query has not read.
        """
        query = self._query(query_id)
        previous = StreamOffsets.from_json(start) if start is not None else None
        if start is not None and previous is not None and query.committed != start:
            query.committed = start if self._cluster.commit(previous.offsets) else query.committed
        if previous is not None and previous.closing:
            self._check_closes()
            last = replace(previous, closing=WindowClosing.LAST)
            return start if previous == last else last.to_json()
        plan = self._plan(query, previous, unlimited=unlimited)
        for loss in plan.lost:
            logger.warning("%s; the query continues without these messages (fail_on_data_loss=False)", loss)
        if plan.offsets is not None:
            query.batch_s = self._clock()
            return plan.offsets.to_json()
        if previous is not None and self._closes and query.until is not None:
            self._check_all_read(previous, query.until, query.latest)
            return replace(previous, starts={}, partitions=1, closing=WindowClosing.ROW).to_json()
        return start

    def prepare_available_now(self, query_id: str) -> None:
        """Fix the end of a query with the trigger availableNow: the query reads up to the present ends of the
        queues."""
        bounds = self._cluster.bounds(self._cluster.queues(), all_of_them=True)
        self._query(query_id).until = {queue: one.max_offset for queue, one in bounds.items()}

    def report_latest_offset(self, query_id: str) -> str:
        """Return the last known ends of the queues, for the query's progress."""
        return StreamOffsets(self._latest(query_id)).to_json()

    def metrics(self, query_id: str, end: str | None) -> dict[str, str]:
        """Return the lag metrics of a query that has read up to `end`, for the query's progress."""
        return lag_metrics(StreamOffsets.from_json(end) if end is not None else None, self._latest(query_id))

    def batch(self, start: str | None, end: str) -> tuple[list[tuple[ScanPartition, Sequence[str]]], str, str]:
        """Return the content of the batch between two offsets: its parts, each with its preferred hosts; its tag
        expression; and its SQL filter expression."""
        after = StreamOffsets.from_json(end)
        if after.closing:
            return [], after.tags, after.sql
        after = self._without_created_anew(after)
        parts = batch_partitions(StreamOffsets.from_json(start) if start is not None else None, after)
        hosts = self._cluster.hosts(parts) if parts else []
        return list(zip(parts, hosts, strict=True)), after.tags, after.sql

    def is_closing_row(self, end: str) -> bool:
        """True if the batch that ends at `end` consists of the row that closes the query's time windows."""
        return StreamOffsets.from_json(end).closing is WindowClosing.ROW

    def stop(self, query_id: str) -> None:
        """Delete the state of a query that has ended. After the last query, close the connection to the
        cluster."""
        with self._lock:
            self._queries.pop(query_id, None)
            last = not self._queries
        if last:
            self._cluster.close()

    def _latest(self, query_id: str) -> Mapping[MessageQueue, int]:
        """Return the last known ends of the queues for a query; empty after the query has ended."""
        with self._lock:
            return self._queries[query_id].latest if query_id in self._queries else {}

    def _query(self, query_id: str) -> _Query:
        with self._lock:
            return self._queries.setdefault(query_id, _Query())

    def _check_all_read(
        self, previous: StreamOffsets, until: Mapping[MessageQueue, int], latest: Mapping[MessageQueue, int]
    ) -> None:
        """Raise ServiceNotAvailableError if a query that has read up to `previous` may have left out messages. After
        its windows are closed, Spark would drop these messages as late.

        `until`: the query's fixed end offsets. They lack the queues of a broker group that was not in the routes when
        the query began. `latest`: the last known ends of the queues. After a failover, a new master at first shows
        fewer messages than its queue has.
        """
        read = {(queue.topic, queue.broker_name) for queue in until}
        known = sorted({*previous.offsets, *self._cluster.queues()})
        missing = [queue for queue in known if (queue.topic, queue.broker_name) not in read]
        deleted = self._cluster.deleted(missing) if missing else []
        away = {queue.broker_name for queue in missing if queue not in deleted}
        away |= {queue.broker_name for queue, end in until.items() if latest.get(queue, 0) < end}
        away.update(self._cluster.absent_brokers())
        if away:
            raise ServiceNotAvailableError(
                f"broker group {', '.join(sorted(away))} may have messages that the query has not counted, so its last "
                "windows are not closed: repeat the run when `raymq status` shows the group"
            )

    def _check_closes(self) -> None:
        """Raise InvalidArgumentError if a source that does not close time windows continues a closed query."""
        if not self._closes:
            raise InvalidArgumentError(
                "the checkpoint is closed: a query has closed all of its time windows, and Spark would drop each "
                "further message as late. Use another checkpoint directory"
            )

    def _plan(self, query: _Query, previous: StreamOffsets | None, *, unlimited: bool) -> BatchPlan:
        self._sleep(max(0.0, query.polled_s + IDLE_POLL_INTERVAL_S - self._clock()))
        queues = self._cluster.queues()
        limits = replace(self._limits, max_offsets=None, min_offsets=None) if unlimited else self._limits
        # Read the queues' start offsets before their bounds. Otherwise a message that arrives between the two reads
        # could be skipped, although it is newer than the start time.
        starts = self._cluster.starts(queues) if previous is None else None
        if previous is not None:
            previous = self._without_deleted(previous, queues)
        # The queues of a broker group that does not answer may have unread messages, which closed windows would drop.
        bounds = self._cluster.bounds(
            queues, all_of_them=previous is None or (self._closes and query.until is not None)
        )
        query.polled_s = self._clock()
        query.latest |= {queue: one.max_offset for queue, one in bounds.items()}
        patient = query.until is None and query.polled_s < query.batch_s + self._max_trigger_delay_s
        # Read the creation ids after the bounds: if an id is still the same, it was also the same when the bounds were
        # read. If no queue has new messages, the ids are not needed.
        known = previous.offsets if previous is not None else {}
        moved = previous is None or any(known.get(queue) != one.max_offset for queue, one in bounds.items())
        creations = self._cluster.creations(_topics_of(bounds)) if moved else {}
        return plan_batch(
            previous, bounds, limits, starts=starts, until=query.until, patient=patient, creations=creations
        )

    def _without_created_anew(self, end: StreamOffsets) -> StreamOffsets:
        """Return the end offsets of a batch that Spark is about to read. A queue is left out if its topic was deleted
        and created again after the batch was planned.

        The offsets of such a queue now mean other messages. If the option fail_on_data_loss is set, raises
        DataLossError instead of leaving out a queue.
        """
        now = self._cluster.creations(_topics_of(end.offsets)) if end.creations else {}
        anew = [queue for queue in sorted(end.offsets) if is_created_anew(queue, end.creations, now)]
        if not anew:
            return end
        said = f"topic {', '.join(_topics_of(anew))} was deleted and created again after this batch was planned"
        if self._limits.fail_on_data_loss:
            raise DataLossError(f"{said}. Pass fail_on_data_loss=False to skip the deleted messages")
        logger.warning("%s; the batch skips the deleted messages (fail_on_data_loss=False)", said)
        return replace(end, offsets={queue: at for queue, at in end.offsets.items() if queue not in anew})

    def _without_deleted(self, previous: StreamOffsets, queues: Sequence[MessageQueue]) -> StreamOffsets:
        missing = sorted(previous.offsets.keys() - set(queues))
        deleted = self._cluster.deleted(missing) if missing else []
        if not deleted:
            return previous
        topics = ", ".join(sorted({queue.topic for queue in deleted}))
        if self._limits.fail_on_data_loss:
            raise DataLossError(
                f"topic {topics} was deleted while a query reads it, or is no longer a topic of the query; "
                "messages that the query has not read may be lost. Pass fail_on_data_loss=False to continue "
                "without the topic"
            )
        logger.warning(
            "topic %s was deleted, or is no longer a topic of the query; the query continues without the topic", topics
        )
        return forget_queues(previous, deleted)


def _topics_of(queues: Iterable[MessageQueue]) -> list[str]:
    """Return the topics of queues, without duplicates, sorted."""
    return sorted({queue.topic for queue in queues})
