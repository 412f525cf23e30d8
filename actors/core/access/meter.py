"""Meter: how much users with a quota of consumption may read at one server, and what they have read.

    a fetch, a listener's question for tasks  ▶ require_left, before it ▶ at most `portion` ▶ consumed, with the answer

A portion is a second's worth, so that a user is never in debt for long: a consumer waits then for about a second. What
raymq's own actors read is not counted; what a Pull actor hands to a listener is the listener's user's. Nothing survives
the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

from raymq.common.protocol.listener_tasks import HandOver
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting.access.quotas import Quotas
from raymq.remoting.access.users import CONSUME_BOUNDS, User
from raymq.remoting.lane.calls import decode_result


class Portion(NamedTuple):
    """The most that one request may read: bytes of records, and messages; 0 is no bound."""

    size_bytes: int
    messages: int

    def bytes_of(self, wanted: int) -> int:
        """As many bytes as wanted, or those of the portion."""
        return min(wanted, self.size_bytes) if self.size_bytes else wanted

    def requests_of(self, wanted: list[FetchRequest]) -> list[FetchRequest]:
        """The requests, none of them for more messages than the portion."""
        if not self.messages:
            return wanted
        return [replace(one, max_messages=min(one.max_messages, self.messages)) for one in wanted]


class Consumption(Protocol):
    """The meter behind a server's door, as its lanes know it."""

    def portion(self, user: str) -> Portion | None:
        """The most that a request of a user may read; None for one without a bound."""

    def consumed(self, user: str, size_bytes: int, messages: int) -> None:
        """Note that a user gets messages, with this many bytes of records."""


class Meter:
    """The consumption of one server's users. Thread-safe. `user` finds a user by name; times are in ms, by a monotonic
    clock."""

    def __init__(self, user: Callable[[str], User | None]) -> None:
        self._user = user
        self._lock = threading.Lock()
        self._quotas = Quotas(CONSUME_BOUNDS, "consumed ")

    def portion(self, name: str) -> Portion | None:
        """The most that a request of a user may read; None for one without a bound."""
        user = self._bound(name)
        return None if user is None else Portion(user.consume_bytes_per_second, user.consume_messages_per_second)

    def require_left(self, name: str, now_ms: float) -> None:
        """QuotaExceededError, with the time to wait, while a user has read all that it may."""
        user = self._bound(name)
        if user is not None:
            with self._lock:
                self._quotas.require_left(user, now_ms)

    def consumed(self, name: str, size_bytes: int, messages: int, now_ms: float) -> None:
        """Note that a user gets messages, with this many bytes of records."""
        user = self._bound(name) if messages else None
        if user is not None:
            with self._lock:
                self._quotas.charge(user, size_bytes, messages, now_ms)

    def _bound(self, name: str) -> User | None:
        user = self._user(name)
        return user if user is not None and user.has_consume_bound else None


def weigh_results(results: Sequence[FetchResult]) -> tuple[int, int]:
    """The bytes of records, and the messages, in the answer to a fetch; nothing for one that tells offsets only."""
    read = [one for one in results if one.records]
    return sum(len(one.records) for one in read), sum(one.count for one in read)


def _weigh_hand_over(payload: bytes) -> tuple[int, int]:
    hand_over: HandOver = decode_result(payload, HandOver)
    return sum(one.size_bytes for one in hand_over.tasks), sum(one.count for one in hand_over.tasks)


HANDED_OUT: Final[Mapping[str, Callable[[Any], tuple[int, int]]]] = {  # Any: the answers of all methods
    "fetch": weigh_results,
    "next_tasks": _weigh_hand_over,
}
"""The bytes and messages in the answer of a call that hands some out to consume, by method."""
