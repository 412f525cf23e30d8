"""Calls of a process that acts as a user: by the methods' twins, signed for one actor, one method, one time."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from raymq import identity
from raymq.access.signatures import check
from raymq.errors import SignedTooEarlyError
from raymq.identity import Identity
from raymq.remoting import actor_ref
from raymq.remoting.actor_ref import ActorRef

ALICE = Identity("alice", b"a" * 32)


class Handle:
    """A handle that notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        class Method:
            @staticmethod
            def remote(*args: Any, **kwargs: Any) -> int:
                self.calls.append((name, args, kwargs))
                return len(self.calls)

        return Method


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    made = Handle()
    monkeypatch.setattr(ActorRef, "handle", lambda self: made)
    return made


def test_a_process_that_is_nobody_calls_the_method_itself(handle: Handle) -> None:
    ActorRef("broker-a").start("send", "orders", b"x", tags="t")
    assert handle.calls == [("send", ("orders", b"x"), {"tags": "t"})]


def test_a_user_calls_the_twin_with_a_signature_of_just_this_call(handle: Handle) -> None:
    with identity.acting_as(ALICE):
        for _ in range(2):
            ActorRef("broker-a").start("send", "orders", b"x", tags="t")
    [(name, (signature, payload), kwargs), (_, (second, _), _)] = handle.calls
    assert (name, kwargs, signature.user) == ("signed_send", {}, "alice")
    args, keywords = pickle.loads(payload)
    assert (tuple(args), keywords) == (("orders", b"x"), {"tags": "t"})
    check(ALICE.key, signature, "broker-a", "send", payload, time.time_ns() // 1_000_000)
    assert signature.nonce != second.nonce
    assert ALICE.key not in payload


@pytest.mark.parametrize("times", [1, 2])
def test_a_call_that_was_signed_before_the_server_began_is_signed_anew_within_its_time(
    handle: Handle, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    def resolve(reference: int, what: str, timeout_s: float) -> str:
        if reference <= times:
            raise SignedTooEarlyError(what)
        return "answer"

    monkeypatch.setattr(actor_ref, "resolve", resolve)
    with identity.acting_as(ALICE):
        assert ActorRef("broker-a").call("groups") == "answer"
        assert len(handle.calls) == times + 1
        handle.calls.clear()
        with pytest.raises(SignedTooEarlyError):
            ActorRef("broker-a").call("groups", timeout_s=0.0)
