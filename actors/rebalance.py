"""Rebalance: shares a consumer group's queues among its members.

A change of its remote methods or threads belongs here; a change of who gets which queue in actors.core.rebalance.

What survives its death: nothing. A new instance is rebuilt from the members' heartbeats (actors.core.rebalance.group).
Every call is safe to repeat. The actor ends itself when the group has had no member for IDLE_EXIT_S.

    heartbeats → RebalanceGroup ← route thread, once every REBALANCE_ROUTE_INTERVAL_S and when a topic is new

Routes are read in a thread of their own, so heartbeats are answered also while no NameServer answers.

May wait for: NameServers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import ray

from actors.actor_class import actor_class
from actors.core.rebalance.group import RebalanceGroup
from actors.options import PERSISTENT
from raymq.errors import RaymqError, TopicNotExistError
from raymq.names import NameServerName
from raymq.protocol.membership import SESSION_TIMEOUT_S, GroupAssignment, GroupHeartbeat
from raymq.protocol.route import MASTER_ID, TopicRoute
from raymq.remoting.route_cache import RouteCache

REBALANCE_ROUTE_INTERVAL_S: Final = 5.0
FIRST_ROUTE_WAIT_S: Final = 1.0
"""A heartbeat with a new topic waits so long for the route, so that its answer has queues already."""
TOPIC_GONE_AFTER_S: Final = 30.0
"""A topic unknown for longer is deleted. Restarted NameServers know no topic until brokers have registered."""
IDLE_EXIT_S: Final = 120.0

logger = logging.getLogger(__name__)


class Rebalance:
    """The shell around one RebalanceGroup."""

    def __init__(self, group: str, nameservers: Sequence[NameServerName]) -> None:
        self._group = group
        self._routes = RouteCache(nameservers)
        self._lock = threading.Lock()
        self._core = RebalanceGroup(
            time.monotonic(),
            session_timeout_s=SESSION_TIMEOUT_S,
            # A restarted instance must wait for a heartbeat of every living member; the first instance need not.
            grace=ray.get_runtime_context().was_current_actor_reconstructed,
            first_version=time.time_ns(),
        )
        self._routes_read = threading.Condition(self._lock)  # for `_read_topics`
        self._read_topics: set[str] = set()
        self._unknown_since_s: dict[str, float] = {}
        self._wake = threading.Event()
        self._last_member_s = time.monotonic()
        threading.Thread(target=self._follow_routes, name="routes", daemon=True).start()
        threading.Thread(target=self._end_when_idle, name="idle", daemon=True).start()

    def heartbeat(self, heartbeat: GroupHeartbeat) -> GroupAssignment:
        """Note a member's heartbeat; returns the queues that it may hold."""
        with self._lock:
            assignment = self._note_heartbeat(heartbeat)
            if not heartbeat.topics <= self._read_topics and not heartbeat.leaving:
                self._wake.set()
                self._routes_read.wait_for(lambda: heartbeat.topics <= self._read_topics, FIRST_ROUTE_WAIT_S)
                assignment = self._note_heartbeat(heartbeat)
        return assignment

    def offsets_reset(self) -> int:
        """Note that brokers have reset offsets of this group; returns the new offsets version, by which members see
        it."""
        with self._lock:
            return self._core.offsets_reset()

    def status(self) -> dict[str, Any]:
        """The group for `raymq group describe`; see RebalanceGroup.describe."""
        now_s = time.monotonic()
        with self._lock:
            self._core.expire(now_s)
            return {"group": self._group, **self._core.describe(now_s)}

    def _note_heartbeat(self, heartbeat: GroupHeartbeat) -> GroupAssignment:
        """Called with the lock."""
        now_s = time.monotonic()
        assignment = self._core.heartbeat(heartbeat, now_s)
        if self._core.members:
            self._last_member_s = now_s
        return assignment

    def _end_when_idle(self) -> None:
        while True:
            time.sleep(IDLE_EXIT_S / 4)
            with self._lock:
                self._core.expire(time.monotonic())
                idle_s = 0.0 if self._core.members else time.monotonic() - self._last_member_s
            if idle_s > IDLE_EXIT_S:
                logger.info("group %s has had no member for %.0f s: its Rebalance actor ends", self._group, idle_s)
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _follow_routes(self) -> None:
        while True:
            self._wake.wait(REBALANCE_ROUTE_INTERVAL_S)
            self._wake.clear()
            with self._lock:
                topics = self._core.topics
                self._read_topics &= topics
            for topic in sorted(topics):
                self._refresh_route(topic)

    def _refresh_route(self, topic: str) -> None:
        """Read a topic's route. Without one the assignment stays (spec/messaging.md §5.2), unless the topic is
        deleted."""
        route: TopicRoute | None = None
        try:
            self._routes.invalidate(topic)
            route = self._routes.get(topic)
        except RaymqError as error:
            logger.info("group %s keeps its assignment of %s: %s", self._group, topic, error)
            gone = isinstance(error, TopicNotExistError) and self._gone_for_long(topic)
        with self._lock:
            if route is not None:
                self._unknown_since_s.pop(topic, None)
                self._core.set_queues(topic, route.subscribe_queues, _machine_rooms(route))
            elif gone:
                self._core.set_queues(topic, ())
            self._read_topics.add(topic)
            self._routes_read.notify_all()

    def _gone_for_long(self, topic: str) -> bool:
        now_s = time.monotonic()
        return now_s - self._unknown_since_s.setdefault(topic, now_s) > TOPIC_GONE_AFTER_S


def _machine_rooms(route: TopicRoute) -> dict[str, str]:
    """Broker name to machine room, which is the Ray node of its master's storage actor."""
    return {name: data.nodes[MASTER_ID] for name, data in route.brokers.items() if MASTER_ID in data.nodes}


REBALANCE_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 16}
RebalanceActor = ray.remote(**REBALANCE_OPTIONS)(actor_class(Rebalance))
