"""The broker's records and snapshot: decisions change nothing, replay may begin anywhere before the end."""

from __future__ import annotations

import random

import pytest

from actors.core.broker_state import (
    OFFSETS_FILE,
    POSITION_FILE,
    TOPICS_FILE,
    BrokerState,
    decode_change,
    dump_snapshot,
    encode_change,
    load_snapshot,
    replay,
)
from raymq.errors import (
    GroupNotExistError,
    IllegalNameError,
    InvalidArgumentError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.route import DataVersion
from storage.config_files import parse_fastjson

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


def filled() -> BrokerState:
    state = BrokerState()
    for change in (
        state.decide_topic("orders", 4, 4),
        state.decide_group("billing"),
    ):
        state.apply(change, 1000)
    return state


def content(state: BrokerState):
    """All but the version, which counts changes and may count one twice after a replay."""
    return state.topics, state.groups, state.offsets


def snapshot_of(state: BrokerState, position: int) -> tuple[BrokerState, int]:
    return load_snapshot(dump_snapshot(state, position).get, parse_fastjson)


# Decisions


def test_a_decision_changes_nothing_until_it_is_applied():
    state = BrokerState()
    change = state.decide_topic("orders", 4, 4)
    assert state == BrokerState()
    state.apply(change, 1000)
    assert state.topics["orders"].read_queue_nums == 4
    assert state.topics_version == DataVersion(0, 1, 1000)


def test_what_is_so_already_needs_no_record():
    state = filled()
    assert state.decide_topic("orders", 4, 4) is None
    assert state.decide_group("billing") is None
    state.apply(state.decide_offsets("billing", "orders", {0: 5, 1: 6}), 0)
    assert state.decide_offsets("billing", "orders", {0: 5, 1: 6}) is None
    assert state.decide_offsets("billing", "orders", {}) is None


def test_only_the_offsets_that_changed_are_recorded():
    state = filled()
    state.apply(state.decide_offsets("billing", "orders", {0: 5, 1: 6}), 0)
    assert state.decide_offsets("billing", "orders", {0: 5, 1: 7})["offsets"] == {"1": 7}


def test_an_offset_may_go_back():
    state = filled()
    state.apply(state.decide_offsets("billing", "orders", {0: 5}), 0)
    state.apply(state.decide_offsets("billing", "orders", {0: 2}), 0)
    assert state.committed("billing", "orders") == {0: 2}


@pytest.mark.parametrize("nums", [(0, 1), (1, 0), (-1, 1), (1025, 1), (1, 1025), ("4", 4), (4, None), (1.5, 1)])
def test_a_topic_has_a_sensible_number_of_queues(nums):
    with pytest.raises(InvalidArgumentError):
        BrokerState().decide_topic("orders", *nums)


@pytest.mark.parametrize("topic", ["a.b", "", "rmq_sys_x", "TBW102"])
def test_a_topic_has_a_name_of_the_users(topic):
    with pytest.raises(IllegalNameError):
        BrokerState().decide_topic(topic, 1, 1)


def test_a_topic_cannot_be_created_with_other_numbers():
    with pytest.raises(TopicExistsError, match="with 4 queues"):
        filled().decide_topic("orders", 8, 8)


def test_what_does_not_exist_cannot_be_deleted_or_committed_to():
    state = filled()
    with pytest.raises(TopicNotExistError):
        state.decide_topic_delete("nothing")
    with pytest.raises(IllegalNameError):
        state.decide_topic_delete("rmq_sys_broker_state")
    with pytest.raises(GroupNotExistError):
        state.decide_group_delete("nobody")
    with pytest.raises(GroupNotExistError):
        state.decide_offsets("nobody", "orders", {0: 1})
    with pytest.raises(TopicNotExistError):
        state.decide_offsets("billing", "nothing", {0: 1})


@pytest.mark.parametrize("offsets", [{4: 1}, {-1: 1}, {0: -1}, {0: 1, 9: 1}])
def test_an_offset_is_of_a_queue_that_exists_and_not_negative(offsets):
    with pytest.raises(InvalidArgumentError):
        filled().decide_offsets("billing", "orders", offsets)


def test_deleting_a_topic_or_a_group_takes_its_offsets_along():
    state = filled()
    state.apply(state.decide_offsets("billing", "orders", {0: 5}), 0)
    assert state.group_topics("billing") == ["orders"]
    state.apply(state.decide_topic_delete("orders"), 0)
    state.apply(state.decide_topic("orders", 4, 4), 0)
    assert state.committed("billing", "orders") == {}
    state.apply(state.decide_offsets("billing", "orders", {0: 5}), 0)
    state.apply(state.decide_group_delete("billing"), 0)
    state.apply(state.decide_group("billing"), 0)
    assert state.committed("billing", "orders") == {}
    assert state.group_topics("billing") == []


def test_what_is_handed_out_is_a_copy():
    state = filled()
    state.apply(state.decide_offsets("billing", "orders", {0: 5}), 0)
    state.committed("billing", "orders")[0] = 99
    assert state.committed("billing", "orders") == {0: 5}


# Records


def test_a_change_survives_its_encoding():
    change = {"kind": "offsets", "group": "g", "topic": "t", "offsets": {"0": 17}}
    assert decode_change(encode_change(change)) == change


@pytest.mark.parametrize("body", [b"[]", b"5", b'"topic"', b"null"])
def test_a_record_that_is_no_change_is_refused(body):
    with pytest.raises(InvalidArgumentError, match="not a JSON object"):
        decode_change(body)


@pytest.mark.parametrize("change", [{"kind": "acl"}, {}, {"kind": None}, {"kind": ["topic"]}])
def test_a_record_of_a_newer_version_is_refused_and_changes_nothing(change):
    state = filled()
    before = content(filled())
    with pytest.raises(InvalidArgumentError, match="unknown kind"):
        state.apply(change, 0)
    assert content(state) == before


def history(seed: int, length: int) -> list[bytes]:
    """Records as a broker would have written them."""
    chance = random.Random(seed)
    state, records = BrokerState(), []
    while len(records) < length:
        topic, group = chance.choice("tuv"), chance.choice("gh")
        offsets = {chance.randrange(2): chance.randrange(100)}
        decide, *arguments = chance.choice(
            [
                (state.decide_topic, topic, 2, 2),
                (state.decide_topic_delete, topic),
                (state.decide_group, group),
                (state.decide_group_delete, group),
                *[(state.decide_offsets, group, topic, offsets)] * 4,
            ]
        )
        try:
            change = decide(*arguments)
        except (TopicNotExistError, GroupNotExistError):
            continue
        if change is not None:
            state.apply(change, len(records))
            records.append(encode_change(change))
    return records


@pytest.mark.parametrize("seed", range(5))
def test_a_restart_may_begin_at_any_record_before_the_end_of_its_snapshot(seed):
    print("seed", seed)
    records = [(body, 1000 + place) for place, body in enumerate(history(seed, 30))]
    final = BrokerState()
    replay(final, records)
    for end in range(len(records) + 1):
        before = BrokerState()
        replay(before, records[:end])
        for start in range(end + 1):
            state, position = snapshot_of(before, end)
            assert position == end
            replay(state, records[start:])
            assert content(state) == content(final), f"snapshot at {end}, replay from {start}"
            assert state.topics_version >= final.topics_version


def test_a_restart_from_the_snapshots_own_place_has_the_version_of_before():
    records = [(body, 1000 + place) for place, body in enumerate(history(9, 30))]
    final, before = BrokerState(), BrokerState()
    replay(final, records)
    replay(before, records[:17])
    state, position = snapshot_of(before, 17)
    replay(state, records[position:])
    assert state == final


def test_a_crash_between_the_files_of_a_snapshot_is_harmless():
    """The position is written last, so the newer files go with an older position."""
    records = [(body, 1000 + place) for place, body in enumerate(history(4, 30))]
    final, older, newer = BrokerState(), BrokerState(), BrokerState()
    replay(final, records)
    replay(older, records[:10])
    replay(newer, records[:25])
    files = list(dump_snapshot(newer, 25).items())
    assert files[-1][0] == POSITION_FILE
    for written in range(len(files) + 1):
        disk = {**dump_snapshot(older, 10), **dict(files[:written])}
        state, position = load_snapshot(disk.get, parse_fastjson)
        replay(state, records[position:])
        assert content(state) == content(final)


# Snapshots


def test_a_snapshot_comes_back():
    state = filled()
    state.apply(state.decide_offsets("billing", "orders", {0: 5, 3: 9}), 0)
    assert snapshot_of(state, 42) == (state, 42)


def test_without_files_the_state_is_empty():
    assert load_snapshot(lambda name: None, parse_fastjson) == (BrokerState(), 0)


def test_files_that_rocketmq_wrote_are_taken_as_they_are():
    files = {TOPICS_FILE: ROCKETMQ_TOPICS, OFFSETS_FILE: ROCKETMQ_OFFSETS, "subscriptionGroup.json": ROCKETMQ_GROUPS}
    state, position = load_snapshot(files.get, parse_fastjson)
    assert position == 0
    topic = state.topics["TopicTest"]
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (4, 8, 6)
    assert state.topics["%RETRY%group-1"].perm == 4
    assert state.topics_version == DataVersion(0, 7, 1700000000123)
    assert state.groups == {"group-1", "TOOLS_CONSUMER"}
    assert state.committed("group-1", "TopicTest") == {0: 5, 1: 7, 2: 0, 3: 12}
    assert state.committed("group-1", "%RETRY%group-1") == {0: 1}
    again, _ = snapshot_of(state, 0)
    assert again == state


@pytest.mark.parametrize("text", ['{"dataVersion":{}}', '{"topicConfigTable":null}', "{}"])
def test_a_file_of_rocketmq_without_a_table_is_an_empty_one(text):
    state, _ = load_snapshot({TOPICS_FILE: text}.get, parse_fastjson)
    assert state.topics == {}


def test_a_snapshot_has_the_names_and_the_shape_of_rocketmqs_files():
    state = filled()
    state.apply(state.decide_offsets("billing", "orders", {0: 5}), 0)
    files = dump_snapshot(state, 3)
    topics = parse_fastjson(files[TOPICS_FILE])
    assert set(topics) == {"dataVersion", "topicConfigTable"}
    assert topics["topicConfigTable"]["orders"]["writeQueueNums"] == 4
    assert parse_fastjson(files[OFFSETS_FILE])["offsetTable"] == {"orders@billing": {"0": 5}}
    group = parse_fastjson(files["subscriptionGroup.json"])["subscriptionGroupTable"]["billing"]
    assert (group["groupName"], group["retryMaxTimes"]) == ("billing", 16)
    assert files[TOPICS_FILE].startswith('{\n\t"dataVersion":{\n')
