"""The storage clients of one process, and a function that calls the master of a broker group with retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue
from raymq.common.retry import persist_until
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient

T = TypeVar("T")


class StorageClients:
    """The storage clients of one process, one per storage actor. Thread-safe. `node_id`: the Ray node of this
    process."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._lock = threading.Lock()
        self._clients: dict[str, StorageClient] = {}

    def get(self, name: str) -> StorageClient:
        """Return the client of the storage actor `name`."""
        with self._lock:
            client = self._clients.get(name)
            if client is None:
                client = self._clients[name] = StorageClient(name, self._node_id)
            return client

    def close(self) -> None:
        """Close all storage clients of this process."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()


def call_master(
    routes: RouteSource,
    storages: StorageClients,
    queue: MessageQueue,
    timeout_s: float,
    call: Callable[[StorageClient, float], T],
) -> T:
    """Return the result of `call(client, seconds_left)`. `client` is the client of the storage actor that is the master
    of the queue's broker group.

    `call` is repeated until it succeeds or `timeout_s` is over, so it must be safe to repeat. After a retryable failure
    the route is fetched again, because another replica may be master now. Raises a failure that is not retryable, or
    else the last failure.
    """

    def attempt(left_s: float) -> T:
        try:
            storage = storages.get(routes.get(queue.topic).master_storage(queue.broker_name))
            return call(storage, left_s)
        except RaymqError as error:
            if error.retryable:
                routes.invalidate(queue.topic)
            raise

    return persist_until(time.monotonic() + timeout_s, attempt)
