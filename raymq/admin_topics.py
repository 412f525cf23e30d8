"""Administration: topics, their queues, permissions and statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass

from raymq.admin_base import TIMEOUT_S, AdminBase
from raymq.errors import (
    InvalidArgumentError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.message import MessageQueue
from raymq.names import check_topic, check_user_topic, is_internal_topic
from raymq.route import TopicRoute, check_perm, grow_queues, parse_order_config, spread_queues
from raymq.stats import TopicStats, add_up


@dataclass(frozen=True, slots=True)
class QueueDescription:
    """A queue and the offsets it holds: [`min_offset`, `max_offset`)."""

    queue: MessageQueue
    min_offset: int
    max_offset: int

    @property
    def messages(self) -> int:
        return self.max_offset - self.min_offset


class TopicAdmin(AdminBase):
    """Everything here may be repeated."""

    def create_topic(self, topic: str, queues: int = 4) -> None:
        """Create a topic with `queues` queues in all, shared evenly among the broker groups.

        On return every client can use it. Raises IllegalNameError, InvalidArgumentError, or TopicExistsError when it
        exists with another number of queues; creating it again as it is changes nothing.
        """
        check_user_topic(topic)
        brokers = self._broker_names()
        if not brokers:
            raise ServiceNotAvailableError("no broker is registered; see `raymq status`")
        if isinstance(queues, bool) or not isinstance(queues, int) or not 1 <= queues <= 1024 * len(brokers):
            raise InvalidArgumentError(f"queues must be 1 to {1024 * len(brokers)}, not {queues!r}")
        for broker_name, count in spread_queues(queues, brokers).items():
            self._persist(broker_name, "create_topic", topic, count, count)
        self._routes.forget(topic)
        self._wait_for_route(topic, queues)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages and the offsets committed in it. TopicNotExistError."""
        check_user_topic(topic)
        for broker_name in self.topic_route(topic).brokers:
            try:
                self._persist(broker_name, "delete_topic", topic)
            except TopicNotExistError:
                continue  # an earlier attempt came this far
        self._routes.forget(topic)

    def update_topic(self, topic: str, *, queues: int | None = None, perm: int | None = None) -> None:
        """Change what is given: `queues` in all, which may become more but not fewer, or the permission (4 to read plus
        2 to write). On return every client that asks sees it; others within half a minute.

        TopicNotExistError, IllegalNameError, NoPermissionError (no permission), InvalidArgumentError.
        """
        check_user_topic(topic)
        route = self.topic_route(topic)
        counts = {data.broker_name: data.write_queue_nums for data in route.queues}
        grown: dict[str, int] = {}
        if queues is not None:
            grown = grow_queues({**dict.fromkeys(self._broker_names(), 0), **counts}, queues)
        if perm is not None:
            check_perm(perm)
        for broker_name in counts:
            self._persist(broker_name, "update_topic", topic, grown.get(broker_name), perm)
        for broker_name in grown.keys() - counts.keys():
            if grown[broker_name]:
                self._persist(broker_name, "create_topic", topic, grown[broker_name], grown[broker_name])
                self._persist(broker_name, "update_topic", topic, None, perm, route.order_config)
        self._routes.forget(topic)

    def set_order_config(self, topic: str, config: str | None) -> None:
        """Make a topic an order topic: its messages go to these queues and no others, also while one of the brokers is
        away, so that a sharding key never changes its queue. `config` is ``"broker-a:4;broker-b:2"``; None ends it.

        Every broker that has the topic keeps it. TopicNotExistError; InvalidArgumentError for queues the topic has not.
        """
        route = self.topic_route(check_user_topic(topic))
        held = {data.broker_name: data.write_queue_nums for data in route.queues}
        for broker_name, count in (parse_order_config(config) if config is not None else {}).items():
            if count > held.get(broker_name, 0):
                raise InvalidArgumentError(
                    f"topic {topic!r} has {held.get(broker_name, 0)} queues in {broker_name!r}, not {count}"
                )
        for broker_name in held:
            self._persist(broker_name, "update_topic", topic, None, None, config or "")
        self._routes.forget(topic)

    def order_config(self, topic: str) -> str | None:
        """The queues of an order topic; None for a topic that is none. TopicNotExistError."""
        return self.topic_route(topic).order_config or None

    def topic_stats(self, topic: str) -> TopicStats:
        """What was put into a topic, over all brokers. TopicNotExistError."""
        parts: list[TopicStats] = [
            self._persist(name, "topic_stats", topic) for name in self.topic_route(topic).brokers
        ]
        return add_up(TopicStats, parts)

    def list_topics(self, *, internal: bool = False) -> list[str]:
        """The names of all topics, sorted; with `internal` also the groups' retry and dead-letter topics and the
        server's own."""
        return [topic for topic in self._routes.topics() if internal or not is_internal_topic(topic)]

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
            bounds = self._bounds(queue)
            described.append(QueueDescription(queue, bounds.min_offset, bounds.max_offset))
        return described

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
