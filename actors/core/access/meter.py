"""Limits how much users with a consumption quota may read at one server, and counts what they have read.

    a fetch, a listener's question for tasks  ▶ require_left, before it ▶ at most `portion` ▶ consumed, with the answer

A portion is the quota of one second. So a user exceeds its quota by little, and its consumer then waits about a second.
Reads by raymq's own actors are not counted. Messages that a Pull actor passes to a listener count for the listener's
user. No state survives the process.
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
    """Maximum that one request may read: bytes of records, and messages; 0 means no limit."""

    size_bytes: int
    messages: int

    def bytes_of(self, wanted: int) -> int:
        """Return `wanted`, limited to this limit's number of bytes."""
        return min(wanted, self.size_bytes) if self.size_bytes else wanted

    def requests_of(self, wanted: list[FetchRequest]) -> list[FetchRequest]:
        """Return the fetch requests, each limited to this limit's number of messages."""
        if not self.messages:
            return wanted
        return [replace(one, max_messages=min(one.max_messages, self.messages)) for one in wanted]


class Consumption(Protocol):
    """The interface through which a server's lanes (direct socket connections) use the server's meter."""

    def portion(self, user: str) -> ReadLimit | None:
        """Return the limit of what one request of a user may read; None for a user without a limit."""

    def consumed(self, user: str, size_bytes: int, messages: int) -> None:
        """Count messages, with this many bytes of records, that a user receives."""


class Meter:
    """Counts what the users of one server read, and limits users who have a consumption quota. Thread-safe.

    `user` finds a user by name. Times are in ms, by a monotonic clock.
    """

    def __init__(self, user: Callable[[str], User | None]) -> None:
        self._user = user
        self._lock = threading.Lock()
        self._quotas = Quotas(CONSUME_BOUNDS, "consumed ")

    def portion(self, name: str) -> ReadLimit | None:
        """Return the limit of what one request of a user may read; None for a user without a limit."""
        user = self._bound(name)
        return None if user is None else ReadLimit(user.consume_bytes_per_second, user.consume_messages_per_second)

    def require_left(self, name: str, now_ms: float) -> None:
        """Raise QuotaExceededError, with the time to wait, if a user has used up its quota."""
        user = self._bound(name)
        if user is not None:
            with self._lock:
                self._quotas.require_left(user, now_ms)

    def consumed(self, name: str, size_bytes: int, messages: int, now_ms: float) -> None:
        """Count messages, with this many bytes of records, that a user receives."""
        user = self._bound(name) if messages else None
        if user is not None:
            with self._lock:
                self._quotas.charge(user, size_bytes, messages, now_ms)

    def _bound(self, name: str) -> User | None:
        user = self._user(name)
        return user if user is not None and user.has_consume_bound else None


def weigh_results(results: Sequence[FetchResult]) -> tuple[int, int]:
    """Return the bytes of records and the number of messages in the answer to a fetch; (0, 0) if the fetch reads only
    offsets."""
    read = [one for one in results if one.records]
    return sum(len(one.records) for one in read), sum(one.count for one in read)


HANDED_OUT: Final[Mapping[str, Callable[[Any], tuple[int, int]]]] = {"fetch": weigh_results}
"""Functions that return the bytes and the number of messages in an answer, by name of the actor method that returns
messages to consume."""

CONSUMING: Final = frozenset({*HANDED_OUT, "next_tasks"})
"""The calls that return messages to consume, as actor methods or over lanes (direct socket connections)."""
