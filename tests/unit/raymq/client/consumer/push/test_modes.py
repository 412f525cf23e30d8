"""Tests of the check that no push consumer starts while its group is consumed in the other mode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.consumer.push import modes as module
from raymq.client.consumer.push.modes import check_modes
from raymq.common.errors import ClientStateError, NoPermissionError, ServiceNotAvailableError
from raymq.common.protocol.clients import ConsumerConnection, ConsumerData


def member(mode: str, group: str = "billing") -> ConsumerConnection:
    return ConsumerConnection("client-1", "h", 1, ConsumerData(group, "PUSH", member="m-1", consume_mode=mode), 0.1)


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that sets the brokers' answers, one after another; the last one stays."""
    called: list[str] = []

    def answering(**answers: list[object]) -> list[str]:
        def call(name: str, method: str, group: str, timeout_s: float) -> Any:
            assert (method, group) == ("consumer_connections", "billing")
            called.append(name)
            left = answers[name]
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(
            module, "ActorRef", lambda name: SimpleNamespace(call=lambda *args, **how: call(name, *args, **how))
        )
        monkeypatch.setattr(module, "MODES_PAUSE_S", 0.001)
        return called

    return answering


@pytest.mark.parametrize(("mode", "other"), [("share", "queue"), ("queue", "share")])
def test_a_member_in_the_other_mode_refuses_the_start_at_any_broker(mode: str, other: str, brokers: Any) -> None:
    brokers(a=[[]], b=[[member(other)]])
    with pytest.raises(ClientStateError, match=f"consume_mode='{other}' by member m-1"):
        check_modes("billing", mode, ["a", "b"], 0.0)


def test_members_in_the_same_mode_and_of_other_groups_do_not(brokers: Any) -> None:
    called = brokers(a=[[member("share"), member("queue", "audit")]], b=[[]])
    check_modes("billing", "share", ["a", "b"], 0.0)
    assert called == ["a", "b"]


def test_a_member_that_has_just_stopped_is_waited_for(brokers: Any) -> None:
    called = brokers(a=[[member("queue")], [member("queue")], []])
    check_modes("billing", "share", ["a"], 60.0)
    assert called == ["a", "a", "a"]


def test_brokers_that_do_not_answer_or_say_nothing_to_this_user_refuse_nothing(brokers: Any) -> None:
    brokers(a=[ServiceNotAvailableError("a restarts")], b=[[member("queue")]])
    with pytest.raises(ClientStateError):
        check_modes("billing", "share", ["a", "b"], 0.0)
    brokers(a=[NoPermissionError("no")], b=[[member("queue")]])
    check_modes("billing", "share", ["a", "b"], 0.0)
