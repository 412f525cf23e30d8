"""The storage clients of one process, by actor name."""

from __future__ import annotations

import threading

from raymq.storage_client import StorageClient


class Storages:
    """Makes each StorageClient once. Thread-safe. `node_id`: the Ray node of this process."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._lock = threading.Lock()
        self._clients: dict[str, StorageClient] = {}

    def get(self, name: str) -> StorageClient:
        with self._lock:
            client = self._clients.get(name)
            if client is None:
                client = self._clients[name] = StorageClient(name, self._node_id)
            return client

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
