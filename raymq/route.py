"""What a client knows of the cluster: which brokers hold which queues of a topic.

These values travel from a Broker (registration) through a NameServer (route tables) to every client; they are
RocketMQ's `TopicConfig`, `QueueData`, `BrokerData` and `TopicRouteData` (spec/messaging.md §1). A broker's address is
the name of its storage actor: messages go there in one hop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from raymq.message import MessageQueue

PERM_READ: Final = 4
PERM_WRITE: Final = 2
MASTER_ID: Final = 0


@dataclass(frozen=True, slots=True, order=True)
class DataVersion:
    """Which state of a table this is. Ordered by state version, counter, timestamp (spec/messaging.md §1.1)."""

    state_version: int = 0
    counter: int = 0
    timestamp_ms: int = 0

    def next(self, now_ms: int) -> DataVersion:
        return DataVersion(self.state_version, self.counter + 1, now_ms)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic as one broker group holds it: its queues are numbered 0 to write (read) queue nums - 1."""

    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = PERM_READ | PERM_WRITE


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """All a NameServer is told by one broker. `storages`: replica id (0 = master) to storage actor name."""

    cluster: str
    broker_name: str
    storages: Mapping[int, str]
    topics: tuple[TopicConfig, ...]
    data_version: DataVersion


@dataclass(frozen=True, slots=True)
class BrokerData:
    """A broker group: `storages` maps replica id (0 = master) to the name of its storage actor."""

    cluster: str
    broker_name: str
    storages: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class QueueData:
    """How many queues of a topic a broker group holds, and what may be done with them."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """Everything a client needs to produce to and consume from a topic."""

    topic: str
    brokers: Mapping[str, BrokerData]
    queues: tuple[QueueData, ...]
    _publish: tuple[MessageQueue, ...] = field(init=False, repr=False, compare=False)
    _subscribe: tuple[MessageQueue, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        writable = [
            MessageQueue(self.topic, data.broker_name, queue_id)
            for data in self.queues
            if data.perm & PERM_WRITE and MASTER_ID in self.brokers[data.broker_name].storages
            for queue_id in range(data.write_queue_nums)
        ]
        readable = [
            MessageQueue(self.topic, data.broker_name, queue_id)
            for data in self.queues
            if data.perm & PERM_READ
            for queue_id in range(data.read_queue_nums)
        ]
        object.__setattr__(self, "_publish", tuple(sorted(writable)))
        object.__setattr__(self, "_subscribe", tuple(sorted(readable)))

    @property
    def publish_queues(self) -> tuple[MessageQueue, ...]:
        """Queues a producer may write to, sorted (spec/messaging.md §3.3)."""
        return self._publish

    @property
    def subscribe_queues(self) -> tuple[MessageQueue, ...]:
        """Queues a consumer may read, sorted."""
        return self._subscribe

    def master_storage(self, broker_name: str) -> str:
        """The name of the storage actor that takes writes for `broker_name`."""
        return self.brokers[broker_name].storages[MASTER_ID]


def spread_queues(queues: int, broker_names: list[str]) -> dict[str, int]:
    """Share `queues` queues among broker groups as evenly as possible, the first groups taking the rest.

    >>> spread_queues(5, ["broker-a", "broker-b"])
    {'broker-a': 3, 'broker-b': 2}
    """
    share, rest = divmod(queues, len(broker_names))
    counts = {name: share + (index < rest) for index, name in enumerate(sorted(broker_names))}
    return {name: count for name, count in counts.items() if count}
