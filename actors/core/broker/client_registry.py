"""The producing and consuming clients of a broker, taken from their heartbeats (raymq.common.protocol.clients). Not
durable."""

from __future__ import annotations

from math import inf
from typing import Final

from raymq.common.protocol.clients import CLIENT_EXPIRY_S, ClientHeartbeat, ConsumerConnection, ProducerConnection

_ENDED_MAX: Final = 10_000


class ClientRegistry:
    """The clients of a broker whose last heartbeat is at most CLIENT_EXPIRY_S old. Times are in seconds of a monotonic
    clock."""

    def __init__(self, expiry_s: float = CLIENT_EXPIRY_S, started_s: float = -inf) -> None:
        """`started_s`: the earliest time at which this broker could receive heartbeats."""
        self._expiry_s = expiry_s
        self._known_after_s = started_s + expiry_s
        self._clients: dict[str, tuple[ClientHeartbeat, float]] = {}
        # The ids of clients that unregistered, in the order in which they unregistered; at most _ENDED_MAX ids.
        self._ended: dict[str, None] = {}

    def heartbeat(self, heartbeat: ClientHeartbeat, now_s: float) -> None:
        """Replace the producers and consumers recorded for a client with those in the client's newest
        heartbeat."""
        self._clients[heartbeat.client_id] = (heartbeat, now_s)

    def unregister(self, client_id: str) -> None:
        """Remove a client that has shut down."""
        self._clients.pop(client_id, None)
        self._ended[client_id] = None
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def knows(self, client_id: str, now_s: float) -> bool:
        """Return True if a client is live: it has not unregistered, and has sent a heartbeat recently.

        Soon after `started_s`, also returns True for a client without a heartbeat, because the client may not have sent
        one yet.
        """
        self.expire(now_s)
        return client_id in self._clients or (client_id not in self._ended and now_s < self._known_after_s)

    def expire(self, now_s: float) -> list[str]:
        """Remove the clients that have sent no heartbeat for too long, and return their ids."""
        silent = [name for name, (_, seen_s) in self._clients.items() if now_s - seen_s > self._expiry_s]
        for name in silent:
            del self._clients[name]
        return silent

    def producers(self, now_s: float, group: str | None = None) -> list[ProducerConnection]:
        """Return the producers of a group, or of all groups, sorted by client."""
        self.expire(now_s)
        return sorted(
            ProducerConnection(
                *(client.client_id, client.host, client.pid, name, now_s - seen_s),
                *(client.node, client.language, client.version),
            )
            for client, seen_s in self._clients.values()
            for name in client.producers
            if group in (None, name)
        )

    def subscriptions(self, now_s: float) -> dict[str, frozenset[str]] | None:
        """Return the topics to which the consumers of each group subscribe; groups without consumers are absent.

        Returns None soon after `started_s`, because some clients may not have sent a heartbeat to this broker yet.
        """
        self.expire(now_s)
        if now_s < self._known_after_s:
            return None
        found: dict[str, frozenset[str]] = {}
        for client, _ in self._clients.values():
            for consumer in client.consumers:
                found[consumer.group] = found.get(consumer.group, frozenset()) | consumer.subscriptions.keys()
        return found

    def consumers(self, now_s: float, group: str | None = None) -> list[ConsumerConnection]:
        """Return the consumers of a group, or of all groups, sorted by client."""
        self.expire(now_s)
        found = [
            ConsumerConnection(
                *(client.client_id, client.host, client.pid, consumer, now_s - seen_s, client.node),
                *((consumer.language, consumer.version) if consumer.language else (client.language, client.version)),
            )
            for client, seen_s in self._clients.values()
            for consumer in client.consumers
            if group in (None, consumer.group)
        ]
        return sorted(found, key=lambda connection: (connection.client_id, connection.consumer.group))
