"""GroupMember gets an instance its queues from the group; BroadcastMember, in BROADCASTING, takes all there are.

Both are turned by one thread of the Pull actor for all its instances, so nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from actors.pull.instance_state import InstanceState
from raymq.consumer.rebalance_client import Membership, RebalanceClient
from raymq.errors import RaymqError
from raymq.message import MessageQueue
from raymq.protocol.membership import SESSION_TIMEOUT_S, GroupAssignment, GroupHeartbeat
from raymq.remoting.route_cache import RouteCache

FINISH_TIMEOUT_S: Final = 30.0
"""How long an instance that is stopped waits for its listener and its commits."""
MEMBER_ROUTE_INTERVAL_S: Final = 5.0
PUSH_FENCE_AFTER_S: Final = SESSION_TIMEOUT_S * 0.6
"""How long a member may use its queues after it has sent a heartbeat that was answered. The group's own session begins
no earlier, so it is still running when the member drops the queues."""

logger = logging.getLogger(__name__)


class Member(Protocol):
    """The part of an instance that gets it its queues."""

    def join(self) -> None:
        """Begin."""

    def wake_member(self) -> None:
        """Say soon that a queue was released: another member waits for it."""

    def fence_when_late(self) -> None:
        """Drop all queues if others may have them now."""

    def leave(self) -> None:
        """Say that the instance ends. May wait, for a few seconds at most."""


class GroupMember:
    """CLUSTERING: a member of its group, and the HeartbeatSource of its heartbeats.

    `node_id` is the Ray node this process runs on, for allocation by machine. `on_reset` is called when somebody has
    reset offsets of the group.
    """

    def __init__(
        self, instance: InstanceState, rebalance: RebalanceClient, node_id: str, on_reset: Callable[[], None]
    ) -> None:
        self._instance = instance
        self._rebalance = rebalance
        self._node_id = node_id
        self._on_reset = on_reset
        self._membership: Membership | None = None
        self._lease_until_s = 0.0
        self._offsets_version: int | None = None

    def join(self) -> None:
        """Send heartbeats from now on."""
        self._membership = self._rebalance.join(self._instance.settings.group, self)

    def wake_member(self) -> None:
        """Send the next heartbeat at once: a queue was released, and another member waits for it."""
        if self._membership is not None:
            self._membership.beat_soon()

    def fence_when_late(self) -> None:
        """Drop all queues if the group has not answered for PUSH_FENCE_AFTER_S: others may get them now."""
        if time.monotonic() > self._lease_until_s and self._instance.holding():
            logger.warning(
                "%s was not heard by its group for %.0f s and drops its queues", self._instance.name, PUSH_FENCE_AFTER_S
            )
            self._instance.drop_all()

    def leave(self) -> None:
        """Leave the group; it will notice by itself if this cannot be said."""
        if self._membership is not None:
            self._membership.leave(self._heartbeat(leaving=True))

    def next_heartbeat(self) -> GroupHeartbeat:
        """The heartbeat that names the queues held."""
        return self._heartbeat()

    def assigned(self, assignment: GroupAssignment, sent_s: float) -> None:
        """Take up and give up queues as the group says. The answer renews the lease on those held."""
        self._lease_until_s = sent_s + PUSH_FENCE_AFTER_S
        holding = self._instance.holding()
        if holding - assignment.queues:
            self._instance.revoke(holding - assignment.queues)
        if not self._instance.stopping.is_set():
            self._instance.grant(sorted(assignment.queues), assignment.generation)
        if self._offsets_version not in (None, assignment.offsets_version):
            self._on_reset()
        self._offsets_version = assignment.offsets_version

    def unanswered(self, error: RaymqError) -> None:
        """Go on while the lease lasts."""
        logger.info("%s: %s", self._instance.name, error)

    def _heartbeat(self, *, leaving: bool = False) -> GroupHeartbeat:
        settings = self._instance.settings
        return GroupHeartbeat(
            self._instance.name,
            settings.topics,
            self._instance.holding(),
            leaving,
            allocation=settings.allocation,
            node=self._node_id,
        )


class BroadcastMember:
    """BROADCASTING: holds every queue of the topics, as their routes tell them."""

    def __init__(self, instance: InstanceState, routes: RouteCache) -> None:
        self._instance = instance
        self._routes = routes

    def join(self) -> None:
        """Do nothing: `follow_routes` is called."""

    def wake_member(self) -> None:
        """Do nothing: nobody else waits for a queue."""

    def fence_when_late(self) -> None:
        """Do nothing: nobody else gets the queues."""

    def leave(self) -> None:
        """Do nothing: nobody else knows of this instance."""

    def follow_routes(self) -> None:
        """Hold the queues that there are now. Waits for NameServers."""
        holding, wanted = self._instance.holding(), set[MessageQueue]()
        for topic in self._instance.settings.topics:
            try:
                self._routes.invalidate(topic)
                wanted.update(self._routes.get(topic).subscribe_queues)
            except RaymqError as error:
                logger.info("%s keeps its queues of %s: %s", self._instance.name, topic, error)
                wanted.update(queue for queue in holding if queue.topic == topic)
        if holding - wanted:
            self._instance.revoke(holding - wanted)
        if wanted - holding and not self._instance.stopping.is_set():
            self._instance.grant(sorted(wanted - holding), 0)
