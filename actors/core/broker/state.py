"""A broker group's state without its messages: topics, consumer groups and their committed offsets.

This module makes a broker's decisions about topics, groups and commits.

Every change is one JSON record in the internal topic `rmq_sys_broker_state`, queue 0, of the group's own store. So
changes are flushed, recovered and replicated as messages are (design §3). The state is the result of the records,
applied in order:

    {"kind": "topic",        "topic": T, "read_queue_nums": 4, "write_queue_nums": 4, "perm": 6, "order": false,
     "order_config": "", "layout": "broker-a:4;broker-b:4", "attributes": {"message.type": "FIFO"}}
    {"kind": "topic_delete", "topic": T, "next_reset_version": 1}
    {"kind": "group",        "group": G, "consume_enable": true, "retry_max_times": 16, … as GroupConfig}
    {"kind": "group_delete", "group": G}
    {"kind": "forbid",       "group": G, "topics": [T, …]}  all topics that the group may not read
    {"kind": "offsets",      "group": G, "topic": T, "offsets": {"0": 17, "3": 9}}
    {"kind": "reset",        "group": G, "topic": T, "offsets": {"0": 5}, "reset_versions": {"0": 2}}
    {"kind": "offsets_delete", "group": G, "topics": [T, …]}  drops what the group has committed in these topics
    {"kind": "pop",          "group": G, "queues": [[T, 0, …], …]}  leases of simple consumers (actors.core.pop.leases)
    {"kind": "setting",      "name": "store.delete_when", "value": "04"}  a live setting (raymq.common.config.live)
    {"kind": "setting_unset", "name": "store.delete_when"}                resets it to raymq.yaml
    {"kind": "access",       "state": {…}}  the first broker's users and policies (raymq.remoting.access.state)
    {"kind": "mark"}         changes nothing: a reader of the mark has read everything before it

Each record sets a complete value, so applying a record again changes nothing. A restart may therefore begin at any
record at or before the position of the snapshot in `config/*.json` (actors.core.broker.snapshot). The snapshot only
shortens the restart, and lets retention delete old records.

After a crash every change that was acknowledged is in the log, and so in the state that is read from the log.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

import msgspec

from actors.core.broker.offsets import OffsetTable, Owners, TopicCommits, judge_commits
from actors.core.pop.leases import POP, PopTable
from raymq.common.config.live import LiveOptions, check_change, live_name
from raymq.common.config.values import SettingValue
from raymq.common.errors import (
    GroupNotExistError,
    InvalidArgumentError,
    NoPermissionError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.names import (
    check_group,
    check_topic,
    check_user_topic,
    is_internal_topic,
    is_light_queue,
    is_system_group,
    retry_topic,
)
from raymq.common.numbers import whole_number
from raymq.common.protocol.attributes import NO_ATTRIBUTES, TopicAttributes, changed_attributes
from raymq.common.protocol.group import GroupConfig, OffsetCommit, check_group_config
from raymq.common.protocol.route import (
    PERM_READ,
    QUEUE_NUMS_MAX,
    DataVersion,
    NewTopic,
    TopicConfig,
    check_perm,
    merge_layouts,
    parse_order_config,
)
from raymq.remoting.access.changes import AccessChange, carry_out
from raymq.remoting.access.state import AuthState

Change = dict[str, Any]

MARK: Final[Change] = {"kind": "mark"}

CREATION_ID_BYTES: Final = 8
_TOPIC_FIELDS: Final = tuple(one.name for one in fields(TopicConfig) if one.name != "topic")
_GROUP_FIELDS: Final = tuple(one.name for one in fields(GroupConfig) if one.name != "group")
"""The fields of a "group" record besides its kind and its group. If a record of an older raymq version lacks a field,
the field's default applies."""


@dataclass(slots=True)
class BrokerState:
    """The state of one broker group.

    A `decide_…` method checks a request and returns the record to store, without changing the state. It returns None or
    an empty list if the request changes nothing. `apply` applies a stored record to the state.
    """

    topics: dict[str, TopicConfig] = field(default_factory=dict)
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    offsets: OffsetTable = field(default_factory=OffsetTable)
    topics_version: DataVersion = field(default_factory=DataVersion)
    pop: PopTable = field(default_factory=PopTable)
    forbidden: dict[str, frozenset[str]] = field(default_factory=dict)
    """The topics that each group may not read, by group. An entry survives the deletion of its topic, but not the
    deletion of its group."""
    settings: dict[str, SettingValue] = field(default_factory=dict)
    """The live settings that differ from raymq.yaml, by full name. Each change makes a new dict; the old dict is never
    modified."""
    access: AuthState | None = None
    """The users and policies, if they were changed since raymq was started; otherwise None.

    Only the first broker group can have a value other than None.
    """

    def copy(self) -> BrokerState:
        """Return an independent copy of the broker group's state."""
        return BrokerState(
            dict(self.topics),
            dict(self.groups),
            self.offsets.copy(),
            self.topics_version,
            self.pop.copy(),
            dict(self.forbidden),
            self.settings,
            self.access,
        )

    def decide_topic(
        self,
        topic: str,
        read_queue_nums: int,
        write_queue_nums: int,
        layout: str = "",
        attributes: Mapping[str, str] = NO_ATTRIBUTES,
    ) -> Change | None:
        """Check a request to create a topic, and return the record that creates it. `layout`: the topic's queues in all
        broker groups (raymq.common.protocol.route.TopicConfig).

        Raises IllegalNameError if the name is invalid, InvalidArgumentError if another argument is invalid, and
        TopicExistsError if the topic exists with other values.
        """
        check_user_topic(topic)
        for nums in (read_queue_nums, write_queue_nums):
            whole_number("queues per broker group", nums, 1, QUEUE_NUMS_MAX)
        wanted = {name: text for name, text in attributes.items() if text}
        TopicAttributes.parse(wanted)
        known = self.topics.get(topic)
        if known is not None:
            if (known.read_queue_nums, known.write_queue_nums) != (read_queue_nums, write_queue_nums):
                raise TopicExistsError(topic, f"with {known.write_queue_nums} queues on this broker group")
            for name, text in attributes.items():
                if known.attributes.get(name, "") != text:
                    raise TopicExistsError(topic, f"with {name} {known.attributes.get(name) or 'its default value'}")
            return _layout_change(known, layout)
        return _creation(
            TopicConfig(topic, read_queue_nums, write_queue_nums, layout=merge_layouts(layout), attributes=wanted)
        )

    def decide_topic_update(
        self,
        topic: str,
        queue_nums: int | None,
        perm: int | None,
        order_config: str | None,
        layout: str = "",
        attributes: Mapping[str, str] = NO_ATTRIBUTES,
    ) -> list[Change]:
        """Check a request to change a topic, and return the records of the change. Arguments that are None stay
        unchanged.

        The number of queues may grow, but never shrink, because each queue may have messages. An empty `order_config`
        makes the topic an ordinary topic. The entries of `layout` are added to the topic's existing layout. Each
        attribute in `attributes` is changed, or removed if its value is empty.

        Raises TopicNotExistError if the topic does not exist, IllegalNameError for a system topic, NoPermissionError if
        `perm` is not a valid permission, and InvalidArgumentError if another value is invalid.
        """
        known = self.require_topic(check_user_topic(topic))
        config = known
        if perm is not None:
            config = replace(config, perm=check_perm(perm))
        if order_config is not None:
            if order_config:
                parse_order_config(order_config)
            config = replace(config, order=bool(order_config), order_config=order_config)
        if queue_nums is not None:
            whole_number("queues per broker group", queue_nums, 1, QUEUE_NUMS_MAX)
            if queue_nums < max(known.read_queue_nums, known.write_queue_nums):
                raise InvalidArgumentError(
                    f"topic {topic!r} has {known.read_queue_nums} queues on this broker group and cannot shrink "
                    f"to {queue_nums}, because each queue may contain messages"
                )
            config = replace(config, read_queue_nums=queue_nums, write_queue_nums=queue_nums)
        config = replace(config, layout=merge_layouts(known.layout, layout))
        if attributes:
            config = replace(config, attributes=changed_attributes(topic, known.attributes, attributes))
        return [] if config == known else [_topic_change(config)]

    def decide_auto_topic(self, topic: str, queue_nums: int, queue_nums_max: int, layout: str = "") -> list[Change]:
        """Return the records that create a topic because a message is sent to it (spec/messaging.md §2.5, golden fact
        12).

        If the topic already exists, only the queues in `layout` are added. `queue_nums` is the number of queues that
        the client requests. Raises IllegalNameError if the name is invalid. Raises TopicNotExistError for a retry or
        dead-letter topic, because only a group creates these topics.
        """
        check_user_topic(topic)
        if topic in self.topics:
            change = _layout_change(self.topics[topic], layout)
            return [] if change is None else [change]
        if is_internal_topic(topic):
            raise TopicNotExistError(topic)
        queues = max(1, min(queue_nums, queue_nums_max))
        return [_creation(TopicConfig(topic, queues, queues, layout=merge_layouts(layout)))]

    def decide_topic_delete(self, topic: str) -> Change:
        """Return the record that removes a topic and the offsets committed in it. Raises IllegalNameError for a system
        topic, and TopicNotExistError if the topic does not exist."""
        check_user_topic(topic)
        self.require_topic(topic)
        return {"kind": "topic_delete", "topic": topic, "next_reset_version": self.offsets.next_version(topic)}

    def decide_setting(self, start: LiveOptions, name: str, value: SettingValue) -> Change | None:
        """Check a change of a live setting in a group that was started with the settings `start`, and return the record
        of the change.

        Raises the errors of raymq.common.config.live.check_change.
        """
        full, value = check_change(start, self.settings, name, value)
        if full in self.settings and self.settings[full] == value:
            return None
        return {"kind": "setting", "name": full, "value": value}

    def decide_setting_unset(self, name: str) -> Change | None:
        """Return the record that resets a live setting to its value in raymq.yaml. Raises InvalidArgumentError if no
        live setting has this name."""
        full = live_name(name)
        return {"kind": "setting_unset", "name": full} if full in self.settings else None

    def decide_access(self, start: AuthState, change: AccessChange, now_ms: int) -> Change | None:
        """Check a change of the users and policies, and return the record of the change. `start` has the users and
        policies from before the first change.

        Raises InvalidArgumentError, UserNotExistError and PolicyNotExistError as
        raymq.remoting.access.changes.carry_out does.
        """
        before = start if self.access is None else self.access
        after = carry_out(before, change)
        return None if after is before else {"kind": "access", "state": after.kept_at(now_ms).dump()}

    def decide_group(self, group: str, *, auto_create: bool = True) -> list[Change]:
        """Return the records that create a group and its retry topic (spec/messaging.md §2.7, §2.8), if the group does
        not exist.

        Raises IllegalNameError if the name is invalid. Raises GroupNotExistError for a new group, unless `auto_create`
        is set or the group is a system group.
        """
        check_group(group)
        config = self.groups.get(group)
        if config is None and not auto_create and not is_system_group(group):
            raise GroupNotExistError(group)
        return self.decide_group_config(config or GroupConfig(group))

    def decide_group_config(self, config: GroupConfig) -> list[Change]:
        """Return the records that set the configuration of a group, and the number of queues of its retry topic.

        The retry topic never loses queues, because a message may wait in each queue. Raises IllegalNameError if the
        group's name is invalid, and InvalidArgumentError if a value is invalid.
        """
        check_group(config.group)
        check_group_config(config)
        is_new = self.groups.get(config.group) != config
        changes: list[Change] = [{"kind": "group", **asdict(config)}] if is_new else []
        return changes + self.decide_group_topic(retry_topic(config.group), config.retry_queue_nums)

    def decide_group_topic(self, topic: str, queue_nums: int) -> list[Change]:
        """Return the records that give a topic at least `queue_nums` queues. The topic is one that the server creates
        itself, for retries or for dead letters."""
        known = self.topics.get(topic)
        if known is None:
            return [_creation(TopicConfig(topic, queue_nums, queue_nums))]
        if known.read_queue_nums >= queue_nums and known.write_queue_nums >= queue_nums:
            return []
        read_queue_nums = max(known.read_queue_nums, queue_nums)
        write_queue_nums = max(known.write_queue_nums, queue_nums)
        return [_topic_change(replace(known, read_queue_nums=read_queue_nums, write_queue_nums=write_queue_nums))]

    def decide_group_delete(self, group: str) -> Change:
        """Return the record that removes a group and its offsets. Raises GroupNotExistError if the group does not
        exist."""
        self.require_group(group)
        return {"kind": "group_delete", "group": group}

    def decide_forbid(self, group: str, topic: str, *, forbidden: bool) -> list[Change]:
        """Return the records that forbid a group to read a topic, or that allow it again. They also create the group if
        this broker group does not have it.

        Raises IllegalNameError if the group's name is invalid. The topic need not exist in this broker group: it may be
        deleted, or have queues only in other broker groups.
        """
        check_group(group)
        check_topic(topic)
        known = self.forbidden.get(group, frozenset())
        wanted = known | {topic} if forbidden else known - {topic}
        if wanted == known:
            return []
        created = [] if group in self.groups else self.decide_group(group)
        return [*created, {"kind": "forbid", "group": group, "topics": sorted(wanted)}]

    def decide_commits(
        self, owners: Owners, group: str, commits: Mapping[str, Mapping[int, OffsetCommit]]
    ) -> tuple[list[Change], dict[str, TopicCommits], dict[str, list[int]]]:
        """Check a group's commits of offsets, given by topic and queue id (actors.core.broker.offsets).

        Returns the records to store, the decision about each topic's commits, and the queues that do not exist. A queue
        does not exist if its topic was deleted, or was created again with fewer queues. Raises GroupNotExistError if
        the group does not exist, and InvalidArgumentError if an offset or a queue id is impossible.
        """
        self.require_group(group)
        changes, verdicts, gone = [], {}, {}
        for topic, by_queue in commits.items():
            if topic not in self.topics and not is_light_queue(topic):
                gone[topic] = list(by_queue)
                continue
            queue_nums = self.require_topic(topic).read_queue_nums
            here = {q: commit for q, commit in by_queue.items() if q < queue_nums or not commit.generation}
            self.check_queues(topic, here)
            if len(here) < len(by_queue):
                gone[topic] = [q for q in by_queue if q not in here]
            verdict = verdicts[topic] = judge_commits(self.offsets, owners, group, topic, here)
            if verdict.offsets:
                offsets = {str(queue_id): offset for queue_id, offset in verdict.offsets.items()}
                changes.append({"kind": "offsets", "group": group, "topic": topic, "offsets": offsets})
        return changes, verdicts, gone

    def decide_starts(self, group: str, topic: str, offsets: Mapping[int, int]) -> Change | None:
        """Return the record that commits a group's start offsets in queues of a topic. Queues in which the group has
        already committed an offset are left out."""
        self.require_group(group)
        self.check_queues(topic, offsets)
        new = {str(q): offset for q, offset in offsets.items() if self.offsets.get(group, topic, q) is None}
        return {"kind": "offsets", "group": group, "topic": topic, "offsets": new} if new else None

    def decide_topics(self, topics: Iterable[NewTopic]) -> list[Change]:
        """Check a request to create several topics, and return the records that create all of them. Raises the errors
        of `decide_topic`; after an error no topic is created."""
        changes: dict[str, Change] = {}
        for topic, nums, layout, attributes in topics:
            change = self.decide_topic(topic, nums, nums, layout, attributes)
            if change is not None:
                changes[topic] = change
        return list(changes.values())

    def decide_reset(self, group: str, topic: str, offsets: Mapping[int, int]) -> Change | None:
        """Return the record that resets a group's committed offsets, even if members own the queues.

        Raises GroupNotExistError or TopicNotExistError if the group or the topic does not exist, and
        InvalidArgumentError if a queue or an offset is invalid.
        """
        self.require_group(group)
        self.check_queues(topic, offsets)
        for offset in offsets.values():
            if offset < 0:
                raise InvalidArgumentError(f"cannot reset to offset {offset}: offsets start at 0")
        versions = {queue_id: self.offsets.version(group, topic, queue_id) + 1 for queue_id in offsets}
        if not offsets:
            return None
        return {
            "kind": "reset",
            "group": group,
            "topic": topic,
            "offsets": {str(queue_id): offset for queue_id, offset in offsets.items()},
            "reset_versions": {str(queue_id): version for queue_id, version in versions.items()},
        }

    def decide_offsets_delete(self, group: str, topics: Iterable[str]) -> Change | None:
        """Return the record that drops a group's committed offsets in topics. The topics need not exist in this broker
        group. Raises GroupNotExistError if the group does not exist."""
        self.require_group(group)
        known = [topic for topic in sorted(set(topics)) if self.offsets.of(group, topic)]
        return {"kind": "offsets_delete", "group": group, "topics": known} if known else None

    def left_topics(self, subscriptions: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
        """Return, for each group, topics in which the group has committed offsets but to which it does not subscribe.
        Only groups in `subscriptions` are considered. Retry topics are left out."""
        left: dict[str, list[str]] = {}
        for topic, group in sorted(self.offsets.tables):
            if group not in subscriptions or group not in self.groups or topic not in self.topics:
                continue
            if topic not in subscriptions[group] and topic != retry_topic(group):
                left.setdefault(group, []).append(topic)
        return left

    def check_queues(self, topic: str, queue_ids: Iterable[int]) -> None:
        """Raise TopicNotExistError if the topic does not exist. Raise InvalidArgumentError if one of the queues
        `queue_ids` does not exist in the topic."""
        config = self.require_topic(topic)
        for queue_id in queue_ids:
            if not 0 <= queue_id < config.read_queue_nums:
                raise InvalidArgumentError(
                    f"topic {topic!r} has no queue {queue_id} in this broker group; it has "
                    f"{config.read_queue_nums} queues"
                )

    def committed(self, group: str, topic: str, queue_id: int) -> int:
        """Return a group's committed offset in a queue; 0 if the group has committed none."""
        known = self.offsets.get(group, topic, queue_id)
        return 0 if known is None else known.queue_offset

    def require_topic(self, topic: str) -> TopicConfig:
        """Return the topic's configuration, or raise TopicNotExistError. The topic of a light queue (RocketMQ's LMQ) is
        never created explicitly, so it always exists: its configuration has one queue."""
        if is_light_queue(topic):
            return TopicConfig(topic, 1, 1, PERM_READ)
        config = self.topics.get(topic)
        if config is None:
            raise TopicNotExistError(topic)
        return config

    def require_group(self, group: str) -> GroupConfig:
        """Return the group's configuration, or raise GroupNotExistError."""
        config = self.groups.get(group)
        if config is None:
            raise GroupNotExistError(group)
        return config

    def may_read(self, group: str, topic: str) -> bool:
        """Return False if the group is forbidden to read the topic."""
        return topic not in self.forbidden.get(group, ())

    def stop_reason(self, group: str, topic: str) -> str:
        """Return the reason why a group must stop reading a topic; empty if the group may continue."""
        config = self.groups.get(group)
        if config is not None and not config.consume_enable:
            return f"group {group!r} may not consume: its setting consume_enable is off; see admin.update_group"
        if not self.may_read(group, topic):
            return (
                f"group {group!r} is forbidden to read topic {topic!r}; to allow it: `raymq group allow "
                f"{group} {topic}`"
            )
        return ""

    def check_readable(self, group: str, topic: str) -> TopicConfig:
        """Return the configuration of a topic that a group may read. The group need not exist. Raises
        TopicNotExistError if the topic does not exist.

        Raises NoPermissionError if the group may not read the topic. The text names the reason: the topic's permission,
        the group's consume_enable, or a ban of the group from the topic.
        """
        config = self.require_topic(topic)
        if not config.perm & PERM_READ:
            raise NoPermissionError(
                f"topic {topic!r} is not readable (its permission has no R); see admin.update_topic"
            )
        if reason := self.stop_reason(group, topic):
            raise NoPermissionError(reason)
        return config

    def check_broadcast(self, group: str, topics: Iterable[str] = ()) -> None:
        """Raise NoPermissionError if an existing group may not consume at all, may not consume in the mode
        BROADCASTING, or may not read one of `topics`."""
        config = self.groups.get(group)
        off = [name for name in ("consume_enable", "consume_broadcast_enable") if config and not getattr(config, name)]
        if off:
            raise NoPermissionError(
                f"group {group!r} may not consume with BROADCASTING: its setting {' and its '.join(off)} is off; "
                "see admin.update_group"
            )
        for topic in topics:
            if not self.may_read(group, topic):
                self.check_readable(group, topic)

    def apply(self, change: Change, now_ms: int) -> None:
        """Apply a stored record to the broker group's state. Raises InvalidArgumentError if this version of raymq does
        not support the record's kind."""
        handler = _APPLY.get(str(change.get("kind")))
        if handler is None:
            raise InvalidArgumentError(
                f"the broker's state has a record of unknown kind {change.get('kind')!r}; a newer version of "
                "raymq wrote this store: start that version"
            )
        handler(self, change, now_ms)

    def _apply_topic(self, change: Change, now_ms: int) -> None:
        topic = change["topic"]
        values = {name: change[name] for name in _TOPIC_FIELDS if name in change}
        self.topics[topic] = TopicConfig(topic, **values)
        self.topics_version = self.topics_version.next(now_ms)

    def _apply_topic_delete(self, change: Change, now_ms: int) -> None:
        topic = change["topic"]
        self.topics.pop(topic, None)
        self.offsets.drop_topic(topic, change.get("next_reset_version", 0))
        self.pop.drop_topic(topic)
        self.topics_version = self.topics_version.next(now_ms)

    def _apply_group(self, change: Change, now_ms: int) -> None:
        values = {name: change[name] for name in _GROUP_FIELDS if name in change}
        self.groups[change["group"]] = GroupConfig(change["group"], **values)

    def _apply_group_delete(self, change: Change, now_ms: int) -> None:
        self.groups.pop(change["group"], None)
        self.offsets.drop_group(change["group"])
        self.pop.drop_group(change["group"])
        self.forbidden.pop(change["group"], None)

    def _apply_forbid(self, change: Change, now_ms: int) -> None:
        topics = frozenset(change["topics"])
        if topics:
            self.forbidden[change["group"]] = topics
        else:
            self.forbidden.pop(change["group"], None)

    def _apply_offsets(self, change: Change, now_ms: int) -> None:
        versions = offsets_by_queue(change.get("reset_versions", {}))
        self.offsets.set(change["group"], change["topic"], offsets_by_queue(change["offsets"]), versions)

    def _apply_reset(self, change: Change, now_ms: int) -> None:
        self._apply_offsets(change, now_ms)
        self.pop.forget_queues(change["group"], change["topic"], offsets_by_queue(change["offsets"]))

    def _apply_offsets_delete(self, change: Change, now_ms: int) -> None:
        for topic in change["topics"]:
            self.pop.forget_queues(change["group"], topic, list(self.offsets.of(change["group"], topic)))
            self.offsets.drop(change["group"], topic)

    def _apply_pop(self, change: Change, now_ms: int) -> None:
        for topic, offsets in self.pop.apply(change).items():
            self.offsets.set(change["group"], topic, offsets, {})

    def _apply_setting(self, change: Change, now_ms: int) -> None:
        self.settings = {**self.settings, change["name"]: change["value"]}
        self._settings_changed(change["name"], now_ms)

    def _apply_setting_unset(self, change: Change, now_ms: int) -> None:
        self.settings = {name: value for name, value in self.settings.items() if name != change["name"]}
        self._settings_changed(change["name"], now_ms)

    def _apply_access(self, change: Change, now_ms: int) -> None:
        self.access = AuthState.load(change["state"])

    def _settings_changed(self, name: str, now_ms: int) -> None:
        # NameServers must get changes of settings whose names begin with "broker.": these settings are part of the
        # broker's registration.
        if name.startswith("broker."):
            self.topics_version = self.topics_version.next(now_ms)

    def _apply_mark(self, change: Change, now_ms: int) -> None:
        """Apply a marker record, which does not change the state. The broker writes it to find out when it has read
        every earlier record."""


def _creation(config: TopicConfig) -> Change:
    """Build the record of a new topic. The topic's random id distinguishes it from later topics of the same
    name."""
    return _topic_change(replace(config, creation_id=secrets.token_hex(CREATION_ID_BYTES)))


def _topic_change(config: TopicConfig) -> Change:
    return {"kind": "topic", **asdict(config)}


def _layout_change(known: TopicConfig, layout: str) -> Change | None:
    """Return the record that adds the queues in `layout` to the existing layout of a topic; None if the layout does not
    change."""
    merged = merge_layouts(known.layout, layout)
    return None if merged == known.layout else _topic_change(replace(known, layout=merged))


def offsets_by_queue(table: Mapping[str, int]) -> dict[int, int]:
    """Convert a JSON table of offsets or versions: its keys become queue ids (int instead of str)."""
    return {int(queue_id): value for queue_id, value in table.items()}


_APPLY: Final[dict[str, Callable[[BrokerState, Change, int], None]]] = {
    "topic": BrokerState._apply_topic,
    "topic_delete": BrokerState._apply_topic_delete,
    "group": BrokerState._apply_group,
    "group_delete": BrokerState._apply_group_delete,
    "forbid": BrokerState._apply_forbid,
    "offsets": BrokerState._apply_offsets,
    "offsets_delete": BrokerState._apply_offsets_delete,
    "access": BrokerState._apply_access,
    "reset": BrokerState._apply_reset,
    POP: BrokerState._apply_pop,
    "setting": BrokerState._apply_setting,
    "setting_unset": BrokerState._apply_setting_unset,
    "mark": BrokerState._apply_mark,
}


def encode_change(change: Change) -> bytes:
    """Encode a change of the broker's state as the body of the record that stores the change."""
    return msgspec.json.encode(change)


def decode_change(body: bytes) -> Change:
    """Decode the change in the body of a record. Raises InvalidArgumentError if the body is not a JSON object."""
    change = json.loads(body)
    if not isinstance(change, dict):
        raise InvalidArgumentError(f"a record of the broker's state, {body[:80]!r}, is not a JSON object")
    return change


def replay(state: BrokerState, records: Iterable[tuple[bytes, int]]) -> None:
    """Apply stored records to the broker group's state, in order. Each record is given as (body, store time in
    ms)."""
    for body, stored_ms in records:
        state.apply(decode_change(body), stored_ms)
