"""PushRenewals renews the leases of messages on which push consumers work. Pure: callers pass the time.

A push consumer of RocketMQ 5 names no invisible time and never asks for more time. So the gateway extends its leases in
place, until the messages are settled or the client has gone: then other clients get the messages after the last lease.
If the gateway dies, nobody renews its leases, with the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from raymq.client.consumer.simple.received_message import ReceivedMessage, parse_handle
from raymq.client.consumer.simple.renewal import DueLeases, Renewals
from raymq.gateway.service.polling_receive import GroupCalls

CLIENT_LEASES_MAX: Final = 1000
"""Maximum number of leases of one client and group that are renewed. Further leases are not renewed."""


class DueRenewal(NamedTuple):
    """One call that renews leases: the group's calls, the leases, and the table that notes the answer."""

    calls: GroupCalls
    leases: DueLeases
    table: Renewals


class PushRenewals:
    """The leases that one gateway renews, by client and group. Times are in s, of any one clock."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, tuple[GroupCalls, Renewals]]] = {}
        """The calls and the leases of each client, by group and client id."""

    def __len__(self) -> int:
        return sum(len(table) for clients in self._held.values() for _, table in clients.values())

    def hold(
        self,
        client_id: str,
        group: str,
        calls: GroupCalls,
        messages: Sequence[ReceivedMessage],
        invisible_ms: int,
        leased_s: float,
    ) -> None:
        """Begin to renew messages that a client received at `leased_s`."""
        if messages:
            _, table = self._held.setdefault(group, {}).setdefault(client_id, (calls, Renewals()))
            if len(table) < CLIENT_LEASES_MAX:
                table.hold(messages, invisible_ms, leased_s)

    def settle(self, group: str, topic: str, handles: Iterable[str]) -> None:
        """Renew messages no more, because they were acknowledged, moved or forwarded. Any client may settle a
        message."""
        clients = self._held.get(group)
        if clients:
            places = [parse_handle(group, topic, handle) for handle in handles]
            parts = [(receipt, f"{1 << offset - receipt.start:x}") for receipt, offset in places]
            for _, table in clients.values():
                table.settle(parts)

    def due(self, now_s: float, is_alive: Callable[[str], bool]) -> list[DueRenewal]:
        """Return the calls to make now. Forgets the leases of clients that have gone. `is_alive`: returns whether a
        client, by its id, is still there."""
        for group, clients in list(self._held.items()):
            kept = {name: own for name, own in clients.items() if len(own[1]) and is_alive(name)}
            if kept:
                self._held[group] = kept
            else:
                del self._held[group]
        owners = [own for clients in self._held.values() for own in clients.values()]
        return [DueRenewal(calls, leases, table) for calls, table in owners for leases in table.due(now_s)]
