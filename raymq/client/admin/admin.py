"""The administration object `client.admin`, and its calls about stores, NameServers and settings.

The calls read and change the settings of broker groups while raymq runs.
"""

from __future__ import annotations

import time
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any, Final

from raymq.client.admin.base import ADMIN_TIMEOUT_S, AdminBase, unknown_broker
from raymq.client.admin.browse import BrowseAdmin
from raymq.client.admin.delayed import DelayedAdmin
from raymq.client.admin.members import MemberAdmin
from raymq.client.admin.messages import TailAdmin
from raymq.client.admin.replay import ReplayAdmin
from raymq.client.admin.topics import QueueDescription
from raymq.client.admin.trace import TraceAdmin
from raymq.client.admin.upkeep.damage import DamageAdmin
from raymq.client.admin.upkeep.metadata import MetadataAdmin
from raymq.client.admin.upkeep.replicas import ReplicaAdmin
from raymq.client.admin.upkeep.send_check import CheckAdmin
from raymq.client.admin.upkeep.users import UserAdmin
from raymq.client.admin.upkeep.verify import VerifyAdmin
from raymq.common.config.values import SettingValue
from raymq.common.errors import RequestTimeoutError, ServiceNotAvailableError
from raymq.common.names import LMQ_PREFIX
from raymq.common.parallel import map_parallel
from raymq.common.protocol.route import MASTER_ID, PERM_READ, PERM_WRITE, BrokerData
from raymq.common.protocol.settings import BrokerConfig
from raymq.common.protocol.stats import BrokerReadings
from raymq.common.protocol.store import LightQueue, StoreStatistics
from raymq.common.protocol.transactions import TransactionFigures
from raymq.common.retry import persist_until
from raymq.remoting.broker_client import broker_client


class SettingsAdmin(AdminBase):
    """Administration calls that read and change the settings of broker groups. Repeating a call is safe."""

    def config(self, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Return the settings of all broker groups, or of the group `broker_name`.

        Raises InvalidArgumentError if the broker group is unknown. Raises ServiceNotAvailableError or
        RequestTimeoutError if a broker group does not answer within 20 s.
        """
        return {name: self._call_broker(name, "config") for name in self._groups_of(broker_name)}

    def set_config(self, name: str, value: SettingValue, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Change a live setting of all broker groups, or of one broker group. Returns the groups' settings after the
        change.

        `name` is the name of a setting in raymq.yaml (``store.delete_when``, ``delete_when``), or RocketMQ's name for
        the setting (``deleteWhen``). Each group stores the change in its log. The change survives restarts and
        failovers, until `unset_config` is called. When this call returns, the change is in effect in all servers that
        answer; BrokerConfig.behind names the other servers.

        Raises InvalidArgumentError if the setting or the broker group is unknown, or if servers read the setting only
        when they start. Raises ConfigError if raymq.yaml does not allow the value. Groups are changed in order. If a
        group is unreachable, its error is raised; the groups before it stay changed.
        """
        full = _live_name(name)
        return {group: self._call_broker(group, "set_config", full, value) for group in self._groups_of(broker_name)}

    def unset_config(self, name: str, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Reset a live setting to the value in raymq.yaml, in all broker groups or in one. Returns the groups' settings
        after the change, and raises the errors of `set_config`."""
        full = _live_name(name)
        return {group: self._call_broker(group, "unset_config", full) for group in self._groups_of(broker_name)}

    def set_broker_writable(self, broker_name: str, writable: bool) -> None:
        """Allow or forbid sends to a broker group. Sets broker_permission, which survives restarts.

        The group's messages can be read in either case. Clients see the change in routes within half a minute. While
        sends are forbidden, messages without a key go to the other groups. A sharding key keeps its queue, so sends to
        queues of this group raise NoPermissionError. Raises InvalidArgumentError if the broker group is unknown.
        """
        self.set_config("broker.broker_permission", PERM_READ | PERM_WRITE if writable else PERM_READ, broker_name)

    def _groups_of(self, broker_name: str | None) -> list[str]:
        names = self._broker_names()
        if broker_name is None:
            return sorted(names)
        if broker_name not in names:
            raise unknown_broker(broker_name, names)
        return [broker_name]


__all__ = ["Admin", "QueueDescription"]

READINGS_TIMEOUT_S: Final = 5.0
"""Default timeout in seconds for a broker's answer to `Admin.readings`."""
BROKERS_AT_ONCE: Final = 8


class Admin(
    MemberAdmin,
    ReplayAdmin,
    BrowseAdmin,
    TraceAdmin,
    DelayedAdmin,
    TailAdmin,
    SettingsAdmin,
    ReplicaAdmin,
    CheckAdmin,
    DamageAdmin,
    MetadataAdmin,
    UserAdmin,
    VerifyAdmin,
):
    """Administration of topics, messages, groups, stores and NameServers.

    Repeating a call is safe. Creating an object that already exists with the same settings either succeeds, or raises
    an error which states that the object exists. Deleting an object that is already deleted either succeeds, or raises
    an error which states that the object does not exist. `replay` sends no message twice.
    """

    def brokers(self) -> dict[str, BrokerData]:
        """Return the live broker groups, with their stores, by name."""
        return self._routes.brokers()

    def clusters(self) -> dict[str, list[str]]:
        """Return the names of the live broker groups of each cluster."""
        return self._routes.clusters()

    def store_statistics(self, broker_name: str) -> StoreStatistics:
        """Return the runtime metrics of a broker group's store, under RocketMQ's names (spec/storage.md §12). Raises
        InvalidArgumentError if the broker group is unknown."""
        statistics: StoreStatistics = self._store_call(broker_name, "statistics")
        return statistics

    def light_queues(self, pattern: str = "*") -> dict[str, int]:
        """Return the number of messages in each light queue, over all broker groups, sorted by name.

        Only queues whose names match `pattern` are included; it may have ``*`` and ``?``. A light queue exists from its
        first message on, until retention has deleted its last message.
        """
        held: Counter[str] = Counter()
        for broker_name in self.brokers():
            queues: list[LightQueue] = self._store_call(broker_name, "light_queues")
            for topic, first, end in queues:
                held[topic.removeprefix(LMQ_PREFIX)] += end - first
        return {name: held[name] for name in sorted(held) if fnmatchcase(name, pattern)}

    def clean_store(self, broker_name: str) -> None:
        """Delete expired messages of a broker group's store now, at any hour. Raises InvalidArgumentError if the broker
        group is unknown."""
        self._store_call(broker_name, "clean")

    def transactions(self) -> dict[str, TransactionFigures]:
        """Return metrics of the transactions without an outcome, by topic and producer group, for each broker group's
        store."""
        figures: dict[str, TransactionFigures] = {
            name: self._store_call(name, "transactions") for name in self._broker_names()
        }
        return figures

    def _store_call(self, broker_name: str, method: str) -> Any:
        brokers = self.brokers()
        data = brokers.get(broker_name)
        if data is None:
            raise unknown_broker(broker_name, brokers)
        storage = self._storages.get(data.storages[MASTER_ID])
        return persist_until(
            time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: storage.control(method, timeout_s=left_s)
        )

    def readings(
        self, timeout_s: float = READINGS_TIMEOUT_S, *, with_pairs: bool = True
    ) -> dict[str, BrokerReadings | None]:
        """Return the message counts of all topics and the progress of all groups, by broker group. Callers compute
        rates and lags from these counts.

        Each broker is called once, all at the same time. The value is None for a broker that does not answer within
        `timeout_s`. `with_pairs`: True to get the metrics of each pair of group and topic. Without them,
        `BrokerReadings.groups` is empty and only the totals of each group are returned, which is cheaper if there are
        many groups.

        Internal topics are left out. A count restarts at 0 when its server restarts.
        """
        names = list(self.brokers())

        def read(name: str) -> BrokerReadings | None:
            try:
                readings: BrokerReadings = broker_client(name).call("readings", with_pairs, timeout_s=timeout_s)
                return readings
            except (ServiceNotAvailableError, RequestTimeoutError):
                return None

        found = map_parallel(read, names, threads_max=BROKERS_AT_ONCE, name="readings")
        return dict(zip(names, found, strict=True))

    def wipe_write_perm(self, broker_name: str) -> int:
        """Remove write permission from a broker group. Every NameServer shows the group's topics as not writable, until
        the topics' next change or `add_write_perm`.

        Returns the number of these topics. Clients see the change within half a minute. Messages without a key then go
        to the other groups. A sharding key keeps its queue, so sends to queues of this group raise NoPermissionError.
        """
        return max(map(int, self._routes.call_all("wipe_write_perm", broker_name)))

    def add_write_perm(self, broker_name: str) -> int:
        """Give the topics of a broker group their write permission back. Returns the number of these topics."""
        return max(map(int, self._routes.call_all("add_write_perm", broker_name)))

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Set a value in the NameServers' KV configuration, which each NameServer stores on disk. Raises
        InvalidArgumentError if the value is invalid."""
        self._routes.call_all("put_kv", namespace, key, value)

    def delete_kv(self, namespace: str, key: str) -> None:
        """Delete a value of the KV configuration. Does nothing if the key has no value."""
        self._routes.call_all("put_kv", namespace, key, None)

    def get_kv(self, namespace: str, key: str) -> str | None:
        """Return a value of the KV configuration from one NameServer; None if the key has no value."""
        return self.list_kv(namespace).get(key)

    def list_kv(self, namespace: str) -> dict[str, str]:
        """Return all keys and values of a namespace in the KV configuration, from one NameServer."""
        return self._routes.list_kv(namespace)


def _live_name(name: str) -> str:
    # Import the settings only when they are needed. Their models take an eighth of a second to make.
    from raymq.common.config.live import live_name

    return live_name(name)
