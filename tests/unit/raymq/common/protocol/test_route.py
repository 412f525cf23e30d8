"""Tests of the queues of a topic that a route contains."""

from __future__ import annotations

import pickle

import pytest

from raymq.common.errors import InvalidArgumentError, NoPermissionError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.route import (
    MASTER_ID,
    BrokerData,
    DataVersion,
    QueueData,
    TopicRoute,
    check_perm,
    grow_queues,
    parse_order_config,
    perm_text,
    spread_queues,
)


def broker(name: str, **storages: str) -> BrokerData:
    return BrokerData("raymq", name, {int(key.removeprefix("r")): value for key, value in storages.items()})


def route(*queues: QueueData, masterless: tuple[str, ...] = ()) -> TopicRoute:
    names = {data.broker_name for data in queues}
    return TopicRoute(
        "orders",
        {name: broker(name, **({"r1": "s1"} if name in masterless else {"r0": f"storage-{name}-0"})) for name in names},
        queues,
    )


def queues(name: str, *ids: int) -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue("orders", name, queue_id) for queue_id in ids)


def test_queues_are_sorted_whatever_the_order_of_the_answer():
    two = route(QueueData("b", 1, 1, 6), QueueData("a", 2, 2, 6))
    assert two.publish_queues == two.subscribe_queues == queues("a", 0, 1) + queues("b", 0)


def test_reading_and_writing_have_their_own_numbers_of_queues():
    uneven = route(QueueData("a", 1, 3, 6))
    assert uneven.publish_queues == queues("a", 0, 1, 2)
    assert uneven.subscribe_queues == queues("a", 0)


@pytest.mark.parametrize(("perm", "writable", "readable"), [(6, 1, 1), (4, 0, 1), (2, 1, 0), (0, 0, 0)])
def test_the_permission_decides_which_queues_are_readable_and_writable(perm, writable, readable):
    one = route(QueueData("a", 1, 1, perm))
    assert (len(one.publish_queues), len(one.subscribe_queues)) == (writable, readable)


def test_without_a_master_queues_can_be_read_but_not_written():
    headless = route(QueueData("a", 1, 1, 6), masterless=("a",))
    assert headless.publish_queues == ()
    assert headless.subscribe_queues == queues("a", 0)


def test_slaves_are_read_from_only_where_that_is_enabled():
    storages = {2: "s2", MASTER_ID: "s0", 1: "s1"}
    for enabled, names in ((True, ("s0", "s1", "s2")), (False, ("s0",))):
        data = BrokerData("raymq", "a", storages, slave_read_enable=enabled)
        assert TopicRoute("orders", {"a": data}, (QueueData("a", 1, 1, 6),)).pull_storages("a") == names


def test_without_a_master_slaves_are_read_from_where_that_is_enabled():
    data = BrokerData("raymq", "a", {1: "s1"}, slave_read_enable=True)
    one = TopicRoute("orders", {"a": data}, (QueueData("a", 1, 1, 6),))
    assert one.pull_storages("a") == ("s1",)
    with pytest.raises(ServiceNotAvailableError, match="not available"):
        route(QueueData("a", 1, 1, 6), masterless=("a",)).pull_storages("a")


def test_a_route_is_the_same_after_pickling():
    one = route(QueueData("a", 2, 2, 6))
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert copy.publish_queues == one.publish_queues
    assert copy.master_storage("a") == "storage-a-0"


def test_versions_compare_by_state_then_counter_then_time():
    ordered = [DataVersion(0, 1, 9), DataVersion(0, 2, 0), DataVersion(0, 2, 1), DataVersion(1, 0, 0)]
    assert sorted([ordered[2], ordered[0], ordered[3], ordered[1]]) == ordered
    assert DataVersion(1, 2, 3).next(9) == DataVersion(1, 3, 9)


@pytest.mark.parametrize(
    ("count", "names", "shares"),
    [
        (5, ["b", "a"], {"a": 3, "b": 2}),
        (4, ["a", "b"], {"a": 2, "b": 2}),
        (1, ["a", "b", "c"], {"a": 1}),
        (7, ["a"], {"a": 7}),
    ],
)
def test_queues_are_shared_evenly_among_broker_groups(count, names, shares):
    assert spread_queues(count, names) == shares


@pytest.mark.parametrize("perm", [7, 6, 4, 0])
def test_golden_19_these_are_permissions(perm):
    assert check_perm(perm) == perm


@pytest.mark.parametrize("perm", [8, 10, 9, -1, "6", True])
def test_golden_19_these_are_none(perm):
    with pytest.raises(NoPermissionError):
        check_perm(perm)


@pytest.mark.parametrize(("perm", "text"), [(7, "RWX"), (6, "RW-"), (4, "R--"), (2, "-W-"), (0, "---"), (1, "--X")])
def test_a_permission_prints_as_rocketmqs(perm, text):
    assert perm_text(perm) == text


def test_the_queues_of_an_order_topic_do_not_change_while_a_broker_is_away():
    ordered = TopicRoute("orders", {"a": broker("a", r0="storage-a-0")}, (QueueData("a", 4, 4, 6),), "a:2;b:1")
    assert ordered.publish_queues == queues("a", 0, 1) + queues("b", 0)
    assert ordered.subscribe_queues == queues("a", 0, 1, 2, 3)
    assert ordered.master_storage("a") == "storage-a-0"
    with pytest.raises(ServiceNotAvailableError, match="'b', which has"):
        ordered.master_storage("b")


def test_an_order_configuration_is_read():
    assert parse_order_config("brokerA:4;brokerB:2") == {"brokerA": 4, "brokerB": 2}


@pytest.mark.parametrize("text", ["", "a", "a:", "a:x", "a:0", ":1", "a:1;", "a:1;a:2", "a:-1", "a:²"])
def test_other_texts_are_no_order_configuration(text):
    with pytest.raises(InvalidArgumentError):
        parse_order_config(text)


def test_a_route_to_write_to_is_writable_now():
    assert route(QueueData("a", 1, 1, 6)).require_writable().topic == "orders"
    with pytest.raises(NoPermissionError):
        route(QueueData("a", 1, 1, 4), QueueData("b", 1, 1, 4)).require_writable()
    with pytest.raises(ServiceNotAvailableError):
        route(QueueData("a", 1, 1, 6), masterless=("a",)).require_writable()


@pytest.mark.parametrize(
    ("counts", "queues", "grown"),
    [({"a": 4, "b": 0}, 6, {"a": 4, "b": 2}), ({"a": 1, "b": 1}, 5, {"a": 3, "b": 2}), ({"a": 3}, 3, {"a": 3})],
)
def test_more_queues_go_where_there_are_fewest(counts, queues, grown):
    assert grow_queues(counts, queues) == grown


def test_queues_never_become_fewer():
    with pytest.raises(InvalidArgumentError):
        grow_queues({"a": 2, "b": 1}, 2)
