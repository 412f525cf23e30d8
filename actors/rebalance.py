"""Rebalance: shares a consumer group's queues among its members.

What survives its death: nothing. A new instance is rebuilt from the members' heartbeats (actors.core.rebalance_group).
Every call is safe to repeat. It ends by itself when the group has had no member for IDLE_EXIT_S.

May wait for: NameServers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import ray

from actors.core.rebalance_group import RebalanceGroup
from actors.options import PERSISTENT
from actors.shell import shell
from raymq.errors import RaymqError
from raymq.membership import SESSION_TIMEOUT_S, GroupAssignment, GroupHeartbeat
from raymq.names import NameServerName
from raymq.routes import Routes

ROUTE_INTERVAL_S: Final = 5.0
IDLE_EXIT_S: Final = 120.0
GRACE_S: Final = SESSION_TIMEOUT_S
"""Whoever has not said by then what it holds has fenced itself."""

_log = logging.getLogger(__name__)


class Rebalance:
    """The shell around one RebalanceGroup."""

    def __init__(self, group: str, nameservers: Sequence[NameServerName]) -> None:
        self._group = group
        self._routes = Routes(nameservers)
        self._lock = threading.Lock()
        # A restarted instance must hear from every living member first; a first one has nobody to wait for.
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._core = RebalanceGroup(
            time.monotonic(), session_timeout_s=SESSION_TIMEOUT_S, grace_s=GRACE_S if restarted else 0.0
        )
        self._routes_at_s: dict[str, float] = {}
        self._last_member_s = time.monotonic()
        threading.Thread(target=self._end_when_idle, name="idle", daemon=True).start()

    def heartbeat(self, heartbeat: GroupHeartbeat) -> GroupAssignment:
        """Hear a member; answers what it may hold."""
        for topic in heartbeat.topics:
            self._refresh_route(topic)
        now_s = time.monotonic()
        with self._lock:
            assignment = self._core.heartbeat(heartbeat, now_s)
            if self._core.members:
                self._last_member_s = now_s
        return assignment

    def status(self) -> dict[str, Any]:
        """Members and who holds what, for `raymq group describe`."""
        with self._lock:
            self._core.expire(time.monotonic())
            return {
                "group": self._group,
                "generation": self._core.generation,
                "members": list(self._core.members),
                "holders": {str(queue): member for queue, member in sorted(self._core.holders().items())},
            }

    def _end_when_idle(self) -> None:
        while True:
            time.sleep(IDLE_EXIT_S / 4)
            with self._lock:
                self._core.expire(time.monotonic())
                idle_s = 0.0 if self._core.members else time.monotonic() - self._last_member_s
            if idle_s > IDLE_EXIT_S:
                _log.info("group %s has had no member for %.0f s: its Rebalance actor ends", self._group, idle_s)
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _refresh_route(self, topic: str) -> None:
        now_s = time.monotonic()
        if now_s - self._routes_at_s.get(topic, -ROUTE_INTERVAL_S) < ROUTE_INTERVAL_S:
            return
        self._routes_at_s[topic] = now_s
        try:
            self._routes.forget(topic)
            queues = self._routes.get(topic).subscribe_queues
        except RaymqError as error:
            # No route, no change: keep the present assignment (spec/messaging.md §5.2).
            _log.info("group %s keeps its assignment of %s: %s", self._group, topic, error)
            return
        with self._lock:
            self._core.set_queues(topic, queues)


OPTIONS: Final = {**PERSISTENT, "max_concurrency": 16}
RebalanceActor = ray.remote(**OPTIONS)(shell(Rebalance))
