"""Quotas: how many bytes and messages a second a user may send to a store, or consume from it, as token buckets.

A bucket holds what may pass at once: a second's worth. Every request takes its part, and the bucket fills at the
user's rate. A request larger than the whole bucket passes when the bucket is full, and leaves it in debt, so that a
large batch waits longer instead of for ever. A request that does not fit takes nothing; the answer is how long to wait.
How much a request reads is known once it has read it: it passes while something is left, and is charged then.

Each server has buckets of its own: with three storage actors a user that sends to all has three times the rate. Nothing
survives a restart, after which every bucket is full.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from raymq.common.errors import QuotaExceededError
from raymq.remoting.access.users import SEND_BOUNDS, User

USER_BUCKETS_MAX: Final = 10_000


@dataclass(slots=True)
class _Bucket:
    rate: float
    left: float
    at_ms: float

    def fill(self, rate: float, now_ms: float) -> None:
        """Bring `left` to `now_ms`. A clock that goes back fills nothing."""
        if rate != self.rate:
            self.left = min(self.left, rate)
            self.rate = rate
        self.left = min(rate, self.left + rate * max(0.0, now_ms - self.at_ms) / 1000)
        self.at_ms = max(now_ms, self.at_ms)

    def wait_ms(self, amount: float) -> int:
        """How long until `amount` may be taken; 0 for now."""
        missing = min(amount, self.rate) - self.left
        # A hair below zero is rounding of the fills, and never a reason to wait.
        return 0 if missing <= 1e-6 else max(1, math.ceil(missing * 1000 / self.rate))


class Quotas:
    """The buckets of one server: `bounds` names the user's bounds of bytes and of messages that they go by. Not
    thread-safe: the caller holds a lock, for microseconds.

    The buckets of users that were quiet for longest are dropped where there are more than USER_BUCKETS_MAX.
    """

    def __init__(self, bounds: Sequence[str] = SEND_BOUNDS, done: str = "") -> None:
        """`done` stands before "bytes" and "messages" in errors."""
        self._bounds, self._done = bounds, done
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def wait_ms(self, user: User, size: int, messages: int, now_ms: float) -> int:
        """Take `size` bytes and `messages` messages from the user's buckets, or nothing of either.

        0: taken, or the user has no quota. Else the time in ms after which the same request fits. `now_ms` is a
        monotonic clock's.
        """
        return self._take(user, size, messages, now_ms)[1]

    def take(self, user: User, size: int, messages: int, now_ms: float) -> None:
        """As `wait_ms`, and QuotaExceededError where the request does not fit."""
        what, wait_ms = self._take(user, size, messages, now_ms)
        if wait_ms:
            raise QuotaExceededError(user.name, what, wait_ms)

    def require_left(self, user: User, now_ms: float) -> None:
        """Take nothing; QuotaExceededError while one of the user's buckets is empty, or in debt."""
        waits = [(bucket.wait_ms(1), name) for bucket, _, name in self._wanted(user, 0, 0, now_ms)]
        wait_ms, what = max(waits, default=(0, ""))
        if wait_ms:
            raise QuotaExceededError(user.name, what, wait_ms)

    def charge(self, user: User, size: int, messages: int, now_ms: float) -> None:
        """Take `size` bytes and `messages` messages from the user's buckets, though they be in debt then."""
        for bucket, amount, _ in self._wanted(user, size, messages, now_ms):
            bucket.left -= amount

    def _take(self, user: User, size: int, messages: int, now_ms: float) -> tuple[str, int]:
        wanted = self._wanted(user, size, messages, now_ms)
        what, wait_ms = "", 0
        for bucket, amount, name in wanted:
            wait = bucket.wait_ms(amount)
            if wait > wait_ms:
                what, wait_ms = name, wait
        if not wait_ms:
            for bucket, amount, _ in wanted:
                bucket.left -= amount
        return what, wait_ms

    def _wanted(self, user: User, size: int, messages: int, now_ms: float) -> list[tuple[_Bucket, int, str]]:
        found = []
        for bound, name, amount in zip(self._bounds, ("bytes", "messages"), (size, messages), strict=True):
            rate = getattr(user, bound)
            if rate:
                bucket = self._buckets.setdefault((user.name, name), _Bucket(rate, rate, now_ms))
                self._buckets.move_to_end((user.name, name))
                bucket.fill(rate, now_ms)
                found.append((bucket, amount, self._done + name))
        while len(self._buckets) > USER_BUCKETS_MAX:
            self._buckets.popitem(last=False)
        return found
