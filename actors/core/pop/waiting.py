"""Waiting receives, grouped by what they wait for, in order of arrival.

How many receives may wait, and which is next, belongs here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import SystemBusyError
from raymq.common.protocol.pop import ReceiveAnswer, ReceiveRequest

WAITING_MAX: Final = 100_000
WAITING_OF_KEY_MAX: Final = 1024
"""RocketMQ's bounds: maxPopPollingSize and popPollingSize."""
FULL_PAUSE_S: Final = 1.0
"""The time after which a client whose receive was refused may try again."""

WaitKey = tuple[str, tuple[str, ...], bool]
"""A group, topics, and True for order mode: receives of one key may take each other's messages."""


@dataclass(slots=True, eq=False)
class WaitingReceive:
    """A receive that waits until `deadline_s` (time.monotonic).

    `looked`: the store was asked for its queues' ends after the receive arrived. Any thread may end it by `answer` or
    `fail`, which must not block.
    """

    request: ReceiveRequest
    deadline_s: float
    answer: Callable[[ReceiveAnswer], None]
    fail: Callable[[BaseException], None]
    looked: bool = False

    @property
    def key(self) -> WaitKey:
        return self.request.group, self.request.topics, self.request.ordered


@dataclass(slots=True)
class WaitingReceives:
    """All waiting receives at one broker. For one thread."""

    _by_key: dict[WaitKey, deque[WaitingReceive]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def add(self, receive: WaitingReceive) -> None:
        """Add a receive after all others. SystemBusyError: too many wait."""
        waiting = self._by_key.setdefault(receive.key, deque())
        if self._count >= WAITING_MAX or len(waiting) >= WAITING_OF_KEY_MAX:
            raise SystemBusyError(
                f"{len(waiting)} receives of group {receive.request.group!r} wait here already, {self._count} of all "
                "groups; receive more messages at once, with fewer consumers",
                FULL_PAUSE_S,
            )
        waiting.append(receive)
        self._count += 1

    def put_back(self, receive: WaitingReceive) -> None:
        """Put a taken receive back before all others."""
        self._by_key.setdefault(receive.key, deque()).appendleft(receive)
        self._count += 1

    def firsts(self) -> list[WaitingReceive]:
        """Return the receive of each key that arrived first."""
        return [waiting[0] for waiting in self._by_key.values()]

    def all(self) -> list[WaitingReceive]:
        """Return all waiting receives."""
        return [receive for waiting in self._by_key.values() for receive in waiting]

    def take(self, receive: WaitingReceive) -> None:
        """Remove a waiting receive."""
        waiting = self._by_key[receive.key]
        waiting.remove(receive)
        self._count -= 1
        if not waiting:
            del self._by_key[receive.key]
