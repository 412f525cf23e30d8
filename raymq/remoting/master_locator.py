"""Finds, for one sender, the storage actor that is the master of a broker group, from a topic's route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.protocol.route import TopicRoute
from raymq.remoting.storage_client import StorageClient


class RouteSource(Protocol):
    """Interface of the object from which a producer gets routes: a RouteCache or, for a broker's own producer, the
    broker."""

    def get(self, topic: str) -> TopicRoute: ...

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute: ...

    def invalidate(self, topic: str) -> None: ...


class MasterLocator:
    """Finds the master of one broker group, and keeps it until an attempt to use it fails. Used by one thread."""

    def __init__(self, broker_name: str, routes: RouteSource, storage: Callable[[str], StorageClient]) -> None:
        self._broker_name, self._routes, self._storage = broker_name, routes, storage
        self._name = ""
        self._client: StorageClient | None = None

    def locate(self, topic: str) -> StorageClient:
        """Return the storage client of the broker group's master. After `attempt_failed`, this method first fetches the
        route of `topic` again.

        If the route cannot be read, the last master is returned. Raises ServiceNotAvailableError if no master was ever
        found.
        """
        if self._client is None:
            try:
                self._name = self._routes.get(topic).master_storage(self._broker_name)
            except RaymqError as error:
                if not self._name:
                    raise ServiceNotAvailableError(
                        f"the master of broker group {self._broker_name!r} is unknown ({error}); see `raymq status`"
                    ) from error
            self._client = self._storage(self._name)
        return self._client

    def attempt_failed(self, topic: str) -> None:
        """Report that an attempt to use the master failed. The next `locate` fetches the route again, because another
        replica may be master now."""
        self._client = None
        self._routes.invalidate(topic)
