"""The figures of a push-consumer instance for metrics: received messages, and the state of its queues."""

from __future__ import annotations

from actors.core.consume.process_queue import ProcessQueue
from actors.core.consume.process_queues import PullState
from actors.core.consume.records_in_place import RecordsInPlace, TaskRecords
from actors.pull.instance_state import InstanceState
from raymq.client.consumer.ready_messages import QueueState
from raymq.common.message import MessageQueue
from raymq.records.format.layout import RecordError, store_timestamp_at
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ConsumerFigures


def count_delivered(state: InstanceState, queue: MessageQueue, records: TaskRecords) -> None:
    """Count records that a fetch has returned, at least one."""
    if not CLIENT_FIGURES.enabled:
        return
    try:
        if isinstance(records, RecordsInPlace):
            stored_ms = store_timestamp_at(records.parts[0].data, int(records.parts[0].starts[0]))
        else:
            stored_ms = store_timestamp_at(records.data, 0)
    except RecordError:  # the listener's process reports the unreadable record
        return
    CLIENT_FIGURES.delivered(queue.topic, state.settings.group, stored_ms, len(records), records.size_bytes)


def queue_states(state: InstanceState) -> list[QueueState]:
    """Return the states of the started queues of an instance."""
    with state.lock:
        return [_queue_state(state, queue) for queue in state.core.process_queues() if queue.started]


def _queue_state(state: InstanceState, process_queue: ProcessQueue) -> QueueState:
    pulled, committed = process_queue.fetch_offset, process_queue.committed
    figures = ConsumerFigures(
        process_queue.queue.topic,
        state.settings.group,
        inflight=0 if committed is None else max(0, pulled - committed),
        cached=process_queue.count,
        cached_bytes=process_queue.size_bytes,
    )
    held_back = state.core.pull_state(process_queue) is not PullState.PULLING
    ask = held_back or process_queue.visible_end > pulled
    return QueueState(process_queue.queue, figures, pulled, process_queue.visible_end, ask)
