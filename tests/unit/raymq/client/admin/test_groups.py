"""Tests of Admin's methods for consumer groups with two brokers. One broker may not have the group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raymq.client.admin import base as admin_base, groups as admin_groups
from raymq.client.admin.admin import Admin
from raymq.client.admin.dead_letters import LetterPlace
from raymq.client.consumer import rebalance_client
from raymq.common.errors import (
    GroupNotExistError,
    IllegalNameError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.common.message import MessageQueue
from raymq.common.protocol.clients import ConsumerConnection, ConsumerData, ProducerConnection
from raymq.common.protocol.group import GroupConfig, GroupQueueProgress
from raymq.common.protocol.stats import Figures, GroupStats
from raymq.common.protocol.store import Boundary, QueueBounds
from tests.support.clients.fakes import FakeRoutes, topic_route

A0, A1, B0 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1), MessageQueue("orders", "b", 0)


class Cluster:
    """Fake brokers with one answer per method, and a Rebalance actor that may not run. Broker b does not have the
    group."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[tuple] = []
        self.answers: dict[tuple[str, str], object] = {}
        self.rebalance_runs = True
        self.routes = routes = FakeRoutes(
            topic_route(a=2, b=1), topic_route("%DLQ%billing", a=1), topic_route("%RETRY%billing", a=1)
        )
        routes.all_brokers = lambda: {"a": None, "b": None}
        storage = SimpleNamespace(
            queue_bounds=lambda topic, queue_id, timeout_s: QueueBounds(3, 10, 0),
            offset_by_time=lambda topic, queue_id, timestamp_ms, timeout_s, boundary: 5 + (boundary is Boundary.UPPER),
        )
        monkeypatch.setattr(admin_base, "broker_client", self.actor)
        monkeypatch.setattr(rebalance_client, "ActorRef", self.actor)
        self.admin = Admin(routes, SimpleNamespace(get=lambda name: storage))

    def actor(self, name):
        return SimpleNamespace(
            call=lambda method, *args, timeout_s: self.call(name, method, *args), handle=lambda: self.handle(name)
        )

    def handle(self, name):
        if not self.rebalance_runs or name != "rebalance-0":
            raise ServiceNotAvailableError(f"{name} does not run")

    def call(self, name, method, *args):
        self.calls.append((name, method, *args))
        answer = self.answers.get((name, method), {} if method == "committed_offsets" else None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def called(self, method) -> list[tuple]:
        return [(name, *args) for name, called, *args in self.calls if called == method]


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster(monkeypatch)
    for method in ("group_config", "group_topics", "group_stats", "delete_group"):
        cluster.answers["b", method] = GroupNotExistError("billing")
    for name in "ab":
        cluster.answers[name, "update_groups"] = []
        cluster.answers[name, "groups"] = ["billing", f"reports-{name}"]
    cluster.answers["a", "group_config"] = GroupConfig("billing")
    return cluster


@pytest.mark.parametrize(
    ("arguments", "offset"),
    [({"to": "earliest"}, 3), ({"to": "latest"}, 10), ({"timestamp_ms": 1_700_000_000_000}, 5), ({"offset": 4}, 4)],
)
def test_a_reset_sets_every_queue_at_its_broker_and_notifies_the_members(cluster, arguments, offset):
    assert cluster.admin.reset_offsets("billing", "orders", **arguments) == dict.fromkeys((A0, A1, B0), offset)
    assert cluster.called("reset_offsets") == [
        ("a", "billing", "orders", {0: offset, 1: offset}),
        ("b", "billing", "orders", {0: offset}),
    ]
    assert cluster.called("ensure_group") == [("a", "billing"), ("b", "billing")]
    assert cluster.calls[-1] == ("rebalance-0", "offsets_reset", "billing")


def test_a_reset_may_be_of_one_queue_and_of_a_group_without_consumers(cluster):
    cluster.rebalance_runs = False
    assert cluster.admin.reset_offsets("billing", "orders", offset=4, queue=B0) == {B0: 4}
    assert cluster.called("reset_offsets") == [("b", "billing", "orders", {0: 4})]
    assert cluster.called("offsets_reset") == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, InvalidArgumentError),
        ({"to": "latest", "offset": 4}, InvalidArgumentError),
        ({"to": "middle"}, InvalidArgumentError),
        ({"to": "latest", "queue": MessageQueue("orders", "b", 1)}, InvalidArgumentError),
        ({"offset": 2}, OffsetOutOfRangeError),
        ({"offset": 11}, OffsetOutOfRangeError),
    ],
)
def test_a_reset_that_makes_no_sense_changes_nothing(cluster, arguments, error):
    with pytest.raises(error):
        cluster.admin.reset_offsets("billing", "orders", **arguments)
    assert cluster.called("reset_offsets") == []


def test_a_topic_is_forbidden_and_allowed_at_every_broker_and_the_members_look_again(cluster):
    cluster.admin.forbid("billing", "orders")
    assert cluster.called("forbid_topic") == [(name, "billing", "orders", True) for name in "ab"]
    assert cluster.calls[-1] == ("rebalance-0", "offsets_reset", "billing")
    cluster.admin.allow("billing", "orders")
    assert cluster.called("forbid_topic")[2:] == [(name, "billing", "orders", False) for name in "ab"]
    assert cluster.calls[-1] == ("rebalance-0", "offsets_reset", "billing")
    cluster.answers["a", "forbidden_topics"] = ["orders"]
    cluster.answers["b", "forbidden_topics"] = ["bills", "orders"]
    assert cluster.admin.forbidden_topics("billing") == ["bills", "orders"]


def test_only_a_group_and_a_topic_that_exist_are_forbidden(cluster):
    with pytest.raises(TopicNotExistError):
        cluster.admin.forbid("billing", "unknown")
    cluster.answers["a", "group_config"] = GroupNotExistError("billing")
    for change in (cluster.admin.forbid, cluster.admin.allow):
        with pytest.raises(GroupNotExistError):
            change("billing", "orders")
    assert cluster.called("forbid_topic") == []


def test_a_broker_that_a_restarted_nameserver_does_not_know_yet_is_not_left_out(cluster):
    restarted = ServiceNotAvailableError("the NameServer was restarted and cannot yet list all brokers")
    answers = iter([restarted, restarted, {"a": None, "b": None}])

    def all_brokers():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cluster.routes.all_brokers = all_brokers
    cluster.admin.create_group(GroupConfig("billing"))
    assert cluster.called("update_groups") == [("a", [GroupConfig("billing")]), ("b", [GroupConfig("billing")])]


def test_a_group_without_a_broker_does_not_exist(cluster):
    cluster.answers["a", "group_config"] = GroupNotExistError("billing")
    for call in (
        lambda: cluster.admin.reset_offsets("billing", "orders", "latest"),
        lambda: cluster.admin.clone_offsets("billing", "audit", "orders"),
        lambda: cluster.admin.update_group("billing", retry_max_times=1),
    ):
        with pytest.raises(GroupNotExistError):
            call()
    assert cluster.called("reset_offsets") == []


def test_an_unknown_group_is_reported_with_the_nearest_groups_of_all_brokers(cluster):
    cluster.answers["a", "group_config"] = GroupNotExistError("report-b")
    with pytest.raises(GroupNotExistError) as caught:
        cluster.admin.group_config("report-b")
    assert caught.value.nearest == ("reports-b", "reports-a")
    cluster.answers["b", "groups"] = ServiceNotAvailableError("broker b restarts")
    cluster.routes.all_brokers = dict
    with pytest.raises(GroupNotExistError) as caught:
        cluster.admin.group_config("report-b")
    assert caught.value.nearest == ()


def test_a_group_without_dead_letters_has_an_empty_list_of_them(cluster):
    del cluster.routes.routes["%DLQ%billing"]
    letters = cluster.admin.dead_letters("billing")
    assert (letters.letters(), list(letters.replay())) == ([], [])
    with pytest.raises(InvalidArgumentError, match="no dead letter at a:0:1"):
        list(letters.replay(letters=[LetterPlace("a", 0, 1)]))


def test_the_dead_letters_of_an_unknown_group_are_an_error_of_the_group(cluster):
    cluster.answers["a", "group_config"] = GroupNotExistError("biling")
    letters = cluster.admin.dead_letters("biling")
    for call in (letters.letters, lambda: list(letters.each()), lambda: list(letters.replay())):
        with pytest.raises(GroupNotExistError, match=r"'biling' does not exist; did you mean 'billing'\?"):
            call()


def test_a_group_is_created_by_its_name_and_settings(cluster):
    cluster.answers["a", "group_config"] = GroupNotExistError("new")
    cluster.admin.create_group("new", retry_max_times=5)
    assert cluster.called("update_groups") == [(name, [GroupConfig("new", retry_max_times=5)]) for name in "ab"]
    for wrong in ({"retry_times": 5}, {"retry_max_times": -1}, {"consume_enable": "no"}, {"retry_intervals_s": 5}):
        with pytest.raises(InvalidArgumentError):
            cluster.admin.create_group("new", **wrong)
    with pytest.raises(IllegalNameError):
        cluster.admin.create_group("two words")
    with pytest.raises(InvalidArgumentError, match="not both"):
        cluster.admin.create_group(GroupConfig("new"), retry_max_times=5)
    assert len(cluster.called("update_groups")) == 2


def test_a_created_group_never_changes_the_settings_of_an_existing_group(cluster):
    cluster.answers["a", "group_config"] = existing = GroupConfig("billing", retry_max_times=3)
    for settings in ({}, {"retry_max_times": 3}, {"retry_intervals_s": []}):
        cluster.admin.create_group("billing", **settings)
    assert cluster.called("update_groups") == [(name, [existing]) for name in "ababab"]
    with pytest.raises(InvalidArgumentError, match="'billing' exists already with retry_max_times=3; change it"):
        cluster.admin.create_group("billing", retry_max_times=4)
    assert len(cluster.called("update_groups")) == 6


def test_offsets_are_cloned_where_the_source_has_some(cluster):
    cluster.answers["a", "committed_offsets"] = {1: 9}
    cluster.answers["b", "committed_offsets"] = {}
    assert cluster.admin.clone_offsets("billing", "audit", "orders") == {A1: 9}
    assert cluster.called("reset_offsets") == [("a", "audit", "orders", {1: 9})]
    assert cluster.called("ensure_group") == [("a", "audit")]


def test_a_groups_fields_are_changed_at_every_broker(cluster):
    changed = cluster.admin.update_group("billing", retry_max_times=2)
    assert changed == GroupConfig("billing", retry_max_times=2)
    assert cluster.called("update_groups") == [("a", [changed]), ("b", [changed])]
    assert cluster.called("offsets_reset") == []
    with pytest.raises(InvalidArgumentError, match="no setting retry_times; its settings are"):
        cluster.admin.update_group("billing", retry_times=2)


@pytest.mark.parametrize("where", [["a"], ["b"], ["a", "b"]])
def test_members_ask_again_when_their_group_may_consume_no_more_or_once_more(cluster, where):
    for name in where:
        cluster.answers[name, "update_groups"] = ["billing"]
    cluster.admin.update_group("billing", consume_enable=False)
    assert cluster.called("offsets_reset") == [("rebalance-0", "billing")]


def test_deleting_a_group_deletes_it_where_it_is_known(cluster):
    cluster.admin.delete_group("billing", dead_letters=True)
    assert cluster.called("delete_group") == [("a", "billing", True), ("b", "billing", True)]


def test_a_summary_counts_retries_and_dead_letters_apart(cluster):
    retry = MessageQueue("%RETRY%billing", "a", 0)
    cluster.answers["a", "group_topics"] = ["orders", "%RETRY%billing"]
    cluster.answers["b", "group_progress"] = [GroupQueueProgress("billing", B0, 4, 3, 10, 500)]
    entries = {
        "orders": [GroupQueueProgress("billing", A0, 10, 3, 10), GroupQueueProgress("billing", A1, None, 3, 10, 900)],
        "%RETRY%billing": [GroupQueueProgress("billing", retry, 8, 3, 10, 9999)],
    }
    whole = cluster.call
    cluster.call = lambda name, method, *args: (
        entries[args[1]] if (name, method) == ("a", "group_progress") else whole(name, method, *args)
    )
    summary = cluster.admin.group_summary("billing")
    assert [entry.queue for entry in summary.queues] == [A0, A1, B0]
    assert (summary.lag, summary.lag_ms, summary.retry_lag, summary.dead_letters) == (6 + 7, 900, 2, 7)


def test_a_client_connected_to_every_broker_is_listed_once(cluster):
    producer = ProducerConnection("c1", "h", 1, "shop", 0.5)
    consumers = [ConsumerConnection("c1", "h", 1, ConsumerData(group, "PULL"), 0.5) for group in ("g", "h")]
    for name in "ab":
        cluster.answers[name, "producer_connections"] = [producer]
    cluster.answers["a", "consumer_connections"] = consumers[:1]
    cluster.answers["b", "consumer_connections"] = consumers
    assert cluster.admin.producer_connections("shop") == [producer]
    assert cluster.admin.consumer_connections() == consumers


def test_a_groups_counters_add_up_over_brokers(cluster):
    cluster.answers["a", "group_stats"] = {"orders": GroupStats(Figures(3), Figures(1))}
    cluster.answers["b", "group_stats"] = {"orders": GroupStats(Figures(4)), "bills": GroupStats(Figures(1))}
    stats = cluster.admin.group_stats("billing")
    assert {topic: one.messages.total for topic, one in stats.items()} == {"bills": 1, "orders": 7}
    assert stats["orders"].sent_back.total == 1


def test_many_groups_are_created_with_few_calls_to_each_broker(cluster, monkeypatch):
    monkeypatch.setattr(admin_groups, "GROUPS_PER_CALL", 2)
    configs = [GroupConfig(f"g{index}") for index in range(3)]
    cluster.admin.create_groups(configs)
    assert cluster.called("update_groups") == [(name, part) for name in "ab" for part in (configs[:2], configs[2:])]


def test_a_dry_run_shows_old_and_new_offsets_and_changes_nothing(cluster):
    cluster.answers["a", "committed_offsets"] = {0: 7}
    moves = cluster.admin.reset_offsets("billing", "orders", "latest", dry_run=True)
    assert moves == {A0: 10, A1: 10, B0: 10}
    assert moves.old == {A0: 7, A1: None, B0: None}
    assert cluster.admin.clone_offsets("billing", "other", "orders", dry_run=True) == {A0: 7}
    assert cluster.called("reset_offsets") == []
    assert cluster.called("ensure_group") == []


def test_offsets_in_a_topic_are_dropped_where_there_are_any(cluster):
    cluster.answers["a", "consumer_connections"] = cluster.answers["b", "consumer_connections"] = []
    cluster.answers["a", "committed_offsets"] = {1: 9, 0: 7}
    cluster.answers["b", "group_config"] = GroupNotExistError("billing")
    assert cluster.admin.delete_offsets("billing", "orders", dry_run=True) == {A0: 7, A1: 9}
    assert cluster.called("delete_offsets") == []
    cluster.admin.delete_offsets("billing", "orders")
    assert cluster.called("delete_offsets") == [("a", "billing", ["orders"])]


def test_offsets_of_a_topic_to_which_a_consumer_subscribes_are_kept(cluster):
    reader = ConsumerConnection("client-1", "h", 1, ConsumerData("billing", "PULL", {"orders": "*"}), 1.0)
    cluster.answers["a", "consumer_connections"], cluster.answers["b", "consumer_connections"] = [], [reader]
    with pytest.raises(
        InvalidArgumentError, match=r"1 consumers of group 'billing' subscribe to topic 'orders'.*client-1"
    ):
        cluster.admin.delete_offsets("billing", "orders")
    assert cluster.called("delete_offsets") == []
