"""Limits the reads of users with a consumption quota at one server, and counts them.

    a fetch, a listener's question for tasks  ▶ require_left, before it ▶ at most `portion` ▶ consumed, with the answer

One request may read at most a portion: the quota of one second. So a request can exceed the user's quota by at most one
portion. The user's consumer then waits about a second. Reads by raymq's own actors are not counted. If a Pull actor
passes messages to a listener, they count for the listener's user. The counts are lost when the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting.access.quotas import Quotas
from raymq.remoting.access.users import CONSUME_BOUNDS, User


class ReadLimit(NamedTuple):
    """How much one request may read: a number of bytes of records, and a number of messages; 0 means no limit."""

    size_bytes: int
    messages: int

    def bytes_of(self, wanted: int) -> int:
        """Return `wanted`, the requested maximum number of bytes of a fetch, but at most this limit. A limit of 0 means
        no limit."""
        return min(wanted, self.size_bytes) if self.size_bytes else wanted

    def requests_of(self, wanted: list[FetchRequest]) -> list[FetchRequest]:
        """Return copies of the fetch requests `wanted`, with `max_messages` reduced to at most the `messages` of this
        ReadLimit. If `messages` is 0 (no limit), returns `wanted`."""
        if not self.messages:
            return wanted
        return [replace(one, max_messages=min(one.max_messages, self.messages)) for one in wanted]


class Consumption(Protocol):
    """The methods that lanes (direct socket connections) call to limit and to count the messages that a server's users
    read."""

    def portion(self, user: str) -> ReadLimit | None:
        """Return the limit of how much one request of a user may read; None for a user without a limit."""

    def consumed(self, user: str, size_bytes: int, messages: int) -> None:
        """Charge `messages` messages that a user receives, with `size_bytes` bytes of records, to the user's consume
        quotas."""


class Meter:
    """Counts how much the users of one server read, and limits users who have a consumption quota. Thread-safe.

    `user` finds a user by name. All times are in ms of a monotonic clock.
    """

    def __init__(self, user: Callable[[str], User | None]) -> None:
        self._user = user
        self._lock = threading.Lock()
        self._quotas = Quotas(CONSUME_BOUNDS, "consumed ")

    def portion(self, name: str) -> ReadLimit | None:
        """Return the limit of how much one request of a user may read; None for a user without a limit."""
        user = self._bound(name)
        return None if user is None else ReadLimit(user.consume_bytes_per_second, user.consume_messages_per_second)

    def require_left(self, name: str, now_ms: float) -> None:
        """Raise QuotaExceededError, which states the time to wait, if a user has used up its consumption quota."""
        user = self._bound(name)
        if user is not None:
            with self._lock:
                self._quotas.require_left(user, now_ms)

    def consumed(self, name: str, size_bytes: int, messages: int, now_ms: float) -> None:
        """Charge `messages` messages that a user receives, with `size_bytes` bytes of records, to the user's consume
        quotas."""
        user = self._bound(name) if messages else None
        if user is not None:
            with self._lock:
                self._quotas.charge(user, size_bytes, messages, now_ms)

    def _bound(self, name: str) -> User | None:
        user = self._user(name)
        return user if user is not None and user.has_consume_bound else None


def weigh_results(results: Sequence[FetchResult]) -> tuple[int, int]:
    """Return the total size of the records in the answer to a fetch, in bytes, and the number of messages. Returns (0,
    0) if the fetch reads only offsets."""
    read = [one for one in results if one.records]
    return sum(len(one.records) for one in read), sum(one.count for one in read)


HANDED_OUT: Final[Mapping[str, Callable[[Any], tuple[int, int]]]] = {"fetch": weigh_results}
"""For each actor method that returns messages to consume: the function that counts the bytes and the messages in the
method's answer."""

CONSUMING: Final = frozenset({*HANDED_OUT, "next_tasks"})
"""The names of the calls that return messages to consume, as actor methods or over lanes (direct socket
connections)."""
