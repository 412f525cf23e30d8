"""NameServer: answers clients which brokers hold a topic.

A change of its remote methods belongs here; a change of the route table in actors.core.nameserver.

What survives its death: the KV configuration, in a file of its own that each change rewrites before it is answered. The
rest need not survive: brokers send a heartbeat every 2 s and register again when the answer is that they are unknown;
clients go on with the routes they have. Every call is safe to repeat. Several NameServers do not talk to each other: a
client that changes the KV configuration writes to each (spec/messaging.md §1). The first NameServer stays on the head
node, where its file is, and is read before the others. Those are where Ray puts them, and have the changes since then.
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
from storage.files import disk

BROKER_EXPIRY_S: Final = 120.0
WARM_UP_S: Final = 6.0
"""Long enough after a restart for the answer to a heartbeat to have made every living broker register."""

logger = logging.getLogger(__name__)


class NameServer:
    """The shell around one RouteTable. Silent brokers are dropped at each call that reads the table."""

    def __init__(
        self,
        kv_path: str,
        broker_names: Sequence[str] = (),
        broker_expiry_s: float = BROKER_EXPIRY_S,
        *,
        name: str = "",
        metrics: MetricsSettings | None = None,
    ) -> None:
        """`kv_path`: the file of the KV configuration, in a directory of its own below the data directory.
        `broker_names`: the broker groups of the cluster; before each has registered here, not every topic is known.
        `name`: the actor's."""
        self._lock = threading.Lock()
        path = Path(kv_path)
        self._kv_path = path_here(path, path.parent.parent)
        self._kv = self._load_kv()
        self._table = RouteTable(broker_expiry_s)
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._broker_names = frozenset(broker_names)
        self._complete_from_s = time.monotonic() + WARM_UP_S if restarted else 0.0
        self._metrics = MetricsThread(metrics, "nameserver", name)

    def register_broker(self, registration: BrokerRegistration) -> None:
        """Register a broker with its complete data, in place of what it registered before."""
        with self._lock:
            self._table.register(registration, time.monotonic())

    def change_topics(self, changes: TopicChanges) -> bool:
        """Note what has changed of a registered broker's topics. False if it must register again."""
        with self._lock:
            return self._table.change_topics(changes, time.monotonic())

    def broker_heartbeat(self, broker_name: str, data_version: DataVersion) -> bool:
        """Note that a broker lives. False if it must register again."""
        with self._lock:
            return self._table.heartbeat(broker_name, data_version, time.monotonic())

    def unregister_broker(self, broker_name: str) -> None:
        """Drop a broker that stops."""
        with self._lock:
            self._table.unregister(broker_name)

    def topic_route(self, topic: str) -> TopicRoute:
        """The route of a topic, as far as it is known now (see `TopicRoute.complete`).

        TopicNotExistError if no broker holds the topic; ServiceNotAvailableError while that is not known yet.
        """
        with self._lock:
            self._table.expire(time.monotonic())
            try:
                route = self._table.route(topic)
            except TopicNotExistError:
                self._require_complete(f"whether topic {topic!r} exists")
                raise
            return route if self._is_complete() else replace(route, complete=False)

    def topic_routes(self, topics: Sequence[str]) -> dict[str, TopicRoute]:
        """The routes of those of the topics that are known now, as `topic_route` returns each."""
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
        """True if every broker group of the cluster has registered, and unlisted ones that live have had the time
        to."""
        return self._broker_names <= self._table.registered and time.monotonic() >= self._complete_from_s

    def _require_complete(self, what: str) -> None:
        if not self._is_complete():
            missing = ", ".join(sorted(self._broker_names - self._table.registered))
            because = f": {missing} did not register since; see `raymq status`" if missing else ""
            raise ServiceNotAvailableError(
                f"the NameServer was restarted and does not know yet {what}{because}"
            ) from None

    def brokers(self) -> dict[str, BrokerData]:
        """Every live broker group."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.brokers()

    def all_brokers(self) -> dict[str, BrokerData]:
        """The result of `brokers`; ServiceNotAvailableError while one that lives may not have registered yet."""
        with self._lock:
            self._require_complete("every broker")
        return self.brokers()

    def clusters(self) -> dict[str, list[str]]:
        """The live broker groups of each cluster."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.clusters()

    def wipe_write_perm(self, broker_name: str) -> int:
        """Show the broker's topics as not writable until it registers a change; returns how many there are."""
        with self._lock:
            return self._table.wipe_write_perm(broker_name)

    def add_write_perm(self, broker_name: str) -> int:
        """Show the broker's topics as readable and writable; returns how many there are."""
        with self._lock:
            return self._table.add_write_perm(broker_name)

    def get_kv(self, namespace: str, key: str) -> str | None:
        """A value, None if there is none."""
        return self.list_kv(namespace).get(key)

    def list_kv(self, namespace: str) -> dict[str, str]:
        """All keys and values of a namespace; those of ORDER_TOPIC_CONFIG are the order topics that brokers
        registered."""
        with self._lock:
            return self._table.order_configs() if namespace == ORDER_TOPIC_CONFIG else self._kv.list(namespace)

    def put_kv(self, namespace: str, key: str, value: str | None) -> None:
        """Set a value, or delete it with None; on disk on return. InvalidArgumentError; StoreError, nothing changed."""
        with self._lock:
            changed = self._kv.changed(namespace, key, value)
            try:
                disk.make_directory(self._kv_path.parent)
                disk.replace_file(self._kv_path, changed.dump().encode())
            except OSError as error:
                raise StoreError(f"cannot write {self._kv_path}: {error}; nothing was changed") from None
            self._kv = changed

    def _load_kv(self) -> KvConfig:
        """The table on disk. A file that cannot be used is renamed: routes matter more than its content."""
        try:
            return KvConfig.load(self._kv_path.read_text())
        except FileNotFoundError:
            return KvConfig()
        except (OSError, UnicodeDecodeError, StoreCorruptError) as error:
            aside = self._kv_path.with_suffix(".damaged")
            logger.error("%s cannot be used and becomes %s: %s", self._kv_path, aside, error)
            with suppress(OSError):
                disk.rename(self._kv_path, aside)
            return KvConfig()

    def topics(self) -> list[str]:
        """The names of all topics."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.topics()


NAMESERVER_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 8}
NameServerActor = ray.remote(**NAMESERVER_OPTIONS)(actor_class(NameServer))
