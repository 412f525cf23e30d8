"""The snapshot of a broker group's state: RocketMQ's config files and one file of raymq's own (spec/storage.md §4).

    topics.json               dataVersion, topicConfigTable          as RocketMQ writes them
    subscriptionGroup.json    dataVersion, subscriptionGroupTable, forbiddenTable    as RocketMQ writes them
    consumerOffset.json       dataVersion, offsetTable               as RocketMQ writes them
    brokerStatePosition.json  raymq's own: the fields that RocketMQ lacks

This module defines the files' names and formats; actors.core.broker.state defines the state. The snapshot only saves
time: the records in the log restore the state, as long as the log has all of them.

Each file has a `queueOffset`, its log position, which RocketMQ ignores. The files may be of different snapshots in
three cases: after a crash between writing two files, if a store of version 0.2.0 has a damaged file whose `.bak` is
read, or if the files are read during a write. In these cases the oldest position counts, and the later records are
applied again, which is harmless.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from actors.core.broker.state import BrokerState, offsets_by_queue
from actors.core.pop.leases import PopTable
from raymq.common.delay import DELAY_LEVELS_MS
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.group import GroupConfig, check_group_config
from raymq.common.protocol.route import DataVersion, TopicConfig
from raymq.remoting.access.state import AuthState
from storage.queue.topic_attributes import TOPICS_FILE

logger = logging.getLogger(__name__)

GROUPS_FILE: Final = "subscriptionGroup.json"
OFFSETS_FILE: Final = "consumerOffset.json"
POSITION_FILE: Final = "brokerStatePosition.json"
"""Name of the file with the snapshot's position, {"queueOffset": n}: the offset of the first state record that the file
does not include. This position also applies to any of the other three files that has no position (version 0.1.0). The
file also has the fields that RocketMQ's files lack: "resetVersions" {"topic@group": {"0": 2}}, "firstResetVersions"
{"topic": 1}, "orderConfigs" {"topic": "broker-a:4"}, "layouts" {"topic": "broker-a:4;broker-b:4"}, "creationIds"
{"topic": "0a1b…"}, "unorderedGroups" ["group"], "leases" (actors.core.pop.leases), "settings" {"store.delete_when":
"04"} and "access" (raymq.remoting.access.state), which is absent until users or policies are changed."""

_TOPIC_KEYS: Final = {
    "read_queue_nums": "readQueueNums",
    "write_queue_nums": "writeQueueNums",
    "perm": "perm",
    "order": "order",
    "attributes": "attributes",
}
"""TopicConfig's fields and their names in topics.json."""

_OWN_TOPIC_KEYS: Final = {"order_config": "orderConfigs", "layout": "layouts", "creation_id": "creationIds"}
"""The fields of TopicConfig that RocketMQ's topic file does not have. Maps each field to its key in
POSITION_FILE."""

_GROUP_KEYS: Final = {
    "consume_enable": "consumeEnable",
    "consume_broadcast_enable": "consumeBroadcastEnable",
    "retry_queue_nums": "retryQueueNums",
    "retry_max_times": "retryMaxTimes",
}
"""For each field of GroupConfig, its key in the file subscriptionGroup.json."""

_ORDERED_KEY: Final = "consumeMessageOrderly"
"""The key of a group's setting `ordered` in the file subscriptionGroup.json. RocketMQ has only true and false there;
false means None. The key "unorderedGroups" of POSITION_FILE names the groups in which `ordered` is False."""
_RETRY_POLICY_KEY: Final = "groupRetryPolicy"
"""The key of a group's retry intervals in the file subscriptionGroup.json. RocketMQ's two kinds of policies are
{"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [ms, …]}} and {"type": "EXPONENTIAL",
"exponentialRetryPolicy": {"initial": ms, "max": ms, "multiplier": n}}. Without a policy, the default intervals
count."""
_NEXT_SKIPPED: Final = 2
"""Number of entries of `next` that RocketMQ's brokers skip: the first retry waits for the third entry, as it waits for
delay level 3."""
_EXPONENTS_MAX: Final = 33
"""Number of different intervals of RocketMQ's exponential policy."""

_POSITION_KEY: Final = "queueOffset"

_FORBIDDEN_TO_READ: Final = 1 << 2
"""The bit of a topic's entry in forbiddenTable that forbids a group to read the topic. RocketMQ defines no
other bit."""

_GROUP_CONSTANTS: Final = {
    "brokerId": 0,
    "consumeFromMinEnable": True,
    "consumeTimeoutMinute": 15,
    "groupSysFlag": 0,
    "notifyConsumerIdsChangedEnable": True,
    "whichBrokerWhenConsumeSlowly": 1,
}


def dump_snapshot(state: BrokerState, position: int) -> dict[str, str]:
    """Return the config files of a broker's state, as a dict from file name to text, in the order in which they must be
    written.

    `position`: the offset of the first state record that is not in `state`. The file with this position is last,
    because raymq 0.1.0 reads the position of all files from the file that is written last.
    """
    version = state.topics_version
    data_version = {
        "counter": version.counter,
        "stateVersion": version.state_version,
        "timestamp": version.timestamp_ms,
    }
    topics = {
        config.topic: {
            "attributes": dict(config.attributes),
            "order": config.order,
            "perm": config.perm,
            "readQueueNums": config.read_queue_nums,
            "topicFilterType": "SINGLE_TAG",
            "topicName": config.topic,
            "topicSysFlag": 0,
            "writeQueueNums": config.write_queue_nums,
        }
        for config in state.topics.values()
    }
    groups = {group: _group_entry(config) for group, config in sorted(state.groups.items())}
    tables = sorted(state.offsets.tables.items())
    offsets = {f"{topic}@{group}": {q: at.queue_offset for q, at in table.items()} for (topic, group), table in tables}
    forbidden = {
        group: dict.fromkeys(sorted(names), _FORBIDDEN_TO_READ) for group, names in sorted(state.forbidden.items())
    }
    versions = {
        f"{topic}@{group}": {q: at.reset_version for q, at in table.items()} for (topic, group), table in tables
    }
    common = {"dataVersion": data_version, _POSITION_KEY: position}
    own = {
        _POSITION_KEY: position,
        "resetVersions": versions,
        "firstResetVersions": state.offsets.first_versions,
        "unorderedGroups": sorted(group for group, config in state.groups.items() if config.ordered is False),
        "leases": state.pop.dump(),
        "settings": state.settings,
        **{
            key: {topic: getattr(config, name) for topic, config in state.topics.items() if getattr(config, name)}
            for name, key in _OWN_TOPIC_KEYS.items()
        },
    }
    if state.access is not None:
        own["access"] = state.access.dump()
    return {
        TOPICS_FILE: _pretty({**common, "topicConfigTable": topics}),
        GROUPS_FILE: _pretty({**common, "forbiddenTable": forbidden, "subscriptionGroupTable": groups}),
        OFFSETS_FILE: _pretty({**common, "offsetTable": offsets}),
        POSITION_FILE: _pretty(own),
    }


def load_snapshot(read: Callable[[str], str | None], parse: Callable[[str], Any]) -> tuple[BrokerState, int]:
    """Load the state from the config files. Also returns the state's log position: every file includes all records
    before this offset.

    `read` returns a file's text, or None if the file does not exist, and is called once for each file. `parse` reads
    RocketMQ's dialect of JSON. Files that RocketMQ wrote can be read; their position is 0. A missing file has position
    0, too. Without files the state is empty.
    """
    nothing = json.dumps({_POSITION_KEY: 0})
    own = json.loads(read(POSITION_FILE) or nothing)
    files = {name: parse(read(name) or nothing) for name in (TOPICS_FILE, GROUPS_FILE, OFFSETS_FILE)}
    positions = [int(file.get(_POSITION_KEY, own[_POSITION_KEY])) for file in (own, *files.values())]

    def table(name: str, key: str) -> dict[Any, Any]:
        value = files[name].get(key, {})
        return dict(value) if isinstance(value, dict) else {}

    state = BrokerState()
    for name, entry in table(TOPICS_FILE, "topicConfigTable").items():
        values = {field: entry[key] for field, key in _TOPIC_KEYS.items() if key in entry}
        state.topics[str(name)] = TopicConfig(str(name), **values)
        try:
            TopicAttributes.parse(state.topics[str(name)].attributes)
        except InvalidArgumentError as error:
            logger.warning(
                "the attributes of topic %s in file %s are invalid and are ignored: %s", name, TOPICS_FILE, error
            )
            state.topics[str(name)] = replace(state.topics[str(name)], attributes={})
    version = table(TOPICS_FILE, "dataVersion")
    state.topics_version = DataVersion(
        version.get("stateVersion", 0), version.get("counter", 0), version.get("timestamp", 0)
    )
    for name, entry in table(GROUPS_FILE, "subscriptionGroupTable").items():
        values = {field: entry[key] for field, key in _GROUP_KEYS.items() if key in entry}
        intervals_s = _read_retry_policy(str(name), entry.get(_RETRY_POLICY_KEY))
        ordered = True if entry.get(_ORDERED_KEY) is True else None
        state.groups[str(name)] = GroupConfig(str(name), **values, retry_intervals_s=intervals_s, ordered=ordered)
    for name in own.get("unorderedGroups", ()):
        if name in state.groups and state.groups[name].ordered is None:
            state.groups[name] = replace(state.groups[name], ordered=False)
    for name, masks in table(GROUPS_FILE, "forbiddenTable").items():
        if topics := frozenset(str(topic) for topic, mask in masks.items() if mask & _FORBIDDEN_TO_READ):
            state.forbidden[str(name)] = topics
    for name, key in _OWN_TOPIC_KEYS.items():
        for topic, text in own.get(key, {}).items():
            # Skip topics that are not in the topics file. POSITION_FILE has additional fields of topics. After a crash
            # it may be older than the topics file, and still have a topic that was deleted.
            if topic in state.topics:
                state.topics[topic] = replace(state.topics[topic], **{name: text})
    state.offsets.first_versions = dict(own.get("firstResetVersions", {}))
    for key, offsets in table(OFFSETS_FILE, "offsetTable").items():
        topic, _, group = str(key).partition("@")
        state.offsets.set(
            group, topic, offsets_by_queue(offsets), offsets_by_queue(own.get("resetVersions", {}).get(key, {}))
        )
    state.pop = PopTable.load(own.get("leases", {}))
    state.settings = dict(own.get("settings", {}))
    state.access = AuthState.load(own["access"]) if "access" in own else None
    return state, min(positions)


def _group_entry(config: GroupConfig) -> dict[str, Any]:
    fields = {key: getattr(config, name) for name, key in _GROUP_KEYS.items()}
    policy: dict[str, Any] = {"type": "CUSTOMIZED"}
    if config.retry_intervals_s:
        intervals_ms = [round(interval_s * 1000) for interval_s in config.retry_intervals_s]
        policy["customizedRetryPolicy"] = {"next": intervals_ms[:1] * _NEXT_SKIPPED + intervals_ms}
    own = {_ORDERED_KEY: config.ordered is True, _RETRY_POLICY_KEY: policy}
    return {**_GROUP_CONSTANTS, **fields, **own, "groupName": config.group}


def _read_retry_policy(group: str, policy: object) -> tuple[float, ...]:
    """Return the retry intervals in seconds of a group's policy. A missing policy, RocketMQ's default policy and an
    invalid policy have no intervals, which means the default."""
    try:
        config = GroupConfig(group, retry_intervals_s=tuple(one_ms / 1000 for one_ms in _intervals_ms(policy)))
        check_group_config(config)
    except (InvalidArgumentError, AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        logger.warning(
            "the %s of group %s in file %s is invalid, and the default retry intervals count: %s",
            *(_RETRY_POLICY_KEY, group, GROUPS_FILE, error),
        )
        return ()
    return config.retry_intervals_s


def _intervals_ms(policy: Any) -> list[int]:
    policy = policy or {}
    if policy.get("type") == "EXPONENTIAL" and (own := policy.get("exponentialRetryPolicy")):
        initial_ms, max_ms, multiplier = (int(own[name]) for name in ("initial", "max", "multiplier"))
        intervals_ms = [min(max_ms, initial_ms * multiplier**n) for n in range(_EXPONENTS_MAX)]
        return intervals_ms[: intervals_ms.index(max_ms) + 1] if max_ms in intervals_ms else intervals_ms
    own = policy.get("customizedRetryPolicy") if policy.get("type", "CUSTOMIZED") == "CUSTOMIZED" else None
    intervals_ms = [] if own is None else [int(interval_ms) for interval_ms in own["next"]]
    if intervals_ms == list(DELAY_LEVELS_MS):
        return []
    return intervals_ms[_NEXT_SKIPPED:] or intervals_ms[-1:]


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent="\t", sort_keys=True, separators=(",", ":"), ensure_ascii=False)
