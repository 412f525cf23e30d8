"""Tests of the start of gateways: which processes run on which nodes, and which are ended. The actors are fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from placement.actor_lifecycle import _stop_rank
from placement.gateway import launching
from placement.gateway.launching import start_gateways
from raymq.common.config.cluster import ClusterSettings
from raymq.common.config.gateway import GatewaySettings
from raymq.common.errors import ConfigError, RaymqError, RequestTimeoutError, ServiceNotAvailableError

HEAD, WORKER = "b" * 56, "a" * 56
NODES = [
    {"NodeID": WORKER, "NodeManagerAddress": "10.0.0.2", "Alive": True},
    {"NodeID": HEAD, "NodeManagerAddress": "10.0.0.1", "Alive": True},
    {"NodeID": "c" * 56, "NodeManagerAddress": "10.0.0.3", "Alive": False},
]


class FakeActors:
    """The gateway actors of a cluster, by name. Settings None: the actor does not answer."""

    def __init__(self) -> None:
        self.actors: dict[str, GatewaySettings | None] = {}
        self.started: list[tuple[str, str]] = []
        """The names of the created actors, with their nodes."""
        self.ended: list[str] = []
        self.failing = ""
        """The name of an actor that cannot start."""
        self.wrong_port = 0
        """A port with which no gateway can start. The check of settings does not find it."""
        self.refused: RaymqError | None = None
        """The error of the check of new settings."""

    def running(self) -> list[str]:
        return sorted([*self.actors, "broker-a", "console"])

    def options(self, *, name: str, get_if_exists: bool, scheduling_strategy: Any) -> Any:
        assert get_if_exists
        assert not scheduling_strategy.soft

        def remote(settings: GatewaySettings) -> None:
            if name not in self.actors:
                self.started.append((name, scheduling_strategy.node_id))
                self.actors[name] = settings

        return SimpleNamespace(remote=remote)

    def actor_ref(self, name: str) -> Any:
        def call(method: str, *arguments: GatewaySettings, timeout_s: float) -> Any:
            settings = self.actors[name]
            if settings is None:
                raise RequestTimeoutError(method, timeout_s)
            if method == "settings":
                return settings
            if method == "check":
                assert arguments[0].node == settings.node
                if self.refused is not None:
                    raise self.refused
                return None
            if name == self.failing or settings.options.port == self.wrong_port:
                raise ConfigError("the port is used")
            return {"node": settings.node}

        return SimpleNamespace(call=call)

    def end(self, name: str) -> None:
        self.ended.append(name)
        del self.actors[name]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> FakeActors:
    found = FakeActors()
    monkeypatch.setattr(launching, "running", found.running)
    monkeypatch.setattr(launching, "GatewayActor", found)
    monkeypatch.setattr(launching, "ActorRef", found.actor_ref)
    monkeypatch.setattr(launching, "end_actor", found.end)
    monkeypatch.setattr(launching, "head_node_id", lambda: HEAD)
    monkeypatch.setattr(launching.ray, "nodes", lambda: NODES)
    return found


def settings(**gateway: Any) -> ClusterSettings:
    return ClusterSettings.model_validate({"gateway": gateway})


def name(letter: str, index: int) -> str:
    return f"gateway-{letter * 16}-{index}"


def test_gateways_run_on_the_head_or_on_all_nodes(actors: FakeActors) -> None:
    assert start_gateways(settings(processes=2)) == [
        {"actor": name("b", 0), "node": "10.0.0.1"},
        {"actor": name("b", 1), "node": "10.0.0.1"},
    ]
    assert actors.started == [(name("b", 0), HEAD), (name("b", 1), HEAD)]
    start_gateways(settings(processes=2, nodes="all"))
    # processes with other settings are ended first
    assert actors.ended == [name("b", 0), name("b", 1)]
    assert actors.started[2:] == [(name(*one), node) for node, one in _both_nodes()]


def _both_nodes() -> list[tuple[str, tuple[str, int]]]:
    return [(node, (letter, index)) for node, letter in ((HEAD, "b"), (WORKER, "a")) for index in range(2)]


def test_a_second_start_changes_nothing_and_ends_what_the_settings_do_not_name(actors: FakeActors) -> None:
    start_gateways(settings())
    actors.actors[name("c", 0)] = None
    again = start_gateways(settings())
    assert [one["actor"] for one in again] == [name("b", 0)]
    assert actors.started == [(name("b", 0), HEAD)]
    assert actors.ended == [name("c", 0)]
    # a process that does not answer is replaced
    actors.actors[name("b", 0)] = None
    start_gateways(settings())
    assert actors.ended[1:] == [name("b", 0)]


def test_a_start_that_fails_ends_only_what_it_has_started(actors: FakeActors) -> None:
    start_gateways(settings(nodes="all"))
    actors.actors[name("a", 0)] = None
    actors.failing = name("a", 0)
    with pytest.raises(ConfigError, match="the port is used"):
        start_gateways(settings(nodes="all"))
    assert list(actors.actors) == [name("b", 0)]


@pytest.mark.parametrize("error", [ConfigError("no such key"), ServiceNotAvailableError("the port is used")])
def test_wrong_settings_are_refused_before_a_former_gateway_ends(actors: FakeActors, error: RaymqError) -> None:
    start_gateways(settings(nodes="all"))
    before = dict(actors.actors)
    actors.refused = error
    with pytest.raises(type(error), match=f"{error}; nothing was changed"):
        start_gateways(settings(port=9000))
    assert actors.actors == before
    assert actors.ended == []


def test_a_gateway_that_cannot_check_settings_in_time_is_replaced(actors: FakeActors) -> None:
    start_gateways(settings())
    actors.refused = RequestTimeoutError("check", 10.0)
    start_gateways(settings(port=9000))
    assert actors.ended == [name("b", 0)]


def test_gateways_that_do_not_start_with_new_settings_get_their_former_settings_back(actors: FakeActors) -> None:
    start_gateways(settings(nodes="all", processes=2))
    before = dict(actors.actors)
    actors.wrong_port = 9000
    with pytest.raises(ConfigError, match="the port is used; the gateway runs again with its former settings"):
        start_gateways(settings(port=9000))
    assert actors.actors == before
    assert actors.ended[-1] == name("b", 0)


def test_an_error_says_if_the_former_settings_do_not_work_either(actors: FakeActors) -> None:
    start_gateways(settings())
    before = dict(actors.actors)
    actors.failing = name("b", 0)
    with pytest.raises(ConfigError, match="has its former settings again, but does not serve yet: the port is used"):
        start_gateways(settings(port=9000))
    assert actors.actors == before


def test_an_interrupted_start_brings_the_former_gateways_back(
    actors: FakeActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_gateways(settings())
    before = dict(actors.actors)
    actor_ref = actors.actor_ref

    def interrupted(name: str) -> Any:
        def call(method: str, *arguments: Any, timeout_s: float) -> Any:
            if method == "describe":
                raise KeyboardInterrupt
            return actor_ref(name).call(method, *arguments, timeout_s=timeout_s)

        return SimpleNamespace(call=call)

    monkeypatch.setattr(launching, "ActorRef", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_gateways(settings(port=9000))
    assert actors.actors == before


def test_gateways_end_before_the_servers_that_they_use() -> None:
    names = ["storage-broker-a-0", "broker-a", "pull-1", name("a", 0), "rebalance-0", "nameserver-0", "controller"]
    assert sorted(names, key=_stop_rank)[0] == name("a", 0)
