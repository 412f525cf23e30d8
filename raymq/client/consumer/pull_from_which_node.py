"""PullFromWhichNode chooses the replica from which a consumer reads each queue, as RocketMQ's pullFromWhichNode does.

By default a queue is read from the master. Another replica is chosen if an answer named it, or if a call to the master
has failed. A replica that failed is avoided for AVOID_S, if there is another replica. The consumer tries the master
again after STAY_S on another replica. A slave without a connection to its master cannot detect that clients still reach
the master.

This module uses no threads, no clock and no remote calls; times are in s. The state is lost when the process ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from raymq.common.message import MessageQueue

AVOID_S: Final = 5.0
STAY_S: Final = 30.0


class PullFromWhichNode:
    """The replicas from which one consumer instance reads its queues, by the names of storage actors."""

    def __init__(self) -> None:
        self._preferred: dict[MessageQueue, tuple[str, float]] = {}
        self._avoided_until_s: dict[str, float] = {}

    def choose(self, queue: MessageQueue, storages: Sequence[str], now_s: float) -> str:
        """Choose one of `storages` to read a queue from. `storages` has at least one name; the master is first."""
        name, until_s = self._preferred.get(queue, ("", 0.0))
        order = [name, *storages] if name in storages and now_s < until_s else list(storages)
        left = [name for name in order if self._avoided_until_s.get(name, 0.0) <= now_s]
        return left[0] if left else min(order, key=lambda name: self._avoided_until_s[name])

    def answered(self, queue: MessageQueue, name: str, pull_from: str, now_s: float) -> bool:
        """Record that the replica `name` has answered for a queue. `pull_from`: the replica to read from next; empty
        for `name` itself. Returns True if the queue's replica must be chosen again."""
        self._avoided_until_s.pop(name, None)
        known, until_s = self._preferred.get(queue, ("", 0.0))
        if known != (pull_from or name):
            self._prefer(queue, pull_from or name, now_s)
            return bool(pull_from)
        if until_s <= now_s:
            del self._preferred[queue]
            return True
        return bool(pull_from)

    def failed(self, name: str, now_s: float) -> None:
        """Avoid a storage actor for AVOID_S seconds, because a call to it was refused or got no answer."""
        self._avoided_until_s[name] = now_s + AVOID_S

    def _prefer(self, queue: MessageQueue, name: str, now_s: float) -> None:
        kept = {other: entry for other, entry in self._preferred.items() if entry[1] > now_s}
        self._preferred = {**kept, queue: (name, now_s + STAY_S)}
