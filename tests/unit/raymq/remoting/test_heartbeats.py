"""Tests of a client's heartbeats. On a change, the client sends a heartbeat to every broker at once. When it closes, it
unregisters."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.clients import ConsumerData
from raymq.remoting import heartbeats as module
from raymq.remoting.heartbeats import Heartbeats
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

DATA = ConsumerData("billing", "PULL", {"orders": "*"})


class Brokers:
    """Fake brokers. Each broker keeps the last heartbeat that it received."""

    def __init__(self) -> None:
        self.names = ["a", "b"]
        self.known: dict[str, object] = {}
        self.gone: set[str] = set()
        self.nameservers_gone = False
        self._lock = threading.Lock()

    def brokers(self):
        if self.nameservers_gone:
            raise ServiceNotAvailableError("gone")
        return dict.fromkeys(self.names)

    def actor(self, name):
        return SimpleNamespace(name=name, call=lambda method, *args, timeout_s: self.call(name, method, *args))

    def call(self, name, method, argument):
        if name in self.gone:
            raise ServiceNotAvailableError("gone")
        with self._lock:
            if method == "heartbeat":
                self.known[name] = argument
            else:
                assert method == "unregister_client"
                assert argument == self.known.pop(name).client_id

    def know(self, *, producers=(), consumers=(), at=("a", "b")) -> None:
        def so() -> bool:
            said = {name: (set(beat.producers), list(beat.consumers)) for name, beat in dict(self.known).items()}
            return said == {name: (set(producers), list(consumers)) for name in at}

        eventually(so, f"{producers}, {consumers}", WAIT_S)


@pytest.fixture
def brokers(monkeypatch):
    brokers = Brokers()
    monkeypatch.setattr(module, "ActorRef", brokers.actor)
    return brokers


@pytest.fixture
def beats(brokers):
    beats = Heartbeats(brokers, "10.0.0.1")
    yield beats
    beats.close()


def test_every_broker_receives_a_change_at_once(brokers, beats):
    producer, consumer = object(), object()
    beats.set_producer(producer, "shop")
    brokers.know(producers=["shop"])
    beats.set_consumer(consumer, DATA)
    brokers.know(producers=["shop"], consumers=[DATA])
    other = ConsumerData("billing", "PULL", {"orders": "paid"})
    beats.set_consumer(consumer, other)
    brokers.know(producers=["shop"], consumers=[other])
    beats.remove(producer)
    beats.remove(producer)
    brokers.know(consumers=[other])


def test_a_client_that_ends_is_forgotten_at_once(brokers, beats):
    beats.set_producer(object(), "shop")
    brokers.know(producers=["shop"])
    beats.close()
    beats.close()
    assert brokers.known == {}


def test_a_client_without_producers_and_consumers_sends_nothing(brokers, beats):
    beats.remove(object())
    beats.close()
    assert brokers.known == {}


def test_a_broker_that_missed_a_heartbeat_gets_the_next(brokers, beats, monkeypatch):
    monkeypatch.setattr(module, "CLIENT_HEARTBEAT_INTERVAL_S", 0.02)
    brokers.gone = {"a"}
    beats.set_producer(object(), "shop")
    brokers.know(producers=["shop"], at=["b"])
    brokers.gone = set()
    brokers.know(producers=["shop"])


def test_a_consumer_closed_before_a_brokers_turn_is_not_sent(brokers, beats):
    consumer, busy, go_on = object(), threading.Event(), threading.Event()
    known, call = [], brokers.call

    def slow(name, method, argument):
        if name == "a":
            busy.set()
            assert go_on.wait(WAIT_S)
        else:
            known.append(argument)
        call(name, method, argument)

    brokers.call = slow
    beats.set_consumer(consumer, DATA)
    assert busy.wait(WAIT_S)
    beats.remove(consumer)
    go_on.set()
    brokers.know()
    assert {beat.consumers for beat in known} == {()}


def test_heartbeats_continue_while_no_nameserver_answers(brokers, beats):
    beats.set_producer(object(), "shop")
    brokers.know(producers=["shop"])
    brokers.nameservers_gone = True
    beats.set_consumer(object(), DATA)
    brokers.know(producers=["shop"], consumers=[DATA])


def test_ids_of_clients_differ(brokers):
    assert Heartbeats(brokers, "h").client_id != Heartbeats(brokers, "h").client_id
