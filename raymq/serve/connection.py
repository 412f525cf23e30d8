"""TaskConnection is what a program and a replica do with raymq: the topics of one task queue, its group, its messages.

Every call blocks for calls to brokers and stores, and raises RaymqErrors. Nothing is decided here.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import Future
from typing import Final

from raymq.client.client import Client, connect
from raymq.client.consumer.pull.consumer import PullConsumer
from raymq.client.producer.queue_selector import select_queue_by_hash
from raymq.common.closing import OfProcess
from raymq.common.errors import (
    GroupNotExistError,
    MessageIllegalError,
    ServiceNotAvailableError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.message import ConsumeFromWhere, Message, MessageExt, SendResult
from raymq.common.names import retry_topic
from raymq.common.protocol.group import GroupConfig, GroupSummary
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.remoting.route_cache import ROUTE_TIMEOUT_S
from raymq.serve.config import TaskSettings
from raymq.serve.lag import tasks_summary
from raymq.serve.states import StateRecord, TaskHistory, TaskState, decode_state
from raymq.serve.task import Task

STATES_MAX: Final = 64
"""The most states of a task that are read, newest first."""
TASK_COMMIT_INTERVAL_S: Final = 1.0
"""How often acknowledged tasks are committed. A replica that dies in between has them delivered again: they are known
to have succeeded, and do not run again."""
ABSENT_AFTER_S: Final = 86_400.0
"""A replica all of whose handlers are busy takes no task for so long at most before it leaves its group."""
ERROR_PROPERTY: Final = "error"
TASK_PROPERTY: Final = "task"
ERROR_PROPERTY_BYTES_MAX: Final = 1000


class TaskConnection(OfProcess):
    """The connection of one process to the raymq of its tasks. Thread-safe."""

    def __init__(self, client: Client, settings: TaskSettings) -> None:
        self._client, self._settings, self._admin = client, settings, client.admin
        self._routes = NamespacedRoutes(client.routes, client.names)
        self._producer = client.producer(settings.group)
        self.name = f"{settings.group}@{os.uname().nodename}-{os.getpid()}"
        """The name of this process, for people."""

    @classmethod
    def open(cls, settings: TaskSettings) -> TaskConnection:
        """Connect, and create the topics and the group that do not exist. ClusterNotFoundError without a raymq."""
        client = connect(settings.options.address, namespace=settings.options.namespace)
        try:
            _create(client, settings)
            return cls(client, settings)
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        """Close the connection, and the consumer if it was made here. Idempotent."""
        self._client.close()

    # A program's calls

    def send(self, task: Task, state: StateRecord, *, deliver_at_ms: int | None, sharding_key: str | None) -> None:
        """Store a task and its first state; durable on return. SendUnknownError and others when that is not known."""
        message = Message(
            self._settings.queue,
            task.encode(),
            keys=(task.id,),
            properties={TASK_PROPERTY: _property(task.name)},
            deliver_at_ms=deliver_at_ms,
        )
        sent = self._producer.send_async(message, sharding_key=sharding_key)
        told = self.tell(state, state.encode())
        sent.result()
        told.result()

    def history(self, task_id: str) -> TaskHistory:
        """Everything that is known of a task, including what was stored just now."""
        topic = self._settings.results
        route = self._routes.wait(topic, ROUTE_TIMEOUT_S)
        own = select_queue_by_hash(route.require_all_queues(), Message(topic, b"-"), task_id).broker_name
        if own not in route.brokers:
            raise ServiceNotAvailableError(
                f"{own}, which has the states of task {task_id}, is away; see `raymq status`"
            )
        states = self._states(task_id, own)
        if not any(state.state is TaskState.PENDING for state in states):
            # The task is unknown, or its first state was stored when the topic had other queues.
            states = self._states(task_id, None)
        return TaskHistory.of(states)

    def _states(self, task_id: str, broker_name: str | None) -> list[StateRecord]:
        """The states of a task in one broker group or in all, in the order in which they were stored."""
        found = self._admin.query_by_key(
            self._settings.results, task_id, max_messages=STATES_MAX, broker_name=broker_name
        )
        found.sort(key=lambda message: (message.store_timestamp_ms, message.queue_offset))
        states = [decode_state(message.body) for message in found if message.body_error is None]
        return [state for state in states if state is not None and state.task_id == task_id]

    def summary(self) -> GroupSummary:
        """The state of the replicas' group: lag, retries that wait, dead letters."""
        return tasks_summary(self._admin, self._settings.group, self._settings.queue)

    # A replica's calls

    def consumer(self) -> PullConsumer:
        """A member of the group in this process, which acknowledges each message."""
        consumer = self._client.pull_consumer(
            self._settings.group,
            consume_from=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
            acknowledge_each=True,
            auto_commit_interval_s=TASK_COMMIT_INTERVAL_S,
            poll_interval_max_s=ABSENT_AFTER_S,
        )
        try:
            for topic in (self._settings.queue, retry_topic(self._settings.group)):
                consumer.subscribe(topic)
        except BaseException:
            consumer.close()
            raise
        return consumer

    def tell(self, state: StateRecord, body: bytes) -> Future[SendResult]:
        """Store a state; the states of a task stay in the order of these calls. The future ends once it is durable."""
        message = Message(self._settings.results, body, tags=state.state.value, keys=(state.task_id,))
        return self._producer.send_async(message, sharding_key=state.task_id)

    def copy(self, message: MessageExt, topic: str, error: str) -> None:
        """Store a copy of a message in another topic, with the reason; durable on return. Properties of the message
        that leave no space for that are left out."""
        reason = {ERROR_PROPERTY: _property(error)}
        try:
            self._producer.send(
                Message(topic, message.body, keys=message.keys, properties={**message.properties, **reason})
            )
        except MessageIllegalError:
            self._producer.send(Message(topic, message.body, properties=reason))


def _create(client: Client, settings: TaskSettings) -> None:
    """Create the topics and the group unless they exist. Existing ones are not changed."""
    admin, brokers = client.admin, 1
    for topic in settings.topics:
        brokers = max(brokers, _create_topic(client, topic, settings.options.queues))
    try:
        admin.group_config(settings.group)
    except GroupNotExistError:
        retry_queues = -(-settings.options.queues // brokers)
        admin.create_group(GroupConfig(settings.group, retry_queue_nums=retry_queues))


def _create_topic(client: Client, topic: str, queues: int) -> int:
    """Create a topic, if it does not exist; returns the number of its broker groups."""
    try:
        return len(NamespacedRoutes(client.routes, client.names).get(topic).brokers)
    except TopicNotExistError:
        try:
            client.admin.create_topic(topic, queues)
        except TopicExistsError:
            pass  # another replica has just created it, with other queues
        return len(client.admin.topic_route(topic).brokers)


def _property(text: str) -> str:
    """A text as the value of a property: without control characters, not blank, not long."""
    shown = re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]+", " ", text).strip()
    return shown.encode()[:ERROR_PROPERTY_BYTES_MAX].decode(errors="ignore").strip() or "-"
