"""TaskConnection: all calls to raymq that a program or replica makes for one task queue. It sends and reads messages,
and creates topics and the group.

Every method waits for brokers and stores, and raises RaymqErrors. The rules for tasks are in raymq.serve.decisions.
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
"""Maximum number of stored states that are read for one task, newest first."""
TASK_COMMIT_INTERVAL_S: Final = 1.0
"""Interval in s at which a replica commits its acknowledged tasks. If a replica dies between two commits, the
acknowledged tasks are delivered again. They do not run again, because their stored state is SUCCESS."""
ABSENT_AFTER_S: Final = 86_400.0
"""Maximum time in s for which a replica may receive no task because all its handlers are busy. After this time the
replica leaves its consumer group."""
ERROR_PROPERTY: Final = "error"
TASK_PROPERTY: Final = "task"
ERROR_PROPERTY_BYTES_MAX: Final = 1000


class TaskConnection(OfProcess):
    """One process's connection to the raymq cluster, which stores the process's Ray Serve tasks as messages.
    Thread-safe."""

    def __init__(self, client: Client, settings: TaskSettings) -> None:
        self._client, self._settings, self._admin = client, settings, client.admin
        self._routes = NamespacedRoutes(client.routes, client.names)
        self._producer = client.producer(settings.group)
        self.name = f"{settings.group}@{os.uname().nodename}-{os.getpid()}"
        """A readable name of this process, for logs and health checks."""

    @classmethod
    def open(cls, settings: TaskSettings) -> TaskConnection:
        """Connect to raymq, and create the task queue's topics and group if they do not exist. Raises
        ClusterNotFoundError if no raymq cluster is running."""
        client = connect(settings.options.address, namespace=settings.options.namespace)
        try:
            _create(client, settings)
            return cls(client, settings)
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        """Close the connection and all consumers that it created. Idempotent."""
        self._client.close()

    # Methods that programs call to send tasks and to query them

    def send(self, task: Task, state: StateRecord, *, deliver_at_ms: int | None, sharding_key: str | None) -> None:
        """Store a task and its first state; both are durable when the call returns. Raises SendUnknownError or another
        send error if the store does not confirm the task and the state."""
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
        """Return the history of a task from all of its stored states, including the most recent. Raises
        ServiceNotAvailableError if the broker group with these states is unavailable."""
        topic = self._settings.results
        route = self._routes.wait(topic, ROUTE_TIMEOUT_S)
        own = select_queue_by_hash(route.require_all_queues(), Message(topic, b"-"), task_id).broker_name
        if own not in route.brokers:
            raise ServiceNotAvailableError(
                f"broker group {own!r}, which has the states of task {task_id!r}, is not available; see `raymq status`"
            )
        states = self._states(task_id, own)
        if not any(state.state is TaskState.PENDING for state in states):
            # The task's first state (PENDING) was not found in the expected broker group. Either the task is unknown,
            # or the state was stored when the result topic had other queues. So search all broker groups.
            states = self._states(task_id, None)
        return TaskHistory.of(states)

    def _states(self, task_id: str, broker_name: str | None) -> list[StateRecord]:
        """Return the states of a task in the order in which they were stored. They are read from one broker group, or
        from all broker groups if `broker_name` is None."""
        found = self._admin.query_by_key(
            self._settings.results, task_id, max_messages=STATES_MAX, broker_name=broker_name
        )
        found.sort(key=lambda message: (message.store_timestamp_ms, message.queue_offset))
        states = [decode_state(message.body) for message in found if message.body_error is None]
        return [state for state in states if state is not None and state.task_id == task_id]

    def summary(self) -> GroupSummary:
        """Return a summary of the consumer group to which the deployment's Ray Serve replicas belong: its lag, the
        number of messages that wait for a retry, and the number of dead letters."""
        return tasks_summary(self._admin, self._settings.group, self._settings.queue)

    # Methods that a Ray Serve replica calls

    def consumer(self) -> PullConsumer:
        """Create a pull consumer in this Ray Serve replica's process. It is a member of the deployment's consumer
        group, which all replicas share, and acknowledges each message separately."""
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
        """Store a state of a task. States of one task are stored in the order of these calls. The returned future
        completes when the state is durable."""
        message = Message(self._settings.results, body, tags=state.state.value, keys=(state.task_id,))
        return self._producer.send_async(message, sharding_key=state.task_id)

    def copy(self, message: MessageExt, topic: str, error: str) -> None:
        """Store a copy of a message in another topic, with the error as a property. The copy is durable when the call
        returns. If the message's properties leave no space for the error, the copy has only the body and the error."""
        reason = {ERROR_PROPERTY: _property(error)}
        try:
            self._producer.send(
                Message(topic, message.body, keys=message.keys, properties={**message.properties, **reason})
            )
        except MessageIllegalError:
            self._producer.send(Message(topic, message.body, properties=reason))


def _create(client: Client, settings: TaskSettings) -> None:
    """Create the task queue's topics and group if they do not exist. Existing topics and groups are not
    changed."""
    admin, brokers = client.admin, 1
    for topic in settings.topics:
        brokers = max(brokers, _create_topic(client, topic, settings.options.queues))
    try:
        admin.group_config(settings.group)
    except GroupNotExistError:
        retry_queues = -(-settings.options.queues // brokers)
        admin.create_group(GroupConfig(settings.group, retry_queue_nums=retry_queues))


def _create_topic(client: Client, topic: str, queues: int) -> int:
    """Create a topic if it does not exist. Returns the number of broker groups that have the topic."""
    try:
        return len(NamespacedRoutes(client.routes, client.names).get(topic).brokers)
    except TopicNotExistError:
        try:
            client.admin.create_topic(topic, queues)
        except TopicExistsError:
            pass  # Another Serve replica has created the topic since the check, with another number of queues.
        return len(client.admin.topic_route(topic).brokers)


def _property(text: str) -> str:
    """Convert a text into a valid property value: without control characters, not blank, and at most
    ERROR_PROPERTY_BYTES_MAX bytes long."""
    shown = re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]+", " ", text).strip()
    return shown.encode()[:ERROR_PROPERTY_BYTES_MAX].decode(errors="ignore").strip() or "-"
