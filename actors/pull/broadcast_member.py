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
        """Always None. A GroupMember has this attribute for the error of a refused subscription. In BROADCASTING no
        subscription is refused, because the members' subscriptions need not agree."""

    def join(self) -> None:
        """Do nothing, because a consumer in BROADCASTING mode joins no group: `follow_routes` assigns the
        queues."""

    def fence(self) -> None:
        """Do nothing. In the mode BROADCASTING no other instance takes over this instance's queues. So this instance
        may keep using its queues."""

    def release(self) -> None:
        """Release the revoked queues of the push-consumer instance that can be released now, usually because their
        messages are finished."""
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
