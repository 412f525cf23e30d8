"""Tests of stopping an actor. The actor keeps running if the user has no right to close it. It is killed if it does not
close in time."""

from __future__ import annotations

from typing import Any

import pytest

from placement import actor_lifecycle
from raymq.common.errors import AccessDeniedError, AuthenticationError, RaymqError, RequestTimeoutError


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(actor_lifecycle.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(actor_lifecycle.ray, "kill", lambda handle, no_restart: names.append(handle))
    return names


def closing(monkeypatch: pytest.MonkeyPatch, error: RaymqError) -> None:
    class Actor:
        def __init__(self, name: str) -> None:
            pass

        def call(self, method: str, timeout_s: float) -> Any:
            raise error

    monkeypatch.setattr(actor_lifecycle, "ActorRef", Actor)


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
