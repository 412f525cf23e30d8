"""Administration: `client.admin`, with its calls about stores, NameServers and settings.

Settings of broker groups are seen and changed while raymq runs.
"""

from __future__ import annotations

import time
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any, Final

from raymq.client.admin.base import ADMIN_TIMEOUT_S, AdminBase
from raymq.client.admin.browse import BrowseAdmin
from raymq.client.admin.delayed import DelayedAdmin
from raymq.client.admin.members import MemberAdmin
from raymq.client.admin.messages import TailAdmin
from raymq.client.admin.replay import ReplayAdmin
from raymq.client.admin.topics import QueueDescription
from raymq.client.admin.trace import TraceAdmin
from raymq.client.admin.upkeep.metadata import MetadataAdmin
from raymq.client.admin.upkeep.send_check import CheckAdmin
from raymq.client.admin.upkeep.users import UserAdmin
from raymq.common.config.live import SettingValue, live_name
from raymq.common.errors import InvalidArgumentError, RequestTimeoutError, ServiceNotAvailableError
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
    """Calls about settings. Each call may be repeated."""

    def config(self, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Return the settings of all broker groups, or of one, by its name. Raises InvalidArgumentError for an unknown
        broker group; ServiceNotAvailableError or RequestTimeoutError if a broker group does not answer within 20 s."""
        return {name: self._call_broker(name, "config") for name in self._groups_of(broker_name)}

    def set_config(self, name: str, value: SettingValue, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Change a live setting of all broker groups, or of one. Returns their settings then.

        `name` is a setting of raymq.yaml (``store.delete_when``, ``delete_when``), or RocketMQ's (``deleteWhen``). The
        change is stored in the log of each group and survives restarts and failovers, until `unset_config`. On return
        it is in effect in all servers that answer (BrokerConfig.behind names the others).

        Raises InvalidArgumentError for an unknown setting or broker group, and for a setting that is only read at the
        start; ConfigError for a value that raymq.yaml could not have. Groups are changed in order: if one is away, its
        error is raised, and the groups before it are changed.
        """
        full = live_name(name)
        return {group: self._call_broker(group, "set_config", full, value) for group in self._groups_of(broker_name)}

    def unset_config(self, name: str, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Have a live setting be as raymq.yaml says, in all broker groups or in one. As `set_config`."""
        full = live_name(name)
        return {group: self._call_broker(group, "unset_config", full) for group in self._groups_of(broker_name)}

    def set_broker_writable(self, broker_name: str, writable: bool) -> None:
        """Allow or forbid sends to a broker group (the setting broker_permission, which survives restarts). Its
        messages can be read in either case. Clients see the change in routes within half a minute.

        While sends are forbidden, messages without a key go to the other groups. A sharding key keeps its queue, so
        sends to queues of this group raise NoPermissionError. Raises InvalidArgumentError for an unknown broker group.
        """
        self.set_config("broker.broker_permission", PERM_READ | PERM_WRITE if writable else PERM_READ, broker_name)

    def _groups_of(self, broker_name: str | None) -> list[str]:
        names = self._broker_names()
        if broker_name is None:
            return sorted(names)
        if broker_name not in names:
            raise InvalidArgumentError(f"no broker group is called {broker_name!r}; see `raymq status`")
        return [broker_name]


__all__ = ["Admin", "QueueDescription"]

READINGS_TIMEOUT_S: Final = 5.0
"""Bounds the question to a broker for all its figures."""
BROKERS_AT_ONCE: Final = 8


class Admin(
    MemberAdmin,
    ReplayAdmin,
    BrowseAdmin,
    TraceAdmin,
    DelayedAdmin,
    TailAdmin,
    SettingsAdmin,
    CheckAdmin,
    MetadataAdmin,
    UserAdmin,
):
    """Administration of topics, messages, groups, stores and NameServers. All calls may be repeated: creating what
    exists as asked, and deleting what is gone, succeed or raise an error that says so; `replay` sends nothing twice."""

    def brokers(self) -> dict[str, BrokerData]:
        """The live broker groups, with their stores."""
        return self._routes.brokers()

    def clusters(self) -> dict[str, list[str]]:
        """The live broker groups of each cluster."""
        return self._routes.clusters()

    def store_statistics(self, broker_name: str) -> StoreStatistics:
        """The runtime figures of a broker group's store, by RocketMQ's names (spec/storage.md §12).
        InvalidArgumentError."""
        statistics: StoreStatistics = self._store_call(broker_name, "statistics")
        return statistics

    def light_queues(self, pattern: str = "*") -> dict[str, int]:
        """The messages that each light queue holds in all broker groups, by name, sorted; of the queues whose names
        match `pattern`, which may have ``*`` and ``?``. A queue is there from its first message on, until the last one
        is gone by its age."""
        held: Counter[str] = Counter()
        for broker_name in self.brokers():
            queues: list[LightQueue] = self._store_call(broker_name, "light_queues")
            for topic, first, end in queues:
                held[topic.removeprefix(LMQ_PREFIX)] += end - first
        return {name: held[name] for name in sorted(held) if fnmatchcase(name, pattern)}

    def clean_store(self, broker_name: str) -> None:
        """Have a broker group's store delete expired messages now, whatever the hour. InvalidArgumentError."""
        self._store_call(broker_name, "clean")

    def transactions(self) -> dict[str, TransactionFigures]:
        """The transactions without an outcome, by topic and producer group, in each broker group's store."""
        figures: dict[str, TransactionFigures] = {
            name: self._store_call(name, "transactions") for name in self._broker_names()
        }
        return figures

    def _store_call(self, broker_name: str, method: str) -> Any:
        data = self.brokers().get(broker_name)
        if data is None:
            raise InvalidArgumentError(f"no broker group is called {broker_name!r}; see `raymq status`")
        storage = self._storages.get(data.storages[MASTER_ID])
        return persist_until(
            time.monotonic() + ADMIN_TIMEOUT_S, lambda left_s: storage.control(method, timeout_s=left_s)
        )

    def readings(
        self, timeout_s: float = READINGS_TIMEOUT_S, *, with_pairs: bool = True
    ) -> dict[str, BrokerReadings | None]:
        """Return the totals of all topics and the progress of all groups, by broker group, for rates and lags. Each
        broker is asked once, all at the same time; None for a broker that does not answer in `timeout_s`. Without
        `with_pairs`, groups have totals only, and `BrokerReadings.groups` is empty, which is cheaper for many groups.

        Internal topics are left out. A total restarts at 0 when its server restarts.
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
        """Remove write permission from a broker group: every NameServer shows its topics as not writable, until its
        next change or `add_write_perm`. Returns the number of these topics. Clients see the change within half a
        minute.

        Messages without a key then go to the other groups. A sharding key keeps its queue, so sends to queues of this
        group raise NoPermissionError.
        """
        return max(map(int, self._routes.call_all("wipe_write_perm", broker_name)))

    def add_write_perm(self, broker_name: str) -> int:
        """Let a broker group's topics be read and written again; returns how many that concerns."""
        return max(map(int, self._routes.call_all("add_write_perm", broker_name)))

    def put_kv(self, namespace: str, key: str, value: str) -> None:
        """Set a value of the NameServers' KV configuration, which each keeps on disk. InvalidArgumentError."""
        self._routes.call_all("put_kv", namespace, key, value)

    def delete_kv(self, namespace: str, key: str) -> None:
        """Delete a value of the KV configuration. Does nothing if the key has no value."""
        self._routes.call_all("put_kv", namespace, key, None)

    def get_kv(self, namespace: str, key: str) -> str | None:
        """Return a value of the KV configuration from one NameServer; None if the key has no value."""
        return self.list_kv(namespace).get(key)

    def list_kv(self, namespace: str) -> dict[str, str]:
        """A namespace of the KV configuration, as one NameServer has it."""
        return self._routes.list_kv(namespace)
