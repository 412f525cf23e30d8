"""Describes the state of a pull consumer: its queues and their offsets for administrators, and values for
metrics."""

from __future__ import annotations

import os

from raymq.client.consumer.pull.assigned_message_queue import AssignedMessageQueue
from raymq.client.consumer.pull.fetched_records import FetchedRecords
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.ready_messages import QueueState
from raymq.common.errors import NoPermissionError
from raymq.common.members.questions import RunningInfo, RunningQueue
from raymq.common.message import MessageModel, MessageQueue
from raymq.records.format.layout import RecordError, store_timestamp_at
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ConsumerFigures


def running_info(core: SubscriptionState, group: str, client_id: str, host: str, member: str) -> RunningInfo:
    """Return a description of a pull consumer for administrators. `core`: the consumer's state. `member`: its name as a
    member of the group `group`."""
    return RunningInfo(
        *(client_id, host, os.getpid(), member, group, "PULL", MessageModel.CLUSTERING.value, core.expressions),
        queues=tuple(_running_queue(assigned, core.forbidden.get(assigned.queue)) for assigned in core.held_queues),
    )


def _running_queue(assigned: AssignedMessageQueue, forbidden: NoPermissionError | None) -> RunningQueue:
    """Return a description of a queue that a pull consumer holds. Messages that polls returned and the program has not
    finished count as in flight. `forbidden`: the reason why the group may not read the queue now."""
    state = "paused" if assigned.paused else assigned.state.value
    return RunningQueue(
        assigned.queue,
        state if forbidden is None else "forbidden",
        assigned.fetch_offset,
        assigned.commit_offset,
        assigned.committed,
        assigned.buffered_count,
        assigned.buffered_bytes,
        in_flight=max(0, assigned.position - assigned.commit_offset),
        trouble="" if forbidden is None else str(forbidden),
    )


def count_fetched(group: str, queue: MessageQueue, fetched: FetchedRecords, size_bytes: int) -> None:
    """Update the metrics for records that were found by a fetch, or by a read of the mapped files. `size_bytes`: total
    size of the records."""
    records = fetched.records
    if not CLIENT_FIGURES.enabled or not len(records.starts):
        return
    try:
        stored_ms = store_timestamp_at(records.data, int(records.starts[0]))
    # If the first record is damaged, count nothing here. The poll that decodes the record reports the error.
    except RecordError:
        return
    CLIENT_FIGURES.delivered(queue.topic, group, stored_ms, len(records.starts), size_bytes)


def queue_state(group: str, assigned: AssignedMessageQueue) -> QueueState:
    """Return the state of a queue that the consumer holds, for metrics."""
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
