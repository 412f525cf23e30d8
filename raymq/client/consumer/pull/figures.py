"""The figures of a pull consumer for metrics: what came to it, and the state of its queues."""

from __future__ import annotations

from raymq.client.consumer.pull.assigned_message_queue import AssignedMessageQueue
from raymq.client.consumer.pull.fetched_records import FetchedRecords
from raymq.client.consumer.ready_messages import QueueState
from raymq.common.message import MessageQueue
from raymq.records.format.layout import RecordError, store_timestamp_at
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ConsumerFigures


def count_fetched(group: str, queue: MessageQueue, fetched: FetchedRecords, size_bytes: int) -> None:
    """Count records of `size_bytes` that a fetch, or a look into the mapped files, has found."""
    records = fetched.records
    if not CLIENT_FIGURES.enabled or not len(records.starts):
        return
    try:
        stored_ms = store_timestamp_at(records.data, int(records.starts[0]))
    except RecordError:  # the poll that decodes it says so
        return
    CLIENT_FIGURES.delivered(queue.topic, group, stored_ms, len(records.starts), size_bytes)


def queue_state(group: str, assigned: AssignedMessageQueue) -> QueueState:
    """A queue that the consumer holds."""
    pulled, committed = assigned.fetch_offset, assigned.committed
    figures = ConsumerFigures(
        assigned.queue.topic,
        group,
        inflight=0 if committed is None else max(0, pulled - committed),
        cached=assigned.buffered_count,
        cached_bytes=assigned.buffered_bytes,
    )
    ask = pulled < assigned.known_end if assigned.mapped else not assigned.fetching
    return QueueState(assigned.queue, figures, pulled, assigned.known_end, ask)
