"""Quotas: token buckets for the bytes and messages per second that a user may send to a store or consume from a store.

A bucket holds at most the tokens of one second, and fills at the user's rate. A request larger than the whole bucket is
accepted when the bucket is full, and leaves the bucket in debt. So a large batch waits longer, but not forever. A
request that does not fit takes no tokens, and its client receives the time to wait. The size of a read is known only
after the read. So a read is accepted while the bucket has tokens, and takes its tokens when it is complete.

Each server has its own buckets: a user that sends to three storage actors has three times the rate. Buckets do not
survive a restart; after a restart every bucket is full.
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
        """Add the tokens for the time that has passed until `now_ms`. A clock that goes back adds no tokens."""
        if rate != self.rate:
            self.left = min(self.left, rate)
            self.rate = rate
        self.left = min(rate, self.left + rate * max(0.0, now_ms - self.at_ms) / 1000)
        self.at_ms = max(now_ms, self.at_ms)

    def wait_ms(self, amount: float) -> int:
        """Return the time, in ms, until the bucket has `amount` tokens; 0 if it has them now."""
        missing = min(amount, self.rate) - self.left
        # A deficit of at most 1e-6 tokens is a rounding error: the request need not wait.
        return 0 if missing <= 1e-6 else max(1, math.ceil(missing * 1000 / self.rate))


class Quotas:
    """The token buckets of one server. `bounds` names the two fields of a user that limit bytes and messages per
    second.

    Not thread-safe: the caller holds a lock, for microseconds. Beyond USER_BUCKETS_MAX buckets, the least recently used
    buckets are dropped.
    """

    def __init__(self, bounds: Sequence[str] = SEND_BOUNDS, done: str = "") -> None:
        """`done`: a word that the error texts put before "bytes" and "messages", such as "consumed ". By default it is
        empty."""
        self._bounds, self._done = bounds, done
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def wait_ms(self, user: User, size: int, messages: int, now_ms: float) -> int:
        """Take tokens for `size` bytes and `messages` messages from the user's buckets, or take no tokens.

        Returns 0 if the tokens were taken, or if the user has no quota. Otherwise returns the ms after which the same
        request fits. `now_ms` is a monotonic time.
        """
        return self._take(user, size, messages, now_ms)[1]

    def take(self, user: User, size: int, messages: int, now_ms: float) -> None:
        """Take tokens for a request of `size` bytes and `messages` messages from the user's buckets. Raises
        QuotaExceededError, and takes no tokens, if the buckets do not have enough."""
        what, wait_ms = self._take(user, size, messages, now_ms)
        if wait_ms:
            raise QuotaExceededError(user.name, what, wait_ms)

    def require_left(self, user: User, now_ms: float) -> None:
        """Raise QuotaExceededError if one of the user's token buckets is empty or in debt. Takes no tokens."""
        waits = [(bucket.wait_ms(1), name) for bucket, _, name in self._wanted(user, 0, 0, now_ms)]
        wait_ms, what = max(waits, default=(0, ""))
        if wait_ms:
            raise QuotaExceededError(user.name, what, wait_ms)

    def charge(self, user: User, size: int, messages: int, now_ms: float) -> None:
        """Take tokens for `size` bytes and `messages` messages from the user's buckets, even if a bucket is then in
        debt."""
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
