"""RebalanceClient sends a group's heartbeats to its Rebalance actor, and has a broker start the actor if needed."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Final

from raymq.errors import RaymqError, ServiceNotAvailableError
from raymq.names import RebalanceName
from raymq.protocol.membership import GroupAssignment, GroupHeartbeat
from raymq.remoting.actor_ref import ActorGoneError, ActorRef
from raymq.remoting.route_cache import RouteCache
from raymq.retry import persist_until

REBALANCE_CALL_TIMEOUT_S: Final = 5.0
REBALANCE_FIRST_TIMEOUT_S: Final = 30.0
"""For the first answer: the actor may have been started for it."""
RESET_TIMEOUT_S: Final = 20.0
INTRODUCTIONS_MAX: Final = 3


class RebalanceClient:
    """Sends the heartbeats of one member of a group."""

    def __init__(self, group: str, routes: RouteCache) -> None:
        self._group = group
        self._routes = routes
        self._actor = ActorRef(str(RebalanceName(group)))
        self._lock = threading.Lock()
        self._opened = False
        self._session = self._sequence = self._generation = 0
        self._brokers: list[str] = []

    def heartbeat(self, heartbeat: GroupHeartbeat) -> GroupAssignment:
        """Send one heartbeat and return the group's answer. ServiceNotAvailableError or RequestTimeoutError when the
        group cannot be reached; the assignment held so far is valid until the session times out."""
        with self._lock:
            opened = self._opened
        if not opened:
            self._open()
        for _ in range(INTRODUCTIONS_MAX):
            numbered = self._numbered(heartbeat)
            assignment = self._send(numbered)
            if assignment.session == numbered.session or heartbeat.leaving:
                return assignment
        raise ServiceNotAvailableError(f"group {self._group} does not take up a member: its actor is being restarted")

    def _numbered(self, heartbeat: GroupHeartbeat) -> GroupHeartbeat:
        """The heartbeat with the session, the next sequence number and the latest generation."""
        with self._lock:
            self._sequence += 1
            return replace(heartbeat, session=self._session, sequence=self._sequence, generation=self._generation)

    def _send(self, heartbeat: GroupHeartbeat) -> GroupAssignment:
        timeout_s = REBALANCE_CALL_TIMEOUT_S if heartbeat.session or heartbeat.leaving else REBALANCE_FIRST_TIMEOUT_S
        try:
            assignment: GroupAssignment = self._actor.call("heartbeat", heartbeat, timeout_s=timeout_s)
        except ActorGoneError:
            with self._lock:
                self._opened = False
            raise
        with self._lock:
            self._session = assignment.session
            self._generation = max(self._generation, assignment.generation)
        return assignment

    def _open(self) -> None:
        """Find the group's Rebalance actor, or have a broker start it."""
        if not _runs(self._actor):
            self._start()
        with self._lock:
            self._opened = True

    def _start(self) -> None:
        failure: RaymqError = ServiceNotAvailableError("no broker is registered; see `raymq status`")
        for broker_name in self._broker_names():
            try:
                ActorRef(broker_name).call("open_group", self._group, timeout_s=REBALANCE_CALL_TIMEOUT_S)
            except RaymqError as error:
                failure = error
                continue
            self._actor.drop_handle()
            return
        raise failure

    def _broker_names(self) -> list[str]:
        """The brokers of the cluster; while no NameServer answers, those known before."""
        try:
            self._brokers = sorted(self._routes.brokers())
        except RaymqError:
            if not self._brokers:
                raise
        return self._brokers


def offsets_reset(group: str, timeout_s: float = RESET_TIMEOUT_S) -> None:
    """Tell a group's members, by their next heartbeats, that brokers have reset offsets of the group.

    Safe to repeat. A group without a Rebalance actor has no member to tell; an actor that has just died is followed by
    one whose offsets version is new to every member; both are no error. RequestTimeoutError or ServiceNotAvailableError
    when the actor does not answer: members then learn of the reset when they next commit.
    """
    actor = ActorRef(str(RebalanceName(group)))

    def tell(left_s: float) -> None:
        if _runs(actor):
            actor.call("offsets_reset", timeout_s=left_s)

    persist_until(time.monotonic() + timeout_s, tell)


def _runs(actor: ActorRef) -> bool:
    """True if an actor of this name runs, or is being restarted."""
    try:
        actor.handle()
    except ServiceNotAvailableError:
        return False
    return True
