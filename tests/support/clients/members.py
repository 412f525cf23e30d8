"""A stand-in for the Rebalance actor that answers the heartbeats of a group's members, for tests without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from raymq.common.errors import RaymqError
from raymq.common.protocol.membership import GroupAssignment, GroupHeartbeat

BEAT_S = 0.005


class QuickClient:
    """A stand-in for RebalanceClient that answers the heartbeats of group members itself, every few
    milliseconds."""

    def __init__(self, answer: Callable[[GroupHeartbeat], GroupAssignment]) -> None:
        self._answer = answer

    def join(self, group: str, source) -> QuickMembership:
        return QuickMembership(source, self._answer)

    def check(self, group: str, member: str, expressions: Mapping[str, str]) -> None:
        pass

    def close(self) -> None:
        pass


class QuickMembership:
    def __init__(self, source, answer: Callable[[GroupHeartbeat], GroupAssignment]) -> None:
        self._source, self._answer = source, answer
        self._ended, self._soon = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def beat_soon(self) -> None:
        self._soon.set()

    def leave(self, farewell: GroupHeartbeat, timeout_s: float = 1.0) -> None:
        self._ended.set()
        self._soon.set()
        self._thread.join()
        self._send(farewell)

    def _run(self) -> None:
        while not self._ended.is_set():
            heartbeat = self._source.next_heartbeat()
            if heartbeat is not None:
                self._send(heartbeat)
            self._soon.wait(BEAT_S)
            self._soon.clear()

    def _send(self, heartbeat: GroupHeartbeat) -> None:
        sent_s = time.monotonic()
        try:
            assignment = self._answer(heartbeat)
        except RaymqError as error:
            self._source.unanswered(error)
        else:
            if not heartbeat.leaving:
                self._source.assigned(assignment, sent_s)
