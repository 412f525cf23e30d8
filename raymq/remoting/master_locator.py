"""The storage actor that takes a broker group's writes, as the route said last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from raymq.errors import RaymqError, ServiceNotAvailableError
from raymq.protocol.route import TopicRoute
from raymq.remoting.storage_client import StorageClient


class RouteSource(Protocol):
    """Where a producer learns a topic's queues."""

    def get(self, topic: str) -> TopicRoute: ...

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute: ...

    def forget(self, topic: str) -> None: ...


class MasterLocator:
    """Used by one thread."""

    def __init__(self, broker_name: str, routes: RouteSource, storage: Callable[[str], StorageClient]) -> None:
        self._broker_name, self._routes, self._storage = broker_name, routes, storage
        self._name = ""
        self._client: StorageClient | None = None

    def client(self, topic: str) -> StorageClient:
        """Its client; after `failed`, the route of `topic` is asked again; one that is not known changes nothing.
        ServiceNotAvailableError when none was ever known."""
        if self._client is None:
            try:
                self._name = self._routes.get(topic).master_storage(self._broker_name)
            except RaymqError as error:
                if not self._name:
                    raise ServiceNotAvailableError(
                        f"nobody says which storage actor is {self._broker_name}'s master ({error}); see `raymq status`"
                    ) from error
            self._client = self._storage(self._name)
        return self._client

    def failed(self, topic: str) -> None:
        """An attempt failed: another replica may be master now."""
        self._client = None
        self._routes.forget(topic)
