"""NameServer: tells clients which brokers hold a topic.

What survives its death: nothing, and nothing has to. Brokers send a heartbeat every 2 s and register
again when they are told that they are unknown; clients go on with the routes they have. Every call is safe to repeat.
Several NameServers do not talk to each other (spec/messaging.md §1).
"""

from __future__ import annotations

import threading
import time
from typing import Final

import ray

from actors.core.route_table import RouteTable
from actors.options import PERSISTENT
from actors.shell import shell
from raymq.errors import ServiceNotAvailableError, TopicNotExistError
from raymq.route import BrokerData, BrokerRegistration, DataVersion, TopicRoute

BROKER_EXPIRY_S: Final = 120.0
WARM_UP_S: Final = 6.0
"""After a restart, for every broker to have been told by a heartbeat that it must register."""


class NameServer:
    """The shell around one RouteTable. Silent brokers are dropped whenever anybody asks."""

    def __init__(self, broker_expiry_s: float = BROKER_EXPIRY_S) -> None:
        self._lock = threading.Lock()
        self._table = RouteTable(broker_expiry_s)
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._complete_from_s = time.monotonic() + WARM_UP_S if restarted else 0.0

    def register_broker(self, registration: BrokerRegistration) -> None:
        """Take a broker's complete data."""
        with self._lock:
            self._table.register(registration, time.monotonic())

    def broker_heartbeat(self, broker_name: str, data_version: DataVersion) -> bool:
        """False: register again."""
        with self._lock:
            return self._table.heartbeat(broker_name, data_version, time.monotonic())

    def unregister_broker(self, broker_name: str) -> None:
        """Forget a broker that stops."""
        with self._lock:
            self._table.unregister(broker_name)

    def topic_route(self, topic: str) -> TopicRoute:
        """Where a topic is; TopicNotExistError when nowhere, ServiceNotAvailableError where that is not known yet."""
        now_s = time.monotonic()
        with self._lock:
            self._table.expire(now_s)
            try:
                return self._table.route(topic)
            except TopicNotExistError:
                if now_s < self._complete_from_s:
                    raise ServiceNotAvailableError(
                        f"the NameServer was restarted and does not know yet whether topic {topic!r} exists"
                    ) from None
                raise

    def brokers(self) -> dict[str, BrokerData]:
        """Every live broker group."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.brokers()

    def topics(self) -> list[str]:
        """The names of all topics."""
        with self._lock:
            self._table.expire(time.monotonic())
            return self._table.topics()


OPTIONS: Final = {**PERSISTENT, "max_concurrency": 8}
NameServerActor = ray.remote(**OPTIONS)(shell(NameServer))
