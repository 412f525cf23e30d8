"""Prefetch bounds how many messages a share-mode instance leases ahead of its listener.

A message that one instance has leased is out of reach of all other instances. So an instance with a slow listener
leases only what its threads can begin now, and all instances of the group stay busy. A quick listener would wait for
each receive. So the bound grows to what the listener has consumed in PREFETCH_S, up to the settings.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from raymq.common.protocol.pop import RECEIVE_MAX_MESSAGES

PREFETCH_S: Final = 0.5
"""An instance leases the messages that its listener consumes in this time in s, but at least one call per thread."""
RATE_WINDOW_S: Final = 0.25
"""Time in s over which the rate of consumed messages is measured."""
ASK_PART: Final = 4
"""A receive asks for at least this fraction (a quarter) of the bound, unless a thread would have nothing to do."""


class Room(NamedTuple):
    """The limits of the next receive: the number of messages, and the bytes of their records. Both are 0 if the
    instance holds enough."""

    messages: int
    size_bytes: int


class Prefetch:
    """The bound of one instance. Times are in s, of any one clock. Not thread-safe.

    `at_once`: the number of messages that the listener's threads can process at the same time. `messages_max` and
    `bytes_max`: the most messages, and bytes of records, that the instance may hold.
    """

    def __init__(self, at_once: int, messages_max: int, bytes_max: int) -> None:
        self._at_once, self._messages_max, self._bytes_max = min(at_once, messages_max), messages_max, bytes_max
        self.bound = self._at_once
        """The number of messages that the instance may hold now."""
        self._since_s: float | None = None
        self._consumed = 0

    def consumed(self, count: int, now_s: float) -> None:
        """Count messages whose listener calls have ended, and adapt the bound to the rate of the last window."""
        if self._since_s is None:
            self._since_s = now_s
        self._consumed += count
        took_s = now_s - self._since_s
        if took_s >= RATE_WINDOW_S:
            wanted = round(self._consumed / took_s * PREFETCH_S)
            self.bound = max(self._at_once, min(wanted, self._messages_max))
            self._since_s, self._consumed = now_s, 0

    def room(self, held: int, held_bytes: int) -> Room:
        """Return what a receive may lease, while the instance holds `held` messages of `held_bytes` bytes."""
        free, free_bytes = self.bound - held, self._bytes_max - held_bytes
        if free <= 0 or free_bytes <= 0 or (held >= self._at_once and free * ASK_PART < self.bound):
            return Room(0, 0)
        return Room(min(free, RECEIVE_MAX_MESSAGES), free_bytes)
