"""Routes as a client keeps them: asked for once, refreshed every 30 s and when a call shows that one is outdated.

A route that cannot be refreshed stays in use, so clients go on while NameServers are gone (spec/messaging.md §3.3).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from raymq.errors import RaymqError, TopicNotExistError
from raymq.names import NameServerName
from raymq.ray_calls import ActorRef
from raymq.route import BrokerData, TopicRoute

POLL_NAME_SERVER_INTERVAL_S: Final = 30.0
ASK_AGAIN_AFTER_S: Final = 2.0
"""How long an outdated route serves after an attempt to refresh it has failed."""
CALL_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


@dataclass(slots=True)
class _Cached:
    route: TopicRoute
    valid_until_s: float


class Routes:
    """The routes one client knows. Thread-safe."""

    def __init__(self, nameservers: Sequence[NameServerName]) -> None:
        self._nameservers = [ActorRef(str(name)) for name in nameservers]
        self._lock = threading.Lock()
        self._cache: dict[str, _Cached] = {}

    def get(self, topic: str) -> TopicRoute:
        """The topic's route, at most 30 s old if a NameServer answers.

        Raises TopicNotExistError when a NameServer says so; the failure to reach any only if no route is known.
        """
        with self._lock:
            cached = self._cache.get(topic)
        if cached is not None and time.monotonic() < cached.valid_until_s:
            return cached.route
        valid_s = POLL_NAME_SERVER_INTERVAL_S
        try:
            route: TopicRoute = self._ask(lambda server: server.call("topic_route", topic, timeout_s=CALL_TIMEOUT_S))
        except TopicNotExistError:
            with self._lock:
                self._cache.pop(topic, None)
            raise
        except RaymqError:
            if cached is None:
                raise
            route, valid_s = cached.route, ASK_AGAIN_AFTER_S
        with self._lock:
            self._cache[topic] = _Cached(route, time.monotonic() + valid_s)
        return route

    def forget(self, topic: str) -> None:
        """Ask again at the next `get`. If nobody answers then, what was known still serves."""
        with self._lock:
            cached = self._cache.get(topic)
            if cached is not None:
                self._cache[topic] = _Cached(cached.route, 0.0)

    def topics(self) -> list[str]:
        """All topics the cluster knows, as one NameServer answers now."""
        return self._ask(lambda server: list(server.call("topics", timeout_s=CALL_TIMEOUT_S)))

    def brokers(self) -> dict[str, BrokerData]:
        """All live broker groups, as one NameServer answers now."""
        return self._ask(lambda server: dict(server.call("brokers", timeout_s=CALL_TIMEOUT_S)))

    def _ask(self, question: Callable[[ActorRef], T]) -> T:
        """Put a question to the NameServers in random order until one answers.

        A NameServer that has just been restarted does not know every broker yet; so "no such topic" counts only when
        no NameServer knows better.
        """
        failures: list[RaymqError] = []
        for server in random.sample(self._nameservers, len(self._nameservers)):
            try:
                return question(server)
            except RaymqError as error:
                failures.append(error)
        raise next((error for error in failures if isinstance(error, TopicNotExistError)), failures[-1])
