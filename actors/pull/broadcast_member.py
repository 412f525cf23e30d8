"""Assigns all queues of the subscribed topics to a push-consumer instance in the mode BROADCASTING, according to the
topics' routes."""

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
    """The assignment of queues to a push-consumer instance in the mode BROADCASTING. It replaces a GroupMember
    (raymq.client.consumer.assignment.group_member); no other process tracks this instance."""

    def __init__(self, instance: InstanceState, routes: RouteCache) -> None:
        self._instance = instance
        self._routes = routes
        self.refusal: SubscriptionConflictError | None = None
        """Always None, that is, the group never refuses the subscription: in BROADCASTING no subscription conflicts
        with another member's."""

    def join(self) -> None:
        """Do nothing: `follow_routes` assigns the queues."""

    def fence(self) -> None:
        """Do nothing: in BROADCASTING no other instance takes over the queues."""

    def release(self) -> None:
        """Release the revoked queues that can be released now."""
        with self._instance.lock:
            self._instance.core.release(time.monotonic())

    def leave(self) -> None:
        """Revoke and release all queues of the push-consumer instance."""
        with self._instance.lock:
            self._instance.core.lose_all()

    def follow_routes(self) -> None:
        """Assign all queues that exist now to the push-consumer instance. Waits for NameServers."""
        wanted = set[MessageQueue]()
        for topic in self._instance.settings.topics:
            try:
                self._routes.invalidate(topic)
                wanted.update(self._routes.get(topic).subscribe_queues)
            except RaymqError as error:
                logger.info(
                    "instance %s cannot read the route of topic %s and keeps its queues: %s",
                    self._instance.name,
                    topic,
                    error,
                )
                wanted.update(queue for queue in self._instance.holding() if queue.topic == topic)
        with self._instance.lock:
            self._instance.core.hold(wanted, time.monotonic())
        self._instance.on_committable()
