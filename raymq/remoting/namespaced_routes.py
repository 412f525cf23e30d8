"""Routes of a client's topics, by the topics' names within the client's namespace.

A producer uses the names within the namespace. The producer's encoder replaces these names by the stored names
(raymq.client.producer.senders.encoder). Requests to NameServers use the stored names.
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
    """A view of the topic routes in `routes`, by topic names without the namespace prefix of `names`.
    Thread-safe."""

    def __init__(self, routes: RouteSource, names: Namespace) -> None:
        self._routes, self._names = routes, names
        self._shown: dict[str, tuple[TopicRoute, TopicRoute]] = {}
        """For each topic name without the namespace's prefix, two routes: the topic's last route, and a copy of this
        route in which the topic has this name."""

    def get(self, topic: str) -> TopicRoute:
        """Return the topic's route. Raises TopicNotExistError if the topic does not exist. The error's text shows the
        topic's name without the namespace prefix."""
        with self._as_asked(topic):
            return self._show(topic, self._routes.get(self._names.wrap(topic)))

    def wait(self, topic: str, timeout_s: float) -> TopicRoute:
        """Return the topic's route. Retries for up to `timeout_s` while no NameServer can decide if the topic
        exists."""
        return persist_until(time.monotonic() + timeout_s, lambda left_s: self.get(topic))

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute:
        """Return the topic's route. Creates the topic if it does not exist and the cluster's settings allow automatic
        creation."""
        with self._as_asked(topic):
            return self._show(topic, self._routes.get_or_create(self._names.wrap(topic), default_topic_queue_nums))

    def invalidate(self, topic: str) -> None:
        """Mark a topic's cached route as outdated, so that the next `get` fetches the route again."""
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
        except TopicNotExistError as error:
            raise TopicNotExistError(topic, tuple(map(self._names.unwrap, error.nearest))) from None
