"""Tests of the broker's state records. A decision returns a record and does not change the state; only applying the
record does. A replay after a snapshot was loaded may begin at any record before the snapshot's end."""

from __future__ import annotations

import random
from dataclasses import replace

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
from actors.core.broker.state import BrokerState, decode_change, encode_change, replay
from raymq.common.config.live import LiveOptions
from raymq.common.errors import (
    ConfigError,
    GroupNotExistError,
    IllegalNameError,
    InvalidArgumentError,
    NoPermissionError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.protocol.group import GroupConfig, OffsetCommit, QueueOffset
from raymq.common.protocol.route import DataVersion, NewTopic, TopicConfig
from raymq.remoting.access.changes import CreateUser, DeleteUser
from raymq.remoting.access.state import NO_USERS
from raymq.remoting.access.users import User, UserType
from storage.files.config_files import parse_fastjson


def filled() -> BrokerState:
    state = BrokerState()
    for change in (state.decide_topic("orders", 4, 4), *state.decide_group("billing")):
        state.apply(change, 1000)
    return state


def commit(state: BrokerState, offsets: dict[int, int], group: str = "billing", topic: str = "orders") -> None:
    for change in commit_changes(state, offsets, group, topic):
        state.apply(change, 0)


def commit_changes(state: BrokerState, offsets: dict[int, int], group: str = "billing", topic: str = "orders"):
    commits = {queue_id: OffsetCommit(offset, 0, 1 << 60) for queue_id, offset in offsets.items()}
    changes, _, gone = state.decide_commits(Owners(), group, {topic: commits})
    assert not gone
    return changes


def content(state: BrokerState):
    """Return the content of a broker state without its version. The version counts changes, and may count a change
    twice after a replay."""
    return state.topics, state.groups, state.offsets


def snapshot_of(state: BrokerState, position: int) -> tuple[BrokerState, int]:
    return load_snapshot(dump_snapshot(state, position).get, parse_fastjson)


# Tests of the decisions of the broker's state: the record that each request leads to


def test_a_decision_changes_nothing_until_it_is_applied():
    state = BrokerState()
    change = state.decide_topic("orders", 4, 4)
    assert state == BrokerState()
    state.apply(change, 1000)
    assert state.topics["orders"].read_queue_nums == 4
    assert state.topics_version == DataVersion(0, 1, 1000)


def test_a_change_without_effect_needs_no_record():
    state = filled()
    assert state.decide_topic("orders", 4, 4) is None
    assert state.decide_group("billing") == []
    assert state.decide_group_config(GroupConfig("billing")) == []
    commit(state, {0: 5, 1: 6})
    assert commit_changes(state, {0: 5, 1: 6}) == []
    assert commit_changes(state, {}) == []
    assert state.decide_starts("billing", "orders", {0: 0}) is None
    assert state.decide_reset("billing", "orders", {}) is None


def test_only_the_offsets_that_changed_are_recorded():
    state = filled()
    commit(state, {0: 5, 1: 6})
    assert [change["offsets"] for change in commit_changes(state, {0: 5, 1: 7})] == [{"1": 7}]


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


def test_deleting_or_committing_to_an_unknown_topic_or_group_fails():
    state = filled()
    with pytest.raises(TopicNotExistError):
        state.decide_topic_delete("nothing")
    with pytest.raises(IllegalNameError):
        state.decide_topic_delete("rmq_sys_broker_state")
    with pytest.raises(GroupNotExistError):
        state.decide_group_delete("nobody")
    for decide in (state.decide_reset, lambda group, topic, offsets: commit_changes(state, offsets, group, topic)):
        with pytest.raises(GroupNotExistError):
            decide("nobody", "orders", {0: 1})
    with pytest.raises(GroupNotExistError):
        state.decide_starts("nobody", "orders", {0: 1})
    with pytest.raises(TopicNotExistError):
        state.decide_reset("billing", "nothing", {0: 1})
    with pytest.raises(TopicNotExistError):
        state.decide_starts("billing", "nothing", {0: 1})


def test_commits_in_a_topic_that_is_gone_are_named_and_the_others_are_decided():
    commits = {topic: {0: OffsetCommit(5, 0, 0)} for topic in ("nothing", "orders")}
    changes, verdicts, gone = filled().decide_commits(Owners(), "billing", commits)
    assert [(change["topic"], change["offsets"]) for change in changes] == [("orders", {"0": 5})]
    assert (list(verdicts), gone) == (["orders"], {"nothing": [0]})


def test_a_commit_to_queues_that_a_recreated_topic_lacks_reports_them():
    state = filled()
    commits = {"orders": {0: OffsetCommit(6, 1, 0), 9: OffsetCommit(9, 1, 0)}}
    changes, _, gone = state.decide_commits(Owners(), "billing", commits)
    assert [(change["topic"], change["offsets"]) for change in changes] == [("orders", {"0": 6})]
    assert gone == {"orders": [9]}


@pytest.mark.parametrize("offsets", [{4: 1}, {-1: 1}, {0: -1}, {0: 1, 9: 1}])
def test_an_offset_is_of_a_queue_that_exists_and_not_negative(offsets):
    with pytest.raises(InvalidArgumentError):
        commit_changes(filled(), offsets)
    with pytest.raises(InvalidArgumentError):
        filled().decide_reset("billing", "orders", offsets)


def test_deleting_a_topic_or_a_group_takes_its_offsets_along():
    state = filled()
    commit(state, {0: 5})
    assert state.offsets.topics("billing") == ["orders"]
    state.apply(state.decide_topic_delete("orders"), 0)
    state.apply(state.decide_topic("orders", 4, 4), 0)
    assert state.offsets.committed("billing", "orders") == {}
    commit(state, {0: 5})
    state.apply(state.decide_group_delete("billing"), 0)
    for change in state.decide_group("billing"):
        state.apply(change, 0)
    assert state.offsets.committed("billing", "orders") == {}
    assert state.offsets.topics("billing") == []


def test_a_start_is_committed_once():
    state = filled()
    state.apply(state.decide_starts("billing", "orders", {0: 7}), 0)
    assert state.decide_starts("billing", "orders", {0: 9}) is None
    assert state.decide_starts("billing", "orders", {0: 9, 1: 3})["offsets"] == {"1": 3}
    assert state.offsets.committed("billing", "orders") == {0: 7}


def test_several_topics_are_created_all_or_none():
    state = filled()
    nums = state.topics["orders"].read_queue_nums
    wanted = [NewTopic("a", 2), NewTopic("orders", nums), NewTopic("b", 3, "broker-a:3")]
    changes = state.decide_topics(wanted)
    assert [(change["topic"], change["read_queue_nums"]) for change in changes] == [("a", 2), ("b", 3)]
    with pytest.raises(TopicExistsError):
        state.decide_topics([NewTopic("c", 1), NewTopic("orders", nums + 1)])
    for change in changes:
        state.apply(change, 0)
    assert state.decide_topics(wanted) == []


def test_a_copy_is_of_its_own():
    state = filled()
    commit(state, {0: 5})
    copy = state.copy()
    assert copy == state
    commit(copy, {0: 6})
    copy.apply(copy.decide_topic("new", 1, 1), 0)
    copy.apply({"kind": "topic_delete", "topic": "orders", "next_reset_version": 3}, 0)
    assert state.offsets.committed("billing", "orders") == {0: 5}
    assert "new" not in state.topics
    assert "orders" in state.topics
    assert state.offsets.first_versions == {}


def test_members_of_a_recreated_topic_restart_at_its_beginning():
    state, owners = filled(), Owners()
    commit(state, {0: 500})
    state.apply(state.decide_reset("billing", "orders", {0: 400}), 0)
    state.apply(state.decide_topic_delete("orders"), 0)
    state.apply(state.decide_topic("orders", 4, 4), 0)
    old = {"orders": {0: OffsetCommit(410, 1, 1), 1: OffsetCommit(3, 1, 0)}}
    changes, verdicts, _ = state.decide_commits(owners, "billing", old)
    assert changes == []
    assert verdicts["orders"].reset == {0: QueueOffset(0, 2), 1: QueueOffset(0, 2)}
    [change], _, _ = state.decide_commits(owners, "billing", {"orders": {0: OffsetCommit(3, 1, 2)}})
    state.apply(change, 0)
    assert state.offsets.get("billing", "orders", 0) == QueueOffset(3, 2)


# Tests of changing existing topics


def as_configured(state: BrokerState, topic: str) -> TopicConfig:
    """Return a topic's configuration without its random id."""
    return replace(state.topics[topic], creation_id="")


def test_a_recreated_topic_has_a_new_id_that_changes_keep():
    state = filled()
    first = state.topics["orders"].creation_id
    assert len(first) == 16
    [change] = state.decide_topic_update("orders", 8, None, None)
    state.apply(decode_change(encode_change(change)), 0)
    assert state.topics["orders"].creation_id == first
    assert snapshot_of(state, 1)[0].topics["orders"].creation_id == first
    state.apply(decode_change(encode_change(state.decide_topic_delete("orders"))), 0)
    state.apply(decode_change(encode_change(state.decide_topic("orders", 8, 8))), 0)
    assert state.topics["orders"].creation_id not in ("", first)
    state.decide_auto_topic("orders", 8, 8)
    ids = {config.creation_id for config in state.topics.values()}
    assert len(ids) == len(state.topics)


def test_a_topic_of_an_older_version_has_no_id():
    state = BrokerState()
    change = state.decide_topic("orders", 4, 4)
    del change["creation_id"]
    state.apply(decode_change(encode_change(change)), 0)
    assert state.topics["orders"] == TopicConfig("orders", 4, 4)
    [change] = state.decide_topic_update("orders", 8, None, None)
    state.apply(change, 0)
    assert snapshot_of(state, 1)[0].topics["orders"] == TopicConfig("orders", 8, 8)


@pytest.mark.parametrize(("asked", "made"), [(4, 4), (16, 8), (1, 1), (0, 1)])
def test_golden_12_a_topic_is_created_by_sending_to_it(asked, made):
    state = filled()
    [change] = state.decide_auto_topic("new", asked, 8)
    state.apply(change, 0)
    assert as_configured(state, "new") == TopicConfig("new", made, made, 6)
    assert state.decide_auto_topic("new", 16, 8) == []


@pytest.mark.parametrize("topic", ["%RETRY%new", "%DLQ%new"])
def test_a_groups_topic_is_not_created_by_sending_to_it(topic):
    with pytest.raises(TopicNotExistError):
        filled().decide_auto_topic(topic, 4, 8)


def test_an_update_changes_only_the_given_values_of_a_topic():
    state = filled()
    for arguments in ((8, None, None), (None, 4, None), (None, None, "a:4;b:8")):
        [change] = state.decide_topic_update("orders", *arguments)
        state.apply(decode_change(encode_change(change)), 0)
        assert state.decide_topic_update("orders", *arguments) == []
    assert as_configured(state, "orders") == TopicConfig("orders", 8, 8, 4, order=True, order_config="a:4;b:8")
    assert snapshot_of(state, 1)[0] == state
    [change] = state.decide_topic_update("orders", None, None, "")
    state.apply(change, 0)
    assert as_configured(state, "orders") == TopicConfig("orders", 8, 8, 4)
    assert snapshot_of(state, 1)[0] == state


def test_an_invalid_update_of_a_topic_is_refused():
    state = filled()
    for queue_nums in (3, 0, 1025, True):
        with pytest.raises(InvalidArgumentError):
            state.decide_topic_update("orders", queue_nums, None, None)
    with pytest.raises(NoPermissionError):
        state.decide_topic_update("orders", None, 8, None)
    with pytest.raises(InvalidArgumentError, match="is not an order configuration"):
        state.decide_topic_update("orders", None, None, "a")
    with pytest.raises(TopicNotExistError):
        state.decide_topic_update("nothing", 8, None, None)
    with pytest.raises(IllegalNameError):
        state.decide_topic_update("rmq_sys_broker_state", 8, None, None)


# Tests of changing consumer groups


def test_a_group_comes_with_the_topic_of_its_retries():
    state = filled()
    assert as_configured(state, "%RETRY%billing") == TopicConfig("%RETRY%billing", 1, 1, 6)


def test_the_last_configuration_of_a_group_survives():
    state = filled()
    config = GroupConfig(
        "billing", consume_enable=False, retry_queue_nums=3, retry_max_times=2, retry_intervals_s=(0.5, 60.0)
    )
    for change in state.decide_group_config(config):
        state.apply(decode_change(encode_change(change)), 0)
    assert state.require_group("billing") == config
    assert as_configured(state, "%RETRY%billing") == TopicConfig("%RETRY%billing", 3, 3)
    assert state.decide_group("billing") == []
    assert snapshot_of(state, 1)[0] == state


def test_a_retry_topic_keeps_its_queues_when_the_group_asks_for_fewer():
    state = filled()
    for queues in (4, 2):
        for change in state.decide_group_config(GroupConfig("billing", retry_queue_nums=queues)):
            state.apply(change, 0)
    assert state.topics["%RETRY%billing"].write_queue_nums == 4


@pytest.mark.parametrize(
    "values",
    [
        *({"retry_queue_nums": 0}, {"retry_max_times": -1}, {"retry_max_times": True}),
        *({"consume_broadcast_enable": "no"}, {"ordered": "yes"}, {"ordered": 1}),
        *({"retry_intervals_s": wrong} for wrong in ("10s", 10, (0,), (0.05,), (5e6,), ("1",), (None,), (1,) * 65)),
    ],
)
def test_a_groups_configuration_is_sensible(values):
    with pytest.raises(InvalidArgumentError):
        filled().decide_group_config(GroupConfig("billing", **values))


@pytest.mark.parametrize(
    ("values", "why"),
    [({"consume_broadcast_enable": False}, "consume_broadcast_enable is off"), ({"consume_enable": False}, "consume_")],
)
def test_a_group_broadcasts_unless_it_may_not(values, why):
    state = filled()
    state.check_broadcast("billing")
    state.check_broadcast("unknown yet")
    for change in state.decide_group_config(GroupConfig("billing", **values)):
        state.apply(change, 0)
    with pytest.raises(NoPermissionError, match=f"'billing' may not .*{why}"):
        state.check_broadcast("billing")
    state.check_broadcast("another")


def test_a_forbidden_topic_is_refused_until_it_is_allowed_again():
    state = filled()
    for change in state.decide_forbid("billing", "orders", forbidden=True):
        state.apply(decode_change(encode_change(change)), 0)
    assert state.decide_forbid("billing", "orders", forbidden=True) == []
    with pytest.raises(
        NoPermissionError, match="'billing' is forbidden to read topic 'orders'; to allow it: `raymq group allow"
    ):
        state.check_readable("billing", "orders")
    with pytest.raises(NoPermissionError, match="forbidden"):
        state.check_broadcast("billing", ["orders"])
    state.check_broadcast("billing")
    assert state.check_readable("another", "orders") == state.topics["orders"]
    before = state.copy()
    for change in state.decide_forbid("billing", "orders", forbidden=False):
        state.apply(change, 0)
    assert state.check_readable("billing", "orders") == state.topics["orders"]
    assert state.forbidden == {}
    assert not before.may_read("billing", "orders"), "a copy is of its own"


def test_a_prohibition_creates_its_group_and_is_deleted_with_it():
    state = filled()
    for change in state.decide_forbid("new", "elsewhere", forbidden=True):
        state.apply(change, 0)
    assert "new" in state.groups
    assert "%RETRY%new" in state.topics
    assert not state.may_read("new", "elsewhere")
    state.apply(state.decide_group_delete("new"), 0)
    assert state.may_read("new", "elsewhere")
    with pytest.raises(IllegalNameError):
        state.decide_forbid("new", "no topic", forbidden=True)


def test_a_group_is_not_made_on_first_use_where_that_is_off_unless_it_is_the_systems():
    state = filled()
    with pytest.raises(GroupNotExistError):
        state.decide_group("new", auto_create=False)
    assert state.decide_group("billing", auto_create=False) == []
    assert state.decide_group("TOOLS_CONSUMER", auto_create=False)
    assert state.decide_group("CID_RMQ_SYS_x", auto_create=False)


def test_a_group_record_of_the_first_version_has_the_defaults():
    state = BrokerState()
    state.apply({"kind": "group", "group": "billing"}, 0)
    assert state.groups == {"billing": GroupConfig("billing")}


def test_returned_values_are_copies():
    state = filled()
    commit(state, {0: 5})
    state.offsets.committed("billing", "orders")[0] = 99
    assert state.offsets.committed("billing", "orders") == {0: 5}


# Tests of state records and their replay


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
    before = content(state.copy())
    with pytest.raises(InvalidArgumentError, match="unknown kind"):
        state.apply(change, 0)
    assert content(state) == before


def history(seed: int, length: int) -> list[bytes]:
    """Return a random sequence of state records as a broker would write them."""
    chance = random.Random(seed)
    state, records = BrokerState(), []
    while len(records) < length:
        topic, group = chance.choice("tuv"), chance.choice("gh")
        queue_id, offset = chance.randrange(2), chance.randrange(100)
        offsets = {queue_id: offset}
        decide, *arguments = chance.choice(
            [
                (state.decide_topic, topic, 2, 2),
                (state.decide_topic_delete, topic),
                (state.decide_topic_update, topic, None, None, chance.choice(("", "a:1", "b:2"))),
                (state.decide_group, group),
                (state.decide_group_delete, group),
                (state.decide_reset, group, topic, offsets),
                (state.decide_starts, group, topic, {queue_id: offset}),
                *[(lambda *commits: commit_changes(state, *commits), offsets, group, topic)] * 4,
            ]
        )
        try:
            decided = decide(*arguments)
        except (TopicNotExistError, GroupNotExistError, AssertionError):
            continue
        for change in [decided] if isinstance(decided, dict) else decided or []:
            state.apply(change, len(records))
            records.append(encode_change(change))
    return records


@pytest.mark.parametrize("seed", range(5))
def test_a_restart_may_begin_at_any_record_before_the_end_of_its_snapshot(seed):
    print("seed", seed)
    records = [(body, 1000 + index) for index, body in enumerate(history(seed, 30))]
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


def test_a_restart_from_the_snapshots_own_position_has_the_version_of_before():
    records = [(body, 1000 + index) for index, body in enumerate(history(9, 30))]
    final, before = BrokerState(), BrokerState()
    replay(final, records)
    replay(before, records[:17])
    state, position = snapshot_of(before, 17)
    replay(state, records[position:])
    assert state == final


def test_a_crash_between_the_files_of_a_snapshot_is_harmless():
    """A crash between the writes of two snapshot files does no harm. The position from which to replay the state
    records is written last. So after a crash the other files may be newer than this position."""
    records = [(body, 1000 + index) for index, body in enumerate(history(4, 30))]
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


@pytest.mark.parametrize("older_file", [TOPICS_FILE, GROUPS_FILE, OFFSETS_FILE, POSITION_FILE])
def test_a_file_of_an_older_snapshot_than_the_others_is_harmless(older_file):
    """A snapshot can be loaded even if one of its files is older than the others. There are two ways to get such a
    snapshot. The newer file may be damaged, so that its .bak file is read. Or the broker may rewrite the files while a
    reader reads them. The reader then sees the old content of one file, and the new content of the others."""
    records = [(body, 1000 + index) for index, body in enumerate(history(4, 30))]
    final, older, newer = BrokerState(), BrokerState(), BrokerState()
    replay(final, records)
    replay(older, records[:3])
    replay(newer, records[:25])
    disk = {**dump_snapshot(newer, 25), older_file: dump_snapshot(older, 3)[older_file]}
    state, position = load_snapshot(disk.get, parse_fastjson)
    assert position == 3
    replay(state, records[position:])
    assert content(state) == content(final)


def test_a_topic_that_was_deleted_since_the_older_position_was_written_is_harmless():
    state = filled()
    [change] = state.decide_topic_update("orders", None, None, "a:4")
    state.apply(change, 0)
    older = dump_snapshot(state, 2)
    state.apply(state.decide_topic_delete("orders"), 0)
    disk = {**dump_snapshot(state, 3), POSITION_FILE: older[POSITION_FILE]}
    assert load_snapshot(disk.get, parse_fastjson)[0].topics == state.topics


# Tests of layouts: the queues that a topic has in each broker group


def layout_of(state: BrokerState, topic: str) -> str:
    [again, _] = load_snapshot(dump_snapshot(state, 3).get, parse_fastjson)
    assert again.topics == state.topics
    return state.topics[topic].layout


def test_a_layout_grows_and_is_kept_in_the_log_and_in_the_snapshot():
    state = BrokerState()
    state.apply(state.decide_topic("orders", 2, 2, "a:2;b:2"), 0)
    assert state.decide_topic("orders", 2, 2, "a:2") is None
    assert layout_of(state, "orders") == "a:2;b:2"
    state.apply(state.decide_topic("orders", 2, 2, "c:1"), 0)
    assert layout_of(state, "orders") == "a:2;b:2;c:1"
    [change] = state.decide_topic_update("orders", 4, None, None, "a:4;b:1")
    state.apply(change, 0)
    assert layout_of(state, "orders") == "a:4;b:2;c:1"
    assert state.decide_topic_update("orders", None, None, None, "a:4") == []


def test_a_topic_that_is_made_by_sending_to_it_has_a_layout_that_grows_too():
    state = BrokerState()
    for layout in ("a:4", "a:4;b:4"):
        [change] = state.decide_auto_topic("orders", 4, 8, layout)
        state.apply(change, 0)
    assert state.decide_auto_topic("orders", 4, 8, "b:4") == []
    assert layout_of(state, "orders") == "a:4;b:4"


def test_a_topic_that_is_made_again_has_no_layout_of_before():
    state = BrokerState()
    state.apply(state.decide_topic("orders", 2, 2, "a:2;b:2"), 0)
    state.apply(state.decide_topic_delete("orders"), 0)
    state.apply(state.decide_topic("orders", 1, 1, "a:1"), 0)
    assert layout_of(state, "orders") == "a:1"


def test_an_illegal_layout_is_refused():
    with pytest.raises(InvalidArgumentError):
        BrokerState().decide_topic("orders", 1, 1, "everywhere")


def test_attributes_are_set_when_a_topic_is_created_and_changed_later():
    state = BrokerState()
    state.apply(state.decide_topic("orders", 4, 4, "", {"message.type": "FIFO"}), 0)
    assert state.topics["orders"].attributes == {"message.type": "FIFO"}
    assert state.decide_topic("orders", 4, 4, "", {"message.type": "FIFO"}) is None
    assert state.decide_topic("orders", 4, 4) is None
    with pytest.raises(TopicExistsError, match=r"message\.type FIFO"):
        state.decide_topic("orders", 4, 4, "", {"message.type": "DELAY"})
    with pytest.raises(InvalidArgumentError):
        state.decide_topic("bills", 4, 4, "", {"message.type": "anything"})
    [change] = state.decide_topic_update("orders", None, None, None, "", {"message.type": "", "reserve.time": "60000"})
    state.apply(decode_change(encode_change(change)), 0)
    assert state.topics["orders"].attributes == {"reserve.time": "60000"}
    assert state.decide_topic_update("orders", None, None, None, "", {"reserve.time": "60000"}) == []


def test_a_topic_record_of_an_older_version_has_no_attributes():
    state = BrokerState()
    state.apply({"kind": "topic", "topic": "orders", "read_queue_nums": 1, "write_queue_nums": 1}, 0)
    assert state.topics["orders"].attributes == {}


def test_a_group_commits_in_a_light_queue_which_nobody_creates_or_changes():
    state = filled()
    commit(state, {0: 7}, topic="%LMQ%alice")
    assert state.offsets.committed("billing", "%LMQ%alice") == {0: 7}
    with pytest.raises(InvalidArgumentError):
        commit(state, {1: 7}, topic="%LMQ%alice")
    for decide in (
        lambda: state.decide_topic("%LMQ%alice", 1, 1),
        lambda: state.decide_topic_update("%LMQ%alice", 2, None, None),
        lambda: state.decide_topic_delete("%LMQ%alice"),
    ):
        with pytest.raises(IllegalNameError, match="light queue"):
            decide()
    restored, _ = snapshot_of(state, 0)
    assert restored.offsets.committed("billing", "%LMQ%alice") == {0: 7}


# Tests of settings that change while the broker runs


def test_a_live_setting_is_a_record_that_survives_in_log_and_snapshot():
    state, start = BrokerState(), LiveOptions()
    change = state.decide_setting(start, "fileReservedTime", 48)
    assert change == {"kind": "setting", "name": "store.file_reserved_time_hours", "value": 48}
    replay(state, [(encode_change(change), 0)])
    assert state.settings == {"store.file_reserved_time_hours": 48}
    assert state.decide_setting(start, "fileReservedTime", 48) is None
    assert snapshot_of(state, 7)[0].settings == state.settings
    before = state.topics_version
    state.apply(state.decide_setting(start, "broker.broker_permission", 4), 5)
    # The change of a setting also changes the version of the broker's topic table. The broker therefore sends the new
    # settings to the NameServers.
    assert state.topics_version != before
    state.apply(state.decide_setting_unset("fileReservedTime"), 5)
    assert state.settings == {"broker.broker_permission": 4}
    assert state.decide_setting_unset("fileReservedTime") is None


def test_a_live_setting_is_checked_before_it_is_stored():
    with pytest.raises(ConfigError):
        BrokerState().decide_setting(LiveOptions(), "delete_when", "25")
    with pytest.raises(InvalidArgumentError, match="raymq starts"):
        BrokerState().decide_setting(LiveOptions(), "flushDiskType", "ASYNC_FLUSH")


def test_offsets_in_topics_are_dropped_and_stay_so_over_a_snapshot():
    state = filled()
    for change in (state.decide_topic("bills", 1, 1), *state.decide_group("audit")):
        state.apply(change, 0)
    commit(state, {0: 5, 2: 7})
    commit(state, {0: 3}, topic="bills")
    change = state.decide_offsets_delete("billing", ["orders", "unknown"])
    assert change == {"kind": "offsets_delete", "group": "billing", "topics": ["orders"]}
    state.apply(decode_change(encode_change(change)), 0)
    state.apply(change, 0)
    assert state.offsets.topics("billing") == ["bills"]
    assert state.decide_offsets_delete("billing", ["orders"]) is None
    with pytest.raises(GroupNotExistError):
        state.decide_offsets_delete("nobody", ["orders"])
    assert content(snapshot_of(state, 9)[0]) == content(state)


def test_left_topics_of_a_group_have_no_subscribed_consumer():
    state = filled()
    for change in (state.decide_topic("bills", 1, 1), *state.decide_group("audit"), *state.decide_group("idle")):
        state.apply(change, 0)
    for group in ("billing", "audit", "idle"):
        for topic in ("orders", "bills"):
            commit(state, {0: 1}, group, topic)
        commit(state, {0: 1}, group, f"%RETRY%{group}")
    subscriptions = {"billing": {"orders"}, "audit": {"orders", "bills"}, "unknown": {"x"}}
    assert state.left_topics(subscriptions) == {"billing": ["bills"]}


def test_users_are_kept_once_they_are_changed_and_stay_so_over_a_snapshot():
    root, team = User("root", b"r" * 32, UserType.SUPER), User("team", b"t" * 32)
    start = NO_USERS.with_user(root, is_new=True)
    state = filled()
    assert snapshot_of(state, 9)[0].access is None
    change = state.decide_access(start, CreateUser(team), 5_000)
    assert state.access is None
    state.apply(decode_change(encode_change(change)), 0)
    assert state.access.version == 5_000
    assert dict(state.access.users) == {"root": root, "team": team}
    assert state.decide_access(start, CreateUser(team), 6_000) is None
    assert snapshot_of(state, 9)[0].access == state.access
    assert state.copy().access == state.access
    with pytest.raises(InvalidArgumentError):
        state.decide_access(start, DeleteUser("root"), 6_000)
