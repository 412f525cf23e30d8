"""The transaction checks at a broker that wait for a producer of their group to poll, and the live producers.

A broker cannot call a client program, so producers poll; a producer is live while it polls. The producer that polls
next gets the next checks of the group, so a producer that hangs gets no checks. If a producer dies after it got a
check, the check of the next round is given to another producer. Memory is bounded: a check that no producer takes is
replaced by the next round's check. If a group has too many checks, the oldest check is dropped. The methods get the
current time as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from raymq.common.protocol.transactions import TransactionCheck

LIVE_S: Final = 10.0
"""Time in seconds since a producer's last poll after which the producer no longer counts as running."""
CHECKS_WAITING_MAX: Final = 2000
"""Maximum number of transaction checks of one group that wait for a producer."""
CHECKS_TAKEN_MAX: Final = 32
"""Maximum number of transaction checks that a client gets in one poll."""


class CheckBoard:
    """The transaction checks that wait at one broker. Not thread-safe."""

    def __init__(self) -> None:
        # Time, in s, of each producer's last poll, by group and client id.
        self._asked_s: dict[str, dict[str, float]] = {}
        # The transaction checks that wait for a producer, by group and transaction id.
        self._waiting: dict[str, dict[str, TransactionCheck]] = {}

    def live_groups(self, now_s: float) -> list[str]:
        """Return the groups that have a live producer."""
        for group, clients in list(self._asked_s.items()):
            live = {client: asked_s for client, asked_s in clients.items() if now_s - asked_s < LIVE_S}
            if live:
                self._asked_s[group] = live
            else:
                del self._asked_s[group]
                self._waiting.pop(group, None)
        return list(self._asked_s)

    def put(self, checks: list[TransactionCheck]) -> None:
        """Enqueue transaction checks (questions for a transaction's outcome), which producers take later. A check
        replaces an earlier check of the same transaction."""
        for check in checks:
            waiting = self._waiting.setdefault(check.producer_group, {})
            waiting.pop(check.transaction_id, None)
            waiting[check.transaction_id] = check
            if len(waiting) > CHECKS_WAITING_MAX:
                del waiting[next(iter(waiting))]

    def take(self, groups: Sequence[str], client_id: str, now_s: float) -> list[TransactionCheck]:
        """Return the next transaction checks for a client that answers for producer groups, and record the time of the
        client's poll for each group. The checks of the first groups come first."""
        taken: list[TransactionCheck] = []
        for group in groups:
            self._asked_s.setdefault(group, {})[client_id] = now_s
            waiting = self._waiting.get(group)
            if waiting:
                taken += [waiting.pop(key) for key in list(waiting)[: CHECKS_TAKEN_MAX - len(taken)]]
        return taken

    def leave(self, group: str, client_id: str) -> None:
        """Remove a producer from the live producers of its group, because the producer has shut down."""
        self._asked_s.get(group, {}).pop(client_id, None)
