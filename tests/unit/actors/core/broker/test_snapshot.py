"""Tests of the snapshot files of a broker's state. Loading the files restores the state, and the files have RocketMQ's
names and JSON structure."""

from __future__ import annotations

import json

import pytest

from actors.core.broker.offsets import Owners
from actors.core.broker.snapshot import (
    GROUPS_FILE,
    OFFSETS_FILE,
    POSITION_FILE,
    TOPICS_FILE,
    dump_snapshot,
    load_snapshot,
)
from actors.core.broker.state import BrokerState, decode_change, encode_change
from raymq.common.protocol.group import GroupConfig, OffsetCommit
from raymq.common.protocol.route import DataVersion, NewTopic
from storage.files.config_files import parse_fastjson

ROCKETMQ_TOPICS = """{
	"dataVersion":{
		"counter":7,
		"stateVersion":0,
		"timestamp":1700000000123
	},
	"topicConfigTable":{
		"TopicTest":{
			"attributes":{},
			"order":false,
			"perm":6,
			"readQueueNums":4,
			"topicFilterType":"SINGLE_TAG",
			"topicName":"TopicTest",
			"topicSysFlag":0,
			"writeQueueNums":8
		},
		"%RETRY%group-1":{"order":false,"perm":4,"readQueueNums":1,"topicFilterType":"SINGLE_TAG",
			"topicName":"%RETRY%group-1","topicSysFlag":0,"writeQueueNums":1}
	}
}"""
ROCKETMQ_OFFSETS = """{
	"dataVersion":{"counter":3,"stateVersion":0,"timestamp":1700000000456},
	"groupTopicMap":{"group-1":["TopicTest"]},
	"offsetTable":{
		"TopicTest@group-1":{0:5,1:7,2:0,3:12
		},
		"%RETRY%group-1@group-1":{0:1
		}
	}
}"""
ROCKETMQ_GROUPS = """{
	"dataVersion":{"counter":1,"stateVersion":0,"timestamp":1700000000789},
	"forbiddenTable":{},
	"subscriptionGroupTable":{
		"group-1":{"brokerId":0,"consumeEnable":true,"groupName":"group-1","retryMaxTimes":16},
		"TOOLS_CONSUMER":{"brokerId":0,"consumeEnable":true,"groupName":"TOOLS_CONSUMER"}
	}
}"""


def committed(offsets: dict[int, int]) -> BrokerState:
    """Return a broker state with topic `orders` of four queues and group `billing`, which has committed
    `offsets`."""
    state = BrokerState()
    for change in (state.decide_topic("orders", 4, 4), *state.decide_group("billing")):
        state.apply(change, 1000)
    commits = {queue_id: OffsetCommit(offset, 0, 1 << 60) for queue_id, offset in offsets.items()}
    changes, _, _ = state.decide_commits(Owners(), "billing", {"orders": commits})
    for change in changes:
        state.apply(change, 0)
    return state


def snapshot_of(state: BrokerState, position: int) -> tuple[BrokerState, int]:
    return load_snapshot(dump_snapshot(state, position).get, parse_fastjson)


def test_a_snapshot_comes_back():
    state = committed({0: 5, 3: 9})
    state.apply(state.decide_reset("billing", "orders", {3: 2}), 0)
    assert snapshot_of(state, 42) == (state, 42)


def test_without_files_the_state_is_empty():
    assert load_snapshot(lambda name: None, parse_fastjson) == (BrokerState(), 0)


@pytest.mark.parametrize("name", [TOPICS_FILE, GROUPS_FILE, OFFSETS_FILE, POSITION_FILE])
def test_a_file_that_is_missing_has_the_position_0(name):
    files = dump_snapshot(committed({0: 5}), 42)
    del files[name]
    assert load_snapshot(files.get, parse_fastjson)[1] == 0


def test_files_that_rocketmq_wrote_are_read_as_they_are():
    files = {TOPICS_FILE: ROCKETMQ_TOPICS, OFFSETS_FILE: ROCKETMQ_OFFSETS, GROUPS_FILE: ROCKETMQ_GROUPS}
    state, position = load_snapshot(files.get, parse_fastjson)
    assert position == 0
    topic = state.topics["TopicTest"]
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (4, 8, 6)
    assert state.topics["%RETRY%group-1"].perm == 4
    assert state.topics_version == DataVersion(0, 7, 1700000000123)
    assert state.groups == {name: GroupConfig(name) for name in ("group-1", "TOOLS_CONSUMER")}
    assert state.offsets.committed("group-1", "TopicTest") == {0: 5, 1: 7, 2: 0, 3: 12}
    assert state.offsets.committed("group-1", "%RETRY%group-1") == {0: 1}
    again, _ = snapshot_of(state, 0)
    assert again == state


@pytest.mark.parametrize("text", ['{"dataVersion":{}}', '{"topicConfigTable":null}', "{}"])
def test_a_file_of_rocketmq_without_a_table_is_an_empty_one(text):
    state, _ = load_snapshot({TOPICS_FILE: text}.get, parse_fastjson)
    assert state.topics == {}


def test_snapshot_files_of_0_1_0_without_a_position_have_the_last_position():
    state = committed({0: 5})
    files = {name: json.loads(text) for name, text in dump_snapshot(state, 7).items()}
    for name in (TOPICS_FILE, GROUPS_FILE, OFFSETS_FILE):
        del files[name]["queueOffset"]
    assert load_snapshot({name: json.dumps(file) for name, file in files.items()}.get, parse_fastjson) == (state, 7)


def test_a_snapshot_has_the_names_and_the_shape_of_rocketmqs_files():
    state = committed({0: 5})
    files = dump_snapshot(state, 3)
    topics = parse_fastjson(files[TOPICS_FILE])
    assert set(topics) == {"dataVersion", "queueOffset", "topicConfigTable"}
    assert topics["topicConfigTable"]["orders"]["writeQueueNums"] == 4
    assert parse_fastjson(files[OFFSETS_FILE])["offsetTable"] == {"orders@billing": {"0": 5}}
    group = parse_fastjson(files[GROUPS_FILE])["subscriptionGroupTable"]["billing"]
    assert (group["groupName"], group["retryMaxTimes"]) == ("billing", 16)
    assert files[TOPICS_FILE].startswith('{\n\t"dataVersion":{\n')


def test_fields_of_a_group_that_raymq_does_not_have_are_written_as_rocketmq_has_them():
    state = committed({})
    entry = json.loads(dump_snapshot(state, 1)[GROUPS_FILE])["subscriptionGroupTable"]["billing"]
    assert (entry["consumeMessageOrderly"], entry["consumeTimeoutMinute"]) == (False, 15)
    old = {"kind": "group", "group": "old", "consume_message_orderly": True, "consume_timeout_minute": 3}
    state.apply(old, 0)
    assert state.groups["old"] == GroupConfig("old")


POLICIES = {
    "nothing": ("null", ()),
    "rocketmqs-default": ('{"type": "CUSTOMIZED"}', ()),
    "written-out": (
        '{"type":"CUSTOMIZED","customizedRetryPolicy":{"next":[1000,5000,10000,30000,60000,120000,180000,240000,300000,'
        "360000,420000,480000,540000,600000,1200000,1800000,3600000,7200000]}}",
        (),
    ),
    "own": ('{"type":"CUSTOMIZED","customizedRetryPolicy":{"next":[1,2,500,60000]}}', (0.5, 60.0)),
    "short": ('{"customizedRetryPolicy":{"next":[7000]}}', (7.0,)),
    "exponential": (
        '{"type":"EXPONENTIAL","exponentialRetryPolicy":{"initial":1000,"max":5000,"multiplier":2}}',
        (1.0, 2.0, 4.0, 5.0),
    ),
    "exponential-without-values": ('{"type":"EXPONENTIAL"}', ()),
    "unknown": ('{"type":"OTHER","customizedRetryPolicy":{"next":[7000]}}', ()),
    "zero": ('{"customizedRetryPolicy":{"next":[0]}}', ()),
    "no-times": ('{"customizedRetryPolicy":{"next":[]}}', ()),
    "text": ('"soon"', ()),
    "wrong": ('{"customizedRetryPolicy":{"next":{"a":"b"}}}', ()),
}


@pytest.mark.parametrize(("policy", "intervals_s"), POLICIES.values(), ids=list(POLICIES))
def test_retry_policies_of_rocketmqs_file_are_read(policy: str, intervals_s: tuple[float, ...]):
    files = dump_snapshot(committed({}), 1)
    groups = json.loads(files[GROUPS_FILE])
    groups["subscriptionGroupTable"]["billing"]["groupRetryPolicy"] = json.loads(policy)
    files[GROUPS_FILE] = json.dumps(groups)
    state, _ = load_snapshot(files.get, parse_fastjson)
    assert state.groups["billing"] == GroupConfig("billing", retry_intervals_s=intervals_s)


@pytest.mark.parametrize("ordered", [True, False, None])
def test_the_order_mode_of_a_group_survives_beside_rocketmqs_key(ordered: bool | None):
    state = committed({})
    for change in state.decide_group_config(GroupConfig("billing", ordered=ordered)):
        state.apply(decode_change(encode_change(change)), 0)
    files = dump_snapshot(state, 1)
    entry = json.loads(files[GROUPS_FILE])["subscriptionGroupTable"]["billing"]
    assert entry["consumeMessageOrderly"] is (ordered is True)
    assert load_snapshot(files.get, parse_fastjson)[0].groups == state.groups
    of_rocketmq = {name: text for name, text in files.items() if name == GROUPS_FILE}
    [group] = load_snapshot(of_rocketmq.get, parse_fastjson)[0].groups.values()
    assert group.ordered is (True if ordered else None)


def test_retry_intervals_survive_in_rocketmqs_policy():
    state = committed({})
    for change in state.decide_group_config(GroupConfig("billing", retry_intervals_s=(0.5, 60, 7200))):
        state.apply(decode_change(encode_change(change)), 0)
    files = dump_snapshot(state, 1)
    assert json.loads(files[GROUPS_FILE])["subscriptionGroupTable"]["billing"]["groupRetryPolicy"] == {
        "type": "CUSTOMIZED",
        "customizedRetryPolicy": {"next": [500, 500, 500, 60_000, 7_200_000]},
    }
    assert load_snapshot(files.get, parse_fastjson)[0].groups == state.groups


def test_forbidden_topics_survive_in_rocketmqs_table():
    state = committed({})
    for change in state.decide_forbid("billing", "orders", forbidden=True):
        state.apply(change, 0)
    files = dump_snapshot(state, 1)
    assert json.loads(files[GROUPS_FILE])["forbiddenTable"] == {"billing": {"orders": 4}}
    assert snapshot_of(state, 1) == (state, 1)
    written = ROCKETMQ_GROUPS.replace('"forbiddenTable":{}', '"forbiddenTable":{"group-1":{"a":4,"b":6,"c":2},"g":{}}')
    loaded, _ = load_snapshot({GROUPS_FILE: written}.get, parse_fastjson)
    assert loaded.forbidden == {"group-1": frozenset({"a", "b"})}


def test_valid_attributes_survive_and_invalid_attributes_are_dropped():
    state = BrokerState()
    for change in state.decide_topics([NewTopic("orders", 2, "", {"message.type": "FIFO"}), NewTopic("bills", 1)]):
        state.apply(change, 0)
    files = dump_snapshot(state, 1)
    assert json.loads(files[TOPICS_FILE])["topicConfigTable"]["orders"]["attributes"] == {"message.type": "FIFO"}
    loaded, _ = load_snapshot(files.get, parse_fastjson)
    assert loaded.topics == state.topics
    files[TOPICS_FILE] = files[TOPICS_FILE].replace("FIFO", "SOMETHING")
    loaded, _ = load_snapshot(files.get, parse_fastjson)
    assert loaded.topics["orders"].attributes == {}
