"""NamespacedRoutes are the routes of a client's topics within its namespace, by the names that its users know.

A producer works with those names throughout; they become the stored ones where it encodes records
(raymq.client.producer.senders.encoder). What is asked of the NameServers is the stored name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from raymq.common.errors import TopicNotExistError
from raymq.common.namespaces import Namespace
from raymq.common.protocol.route import TopicRoute
from raymq.common.retry import persist_until
from raymq.remoting.master_locator import RouteSource


class NamespacedRoutes:
    """The routes of `routes`, as users of a namespace know the topics. Thread-safe."""

    def __init__(self, routes: RouteSource, names: Namespace) -> None:
        self._routes, self._names = routes, names
        self._shown: dict[str, tuple[TopicRoute, TopicRoute]] = {}
        """By topic, the last route, and the same with the topic's own name."""

    def get(self, topic: str) -> TopicRoute:
        """The topic's route. TopicNotExistError names the topic as it was asked for."""
        with self._as_asked(topic):
            return self._show(topic, self._routes.get(self._names.wrap(topic)))

    def wait(self, topic: str, timeout_s: float) -> TopicRoute:
        """As `get`; while no NameServer knows if the topic exists, ask again, for at most `timeout_s`."""
        return persist_until(time.monotonic() + timeout_s, lambda left_s: self.get(topic))

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute:
        """As `get`; a topic that does not exist is made if the cluster does that."""
        with self._as_asked(topic):
            return self._show(topic, self._routes.get_or_create(self._names.wrap(topic), default_topic_queue_nums))

    def invalidate(self, topic: str) -> None:
        """Have the next `get` fetch the route again."""
        self._routes.invalidate(self._names.wrap(topic))

    def _show(self, topic: str, route: TopicRoute) -> TopicRoute:
        known = self._shown.get(topic)
        if known is None or known[0] is not route:
            known = self._shown[topic] = route, replace(route, topic=topic)
        return known[1]

    @contextmanager
    def _as_asked(self, topic: str) -> Iterator[None]:
        try:
            yield
        except TopicNotExistError:
            raise TopicNotExistError(topic) from None
