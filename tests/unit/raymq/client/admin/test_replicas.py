"""Tests of the administration calls that change the replicas of a broker group."""

from __future__ import annotations

from typing import Any, cast

import pytest

from raymq.client.admin.upkeep import replicas as module
from raymq.client.admin.upkeep.replicas import ReplicaAdmin
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError

GROUP = {"broker": "broker-a", "master": 0, "in_sync": [0], "replicas": [{"replica": 0}], "members": {"version": 1}}


class Controller:
    """Fake Controller that answers each call with the next of its answers, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers, self.calls = list(answers), []
        monkeypatch.setattr(module, "find_actor", lambda name: self)
        monkeypatch.setattr(module, "ActorRef", lambda name: self)
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)

    def call(self, *call: Any, timeout_s: float) -> Any:
        self.calls.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def admin() -> ReplicaAdmin:
    return ReplicaAdmin(cast(Any, None), cast(Any, None))


def status(change: str) -> dict[str, Any]:
    return {"error": "", "groups": [{**GROUP, "change": change}]}


def test_orders_reach_the_controller(admin: ReplicaAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(monkeypatch, None, None, None)
    admin.change_replicas("broker-a", 3)
    admin.change_min_in_sync_replicas("broker-a", 2)
    admin.cancel_replica_change("broker-a")
    assert controller.calls == [
        ("change_replicas", "broker-a", 3, None),
        ("change_min_in_sync", "broker-a", 2),
        ("cancel_change", "broker-a"),
    ]
    with pytest.raises(InvalidArgumentError, match="name the number of replicas"):
        admin.change_replicas("broker-a")


def test_the_wait_goes_on_while_the_controller_restarts(admin: ReplicaAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    away = ServiceNotAvailableError("the Controller restarts")
    Controller(monkeypatch, status("replica 1 joins"), away, status(""))
    steps: list[str] = []
    found = admin.wait_for_replicas("broker-a", progress=steps.append)
    assert (found.change, found.in_sync) == ("", (0,))
    assert steps == ["replica 1 joins", "waiting for the Controller: the Controller restarts"]


def test_the_wait_ends_after_its_time(admin: ReplicaAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    Controller(monkeypatch, status("replica 1 joins"))
    assert admin.wait_for_replicas("broker-a", 0.0).change == "replica 1 joins"


def test_an_unknown_group_and_no_controller_are_named(admin: ReplicaAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    Controller(monkeypatch, status(""))
    with pytest.raises(InvalidArgumentError, match="broker-b"):
        admin.replicas("broker-b")
    monkeypatch.setattr(module, "find_actor", lambda name: None)
    with pytest.raises(InvalidArgumentError, match="enable_controller_mode: true"):
        admin.replicas("broker-a")
