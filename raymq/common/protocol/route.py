"""The routes of topics: the brokers that hold their queues, as clients, Brokers and NameServers tell each other.

These values travel from a Broker (registration) through a NameServer (route tables) to every client; they are
RocketMQ's `TopicConfig`, `QueueData`, `BrokerData` and `TopicRouteData` (spec/messaging.md §1). A broker's address is
the name of its storage actor: messages go there in one hop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from raymq.common.errors import InvalidArgumentError, NoPermissionError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.names import BROKER_GROUPS_MAX
from raymq.common.numbers import NumberRange
from raymq.common.protocol.attributes import NO_ATTRIBUTES, PLAIN_ATTRIBUTES, TopicAttributes

PERM_INHERIT: Final = 1
PERM_WRITE: Final = 2
PERM_READ: Final = 4
PERM_ALL: Final = PERM_READ | PERM_WRITE
MASTER_ID: Final = 0
QUEUE_NUMS_MAX: Final = 1024
"""The most queues of a topic in one broker group."""
QUEUES: Final = NumberRange(1, QUEUE_NUMS_MAX * BROKER_GROUPS_MAX)
"""The numbers of queues of a topic in all; a cluster of fewer broker groups has fewer."""

ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
"""The namespace that shows, per topic, which queues an order topic has. Its brokers keep that (TopicConfig)."""


def check_perm(perm: int) -> int:
    """`perm` if it is one (spec/messaging.md §2.5: 0 to 7), else NoPermissionError, whose code RocketMQ answers."""
    if isinstance(perm, bool) or not isinstance(perm, int) or not 0 <= perm <= 7:
        raise NoPermissionError(
            f"{perm!r} is no permission: add up {PERM_READ} to read, {PERM_WRITE} to write, {PERM_INHERIT} to inherit"
        )
    return perm


def perm_text(perm: int) -> str:
    """``"RW-"``: what may be done with a topic, as RocketMQ prints it.

    >>> perm_text(6), perm_text(5)
    ('RW-', 'R-X')
    """
    return "".join(
        letter if perm & bit else "-" for letter, bit in (("R", PERM_READ), ("W", PERM_WRITE), ("X", PERM_INHERIT))
    )


def parse_order_config(text: str) -> dict[str, int]:
    """The number of queues of an order topic in each broker group, from ``"broker-a:4;broker-b:2"``.

    InvalidArgumentError for text of another form.
    """
    counts: dict[str, int] = {}
    for piece in text.split(";"):
        name, _, count = piece.strip().rpartition(":")
        if not name or not count.isascii() or not count.isdecimal() or not int(count) or name in counts:
            raise InvalidArgumentError(
                f"{text!r} is no order configuration: write BROKER:QUEUES;BROKER:QUEUES, such as broker-a:4;broker-b:2"
            )
        counts[name] = int(count)
    return counts


def format_order_config(counts: Mapping[str, int]) -> str:
    """The text that `parse_order_config` reads, sorted by broker group.

    >>> format_order_config({"broker-b": 2, "broker-a": 4})
    'broker-a:4;broker-b:2'
    """
    return ";".join(f"{name}:{counts[name]}" for name in sorted(counts))


def merge_layouts(*layouts: str) -> str:
    """One layout with every broker group of several, each with the most queues that one of them says. A topic's queues
    never become fewer, so this is the newest. An empty one says nothing; InvalidArgumentError for other text.

    >>> merge_layouts("broker-a:4;broker-b:2", "", "broker-a:2;broker-c:1")
    'broker-a:4;broker-b:2;broker-c:1'
    """
    merged: dict[str, int] = {}
    for layout in filter(None, layouts):
        for name, count in parse_order_config(layout).items():
            merged[name] = max(count, merged.get(name, 0))
    return format_order_config(merged)


@dataclass(frozen=True, slots=True, order=True)
class DataVersion:
    """The version of a table. Ordered by state version, counter, timestamp (spec/messaging.md §1.1)."""

    state_version: int = 0
    counter: int = 0
    timestamp_ms: int = 0

    def next(self, now_ms: int) -> DataVersion:
        return DataVersion(self.state_version, self.counter + 1, now_ms)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic as one broker group holds it: its queues are numbered 0 to write (read) queue nums - 1. `order_config`
    says the queues of an order topic in all groups (parse_order_config), each group the same; empty for others.
    `layout` says, in the same form, the queues that the topic has in all groups: each group keeps it in its log, so
    whoever answers for the topic knows all of its queues. It is empty where nobody has told it. `attributes` are
    RocketMQ's (raymq.common.protocol.attributes). `creation_id`: random text that the broker group made when it created
    the topic, so a topic that is deleted and created anew has another one; empty for topics of older versions."""

    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = PERM_ALL
    order: bool = False
    order_config: str = ""
    layout: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    creation_id: str = ""


class NewTopic(NamedTuple):
    """A topic to be created at one broker group, with so many queues there, its layout and its attributes
    (TopicConfig)."""

    topic: str
    queue_nums: int
    layout: str = ""
    attributes: Mapping[str, str] = NO_ATTRIBUTES


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """The full registration of one broker at a NameServer. `storages`: replica id (0 = master) to storage actor name;
    `nodes`: replica id to the Ray node its storage runs on. `life` grows with each start of the broker.
    `slave_read_enable`: whether consumers may read from replicas that are no master."""

    cluster: str
    broker_name: str
    storages: Mapping[int, str]
    topics: tuple[TopicConfig, ...]
    data_version: DataVersion
    nodes: Mapping[int, str] = field(default_factory=dict)
    life: int = 0
    slave_read_enable: bool = False


@dataclass(frozen=True, slots=True)
class TopicChanges:
    """The topics of a registered broker that have changed from its version `since` to `data_version`, in the same
    `life`: `changed` are as they are now, `removed` are gone. Nothing else of its registration differs."""

    broker_name: str
    life: int
    since: DataVersion
    data_version: DataVersion
    changed: tuple[TopicConfig, ...]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokerData:
    """A broker group: `storages` maps replica id (0 = master) to the name of its storage actor, `nodes` to the Ray node
    it runs on (empty where that is not known). `slave_read_enable`: whether the others may be read from, too."""

    cluster: str
    broker_name: str
    storages: Mapping[int, str]
    nodes: Mapping[int, str] = field(default_factory=dict)
    slave_read_enable: bool = False


@dataclass(frozen=True, slots=True)
class QueueData:
    """The number of a topic's queues in a broker group, the permission on them (PERM_READ, PERM_WRITE), and the
    topic's `creation_id` there (TopicConfig)."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    creation_id: str = ""


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """Everything a client needs to produce to and consume from a topic.

    With an `order_config` (parse_order_config) the topic is written to in those queues and no others, also while one
    of the brokers is away: a sharding key's queue must not change. `complete` is off in what a NameServer says that was
    restarted: other brokers may hold the topic, too, and not have registered again yet.

    `layout` (merge_layouts) says the queues that the topic has in all broker groups, whichever are away. Messages
    with a sharding key are divided among those, so a route that lists fewer brokers gives a key no other queue.

    `attributes` say which messages the topic takes, for producers to check.
    """

    topic: str
    brokers: Mapping[str, BrokerData]
    queues: tuple[QueueData, ...]
    order_config: str = ""
    complete: bool = field(default=True, compare=False)
    layout: str = ""
    attributes: TopicAttributes = PLAIN_ATTRIBUTES
    _publish: tuple[MessageQueue, ...] = field(init=False, repr=False, compare=False)
    _all: tuple[MessageQueue, ...] = field(init=False, repr=False, compare=False)
    _subscribe: tuple[MessageQueue, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        writable = {
            data.broker_name: data.write_queue_nums
            for data in self.queues
            if data.perm & PERM_WRITE and MASTER_ID in self.brokers[data.broker_name].storages
        }
        readable = {data.broker_name: data.read_queue_nums for data in self.queues if data.perm & PERM_READ}
        if self.order_config:
            writable = parse_order_config(self.order_config)
        everything = {data.broker_name: data.write_queue_nums for data in self.queues}
        if self.layout:
            everything = parse_order_config(self.layout)
        if self.order_config:
            everything = writable
        publish = self._numbered(writable)
        object.__setattr__(self, "_publish", publish)
        object.__setattr__(self, "_all", publish if everything == writable else self._numbered(everything))
        object.__setattr__(self, "_subscribe", publish if readable == writable else self._numbered(readable))

    def __reduce__(self) -> tuple[Any, ...]:
        # The queues, which are most of a route, are made again from the rest.
        parts = (self.topic, self.brokers, self.queues, self.order_config, self.complete, self.layout, self.attributes)
        return TopicRoute, parts

    def _numbered(self, counts: Mapping[str, int]) -> tuple[MessageQueue, ...]:
        return tuple(MessageQueue(self.topic, name, q) for name in sorted(counts) for q in range(counts[name]))

    @property
    def publish_queues(self) -> tuple[MessageQueue, ...]:
        """Queues a producer may write to, sorted (spec/messaging.md §3.3)."""
        return self._publish

    @property
    def all_queues(self) -> tuple[MessageQueue, ...]:
        """Every queue of the topic, sorted, also those whose broker is away now; of an order topic those of its
        configuration. Without a layout, those of the brokers that are listed."""
        return self._all

    def require_all_queues(self) -> tuple[MessageQueue, ...]:
        """`all_queues`; NoPermissionError where nothing may be written to the topic, ServiceNotAvailableError where it
        is not known yet which queues it has: a key's queue would be another one when that is known."""
        self.require_permission()
        if not (self.complete or self.layout or self.order_config):
            raise ServiceNotAvailableError(
                f"it is not known yet which queues topic {self.topic!r} has: the NameServer was restarted and has not "
                "heard of every broker; see `raymq status`"
            )
        return self._all

    def queue_counts(self) -> dict[str, int]:
        """The number of queues in each broker group that holds the topic, by name, also in those that are away."""
        counts = parse_order_config(self.layout) if self.layout else {}
        return counts | {data.broker_name: data.write_queue_nums for data in self.queues}

    @property
    def subscribe_queues(self) -> tuple[MessageQueue, ...]:
        """Queues a consumer may read, sorted."""
        return self._subscribe

    def require_writable(self) -> TopicRoute:
        """This route; NoPermissionError where nothing may be written to the topic, ServiceNotAvailableError where
        nothing can be now."""
        self.require_permission()
        if not self._publish:
            raise ServiceNotAvailableError(f"topic {self.topic!r} has no writable queue now; see `raymq status`")
        return self

    def require_permission(self) -> TopicRoute:
        """This route; NoPermissionError where nothing may be written to the topic."""
        if not self._publish and not any(data.perm & PERM_WRITE for data in self.queues):
            raise NoPermissionError(
                f"topic {self.topic!r} may not be written to (its permission has no W); see `raymq topic describe "
                f"{self.topic}`, or admin.update_topic"
            )
        return self

    def master_storage(self, broker_name: str) -> str:
        """The name of the storage actor that takes writes for `broker_name`; ServiceNotAvailableError where that
        broker group is not registered now, or has no master."""
        data = self.brokers.get(broker_name)
        if data is None or MASTER_ID not in data.storages:
            raise ServiceNotAvailableError(
                f"{broker_name}, which holds queues of topic {self.topic!r}, is away; see `raymq status`"
            )
        return data.storages[MASTER_ID]

    def pull_storages(self, broker_name: str) -> tuple[str, ...]:
        """The names of the storage actors that `broker_name`'s queues may be read from, the master first;
        ServiceNotAvailableError where there is none now."""
        data = self.brokers.get(broker_name)
        if data is None or not data.storages or not data.slave_read_enable:
            return (self.master_storage(broker_name),)
        return tuple(data.storages[replica] for replica in sorted(data.storages))


def spread_queues(queues: int, broker_names: list[str]) -> dict[str, int]:
    """Divide `queues` queues among broker groups as evenly as possible, the first groups taking the rest.

    >>> spread_queues(5, ["broker-a", "broker-b"])
    {'broker-a': 3, 'broker-b': 2}
    """
    share, rest = divmod(queues, len(broker_names))
    counts = {name: share + (index < rest) for index, name in enumerate(sorted(broker_names))}
    return {name: count for name, count in counts.items() if count}


def grow_queues(counts: Mapping[str, int], queues: int) -> dict[str, int]:
    """Divide `queues` queues among broker groups that have `counts` already: none gets fewer, the emptiest get more.

    InvalidArgumentError for fewer queues than there are.

    >>> grow_queues({"broker-a": 4, "broker-b": 0}, 6)
    {'broker-a': 4, 'broker-b': 2}
    """
    if queues < sum(counts.values()):
        raise InvalidArgumentError(
            f"the topic has {sum(counts.values())} queues and cannot have {queues}: messages may be in each of them"
        )
    grown = dict(counts)
    for _ in range(queues - sum(counts.values())):
        grown[min(grown, key=lambda name: (grown[name], name))] += 1
    return grown
