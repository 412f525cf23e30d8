"""The messages of tasks: a task in its queue, and a task's states in the result topic, from which its history is read.

Programs that have no connection of their own use this module too, such as the gateway. All names of topics are the
names that the caller's routes and administration know.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from raymq.client.producer.queue_selector import select_queue_by_hash
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import PRIORITY_MAX, Message, MessageExt
from raymq.common.numbers import whole_number
from raymq.common.protocol.route import TopicRoute
from raymq.remoting.route_cache import ROUTE_TIMEOUT_S
from raymq.serve.states import StateRecord, TaskHistory, TaskState, decode_state
from raymq.serve.task import Task

STATES_MAX: Final = 64
"""Maximum number of stored states that are read for one task, newest first."""
LOWEST: Final = 0
"""Priority of a task that is sent without a priority to a queue with priorities."""
TASK_PROPERTY: Final = "task"
ERROR_PROPERTY_BYTES_MAX: Final = 1000
WEBHOOK_TAG: Final = "WEBHOOK"
WEBHOOK_KEY_SUFFIX: Final = "-webhook"
"""The key of the message with a task's web hook is the task's id with this suffix. So the states of a task are found
without the web hook."""


@dataclass(frozen=True, slots=True)
class TaskWebhook:
    """The URL that is called at the end of a task. `queue`: the task queue, as the sender of the task named it."""

    task_id: str
    url: str
    queue: str


class StateRoutes(Protocol):
    """The routes of result topics. The call blocks."""

    def wait(self, topic: str, timeout_s: float) -> TopicRoute: ...


class KeyQueries(Protocol):
    """The queries by key of `client.admin`. The call blocks."""

    def query_by_key(
        self, topic: str, key: str, *, max_messages: int, broker_name: str | None = None
    ) -> list[MessageExt]: ...


def task_message(queue: str, task: Task, deliver_at_ms: int | None, priority: int | None = None) -> Message:
    """Return the message of a task for the topic `queue`. `deliver_at_ms`: the time in ms since 1970 before which the
    task does not run; None for now. `priority`: 0 to 9 in a queue with priorities; None in other queues."""
    return Message(
        queue,
        task.encode(),
        keys=(task.id,),
        properties={TASK_PROPERTY: property_text(task.name)},
        deliver_at_ms=deliver_at_ms,
        priority=priority,
    )


def task_priority(given: int | None, *, has_priorities: bool, is_placed: bool) -> int | None:
    """Return the priority of a task's message: `given`, or LOWEST in a queue with priorities, or None in other queues.
    `is_placed`: True if the task has a delay or a sharding key. Raises InvalidArgumentError if the queue has no
    priorities and `given` is one, if the task is placed in a queue with priorities, or if `given` is not 0 to 9."""
    if not has_priorities:
        if given is not None:
            raise InvalidArgumentError(
                "the tasks of this queue have no priorities: set priorities=True in the RaymqAdapterConfig of a new "
                "queue, or use a separate queue for urgent tasks"
            )
        return None
    if is_placed:
        raise InvalidArgumentError(
            "a task of a queue with priorities has neither a delay nor a sharding_key: use a separate queue for it"
        )
    return LOWEST if given is None else whole_number("priority", given, LOWEST, PRIORITY_MAX)


def state_message(results: str, state: StateRecord, body: bytes) -> Message:
    """Return the message of a task's state for the topic `results`. `body`: the encoded state. Send it with the task's
    id as its sharding key."""
    return Message(results, body, tags=state.state.value, keys=(state.task_id,))


def webhook_message(results: str, webhook: TaskWebhook) -> Message:
    """Return the message of a task's web hook for the topic `results`. Store the message before the task, with the
    task's id as its sharding key."""
    body = json.dumps(asdict(webhook), separators=(",", ":")).encode()
    return Message(results, body, tags=WEBHOOK_TAG, keys=(webhook.task_id + WEBHOOK_KEY_SUFFIX,))


def task_webhook(routes: StateRoutes, queries: KeyQueries, results: str, task_id: str) -> TaskWebhook | None:
    """Return the web hook of a task; None if the topic `results` has none. Raises ServiceNotAvailableError if the
    broker group with the web hook is unavailable."""
    own, key = _own_broker(routes, results, task_id), task_id + WEBHOOK_KEY_SUFFIX
    for broker_name in (own, None):  # all broker groups, if the result topic had other queues then
        for message in queries.query_by_key(results, key, max_messages=STATES_MAX, broker_name=broker_name):
            webhook = None if message.body_error is not None else _decode_webhook(message.body)
            if webhook is not None and webhook.task_id == task_id:
                return webhook
    return None


def _decode_webhook(body: bytes) -> TaskWebhook | None:
    try:
        fields = json.loads(body)
        found = TaskWebhook(fields["task_id"], fields["url"], fields["queue"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if all(isinstance(text, str) for text in asdict(found).values()) else None


def _own_broker(routes: StateRoutes, results: str, task_id: str) -> str:
    """Return the broker group that has the states of a task."""
    route = routes.wait(results, ROUTE_TIMEOUT_S)
    own = select_queue_by_hash(route.require_all_queues(), Message(results, b"-"), task_id).broker_name
    if own not in route.brokers:
        raise ServiceNotAvailableError(
            f"broker group {own!r}, which has the states of task {task_id!r}, is not available; see `raymq status`"
        )
    return own


def task_history(routes: StateRoutes, queries: KeyQueries, results: str, task_id: str) -> TaskHistory:
    """Return the history of a task from all of its states in the topic `results`, including the most recent. Raises
    ServiceNotAvailableError if the broker group with these states is unavailable."""
    own = _own_broker(routes, results, task_id)
    states = _states(queries, results, task_id, own)
    if not any(state.state is TaskState.PENDING for state in states):
        # The task's first state (PENDING) was not found in the expected broker group. Either the task is unknown, or
        # the state was stored when the result topic had other queues. So search all broker groups.
        states = _states(queries, results, task_id, None)
    return TaskHistory.of(states)


def _states(queries: KeyQueries, results: str, task_id: str, broker_name: str | None) -> list[StateRecord]:
    """Return the states of a task in the order in which they were stored. They are read from one broker group, or from
    all broker groups if `broker_name` is None."""
    found = queries.query_by_key(results, task_id, max_messages=STATES_MAX, broker_name=broker_name)
    found.sort(key=lambda message: (message.store_timestamp_ms, message.queue_offset))
    states = [decode_state(message.body) for message in found if message.body_error is None]
    return [state for state in states if state is not None and state.task_id == task_id]


def property_text(text: str) -> str:
    """Convert a text into a valid property value: without control characters, not blank, and at most
    ERROR_PROPERTY_BYTES_MAX bytes long."""
    shown = re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]+", " ", text).strip()
    return shown.encode()[:ERROR_PROPERTY_BYTES_MAX].decode(errors="ignore").strip() or "-"
