"""Tests of the remote calls of a process that acts as a user. Each call uses the signed variant of the method. The
signature is valid for one actor, one method and one call."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from raymq.common import identity
from raymq.common.errors import AuthenticationError, RaymqError, SignedTooEarlyError
from raymq.common.identity import Identity
from raymq.remoting import actor_ref
from raymq.remoting.access.signatures import SKEW_MS, check
from raymq.remoting.access.stand_in import ActorOwner, OwnerAuthentication
from raymq.remoting.actor_ref import ActorRef

ALICE = Identity("alice", b"a" * 32)


class Handle:
    """Fake actor handle that records its calls."""

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
    monkeypatch.setattr(actor_ref, "_clocks", {})
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
    check(ALICE.key, signature, "broker-a", "send", payload)
    assert signature.nonce != second.nonce
    assert ALICE.key not in payload


@pytest.mark.parametrize("times", [1, 2])
def test_a_call_signed_before_the_servers_start_is_signed_again(
    handle: Handle, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    def resolve(reference: int, what: str, timeout_s: float) -> str:
        if reference <= times:
            # This fake does what the real `resolve` does: it stores the id and the clock of the actor's process, which
            # the error contains. The caller signs its next attempt with them.
            actor_ref._learn(SignedTooEarlyError(what, "broker-a", b"l" * 16, 5_000))
            raise SignedTooEarlyError(what)
        return "answer"

    monkeypatch.setattr(actor_ref, "resolve", resolve)
    with identity.acting_as(ALICE):
        assert ActorRef("broker-a").call("groups") == "answer"
        assert len(handle.calls) == times + 1
        handle.calls.clear()
        with pytest.raises(SignedTooEarlyError):
            ActorRef("broker-a").call("groups", timeout_s=0.0)


class Process:
    """Fake process of the actor broker-a, which authenticates its callers. It wraps errors in a RayTaskError, as Ray
    does."""

    def __init__(self) -> None:
        self.authenticated = OwnerAuthentication(ActorOwner("broker-a", ALICE))
        self.taken: list[tuple[Any, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(signature: Any, payload: bytes) -> Any:
            try:
                answer = self.authenticated.authenticate_call(
                    name.removeprefix(identity.SIGNED), signature, payload, lambda: "answer"
                )
            except RaymqError as error:
                return RayTaskError("signed_groups", "traceback", pickle.loads(pickle.dumps(error)))
            self.taken.append((signature, payload))
            return answer

        return SimpleNamespace(remote=remote)


class Cluster:
    """Fake cluster with a single actor, and one wall clock for all its machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process, self.calls, self.offset_s = Process(), 0, 0.0
        real_s, real_ns = time.time, time.time_ns
        monkeypatch.setattr(actor_ref, "_clocks", {})
        monkeypatch.setattr(ActorRef, "handle", lambda _: self.process)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(time, "time", lambda: real_s() + self.offset_s)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(self.offset_s * 1e9))

    def get(self, answer: Any, timeout: float) -> Any:
        self.calls += 1
        if isinstance(answer, RayTaskError):
            raise answer
        return answer

    def call(self) -> int:
        """Call the actor as user ALICE. Returns the number of attempts that this call needed."""
        before = self.calls
        with identity.acting_as(ALICE):
            assert ActorRef("broker-a").call("groups") == "answer"
        return self.calls - before


@pytest.mark.parametrize("step_s", [-3600.0, -61.0, 61.0, 3600.0])
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_a_wall_clock_that_is_set_stops_no_signed_call(
    monkeypatch: pytest.MonkeyPatch, step_s: float, restarted: bool
) -> None:
    cluster = Cluster(monkeypatch)
    assert [cluster.call(), cluster.call()] == [2, 1]
    cluster.offset_s = step_s
    if restarted:
        cluster.process = Process()
    assert [cluster.call(), cluster.call()] == ([2, 1] if restarted else [1, 1])


def test_a_signed_call_is_accepted_once_despite_clock_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.call()
    [heard] = cluster.process.taken
    for process, error in ((cluster.process, AuthenticationError), (Process(), SignedTooEarlyError)):
        for cluster.offset_s in (0.0, -3600.0, 3600.0):
            answer = process.signed_groups.remote(*heard)
            assert isinstance(answer, RayTaskError)
            assert type(answer.cause) is error
            assert process.taken == ([heard] if process is cluster.process else [])


def test_a_clock_that_drifted_is_learnt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.call()
    [(life, ahead_ms)] = actor_ref._clocks.values()
    actor_ref._clocks["broker-a"] = life, ahead_ms - 2 * SKEW_MS
    assert [cluster.call(), cluster.call()] == [2, 1]


def test_the_memory_of_actors_clocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_ref, "CLOCKS_MAX", 3)
    monkeypatch.setattr(actor_ref, "_clocks", {})
    for number in range(10):
        actor_ref._learn(SignedTooEarlyError("", f"listener-{number}", b"l" * 16, 5))
        assert f"listener-{number}" in actor_ref._clocks
        assert len(actor_ref._clocks) <= 3


def test_a_call_without_an_awaited_answer_is_signed_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    made = cluster.process.__getattr__

    class Answer(Future[Any]):
        def future(self) -> Future[Any]:
            return self

    def started(name: str) -> Any:
        def remote(*args: Any) -> Answer:
            answer, result = Answer(), made(name).remote(*args)
            if isinstance(result, RayTaskError):
                answer.set_exception(result)
            else:
                answer.set_result(result)
            return answer

        return SimpleNamespace(remote=remote)

    handle = SimpleNamespace(signed_look_for_master=started("signed_look_for_master"))
    monkeypatch.setattr(ActorRef, "handle", lambda _: handle)
    with identity.acting_as(ALICE):
        ActorRef("broker-a").tell("look_for_master")
    assert len(cluster.process.taken) == 1
