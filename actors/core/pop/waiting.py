"""Receives of simple consumers that wait for messages. They are grouped by group, topics and order mode, and kept in
order of arrival.

This module limits how many receives wait, and selects the next receive.
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
"""Maximum number of waiting receives with the same key (WaitKey); WAITING_MAX limits the total. RocketMQ's limits are
popPollingSize and maxPopPollingSize."""
FULL_PAUSE_S: Final = 1.0
"""Time, in seconds, after which a client may retry a receive that was rejected because too many receives wait."""

WaitKey = tuple[str, tuple[str, ...], bool | None]
"""The key of a waiting receive: group, topics, and True for order mode, or None for the group's mode. A message can
serve any of the receives with the same key."""


@dataclass(slots=True, eq=False)
class WaitingReceive:
    """A receive that waits for messages until `deadline_s` (time.monotonic).

    `looked`: True if the store has reported the end offsets of the receive's queues after the receive arrived.
    `has_left`: True if nobody waits for the answer any more; the receive then leases nothing. Any thread may finish the
    receive by calling `answer` or `fail`, which must not block.
    """

    request: ReceiveRequest
    deadline_s: float
    answer: Callable[[ReceiveAnswer], None]
    fail: Callable[[BaseException], None]
    looked: bool = False
    has_left: bool = False

    @property
    def key(self) -> WaitKey:
        return self.request.group, self.request.topics, self.request.ordered


@dataclass(slots=True)
class WaitingReceives:
    """All waiting receives at one broker. Not thread-safe."""

    _by_key: dict[WaitKey, deque[WaitingReceive]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def add(self, receive: WaitingReceive) -> None:
        """Add a receive after all other waiting receives. Raises SystemBusyError if too many receives wait."""
        waiting = self._by_key.setdefault(receive.key, deque())
        if self._count >= WAITING_MAX or len(waiting) >= WAITING_OF_KEY_MAX:
            raise SystemBusyError(
                f"{len(waiting)} receives of group {receive.request.group!r} already wait at this broker, "
                f"{self._count} of all groups; use fewer consumers, and receive more messages per call",
                FULL_PAUSE_S,
            )
        waiting.append(receive)
        self._count += 1

    def put_back(self, receive: WaitingReceive) -> None:
        """Put back a receive that `take` has removed. It becomes the first of the waiting receives with its
        key."""
        self._by_key.setdefault(receive.key, deque()).appendleft(receive)
        self._count += 1

    def __contains__(self, receive: WaitingReceive) -> bool:
        return receive in self._by_key.get(receive.key, ())

    def firsts(self) -> list[WaitingReceive]:
        """Return the receives that are next: for each WaitKey, the waiting receive that arrived first."""
        return [waiting[0] for waiting in self._by_key.values()]

    def all(self) -> list[WaitingReceive]:
        """Return all receives (requests of simple consumers) that wait for messages."""
        return [receive for waiting in self._by_key.values() for receive in waiting]

    def take(self, receive: WaitingReceive) -> None:
        """Remove a waiting receive."""
        waiting = self._by_key[receive.key]
        waiting.remove(receive)
        self._count -= 1
        if not waiting:
            del self._by_key[receive.key]
