"""A topic's queues as a route tells them."""

from __future__ import annotations

import pickle

import pytest

from raymq.message import MessageQueue
from raymq.route import BrokerData, DataVersion, QueueData, TopicRoute, spread_queues


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
def test_the_permission_says_what_may_be_done(perm, writable, readable):
    one = route(QueueData("a", 1, 1, perm))
    assert (len(one.publish_queues), len(one.subscribe_queues)) == (writable, readable)


def test_without_a_master_queues_can_be_read_but_not_written():
    headless = route(QueueData("a", 1, 1, 6), masterless=("a",))
    assert headless.publish_queues == ()
    assert headless.subscribe_queues == queues("a", 0)


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
