"""Administration of consumer groups: their offsets, members and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final, Literal, Unpack

from raymq.client.admin.base import ADMIN_TIMEOUT_S
from raymq.client.admin.dead_letters import DeadLetters
from raymq.client.admin.messages import MessageAdmin
from raymq.client.admin.topics import TopicAdmin
from raymq.client.consumer.rebalance_client import offsets_reset
from raymq.common.errors import (
    GroupNotExistError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    TopicNotExistError,
)
from raymq.common.message import MessageQueue, checked_queue
from raymq.common.names import check_group, check_topic, dlq_topic, retry_topic
from raymq.common.numbers import POINT_IN_TIME_MS, bounded
from raymq.common.protocol.clients import ConsumerConnection, ProducerConnection
from raymq.common.protocol.group import GroupChanges, GroupConfig, GroupQueueProgress, GroupSummary, check_group_config
from raymq.common.protocol.stats import GroupStats, add_up

GROUPS_PER_CALL: Final = 500
"""Maximum number of groups that one call to a broker creates."""
_ENDS: Final = ("earliest", "latest")


class NewOffsets(dict[MessageQueue, int]):
    """A group's new offsets, by queue. `old` has the previous offsets; None for a queue in which the group had
    committed nothing."""

    def __init__(self, new: Mapping[MessageQueue, int], old: Mapping[MessageQueue, int | None]) -> None:
        super().__init__(new)
        self.old = dict(old)


def check_settings(settings: Mapping[str, object]) -> None:
    """Raise InvalidArgumentError if a name is not a setting of a group."""
    known = {field.name for field in fields(GroupConfig)} - {"group"}
    if unknown := sorted(settings.keys() - known):
        raise InvalidArgumentError(
            f"a group has no setting {', '.join(unknown)}; its settings are {', '.join(sorted(known))}"
        )


class GroupAdmin(TopicAdmin, MessageAdmin):
    """Administration calls about consumer groups. Repeating a call is safe."""

    def list_groups(self) -> list[str]:
        """Return the names of all consumer groups, sorted."""
        groups: set[str] = set()
        for broker_name in self._broker_names():
            groups.update(self._call_broker(broker_name, "groups"))
        return sorted(groups)

    def describe_group(self, group: str) -> list[GroupQueueProgress]:
        """Return a group's progress in every queue of the topics in which the group has committed offsets, sorted by
        queue. Raises GroupNotExistError if the group does not exist."""
        check_group(group)
        topics: set[str] = set().union(*self._call_brokers_that_know(group, "group_topics", group))
        progress: list[GroupQueueProgress] = []
        for topic in topics:
            for broker_name in self.topic_route(topic).brokers:
                progress += self._call_broker(broker_name, "group_progress", group, topic)
        return sorted(progress, key=lambda entry: entry.queue)

    def group_summary(self, group: str) -> GroupSummary:
        """Return the state of a group as a whole: its lag in messages and in time, the number of messages that wait for
        a retry, and the number of dead letters. Raises GroupNotExistError if the group does not exist."""
        queues = self.describe_group(group)
        retries, dead = retry_topic(group), dlq_topic(group)
        own = [entry for entry in queues if entry.queue.topic != retries]
        return GroupSummary(
            group,
            tuple(own),
            sum(entry.lag for entry in own),
            max((entry.lag_ms for entry in own), default=0),
            self._retry_lag(group, [entry for entry in queues if entry.queue.topic == retries]),
            self._held(dead),
        )

    def _retry_lag(self, group: str, known: list[GroupQueueProgress]) -> int:
        return sum(entry.lag for entry in known) if known else self._held(retry_topic(group))

    def _held(self, topic: str) -> int:
        """Return the number of messages that a topic holds; 0 if the topic does not exist."""
        try:
            # The topic may be missing, because a broker creates a group's retry or dead-letter topic only with its
            # first message.
            route = self.topic_route(topic)
        except TopicNotExistError:
            return 0
        bounds = [self._queue_bounds(queue) for queue in route.subscribe_queues]
        return sum(one.max_offset - one.min_offset for one in bounds)

    def create_group(self, group: str | GroupConfig, **settings: Unpack[GroupChanges]) -> None:
        """Create a consumer group at every broker, for example ``create_group("billing", retry_max_times=5)``.

        `settings`: fields of GroupConfig. On return every broker has the group. An existing group with these settings
        is not changed, and keeps its other settings. Raises InvalidArgumentError if the group exists with another value
        of one of the settings, or if a setting is unknown or invalid; nothing is changed then. Raises IllegalNameError
        if the group's name is illegal. A GroupConfig in place of the name sets all settings, also of an existing group.
        """
        if isinstance(group, GroupConfig):
            if settings:
                raise InvalidArgumentError("create_group takes a GroupConfig or settings by name, not both")
            self.create_groups([group])
            return
        check_settings(settings)
        try:
            known = self.group_config(check_group(group))
        except GroupNotExistError:
            known = GroupConfig(group)
            wanted = replace(known, **settings)
        else:
            wanted = replace(known, **settings)
            check_group_config(wanted)
            other = [f"{name}={now}" for name in settings if (now := getattr(known, name)) != getattr(wanted, name)]
            if other:
                raise InvalidArgumentError(
                    f"consumer group {group!r} exists already with {', '.join(other)}; change it: "
                    f"`raymq group update {group}`, or admin.update_group"
                )
        self.create_groups([wanted])

    def create_groups(self, configs: Sequence[GroupConfig]) -> None:
        """Create groups at every broker, or change their configurations, in few calls.

        Raises IllegalNameError if a name is illegal, and InvalidArgumentError if a configuration is invalid. After an
        error some groups may be changed; repeating the call is safe.
        """
        for config in configs:
            check_group(config.group)
            check_group_config(config)
        switched = set[str]()
        for broker_name in self._recent_broker_names():
            for start in range(0, len(configs), GROUPS_PER_CALL):
                part = list(configs[start : start + GROUPS_PER_CALL])
                switched.update(self._call_broker(broker_name, "update_groups", part))
        # Tell the members of each changed group to query the brokers about their queues, as after an offset reset. So
        # the changed settings take effect at once.
        for group in sorted(switched):
            offsets_reset(group, ADMIN_TIMEOUT_S)

    def group_config(self, group: str) -> GroupConfig:
        """Return a group's configuration. Raises GroupNotExistError if the group does not exist."""
        found: list[GroupConfig] = self._call_brokers_that_know(group, "group_config", group)
        return found[0]

    def update_group(self, group: str, **changes: Unpack[GroupChanges]) -> GroupConfig:
        """Change fields of a group's configuration, and return the new GroupConfig.

        ``consume_enable=False`` stops the group's consumers within seconds: pull and simple consumers raise
        NoPermissionError, and the `status()` of a push consumer shows the reason. With ``consume_enable=True`` the
        consumers continue within seconds, from their committed offsets. ``consume_broadcast_enable`` stops and restarts
        consumers in BROADCASTING mode only. Raises GroupNotExistError if the group does not exist, and
        InvalidArgumentError if a field is unknown or its value is invalid.
        """
        check_settings(changes)
        config = replace(self.group_config(group), **changes)
        self.create_group(config)
        return config

    def delete_group(self, group: str, *, dead_letters: bool = False) -> None:
        """Delete a group, its offsets and the messages that wait for a retry. With `dead_letters`, also delete the
        group's dead letters. Raises GroupNotExistError if the group does not exist."""
        check_group(group)
        self._call_brokers_that_know(group, "delete_group", group, dead_letters)

    def forbid(self, group: str, topic: str) -> None:
        """Forbid a group to read a topic, at every broker, until `allow` is called or the group is deleted.

        The group's members, also in BROADCASTING mode, commit the messages that they have consumed and stop reading the
        topic within seconds. After that, pull and simple consumers raise NoPermissionError, and the `status()` of push
        consumers shows the reason. Other topics and the group's retry topic continue. A repeated call changes nothing.
        Raises GroupNotExistError or TopicNotExistError if the group or the topic does not exist.
        """
        self.topic_route(topic)
        self.group_config(group)
        for broker_name in self._recent_broker_names():
            self._call_broker(broker_name, "forbid_topic", group, topic, True)
        # Let the group's members query the brokers about their queues, as after an offset reset. The answers also show
        # which queues the group may read, so the members stop reading the forbidden topic at once.
        offsets_reset(group, ADMIN_TIMEOUT_S)

    def allow(self, group: str, topic: str) -> None:
        """Allow a group to read a topic that `forbid` has forbidden. Members read the topic again within seconds, from
        their committed offsets. A repeated call changes nothing. Raises GroupNotExistError if the group does not exist.
        """
        self.group_config(group)
        check_topic(topic)
        for broker_name in self._recent_broker_names():
            self._call_broker(broker_name, "forbid_topic", group, topic, False)
        # Make the group's members query the brokers about the queues of the group. The members then resume reading the
        # allowed topic at once.
        offsets_reset(group, ADMIN_TIMEOUT_S)

    def forbidden_topics(self, group: str) -> list[str]:
        """Return the topics that a group may not read, sorted. Raises GroupNotExistError if the group does not
        exist."""
        tables: list[list[str]] = self._call_brokers_that_know(check_group(group), "forbidden_topics", group)
        return sorted({topic for table in tables for topic in table})

    @bounded(timestamp_ms=POINT_IN_TIME_MS)
    def reset_offsets(
        self,
        group: str,
        topic: str,
        to: Literal["earliest", "latest"] | None = None,
        *,
        timestamp_ms: int | None = None,
        offset: int | None = None,
        queue: MessageQueue | None = None,
        dry_run: bool = False,
    ) -> NewOffsets:
        """Set a group's offset in all queues of a topic, or in one `queue`, even while the group's consumers run. The
        new offset is that of the earliest or latest message, of the first message stored at or after `timestamp_ms`, or
        `offset`.

        Returns the new offsets, and the previous offsets as `old`. With `dry_run` nothing changes. Running consumers
        receive the new offset with their next heartbeat. They finish the messages that they are processing, but do not
        commit them. Raises GroupNotExistError or TopicNotExistError if the group or the topic does not exist;
        OffsetOutOfRangeError if the queue does not hold `offset`; InvalidArgumentError if the arguments are invalid.
        """
        if sum(wanted is not None for wanted in (to, timestamp_ms, offset)) != 1 or to not in (None, *_ENDS):
            raise InvalidArgumentError('pass exactly one of to="earliest", to="latest", timestamp_ms=… and offset=…')
        route = self._routes.wait(check_topic(topic), ADMIN_TIMEOUT_S)
        queues = route.subscribe_queues if queue is None else (checked_queue("queue", queue),)
        if unknown := [str(one) for one in queues if one not in route.subscribe_queues]:
            raise InvalidArgumentError(f"topic {topic!r} has no queue {', '.join(unknown)}")
        self._call_brokers_that_know(check_group(group), "group_config", group)
        offsets = {one: self._target_offset(one, to, timestamp_ms, offset) for one in queues}
        return self._move_offsets(group, topic, offsets, dry_run=dry_run)

    def clone_offsets(self, source: str, target: str, topic: str, *, dry_run: bool = False) -> NewOffsets:
        """Set the offsets of group `target` in a topic to the offsets of group `source`.

        Returns the new offsets, and the previous offsets as `old`. Creates `target` if it does not exist. With
        `dry_run` nothing changes. Raises GroupNotExistError if `source` does not exist, and TopicNotExistError if the
        topic does not exist.
        """
        offsets: dict[MessageQueue, int] = {}
        self._call_brokers_that_know(check_group(source), "group_config", source)
        for broker_name in self.topic_route(topic).brokers:
            committed = self._call_broker(broker_name, "committed_offsets", source, topic)
            offsets |= {MessageQueue(topic, broker_name, queue_id): at for queue_id, at in committed.items()}
        return self._move_offsets(check_group(target), topic, offsets, dry_run=dry_run)

    def delete_offsets(self, group: str, topic: str, *, dry_run: bool = False) -> dict[MessageQueue, int]:
        """Delete a group's offsets in a topic that the group no longer consumes. The group then has no lag in the
        topic.

        If a consumer of the group subscribes to the topic again, it starts as a new group does. The topic need not
        exist. Returns the deleted offsets, by queue. With `dry_run` nothing changes. Brokers delete such offsets by
        themselves after retention has deleted the messages at the offsets, if the group has consumers and no consumer
        subscribes to the topic. Raises GroupNotExistError if the group does not exist. Raises InvalidArgumentError
        while a consumer of the group subscribes to the topic.
        """
        check_topic(topic)
        readers = [
            one.client_id
            for one in self.consumer_connections(check_group(group))
            if topic in one.consumer.subscriptions
        ]
        if readers:
            raise InvalidArgumentError(
                f"{len(readers)} consumers of group {group!r} subscribe to topic {topic!r}, the first in "
                f"{readers[0]}: stop these consumers first (see `raymq group connections {group}`), or reset "
                "their offsets"
            )
        self._call_brokers_that_know(group, "group_config", group)
        offsets: dict[MessageQueue, int] = {}
        for broker_name in self._broker_names():
            committed = self._call_broker(broker_name, "committed_offsets", group, topic)
            offsets |= {MessageQueue(topic, broker_name, queue_id): at for queue_id, at in sorted(committed.items())}
        if not dry_run:
            for broker_name in sorted({queue.broker_name for queue in offsets}):
                self._call_broker(broker_name, "delete_offsets", group, [topic])
        return offsets

    def _move_offsets(
        self, group: str, topic: str, offsets: Mapping[MessageQueue, int], *, dry_run: bool
    ) -> NewOffsets:
        """Set a group's offsets, unless `dry_run` is true. Returns the new and the previous offsets."""
        old: dict[MessageQueue, int | None] = dict.fromkeys(offsets)
        for broker_name in sorted({queue.broker_name for queue in offsets}):
            committed = self._call_broker(broker_name, "committed_offsets", group, topic)
            old |= {queue: committed.get(queue.queue_id) for queue in offsets if queue.broker_name == broker_name}
        if not dry_run:
            self._set_offsets(group, offsets)
        return NewOffsets(offsets, old)

    def _target_offset(self, queue: MessageQueue, to: str | None, timestamp_ms: int | None, offset: int | None) -> int:
        if timestamp_ms is not None:
            return self.offset_by_time(queue, timestamp_ms)
        bounds = self._queue_bounds(queue)
        if offset is None:
            return bounds.min_offset if to == "earliest" else bounds.max_offset
        if not bounds.min_offset <= offset <= bounds.max_offset:
            raise OffsetOutOfRangeError(str(queue), offset, bounds.min_offset, bounds.max_offset)
        return offset

    def _set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        tables: dict[tuple[str, str], dict[int, int]] = {}
        for queue, offset in offsets.items():
            tables.setdefault((queue.broker_name, queue.topic), {})[queue.queue_id] = offset
        for (broker_name, topic), table in tables.items():
            self._call_broker(broker_name, "ensure_group", group)
            self._call_broker(broker_name, "reset_offsets", group, topic, table)
        offsets_reset(group, ADMIN_TIMEOUT_S)

    def dead_letters(self, group: str) -> DeadLetters:
        """Return the dead letters of a group: the messages that the group could not consume in all its attempts. Raises
        IllegalNameError if the group's name is illegal."""
        return DeadLetters(group, self._routes, self._storages, partial(self.group_config, group))

    def producer_connections(self, group: str | None = None) -> list[ProducerConnection]:
        """Return the clients that produce in a group, or in any group, as reported in the clients' heartbeats of the
        last two minutes."""
        return self._connections("producer_connections", group)

    def consumer_connections(self, group: str | None = None) -> list[ConsumerConnection]:
        """Return the consumers of a group, or of all groups, with their subscriptions, as reported in the clients'
        heartbeats of the last two minutes."""
        return self._connections("consumer_connections", group)

    def _connections(self, method: str, group: str | None) -> list[Any]:
        """Collect the client connections that the brokers report, without duplicates. All brokers are asked: each
        client sends heartbeats to all of them, but a broker may have missed some heartbeats."""
        found: dict[Any, Any] = {}
        for broker_name in self._broker_names():
            for connection in self._call_broker(broker_name, method, group):
                if isinstance(connection, ConsumerConnection):
                    of = (connection.consumer.group, connection.consumer.member)
                else:
                    of = (connection.group, "")
                found.setdefault((connection.client_id, *of), connection)
        return [found[key] for key in sorted(found)]

    def group_stats(self, group: str) -> dict[str, GroupStats]:
        """Return the numbers of messages that a group consumed and sent back, by topic, over all brokers. Raises
        GroupNotExistError if the group does not exist."""
        tables: list[dict[str, GroupStats]] = self._call_brokers_that_know(group, "group_stats", group)
        topics = sorted({topic for table in tables for topic in table})
        return {topic: add_up(GroupStats, [table[topic] for table in tables if topic in table]) for topic in topics}

    def _call_brokers_that_know(self, group: str, method: str, *args: Any) -> list[Any]:
        """Call a method of every broker. Returns the answers of the brokers that have the group. Raises
        GroupNotExistError if no broker has the group."""
        answers = []
        for broker_name in self._broker_names():
            try:
                answers.append(self._call_broker(broker_name, method, *args))
            except GroupNotExistError:
                continue  # skip a broker that does not have the consumer group
        if not answers:
            raise self._group_not_exist(group)
        return answers
