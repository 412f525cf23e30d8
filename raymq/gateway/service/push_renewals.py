"""PushRenewals renews the leases of messages on which push consumers work. Pure: callers pass the time.

A push consumer of RocketMQ 5 names no invisible time and never asks for more time. So the gateway extends its leases in
place, until the messages are settled or the client has gone. Then the gateway returns the leases, so that other clients
get the messages at once. If the gateway dies, they get the messages after the last lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from raymq.client.consumer.simple.received_message import LeaseId, ReceivedMessage, parse_handle
from raymq.client.consumer.simple.renewal import DueLeases, Renewals
from raymq.gateway.service.polling_receive import GroupCalls

CLIENT_LEASES_MAX: Final = 1000
"""Maximum number of leases of one client and group that are renewed. Further leases are not renewed."""


class DueRenewal(NamedTuple):
    """One call that renews leases: the group's calls, the leases, and the table that notes the answer."""

    calls: GroupCalls
    leases: DueLeases
    table: Renewals


class DueReturn(NamedTuple):
    """One call that returns the leases of a client that has gone, so that other clients get the messages."""

    calls: GroupCalls
    leases: DueLeases


class _GroupLeases:
    """The leases of one group, by client. `owners`: the client of each lease; it may have leases that have ended."""

    def __init__(self, calls: GroupCalls) -> None:
        self.calls = calls
        self.tables: dict[str, Renewals] = {}
        self.owners: dict[LeaseId, str] = {}

    def tidy(self) -> None:
        """Forget the owners of leases that have ended, and the clients without leases."""
        self.tables = {client_id: table for client_id, table in self.tables.items() if len(table)}
        self.owners = {
            lease_id: client_id
            for lease_id, client_id in self.owners.items()
            if client_id in self.tables and lease_id in self.tables[client_id]
        }


class PushRenewals:
    """The leases that one gateway renews, by group and client. Times are in s, of any one clock."""

    def __init__(self) -> None:
        self._held: dict[str, _GroupLeases] = {}

    def __len__(self) -> int:
        return sum(len(table) for group in self._held.values() for table in group.tables.values())

    def hold(
        self,
        client_id: str,
        calls: GroupCalls,
        messages: Sequence[ReceivedMessage],
        invisible_ms: int,
        leased_s: float,
    ) -> None:
        """Begin to renew messages that a client received at `leased_s`. `calls`: the calls of the client's group."""
        group = self._held.setdefault(calls.group, _GroupLeases(calls))
        table = group.tables.setdefault(client_id, Renewals())
        if len(table) < CLIENT_LEASES_MAX:
            table.hold(messages, invisible_ms, leased_s)
            group.owners.update((message._receipt.lease_id, client_id) for message in messages)

    def settle(self, group: str, topic: str, handles: Iterable[str]) -> None:
        """Renew messages no more, because they were acknowledged, moved or forwarded. Any client may settle a
        message."""
        held = self._held.get(group)
        if held is None:
            return
        for handle in handles:
            receipt, offset = parse_handle(group, topic, handle)
            table = held.tables.get(held.owners.get(receipt.lease_id, ""))
            if table is not None:
                table.settle([(receipt, f"{1 << offset - receipt.start:x}")])

    def due(self, now_s: float) -> list[DueRenewal]:
        """Return the calls to make now. Forgets leases that have ended."""
        for name, group in list(self._held.items()):
            group.tidy()
            if not group.tables:
                del self._held[name]
        owners = [(group.calls, table) for group in self._held.values() for table in group.tables.values()]
        return [DueRenewal(calls, leases, table) for calls, table in owners for leases in table.due(now_s)]

    def release(self, client_id: str) -> list[DueReturn]:
        """Renew nothing more of a client that has gone. Returns the calls that return its leases."""
        gone = [(group.calls, group.tables.pop(client_id, None)) for group in self._held.values()]
        return [DueReturn(calls, leases) for calls, table in gone if table is not None for leases in table.release()]
