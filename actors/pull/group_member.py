"""How a Pull actor comes to its queues: as a member of its group, or, in BROADCASTING, by taking all there are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from actors.pull.shared import InstanceState
from raymq.consumer.rebalance_client import RebalanceClient
from raymq.errors import RaymqError
from raymq.message import MessageQueue
from raymq.protocol.membership import MEMBER_HEARTBEAT_INTERVAL_S, SESSION_TIMEOUT_S, GroupAssignment, GroupHeartbeat
from raymq.remoting.route_cache import RouteCache

LEAVE_TIMEOUT_S: Final = 30.0
MEMBER_ROUTE_INTERVAL_S: Final = 5.0
PUSH_FENCE_AFTER_S: Final = SESSION_TIMEOUT_S * 0.6
"""Counted from the sending of the last heartbeat that was answered: the group's own count begins no earlier."""

logger = logging.getLogger(__name__)


class GroupMember:
    """CLUSTERING: heartbeats to the group's Rebalance actor, once a second and after a queue was let go.

    `on_reset` is called when somebody has reset offsets of the group.
    """

    def __init__(
        self, shared: InstanceState, rebalance: RebalanceClient, room: str, on_reset: Callable[[], None]
    ) -> None:
        self._shared = shared
        self._rebalance = rebalance
        self._room = room
        self._on_reset = on_reset
        self._beat_now = threading.Event()
        self._lease_until_s = 0.0
        self._offsets_version: int | None = None

    def wake(self) -> None:
        """A queue was let go; say so at once, somebody waits for it."""
        self._beat_now.set()

    def fence_when_late(self) -> None:
        """Not heard by the group for long, others may get the queues: deliver and commit nothing more of them."""
        if time.monotonic() > self._lease_until_s and self._shared.holding():
            logger.warning(
                "%s was not heard by its group for %.0f s and drops its queues", self._shared.name, PUSH_FENCE_AFTER_S
            )
            self._shared.drop_all()

    def run(self) -> None:
        """Until the instance is stopped; then leave."""
        while not self._shared.stopping.is_set():
            try:
                self._beat_and_take()
            except Exception:  # a bug: without this thread the instance would lose its queues for ever
                logger.exception("%s failed to say a heartbeat, trying again", self._shared.name)
            self.fence_when_late()
            if not self._shared.release():
                self._beat_now.wait(MEMBER_HEARTBEAT_INTERVAL_S)
            self._beat_now.clear()
        self._leave()

    def _beat_and_take(self) -> None:
        try:
            assignment = self._beat()
        except RaymqError as error:
            logger.info("%s: %s", self._shared.name, error)
            return
        held = self._shared.holding()
        if held - assignment.queues:
            self._shared.revoke(held - assignment.queues)
        self._shared.grant(sorted(assignment.queues), assignment.generation)
        if self._offsets_version not in (None, assignment.offsets_version):
            self._on_reset()
        self._offsets_version = assignment.offsets_version

    def _beat(self, *, leaving: bool = False) -> GroupAssignment:
        """Say what is held. The answer renews the lease on it."""
        settings, sent_s = self._shared.settings, time.monotonic()
        assignment = self._rebalance.heartbeat(
            GroupHeartbeat(
                self._shared.name,
                settings.topics,
                self._shared.holding(),
                leaving,
                allocation=settings.allocation,
                node=self._room,
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
                self._beat()
            except RaymqError as error:
                logger.info("%s: %s", self._shared.name, error)

        finish_and_release(self._shared, self._beat_now, beat)
        self._shared.drop_all()
        try:
            self._beat(leaving=True)
        except RaymqError as error:
            logger.info("%s leaves without a word, the group will notice: %s", self._shared.name, error)


class BroadcastMember:
    """BROADCASTING: every queue of the topics."""

    def __init__(self, shared: InstanceState, routes: RouteCache) -> None:
        self._shared = shared
        self._routes = routes
        self._wake = threading.Event()

    def wake(self) -> None:
        """A queue was let go."""
        self._wake.set()

    def fence_when_late(self) -> None:
        """Nobody else gets the queues."""

    def run(self) -> None:
        """Until the instance is stopped."""
        while not self._shared.stopping.is_set():
            self._take()
            if not self._shared.release():
                self._wake.wait(MEMBER_ROUTE_INTERVAL_S)
            self._wake.clear()
        finish_and_release(self._shared, self._wake, lambda: None)
        self._shared.drop_all()

    def _take(self) -> None:
        held, wanted = self._shared.holding(), set[MessageQueue]()
        for topic in self._shared.settings.topics:
            try:
                self._routes.forget(topic)
                wanted.update(self._routes.get(topic).subscribe_queues)
            except RaymqError as error:
                logger.info("%s keeps its queues of %s: %s", self._shared.name, topic, error)
                wanted.update(queue for queue in held if queue.topic == topic)
        if held - wanted:
            self._shared.revoke(held - wanted)
        if wanted - held:
            self._shared.grant(sorted(wanted - held), 0)


def finish_and_release(shared: InstanceState, wake: threading.Event, meanwhile: Callable[[], None]) -> None:
    """Let go of all queues, waiting for what is at the listener and for the commits, at most LEAVE_TIMEOUT_S."""
    deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
    shared.revoke(shared.holding())
    while shared.holding() and time.monotonic() < deadline_s:
        shared.release()
        meanwhile()
        wake.wait(0.05)
        wake.clear()
