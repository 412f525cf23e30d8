"""Cached routes, with NameServers that answer, forget and are gone."""

from __future__ import annotations

import random

import pytest

from raymq import routes as routes_module
from raymq.errors import RequestTimeoutError, ServiceNotAvailableError, TopicNotExistError
from raymq.names import NameServerName
from raymq.routes import ASK_AGAIN_AFTER_S, POLL_NAME_SERVER_INTERVAL_S, Routes
from tests.support.fakes import topic_route

OLD, NEW = topic_route(a=1), topic_route(a=2)


class Servers:
    """NameServers by number: each answers with a value or raises an error."""

    def __init__(self, monkeypatch, *answers) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []
        self.now_s = 1000.0
        monkeypatch.setattr(routes_module, "ActorRef", lambda name: _Ref(self, name))
        monkeypatch.setattr(routes_module.time, "monotonic", lambda: self.now_s)

    def routes(self) -> Routes:
        return Routes([NameServerName(index) for index in range(len(self.answers))])


class _Ref:
    def __init__(self, servers: Servers, name: str) -> None:
        self.servers, self.name = servers, name

    def call(self, method, *args, timeout_s):
        self.servers.asked.append((self.name, method))
        answer = self.servers.answers[int(self.name.rpartition("-")[2])]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_route_is_asked_for_once_and_again_when_it_is_old(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    assert routes.get("orders") is routes.get("orders") is OLD
    assert len(servers.asked) == 1
    servers.answers = [NEW]
    servers.now_s += POLL_NAME_SERVER_INTERVAL_S
    assert routes.get("orders") is NEW


def test_a_forgotten_route_is_asked_for_at_once(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.forget("orders")
    routes.get("orders")
    servers.answers = [NEW]
    routes.forget("orders")
    assert routes.get("orders") is NEW


@pytest.mark.parametrize("failure", [ServiceNotAvailableError("gone"), RequestTimeoutError("topic_route", 5.0)])
@pytest.mark.parametrize("outdated", ["old", "forgotten"])
def test_while_no_nameserver_answers_the_known_route_serves_on(monkeypatch, failure, outdated):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [failure]
    if outdated == "forgotten":
        routes.forget("orders")
    else:
        servers.now_s += POLL_NAME_SERVER_INTERVAL_S
    asked = len(servers.asked)
    assert routes.get("orders") is routes.get("orders") is OLD
    assert len(servers.asked) == asked + 1  # not again for each message
    servers.answers = [NEW]
    servers.now_s += ASK_AGAIN_AFTER_S
    assert routes.get("orders") is NEW


def test_a_route_that_was_never_known_fails_as_the_nameservers_do(monkeypatch):
    with pytest.raises(ServiceNotAvailableError):
        Servers(monkeypatch, ServiceNotAvailableError("gone")).routes().get("orders")


def test_a_topic_that_was_deleted_is_not_served_from_memory(monkeypatch):
    servers = Servers(monkeypatch, OLD)
    routes = servers.routes()
    routes.get("orders")
    servers.answers = [TopicNotExistError("orders")]
    routes.forget("orders")
    for _ in range(2):
        with pytest.raises(TopicNotExistError):
            routes.get("orders")
    servers.answers = [ServiceNotAvailableError("gone")]
    with pytest.raises(ServiceNotAvailableError):
        routes.get("orders")


@pytest.mark.parametrize("ignorant", [TopicNotExistError("orders"), ServiceNotAvailableError("gone")])
def test_one_nameserver_that_knows_is_enough(monkeypatch, ignorant):
    for seed in range(10):
        random.seed(seed)
        routes = Servers(monkeypatch, ignorant, NEW, ignorant).routes()
        assert routes.get("orders") is NEW


def test_that_a_topic_does_not_exist_counts_more_than_a_nameserver_that_is_away(monkeypatch):
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
    assert servers.asked == [("nameserver-0", "topics"), ("nameserver-0", "brokers")]
