"""Tests of a broker's heartbeats and registrations at NameServers. A NameServer answers, has lost its state, or does
not exist."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from actors.broker import registrar as module
from actors.broker.registrar import Registrar
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.names import NameServerName
from raymq.common.protocol.route import BrokerRegistration, DataVersion, TopicConfig
from tests.support.history.waiting import eventually


class Server:
    def __init__(self, name: str) -> None:
        self.name = name
        self.known: BrokerRegistration | None = None
        self.topics: dict[str, TopicConfig] = {}
        self.gone = False
        self.calls: list[str] = []
        self.on_call = lambda: None

    def call(self, method, *args, timeout_s):
        self.calls.append(method)
        self.on_call()
        if self.gone:
            raise ServiceNotAvailableError("gone")
        if method == "register_broker":
            [self.known] = args
            self.topics = {config.topic: config for config in self.known.topics}
        if method == "change_topics":
            [changes] = args
            if self.known is None or self.known.data_version != changes.since:
                return False
            self.known = replace(self.known, data_version=changes.data_version)
            self.topics |= {config.topic: config for config in changes.changed}
            for topic in changes.removed:
                del self.topics[topic]
            return True
        if method == "unregister_broker":
            self.known = None
        return self.known is not None and args[-1] == self.known.data_version


class Scene:
    def __init__(self, monkeypatch) -> None:
        self.servers: dict[str, Server] = {}
        self.now_s = 100.0
        self.version = DataVersion(0, 1, 1)
        self.topics: tuple[TopicConfig, ...] = ()
        self.node = "n1"
        monkeypatch.setattr(module, "ActorRef", lambda name: self.servers.setdefault(name, Server(name)))
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        names = [NameServerName(0), NameServerName(1)]
        self.registrar = Registrar("broker-a", names, self.describe, interval_s=30.0)
        self.first, self.second = self.servers.values()

    def describe(self) -> BrokerRegistration:
        return BrokerRegistration("raymq", "broker-a", {0: "s"}, self.topics, self.version, {0: self.node}, 1)

    def change(self, *topics: TopicConfig) -> tuple[list[str], list[str]]:
        """Set the broker's topics to `topics`, and register the broker. Returns the resulting calls to the first and to
        the second NameServer."""
        self.topics = topics
        self.version = self.version.next(0)
        self.first.calls, self.second.calls = [], []
        self.registrar.register()
        return self.first.calls, self.second.calls

    def beat(self) -> tuple[list[str], list[str]]:
        """Send one heartbeat. Returns the calls that the heartbeat made, for each of the two NameServers."""
        self.first.calls, self.second.calls = [], []
        self.registrar.beat()
        return self.first.calls, self.second.calls


BEAT, REGISTER, CHANGE = "broker_heartbeat", "register_broker", "change_topics"
ORDERS, BILLS = TopicConfig("orders", 4, 4), TopicConfig("bills", 1, 1)


@pytest.fixture
def scene(monkeypatch):
    scene = Scene(monkeypatch)
    scene.registrar.register()
    return scene


def test_a_registered_broker_sends_only_heartbeats(scene):
    assert scene.beat() == ([BEAT], [BEAT])


def test_only_a_nameserver_without_the_broker_gets_a_new_registration(scene):
    scene.second.known = None
    assert scene.beat() == ([BEAT], [BEAT, REGISTER])


def test_a_nameserver_that_missed_a_change_gets_a_registration(scene):
    scene.second.gone = True
    scene.version = DataVersion(0, 2, 2)
    scene.registrar.register()
    assert scene.beat() == ([BEAT], [BEAT])
    scene.second.gone = False
    assert scene.beat() == ([BEAT], [BEAT, REGISTER])
    assert scene.second.known.data_version == scene.version


def test_a_nameserver_that_missed_a_move_gets_a_registration(scene):
    scene.second.gone, scene.node = True, "n2"
    assert scene.beat() == ([REGISTER], [REGISTER])
    assert scene.beat() == ([BEAT], [BEAT])
    scene.second.gone = False
    assert scene.beat() == ([BEAT], [BEAT, REGISTER])
    assert scene.second.known.nodes == {0: "n2"}
    assert scene.beat() == ([BEAT], [BEAT])


def test_a_store_that_moved_is_registered_at_once(scene):
    scene.node = "n2"
    assert scene.beat() == ([REGISTER], [REGISTER])
    assert scene.beat() == ([BEAT], [BEAT])


def test_a_full_registration_is_sent_regularly(scene):
    scene.now_s += 30.0
    assert scene.beat() == ([REGISTER], [REGISTER])
    assert scene.beat() == ([BEAT], [BEAT])


def test_a_leaving_broker_unregisters_even_if_a_nameserver_is_unavailable(scene):
    scene.first.gone = True
    scene.registrar.leave()
    assert scene.second.known is None


def test_a_nameserver_that_stands_still_does_not_hold_up_the_others(scene):
    told, seen = threading.Event(), []
    scene.first.on_call = lambda: seen.append(told.wait(30))
    scene.second.on_call = told.set
    scene.version = DataVersion(0, 2, 2)
    scene.registrar.register()
    assert seen == [True]
    assert scene.second.known.data_version == scene.version


def test_only_changed_topics_are_sent(scene):
    assert scene.change(ORDERS) == ([CHANGE], [CHANGE])
    assert scene.change(ORDERS, BILLS) == ([CHANGE], [CHANGE])
    more = TopicConfig("orders", 8, 8)
    assert scene.change(more) == ([CHANGE], [CHANGE])
    assert scene.first.topics == scene.second.topics == {"orders": more}
    assert scene.beat() == ([BEAT], [BEAT])


def test_a_nameserver_that_missed_topics_gets_a_registration_with_the_next_change(scene):
    scene.second.gone = True
    scene.change(ORDERS)
    scene.second.gone = False
    assert scene.change(ORDERS, BILLS) == ([CHANGE], [CHANGE, REGISTER])
    assert scene.first.topics == scene.second.topics == {"orders": ORDERS, "bills": BILLS}


def test_a_change_of_more_than_topics_is_a_full_registration(scene):
    scene.node = "n2"
    assert scene.change(ORDERS) == ([REGISTER], [REGISTER])


def test_changes_during_a_registration_share_the_next_call(scene):
    telling, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        telling.set()
        assert go_on.wait(30)

    scene.first.on_call = wait
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(scene.change, ORDERS)
        assert telling.wait(30)
        scene.topics, scene.version = (ORDERS, BILLS), scene.version.next(0)
        asked = scene.registrar._asked
        others = [threads.submit(scene.registrar.register) for _ in range(8)]
        eventually(lambda: scene.registrar._asked == asked + 8, "all to have asked")
        go_on.set()
        for one in [first, *others]:
            one.result(30)
    assert scene.first.calls == [CHANGE, CHANGE]
    assert scene.first.topics == {"orders": ORDERS, "bills": BILLS}


def test_a_change_reports_whether_every_nameserver_has_it(scene):
    scene.version = scene.version.next(0)
    assert scene.registrar.register()
    assert scene.registrar.register()
    scene.second.gone = True
    scene.version = scene.version.next(0)
    assert not scene.registrar.register()
    assert not scene.registrar.register()
    scene.second.gone, scene.second.known = False, None
    scene.version = scene.version.next(0)
    assert scene.registrar.register()
