"""Tests of creating topics over two brokers. Queues are spread over the brokers, few calls are needed, and on return
every client can get the topic's route."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from raymq.client import client as client_module
from raymq.client.admin import base as admin_base, topics as module
from raymq.client.admin.admin import Admin
from raymq.common.errors import (
    IllegalNameError,
    InvalidArgumentError,
    ServiceNotAvailableError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.namespaces import NO_NAMESPACE, Namespace
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.route import NewTopic
from tests.support.clients.fakes import topic_route


class Cluster:
    """Two fake brokers that record created topics, and routes that contain a new topic only after `late` route
    requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created: list[tuple[str, list[NewTopic]]] = []
        self.known_to_all, self.late, self.listed = True, 0, 0
        self.fetched: list[list[str]] = []
        self.error: Exception | None = None
        self.names = ["a", "b"]
        self.elsewhere: dict[str, int] = {}
        self.now_s = 100.0
        routes = SimpleNamespace(
            all_brokers=self.all_brokers,
            invalidate=lambda topic: None,
            fetch=self.fetch,
            get=self.get,
            wait=self.wait,
        )
        monkeypatch.setattr(admin_base, "broker_client", self.actor)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
        self.routes = routes
        self.admin = Admin(routes, SimpleNamespace())  # type: ignore[arg-type]  # fakes

    def all_brokers(self) -> dict[str, None]:
        self.listed += 1
        return dict.fromkeys(self.names)

    def actor(self, name: str) -> SimpleNamespace:
        def call(method: str, topics: list[NewTopic], timeout_s: float) -> bool:
            assert method == "create_topics"
            if self.error is not None:
                raise self.error
            self.created.append((name, topics))
            return self.known_to_all

        return SimpleNamespace(call=call)

    def fetch(self, topics: dict[str, int]) -> None:
        self.fetched.append(sorted(topics))
        self.late -= 1

    def wait(self, topic: str, timeout_s: float):
        if not self.elsewhere:
            raise TopicNotExistError(topic)
        return topic_route(topic, **self.elsewhere)

    def get(self, topic: str):
        return topic_route(topic, a=2, b=1 if self.late < 0 else 0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_topics_are_spread_over_the_brokers_with_one_call_to_each(cluster):
    cluster.admin.create_topics({"x": 3, "y": 1})
    assert cluster.created == [
        ("a", [NewTopic("x", 2, "a:2;b:1"), NewTopic("y", 1, "a:1")]),
        ("b", [NewTopic("x", 1, "a:2;b:1")]),
    ]
    assert cluster.fetched == []  # no route was requested, because every NameServer already has the topics' routes


def test_more_topics_than_one_call_takes_go_in_several(cluster, monkeypatch):
    monkeypatch.setattr(module, "TOPICS_PER_CALL", 2)
    cluster.admin.create_topics({f"t{index}": 1 for index in range(5)})
    assert [len(topics) for _, topics in cluster.created] == [2, 2, 1]


@pytest.mark.parametrize(
    ("options", "created"),
    [
        ({}, {"a": 2, "b": 2}),
        ({"message_type": "fifo"}, {"a": 2, "b": 2}),
        ({"message_type": "priority"}, {"a": 10, "b": 10}),
        ({"message_type": "priority", "brokers": ["b"]}, {"b": 10}),
        ({"message_type": "priority", "queues": 3}, {"a": 2, "b": 1}),
    ],
)
def test_a_new_topic_has_four_queues_or_a_queue_per_priority_and_broker_group(cluster, options, created):
    cluster.admin.create_topic("x", **options)
    assert {broker: new.queue_nums for broker, [new] in cluster.created} == created


def test_topics_that_a_nameserver_lacks_are_waited_for(cluster):
    cluster.known_to_all, cluster.late = False, 3
    cluster.admin.create_topics({"x": 3, "y": 3})
    assert cluster.fetched == [["x", "y"]] * 4


def test_the_brokers_are_looked_up_again_after_a_while(cluster):
    cluster.admin.create_topic("x", 1)
    cluster.names = ["a", "b", "c"]
    cluster.admin.create_topic("y", 3)
    assert cluster.created[-1] == ("b", [NewTopic("y", 1, "a:2;b:1")])
    assert cluster.listed == 1
    cluster.now_s += module.BROKERS_KEPT_S
    cluster.admin.create_topic("z", 3)
    assert cluster.created[-1] == ("c", [NewTopic("z", 1, "a:1;b:1;c:1")])


@pytest.mark.parametrize("names", [NO_NAMESPACE, Namespace("team")])
def test_topics_that_a_client_creates_one_by_one_need_one_list_of_the_brokers(cluster, monkeypatch, names):
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node-1"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(client_module, "running_nameservers", list)
    client = client_module.Client(lambda: None, names)
    try:
        client.routes = cluster.routes
        for number in range(20):
            client.admin.create_topic(f"t{number}", 1)
        assert [topics[0].topic for _, topics in cluster.created] == [names.wrap(f"t{n}") for n in range(20)]
        assert cluster.listed == 1
    finally:
        client.close()


@pytest.mark.parametrize(
    ("topics", "error"),
    [
        ({"x": 0}, InvalidArgumentError),
        ({"x": True}, InvalidArgumentError),
        ({"x": 2049}, InvalidArgumentError),
        ({"good": 1, "b d": 1}, IllegalNameError),
    ],
)
def test_nothing_is_created_if_one_is_not_legal(cluster, topics, error):
    with pytest.raises(error):
        cluster.admin.create_topics(topics)
    assert cluster.created == []


def test_a_topic_with_other_values_raises_topic_exists(cluster):
    cluster.error = TopicExistsError("x", "with 1 queues")
    with pytest.raises(TopicExistsError):
        cluster.admin.create_topics({"x": 2})


def test_without_brokers_nothing_can_be_created(cluster):
    cluster.names = []
    with pytest.raises(ServiceNotAvailableError, match="no broker is registered"):
        cluster.admin.create_topic("x")


def test_attributes_leave_out_topics_that_are_gone_or_away(cluster):
    errors = {"gone": TopicNotExistError("gone"), "away": ServiceNotAvailableError("away")}

    def get(topic: str):
        if topic in errors:
            raise errors[topic]
        return replace(topic_route(topic, a=1), attributes=TopicAttributes(TopicMessageType.FIFO))

    cluster.admin._routes.get = get
    found = cluster.admin.topic_attributes(["gone", "orders", "away"])
    assert found == {"orders": TopicAttributes(TopicMessageType.FIFO)}
    assert cluster.fetched == [["away", "gone", "orders"]]


def test_a_topic_on_chosen_brokers_is_on_no_other(cluster):
    cluster.admin.create_topic("x", 3, brokers=["b", "b"])
    assert cluster.created == [("b", [NewTopic("x", 3, "b:3", {})])]


@pytest.mark.parametrize(
    ("brokers", "elsewhere", "error", "text"),
    [
        (
            ["c"],
            {},
            InvalidArgumentError,
            "'c' does not exist; choose one of the broker groups that run: a, b",
        ),
        ([], {}, InvalidArgumentError, "at least one"),
        (["b"], {"a": 2}, TopicExistsError, "and has queues in broker group a"),
    ],
)
def test_brokers_that_cannot_be_chosen_are_refused_before_anything_is_created(cluster, brokers, elsewhere, error, text):
    cluster.elsewhere = elsewhere
    with pytest.raises(error, match=text):
        cluster.admin.create_topic("x", 3, brokers=brokers)
    assert cluster.created == []


@pytest.mark.parametrize("queues", [0, -1, 2049, 2**40, 2**62])
def test_an_impossible_number_of_queues_is_refused_at_once_with_the_clusters_bounds(cluster, queues):
    cluster.elsewhere = {"a": 2, "b": 2}
    for change in (
        lambda: cluster.admin.create_topic("x", queues),
        lambda: cluster.admin.create_topics({"w": 2, "x": queues}),
        lambda: cluster.admin.update_topic("x", queues=queues),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"queues must be 1 to 2048, not {queues}"):
            change()
    assert cluster.created == []
