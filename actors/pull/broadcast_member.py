"""Assigns all queues of its topics, according to their routes, to an instance in BROADCASTING."""

from __future__ import annotations

import logging
import time
from typing import Final

from actors.pull.instance_state import InstanceState
from raymq.common.errors import RaymqError, SubscriptionConflictError
from raymq.common.message import MessageQueue
from raymq.remoting.route_cache import RouteCache

MEMBER_ROUTE_INTERVAL_S: Final = 5.0

logger = logging.getLogger(__name__)


class BroadcastMember:
    """Replaces a GroupMember (raymq.client.consumer.assignment.group_member); no other process tracks this instance."""

    def __init__(self, instance: InstanceState, routes: RouteCache) -> None:
        self._instance = instance
        self._routes = routes
        self.refusal: SubscriptionConflictError | None = None
        """Always None: each instance has messages of its own."""

    def join(self) -> None:
        """Do nothing: `follow_routes` is called."""

    def fence(self) -> None:
        """Do nothing: no other instance gets the queues."""

    def release(self) -> None:
        """Release the revoked queues that may be released."""
        with self._instance.lock:
            self._instance.core.release(time.monotonic())

    def leave(self) -> None:
        """Give up all queues."""
        with self._instance.lock:
            self._instance.core.lose_all()

    def follow_routes(self) -> None:
        """Hold the queues that exist now. Waits for NameServers."""
        wanted = set[MessageQueue]()
        for topic in self._instance.settings.topics:
            try:
                self._routes.invalidate(topic)
                wanted.update(self._routes.get(topic).subscribe_queues)
            except RaymqError as error:
                logger.info("%s keeps its queues of %s: %s", self._instance.name, topic, error)
                wanted.update(queue for queue in self._instance.holding() if queue.topic == topic)
        with self._instance.lock:
            self._instance.core.hold(wanted, time.monotonic())
        self._instance.on_committable()
