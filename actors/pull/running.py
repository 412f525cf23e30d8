"""Computes the reports about a push-consumer instance: its description for administrators, and its metrics.

The description has the instance's queues and the state of its listener's process. The metrics are the received messages
and the state of the queues.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from actors.core.consume.process_queue import ProcessQueue
from actors.core.consume.process_queues import PullState
from actors.core.consume.records_in_place import RecordsInPlace, TaskRecords
from actors.pull.instance_state import InstanceState
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.ready_messages import QueueState
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.members.questions import RunningInfo, RunningQueue
from raymq.common.message import MessageQueue
from raymq.records.format.layout import RecordError, store_timestamp_at
from raymq.remoting.actor_ref import HandleRef
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES, ConsumerFigures

STACKS_TIMEOUT_S: Final = 3.0
DIRECT_TIMEOUT_S: Final = 25.0
"""Maximum time, in seconds, that the listener may take for a message that an administrator passes to it
directly."""


def running_info(
    status: Mapping[str, Any],  # the fields of an InstanceStatus, which have different types
    settings: PushSettings,
    client_id: str,
    host: str,
) -> RunningInfo:
    """Build a RunningInfo for administrators from an instance's `status` (PushInstance.status)."""
    return RunningInfo(
        *(client_id, host, os.getpid(), status["instance"], settings.group, "PUSH", settings.message_model.value),
        settings.expressions,
        queues=tuple(RunningQueue(**queue) for queue in status["queues"]),
        rates=status["stats"],
        consumed=status["consumed"],
        failures=status["failures"],
        suspended=status["suspended"],
        trouble=status["listener_away"] or status["last_error"],
    )


# The return type is Any, because each method of a Listener returns another type.
def call_listener(listener: HandleRef | None, method: str, *args: Any, timeout_s: float) -> Any:
    """Call a method of a push-consumer instance's Listener actor.

    Raises RequestTimeoutError if the Listener does not answer in time, and ServiceNotAvailableError if it cannot be
    called now. Also raises the raymq errors that the method raised.
    """
    if listener is None:
        raise ServiceNotAvailableError("the listener's process has not called yet")
    return listener.call(method, *args, what="the listener's process", timeout_s=timeout_s)


def count_delivered(state: InstanceState, queue: MessageQueue, records: TaskRecords) -> None:
    """Count the messages that a fetch has returned. `records` has at least one record."""
    if not CLIENT_FIGURES.enabled:
        return
    try:
        if isinstance(records, RecordsInPlace):
            stored_ms = store_timestamp_at(records.parts[0].data, int(records.parts[0].starts[0]))
        else:
            stored_ms = store_timestamp_at(records.data, 0)
    # ignore a record that cannot be read: the listener's process reports it when it reads the record
    except RecordError:
        return
    CLIENT_FIGURES.delivered(queue.topic, state.settings.group, stored_ms, len(records), records.size_bytes)


def queue_states(state: InstanceState) -> list[QueueState]:
    """Return the states of a push-consumer instance's queues from which it has started to read."""
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
