"""Finds and calls the storage actor of a broker group's master replica, and gives the broker its own routes.

No state of this module survives the broker: in a group of several replicas a new broker asks the Controller for the
master.

The broker's own producers use the routes in this module, which cover only the topics of this broker group. Clients get
their routes from the NameServer (actors.nameserver).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from actors.broker.state_records import STORE_TIMEOUT_S
from actors.core.broker.state import BrokerState
from actors.core.replica.orders import GroupLeader
from raymq.common.config.cluster import BrokerSettings
from raymq.common.names import CONTROLLER, StorageName
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.route import MASTER_ID, BrokerData, QueueData, TopicRoute
from raymq.common.protocol.store import QueueBounds
from raymq.common.retry import persist_until
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients

logger = logging.getLogger(__name__)

LEADER_TIMEOUT_S: Final = 2.0

T = TypeVar("T")


class MasterStore:
    """Finds and calls the master of one broker group. `replicas`: the replicas of the group at the start. The master is
    the first replica until the Controller names another replica.

    Thread-safe. Each call waits up to STORE_TIMEOUT_S, also while the storage actor restarts or the master changes. So
    every call must be safe to repeat.
    """

    def __init__(self, broker_name: str, replicas: Sequence[int], storages: StorageClients) -> None:
        self._broker_name = broker_name
        self._storages = storages
        self._lock = threading.Lock()
        self._epoch = 0
        self.replicas = self._names(replicas)
        """The names of all storage actors of the broker group, one per replica, as found by the last lookup."""
        self.stores: frozenset[str] = frozenset()
        """The ids of the directories in the sync-state set, as found by the last lookup."""
        self.ordered: Mapping[str, int] = {}
        """The values of the section `replication` that commands have changed, as found by the last lookup."""
        self.storage = storages.get(self.replicas[0])
        """The storage actor of the master, as found by the last lookup."""

    def _names(self, replicas: Sequence[int]) -> list[str]:
        return [str(StorageName(self._broker_name, replica)) for replica in replicas]

    @property
    def epoch(self) -> int:
        """The epoch of the current master; 0 before the first answer of the Controller, and in a group of one
        replica."""
        return self._epoch

    def present(self) -> tuple[StorageClient, int]:
        """Return the master's storage actor and the master's epoch."""
        with self._lock:
            return self.storage, self._epoch

    def copies(self, master: StorageClient) -> list[StorageClient]:
        """Return the storage actors of all replicas of the broker group except the master."""
        return [self._storages.get(name) for name in self.replicas if name != master.name]

    def find(self) -> bool:
        """Ask the Controller for the group's master and replicas. Returns True if the master or its epoch has changed.

        Raises RaymqError if the Controller does not answer.
        """
        leader: GroupLeader = ActorRef(CONTROLLER).call("leader", self._broker_name, timeout_s=LEADER_TIMEOUT_S)
        with self._lock:
            self.replicas, self.stores = self._names(leader.replicas), leader.stores
            self.ordered = leader.ordered
            if leader.master is None or leader.epoch <= self._epoch:
                return False
            logger.warning("%s: replica %d leads epoch %d", self._broker_name, leader.master, leader.epoch)
            name = str(StorageName(self._broker_name, leader.master))
            self.storage, self._epoch = self._storages.get(name), leader.epoch
        return True

    def call(self, call: Callable[[StorageClient, float], T]) -> T:
        """Call `call` with the master's storage actor and the remaining time in seconds, and return its result. Retries
        until the time is over; raises RaymqError if every attempt failed."""
        return persist_until(time.monotonic() + STORE_TIMEOUT_S, lambda left_s: call(self.storage, left_s))

    def control(self, method: str, *args: Any) -> Any:
        """Call a method of the master's storage actor, and return its result."""
        return self.call(lambda storage, left_s: storage.control(method, *args, timeout_s=left_s))

    def bounds_of_queues(self, queues: Sequence[tuple[str, int]]) -> list[QueueBounds]:
        """Return the bounds of queues given as (topic, queue id): the first offset, the next visible offset, and the
        first offset in memory. The result has the order of `queues`."""
        return self.call(lambda storage, left_s: storage.bounds_of_queues(queues, left_s)) if queues else []


class OwnRoutes:
    """The topic routes for the producer inside a broker (a RouteSource). The routes contain only the broker's own
    group, and are not cached.

    `state` returns the broker's state; `auto_create` creates a topic with at most the given number of queues.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        store: MasterStore,
        state: Callable[[], BrokerState],
        auto_create: Callable[[str, int], None],
    ) -> None:
        self._settings, self._store = settings, store
        self._state, self._auto_create = state, auto_create

    def get(self, topic: str) -> TopicRoute:
        """Return the part of a topic's route that lies in this broker group.

        Raises TopicNotExistError if the topic does not exist, and NoPermissionError if the topic does not accept
        messages.
        """
        config = self._state().require_topic(topic)
        name = self._settings.broker_name
        data = BrokerData(self._settings.cluster, name, {MASTER_ID: self._store.storage.name})
        queues = QueueData(name, config.read_queue_nums, config.write_queue_nums, config.perm, config.creation_id)
        attributes = TopicAttributes.parse(config.attributes)
        return TopicRoute(topic, {name: data}, (queues,), attributes=attributes).require_writable()

    def get_or_create(self, topic: str, default_topic_queue_nums: int) -> TopicRoute:
        """Return a topic's route as `get` does. If the topic is missing and auto_create_topic_enable is on, create it
        first."""
        if topic not in self._state().topics:
            self._auto_create(topic, default_topic_queue_nums)
        return self.get(topic)

    def invalidate(self, topic: str) -> None:
        """Do nothing, because this object caches no routes."""
