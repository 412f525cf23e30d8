"""Renews the leases of messages that a program works on for longer than their invisible time.

    receive ─► hold ─┬─ half of the invisible time ─► one call per broker: extend in place ─► again …
                     ├─ acknowledged, moved to another lease, or the lease has ended: not renewed any more
                     └─ RENEW_MAX_S after the receive: not renewed any more, so others get the messages

Renewals decides which leases are due, without clock and threads; Renewer is its thread. Only the consumer's own process
renews. So the messages of a process that dies are delivered again after their last invisible time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from raymq.client.consumer.simple.received_message import LeaseId, Receipt, ReceivedMessage
from raymq.common.errors import RaymqError
from raymq.common.parallel import require_daemon
from raymq.common.protocol.pop import ALL_OFFSETS, LeasePart

RENEW_MAX_S: Final = 3 * 3600.0
"""Time in s after a receive for which its messages are renewed. It is RocketMQ's renewMaxTimeMillis."""
RENEWED_MIN_S: Final = 2.0
"""Minimum invisible time in s of messages that are renewed."""
RENEW_TOGETHER_S: Final = 5.0
"""Leases that are due within this time in s of another lease of their broker are renewed in the same call."""
RENEW_AGAIN_S: Final = 1.0
"""Pause in s before a failed renewal is repeated."""
RENEW_TIMEOUT_S: Final = 5.0
"""Timeout in s of one renewal. It is short, because one thread renews the leases of all brokers."""

logger = logging.getLogger(__name__)

Extend = Callable[[str, list[LeasePart], int, float], list[bool]]
"""Function that extends leases at a broker, given its name, the leases, the invisible time in ms and a timeout in s.
Returns False for each lease that has ended."""


@dataclass(slots=True)
class _RenewedLease:
    """A lease that is renewed. `offsets`: its messages that are not acknowledged yet, as bits. `due_s`: when it is
    renewed next. `until_s`: when the renewals end. `valid_until_s`: when the lease ends if it is not renewed again."""

    receipt: Receipt
    offsets: int
    invisible_ms: int
    due_s: float
    until_s: float
    valid_until_s: float


class DueLeases(NamedTuple):
    """Leases of one broker that are renewed in one call, for one invisible time."""

    broker_name: str
    invisible_ms: int
    leases: dict[LeaseId, LeasePart]


class Renewals:
    """The leases of one consumer that are renewed, each for `max_s` after its receive. Times are in s, of any one
    clock. Not thread-safe."""

    def __init__(self, max_s: float = RENEW_MAX_S) -> None:
        self._max_s = max_s
        self._held: dict[LeaseId, _RenewedLease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, messages: Iterable[ReceivedMessage], invisible_ms: int, leased_s: float) -> None:
        """Begin to renew the leases of received messages, which were leased at `leased_s`."""
        due_s = leased_s + invisible_ms / 2000
        for message in messages:
            receipt = message._receipt
            known = self._held.get(receipt.lease_id)
            if known is None:
                ends_s = leased_s + self._max_s, leased_s + invisible_ms / 1000
                known = _RenewedLease(receipt, 0, invisible_ms, due_s, *ends_s)
                self._held[receipt.lease_id] = known
            known.offsets |= 1 << message.queue_offset - receipt.start

    def settle(self, parts: Iterable[tuple[Receipt, str]]) -> None:
        """Renew messages no more, because they were acknowledged or moved to other leases."""
        for receipt, offsets in parts:
            known = self._held.get(receipt.lease_id)
            if known is not None:
                known.offsets = 0 if offsets == ALL_OFFSETS else known.offsets & ~int(offsets, 16)
                if not known.offsets:
                    del self._held[receipt.lease_id]

    def due(self, now_s: float) -> list[DueLeases]:
        """Return the leases to renew now, and leases that are due soon at the same brokers. Forgets the leases whose
        renewals end."""
        for lease_id in [lease_id for lease_id, held in self._held.items() if held.until_s <= now_s]:
            held = self._held.pop(lease_id)
            logger.warning(
                "the messages of a lease of queue %s:%d were received %.1f h ago and not acknowledged: they are not "
                "renewed any more, and are delivered again",
                *(held.receipt.topic, held.receipt.queue_id, self._max_s / 3600),
            )
        calls: dict[tuple[str, int], DueLeases] = {}
        urgent: set[tuple[str, int]] = set()
        for lease_id, held in self._held.items():
            if held.due_s <= now_s + RENEW_TOGETHER_S:
                key = held.receipt.broker_name, held.invisible_ms
                call = calls.setdefault(key, DueLeases(*key, {}))
                call.leases[lease_id] = held.receipt.part(f"{held.offsets:x}")
                if held.due_s <= now_s:
                    urgent.add(key)
        return [call for key, call in calls.items() if key in urgent]

    def renewed(self, lease_ids: Iterable[LeaseId], results: Iterable[bool], now_s: float) -> None:
        """Note the answer of a renewal that was sent at `now_s`. Leases that have ended are renewed no more."""
        for lease_id, renewed in zip(lease_ids, results, strict=True):
            held = self._held.get(lease_id)
            if held is not None and renewed:
                held.due_s = now_s + held.invisible_ms / 2000
                held.valid_until_s = now_s + held.invisible_ms / 1000
            elif held is not None:
                del self._held[lease_id]

    def failed(self, lease_ids: Iterable[LeaseId], now_s: float, *, retryable: bool) -> None:
        """Note that a renewal failed. It is repeated after RENEW_AGAIN_S, or never if it is not retryable."""
        for lease_id in lease_ids:
            held = self._held.get(lease_id)
            if held is not None and retryable:
                held.due_s = now_s + RENEW_AGAIN_S
            elif held is not None:
                del self._held[lease_id]

    def valid_until_s(self, lease_id: LeaseId) -> float:
        """Return the time at which a lease ends if it is not renewed again; 0 if the lease is not renewed."""
        held = self._held.get(lease_id)
        return 0.0 if held is None else held.valid_until_s

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._held

    def release(self) -> list[DueLeases]:
        """Renew nothing any more. Returns the leases that were renewed, by broker."""
        calls: dict[str, DueLeases] = {}
        for lease_id, held in self._held.items():
            name = held.receipt.broker_name
            call = calls.setdefault(name, DueLeases(name, held.invisible_ms, {}))
            call.leases[lease_id] = held.receipt.part(f"{held.offsets:x}")
        self._held.clear()
        return list(calls.values())

    def next_s(self) -> float | None:
        """Return the time at which the next lease is due; None if no lease is renewed."""
        return min([min(held.due_s, held.until_s) for held in self._held.values()], default=None)


class Renewer:
    """Renews leases in a thread, until `close`, each for `max_s` after its receive. Thread-safe. The thread starts with
    the first lease."""

    def __init__(self, group: str, extend: Extend, max_s: float = RENEW_MAX_S) -> None:
        self._group, self._extend = group, extend
        self._renewals = Renewals(max_s)
        self._changed = threading.Condition()
        self._started = self._closed = False

    def hold(self, messages: Sequence[ReceivedMessage], invisible_ms: int, leased_s: float) -> None:
        """Begin to renew the leases of messages that were leased at `leased_s`, a time of `time.monotonic`'s clock."""
        with self._changed:
            if self._closed:
                return
            self._renewals.hold(messages, invisible_ms, leased_s)
            if not self._started:
                require_daemon(self._run, name=f"renew-{self._group}", what="a simple consumer with auto_renew")
                self._started = True
            self._changed.notify()

    def settle(self, parts: Iterable[tuple[Receipt, str]]) -> None:
        """Renew messages no more, because they were acknowledged or moved to other leases."""
        with self._changed:
            self._renewals.settle(parts)

    def valid_until_s(self, receipt: Receipt) -> float:
        """Return when a lease ends if it is not renewed again, a time of `time.monotonic`'s clock; 0 if the lease is
        not renewed, because its messages are settled or the lease has ended."""
        with self._changed:
            return self._renewals.valid_until_s(receipt.lease_id)

    def close(self) -> None:
        """Renew nothing any more. A renewal under way may still take effect. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                calls: list[DueLeases] = []
                while not calls:
                    next_s = self._renewals.next_s()
                    self._changed.wait(None if next_s is None else max(0.0, next_s - time.monotonic()))
                    if self._closed:
                        return
                    calls = self._renewals.due(time.monotonic())
            for call in calls:
                self._renew(call)

    def _renew(self, call: DueLeases) -> None:
        sent_s = time.monotonic()
        parts = list(call.leases.values())
        try:
            results = self._extend(call.broker_name, parts, call.invisible_ms, RENEW_TIMEOUT_S)
        except RaymqError as error:
            what = "cannot be renewed now" if error.retryable else "cannot be renewed, and are delivered again"
            logger.log(
                logging.INFO if error.retryable else logging.WARNING,
                "the leases of group %s at broker %s %s: %s",
                *(self._group, call.broker_name, what, error),
            )
            with self._changed:
                self._renewals.failed(call.leases, time.monotonic(), retryable=error.retryable)
            return
        with self._changed:
            self._renewals.renewed(call.leases, results, sent_s)
