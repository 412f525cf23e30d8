"""A client's cache of routes. A route is refreshed every 30 s, and after a call shows that the route is outdated.

A route that cannot be refreshed stays in use, so clients keep working without NameServers (spec/messaging.md §3.3). A
restarted NameServer may not have received every broker's heartbeat yet. If the route from such a NameServer lacks a
broker, the cache keeps the cached broker. Otherwise consumer groups would briefly share fewer queues. A broker that the
NameServer does return replaces the cached broker, because a broker group may have another master.
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

from raymq.common.errors import AccessDeniedError, RaymqError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.names import AUTO_CREATE_TOPIC, NameServerName, is_internal_topic
from raymq.common.namespaces import nearest_names
from raymq.common.parallel import start_daemon
from raymq.common.protocol.route import BrokerData, TopicRoute, format_order_config
from raymq.common.retry import persist_until
from raymq.remoting.actor_ref import ActorRef

POLL_NAME_SERVER_INTERVAL_S: Final = 30.0
"""Age in seconds at which a cached route is refreshed."""
ASK_AGAIN_AFTER_S: Final = 2.0
"""Time in seconds between a failed refresh of an outdated route and the next attempt. Until then, the outdated route
stays in use."""
ROUTE_CALL_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of one request for routes. All NameServers that the request tries share this time."""
ROUTE_CALL_TIMEOUT_MIN_S: Final = 2.0
"""Minimum part of ROUTE_CALL_TIMEOUT_S, in seconds, that each NameServer gets."""
ROUTES_PER_CALL: Final = 500
"""Maximum number of routes that one call to a NameServer requests."""
CREATE_TIMEOUT_S: Final = 15.0
"""Timeout in seconds of the call in which a broker creates a topic at the topic's first use."""
ROUTE_TIMEOUT_S: Final = 10.0
"""Maximum time in seconds that a consumer waits for a NameServer that can decide if a topic exists."""
TOPIC_NAMES_KEPT_S: Final = 2.0
"""Time in seconds for which a list of all topic names is reused to suggest names for missing topics. Without this
reuse, a client that requests missing topics again and again would request the list each time."""
DEFAULT_TOPIC_QUEUE_NUMS: Final = 4
"""Number of queues per broker group that RocketMQ's producers request if a send creates a topic."""

T = TypeVar("T")


@dataclass(slots=True)
class _Cached:
    """A cached route. If `invalidated` is true, the route must be fetched again before its next use."""

    route: TopicRoute
    valid_until_s: float
    invalidated: bool = False


class RouteCache:
    """The cached routes of one client. Thread-safe."""

    def __init__(self, nameservers: Sequence[NameServerName], *, suggests: bool = False) -> None:
        """`suggests`: if true, a TopicNotExistError names the topics with the most similar names that this process's
        user may see. Servers pass False, because they see the topics of all users."""
        self._nameservers = [ActorRef(str(name)) for name in nameservers]
        self._suggests = suggests
        self._listed: tuple[list[str], float] = ([], 0.0)
        """Cached names of the topics for suggestions, and the monotonic time until which they are valid."""
        self._lock = threading.Lock()
        self._cache: dict[str, _Cached] = {}
        self._outdated: set[str] = set()
        self._refreshing = False

    def get(self, topic: str) -> TopicRoute:
        """Return the topic's route. If NameServers answer, the route is at most 30 s old, or is being refreshed.

        An old route is returned immediately while a thread refreshes it, so a hanging NameServer delays no caller. An
        invalidated route is fetched before this method returns. Raises TopicNotExistError if a NameServer reports that
        the topic does not exist. If the NameServers are unreachable, their error is raised only if no route is cached.
        """
        with self._lock:
            cached = self._cache.get(topic)
            if cached is not None and not cached.invalidated:
                return self._usable(topic, cached)
        try:
            return self._refresh(topic, cached)
        except TopicNotExistError:
            raise TopicNotExistError(topic, self._nearest(topic)) from None

    def cached(self, topic: str) -> TopicRoute | None:
        """Return the topic's route as `get` does, but None if `get` would wait for a NameServer. Does not block."""
        with self._lock:
            cached = self._cache.get(topic)
            return None if cached is None or cached.invalidated else self._usable(topic, cached)

    def _usable(self, topic: str, cached: _Cached) -> TopicRoute:
        """Return a cached route, and refresh it later if it is old. The caller holds the lock."""
        if time.monotonic() >= cached.valid_until_s:
            self._refresh_later(topic)
        return cached.route

    def _nearest(self, topic: str) -> tuple[str, ...]:
        """Return the names of the topics that a user who wrote `topic` may have meant. If no NameServer returns its
        topics, the result is empty and no error is raised: the caller raises TopicNotExistError, which another error
        must not hide."""
        if not self._suggests or is_internal_topic(topic):
            return ()
        names, until_s = self._listed
        if time.monotonic() >= until_s:
            with suppress(RaymqError):
                names = self.topics()
            self._listed = names, time.monotonic() + TOPIC_NAMES_KEPT_S
        return nearest_names(topic, names)

    def fetch(self, topics: Iterable[str]) -> None:
        """Fetch the missing and outdated routes of several topics with few calls.

        If no answer arrives for a topic, its route is not fetched and no error is raised. A later `get` fetches the
        route or raises the reason.
        """
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
        """Return the topic's route. Retries for up to `timeout_s` while no NameServer can decide if the topic
        exists."""
        return persist_until(time.monotonic() + timeout_s, lambda left_s: self.get(topic))

    def get_or_create(self, topic: str, default_topic_queue_nums: int = DEFAULT_TOPIC_QUEUE_NUMS) -> TopicRoute:
        """Return the route of a topic to which the caller sends. Creates the topic if it does not exist and the
        cluster's setting auto_create_topic_enable is on.

        A new topic has up to `default_topic_queue_nums` queues in each broker group (spec/messaging.md §2.5, §3.3). If
        the setting is off, raises TopicNotExistError. Raises NoPermissionError if the topic is not writable. The
        brokers of the route may be unreachable.
        """
        try:
            return self.get(topic).require_permission()
        except TopicNotExistError as missing:
            try:
                creators = self.get(AUTO_CREATE_TOPIC)
            # the topic is not created automatically: automatic creation is off, or this user may not create topics
            except (TopicNotExistError, AccessDeniedError):
                raise missing from None
        nums = default_topic_queue_nums
        counts = {data.broker_name: max(1, min(nums, data.write_queue_nums)) for data in creators.queues}
        layout = format_order_config(counts)
        for broker_name in counts:
            ActorRef(broker_name).call("auto_create_topic", topic, nums, layout, timeout_s=CREATE_TIMEOUT_S)
        self.invalidate(topic)
        return self.get(topic).require_permission()

    def _refresh_later(self, topic: str) -> None:
        """Schedule a refresh of the topic's route in the thread that refreshes routes. The caller holds the
        lock."""
        self._outdated.add(topic)
        if not self._refreshing:
            # At the interpreter's exit no thread starts, and callers keep the cached route. `_refreshing` is set only
            # after the start: a signal handler may raise an exception in the start, and then no thread runs.
            self._refreshing = start_daemon(self._refresh_outdated, name="routes") is not None

    def _refresh_outdated(self) -> None:
        try:
            while True:
                with self._lock:
                    topics, self._outdated = self._outdated, set()
                if not topics:
                    return
                if len(topics) > 1:
                    # First fetch all routes in one call. If this call fails, the loop below refreshes the route of each
                    # topic separately.
                    with suppress(RaymqError):
                        self.fetch(topics)
                for topic in topics:
                    with self._lock:
                        cached = self._cache.get(topic)
                    if cached is not None and time.monotonic() >= cached.valid_until_s:
                        with suppress(TopicNotExistError):
                            self._refresh(topic, cached)
        finally:  # Reset `_refreshing` after a failure, too; otherwise no route would be refreshed again.
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
            # If the cache now holds another entry for the topic, do not replace it: the route was invalidated, or
            # another thread has fetched a newer route.
            if self._cache.get(topic) is cached:
                self._cache[topic] = _Cached(route, time.monotonic() + valid_s)
        return route

    def invalidate(self, topic: str) -> None:
        """Mark the topic's cached route as outdated, so that the next `get` fetches it again. If no NameServer answers,
        that `get` returns the cached route."""
        with self._lock:
            cached = self._cache.get(topic)
            if cached is not None:
                self._cache[topic] = _Cached(cached.route, 0.0, invalidated=True)

    def read(self, topics: Sequence[str]) -> dict[str, TopicRoute]:
        """Return the routes of many topics with one call to a NameServer, bypassing the cache.

        The result has no route for a topic that the NameServer does not have, or whose route may lack a broker. For
        such a topic, `get` raises an error with the reason.
        """
        routes = self._call_any(lambda server, left_s: dict(server.call("topic_routes", topics, timeout_s=left_s)))
        return {topic: route for topic, route in routes.items() if route.complete}

    def topics(self) -> list[str]:
        """Return the names of all topics of the cluster, from one NameServer."""
        return self._call_any(lambda server, left_s: list(server.call("topics", timeout_s=left_s)))

    def brokers(self) -> dict[str, BrokerData]:
        """Return all live broker groups, from one NameServer."""
        return self._call_any(lambda server, left_s: dict(server.call("brokers", timeout_s=left_s)))

    def all_brokers(self) -> dict[str, BrokerData]:
        """Return all live broker groups, from a NameServer that has every broker's heartbeat."""
        return self._call_any(lambda server, left_s: dict(server.call("all_brokers", timeout_s=left_s)))

    def clusters(self) -> dict[str, list[str]]:
        """Return the live broker groups of each cluster, from one NameServer."""
        return self._call_any(lambda server, left_s: dict(server.call("clusters", timeout_s=left_s)))

    def list_kv(self, namespace: str) -> dict[str, str]:
        """Return the entries of a namespace of the KV configuration. NameServers are called in their fixed order until
        one answers.

        The first NameServer has the whole configuration. A NameServer that was moved to another node may lack parts.
        """
        return self._call_any(
            lambda server, left_s: dict(server.call("list_kv", namespace, timeout_s=left_s)), self._nameservers
        )

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every NameServer, and return the answers. NameServers do not exchange data, so each must be
        called.

        All NameServers are called even if a call fails; the first failure is raised afterwards. The call must be safe
        to repeat.
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
        """Call NameServers one after another until one answers. The order is `in_order`, or random by default.

        Raises TopicNotExistError only if no NameServer has the topic, because a restarted NameServer may lack brokers.
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
    """Return a topic's route from one NameServer if the route is complete.

    If the route may lack a broker, it is appended to `incomplete`, and ServiceNotAvailableError is raised. Another
    NameServer may then have a complete route.
    """
    route: TopicRoute = server.call("topic_route", topic, timeout_s=timeout_s)
    if not route.complete:
        incomplete.append(route)
        raise ServiceNotAvailableError(f"{server.name} was restarted, and not every broker has registered again yet")
    return route


def _complete_routes(topics: list[str], server: ActorRef, timeout_s: float) -> dict[str, TopicRoute]:
    """Return the routes of several topics from one NameServer. Routes that the NameServer marks as incomplete are
    omitted, because they may lack a broker."""
    routes: dict[str, TopicRoute] = server.call("topic_routes", topics, timeout_s=timeout_s)
    return {topic: route for topic, route in routes.items() if route.complete}


def _merged(known: TopicRoute, newer: TopicRoute) -> TopicRoute:
    """Return the newer of two routes of a topic, with the brokers added that only the older route (`known`) has.

    The layout of all the topic's queues is stored at each of its brokers. So the newer route's layout is used if it has
    one.
    """
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
