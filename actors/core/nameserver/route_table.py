"""The NameServer's route table (spec/messaging.md §1): the broker groups, and for each topic its queues per broker
group.

This module computes routes from registrations. The table does not survive the process. After a restart, brokers get
"unknown broker" as the answer to their heartbeats, and register again. A registration is always complete: it names
every topic of the broker.

A registered broker sends later changes (`change_topics`). The NameServer accepts a change only if it follows the
broker's version in the table; otherwise the broker registers again.

Each registration has the number of the broker's process incarnation. A registration replaces the registration in the
table if it comes from a newer incarnation, or from the same incarnation with a newer version. An older registration
arrived late and is ignored. A registration of an older state version is also ignored: it comes from a replica that is
no longer the master.

If a broker expires because it sent no heartbeat for too long, the names of its topics are kept: such a topic exists,
even if no other broker has it.

`wipe_write_perm` changes permissions only in this table, to keep writes away from a broker. The broker's next change
restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from raymq.common.errors import ServiceNotAvailableError, TopicNotExistError
from raymq.common.names import is_light_queue
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.route import (
    PERM_ALL,
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    BrokerRegistration,
    DataVersion,
    QueueData,
    TopicChanges,
    TopicConfig,
    TopicRoute,
    merge_layouts,
)


@dataclass(slots=True)
class _LiveBroker:
    """A registered broker. `registration`: its registration without the topics. `perm_changed`: True if
    `wipe_write_perm` or `add_write_perm` has changed permissions in the route table."""

    registration: BrokerRegistration
    topics: dict[str, TopicConfig]
    last_update_s: float
    perm_changed: bool = False


class RouteTable:
    """The routes of one NameServer. `expiry_s`: a broker that has sent no heartbeat for this many seconds is
    dropped."""

    def __init__(self, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._brokers: dict[str, _LiveBroker] = {}
        self._silent: dict[str, frozenset[str]] = {}
        """The topics of expired brokers, by broker name. A broker expires if it sends no heartbeat for too
        long."""
        self.registered: set[str] = set()
        """The names of all brokers that have registered since this table was made."""

    def register(self, registration: BrokerRegistration, now_s: float) -> None:
        """Replace all data that this table has about a broker with a registration. A registration with an older version
        is ignored.

        A version contains a time, which the comparison of versions ignores. After a restart, the broker reads its
        version from the log, whose time of the last change may be slightly earlier. The broker must still be able to
        register.
        """
        known = self._brokers.get(registration.broker_name)
        if known is not None and _order(registration) < _order(known.registration):
            return
        broker = _LiveBroker(replace(registration, topics=()), {one.topic: one for one in registration.topics}, now_s)
        if known is not None and registration.data_version == known.registration.data_version:
            # The broker registers again with a data version that this table already has. So keep the permissions that
            # were changed in this table since the broker's previous registration.
            broker.topics, broker.perm_changed = known.topics, known.perm_changed
        self._brokers[registration.broker_name] = broker
        self._silent.pop(registration.broker_name, None)
        self.registered.add(registration.broker_name)

    def change_topics(self, changes: TopicChanges, now_s: float) -> bool:
        """Apply the changes of a broker's topics since its registration.

        Returns False if the broker must register again. This is the case if the previous version in `changes` is not
        the version in this table. It is also the case if permissions of the broker were changed in this table; the
        registration then restores them.
        """
        broker = self._brokers.get(changes.broker_name)
        if broker is None or broker.perm_changed:
            return False
        known = broker.registration
        if (known.life, known.data_version) != (changes.life, changes.since):
            return False
        for topic in changes.removed:
            broker.topics.pop(topic, None)
        broker.topics.update({config.topic: config for config in changes.changed})
        broker.registration = replace(known, data_version=changes.data_version)
        broker.last_update_s = now_s
        return True

    def heartbeat(self, broker_name: str, data_version: DataVersion, now_s: float) -> bool:
        """Record that a broker is alive. Returns False if the broker must register: the route table does not have the
        broker, or has another version of its data."""
        broker = self._brokers.get(broker_name)
        if broker is None or broker.registration.data_version != data_version:
            return False
        broker.last_update_s = now_s
        return True

    def unregister(self, broker_name: str) -> None:
        """Drop a broker group and its queues from the route table."""
        self._brokers.pop(broker_name, None)
        self._silent.pop(broker_name, None)

    def expire(self, now_s: float) -> list[str]:
        """Drop the brokers that have sent no heartbeat for too long, and return their names."""
        silent = [name for name, broker in self._brokers.items() if now_s - broker.last_update_s > self._expiry_s]
        for name in silent:
            self._silent[name] = frozenset(self._brokers.pop(name).topics)
        return silent

    def wipe_write_perm(self, broker_name: str) -> int:
        """Forbid writes to a broker until the broker registers a change. Returns the number of the topics that this
        broker has."""
        return self._change_perm(broker_name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Allow reads and writes of a broker's topics again. Returns the number of these topics.

        As in RocketMQ, this sets the permission to READ and WRITE, regardless of the earlier permission.
        """
        return self._change_perm(broker_name, lambda perm: PERM_ALL)

    def _change_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        broker = self._brokers.get(broker_name)
        if broker is None:
            return 0
        broker.topics = {topic: replace(config, perm=change(config.perm)) for topic, config in broker.topics.items()}
        broker.perm_changed = True
        return len(broker.topics)

    def route(self, topic: str) -> TopicRoute:
        """Return the route of `topic`.

        The topic of a light queue is never created explicitly: every broker group has it, with one queue to read. For
        any other topic, raises TopicNotExistError if no broker has the topic, and ServiceNotAvailableError if only
        expired brokers have it.
        """
        if is_light_queue(topic) and self._brokers:
            return TopicRoute(topic, self.brokers(), tuple(QueueData(name, 1, 1, PERM_READ) for name in self.brokers()))
        holders = self._holders(topic)
        if not holders:
            away = sorted(name for name, topics in self._silent.items() if topic in topics)
            if away:
                raise ServiceNotAvailableError(
                    f"topic {topic!r} is not available: its broker group {', '.join(away)} has sent no heartbeat "
                    f"for {self._expiry_s:.0f} s; see `raymq status`"
                )
            raise TopicNotExistError(topic)
        return TopicRoute(
            topic,
            {name: _broker_data(broker) for name, broker in holders.items()},
            tuple(_queue_data(name, broker.topics[topic]) for name, broker in holders.items()),
            _order_config(topic, holders.values()),
            layout=merge_layouts(*(broker.topics[topic].layout for broker in holders.values())),
            attributes=_attributes(topic, holders.values()),
        )

    def _holders(self, topic: str) -> dict[str, _LiveBroker]:
        return {name: broker for name, broker in sorted(self._brokers.items()) if topic in broker.topics}

    def order_configs(self) -> dict[str, str]:
        """Return the configured queues of each order topic, by topic."""
        configs = {topic: _order_config(topic, self._holders(topic).values()) for topic in self.topics()}
        return {topic: config for topic, config in configs.items() if config}

    def brokers(self) -> dict[str, BrokerData]:
        """Return every live broker group, by name."""
        return {name: _broker_data(broker) for name, broker in sorted(self._brokers.items())}

    def clusters(self) -> dict[str, list[str]]:
        """Return the broker groups of each cluster, sorted by name."""
        names: dict[str, list[str]] = {}
        for name, broker in sorted(self._brokers.items()):
            names.setdefault(broker.registration.cluster, []).append(name)
        return names

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return sorted({topic for broker in self._brokers.values() for topic in broker.topics})


def _order_config(topic: str, holders: Iterable[_LiveBroker]) -> str:
    """Return the configuration of an order topic from the first broker, by name, that has one. A broker that was added
    later may lack the configuration."""
    return next(filter(None, (broker.topics[topic].order_config for broker in holders)), "")


def _attributes(topic: str, holders: Iterable[_LiveBroker]) -> TopicAttributes:
    """Return a topic's attributes from the first broker, in the order of names, that has attributes for the topic. A
    broker that was added later may lack the attributes."""
    found = next(filter(None, (broker.topics[topic].attributes for broker in holders)), {})
    return TopicAttributes.parse(found)


def _order(registration: BrokerRegistration) -> tuple[int, int, int]:
    version = registration.data_version
    return version.state_version, registration.life, version.counter


def _broker_data(broker: _LiveBroker) -> BrokerData:
    registration = broker.registration
    return BrokerData(
        registration.cluster,
        registration.broker_name,
        dict(registration.storages),
        dict(registration.nodes),
        registration.slave_read_enable,
    )


def _queue_data(broker_name: str, config: TopicConfig) -> QueueData:
    return QueueData(broker_name, config.read_queue_nums, config.write_queue_nums, config.perm, config.creation_id)
