"""Administration: topics, consumer groups, and looking messages up by their place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from raymq.errors import (
    DataLossError,
    GroupNotExistError,
    InvalidArgumentError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.group_info import GroupQueueProgress
from raymq.ids import parse_offset_message_id
from raymq.message import MessageExt, MessageQueue, PullResult
from raymq.names import check_group, check_topic, check_user_topic
from raymq.pulling import pull_messages
from raymq.ray_calls import ActorRef
from raymq.record import decode_record, decode_records
from raymq.route import TopicRoute, spread_queues
from raymq.routes import Routes
from raymq.storage_client import persist_until
from raymq.storages import Storages
from raymq.store_api import Boundary, QueryResult, QueueBounds
from raymq.subscription import Subscription

TIMEOUT_S: Final = 20.0
QUERY_TIMEOUT_S: Final = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueDescription:
    """A queue and the offsets it holds: [`min_offset`, `max_offset`)."""

    queue: MessageQueue
    min_offset: int
    max_offset: int

    @property
    def messages(self) -> int:
        return self.max_offset - self.min_offset


class Admin:
    """Everything here may be repeated: creating what exists as asked, and deleting what is gone, succeed or say so."""

    def __init__(self, routes: Routes, storages: Storages) -> None:
        self._routes = routes
        self._storages = storages

    def create_topic(self, topic: str, queues: int = 4) -> None:
        """Create a topic with `queues` queues in all, shared evenly among the broker groups.

        On return every client can use it. Raises IllegalNameError, InvalidArgumentError, or TopicExistsError when it
        exists with another number of queues; creating it again as it is changes nothing.
        """
        check_user_topic(topic)
        brokers = self._routes.brokers()
        if not brokers:
            raise ServiceNotAvailableError("no broker is registered; see `raymq status`")
        if isinstance(queues, bool) or not isinstance(queues, int) or not 1 <= queues <= 1024 * len(brokers):
            raise InvalidArgumentError(f"queues must be 1 to {1024 * len(brokers)}, not {queues!r}")
        for broker_name, count in spread_queues(queues, list(brokers)).items():
            self._persist(broker_name, "create_topic", topic, count, count)
        self._routes.forget(topic)
        self._wait_for_route(topic, queues)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages and the offsets committed in it. TopicNotExistError."""
        check_user_topic(topic)
        self._routes.forget(topic)
        for broker_name in self._routes.get(topic).brokers:
            try:
                self._persist(broker_name, "delete_topic", topic)
            except TopicNotExistError:
                continue  # an earlier attempt came this far
        self._routes.forget(topic)

    def list_topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return self._routes.topics()

    def topic_route(self, topic: str) -> TopicRoute:
        """Where a topic's queues are. TopicNotExistError."""
        check_topic(topic)
        self._routes.forget(topic)
        return self._routes.get(topic)

    def describe_topic(self, topic: str) -> list[QueueDescription]:
        """Every queue of a topic with its offsets. TopicNotExistError."""
        route = self.topic_route(topic)
        described = []
        for queue in route.subscribe_queues:
            bounds = self._bounds(route, queue)
            described.append(QueueDescription(queue, bounds.min_offset, bounds.max_offset))
        return described

    def list_groups(self) -> list[str]:
        """The names of all consumer groups, sorted."""
        groups: set[str] = set()
        for broker_name in self._routes.brokers():
            groups.update(self._persist(broker_name, "groups"))
        return sorted(groups)

    def describe_group(self, group: str) -> list[GroupQueueProgress]:
        """How far a group is in every queue of the topics it has committed in, sorted by queue. GroupNotExistError."""
        check_group(group)
        topics: set[str] = set()
        known = False
        for broker_name in self._routes.brokers():
            try:
                topics.update(self._persist(broker_name, "group_topics", group))
                known = True
            except GroupNotExistError:
                continue  # it has nothing on this broker group
        if not known:
            raise GroupNotExistError(group)
        progress: list[GroupQueueProgress] = []
        for topic in topics:
            for broker_name in self.topic_route(topic).brokers:
                progress += self._persist(broker_name, "group_progress", group, topic)
        return sorted(progress, key=lambda entry: entry.queue)

    def delete_group(self, group: str) -> None:
        """Forget a group and its offsets. GroupNotExistError."""
        check_group(group)
        known = False
        for broker_name in self._routes.brokers():
            try:
                self._persist(broker_name, "delete_group", group)
                known = True
            except GroupNotExistError:
                continue  # it has nothing on this broker group
        if not known:
            raise GroupNotExistError(group)

    def pull(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32, tags: str = "*", wait_s: float = 0.0
    ) -> PullResult:
        """Read a queue from `offset` without a group. OffsetOutOfRangeError, InvalidArgumentError."""
        route = self._routes.get(check_topic(queue.topic))
        data = next((data for data in route.queues if data.broker_name == queue.broker_name), None)
        if data is None:
            raise InvalidArgumentError(f"topic {queue.topic!r} has no queue in {queue.broker_name!r}")
        storage = self._storages.get(route.master_storage(queue.broker_name))
        subscription = Subscription.parse(queue.topic, tags)
        return pull_messages(storage, queue, data.read_queue_nums, subscription, offset, max_messages, wait_s)

    def query_by_key(
        self, topic: str, key: str, *, max_messages: int = 32, begin_ms: int = 0, end_ms: int = 2**63 - 1
    ) -> list[MessageExt]:
        """The newest messages of `topic` that have `key`, oldest first, stored between two times (ms since 1970).

        Times count by whole seconds, and at most 64 messages come from one broker group (max_msgs_num_batch).
        TopicNotExistError, InvalidArgumentError.
        """
        found = self._query(topic, "query_by_key", key, max_messages, begin_ms, end_ms)
        return sorted(found, key=lambda message: message.store_timestamp_ms)[-max_messages:]

    def query_by_id(self, topic: str, message_id: str) -> list[MessageExt]:
        """The messages of `topic` that `message_id` names: a unique id, or an offset message id.

        Empty if there is none; more than one if the producer sent the message more than once. TopicNotExistError,
        InvalidArgumentError.
        """
        found = self._query(topic, "query_by_unique_id", message_id)
        return found or self._query_by_offset_id(topic, message_id.upper())

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        """The first offset of `queue` stored at or after a time; with UPPER the last one stored at or before it."""
        storage = self._storages.get(self._routes.get(check_topic(queue.topic)).master_storage(queue.broker_name))
        return persist_until(
            time.monotonic() + TIMEOUT_S,
            lambda left_s: storage.offset_by_time(queue.topic, queue.queue_id, timestamp_ms, left_s, boundary),
        )

    def _query(self, topic: str, method: str, *args: Any) -> list[MessageExt]:
        """Ask the store of every broker group that has the topic."""
        route = self._routes.get(check_topic(topic))
        messages: list[MessageExt] = []
        for broker_name in route.brokers:
            storage = self._storages.get(route.master_storage(broker_name))
            result: QueryResult = persist_until(
                time.monotonic() + TIMEOUT_S,
                partial(_call_with_time_left, getattr(storage, method), (topic, *args)),
            )
            messages += decode_records(result.records, broker_name=broker_name)
        return messages

    def _query_by_offset_id(self, topic: str, offset_id: str) -> list[MessageExt]:
        try:
            place = parse_offset_message_id(offset_id).physical_offset
        except InvalidArgumentError:
            return []  # a unique id of another kind
        route = self._routes.get(topic)
        for broker_name in route.brokers:
            storage = self._storages.get(route.master_storage(broker_name))
            try:
                record = persist_until(
                    time.monotonic() + TIMEOUT_S, partial(_call_with_time_left, storage.record_at, (place,))
                )
            except (InvalidArgumentError, DataLossError):
                continue  # this store has another record, or none, at that place
            message = decode_record(record, broker_name=broker_name)
            if message.offset_message_id == offset_id and message.topic == topic:
                return [message]
        return []

    def _bounds(self, route: TopicRoute, queue: MessageQueue) -> QueueBounds:
        storage = self._storages.get(route.master_storage(queue.broker_name))
        return persist_until(
            time.monotonic() + TIMEOUT_S,
            lambda left_s: storage.queue_bounds(queue.topic, queue.queue_id, min(left_s, 5.0)),
        )

    def _persist(self, broker_name: str, method: str, *args: Any) -> Any:
        """A broker call that is safe to repeat, over a restart of the broker."""
        broker = ActorRef(broker_name)
        return persist_until(
            time.monotonic() + TIMEOUT_S, lambda left_s: broker.call(method, *args, timeout_s=min(left_s, 15.0))
        )

    def _wait_for_route(self, topic: str, queues: int) -> None:
        """Brokers register on their own; return only when the NameServer shows all of the queues."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                if len(self._routes.get(topic).publish_queues) >= queues:
                    return
            except RaymqError as error:
                if not isinstance(error, TopicNotExistError) and not error.retryable:
                    raise
            if time.monotonic() > deadline_s:
                raise RequestTimeoutError(f"registration of topic {topic!r}", TIMEOUT_S)
            self._routes.forget(topic)
            time.sleep(0.02)


def _call_with_time_left(method: Callable[..., T], args: tuple[Any, ...], left_s: float) -> T:
    return method(*args, min(left_s, QUERY_TIMEOUT_S))
