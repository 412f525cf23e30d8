"""A group member's way to its Rebalance actor, which any broker starts when it is not there."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Final

from raymq.errors import RaymqError, ServiceNotAvailableError
from raymq.membership import GroupAssignment, GroupHeartbeat
from raymq.names import RebalanceName
from raymq.ray_calls import ActorGoneError, ActorRef
from raymq.routes import Routes

CALL_TIMEOUT_S: Final = 5.0


class RebalanceClient:
    """Heartbeats of one group's members in this process."""

    def __init__(self, group: str, routes: Routes) -> None:
        self._group = group
        self._routes = routes
        self._actor = ActorRef(str(RebalanceName(group)))
        self._lock = threading.Lock()
        self._opened = False
        self._sequence = time.time_ns()

    def heartbeat(self, heartbeat: GroupHeartbeat) -> GroupAssignment:
        """Say one heartbeat. Raises ServiceNotAvailableError or RequestTimeoutError when the group cannot be reached;
        the assignment held so far is valid until the session times out."""
        with self._lock:
            opened = self._opened
            self._sequence += 1
            heartbeat = replace(heartbeat, sequence=self._sequence)
        if not opened:
            self._open()
        try:
            assignment: GroupAssignment = self._actor.call("heartbeat", heartbeat, timeout_s=CALL_TIMEOUT_S)
        except ActorGoneError:
            with self._lock:
                self._opened = False
            raise
        return assignment

    def _open(self) -> None:
        failure: RaymqError = ServiceNotAvailableError("no broker is registered; see `raymq status`")
        for broker_name in sorted(self._routes.brokers()):
            try:
                ActorRef(broker_name).call("open_group", self._group, timeout_s=CALL_TIMEOUT_S)
            except RaymqError as error:
                failure = error
                continue
            self._actor.forget()
            with self._lock:
                self._opened = True
            return
        raise failure
