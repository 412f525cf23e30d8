"""Tests of stopping actors. An actor keeps running if the user has no right to close it. It is killed if it does not
close in time. Actors of one kind close at the same time, and before the actors of the next kind."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier
from typing import Any

import pytest

from placement import actor_lifecycle
from raymq.common.errors import AccessDeniedError, AuthenticationError, RaymqError, RequestTimeoutError


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(actor_lifecycle.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(actor_lifecycle.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(actor_lifecycle.ray, "kill", lambda handle, no_restart: names.append(handle))
    return names


def closing_by(monkeypatch: pytest.MonkeyPatch, close: Callable[[str], Any]) -> None:
    """Let each actor's method `close` call the given function with the actor's name."""

    class Actor:
        def __init__(self, name: str) -> None:
            self._name = name

        def call(self, method: str, timeout_s: float) -> Any:
            assert method == "close"
            return close(self._name)

    monkeypatch.setattr(actor_lifecycle, "ActorRef", Actor)


def closing(monkeypatch: pytest.MonkeyPatch, error: RaymqError) -> None:
    def fail(name: str) -> None:
        raise error

    closing_by(monkeypatch, fail)


@pytest.mark.parametrize(
    "error", [AuthenticationError("no user"), AccessDeniedError("alice", "All on Server:broker-a.close", "no")]
)
def test_an_actor_that_the_user_may_not_close_keeps_running(monkeypatch, killed, error):
    closing(monkeypatch, error)
    with pytest.raises(type(error)):
        actor_lifecycle.end_actor("broker-a")
    assert killed == []


def test_an_actor_that_does_not_close_in_time_is_killed(monkeypatch, killed):
    closing(monkeypatch, RequestTimeoutError("close", 30.0))
    actor_lifecycle.end_actor("broker-a")
    assert killed == ["broker-a"]


WHOLE = ("broker-a", "broker-b", "nameserver-0", "pull-1", "pull-2", "storage-broker-a-0", "storage-broker-b-0")


def test_actors_of_one_kind_close_at_the_same_time_and_before_the_next_kind(monkeypatch, killed):
    """Each close waits until the close of the other actor of its kind has begun."""
    kinds = {prefix: Barrier(2) for prefix in ("pull-", "broker-", "storage-")}
    ends: list[tuple[str, int]] = []

    def close(name: str) -> None:
        [pair] = [barrier for prefix, barrier in kinds.items() if name.startswith(prefix)]
        pair.wait(60)
        ends.append((name, len(killed)))

    closing_by(monkeypatch, close)
    steps: list[str] = []
    order = ["pull-1", "pull-2", "broker-a", "broker-b", "nameserver-0", "storage-broker-a-0", "storage-broker-b-0"]
    assert actor_lifecycle.stop_actors(steps.append, only=WHOLE) == order
    assert steps == [
        "stopping pull-1, pull-2",
        "stopping broker-a, broker-b",
        "stopping nameserver-0",
        "stopping storage-broker-a-0, storage-broker-b-0",
    ]
    assert [sorted(killed[first:last]) for first, last in ((0, 2), (2, 4), (4, 5), (5, 7))] == [
        ["pull-1", "pull-2"],
        ["broker-a", "broker-b"],
        ["nameserver-0"],
        ["storage-broker-a-0", "storage-broker-b-0"],
    ]
    # When a broker had closed, both Pull actors had ended. When a store had closed, all other actors had ended.
    ended = dict(ends)
    assert min(ended["broker-a"], ended["broker-b"]) >= 2
    assert min(ended["storage-broker-a-0"], ended["storage-broker-b-0"]) >= 5


def test_stores_keep_running_if_the_user_may_not_close_a_broker(monkeypatch, killed):
    def close(name: str) -> None:
        if name == "broker-a":
            raise AccessDeniedError("alice", "All on Server:broker-a.close", "no")

    closing_by(monkeypatch, close)
    with pytest.raises(AccessDeniedError):
        actor_lifecycle.stop_actors(only=WHOLE)
    assert sorted(killed) == ["broker-b", "pull-1", "pull-2"]
