"""Administration of topics: their queues, permissions, routes and statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from raymq.client.admin.base import ADMIN_SHORT_CALL_TIMEOUT_S, ADMIN_TIMEOUT_S, AdminBase, unknown_broker
from raymq.common.errors import (
    InvalidArgumentError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.message import PRIORITY_LEVELS, MessageQueue
from raymq.common.names import check_topic, check_user_topic, is_internal_topic
from raymq.common.numbers import bounded, whole_number
from raymq.common.protocol.attributes import (
    MESSAGE_TYPE,
    NO_ATTRIBUTES,
    RESERVE_TIME_RANGE,
    CleanupPolicy,
    QueueType,
    TopicAttributes,
    TopicMessageType,
    attribute_changes,
)
from raymq.common.protocol.bounds import MAX_BACKLOG, MAX_BACKLOG_BYTES, BacklogPolicy
from raymq.common.protocol.route import (
    QUEUE_NUMS_MAX,
    NewTopic,
    TopicRoute,
    check_perm,
    format_order_config,
    grow_queues,
    parse_order_config,
    spread_queues,
)
from raymq.common.protocol.stats import TopicStats, add_up
from raymq.common.protocol.store import QueueBounds, QueuePosition
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

TOPIC_QUEUES: Final = 4
"""Default number of queues of a new topic, over all broker groups. A PRIORITY topic has more: one for each level."""
TOPICS_PER_CALL: Final = 500
"""Maximum number of topics that one call to a broker creates."""
BROKERS_KEPT_S: Final = 1.0
"""Time, in seconds, for which TopicAdmin caches the list of broker groups. It uses the list to spread new topics over
the groups."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueDescription:
    """A queue and the offset range that it holds: [`min_offset`, `max_offset`)."""

    queue: MessageQueue
    min_offset: int
    max_offset: int

    @property
    def messages(self) -> int:
        """The number of messages in the queue, counted as its maximum offset minus its minimum offset."""
        return self.max_offset - self.min_offset


class TopicAdmin(AdminBase):
    """Administration calls about topics. Repeating a call is safe."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        super().__init__(routes, storages)
        self._known_brokers: tuple[list[str], float] = ([], 0.0)
        """Cached names of the broker groups, and the monotonic time until which they are valid."""

    @bounded(reserve_time_s=RESERVE_TIME_RANGE, max_backlog=MAX_BACKLOG, max_backlog_bytes=MAX_BACKLOG_BYTES)
    def create_topic(
        self,
        topic: str,
        queues: int | None = None,
        *,
        message_type: TopicMessageType | str | None = None,
        reserve_time_s: float | None = None,
        queue_type: QueueType | str | None = None,
        cleanup_policy: CleanupPolicy | str | None = None,
        max_backlog: int | None = None,
        max_backlog_bytes: int | None = None,
        backlog_policy: BacklogPolicy | str | None = None,
        backlog_groups: Sequence[str] | None = None,
        brokers: Sequence[str] | None = None,
    ) -> None:
        """Create a topic with `queues` queues in all, spread evenly over all broker groups, or over the broker groups
        in `brokers`. The default is 4 queues, or for a topic of the type PRIORITY ten queues in each of these broker
        groups: one for each priority.

        `message_type`: the type of messages that the topic accepts, by default all types (TopicMessageType).
        `reserve_time_s`: the time for which messages are kept, at least 60 s, by default the store's time
        (file_reserved_time_hours). `queue_type` "batch": messages that are sent together are stored as one record, an
        inner batch, and compressed as a whole. `cleanup_policy` COMPACTION: only the newest message of each key is
        kept, and each message needs a key. The policy cannot be changed later.

        `max_backlog`, `max_backlog_bytes`: the limits of the topic's backlog, in messages and in bytes of records, by
        default none. The backlog is what the slowest of `backlog_groups` has not committed, or without groups all
        stored messages. `backlog_policy`: what happens at a limit (BacklogPolicy), by default "block": producers wait.

        When the call returns, every client can use the topic, and a bound is in force. An existing topic with the same
        settings is not changed. Raises IllegalNameError if the name is illegal. Raises InvalidArgumentError if a value
        is invalid or a broker group is unknown. Raises TopicExistsError if the topic exists with another number of
        queues, other attributes, or on a broker group that `brokers` does not name.
        """
        changes = attribute_changes(
            message_type,
            cleanup_policy,
            reserve_time_s,
            queue_type,
            max_backlog=max_backlog,
            max_backlog_bytes=max_backlog_bytes,
            backlog_policy=backlog_policy,
            backlog_groups=backlog_groups,
        )
        chosen = None if brokers is None else self._chosen_brokers(check_user_topic(topic), brokers)
        if queues is None:
            queues = TOPIC_QUEUES
            if changes.get(MESSAGE_TYPE) == TopicMessageType.PRIORITY:
                queues = PRIORITY_LEVELS * len(self._recent_broker_names() if chosen is None else chosen)
        self._create({topic: queues}, changes, chosen)

    def _chosen_brokers(self, topic: str, names: Sequence[str]) -> list[str]:
        """Return the names of the broker groups for a topic, without duplicates. Raises InvalidArgumentError if a name
        is unknown or no name is given, and TopicExistsError if the topic already has queues on other broker groups."""
        chosen = list(dict.fromkeys(names))
        live = self._broker_names()
        missing = [name for name in chosen if name not in live]
        if missing:
            raise unknown_broker(missing[0], live)
        if not chosen:
            raise InvalidArgumentError(f"choose at least one broker group for topic {topic!r}: {', '.join(live)}")
        with suppress(TopicNotExistError):
            others = sorted(set(self.topic_route(topic).queue_counts()) - set(chosen))
            if others:
                raise TopicExistsError(topic, f"and has queues in broker group {', '.join(others)}")
        return chosen

    def create_topics(self, topics: Mapping[str, int]) -> None:
        """Create topics in few calls, as `create_topic` does. `topics` maps each topic to its number of queues over all
        broker groups.

        After an error some topics may exist; repeating the call is safe.
        """
        self._create(topics, NO_ATTRIBUTES)

    def _create(
        self, topics: Mapping[str, int], attributes: Mapping[str, str], chosen: Sequence[str] | None = None
    ) -> None:
        brokers = self._recent_broker_names() if chosen is None else list(chosen)
        by_broker: dict[str, list[NewTopic]] = {}
        for topic, queues in topics.items():
            check_user_topic(topic)
            whole_number("queues", queues, 1, QUEUE_NUMS_MAX * len(brokers))
            counts = spread_queues(queues, brokers)
            for broker_name, count in counts.items():
                new_topic = NewTopic(topic, count, format_order_config(counts), attributes)
                by_broker.setdefault(broker_name, []).append(new_topic)
        known_to_all = True
        for broker_name, new in by_broker.items():
            for start in range(0, len(new), TOPICS_PER_CALL):
                known = self._call_broker(broker_name, "create_topics", new[start : start + TOPICS_PER_CALL])
                known_to_all = known_to_all and known
        for topic in topics:
            self._routes.invalidate(topic)
        if not known_to_all:
            self._wait_for_routes(topics)

    def _recent_broker_names(self) -> list[str]:
        """Return the names of all live broker groups, from a cached list that is at most BROKERS_KEPT_S old."""
        names, until_s = self._known_brokers
        if time.monotonic() >= until_s:
            names = self._broker_names()
            if not names:
                raise ServiceNotAvailableError("no broker is registered at the NameServer; see `raymq status`")
            self._known_brokers = names, time.monotonic() + BROKERS_KEPT_S
        return names

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages and the offsets committed in it. Raises TopicNotExistError if the topic does
        not exist.

        If a broker that has queues of the topic is unreachable, raises ServiceNotAvailableError or RequestTimeoutError
        after 20 s; the topic stays on that broker. Delete the topic again when the broker is reachable.
        """
        route = self.topic_route(check_user_topic(topic))
        for broker_name in sorted(route.queue_counts(), key=lambda name: (name not in route.brokers, name)):
            try:
                self._call_broker(broker_name, "delete_topic", topic)
            except TopicNotExistError:
                # skip this broker: it no longer has the topic, because an earlier, incomplete call of `delete_topic`
                # deleted it there
                continue
        self._routes.invalidate(topic)

    @bounded(reserve_time_s=RESERVE_TIME_RANGE, max_backlog=MAX_BACKLOG, max_backlog_bytes=MAX_BACKLOG_BYTES)
    def update_topic(
        self,
        topic: str,
        *,
        queues: int | None = None,
        perm: int | None = None,
        message_type: TopicMessageType | str | None = None,
        reserve_time_s: float | None = None,
        max_backlog: int | None = None,
        max_backlog_bytes: int | None = None,
        backlog_policy: BacklogPolicy | str | None = None,
        backlog_groups: Sequence[str] | None = None,
    ) -> None:
        """Change properties of a topic.

        `queues`: the number of queues over all broker groups, which cannot decrease. `perm`: the permission (4 to read
        plus 2 to write). `message_type`: the type of the topic's messages; existing messages are not checked.
        `reserve_time_s`: the time for which messages are kept (0: the store's time); a longer time does not restore
        deleted messages. `max_backlog`, `max_backlog_bytes`, `backlog_policy`, `backlog_groups`: the topic's bound, as
        in `create_topic`; a limit of 0 removes the limit, and an empty list of groups lets all stored messages count.
        When the call returns, every client that reads the topic's route gets the change; other clients get it within
        half a minute. A bound is in force when the call returns, if the stores answer.

        With more queues, sharding keys map to other queues. If the order of a key's messages matters, let consumers
        finish earlier messages first. Every broker of the topic is called, so all of them must run.

        Raises TopicNotExistError if the topic does not exist; IllegalNameError if its name is illegal;
        NoPermissionError if the topic has no permission; InvalidArgumentError if a value is invalid.
        """
        check_user_topic(topic)
        route = self.topic_route(topic)
        counts = route.queue_counts()
        grown: dict[str, int] = {}
        if queues is not None:
            known = {**dict.fromkeys(self._broker_names(), 0), **counts}
            grown = grow_queues(known, whole_number("queues", queues, 1, QUEUE_NUMS_MAX * len(known)))
        if perm is not None:
            check_perm(perm)
        changes = attribute_changes(
            message_type,
            None,
            reserve_time_s,
            max_backlog=max_backlog,
            max_backlog_bytes=max_backlog_bytes,
            backlog_policy=backlog_policy,
            backlog_groups=backlog_groups,
        )
        for broker_name in counts:
            self._call_broker(broker_name, "update_topic", topic, grown.get(broker_name), perm, None, "", changes)
        for broker_name in grown.keys() - counts.keys():
            if grown[broker_name]:
                attributes = {**route.attributes.mapping(), **changes}
                nums = grown[broker_name]
                self._call_broker(broker_name, "create_topic", topic, nums, nums, "", attributes)
                self._call_broker(broker_name, "update_topic", topic, None, perm, route.order_config)
        self._set_layout(topic, {name: count for name, count in grown.items() if count})
        self._routes.invalidate(topic)

    def _set_layout(self, topic: str, counts: Mapping[str, int]) -> None:
        """Send the topic's number of queues in each broker group to all brokers of the topic. Called only after new
        queues exist. Otherwise a sharding key could select a queue that does not exist yet."""
        for broker_name in counts:
            self._call_broker(broker_name, "update_topic", topic, None, None, None, format_order_config(counts))

    def set_order_config(self, topic: str, config: str | None) -> None:
        """Make a topic an order topic: its messages go only to the queues in `config`, even while one of the brokers is
        unreachable. A sharding key therefore never changes its queue.

        `config`: for example ``"broker-a:4;broker-b:2"``; None makes the topic a normal topic again. Every broker that
        has the topic stores the configuration. Raises TopicNotExistError if the topic does not exist. Raises
        InvalidArgumentError if the topic does not have the queues.
        """
        route = self.topic_route(check_user_topic(topic))
        held = route.queue_counts()
        for broker_name, count in (parse_order_config(config) if config is not None else {}).items():
            if count > held.get(broker_name, 0):
                raise InvalidArgumentError(
                    f"topic {topic!r} has {held.get(broker_name, 0)} queues in broker group {broker_name!r}, "
                    f"not {count}"
                )
        for broker_name in held:
            self._call_broker(broker_name, "update_topic", topic, None, None, config or "")
        self._routes.invalidate(topic)

    def order_config(self, topic: str) -> str | None:
        """Return the queues of an order topic, in the format of `set_order_config`; None if the topic is not an order
        topic. Raises TopicNotExistError if the topic does not exist."""
        return self.topic_route(topic).order_config or None

    def topic_stats(self, topic: str) -> TopicStats:
        """Return the numbers of messages and bytes put into a topic, over all brokers. Raises TopicNotExistError if the
        topic does not exist."""
        parts: list[TopicStats] = [
            self._call_broker(name, "topic_stats", topic) for name in self.topic_route(topic).brokers
        ]
        return add_up(TopicStats, parts)

    def list_topics(self, *, internal: bool = False) -> list[str]:
        """Return the names of all topics, sorted. With `internal`, includes the groups' retry and dead-letter topics
        and the server's own topics."""
        return [topic for topic in self._routes.topics() if internal or not is_internal_topic(topic)]

    def topic_attributes(self, topics: Iterable[str]) -> dict[str, TopicAttributes]:
        """Return the attributes of topics, in few calls: the types of their messages, and how long or by which policy
        the messages are kept. Leaves out topics that do not exist, and topics whose brokers are all unreachable."""
        wanted = list(topics)
        self._routes.fetch(wanted)
        found: dict[str, TopicAttributes] = {}
        for topic in wanted:
            with suppress(TopicNotExistError, ServiceNotAvailableError):
                found[topic] = self._routes.get(topic).attributes
        return found

    def topic_route(self, topic: str) -> TopicRoute:
        """Return the broker groups and queues of a topic. Raises TopicNotExistError if the topic does not exist.

        Raises ServiceNotAvailableError or RequestTimeoutError if no NameServer answers within 20 s.
        """
        check_topic(topic)
        self._routes.invalidate(topic)
        return self._routes.wait(topic, ADMIN_TIMEOUT_S)

    def topic_routes(self, topics: Iterable[str]) -> dict[str, TopicRoute]:
        """Return the current routes of topics from one NameServer, in one call.

        Leaves out unknown topics. Leaves out all topics while the NameServer has just restarted and may not have the
        routes of every broker.
        """
        wanted = list(topics)
        return self._routes.read(wanted) if wanted else {}

    def describe_topic(self, topic: str) -> list[QueueDescription]:
        """Return every queue of a topic with its offset range, with one call for each broker group. Raises
        TopicNotExistError if the topic does not exist."""
        described = []
        for queues in _by_broker(self.topic_route(topic).subscribe_queues):
            asked = [(queue.topic, queue.queue_id) for queue in queues]
            bounds = self._ask_master(queues[0], partial(_bounds_of, asked))
            described += [
                QueueDescription(queue, one.min_offset, one.max_offset)
                for queue, one in zip(queues, bounds, strict=True)
            ]
        return described

    def kept_since(self, topic: str) -> dict[MessageQueue, int | None]:
        """Return, for each queue of a topic, when its first message was stored, in ms since 1970; None for an empty
        queue. Makes two calls for each broker group. Raises TopicNotExistError if the topic does not exist."""
        described = self.describe_topic(topic)
        since: dict[MessageQueue, int | None] = dict.fromkeys(one.queue for one in described)
        first = {one.queue: one.min_offset for one in described if one.messages}
        for queues in _by_broker(first):
            asked = [QueuePosition(queue.topic, queue.queue_id, first[queue]) for queue in queues]
            times_ms = self._ask_master(queues[0], partial(_times_of, asked))
            since |= {queue: at_ms or None for queue, at_ms in zip(queues, times_ms, strict=True)}
        return since

    def _ask_master(self, queue: MessageQueue, ask: Callable[[StorageClient, float], T]) -> T:
        """Call `ask` with the storage actor of the queue's master, and return its result."""
        return call_master(
            self._routes,
            self._storages,
            queue,
            ADMIN_TIMEOUT_S,
            lambda storage, left_s: ask(storage, min(left_s, ADMIN_SHORT_CALL_TIMEOUT_S)),
        )

    def _wait_for_routes(self, topics: Mapping[str, int]) -> None:
        """Wait until a NameServer shows all of the topics' queues, because brokers register them asynchronously. Raises
        RequestTimeoutError after ADMIN_TIMEOUT_S."""
        deadline_s = time.monotonic() + ADMIN_TIMEOUT_S
        missing = dict(topics)
        while True:
            try:
                self._routes.fetch(missing)
                for topic in list(missing):
                    if len(self._routes.get(topic).publish_queues) >= missing[topic]:
                        del missing[topic]
                    else:
                        self._routes.invalidate(topic)
            except RaymqError as error:
                if not isinstance(error, TopicNotExistError) and not error.retryable:
                    raise
            if not missing:
                return
            if time.monotonic() > deadline_s:
                raise RequestTimeoutError(f"the registration of topic {next(iter(missing))!r}", ADMIN_TIMEOUT_S)
            time.sleep(0.02)


def _by_broker(queues: Iterable[MessageQueue]) -> list[list[MessageQueue]]:
    """Group queues by broker group. The queues of a broker group keep their order."""
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.broker_name, []).append(queue)
    return list(found.values())


def _bounds_of(queues: list[tuple[str, int]], storage: StorageClient, timeout_s: float) -> list[QueueBounds]:
    return storage.bounds_of_queues(queues, timeout_s)


def _times_of(positions: list[QueuePosition], storage: StorageClient, timeout_s: float) -> list[int]:
    return storage.stored_times(positions, timeout_s)
