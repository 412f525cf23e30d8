"""Tests of registrations, heartbeats and routes at one NameServer."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from actors.core.nameserver.route_table import RouteTable
from raymq.common.errors import NoPermissionError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.route import BrokerRegistration, DataVersion, TopicChanges, TopicConfig

FIRST = DataVersion(0, 1, 5)


def registration(name: str = "a", *, version: DataVersion = FIRST, topics: tuple[str, ...] = ("orders",), life=1):
    configs = tuple(TopicConfig(topic, 2, 2) for topic in topics)
    return BrokerRegistration("raymq", name, {0: f"storage-{name}-0"}, configs, version, {0: "node"}, life)


@pytest.fixture
def table():
    return RouteTable(expiry_s=120.0)


def test_a_route_lists_every_broker_that_holds_the_topic(table):
    table.register(registration("b"), 0.0)
    table.register(registration("a"), 0.0)
    route = table.route("orders")
    assert route.publish_queues == tuple(MessageQueue("orders", name, number) for name in "ab" for number in (0, 1))
    assert route.master_storage("b") == "storage-b-0"
    assert list(table.brokers()) == ["a", "b"]


def test_an_unknown_topic_has_no_route(table):
    with pytest.raises(TopicNotExistError):
        table.route("orders")
    table.register(registration(topics=("other",)), 0.0)
    with pytest.raises(TopicNotExistError):
        table.route("orders")


def test_a_registration_replaces_all_earlier_topics(table):
    table.register(registration(topics=("orders", "old")), 0.0)
    table.register(registration(version=DataVersion(0, 2, 6), topics=("orders", "new")), 1.0)
    assert table.topics() == ["new", "orders"]


def test_a_registration_that_was_overtaken_by_a_newer_one_is_ignored(table):
    table.register(registration(version=DataVersion(0, 2, 6), topics=("orders", "new")), 0.0)
    table.register(registration(version=DataVersion(0, 1, 7)), 1.0)
    assert table.topics() == ["new", "orders"]
    assert not table.heartbeat("a", DataVersion(0, 1, 7), 1.0)
    assert table.heartbeat("a", DataVersion(0, 2, 6), 1.0)


def test_a_restarted_broker_whose_last_change_has_an_earlier_time_in_its_log_is_taken(table):
    """The NameServer accepts the registration of a restarted broker, although the time in its data version is earlier
    than in the previous registration. A broker stores a change in its log first, and applies the change later. After a
    restart, the version contains the time from the log, so it is the earlier time."""
    table.register(registration(version=DataVersion(0, 3, 1001)), 0.0)
    replayed = DataVersion(0, 3, 1000)
    assert not table.heartbeat("a", replayed, 1.0)
    table.register(registration(version=replayed), 1.0)
    assert table.heartbeat("a", replayed, 100.0)
    assert table.expire(130.0) == []


def test_a_heartbeat_with_an_unknown_version_requests_a_registration(table):
    assert not table.heartbeat("a", DataVersion(), 0.0)
    table.register(registration(), 0.0)
    assert table.heartbeat("a", DataVersion(0, 1, 5), 1.0)
    assert not table.heartbeat("a", DataVersion(0, 2, 5), 1.0)


def test_a_silent_broker_is_forgotten_after_the_expiry_and_not_before(table):
    table.register(registration("a"), 0.0)
    table.register(registration("b"), 0.0)
    table.heartbeat("b", DataVersion(0, 1, 5), 60.0)
    assert table.expire(120.0) == []
    assert table.expire(120.1) == ["a"]
    assert table.expire(180.1) == ["b"]
    assert table.topics() == []


def test_a_heartbeat_of_another_version_does_not_prolong_a_life(table):
    table.register(registration(), 0.0)
    table.heartbeat("a", DataVersion(0, 9, 9), 100.0)
    assert table.expire(121.0) == ["a"]


def test_a_broker_that_unregisters_is_gone_at_once_and_may_come_back_with_any_version(table):
    table.register(registration(version=DataVersion(0, 9, 9)), 0.0)
    table.unregister("a")
    table.unregister("a")
    assert table.brokers() == {}
    table.register(registration(version=DataVersion(0, 1, 0)), 1.0)
    assert table.topics() == ["orders"]


def test_a_route_is_a_copy(table):
    given = registration()
    table.register(given, 0.0)
    route = table.route("orders")
    given.storages[0] = "storage-elsewhere-0"
    assert route.master_storage("a") == "storage-a-0"


def test_a_registration_from_an_emptied_directory_is_accepted(table):
    """The NameServer accepts a broker that starts again with an empty directory, although its registration counts fewer
    changes than its previous registration."""
    table.register(registration(version=DataVersion(0, 9, 9)), 0.0)
    table.register(registration(version=DataVersion(0, 1, 1), topics=("new",), life=2), 1.0)
    assert table.topics() == ["new"]
    table.register(registration(version=DataVersion(0, 10, 9), topics=("late",), life=1), 2.0)
    assert table.topics() == ["new"]


def test_a_registration_with_an_older_state_version_is_ignored(table):
    table.register(registration(version=DataVersion(2, 1, 1)), 0.0)
    table.register(registration(version=DataVersion(1, 9, 9), topics=("old",), life=9), 1.0)
    assert table.topics() == ["orders"]


def test_writes_can_be_taken_off_a_broker_until_it_changes(table):
    table.register(registration("a"), 0.0)
    table.register(registration("b"), 0.0)
    assert table.wipe_write_perm("a") == 1
    assert {queue.broker_name for queue in table.route("orders").publish_queues} == {"b"}
    assert {queue.broker_name for queue in table.route("orders").subscribe_queues} == {"a", "b"}
    # The repeated registration has the version of the last registration, so the NameServer treats it as unchanged.
    table.register(registration("a"), 1.0)
    assert len(table.route("orders").publish_queues) == 2
    table.register(registration("a", version=DataVersion(0, 2, 6)), 2.0)
    assert len(table.route("orders").publish_queues) == 4


def test_giving_writes_back_sets_reading_and_writing(table):
    table.register(registration("a"), 0.0)
    table.wipe_write_perm("a")
    assert table.add_write_perm("a") == 1
    assert [data.perm for data in table.route("orders").queues] == [6]
    assert (table.wipe_write_perm("nobody"), table.add_write_perm("nobody")) == (0, 0)


def test_a_route_follows_the_order_configuration(table):
    config = TopicConfig("orders", 2, 2, order=True, order_config="a:1;b:2")
    table.register(replace(registration("a", topics=("other",)), topics=(config, TopicConfig("other", 1, 1))), 0.0)
    table.register(registration("c"), 0.0)  # broker c registers later; its topic `orders` has no order configuration
    assert table.order_configs() == {"orders": "a:1;b:2"}
    route = table.route("orders")
    assert [(queue.broker_name, queue.queue_id) for queue in route.publish_queues] == [("a", 0), ("b", 0), ("b", 1)]
    assert len(route.subscribe_queues) == 4
    assert table.route("other").order_config == ""


def test_the_tables_of_clusters_and_nodes(table):
    table.register(registration("b"), 0.0)
    table.register(registration("a"), 0.0)
    assert table.clusters() == {"raymq": ["a", "b"]}
    assert table.brokers()["a"].nodes == {0: "node"}


@pytest.mark.parametrize("present", ["a", "b", "ab"])
def test_each_broker_of_a_topic_reports_all_of_its_queues(table, present):
    config = TopicConfig("orders", 2, 2, layout="a:2;b:2")
    for name in present:
        table.register(replace(registration(name), topics=(config,)), 0.0)
    route = table.route("orders")
    assert route.all_queues == tuple(MessageQueue("orders", name, number) for name in "ab" for number in (0, 1))
    assert {queue.broker_name for queue in route.publish_queues} == set(present)


def test_a_topic_of_a_silent_broker_is_away_and_does_not_cease_to_exist(table):
    table.register(registration("a"), 0.0)
    table.expire(120.1)
    with pytest.raises(ServiceNotAvailableError, match="its broker group a has sent no heartbeat"):
        table.route("orders")
    with pytest.raises(TopicNotExistError):
        table.route("nothing")
    table.register(registration("a", version=DataVersion(0, 2, 6), topics=("other",)), 121.0)
    with pytest.raises(TopicNotExistError):
        table.route("orders")


SECOND = DataVersion(0, 2, 6)


def changes(
    *changed: TopicConfig, removed: tuple[str, ...] = (), since=FIRST, version=SECOND, life=1, name="a"
) -> TopicChanges:
    return TopicChanges(name, life, since, version, changed, removed)


def test_topic_changes_update_a_registration(table):
    table.register(registration(topics=("orders", "old")), 0.0)
    grown, new = TopicConfig("orders", 5, 5), TopicConfig("new", 1, 1)
    assert table.change_topics(changes(grown, new, removed=("old", "never")), 100.0)
    assert table.topics() == ["new", "orders"]
    assert len(table.route("orders").publish_queues) == 5
    assert table.heartbeat("a", SECOND, 100.0)
    assert table.expire(180.0) == []


@pytest.mark.parametrize("overtaken", [{"since": SECOND}, {"life": 2}, {"name": "b"}])
def test_a_change_of_another_version_is_not_carried_out(table, overtaken):
    table.register(registration(), 0.0)
    assert not table.change_topics(changes(TopicConfig("new", 1, 1), **overtaken), 1.0)
    assert table.topics() == ["orders"]
    assert table.heartbeat("a", FIRST, 1.0)


def test_a_repeated_change_requests_a_registration_and_changes_nothing(table):
    table.register(registration(), 0.0)
    assert table.change_topics(changes(TopicConfig("new", 1, 1)), 1.0)
    assert not table.change_topics(changes(removed=("orders",)), 1.0)
    assert table.topics() == ["new", "orders"]


def test_a_change_undoes_the_permissions_that_were_changed_here(table):
    table.register(registration(), 0.0)
    assert table.wipe_write_perm("a") == 1
    table.register(registration(), 0.5)  # the broker repeats its registration unchanged
    new = TopicConfig("new", 1, 1)
    assert not table.change_topics(changes(new), 1.0)
    assert table.route("orders").publish_queues == ()
    table.register(registration(version=SECOND, topics=("orders", "new")), 2.0)
    assert len(table.route("orders").publish_queues) == 2
    assert table.change_topics(changes(removed=("new",), since=SECOND, version=SECOND.next(7)), 3.0)


def test_a_route_has_the_topics_attributes_also_while_a_broker_lacks_them(table):
    typed = TopicConfig("orders", 2, 2, attributes={"message.type": "FIFO"})
    table.register(registration("a"), 0.0)
    table.register(replace(registration("b"), topics=(typed,)), 0.0)
    route = pickle.loads(pickle.dumps(table.route("orders")))
    assert route.attributes == TopicAttributes(TopicMessageType.FIFO)
    assert table.route("orders") == route


def test_a_light_queue_is_in_every_broker_group_and_nobody_writes_to_it_directly(table):
    with pytest.raises(TopicNotExistError):
        table.route("%LMQ%alice")
    table.register(registration("b", topics=()), 0.0)
    table.register(registration("a"), 0.0)
    route = table.route("%LMQ%alice")
    assert route.subscribe_queues == (MessageQueue("%LMQ%alice", "a", 0), MessageQueue("%LMQ%alice", "b", 0))
    with pytest.raises(NoPermissionError):
        route.require_writable()
    assert table.topics() == ["orders"]
