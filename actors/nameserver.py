"""NameServer: the actor that answers which brokers have a topic.

This module has the remote methods; the route table is in actors.core.nameserver.

Only the KV configuration survives a crash: it has its own file, and each change rewrites the file before the change is
answered. No other state needs to survive. Brokers send a heartbeat every 2 s, and register again if the NameServer
answers that it does not have them. Clients continue with the routes they have. Every call is safe to repeat.
NameServers do not communicate with each other: a client that changes the KV configuration writes to each of them
(spec/messaging.md §1). The first NameServer stays on the head node, where its file is, and clients read the KV
configuration from it first. The other NameServers run where Ray places them, and have only the changes since their
start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import ray

from actors.actor_class import actor_class
from actors.core.nameserver.kv_config import KvConfig
from actors.core.nameserver.route_table import RouteTable
from actors.metrics_thread import MetricsThread
from actors.options import PERSISTENT
from raymq.common.config.cluster import path_here
from raymq.common.config.metrics import MetricsSettings
from raymq.common.errors import ServiceNotAvailableError, StoreCorruptError, StoreError, TopicNotExistError
from raymq.common.protocol.route import (
    ORDER_TOPIC_CONFIG,
    BrokerData,
    BrokerRegistration,
    DataVersion,
    TopicChanges,
    TopicRoute,
)
from raymq.remoting.actor_ref import was_restarted
from storage.files import disk
from storage.files.config_files import SealedText
from storage.files.damage import DamageNotes
from storage.files.two_copies import TwoCopies, keep_damaged

BROKER_EXPIRY_S: Final = 120.0
WARM_UP_S: Final = 6.0
"""Time in seconds after a restart of the NameServer. Within this time every living broker registers again, because the
NameServer answers the broker's next heartbeat with "unknown"."""

logger = logging.getLogger(__name__)


class NameServer:
    """The actor that serves one RouteTable. Each call that reads the table first drops brokers that sent no heartbeat
    for too long."""

    def __init__(
        self,
        kv_path: str,
        broker_names: Sequence[str] = (),
        broker_expiry_s: float = BROKER_EXPIRY_S,
        *,
        name: str = "",
        metrics: MetricsSettings | None = None,
    ) -> None:
        """`kv_path`: the file of the KV configuration, in its own directory below the data directory. `broker_names`:
        the broker groups of the cluster; until each of them has registered at this NameServer, topics may be missing.
        `name`: the actor's name."""
        self._lock = threading.Lock()
        path = Path(kv_path)
        self._kv_path = path_here(path, path.parent.parent)
        self._kv_file = TwoCopies(self._kv_path, SealedText(is_json=True), DamageNotes())
        self._kv = self._load_kv()
        self._table = RouteTable(broker_expiry_s)
        restarted = was_restarted()
        self._broker_names = frozenset(broker_names)
        self._complete_from_s = time.monotonic() + WARM_UP_S if restarted else 0.0
        self._metrics = MetricsThread(metrics, "nameserver", name)

    def register_broker(self, registration: BrokerRegistration) -> None:
        """Register a broker with its complete data. The registration replaces the broker's earlier
        registration."""
        with self._lock:
            self._table.register(registration, time.monotonic())

    def change_topics(self, changes: TopicChanges) -> bool:
        """Apply changes of a registered broker's topics. Returns False if the broker must send a complete registration
        again."""
        with self._lock:
            return self._table.change_topics(changes, time.monotonic())

    def broker_heartbeat(self, broker_name: str, data_version: DataVersion) -> bool:
        """Record that a broker is alive. Returns False if the broker must register again."""
        with self._lock:
            return self._table.heartbeat(broker_name, data_version, time.monotonic())

    def unregister_broker(self, broker_name: str) -> None:
        """Remove a broker, which is shutting down, from the route table."""
        with self._lock:
            self._table.unregister(broker_name)

    def topic_route(self, topic: str) -> TopicRoute:
        """Return the route of a topic as far as it is known (see `TopicRoute.complete`).

        Raises TopicNotExistError if no broker has the topic. Raises ServiceNotAvailableError if a broker that has the
        topic may not have registered yet.
        """
        with self._lock:
            self._table.expire(time.monotonic())
            try:
                route = self._table.route(topic)
            except TopicNotExistError:
                self._require_complete(f"check whether topic {topic!r} exists")
                raise
            return route if self._is_complete() else replace(route, complete=False)

    def topic_routes(self, topics: Sequence[str]) -> dict[str, TopicRoute]:
        """Return the known routes of several topics, as `topic_route` does. Topics without a known route are
        left out."""
        routes = {}
        with self._lock:
            self._table.expire(time.monotonic())
            complete = self._is_complete()
            for topic in topics:
                with suppress(TopicNotExistError, ServiceNotAvailableError):
                    route = self._table.route(topic)
                    routes[topic] = route if complete else replace(route, complete=False)
        return routes

    def _is_complete(self) -> bool:
        """Return True if every configured broker group has registered, and other live brokers have had enough time to
        register."""
        return self._broker_names <= self._table.registered and time.monotonic() >= self._complete_from_s

    def _require_complete(self, what: str) -> None:
        if not self._is_complete():
            missing = ", ".join(sorted(self._broker_names - self._table.registered))
            because = f": broker group {missing} has not registered again; see `raymq status`" if missing else ""
            raise ServiceNotAvailableError(f"the NameServer was restarted and cannot yet {what}{because}") from None

    def brokers(self) -> dict[str, BrokerData]:
        """Return every live broker group, by name."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.brokers()

    def all_brokers(self) -> dict[str, BrokerData]:
        """Return all live broker groups, by name. Raises ServiceNotAvailableError if a live broker may not have
        registered yet."""
        with self._lock:
            self._require_complete("list all brokers")
        return self.brokers()

    def clusters(self) -> dict[str, list[str]]:
        """Return the live broker groups of each cluster."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.clusters()

    def wipe_write_perm(self, broker_name: str) -> int:
        """Mark the topics of a broker as not writable in the routes, until the broker registers changed topics. Returns
        the number of these topics."""
        with self._lock:
            return self._table.wipe_write_perm(broker_name)

    def add_write_perm(self, broker_name: str) -> int:
        """Mark a broker's topics as readable and writable. Returns the number of these topics."""
        with self._lock:
            return self._table.add_write_perm(broker_name)

    def get_kv(self, namespace: str, key: str) -> str | None:
        """Return the value of a key in a namespace; None if the key has no value."""
        return self.list_kv(namespace).get(key)

    def list_kv(self, namespace: str) -> dict[str, str]:
        """Return all keys and values of a namespace. For the namespace ORDER_TOPIC_CONFIG, return the order topics that
        brokers have registered."""
        with self._lock:
            return self._table.order_configs() if namespace == ORDER_TOPIC_CONFIG else self._kv.list(namespace)

    def put_kv(self, namespace: str, key: str, value: str | None) -> None:
        """Set the value of a key, or delete it if `value` is None; durable on return. Raises InvalidArgumentError if
        the namespace, key or value cannot be stored, and StoreError if writing the file failed, so that nothing has
        changed."""
        with self._lock:
            changed = self._kv.changed(namespace, key, value)
            try:
                disk.make_directory(self._kv_path.parent)
                self._kv_file.write(changed.dump().encode())
            except OSError as error:
                raise StoreError(
                    f"cannot write the KV configuration to file {self._kv_path}: {error}; nothing was changed"
                ) from None
            self._kv = changed

    def _load_kv(self) -> KvConfig:
        """Load the KV configuration from disk. If both of its copies are damaged, they are renamed and ignored, because
        the NameServer must serve routes even without this configuration."""
        try:
            text = self._kv_file.read()
            return KvConfig() if text is None else KvConfig.load(text.decode())
        except (OSError, UnicodeDecodeError, StoreCorruptError) as error:
            logger.error("the KV configuration is damaged, is kept under another name, and begins empty: %s", error)
            with suppress(OSError):
                for path in (self._kv_path, self._kv_file.backup):
                    keep_damaged(path)
            return KvConfig()

    def topics(self) -> list[str]:
        """Return the names of all topics that brokers have registered."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.topics()


NAMESERVER_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 8}
NameServerActor = ray.remote(**NAMESERVER_OPTIONS)(actor_class(NameServer))
