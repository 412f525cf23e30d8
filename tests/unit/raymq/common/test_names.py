"""Tests of the rules for the names of topics and groups, and of parsing the names of actors."""

from __future__ import annotations

import pickle

import pytest

from raymq.common.errors import IllegalNameError, InvalidArgumentError
from raymq.common.names import (
    InstanceName,
    NameServerName,
    PullName,
    RebalanceName,
    StorageName,
    check_group,
    check_topic,
    check_user_topic,
    dlq_topic,
    is_internal_topic,
    is_system_group,
    is_system_topic,
    light_queue,
    retry_topic,
)


@pytest.mark.parametrize(
    "name", ["", " ", "\t", None, 5, b"orders", "a b", "a.b", "a/b", "a+b", "é", "orders\n", "a\x00"]
)
def test_a_name_that_breaks_the_rules_is_refused(name):
    with pytest.raises(IllegalNameError):
        check_topic(name)
    with pytest.raises(IllegalNameError):
        check_group(name)


def test_a_refused_name_reports_the_rule():
    with pytest.raises(IllegalNameError, match=r"topic name 'a\.b' is not legal: use letters, digits"):
        check_topic("a.b")
    with pytest.raises(IllegalNameError, match="the name has 121 characters; at most 120"):
        check_group("g" * 121)


@pytest.mark.parametrize("topic", ["TBW102", "SCHEDULE_TOPIC_XXXX", "rmq_sys_", "rmq_sys_broker_state"])
def test_a_system_topic_has_a_legal_name_but_is_not_the_users(topic):
    assert check_topic(topic) == topic
    with pytest.raises(IllegalNameError, match="system topic"):
        check_user_topic(topic)


def test_a_name_that_only_contains_a_system_name_is_the_users():
    assert not is_system_topic("my_rmq_sys_topic")
    assert check_user_topic("TBW1022") == "TBW1022"


def test_actor_names_print_themselves():
    assert str(NameServerName(0)) == "nameserver-0"
    assert str(StorageName("broker-a", 0)) == "storage-broker-a-0"
    assert str(RebalanceName(1)) == "rebalance-1"
    assert str(PullName("3f9a2c" + 50 * "0")) == "pull-3f9a2c0000000000"
    assert str(InstanceName("billing", 3)) == "pull-billing-3"


@pytest.mark.parametrize("name", [StorageName("broker-a", 0), StorageName("a-1-2", 13), StorageName("x", 0)])
def test_a_storage_name_can_be_parsed_from_its_text(name):
    assert StorageName.parse(str(name)) == name
    assert pickle.loads(pickle.dumps(name)) == name


@pytest.mark.parametrize(
    "text", ["", "storage-", "storage-a", "storage-a-", "broker-a-0", "storage-a-0x", "storage--1"]
)
def test_a_text_that_is_no_storage_name_is_refused(text):
    with pytest.raises(IllegalNameError):
        StorageName.parse(text)


@pytest.mark.parametrize("topic", ["Hello", "%RETRY%Hello", "_%RETRY%Hello", "223-%RETRY%Hello"])
def test_golden_17_these_names_are_legal(topic):
    assert check_user_topic(topic) == topic


@pytest.mark.parametrize("topic", ["", "TOPIC&*^", "../TopicTest", "t" * 128])
def test_golden_17_these_names_are_not(topic):
    with pytest.raises(IllegalNameError):
        check_topic(topic)


@pytest.mark.parametrize("name", ["t" * 127, "%RETRY%" + "g" * 248, "%DLQ%" + "g" * 250])
def test_golden_18_the_longest_names(name):
    assert check_topic(name) == name
    with pytest.raises(IllegalNameError):
        check_topic(name + "x")


def test_golden_18_the_longest_group_and_its_topics():
    group = "g" * 120
    assert check_group(group) == group
    assert check_topic(retry_topic(group)) == "%RETRY%" + group
    assert check_topic(dlq_topic(group)) == "%DLQ%" + group
    with pytest.raises(IllegalNameError):
        check_group("g" * 121)
    assert is_system_topic("rmq_sys_anything")


@pytest.mark.parametrize("topic", ["rmq_sys_x", "%RETRY%g", "%DLQ%g", "TBW102"])
def test_a_topic_that_no_user_made_is_internal(topic):
    assert is_internal_topic(topic)
    assert not is_internal_topic("orders")


def test_system_groups_are_rocketmqs():
    assert is_system_group("TOOLS_CONSUMER")
    assert is_system_group("CID_RMQ_SYS_anything")
    assert not is_system_group("billing")


def test_the_topic_of_a_light_queue_is_consumed_and_not_sent_to():
    assert light_queue("alice") == check_topic("%LMQ%alice") == "%LMQ%alice"
    assert is_internal_topic("%LMQ%alice")
    check_topic("%LMQ%" + "x" * 250)
    with pytest.raises(IllegalNameError, match="light_queues"):
        check_user_topic("%LMQ%alice")
    for name in ("", " ", None, "a.b", "a,b", "%LMQ%alice", "x" * 251):
        with pytest.raises(IllegalNameError):
            light_queue(name)


@pytest.mark.parametrize("group", ["billing", "billing-2", "a-b-c", "7"])
def test_the_name_of_an_instance_contains_its_group(group):
    assert InstanceName.parse(str(InstanceName(group, 3))) == InstanceName(group, 3)


@pytest.mark.parametrize("text", ["", "pull", "pull-billing", "pull--0", "pull-billing-x", "push-billing-0"])
def test_a_text_that_names_no_instance_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="is not the name of a push consumer's instance"):
        InstanceName.parse(text)
