"""The clients of one gateway process: their kind, their group, and when they were last active. Pure: callers pass the
time.

A client that is unknown here is still served. Its next connection may end at another process, and a restarted process
has an empty list.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from raymq.common.errors import SystemBusyError

CLIENTS_MAX: Final = 10_000
"""Maximum number of clients of one gateway process."""
CLIENT_EXPIRED_S: Final = 60.0
"""Time in seconds without a heartbeat after which a client without a stream counts as gone."""
STREAM_EXPIRED_S: Final = 15.0
"""Time in seconds without a heartbeat after which a client whose stream has ended counts as gone. Clients send a
heartbeat each 10 s. A client whose process was killed has lost its stream."""


@dataclass(slots=True)
class ConnectedClient:
    """One client. `client_type`, `language`: numbers of the protocol. `group`: the consumer group with its namespace,
    empty for a producer. `active_s`: the time of its last heartbeat or settings. `streams`: number of open streams.
    `expires_s`: time in seconds without a heartbeat and without a stream after which it counts as gone."""

    client_type: int
    language: int = 0
    group: str = ""
    active_s: float = 0.0
    streams: int = 0
    expires_s: float = CLIENT_EXPIRED_S


class ConnectedClients:
    """The clients, by id."""

    def __init__(self) -> None:
        self._clients: dict[str, ConnectedClient] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, client_id: str) -> ConnectedClient | None:
        return self._clients.get(client_id)

    def active(self, client_id: str, now_s: float, *, client_type: int, group: str, language: int = 0) -> None:
        """Register a client, or note that it is active. Raises SystemBusyError if the process has CLIENTS_MAX other
        clients."""
        client = self._clients.get(client_id)
        if client is None:
            if len(self._clients) >= CLIENTS_MAX:
                raise SystemBusyError(f"the gateway has {CLIENTS_MAX} clients, its maximum")
            client = self._clients[client_id] = ConnectedClient(client_type)
        client.client_type, client.group, client.active_s = client_type, group or client.group, now_s
        client.language = language or client.language

    def stream_opened(self, client_id: str) -> None:
        """Count a stream of a registered client. The stream keeps the client registered."""
        self._clients[client_id].streams += 1

    def stream_closed(self, client_id: str, now_s: float) -> None:
        client = self._clients.get(client_id)
        if client is not None:
            client.streams, client.active_s = max(client.streams - 1, 0), now_s
            client.expires_s = STREAM_EXPIRED_S

    def forget(self, client_id: str) -> None:
        """Remove a client that has ended. Does nothing if the client is unknown."""
        self._clients.pop(client_id, None)

    def by_language(self) -> dict[int, int]:
        """Return the number of clients of each language. Other threads may call this method."""
        # list() copies the clients in one step of the interpreter, while the event loop changes them
        return dict(Counter(client.language for client in list(self._clients.values())))

    def streams(self) -> int:
        """Return the number of open streams. Other threads may call this method."""
        return sum(client.streams for client in list(self._clients.values()))

    def expire(self, now_s: float) -> list[str]:
        """Remove the clients that have neither a stream nor sent a heartbeat for too long. Returns their ids."""
        gone = [
            client_id
            for client_id, client in self._clients.items()
            if not client.streams and now_s - client.active_s > client.expires_s
        ]
        for client_id in gone:
            del self._clients[client_id]
        return gone
