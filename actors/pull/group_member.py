"""GroupMember gets a Pull actor its queues from the group; BroadcastMember, in BROADCASTING, takes all there are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from actors.pull.instance_state import InstanceState
from raymq.consumer.rebalance_client import RebalanceClient
from raymq.errors import RaymqError
from raymq.message import MessageQueue
from raymq.protocol.membership import MEMBER_HEARTBEAT_INTERVAL_S, SESSION_TIMEOUT_S, GroupAssignment, GroupHeartbeat
from raymq.remoting.route_cache import RouteCache

LEAVE_TIMEOUT_S: Final = 30.0
MEMBER_ROUTE_INTERVAL_S: Final = 5.0
PUSH_FENCE_AFTER_S: Final = SESSION_TIMEOUT_S * 0.6
"""How long a member may use its queues after it has sent a heartbeat that was answered. The group's own session begins
no earlier, so it is still running when the member drops the queues."""

logger = logging.getLogger(__name__)


class GroupMember:
    """CLUSTERING: sends heartbeats to the group's Rebalance actor, once a second and after a queue was released.

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
        self._beat_now = threading.Event()
        self._lease_until_s = 0.0
        self._offsets_version: int | None = None

    def wake_member(self) -> None:
        """Send the next heartbeat at once: a queue was released, and another member waits for it."""
        self._beat_now.set()

    def fence_when_late(self) -> None:
        """Drop all queues if the group has not answered for PUSH_FENCE_AFTER_S: others may get them now."""
        if time.monotonic() > self._lease_until_s and self._instance.holding():
            logger.warning(
                "%s was not heard by its group for %.0f s and drops its queues", self._instance.name, PUSH_FENCE_AFTER_S
            )
            self._instance.drop_all()

    def run(self) -> None:
        """Take part in the group until the instance is stopped; then release the queues and leave."""
        while not self._instance.stopping.is_set():
            try:
                self._follow_assignment()
            except Exception:  # a bug: without this thread the instance would lose its queues for ever
                logger.exception("%s failed to say a heartbeat, trying again", self._instance.name)
            self.fence_when_late()
            if not self._instance.release():
                self._beat_now.wait(MEMBER_HEARTBEAT_INTERVAL_S)
            self._beat_now.clear()
        self._leave()

    def _follow_assignment(self) -> None:
        try:
            assignment = self._send_heartbeat()
        except RaymqError as error:
            logger.info("%s: %s", self._instance.name, error)
            return
        holding = self._instance.holding()
        if holding - assignment.queues:
            self._instance.revoke(holding - assignment.queues)
        self._instance.grant(sorted(assignment.queues), assignment.generation)
        if self._offsets_version not in (None, assignment.offsets_version):
            self._on_reset()
        self._offsets_version = assignment.offsets_version

    def _send_heartbeat(self, *, leaving: bool = False) -> GroupAssignment:
        """Send a heartbeat that names the queues held. The answer renews the lease on them."""
        settings, sent_s = self._instance.settings, time.monotonic()
        assignment = self._rebalance.heartbeat(
            GroupHeartbeat(
                self._instance.name,
                settings.topics,
                self._instance.holding(),
                leaving,
                allocation=settings.allocation,
                node=self._node_id,
            )
        )
        self._lease_until_s = sent_s + PUSH_FENCE_AFTER_S
        return assignment

    def _leave(self) -> None:
        beat_at_s = time.monotonic() + MEMBER_HEARTBEAT_INTERVAL_S

        def beat() -> None:  # a slow listener must not cost the member its session
            nonlocal beat_at_s
            if time.monotonic() < beat_at_s:
                return
            beat_at_s = time.monotonic() + MEMBER_HEARTBEAT_INTERVAL_S
            try:
                self._send_heartbeat()
            except RaymqError as error:
                logger.info("%s: %s", self._instance.name, error)

        finish_and_release(self._instance, self._beat_now, beat)
        self._instance.drop_all()
        try:
            self._send_heartbeat(leaving=True)
        except RaymqError as error:
            logger.info("%s leaves without telling its group, which will notice: %s", self._instance.name, error)


class BroadcastMember:
    """BROADCASTING: holds every queue of the topics, as their routes tell them."""

    def __init__(self, instance: InstanceState, routes: RouteCache) -> None:
        self._instance = instance
        self._routes = routes
        self._wake = threading.Event()

    def wake_member(self) -> None:
        """Look at the routes at once: a queue was released."""
        self._wake.set()

    def fence_when_late(self) -> None:
        """Do nothing: nobody else gets the queues."""

    def run(self) -> None:
        """Hold the queues until the instance is stopped; then release them."""
        while not self._instance.stopping.is_set():
            self._follow_routes()
            if not self._instance.release():
                self._wake.wait(MEMBER_ROUTE_INTERVAL_S)
            self._wake.clear()
        finish_and_release(self._instance, self._wake, lambda: None)
        self._instance.drop_all()

    def _follow_routes(self) -> None:
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
        if wanted - holding:
            self._instance.grant(sorted(wanted - holding), 0)


def finish_and_release(instance: InstanceState, wake: threading.Event, meanwhile: Callable[[], None]) -> None:
    """Revoke all queues and wait, at most LEAVE_TIMEOUT_S, until the listener has ended and the commits are answered.
    `meanwhile` is called every 50 ms or more often."""
    deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
    instance.revoke(instance.holding())
    while instance.holding() and time.monotonic() < deadline_s:
        instance.release()
        meanwhile()
        wake.wait(0.05)
        wake.clear()
