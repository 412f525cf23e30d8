"""Receives of simple consumers that wait for messages. They are grouped by group, topics and order mode, and kept in
order of arrival.

This module limits how many receives wait, and selects the next receive.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final

from raymq.common.errors import SystemBusyError
from raymq.common.protocol.pop import ReceiveAnswer, ReceiveRequest

WAITING_MAX: Final = 100_000
WAITING_OF_KEY_MAX: Final = 1024
"""Maximum number of waiting receives with the same key (WaitKey); WAITING_MAX limits the total. RocketMQ's limits are
popPollingSize and maxPopPollingSize."""
ENDED_DEADLINES_MAX: Final = 64
"""Number of deadlines of ended receives that the heap of deadlines may have beside as many as there are waiting
receives."""
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


class WaitingReceives:
    """All waiting receives at one broker. Not thread-safe. No method but `all` looks at each receive, so that a broker
    with thousands of waiting receives is idle while no message arrives."""

    def __init__(self) -> None:
        self._by_key: dict[WaitKey, OrderedDict[WaitingReceive, None]] = {}
        """The waiting receives by key, in order of arrival."""
        self._count = 0
        self._unlooked: dict[WaitingReceive, None] = {}
        """The waiting receives whose queues the store has not looked at, in order of arrival."""
        self._deadlines: list[tuple[float, int, WaitingReceive]] = []
        """A heap of the deadlines of waiting receives. It also has deadlines of receives that wait no more."""
        self._late: dict[WaitingReceive, None] = {}
        """The waiting receives whose deadline has passed."""
        self._numbers = count()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, receive: WaitingReceive) -> bool:
        return receive in self._by_key.get(receive.key, ())

    def add(self, receive: WaitingReceive) -> None:
        """Add a receive after all other waiting receives. Raises SystemBusyError if too many receives wait."""
        waiting = self._by_key.get(receive.key, ())
        if self._count >= WAITING_MAX or len(waiting) >= WAITING_OF_KEY_MAX:
            raise SystemBusyError(
                f"{len(waiting)} receives of group {receive.request.group!r} already wait at this broker, "
                f"{self._count} of all groups; use fewer consumers, and receive more messages per call",
                FULL_PAUSE_S,
            )
        self._put(receive)

    def put_back(self, receive: WaitingReceive) -> None:
        """Put back a receive that `take` has removed. It becomes the first of the waiting receives with its
        key."""
        self._put(receive).move_to_end(receive, last=False)

    def _put(self, receive: WaitingReceive) -> OrderedDict[WaitingReceive, None]:
        waiting = self._by_key.setdefault(receive.key, OrderedDict())
        waiting[receive] = None
        self._count += 1
        if not receive.looked:
            self._unlooked[receive] = None
        heapq.heappush(self._deadlines, (receive.deadline_s, next(self._numbers), receive))
        if len(self._deadlines) > 2 * self._count + ENDED_DEADLINES_MAX:
            ahead = [one for one in self.all() if one not in self._late]
            self._deadlines = [(one.deadline_s, next(self._numbers), one) for one in ahead]
            heapq.heapify(self._deadlines)
        return waiting

    def firsts(self) -> list[WaitingReceive]:
        """Return the receives that are next: for each WaitKey, the waiting receive that arrived first."""
        return [next(iter(waiting)) for waiting in self._by_key.values()]

    def all(self) -> list[WaitingReceive]:
        """Return all receives (requests of simple consumers) that wait for messages."""
        return [receive for waiting in self._by_key.values() for receive in waiting]

    def unlooked(self) -> list[WaitingReceive]:
        """Return the waiting receives whose queues the store has not looked at since they arrived."""
        return list(self._unlooked)

    def note_looked(self, receives: Iterable[WaitingReceive]) -> None:
        """Note that the store has reported the end offsets of the queues of some receives. They may wait no more."""
        for receive in receives:
            receive.looked = True
            self._unlooked.pop(receive, None)

    def late(self, now_s: float) -> list[WaitingReceive]:
        """Return the waiting receives whose deadline has passed at `now_s`."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            receive = heapq.heappop(self._deadlines)[2]
            if receive in self:
                self._late[receive] = None
        return list(self._late)

    def next_deadline_s(self) -> float:
        """Return the first deadline that has not passed at the last call of `late`; infinity without a deadline."""
        while self._deadlines and self._deadlines[0][2] not in self:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def take(self, receive: WaitingReceive) -> None:
        """Remove a waiting receive."""
        waiting = self._by_key[receive.key]
        del waiting[receive]
        self._count -= 1
        self._unlooked.pop(receive, None)
        self._late.pop(receive, None)
        if not waiting:
            del self._by_key[receive.key]
