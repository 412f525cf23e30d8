"""TaskConnection: all calls to raymq that a program or replica makes for one task queue. It sends and reads messages,
and creates topics and the group.

Every method waits for brokers and stores, and raises RaymqErrors. The rules for tasks are in raymq.serve.decisions.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Final

from raymq.client.client import Client, connect
from raymq.client.consumer.pull.consumer import PullConsumer
from raymq.client.consumer.push.modes import check_modes
from raymq.client.consumer.simple.settings import SimpleOptions
from raymq.common.closing import OfProcess, closed_on_error
from raymq.common.errors import (
    ConfigError,
    GroupNotExistError,
    MessageIllegalError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.message import PRIORITY_MAX, ConsumeFromWhere, Message, MessageExt, SendResult
from raymq.common.names import retry_topic
from raymq.common.protocol.attributes import TopicMessageType
from raymq.common.protocol.group import GroupConfig, GroupSummary
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.serve.config import TaskSettings
from raymq.serve.lag import tasks_summary
from raymq.serve.shared_tasks import SharedTasks
from raymq.serve.states import StateRecord, TaskHistory
from raymq.serve.task import Task
from raymq.serve.task_messages import property_text, state_message, task_history, task_message
from raymq.serve.worker import TaskSource

TASK_COMMIT_INTERVAL_S: Final = 1.0
"""Interval in s at which a replica commits its acknowledged tasks. If a replica dies between two commits, the
acknowledged tasks are delivered again. They do not run again, because their stored state is SUCCESS."""
ABSENT_AFTER_S: Final = 86_400.0
"""Maximum time in s for which a replica may receive no task because all its handlers are busy. After this time the
replica leaves its consumer group."""
ERROR_PROPERTY: Final = "error"


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

    def send(
        self,
        task: Task,
        state: StateRecord,
        *,
        deliver_at_ms: int | None,
        sharding_key: str | None,
        priority: int | None = None,
    ) -> None:
        """Store a task and its first state; both are durable when the call returns. Raises SendUnknownError or another
        send error if the store does not confirm the task and the state."""
        message = task_message(self._settings.queue, task, deliver_at_ms, priority)
        sent = self._producer.send_async(message, sharding_key=sharding_key)
        told = self.tell(state, state.encode())
        sent.result()
        told.result()

    def history(self, task_id: str) -> TaskHistory:
        """Return the history of a task from all of its stored states, including the most recent. Raises
        ServiceNotAvailableError if the broker group with these states is unavailable."""
        return task_history(self._routes, self._admin, self._settings.results, task_id)

    def summary(self) -> GroupSummary:
        """Return a summary of the consumer group to which the deployment's Ray Serve replicas belong: its lag, the
        number of messages that wait for a retry, and the number of dead letters."""
        return tasks_summary(self._admin, self._settings.group, self._settings.queue)

    # Methods that a Ray Serve replica calls

    def consumer(self) -> TaskSource:
        """Create a consumer in this Ray Serve replica's process. It is a member of the deployment's consumer group,
        which all replicas share, and acknowledges each message separately. Raises ClientStateError if other members
        of the group consume in the other mode (consume_mode)."""
        group, mode = self._settings.group, self._settings.options.consume_mode
        check_modes(self._client.names.wrap(group), mode, sorted(self._client.routes.brokers()))
        return self._shared_consumer() if mode == "share" else self._queue_consumer()

    def _shared_consumer(self) -> SharedTasks:
        options: SimpleOptions = {
            "consume_from": ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
            "ordered": False,
            "auto_renew": True,
        }
        engine = self._client._simple_engine(self._settings.group, options, gives_up=False)
        with closed_on_error(engine.close, "the consumer"):
            engine.subscribe(self._settings.queue, "*")
        return SharedTasks(engine)

    def _queue_consumer(self) -> PullConsumer:
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
        message = state_message(self._settings.results, state, body)
        return self._producer.send_async(message, sharding_key=state.task_id)

    def copy(self, message: MessageExt, topic: str, error: str) -> None:
        """Store a copy of a message in another topic, with the error as a property. The copy is durable when the call
        returns. If the message's properties leave no space for the error, the copy has only the body and the error."""
        reason = {ERROR_PROPERTY: property_text(error)}
        priority = None if message.priority is None else min(message.priority, PRIORITY_MAX)
        try:
            properties = {**message.properties, **reason}
            self._producer.send(
                Message(topic, message.body, keys=message.keys, properties=properties, priority=priority)
            )
        except MessageIllegalError:
            self._producer.send(Message(topic, message.body, properties=reason))


def _create(client: Client, settings: TaskSettings) -> None:
    """Create the task queue's topics and group if they do not exist. Existing topics and groups are not changed, except
    that an existing group gets the retry intervals of the settings."""
    admin, brokers = client.admin, 1
    for topic in settings.topics:
        message_type = TopicMessageType.PRIORITY if topic == settings.queue and settings.options.priorities else None
        brokers = max(brokers, _create_topic(client, topic, settings.options.queues, message_type))
    intervals_s = settings.options.retry_intervals_s
    try:
        known = admin.group_config(settings.group)
    except GroupNotExistError:
        retry_queues = -(-settings.options.queues // brokers)
        admin.create_group(GroupConfig(settings.group, retry_queue_nums=retry_queues, retry_intervals_s=intervals_s))
    else:
        if intervals_s and known.retry_intervals_s != intervals_s:
            admin.update_group(settings.group, retry_intervals_s=intervals_s)


def _create_topic(client: Client, topic: str, queues: int, message_type: TopicMessageType | None) -> int:
    """Create a topic if it does not exist: of the type `message_type`, or of no type, with `queues` queues. Returns the
    number of broker groups that have the topic. Raises ConfigError if the topic has priorities and must not have any,
    or the reverse."""
    try:
        route = NamespacedRoutes(client.routes, client.names).get(topic)
    except TopicNotExistError:
        try:
            if message_type is None:
                client.admin.create_topic(topic, queues)
            else:
                client.admin.create_topic(topic, message_type=message_type)
        except TopicExistsError:
            pass  # Another Serve replica has created the topic since the check, with another number of queues.
        route = client.admin.topic_route(topic)
    if route.attributes.has_levels != (message_type is TopicMessageType.PRIORITY):
        raise ConfigError(
            f"topic {topic!r} is of the type {route.attributes.message_type}: set priorities=True for a task queue "
            "of the type PRIORITY, and only for such a queue"
        )
    return len(route.brokers)
