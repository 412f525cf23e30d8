"""PullFromWhichNode chooses the replica a consumer reads each of its queues from, as RocketMQ's pullFromWhichNode does.

It is the master, unless an answer named another replica, or the replica last read from failed. For AVOID_S after a
failure a replica is not chosen while another one is left. After STAY_S away from the master it is tried again: a slave
that has lost the master cannot know that others have not.

No threads, no clock, no calls; times are in s. Nothing here survives the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from raymq.common.message import MessageQueue

AVOID_S: Final = 5.0
STAY_S: Final = 30.0


class PullFromWhichNode:
    """The choices of one consumer instance, by the names of storage actors."""

    def __init__(self) -> None:
        self._preferred: dict[MessageQueue, tuple[str, float]] = {}
        self._avoided_until_s: dict[str, float] = {}

    def choose(self, queue: MessageQueue, storages: Sequence[str], now_s: float) -> str:
        """Choose one of `storages` to read a queue from. They are at least one, the master first."""
        name, until_s = self._preferred.get(queue, ("", 0.0))
        order = [name, *storages] if name in storages and now_s < until_s else list(storages)
        left = [name for name in order if self._avoided_until_s.get(name, 0.0) <= now_s]
        return left[0] if left else min(order, key=lambda name: self._avoided_until_s[name])

    def answered(self, queue: MessageQueue, name: str, pull_from: str, now_s: float) -> bool:
        """Note that `name` has answered for a queue. `pull_from` names the replica to read from next; empty for `name`
        itself. Returns True if the queue's replica must be chosen again."""
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
        """Note that a call to a storage actor had no answer, or was refused."""
        self._avoided_until_s[name] = now_s + AVOID_S

    def _prefer(self, queue: MessageQueue, name: str, now_s: float) -> None:
        kept = {other: entry for other, entry in self._preferred.items() if entry[1] > now_s}
        self._preferred = {**kept, queue: (name, now_s + STAY_S)}
