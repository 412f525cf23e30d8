"""ShareConnection is the connection of one share-mode instance to the brokers, in the process of its listener.

The process has joined Ray and has no Client. So the connection makes what a Client has: routes, storage clients, and
heartbeats, by which administrators see the instance, ask for its state, and get its metrics.
"""

from __future__ import annotations

from typing import Final

import ray

from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.settings import SimpleSettings
from raymq.common.namespaces import Namespace
from raymq.common.protocol.clients import ConsumerData
from raymq.remoting.actor_ref import running_nameservers
from raymq.remoting.heartbeats import Heartbeats
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients

FOREVER_S: Final = float("inf")
"""A lease is renewed for as long as its listener call runs. `consume_timeout_s` ends the call."""


class ShareConnection:
    """The engine and the heartbeats of one instance. `engine`: receives, renews and settles messages."""

    def __init__(self, engine: SimpleEngine, heartbeats: Heartbeats, storages: StorageClients) -> None:
        self.engine, self._heartbeats, self._storages = engine, heartbeats, storages

    @classmethod
    def open(cls, settings: PushSettings) -> ShareConnection:
        """Connect, and subscribe to the topics of the settings. Raises TopicNotExistError if a topic does not exist,
        and another RaymqError if no NameServer answers."""
        node_id = ray.get_runtime_context().get_node_id()
        routes, storages = RouteCache(running_nameservers()), StorageClients(node_id)
        heartbeats = Heartbeats(routes, ray.util.get_node_ip_address(), node_id)
        engine = SimpleEngine(
            SimpleSettings(settings.group, settings.start, settings.orderly, auto_renew=True),
            routes=routes,
            storages=storages,
            names=Namespace(settings.namespace),
            announce=lambda engine, data: None,  # the instance announces itself, with the name of its actor
            on_close=lambda engine: None,
            renew_max_s=FOREVER_S,
        )
        connection = cls(engine, heartbeats, storages)
        try:
            for subscription in settings.subscriptions:
                engine.add(subscription)
        except BaseException:
            connection.close(None)
            raise
        return connection

    def announce(self, member: object, data: ConsumerData) -> None:
        """Include a member in the heartbeats, with its description."""
        self._heartbeats.set_consumer(member, data)

    def close(self, member: object) -> None:
        """Take the member out of the heartbeats, and close the connection. Idempotent."""
        try:
            self._heartbeats.remove(member)
            self.engine.close()
        finally:
            self._heartbeats.close()
            self._storages.close()
