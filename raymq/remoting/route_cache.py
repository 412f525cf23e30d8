"""The routes that a client has cached: fetched once, refreshed every 30 s and when a call shows that one is outdated.

A route that cannot be refreshed stays in use, so clients go on while NameServers are gone (spec/messaging.md §3.3).
Nor does a route lose a broker to a NameServer that was restarted and has not heard of every broker yet: groups would
share out fewer queues for a moment. The brokers that this NameServer does know are taken from it: one of them may have
another master.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Final, TypeVar

from raymq.common.errors import RaymqError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.names import AUTO_CREATE_TOPIC, NameServerName
from raymq.common.protocol.route import BrokerData, TopicRoute, format_order_config
from raymq.common.retry import persist_until
from raymq.remoting.actor_ref import ActorRef

POLL_NAME_SERVER_INTERVAL_S: Final = 30.0
"""Age at which a route is refreshed."""
ASK_AGAIN_AFTER_S: Final = 2.0
"""Time for which an outdated route serves after an attempt to refresh it has failed."""
ROUTE_CALL_TIMEOUT_S: Final = 5.0
"""Bounds the calls to NameServers for one question; several NameServers share it."""
ROUTE_CALL_TIMEOUT_MIN_S: Final = 2.0
"""The least share of ROUTE_CALL_TIMEOUT_S that each NameServer has."""
ROUTES_PER_CALL: Final = 500
"""The most routes that one call asks for."""
CREATE_TIMEOUT_S: Final = 15.0
"""Bounds the call to one broker that creates a topic on its first use."""
ROUTE_TIMEOUT_S: Final = 10.0
"""Bounds a consumer's wait for a NameServer that knows if a topic exists."""
DEFAULT_TOPIC_QUEUE_NUMS: Final = 4
"""Queues per broker group that RocketMQ's producers ask for in a topic that they create by sending to it."""

T = TypeVar("T")


@dataclass(slots=True)
class _Cached:
    """A route; `invalidated`: it must be fetched again before it is used."""

    route: TopicRoute
    valid_until_s: float
    invalidated: bool = False


class RouteCache:
    """The routes one client knows. Thread-safe."""

    def __init__(self, nameservers: Sequence[NameServerName]) -> None:
        self._nameservers = [ActorRef(str(name)) for name in nameservers]
        self._lock = threading.Lock()
        self._cache: dict[str, _Cached] = {}
        self._outdated: set[str] = set()
        self._refreshing = False

    def get(self, topic: str) -> TopicRoute:
        """The topic's route, at most 30 s old or being refreshed while NameServers answer.

        An old route is returned at once and refreshed by a thread, so a NameServer that hangs delays nobody. A route
        that was invalidated is fetched before this returns. Raises TopicNotExistError when a NameServer says so; the
        failure to reach a NameServer only if no route is known.
        """
        with self._lock:
            cached = self._cache.get(topic)
            if cached is not None and not cached.invalidated:
                if time.monotonic() >= cached.valid_until_s:
                    self._refresh_later(topic)
                return cached.route
        return self._refresh(topic, cached)

    def fetch(self, topics: Iterable[str]) -> None:
        """Fetch the routes of several topics in few calls, those that are not known, or not up to date. `get` fetches
        what a NameServer did not tell here, and raises why."""
        now_s = time.monotonic()
        with self._lock:
            known = {topic: self._cache.get(topic) for topic in topics}
        wanted = [topic for topic, one in known.items() if one is None or one.invalidated or now_s >= one.valid_until_s]
        for start in range(0, len(wanted), ROUTES_PER_CALL):
            found = self._call_any(partial(_complete_routes, wanted[start : start + ROUTES_PER_CALL]))
            with self._lock:
                for topic, route in found.items():
                    if self._cache.get(topic) is known[topic]:
                        self._cache[topic] = _Cached(route, time.monotonic() + POLL_NAME_SERVER_INTERVAL_S)

    def wait(self, topic: str, timeout_s: float) -> TopicRoute:
        """As `get`; while no NameServer knows if the topic exists, ask again, for at most `timeout_s`."""
        return persist_until(time.monotonic() + timeout_s, lambda left_s: self.get(topic))

    def get_or_create(self, topic: str, default_topic_queue_nums: int = DEFAULT_TOPIC_QUEUE_NUMS) -> TopicRoute:
        """The route of a topic that is to be sent to.

        A topic that does not exist is created if the cluster's auto_create_topic_enable says so, with up to
        `default_topic_queue_nums` queues in each broker group (spec/messaging.md §2.5, §3.3), else TopicNotExistError.
        NoPermissionError if nothing may be written to it. The brokers that take its messages may be away.
        """
        try:
            return self.get(topic).require_permission()
        except TopicNotExistError:
            try:
                creators = self.get(AUTO_CREATE_TOPIC)
            except TopicNotExistError:
                raise TopicNotExistError(topic) from None
        nums = default_topic_queue_nums
        counts = {data.broker_name: max(1, min(nums, data.write_queue_nums)) for data in creators.queues}
        layout = format_order_config(counts)
        for broker_name in counts:
            ActorRef(broker_name).call("auto_create_topic", topic, nums, layout, timeout_s=CREATE_TIMEOUT_S)
        self.invalidate(topic)
        return self.get(topic).require_permission()

    def _refresh_later(self, topic: str) -> None:
        """Have the topic's route refreshed by the one thread that does so. Called with the lock."""
        self._outdated.add(topic)
        if not self._refreshing:
            threading.Thread(target=self._refresh_outdated, name="routes", daemon=True).start()
            self._refreshing = True  # not before: a signal handler may raise in `start`

    def _refresh_outdated(self) -> None:
        try:
            while True:
                with self._lock:
                    topics, self._outdated = self._outdated, set()
                if not topics:
                    return
                if len(topics) > 1:
                    with suppress(RaymqError):  # then each is tried alone
                        self.fetch(topics)
                for topic in topics:
                    with self._lock:
                        cached = self._cache.get(topic)
                    if cached is not None and time.monotonic() >= cached.valid_until_s:
                        with suppress(TopicNotExistError):
                            self._refresh(topic, cached)
        finally:  # also after a fault, or nothing would be refreshed any more
            with self._lock:
                self._refreshing = False

    def _refresh(self, topic: str, cached: _Cached | None) -> TopicRoute:
        valid_s = POLL_NAME_SERVER_INTERVAL_S
        incomplete: list[TopicRoute] = []
        try:
            route = self._call_any(lambda server, left_s: _complete_route(server, topic, incomplete, left_s))
        except RaymqError as error:
            gone = isinstance(error, TopicNotExistError)
            known = incomplete if cached is None or gone else [cached.route, *incomplete]
            if not known:
                with self._lock:
                    if gone:
                        self._cache.pop(topic, None)
                raise
            route, valid_s = reduce(_merged, known), ASK_AGAIN_AFTER_S
        with self._lock:
            # Otherwise it was invalidated meanwhile, or another thread has fetched a newer one.
            if self._cache.get(topic) is cached:
                self._cache[topic] = _Cached(route, time.monotonic() + valid_s)
        return route

    def invalidate(self, topic: str) -> None:
        """Have the next `get` fetch the route again. If no NameServer answers then, the known route still serves."""
        with self._lock:
            cached = self._cache.get(topic)
            if cached is not None:
                self._cache[topic] = _Cached(cached.route, 0.0, invalidated=True)

    def read(self, topics: Sequence[str]) -> dict[str, TopicRoute]:
        """The routes of many topics, as one NameServer answers now, in one call; not cached. A topic that it does not
        know, or of whose brokers it may miss one, is left out: `get` says why."""
        routes = self._call_any(lambda server, left_s: dict(server.call("topic_routes", topics, timeout_s=left_s)))
        return {topic: route for topic, route in routes.items() if route.complete}

    def topics(self) -> list[str]:
        """The names of all topics of the cluster, as one NameServer answers now."""
        return self._call_any(lambda server, left_s: list(server.call("topics", timeout_s=left_s)))

    def brokers(self) -> dict[str, BrokerData]:
        """All live broker groups, as one NameServer answers now."""
        return self._call_any(lambda server, left_s: dict(server.call("brokers", timeout_s=left_s)))

    def all_brokers(self) -> dict[str, BrokerData]:
        """As `brokers`, answered by a NameServer that has run long enough to have heard of every broker."""
        return self._call_any(lambda server, left_s: dict(server.call("all_brokers", timeout_s=left_s)))

    def clusters(self) -> dict[str, list[str]]:
        """The live broker groups of each cluster, as one NameServer answers now."""
        return self._call_any(lambda server, left_s: dict(server.call("clusters", timeout_s=left_s)))

    def list_kv(self, namespace: str) -> dict[str, str]:
        """A namespace of the KV configuration, as the first NameServer in order that answers has it: the first one has
        all of it, another one may have been moved since."""
        return self._call_any(
            lambda server, left_s: dict(server.call("list_kv", namespace, timeout_s=left_s)), self._nameservers
        )

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every NameServer, since they do not talk to each other; returns their answers.

        Each one is called, also when another fails; then the first failure is raised. Safe to repeat.
        """
        answers, failures = [], []
        for server in self._nameservers:
            try:
                answers.append(server.call(method, *args, timeout_s=ROUTE_CALL_TIMEOUT_S))
            except RaymqError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def _call_any(self, call: Callable[[ActorRef, float], T], in_order: Sequence[ActorRef] = ()) -> T:
        """Call one NameServer after another, in random order if none is given, until one answers.

        A NameServer that has just been restarted does not know every broker yet; so TopicNotExistError is raised only
        when no NameServer has the topic.
        """
        failures: list[RaymqError] = []
        timeout_s = max(ROUTE_CALL_TIMEOUT_S / len(self._nameservers), ROUTE_CALL_TIMEOUT_MIN_S)
        for server in in_order or random.sample(self._nameservers, len(self._nameservers)):
            try:
                return call(server, timeout_s)
            except RaymqError as error:
                failures.append(error)
        raise next((error for error in failures if isinstance(error, TopicNotExistError)), failures[-1])


def _complete_route(server: ActorRef, topic: str, incomplete: list[TopicRoute], timeout_s: float) -> TopicRoute:
    """The route as a NameServer knows it. If that may miss a broker, it is appended to `incomplete`, and
    ServiceNotAvailableError is raised: another NameServer may know more."""
    route: TopicRoute = server.call("topic_route", topic, timeout_s=timeout_s)
    if not route.complete:
        incomplete.append(route)
        raise ServiceNotAvailableError(f"{server.name} was restarted and has not heard of every broker yet")
    return route


def _complete_routes(topics: list[str], server: ActorRef, timeout_s: float) -> dict[str, TopicRoute]:
    """The routes as a NameServer knows them, without those that may miss a broker."""
    routes: dict[str, TopicRoute] = server.call("topic_routes", topics, timeout_s=timeout_s)
    return {topic: route for topic, route in routes.items() if route.complete}


def _merged(known: TopicRoute, newer: TopicRoute) -> TopicRoute:
    """A newer route that may miss brokers, completed by those of the known route that it misses. The layout, which each
    broker of a topic knows for all its queues, is the newer one if there is one."""
    missing = known.brokers.keys() - newer.brokers.keys()
    kept = tuple(data for data in known.queues if data.broker_name in missing)
    merged = replace(
        newer,
        brokers={**newer.brokers, **{name: known.brokers[name] for name in missing}},
        queues=tuple(sorted((*newer.queues, *kept), key=lambda data: data.broker_name)),
        complete=known.complete,
        layout=newer.layout or known.layout,
    )
    return next((same for same in (known, newer) if (same, same.complete) == (merged, merged.complete)), merged)
