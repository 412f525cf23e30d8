"""The transaction methods of the Broker actor, which run rounds of transaction checks and give the checks to producers
that poll.

No state of this module needs to survive the broker: the store has the open half messages, and the number of their
checks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from actors.core.transactions.check_board import CheckBoard
from raymq.common.names import CHECK_MAX_TIME_TOPIC, check_group
from raymq.common.protocol.transactions import CheckRound, TransactionCheck

CHECK_ROUND_MAX_S: Final = 60.0
"""Maximum duration, in seconds, of a round of transaction checks. The remaining half messages are checked in the next
round."""


class ControlsStore(Protocol):
    """The methods of MasterStore that call the master's storage actor."""

    def control(self, method: str, *args: Any) -> Any: ...


class TransactionMethods:
    """The Broker's methods for transactions; the Broker actor inherits from this class. Thread-safe."""

    def __init__(self, store: ControlsStore, make_topic: Callable[[str], None]) -> None:
        """`make_topic` creates the readable topic for half messages that are given up after too many checks."""
        self._transaction_store, self._make_topic = store, make_topic
        self._checks = CheckBoard()
        self._checks_lock = threading.Lock()

    def take_transaction_checks(self, group: str, client_id: str) -> list[TransactionCheck]:
        """Return the next transaction checks for a producer of `group`. The call also records that the producer is
        live. Raises IllegalNameError if the group's name is invalid."""
        with self._checks_lock:
            return self._checks.take([check_group(group)], client_id, time.monotonic())

    def take_group_checks(self, groups: Sequence[str], client_id: str) -> list[TransactionCheck]:
        """Return the next transaction checks for a client that answers for several producer groups, such as a gateway.
        The call also records that each group has a live producer. Raises IllegalNameError if a name is invalid."""
        for group in groups:
            check_group(group)
        with self._checks_lock:
            return self._checks.take(groups, client_id, time.monotonic())

    def leave_transaction_checks(self, group: str, client_id: str) -> None:
        """Record that a producer of `group` has shut down, so that it no longer counts as live."""
        with self._checks_lock:
            self._checks.leave(group, client_id)

    def _check_transactions(self) -> None:
        """Find the open transactions of live producer groups whose outcome must be asked for. Keep these transaction
        checks until the producers take them. Begins no further call to the store after CHECK_ROUND_MAX_S."""
        with self._checks_lock:
            groups = self._checks.live_groups(time.monotonic())
        start_ms, end_s = 0, time.monotonic() + CHECK_ROUND_MAX_S
        while True:
            part: CheckRound = self._transaction_store.control("check_transactions", groups, start_ms)
            with self._checks_lock:
                self._checks.put(part.checks)
            if part.given_up:
                self._make_topic(CHECK_MAX_TIME_TOPIC)
            start_ms = part.start_ms
            if not part.more or time.monotonic() >= end_s:
                return
