"""Rebalance: the actors that divide the queues of every consumer group among the group's members. A cluster has a few
of them.

This module has the remote methods and threads; actors.core.rebalance.group assigns queues to members, and
actors.core.rebalance.slot_lease assigns groups to actors.

Only the actor's claims of slots survive a crash. A slot is a share of all groups; the claims are in a register, a
key-value store at Ray's GCS. A process that replaces the actor, or takes over one of its slots, rebuilds the groups
from the members' heartbeats. Every call is safe to repeat.

    heartbeats → RebalanceServer ← register thread, once a second: which slots are held
                                 ← route thread, every REBALANCE_ROUTE_INTERVAL_S and when a topic is new

Heartbeats wait for neither thread: they are answered even if no NameServer answers.

The actor may wait for NameServers and for Ray's GCS.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray

from actors import register
from actors.access.authenticated_server import access_for
from actors.actor_class import actor_class
from actors.core.rebalance.server import RebalanceServer, TopicQueues
from actors.core.rebalance.slot_lease import LOOK_INTERVAL_S
from actors.metrics_thread import MetricsThread
from actors.options import PERSISTENT
from raymq.common.config.metrics import MetricsSettings
from raymq.common.errors import RaymqError, TopicNotExistError
from raymq.common.names import NameServerName, RebalanceName
from raymq.common.protocol.membership import SESSION_TIMEOUT_S, GroupRefusal, Heartbeat, HeartbeatAnswer, OtherServer
from raymq.common.protocol.route import MASTER_ID, TopicRoute
from raymq.remoting.route_cache import RouteCache

REBALANCE_ROUTE_INTERVAL_S: Final = 5.0
ROUTES_AT_ONCE: Final = 500
"""Maximum number of topics in one request for routes."""
TOPIC_GONE_AFTER_S: Final = 30.0
"""If no NameServer has a topic for this many seconds, the topic counts as deleted. A shorter absence proves nothing:
restarted NameServers have no topics until brokers have registered."""
FORGET_INTERVAL_S: Final = 5.0

logger = logging.getLogger(__name__)


class Rebalance:
    """The Ray actor that runs a RebalanceServer. The cluster has `servers` such actors; `index` is the number of this
    one."""

    def __init__(
        self,
        index: int,
        servers: int,
        nameservers: Sequence[NameServerName],
        metrics: MetricsSettings | None = None,
    ) -> None:
        self._routes = RouteCache(nameservers)
        self._server = RebalanceServer(index, servers, secrets.token_hex(8), session_timeout_s=SESSION_TIMEOUT_S)
        self._unknown_since_s: dict[str, float] = {}
        self._new_topics = threading.Event()
        self._closed = threading.Event()
        self._looking = threading.Lock()
        """Lock that a thread holds while it checks the register (a key-value store in Ray's GCS) for claims to
        slots."""
        for name, target in (("register", self._follow_register), ("routes", self._follow_routes)):
            threading.Thread(target=target, name=name, daemon=True).start()
        self._metrics = MetricsThread(metrics, "rebalance", str(RebalanceName(index)))

    def heartbeats(self, heartbeats: Sequence[tuple[str, Heartbeat]]) -> list[HeartbeatAnswer]:
        """Record members' heartbeats, each with its group, and return an answer for each heartbeat.

        An answer has the queues that the member is allowed to hold (`GroupAssignment`), or states that they are
        unchanged (`SteadyAnswer`). Otherwise it has the reason why the member must not hold any queue now.
        """
        answers, incomplete = [], False
        for group, heartbeat in heartbeats:
            answer = self._server.heartbeat(group, heartbeat, time.monotonic())
            incomplete = incomplete or getattr(answer, "incomplete", False)
            answers.append(answer)
        if incomplete:
            self._new_topics.set()
        return answers

    def offsets_reset(self, group: str) -> int | OtherServer:
        """Record that brokers have reset offsets of a group.

        Returns the new offsets version, which causes the members to read the new offsets; 0 for a group without
        members.
        """
        return self._server.offsets_reset(group, time.monotonic())

    def conflict(self, group: str, member: str, expressions: Mapping[str, str]) -> GroupRefusal | OtherServer | None:
        """Return the first difference between the filters of a member, by topic, and the other members' filters. Return
        None if all filters agree. The answer's size does not depend on the group's size."""
        return self._server.conflict(group, member, expressions, time.monotonic())

    def describe_group(self, group: str) -> dict[str, Any] | OtherServer:
        """Describe one group, for `raymq group describe`; see RebalanceGroup.describe."""
        return self._server.describe_group(group, time.monotonic())

    def status(self) -> dict[str, Any]:
        """Return the slots (shares of all groups) of this actor, and its groups that have members, for `raymq
        status`."""
        now_s = time.monotonic()
        described = [self._server.describe_group(group, now_s) for group in self._server.groups()]
        return {
            "server": self._server.name,
            "slots": [slot for slot, lease in self._server.leases.items() if lease.valid(now_s)],
            "groups": [group for group in described if isinstance(group, dict)],
        }

    def close(self) -> None:
        """Stop answering heartbeats. Slots (shares of all groups) whose groups have no members are released, so that
        the next holder need not wait."""
        self._closed.set()
        self._metrics.close()
        self._new_topics.set()
        with self._looking:
            for slot, lease in self._server.leases.items():
                if self._server.releasable(slot):
                    register.run(lease.release())

    # Methods that the actor's threads run in a loop

    def _follow_register(self) -> None:
        sweep_at_s = 0.0
        while not self._closed.is_set():
            for slot, lease in self._server.leases.items():
                held = lease.held
                try:
                    with self._looking:
                        register.run(lease.look(time.monotonic, time.time_ns))
                # Ray may raise any error if its GCS does not answer; a slot (a share of all groups) whose lease is not
                # confirmed expires by itself
                except Exception:
                    logger.exception("cannot read the register entry of slot %d; the next round retries", slot)
                if lease.held != held:
                    logger.info("slot %d: the owner in epoch %d is %s", slot, lease.epoch, lease.holder)
            if time.monotonic() >= sweep_at_s:
                sweep_at_s = time.monotonic() + FORGET_INTERVAL_S
                self._server.sweep(time.monotonic())
            self._closed.wait(LOOK_INTERVAL_S)

    def _follow_routes(self) -> None:
        read_all_at_s = 0.0
        while not self._closed.is_set():
            self._new_topics.wait(max(0.0, read_all_at_s - time.monotonic()))
            self._new_topics.clear()
            topics = self._server.unknown_topics()
            if time.monotonic() >= read_all_at_s:
                read_all_at_s = time.monotonic() + REBALANCE_ROUTE_INTERVAL_S
                topics = self._server.topics()
                self._server.forget_topics(topics)
            try:
                self._read_routes(sorted(topics))
            except Exception:  # a programming error must not end this thread: groups would never get new queues
                logger.exception("cannot read routes; the next round retries")
                self._closed.wait(LOOK_INTERVAL_S)

    def _read_routes(self, topics: Sequence[str]) -> None:
        for first in range(0, len(topics), ROUTES_AT_ONCE):
            some = topics[first : first + ROUTES_AT_ONCE]
            try:
                known = self._routes.read(some)
            except RaymqError as error:
                logger.info("cannot read the routes of %d topics; groups keep their queues: %s", len(some), error)
                for topic in some:
                    self._server.set_queues(topic, None)
                continue
            for topic in some:
                self._take_route(topic, known.get(topic) or self._ask_again(topic))

    def _ask_again(self, topic: str) -> TopicRoute | None:
        """Request a topic's route from all NameServers, because the first NameServer has no route or an incomplete
        route. Returns None if no NameServer has a route.

        In that case groups keep their queues (spec/messaging.md §5.2), unless the topic is deleted.
        """
        try:
            self._routes.invalidate(topic)
            return self._routes.get(topic)
        except RaymqError as error:
            logger.info("cannot read the route of topic %s; groups keep their queues: %s", topic, error)
            if isinstance(error, TopicNotExistError) and self._gone_for_long(topic):
                self._server.set_queues(topic, TopicQueues(()))
            return None

    def _take_route(self, topic: str, route: TopicRoute | None) -> None:
        if route is None:
            self._server.set_queues(topic, None)
            return
        self._unknown_since_s.pop(topic, None)
        self._server.set_queues(topic, TopicQueues(tuple(route.subscribe_queues), _machine_rooms(route)))

    def _gone_for_long(self, topic: str) -> bool:
        now_s = time.monotonic()
        return now_s - self._unknown_since_s.setdefault(topic, now_s) > TOPIC_GONE_AFTER_S


def _machine_rooms(route: TopicRoute) -> dict[str, str]:
    """Return the machine room of each broker, by broker name. The room is the Ray node on which the storage actor of
    the broker's master runs."""
    return {name: data.nodes[MASTER_ID] for name, data in route.brokers.items() if MASTER_ID in data.nodes}


def start_rebalance(
    servers: int, nameservers: Sequence[NameServerName], metrics: MetricsSettings | None = None
) -> list[str]:
    """Create the missing Rebalance actors, and return the names of all Rebalance actors. Does not wait until the actors
    answer."""
    names = [str(RebalanceName(index)) for index in range(servers)]
    for index, name in enumerate(names):
        RebalanceActor.options(name=name, get_if_exists=True).remote(
            index, servers, nameservers, metrics, **access_for(name)
        )
    return names


REBALANCE_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 16, "scheduling_strategy": "SPREAD"}
RebalanceActor = ray.remote(**REBALANCE_OPTIONS)(actor_class(Rebalance))
