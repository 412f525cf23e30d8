"""The routes of topics: which brokers have the queues of a topic.

Brokers send these values to NameServers (registration), and NameServers send them to clients (routes). The values are
RocketMQ's `TopicConfig`, `QueueData`, `BrokerData` and `TopicRouteData` (spec/messaging.md §1). A broker's address is
the name of its storage actor, so clients send messages directly to the store.
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
"""Maximum number of queues of a topic in one broker group."""
QUEUES: Final = NumberRange(1, QUEUE_NUMS_MAX * BROKER_GROUPS_MAX)
"""The allowed total number of a topic's queues, in a cluster with BROKER_GROUPS_MAX broker groups. A cluster with fewer
broker groups allows fewer queues."""

ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
"""The NameServers' KV namespace that contains the queue counts of each order topic. The topic's brokers store the same
text (TopicConfig)."""


def check_perm(perm: int) -> int:
    """Return `perm` if it is a valid permission (spec/messaging.md §2.5: 0 to 7). Otherwise raise NoPermissionError, as
    RocketMQ does."""
    if isinstance(perm, bool) or not isinstance(perm, int) or not 0 <= perm <= 7:
        raise NoPermissionError(
            f"{perm!r} is not a permission: add up {PERM_READ} to read, {PERM_WRITE} to write, {PERM_INHERIT} "
            "to inherit"
        )
    return perm


def perm_text(perm: int) -> str:
    """Return a topic's permission as RocketMQ prints it: ``"RW-"``.

    >>> perm_text(6), perm_text(5)
    ('RW-', 'R-X')
    """
    return "".join(
        letter if perm & bit else "-" for letter, bit in (("R", PERM_READ), ("W", PERM_WRITE), ("X", PERM_INHERIT))
    )


def parse_order_config(text: str) -> dict[str, int]:
    """Parse a text with an order topic's queue counts by broker group, such as ``"broker-a:4;broker-b:2"``.

    Raises InvalidArgumentError if `text` has another form.
    """
    counts: dict[str, int] = {}
    for piece in text.split(";"):
        name, _, count = piece.strip().rpartition(":")
        if not name or not count.isascii() or not count.isdecimal() or not int(count) or name in counts:
            raise InvalidArgumentError(
                f"{text!r} is not an order configuration: write BROKER:QUEUES;BROKER:QUEUES, such as "
                "broker-a:4;broker-b:2"
            )
        counts[name] = int(count)
    return counts


def format_order_config(counts: Mapping[str, int]) -> str:
    """Format queue counts by broker group as the text that `parse_order_config` reads. The text is sorted by broker
    group.

    >>> format_order_config({"broker-b": 2, "broker-a": 4})
    'broker-a:4;broker-b:2'
    """
    return ";".join(f"{name}:{counts[name]}" for name in sorted(counts))


def merge_layouts(*layouts: str) -> str:
    """Merge several layouts (texts with queue counts by broker group) into one layout. The result has every broker
    group, each with its largest number of queues. The largest number is the newest, because a topic never loses queues.
    An empty layout has no broker groups. Raises InvalidArgumentError if a text is not a layout.

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
    """The version of a table of a broker or a NameServer. Versions are ordered by state version, then counter, then
    timestamp (spec/messaging.md §1.1)."""

    state_version: int = 0
    counter: int = 0
    timestamp_ms: int = 0

    def next(self, now_ms: int) -> DataVersion:
        return DataVersion(self.state_version, self.counter + 1, now_ms)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of a topic in one broker group. Queue ids run from 0 to the number of write (read) queues - 1.

    `order_config`: the queue counts of an order topic in all broker groups (parse_order_config), equal in each group;
    empty for other topics. `layout`: the queue counts of the topic in all broker groups, in the same text form. Each
    group stores the layout in its log, so that every broker can name all queues of the topic. The layout is empty if
    the group has not received a layout. `attributes`: RocketMQ's attributes (raymq.common.protocol.attributes).
    `creation_id`: random text that is chosen when the topic is created in this group. A topic that is deleted and
    created again thus has another id. The id is empty for topics that older versions of raymq created.
    """

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
    """A topic to create in one broker group, with its number of queues in that group, its layout and its attributes
    (TopicConfig)."""

    topic: str
    queue_nums: int
    layout: str = ""
    attributes: Mapping[str, str] = NO_ATTRIBUTES


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """The full registration of one broker at a NameServer.

    `storages`: maps each replica id (0 = master) to the name of the storage actor. `nodes`: maps each replica id to the
    Ray node of the storage actor. `life`: a number that grows with each start of the broker. `slave_read_enable`: True
    if consumers may read from slaves.
    """

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
    """The topics of a registered broker that changed between its versions `since` and `data_version`, without a restart
    of the broker in between. `life`: the number of the broker's start. `changed`: the current settings of changed
    topics. `removed`: deleted topics. The rest of the registration is unchanged."""

    broker_name: str
    life: int
    since: DataVersion
    data_version: DataVersion
    changed: tuple[TopicConfig, ...]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokerData:
    """A broker group in a route. `storages`: maps each replica id (0 = master) to the name of the storage actor.
    `nodes`: maps each replica id to the storage actor's Ray node, empty if unknown. `slave_read_enable`: True if
    consumers may also read from slaves."""

    cluster: str
    broker_name: str
    storages: Mapping[int, str]
    nodes: Mapping[int, str] = field(default_factory=dict)
    slave_read_enable: bool = False


@dataclass(frozen=True, slots=True)
class QueueData:
    """The queues of a topic in one broker group: their number, their permission (PERM_READ, PERM_WRITE), and the
    topic's `creation_id` in this group (TopicConfig)."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    creation_id: str = ""


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The route of a topic: the data that a client needs to send messages to the topic and to consume them.

    If `order_config` (parse_order_config) is set, producers write only to the queues in it, even while one of the
    brokers is unreachable, because a sharding key's queue must not change. `complete` is False in a route from a
    NameServer that has just restarted: more brokers may have the topic, but they may not have registered again yet.

    `layout` (merge_layouts): the topic's queues in all broker groups, including unreachable groups. Producers
    distribute messages with a sharding key over these queues. So the queue of a key does not change if the route has
    fewer brokers.

    `attributes`: which messages the topic accepts. Producers check messages against the attributes.
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
        # The queues are the largest part of a route. So they are not pickled, and unpickling computes them again from
        # the other fields.
        parts = (self.topic, self.brokers, self.queues, self.order_config, self.complete, self.layout, self.attributes)
        return TopicRoute, parts

    def _numbered(self, counts: Mapping[str, int]) -> tuple[MessageQueue, ...]:
        return tuple(MessageQueue(self.topic, name, q) for name in sorted(counts) for q in range(counts[name]))

    @property
    def publish_queues(self) -> tuple[MessageQueue, ...]:
        """The queues to which a producer may write, sorted (spec/messaging.md §3.3)."""
        return self._publish

    @property
    def all_queues(self) -> tuple[MessageQueue, ...]:
        """All queues of the topic, sorted, including queues of unreachable brokers. The route's layout lists them. For
        an order topic, they are the queues of its `order_config`. If the route has no layout, only the queues of the
        brokers in the route are known."""
        return self._all

    def require_all_queues(self) -> tuple[MessageQueue, ...]:
        """Return all queues of the topic, sorted (`all_queues`). Raises NoPermissionError if the topic is not writable.
        Raises ServiceNotAvailableError if the topic's queues are not known yet, because a sharding key could then be
        mapped to another queue."""
        self.require_permission()
        if not (self.complete or self.layout or self.order_config):
            raise ServiceNotAvailableError(
                f"the queues of topic {self.topic!r} are not known yet, because the NameServer was restarted and "
                "not every broker has registered again; see `raymq status`"
            )
        return self._all

    def queue_counts(self) -> dict[str, int]:
        """The number of the topic's queues in each broker group, by the group's name, including unreachable broker
        groups."""
        counts = parse_order_config(self.layout) if self.layout else {}
        return counts | {data.broker_name: data.write_queue_nums for data in self.queues}

    @property
    def subscribe_queues(self) -> tuple[MessageQueue, ...]:
        """The queues of the topic that a consumer may read, sorted."""
        return self._subscribe

    def require_writable(self) -> TopicRoute:
        """Return this route if it can be used to send. Raises NoPermissionError if the topic is not writable, and
        ServiceNotAvailableError if no writable queue is available now."""
        self.require_permission()
        if not self._publish:
            raise ServiceNotAvailableError(f"topic {self.topic!r} has no writable queue now; see `raymq status`")
        return self

    def require_permission(self) -> TopicRoute:
        """Return this route if the topic is writable, else raise NoPermissionError."""
        if not self._publish and not any(data.perm & PERM_WRITE for data in self.queues):
            raise NoPermissionError(
                f"topic {self.topic!r} is not writable (its permission has no W); see `raymq topic describe "
                f"{self.topic}`, or admin.update_topic"
            )
        return self

    def master_storage(self, broker_name: str) -> str:
        """Return the name of the storage actor that accepts writes for `broker_name`. Raises ServiceNotAvailableError
        if the broker group is not registered now, or has no master."""
        data = self.brokers.get(broker_name)
        if data is None or MASTER_ID not in data.storages:
            raise ServiceNotAvailableError(
                f"broker group {broker_name!r}, which has queues of topic {self.topic!r}, is not available; "
                "see `raymq status`"
            )
        return data.storages[MASTER_ID]

    def pull_storages(self, broker_name: str) -> tuple[str, ...]:
        """Return the names of the storage actors from which `broker_name`'s queues may be read, the master first.
        Raises ServiceNotAvailableError if no such actor is available now."""
        data = self.brokers.get(broker_name)
        if data is None or not data.storages or not data.slave_read_enable:
            return (self.master_storage(broker_name),)
        return tuple(data.storages[replica] for replica in sorted(data.storages))


def spread_queues(queues: int, broker_names: list[str]) -> dict[str, int]:
    """Divide `queues` queues among broker groups as evenly as possible. The first groups get the remainder.

    >>> spread_queues(5, ["broker-a", "broker-b"])
    {'broker-a': 3, 'broker-b': 2}
    """
    share, rest = divmod(queues, len(broker_names))
    counts = {name: share + (index < rest) for index, name in enumerate(sorted(broker_names))}
    return {name: count for name, count in counts.items() if count}


def grow_queues(counts: Mapping[str, int], queues: int) -> dict[str, int]:
    """Grow a topic to `queues` queues in total. `counts`: the number of queues that each broker group already has. No
    group loses queues; the groups with the fewest queues get more.

    Raises InvalidArgumentError if `queues` is less than the sum of `counts`.

    >>> grow_queues({"broker-a": 4, "broker-b": 0}, 6)
    {'broker-a': 4, 'broker-b': 2}
    """
    if queues < sum(counts.values()):
        raise InvalidArgumentError(
            f"the topic has {sum(counts.values())} queues and cannot shrink to {queues}, because each queue "
            "may contain messages"
        )
    grown = dict(counts)
    for _ in range(queues - sum(counts.values())):
        grown[min(grown, key=lambda name: (grown[name], name))] += 1
    return grown
