"""Tests of RouteCache with NameServers that answer, have restarted, or do not run."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from raymq.common.errors import (
    AccessDeniedError,
    NoPermissionError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.common.names import AUTO_CREATE_TOPIC, NameServerName
from raymq.common.namespaces import Namespace
from raymq.common.protocol.route import QueueData, TopicRoute
from raymq.remoting import route_cache as routes_module
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.remoting.route_cache import ASK_AGAIN_AFTER_S, POLL_NAME_SERVER_INTERVAL_S, RouteCache
from tests.support.clients.fakes import WAIT_S, no_thread_starts, topic_route
from tests.support.history.waiting import eventually

OLD, NEW = topic_route(a=1), topic_route(a=2)


class Servers:
    """Fake NameServers by number. Each NameServer returns a value or raises an error."""

    def __init__(self, monkeypatch, *answers) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []
        self.now_s = 1000.0
        self.hang: threading.Event | None = None
        monkeypatch.setattr(routes_module, "ActorRef", lambda name: _Ref(self, name))
        monkeypatch.setattr(routes_module.time, "monotonic", lambda: self.now_s)

    def routes(self) -> RouteCache:
        return RouteCache([NameServerName(index) for index in range(len(self.answers))])


class _Ref:
    def __init__(self, servers: Servers, name: str) -> None:
        self.servers, self.name = servers, name

    def call(self, method, *args, timeout_s):
        self.servers.asked.append((self.name, method))
        if self.servers.hang is not None:
            self.servers.hang.wait(WAIT_S)
        answer = self.servers.answers[int(self.name.rpartition("-")[2])]
        if callable(answer):
            answer = answer(method, *args)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_route_is_fetched_once_and_again_when_it_is_old(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    assert routes.get("orders") is routes.get("orders") is OLD
    assert len(servers.asked) == 1
    servers.answers = [NEW]
    servers.now_s += POLL_NAME_SERVER_INTERVAL_S
    eventually(lambda: routes.get("orders") is NEW, "the new route", WAIT_S)
    assert len(servers.asked) == 2


def test_an_old_route_is_returned_while_a_nameserver_hangs(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.get("orders")
    servers.hang = threading.Event()
    servers.now_s += POLL_NAME_SERVER_INTERVAL_S
    assert routes.get("orders") is routes.get("orders") is OLD
    servers.answers = [NEW]
    servers.hang.set()
    eventually(lambda: routes.get("orders") is NEW, "the new route", WAIT_S)
    assert len(servers.asked) == 2


def test_an_invalidated_route_is_fetched_at_once(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.invalidate("orders")
    routes.get("orders")
    servers.answers = [NEW]
    routes.invalidate("orders")
    assert routes.get("orders") is NEW


def test_a_route_that_is_invalidated_while_it_is_fetched_is_fetched_again(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.get("orders")
    routes.invalidate("orders")

    def changes_meanwhile(method, topic):
        servers.answers = [NEW]
        routes.invalidate(topic)
        return OLD

    servers.answers = [changes_meanwhile]
    assert routes.get("orders") is OLD
    assert routes.get("orders") is routes.get("orders") is NEW
    assert len(servers.asked) == 3


def test_a_nameserver_that_was_restarted_takes_no_broker_away(monkeypatch):
    both, some = topic_route(a=1, b=1), replace(topic_route(a=1), complete=False)
    servers = Servers(monkeypatch, both, both)
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [some, some]
    routes.invalidate("orders")
    assert routes.get("orders") is routes.get("orders") is both
    # The second `get` found the route in the cache. An incomplete route is requested again only after a pause, which is
    # as long as the pause after a failed request.
    assert len(servers.asked) == 3
    servers.answers = [some, new := topic_route(a=2, b=1)]
    routes.invalidate("orders")
    assert routes.get("orders") is new
    servers.answers = [less := topic_route(a=2)] * 2
    routes.invalidate("orders")
    assert routes.get("orders") is less


def test_the_route_of_a_restarted_nameserver_is_used_if_none_or_a_smaller_one_is_known(monkeypatch):
    servers = Servers(monkeypatch, replace(OLD, complete=False))
    routes = servers.routes()
    assert routes.get("orders") == OLD
    servers.answers = [more := replace(topic_route(a=2, b=1), complete=False)]
    routes.invalidate("orders")
    assert routes.get("orders") is more


@pytest.mark.parametrize("failure", [ServiceNotAvailableError("gone"), RequestTimeoutError("topic_route", 5.0)])
@pytest.mark.parametrize("outdated", ["old", "invalidated"])
def test_while_no_nameserver_answers_the_known_route_serves_on(monkeypatch, failure, outdated):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [failure]
    if outdated == "invalidated":
        routes.invalidate("orders")
    else:
        servers.now_s += POLL_NAME_SERVER_INTERVAL_S
    asked = len(servers.asked)
    assert routes.get("orders") is OLD
    eventually(lambda: len(servers.asked) == asked + 1, "the question", WAIT_S)
    eventually(lambda: not routes._refreshing, "the answer", WAIT_S)
    assert routes.get("orders") is OLD
    # a route that no NameServer could return is not requested again at each send
    assert len(servers.asked) == asked + 1
    servers.answers = [NEW]
    servers.now_s += ASK_AGAIN_AFTER_S
    eventually(lambda: routes.get("orders") is NEW, "the new route", WAIT_S)


def test_a_route_serves_on_for_as_long_as_no_nameserver_answers(monkeypatch):
    servers = Servers(monkeypatch, OLD, OLD)
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [ServiceNotAvailableError("gone"), RequestTimeoutError("topic_route", 5.0)]
    for _ in range(100):
        servers.now_s += ASK_AGAIN_AFTER_S
        assert routes.get("orders") is OLD
        eventually(lambda: not routes._refreshing, "the answer", WAIT_S)
    assert len(servers.asked) > 100


def test_a_route_that_was_never_known_fails_as_the_nameservers_do(monkeypatch):
    with pytest.raises(ServiceNotAvailableError):
        Servers(monkeypatch, ServiceNotAvailableError("gone")).routes().get("orders")


def test_a_topic_that_was_deleted_is_not_served_from_memory(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [TopicNotExistError("orders")]
    routes.invalidate("orders")
    for _ in range(2):
        with pytest.raises(TopicNotExistError):
            routes.get("orders")
    servers.answers = [ServiceNotAvailableError("gone")]
    with pytest.raises(ServiceNotAvailableError):
        routes.get("orders")


@pytest.mark.parametrize("ignorant", [TopicNotExistError("orders"), ServiceNotAvailableError("gone")])
def test_one_nameserver_with_the_route_is_enough(monkeypatch, ignorant):
    for seed in range(10):
        random.seed(seed)
        routes = Servers(monkeypatch, ignorant, NEW, ignorant).routes()
        assert routes.get("orders") is NEW


def test_an_unknown_topic_is_reported_although_another_nameserver_is_away(monkeypatch):
    for seed in range(10):
        random.seed(seed)
        routes = Servers(monkeypatch, ServiceNotAvailableError("gone"), TopicNotExistError("orders")).routes()
        with pytest.raises(TopicNotExistError):
            routes.get("orders")


def test_the_lists_of_topics_and_brokers_are_never_kept(monkeypatch):
    servers = Servers(monkeypatch, ["a"])
    routes = servers.routes()
    assert routes.topics() == ["a"]
    servers.answers = [{"a": 1}]
    assert routes.brokers() == {"a": 1}
    assert routes.all_brokers() == {"a": 1}
    assert servers.asked == [("nameserver-0", method) for method in ("topics", "brokers", "all_brokers")]


class Cluster:
    """Fake NameServer and its fake brokers, which may create topics."""

    def __init__(self, monkeypatch, *, auto_create: bool, perm: int = 6) -> None:
        self.created: list[tuple] = []
        self.routes_by_topic = {"TBW102": topic_route("TBW102", a=8, b=8)} if auto_create else {}
        self.perm = perm
        servers = Servers(monkeypatch, self.answer)
        self.routes = servers.routes()
        monkeypatch.setattr(routes_module, "ActorRef", lambda name: SimpleNamespace(call=partial(self.create, name)))

    def answer(self, method, topic):
        return self.routes_by_topic.get(topic, TopicNotExistError(topic))

    def create(self, broker, method, topic, nums, layout, timeout_s):
        self.created.append((broker, method, topic, nums, layout))
        data = tuple(QueueData(name, nums, nums, self.perm) for name in "ab")
        brokers = self.routes_by_topic["TBW102"].brokers
        self.routes_by_topic[topic] = TopicRoute(topic, brokers, data)


def test_sending_to_a_new_topic_creates_it_at_every_broker_that_does_so(monkeypatch):
    cluster = Cluster(monkeypatch, auto_create=True)
    assert len(cluster.routes.get_or_create("new").publish_queues) == 8
    assert cluster.created == [(broker, "auto_create_topic", "new", 4, "a:4;b:4") for broker in "ab"]
    assert len(cluster.routes.get_or_create("new").publish_queues) == 8
    assert len(cluster.created) == 2


def test_sending_to_a_new_topic_fails_where_creating_is_off_and_names_that_topic(monkeypatch):
    cluster = Cluster(monkeypatch, auto_create=False)
    with pytest.raises(TopicNotExistError, match="'new'"):
        cluster.routes.get_or_create("new")


def test_a_topic_that_may_not_be_written_is_refused(monkeypatch):
    cluster = Cluster(monkeypatch, auto_create=True, perm=4)
    with pytest.raises(NoPermissionError, match="no W"):
        cluster.routes.get_or_create("new")


def test_every_nameserver_is_called_also_when_one_fails(monkeypatch):
    servers = Servers(monkeypatch, None, ServiceNotAvailableError("gone"), None)
    routes = servers.routes()
    with pytest.raises(ServiceNotAvailableError):
        routes.call_all("put_kv", "n", "k", "v")
    assert [name for name, _ in servers.asked] == ["nameserver-0", "nameserver-1", "nameserver-2"]


def test_brokers_that_a_restarted_nameserver_does_know_are_updated_at_once(monkeypatch):
    """A restarted NameServer may not list some brokers yet. The client nevertheless updates the routes of the listed
    brokers at once. A listed broker may have a new master, and a missing broker may be unreachable for a long time."""
    both, some = topic_route(a=1, b=1), replace(topic_route(a=2), complete=False)
    servers = Servers(monkeypatch, both)
    routes = servers.routes()
    routes.get("orders")
    brokers = {"a": replace(some.brokers["a"], storages={0: "storage-a-1"})}
    servers.answers = [replace(some, brokers=brokers)]
    routes.invalidate("orders")
    route = routes.get("orders")
    assert (route.master_storage("a"), route.master_storage("b")) == ("storage-a-1", "storage-b-0")
    assert len(route.publish_queues) == 3
    assert route.complete


def test_wait_continues_while_no_nameserver_can_answer_about_a_topic(monkeypatch):
    answers = [ServiceNotAvailableError("restarted"), RequestTimeoutError("topic_route", 5.0), NEW]
    servers = Servers(monkeypatch, lambda method, topic: answers.pop(0))
    assert servers.routes().wait("orders", WAIT_S) is NEW


def test_a_topic_that_does_not_exist_is_not_waited_for(monkeypatch):
    servers = Servers(monkeypatch, TopicNotExistError("orders"))
    with pytest.raises(TopicNotExistError):
        servers.routes().wait("orders", WAIT_S)
    assert len(servers.asked) == 1


def test_the_layout_of_a_topic_is_taken_from_a_restarted_nameserver(monkeypatch):
    servers = Servers(monkeypatch, replace(topic_route(a=2, b=2), order_config="a:2", layout="a:2;b:2"))
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [replace(topic_route(a=1), layout="a:1;b:1", complete=False)]
    routes.invalidate("orders")
    assert (routes.get("orders").order_config, routes.get("orders").layout) == ("", "a:1;b:1")


def routes_of(*topics: str, nums: int = 1):
    """Return the function with which a fake NameServer answers requests for one topic and for many topics. It has
    routes for `topics`."""
    table = {topic: topic_route(topic, a=nums) for topic in topics}

    def answer(method, asked):
        if method == "topic_route":
            return table[asked] if asked in table else TopicNotExistError(asked)
        return {topic: table[topic] for topic in asked if topic in table}

    return answer


def test_many_routes_are_fetched_with_few_calls(monkeypatch):
    monkeypatch.setattr(routes_module, "ROUTES_PER_CALL", 2)
    servers = Servers(monkeypatch, routes_of(*"abcde"))
    routes = servers.routes()
    routes.get("e")
    routes.fetch("abcdex")
    assert [method for _, method in servers.asked] == ["topic_route", *["topic_routes"] * 3]
    for topic in "abcde":
        assert len(routes.get(topic).publish_queues) == 1
    assert len(servers.asked) == 4
    with pytest.raises(TopicNotExistError):
        routes.get("x")
    routes.fetch("abcde")
    assert len(servers.asked) == 5


def test_routes_that_may_miss_a_broker_are_left_for_a_single_question(monkeypatch):
    partial_route = replace(topic_route("a", a=1), complete=False)
    servers = Servers(monkeypatch, lambda method, asked: {"a": partial_route} if method == "topic_routes" else OLD)
    routes = servers.routes()
    routes.fetch(["a"])
    assert routes.get("a") is OLD


def test_old_routes_are_refreshed_together(monkeypatch):
    topics = [f"t{index}" for index in range(20)]
    servers = Servers(monkeypatch, routes_of(*topics))
    routes = servers.routes()
    routes.fetch(topics)
    servers.now_s += POLL_NAME_SERVER_INTERVAL_S
    servers.asked.clear()
    servers.answers, servers.hang = [routes_of(*topics, nums=2)], threading.Event()
    for topic in topics:
        assert len(routes.get(topic).publish_queues) == 1
    servers.hang.set()
    for topic in topics:
        eventually(lambda topic=topic: len(routes.get(topic).publish_queues) == 2, "the new route", WAIT_S)
    assert {method for _, method in servers.asked} <= {"topic_route", "topic_routes"}
    assert len(servers.asked) <= 3


def test_a_missing_topic_is_reported_with_the_nearest_topics_that_the_nameserver_lists(monkeypatch):
    """The server lists only topics that the user may see."""

    def answer(method, *args):
        return TopicNotExistError(*args) if method == "topic_route" else ["orders", "payments", "%DLQ%ordrs"]

    servers = Servers(monkeypatch, answer)
    routes = RouteCache([NameServerName(0)], suggests=True)
    for call in (routes.get, routes.get_or_create, lambda topic: routes.wait(topic, 1.0)):
        with pytest.raises(TopicNotExistError) as caught:
            call("ordrs")
        assert (caught.value.topic, caught.value.nearest) == ("ordrs", ("orders",))
    assert [method for _, method in servers.asked].count("topics") == 1
    with pytest.raises(TopicNotExistError) as caught:
        routes.get("%DLQ%payment")
    assert caught.value.nearest == ()
    with pytest.raises(TopicNotExistError) as caught:
        servers.routes().get("ordrs")
    assert caught.value.nearest == (), "a server suggests no names, because it sees the topics of all users"


def test_a_missing_topic_is_reported_although_no_nameserver_lists_its_topics(monkeypatch):
    def answer(method, *args):
        return TopicNotExistError(*args) if method == "topic_route" else ServiceNotAvailableError("gone")

    Servers(monkeypatch, answer)
    with pytest.raises(TopicNotExistError) as caught:
        RouteCache([NameServerName(0)], suggests=True).get("ordrs")
    assert caught.value.nearest == ()


def test_a_suggestion_is_named_as_the_namespace_shows_it(monkeypatch):
    def answer(method, *args):
        return TopicNotExistError(*args) if method == "topic_route" else ["team-a%orders", "team-b%ordrs"]

    Servers(monkeypatch, answer)
    routes = NamespacedRoutes(RouteCache([NameServerName(0)], suggests=True), Namespace("team-a"))
    with pytest.raises(TopicNotExistError) as caught:
        routes.get("ordrs")
    assert (caught.value.topic, caught.value.nearest) == ("ordrs", ("orders",))


def test_a_send_to_a_missing_topic_names_this_topic_although_the_user_may_not_see_the_topic_of_creations(monkeypatch):
    def answer(method, *args):
        if method == "topics":
            return ["orders"]
        refused = AccessDeniedError("pisa", "Pub on Topic:TBW102", "no policy matches")
        return refused if args == (AUTO_CREATE_TOPIC,) else TopicNotExistError(*args)

    Servers(monkeypatch, answer)
    with pytest.raises(TopicNotExistError) as caught:
        RouteCache([NameServerName(0)], suggests=True).get_or_create("ordrs")
    assert (caught.value.topic, caught.value.nearest) == ("ordrs", ("orders",))


def test_an_old_route_serves_on_at_the_exit_where_no_thread_refreshes_it(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [NEW]
    servers.now_s += POLL_NAME_SERVER_INTERVAL_S
    with no_thread_starts():
        assert [routes.get("orders") for _ in range(2)] == [OLD, OLD]
    eventually(lambda: routes.get("orders") is NEW, "the new route, after a thread can start", WAIT_S)
