"""The clients that produce and consume, from their heartbeats (raymq.protocol.clients). Nothing of it is durable."""

from __future__ import annotations

from raymq.protocol.clients import CLIENT_EXPIRY_S, ClientHeartbeat, ConsumerConnection, ProducerConnection


class ClientRegistry:
    """The clients whose last heartbeat is at most CLIENT_EXPIRY_S old. Times are of any monotonic clock, in s."""

    def __init__(self, expiry_s: float = CLIENT_EXPIRY_S) -> None:
        self._expiry_s = expiry_s
        self._clients: dict[str, tuple[ClientHeartbeat, float]] = {}

    def heartbeat(self, heartbeat: ClientHeartbeat, now_s: float) -> None:
        """Store a client's producers and consumers, in place of those of its last heartbeat."""
        self._clients[heartbeat.client_id] = (heartbeat, now_s)

    def unregister(self, client_id: str) -> None:
        """Drop a client that has ended."""
        self._clients.pop(client_id, None)

    def expire(self, now_s: float) -> list[str]:
        """Drop the clients that were silent for too long; returns their ids."""
        silent = [name for name, (_, seen_s) in self._clients.items() if now_s - seen_s > self._expiry_s]
        for name in silent:
            del self._clients[name]
        return silent

    def producers(self, now_s: float, group: str | None = None) -> list[ProducerConnection]:
        """The producers of a group, or of all, sorted by client."""
        self.expire(now_s)
        return sorted(
            ProducerConnection(client.client_id, client.host, client.pid, name, now_s - seen_s)
            for client, seen_s in self._clients.values()
            for name in client.producers
            if group in (None, name)
        )

    def consumers(self, now_s: float, group: str | None = None) -> list[ConsumerConnection]:
        """The consumers of a group, or of all, sorted by client."""
        self.expire(now_s)
        found = [
            ConsumerConnection(client.client_id, client.host, client.pid, consumer, now_s - seen_s)
            for client, seen_s in self._clients.values()
            for consumer in client.consumers
            if group in (None, consumer.group)
        ]
        return sorted(found, key=lambda connection: (connection.client_id, connection.consumer.group))
