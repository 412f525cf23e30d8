"""What a broker group remembers besides messages: topics, consumer groups and their committed offsets.

Every change is one JSON record in the internal topic `rmq_sys_broker_state`, queue 0, of the group's own store, so it
is flushed, recovered and replicated as messages are (design §3). The state is what the records say, applied in order:

    {"kind": "topic",        "topic": T, "read_queue_nums": 4, "write_queue_nums": 4, "perm": 6}
    {"kind": "topic_delete", "topic": T}
    {"kind": "group",        "group": G}
    {"kind": "group_delete", "group": G}
    {"kind": "offsets",      "group": G, "topic": T, "offsets": {"0": 17, "3": 9}}

Each record sets a value outright, so applying one again changes nothing; a restart may therefore begin anywhere at or
before the place the snapshot in `config/*.json` covers. The snapshot has RocketMQ's names and shapes (spec/storage.md
§4) and is only a shortcut, except that it lets retention delete old records.

After a crash: every change that was acknowledged is in the log, hence here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from raymq.errors import GroupNotExistError, InvalidArgumentError, TopicExistsError, TopicNotExistError
from raymq.names import SYSTEM_PREFIX, check_group, check_user_topic
from raymq.route import PERM_READ, PERM_WRITE, DataVersion, TopicConfig

STATE_TOPIC: Final = SYSTEM_PREFIX + "broker_state"
QUEUE_NUMS_MAX: Final = 1024

TOPICS_FILE: Final = "topics.json"
GROUPS_FILE: Final = "subscriptionGroup.json"
OFFSETS_FILE: Final = "consumerOffset.json"
POSITION_FILE: Final = "brokerStatePosition.json"
"""raymq's own: {"queueOffset": n}, the first state record that the other three files do not contain."""

Change = dict[str, Any]


@dataclass(slots=True)
class BrokerState:
    """Pure state of one broker group. `decide_…` checks a request and returns the record to store, changing nothing;
    `apply` carries a stored record out. None from a decision means: it is so already."""

    topics: dict[str, TopicConfig] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    offsets: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    topics_version: DataVersion = field(default_factory=DataVersion)

    def decide_topic(self, topic: str, read_queue_nums: int, write_queue_nums: int) -> Change | None:
        """Create a topic. Raises IllegalNameError, InvalidArgumentError, or TopicExistsError if it differs."""
        check_user_topic(topic)
        for nums in (read_queue_nums, write_queue_nums):
            if not isinstance(nums, int) or not 1 <= nums <= QUEUE_NUMS_MAX:
                raise InvalidArgumentError(f"a topic has 1 to {QUEUE_NUMS_MAX} queues per broker group, not {nums}")
        known = self.topics.get(topic)
        if known is not None:
            if (known.read_queue_nums, known.write_queue_nums) == (read_queue_nums, write_queue_nums):
                return None
            raise TopicExistsError(topic, f"with {known.write_queue_nums} queues on this broker group")
        return {
            "kind": "topic",
            "topic": topic,
            "read_queue_nums": read_queue_nums,
            "write_queue_nums": write_queue_nums,
            "perm": PERM_READ | PERM_WRITE,
        }

    def decide_topic_delete(self, topic: str) -> Change:
        check_user_topic(topic)
        self.require_topic(topic)
        return {"kind": "topic_delete", "topic": topic}

    def decide_group(self, group: str) -> Change | None:
        check_group(group)
        return None if group in self.groups else {"kind": "group", "group": group}

    def decide_group_delete(self, group: str) -> Change:
        self.require_group(group)
        return {"kind": "group_delete", "group": group}

    def decide_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> Change | None:
        """Commit offsets (the next to be consumed) per queue id."""
        self.require_group(group)
        config = self.require_topic(topic)
        for queue_id, offset in offsets.items():
            if not 0 <= queue_id < config.read_queue_nums:
                raise InvalidArgumentError(
                    f"topic {topic!r} has no queue {queue_id} here; it has {config.read_queue_nums}"
                )
            if offset < 0:
                raise InvalidArgumentError(f"cannot commit offset {offset}: offsets start at 0")
        known = self.offsets.get((topic, group), {})
        changed = {str(queue_id): offset for queue_id, offset in offsets.items() if known.get(queue_id) != offset}
        return {"kind": "offsets", "group": group, "topic": topic, "offsets": changed} if changed else None

    def require_topic(self, topic: str) -> TopicConfig:
        """The topic's configuration, or TopicNotExistError."""
        config = self.topics.get(topic)
        if config is None:
            raise TopicNotExistError(topic)
        return config

    def require_group(self, group: str) -> None:
        if group not in self.groups:
            raise GroupNotExistError(group)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Queue id to committed offset; queues without one are absent."""
        return dict(self.offsets.get((topic, group), {}))

    def group_topics(self, group: str) -> list[str]:
        """Topics in which the group has committed offsets, sorted."""
        return sorted(topic for topic, name in self.offsets if name == group)

    def apply(self, change: Change, now_ms: int) -> None:
        """Carry out a record. Raises InvalidArgumentError for a kind this version does not know."""
        handler = _APPLY.get(str(change.get("kind")))
        if handler is None:
            raise InvalidArgumentError(
                f"state record of unknown kind {change.get('kind')!r}; a newer raymq wrote this store"
            )
        handler(self, change, now_ms)

    def _apply_topic(self, change: Change, now_ms: int) -> None:
        topic = change["topic"]
        self.topics[topic] = TopicConfig(topic, change["read_queue_nums"], change["write_queue_nums"], change["perm"])
        self.topics_version = self.topics_version.next(now_ms)

    def _apply_topic_delete(self, change: Change, now_ms: int) -> None:
        topic = change["topic"]
        self.topics.pop(topic, None)
        for key in [key for key in self.offsets if key[0] == topic]:
            del self.offsets[key]
        self.topics_version = self.topics_version.next(now_ms)

    def _apply_group(self, change: Change, now_ms: int) -> None:
        self.groups.add(change["group"])

    def _apply_group_delete(self, change: Change, now_ms: int) -> None:
        self.groups.discard(change["group"])
        for key in [key for key in self.offsets if key[1] == change["group"]]:
            del self.offsets[key]

    def _apply_offsets(self, change: Change, now_ms: int) -> None:
        table = self.offsets.setdefault((change["topic"], change["group"]), {})
        table.update({int(queue_id): offset for queue_id, offset in change["offsets"].items()})


_APPLY: Final[dict[str, Callable[[BrokerState, Change, int], None]]] = {
    "topic": BrokerState._apply_topic,
    "topic_delete": BrokerState._apply_topic_delete,
    "group": BrokerState._apply_group,
    "group_delete": BrokerState._apply_group_delete,
    "offsets": BrokerState._apply_offsets,
}


def encode_change(change: Change) -> bytes:
    """A change as the body of its record."""
    return json.dumps(change, separators=(",", ":"), ensure_ascii=False).encode()


def decode_change(body: bytes) -> Change:
    change = json.loads(body)
    if not isinstance(change, dict):
        raise InvalidArgumentError(f"state record {body[:80]!r} is not a JSON object")
    return change


def dump_snapshot(state: BrokerState, position: int) -> dict[str, str]:
    """The state as RocketMQ's config files (spec/storage.md §4), name to text, in the order they must be written: the
    position last, so that a crash in between leaves an older position, which is harmless."""
    version = state.topics_version
    data_version = {
        "counter": version.counter,
        "stateVersion": version.state_version,
        "timestamp": version.timestamp_ms,
    }
    topics = {
        config.topic: {
            "attributes": {},
            "order": False,
            "perm": config.perm,
            "readQueueNums": config.read_queue_nums,
            "topicFilterType": "SINGLE_TAG",
            "topicName": config.topic,
            "topicSysFlag": 0,
            "writeQueueNums": config.write_queue_nums,
        }
        for config in state.topics.values()
    }
    groups = {group: {**_GROUP_DEFAULTS, "groupName": group} for group in sorted(state.groups)}
    offsets = {f"{topic}@{group}": table for (topic, group), table in sorted(state.offsets.items())}
    return {
        TOPICS_FILE: _pretty({"dataVersion": data_version, "topicConfigTable": topics}),
        GROUPS_FILE: _pretty({"dataVersion": data_version, "forbiddenTable": {}, "subscriptionGroupTable": groups}),
        OFFSETS_FILE: _pretty({"dataVersion": data_version, "offsetTable": offsets}),
        POSITION_FILE: _pretty({"queueOffset": position}),
    }


def load_snapshot(read: Callable[[str], str | None], parse: Callable[[str], Any]) -> tuple[BrokerState, int]:
    """State and position from the config files. `read` gives a file's text or None, `parse` reads RocketMQ's dialect.

    Files RocketMQ wrote are taken as they are, with position 0. Missing files mean an empty state.
    """

    def table(name: str, key: str) -> dict[Any, Any]:
        text = read(name)
        value = {} if text is None else parse(text).get(key, {})
        return dict(value) if isinstance(value, dict) else {}

    state = BrokerState()
    for name, entry in table(TOPICS_FILE, "topicConfigTable").items():
        state.topics[name] = TopicConfig(name, entry["readQueueNums"], entry["writeQueueNums"], entry["perm"])
    version = table(TOPICS_FILE, "dataVersion")
    state.topics_version = DataVersion(
        version.get("stateVersion", 0), version.get("counter", 0), version.get("timestamp", 0)
    )
    state.groups = {str(name) for name in table(GROUPS_FILE, "subscriptionGroupTable")}
    for key, offsets in table(OFFSETS_FILE, "offsetTable").items():
        topic, _, group = str(key).partition("@")
        state.offsets[topic, group] = {int(queue_id): int(offset) for queue_id, offset in offsets.items()}
    position = read(POSITION_FILE)
    return state, 0 if position is None else int(json.loads(position)["queueOffset"])


def replay(state: BrokerState, records: Iterable[tuple[bytes, int]]) -> None:
    """Apply stored records, given as (body, store time in ms), in their order."""
    for body, stored_ms in records:
        state.apply(decode_change(body), stored_ms)


_GROUP_DEFAULTS: Final = {
    "brokerId": 0,
    "consumeBroadcastEnable": True,
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "consumeMessageOrderly": False,
    "consumeTimeoutMinute": 15,
    "groupSysFlag": 0,
    "notifyConsumerIdsChangedEnable": True,
    "retryMaxTimes": 16,
    "retryQueueNums": 1,
    "whichBrokerWhenConsumeSlowly": 1,
}


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent="\t", sort_keys=True, separators=(",", ":"), ensure_ascii=False)
