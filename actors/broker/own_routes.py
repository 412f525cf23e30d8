"""The routes of a broker's own producers: one broker group, whose topics the broker itself has.

Where a broker's own messages may go belongs here. The NameServer has the routes for clients (actors.nameserver).
"""

from __future__ import annotations

from collections.abc import Callable

from actors.broker.master_store import MasterStore
from actors.core.broker.state import BrokerState
from raymq.common.config.cluster import BrokerSettings
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.route import MASTER_ID, BrokerData, QueueData, TopicRoute


class OwnRoutes:
    """A Producer's RouteSource for one broker group. Nothing is cached.

    `state` returns the broker's state; `auto_create` creates a topic with at most the given number of queues.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        store: MasterStore,
        state: Callable[[], BrokerState],
        auto_create: Callable[[str, int], None],
    ) -> None:
        self._settings, self._store = settings, store
        self._state, self._auto_create = state, auto_create

    def get(self, topic: str) -> TopicRoute:
        """Return the part of a topic's route that lies in this broker group.

        TopicNotExistError. NoPermissionError: the topic may not be written.
        """
        config = self._state().require_topic(topic)
        name = self._settings.broker_name
        data = BrokerData(self._settings.cluster, name, {MASTER_ID: self._store.storage.name})
        queues = QueueData(name, config.read_queue_nums, config.write_queue_nums, config.perm, config.creation_id)
        attributes = TopicAttributes.parse(config.attributes)
        return TopicRoute(topic, {name: data}, (queues,), attributes=attributes).require_writable()

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute:
        """Return the route as `get`, after creating a missing topic if auto_create_topic_enable is on."""
        if topic not in self._state().topics:
            self._auto_create(topic, default_topic_queue_nums)
        return self.get(topic)

    def invalidate(self, topic: str) -> None:
        """Do nothing: no route is cached."""
