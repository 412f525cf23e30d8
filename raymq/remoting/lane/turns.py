"""Decides which connections of a lane server may send a large frame now. Uses no sockets and no clock.

A small frame fits into the server's shared buffer. A large frame needs a separate buffer while it is received, and the
bytes of all separate buffers are limited. A connection requests a turn before the server reads its large frame:

    GRANTED   read it
    WAITING   leave it in the socket; connections are served in the order of their requests
    REFUSED   the wait would be long: the server sends the client the expected wait, after which the client retries

The expected wait is computed from the number of bytes that wait before the frame, and from the recent speed of finished
frames. A frame larger than the limit is granted if no other frame is being received.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

FIRST_SPEED: Final = 256e6
"""Assumed receive speed of large frames in bytes/s, until the first large frame is finished."""
SLOWEST_SPEED: Final = 1e6
_WEIGHT: Final = 0.2
"""Weight of the newest large frame in the moving average of the receive speed."""

OwnerT = TypeVar("OwnerT", bound=Hashable)


class Turn(Enum):
    """The server's answer to a connection that requests a turn, which is the permission to send a large frame."""

    GRANTED = "granted"
    WAITING = "waiting"
    REFUSED = "refused"


@dataclass(slots=True)
class _Frame:
    size: int
    since_s: float
    """The time, in seconds, at which the frame's turn (the permission to send it) was granted. While the frame waits,
    the time at which the turn was requested."""


class LargeFrames(Generic[OwnerT]):
    """The large frames of one server that are being received or wait for their turn. Each owner (connection) has at
    most one. Only one thread may use this object."""

    def __init__(self, limit_bytes: int, *, longest_wait_s: float) -> None:
        """`limit_bytes`: maximum total size of the large frames that the server receives at the same time.
        `longest_wait_s`: maximum time that a frame waits for its turn (the permission to send it)."""
        self._limit_bytes, self._longest_wait_s = limit_bytes, longest_wait_s
        self._granted: dict[OwnerT, _Frame] = {}
        self._waiting: OrderedDict[OwnerT, _Frame] = OrderedDict()
        self.granted_bytes = self.waiting_bytes = 0
        self._speed = FIRST_SPEED
        self._finished_s = 0.0

    def __len__(self) -> int:
        return len(self._granted) + len(self._waiting)

    def wait_s(self) -> float:
        """Return the expected time, in seconds, that a new large frame would wait for its turn."""
        ahead = self.granted_bytes + self.waiting_bytes
        return ahead / max(self._speed, SLOWEST_SPEED)

    def ask(self, owner: OwnerT, size: int, now_s: float) -> Turn:
        """Request a turn (permission to send a large frame of `size` bytes) for the connection `owner`. The owner must
        not have another large frame."""
        if not self._waiting and self._fits(size):
            self._grant(owner, size, now_s)
            return Turn.GRANTED
        if self.wait_s() > self._longest_wait_s:
            return Turn.REFUSED
        self._waiting[owner] = _Frame(size, now_s)
        self.waiting_bytes += size
        return Turn.WAITING

    def finish(self, owner: OwnerT, now_s: float) -> list[OwnerT]:
        """End the turn of the connection `owner`, whose large frame was handled. Returns the waiting connections
        (owners) that may now send their large frames, in order."""
        frame = self._granted.get(owner)
        if frame is not None:
            took_s = max(now_s - max(self._finished_s, frame.since_s), 1e-6)
            self._speed += _WEIGHT * (frame.size / took_s - self._speed)
            self._finished_s = now_s
        return self.leave(owner, now_s)

    def leave(self, owner: OwnerT, now_s: float) -> list[OwnerT]:
        """Remove the closed connection `owner`, with its large frame. Returns the connections (owners) that have waited
        and may now send their large frames, in order."""
        granted = self._granted.pop(owner, None)
        if granted is not None:
            self.granted_bytes -= granted.size
        waiting = self._waiting.pop(owner, None)
        if waiting is not None:
            self.waiting_bytes -= waiting.size
        next_owners = []
        while self._waiting:
            owner, frame = next(iter(self._waiting.items()))
            if not self._fits(frame.size):
                break
            del self._waiting[owner]
            self.waiting_bytes -= frame.size
            self._grant(owner, frame.size, now_s)
            next_owners.append(owner)
        return next_owners

    def take_overdue(self, now_s: float) -> list[OwnerT]:
        """Return the connections (owners) whose large frames have waited too long for their turn. Also remove these
        connections from the waiting list. The caller refuses their frames."""
        overdue = [owner for owner, frame in self._waiting.items() if now_s - frame.since_s > self._longest_wait_s]
        for owner in overdue:
            self.waiting_bytes -= self._waiting.pop(owner).size
        return overdue

    def next_overdue_s(self) -> float | None:
        """Return the time, in seconds, at which `take_overdue` must be called next; None if no connection waits for its
        turn to send a large frame."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else first.since_s + self._longest_wait_s

    def _fits(self, size: int) -> bool:
        return not self._granted or self.granted_bytes + size <= self._limit_bytes

    def _grant(self, owner: OwnerT, size: int, now_s: float) -> None:
        self._granted[owner] = _Frame(size, now_s)
        self.granted_bytes += size
