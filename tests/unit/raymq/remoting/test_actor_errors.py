"""Tests that a call to an actor raises errors of raymq only. Each error of Ray's own becomes an error of raymq, whose
cause is Ray's error. Ray's functions are replaced; the tests need no cluster."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorHandleNotFoundError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    OwnerDiedError,
    PendingCallsLimitExceeded,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskCancelledError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.annotations import RayDeprecationWarning

from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.identity import Identity
from raymq.remoting.actor_ref import (
    REASON_CHARS_MAX,
    ActorGoneError,
    ActorMethodMissingError,
    ActorNotSetUpError,
    ActorRef,
    HandleRef,
    find_actor,
    resolve,
    running_nameservers,
    was_restarted,
)

PASSING: list[RayError] = [
    RayActorError(),
    ActorUnavailableError("the node is not reachable", None),
    ObjectLostError("00" * 28, b"owner", "call site"),
    OwnerDiedError("00" * 28, b"owner", "call site"),
    LocalRayletDiedError(),
    NodeDiedError("the node died"),
    WorkerCrashedError(),
    RaySystemError("Ray has not been started"),
    TaskCancelledError(),
    TaskUnschedulableError("no such node"),
    OutOfMemoryError("the node has no memory left"),
    OutOfDiskError("the node has no disk left"),
    ObjectStoreFullError("full"),
    PendingCallsLimitExceeded("too many calls"),
]
"""Errors of Ray after which the actor may still exist."""
ALICE = Identity("alice", b"k" * 32)
GONE: list[RayError] = [ActorDiedError(), ActorUnschedulableError("the node of the actor is gone")]
NOT_SET_UP = RuntimeEnvSetupError("pip failed:\n" + "no such package\n" * 100)


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray report that this process is connected."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


def name_of(error: Exception) -> str:
    return type(error).__name__


def raising(monkeypatch: pytest.MonkeyPatch, place: str, error: Exception) -> None:
    """Let each call of the function `ray.<place>` raise this error."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(ray, place, fail)


def handle_of(remote: Any) -> Any:
    return SimpleNamespace(describe=SimpleNamespace(remote=remote))


@pytest.mark.parametrize("error", PASSING, ids=name_of)
def test_an_error_of_ray_is_an_error_of_raymq_that_a_caller_may_retry(
    monkeypatch: pytest.MonkeyPatch, error: RayError
) -> None:
    raising(monkeypatch, "get", error)
    with pytest.raises(ServiceNotAvailableError, match=r"^storage-a-0\.describe failed") as raised:
        resolve(object(), "storage-a-0.describe", 1.0)
    assert raised.value.__cause__ is error
    assert raised.value.retryable
    assert not isinstance(raised.value, ActorGoneError)
    assert len(str(raised.value)) < REASON_CHARS_MAX + 200
    assert "\n" not in str(raised.value)


def test_a_call_after_ray_was_shut_down_starts_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    handle = handle_of(lambda: called.append("describe"))
    monkeypatch.setattr("raymq.remoting.actor_ref.ActorHandle", type(handle))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: handle)
    actor = ActorRef("storage-a-0")
    assert actor.handle() is handle
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: called.append("get_actor"))
    for call in (
        lambda: actor.call("describe"),
        lambda: ActorRef("storage-a-0").call("describe"),
        lambda: find_actor("storage-a-0"),
        running_nameservers,
    ):
        with pytest.raises(ServiceNotAvailableError, match="no longer connected to Ray"):
            call()
    assert called == []


@pytest.mark.parametrize("error", [*GONE, NOT_SET_UP], ids=name_of)
def test_an_actor_that_is_gone_is_looked_up_again(monkeypatch: pytest.MonkeyPatch, error: RayError) -> None:
    looked_up: list[str] = []
    handle = handle_of(lambda: "reference")
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: looked_up.append(name) or handle)
    raising(monkeypatch, "get", error)
    actor = ActorRef("storage-a-0")
    for _ in range(2):
        with pytest.raises(ActorGoneError) as raised:
            actor.call("describe")
        assert raised.value.__cause__ is error
    assert looked_up == ["storage-a-0"] * 2


def test_a_runtime_env_that_cannot_be_set_up_is_named_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, "get", NOT_SET_UP)
    with pytest.raises(ActorNotSetUpError, match=r"runtime_env.*pip failed: no such package") as raised:
        resolve(object(), "a call", 1.0)
    assert not raised.value.retryable
    assert "\n" not in str(raised.value)


def test_timeouts_and_errors_of_the_method_keep_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, "get", GetTimeoutError("late"))
    with pytest.raises(RequestTimeoutError):
        resolve(object(), "a call", 1.0)
    missing = TopicNotExistError("orders")
    raising(monkeypatch, "get", RayTaskError("describe", "traceback", missing))
    with pytest.raises(TopicNotExistError) as raised:
        resolve(object(), "a call", 1.0)
    assert raised.value is missing
    raising(monkeypatch, "get", RayTaskError("describe", "traceback", ObjectLostError("00" * 28, b"", "")))
    with pytest.raises(ServiceNotAvailableError, match="failed in its actor"):
        resolve(object(), "a call", 1.0)


@pytest.mark.parametrize("error", PASSING, ids=name_of)
def test_a_call_that_ray_does_not_start_raises_an_error_of_raymq(error: RayError) -> None:
    def remote() -> Any:
        raise error

    reference = HandleRef("listener", handle_of(remote), None)
    for call in (lambda: reference.start("describe"), lambda: reference.call("describe")):
        with pytest.raises(ServiceNotAvailableError, match=r"^listener\.describe failed") as raised:
            call()
        assert raised.value.__cause__ is error


def test_a_method_that_the_actor_lacks_is_named_and_not_tried_again() -> None:
    for reference in (HandleRef("rebalance-0", object(), None), HandleRef("rebalance-0", object(), ALICE)):
        with pytest.raises(ActorMethodMissingError, match=r"'rebalance-0' has no method '.*conflict'") as raised:
            reference.call("conflict", "g")
        assert not raised.value.retryable


@pytest.mark.parametrize("error", [GetTimeoutError("late"), RaySystemError("no GCS")], ids=name_of)
def test_a_lookup_without_an_answer_of_ray_raises_an_error_of_raymq(
    monkeypatch: pytest.MonkeyPatch, error: RayError
) -> None:
    raising(monkeypatch, "get_actor", error)
    for call in (
        lambda: find_actor("broker-a"),
        running_nameservers,
        lambda: ActorRef("broker-a").call("describe"),
    ):
        with pytest.raises(RaymqError) as raised:
            call()
        assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [ValueError("no actor"), ActorHandleNotFoundError("no actor")], ids=name_of)
def test_an_actor_that_does_not_run_is_not_found(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    raising(monkeypatch, "get_actor", error)
    assert find_actor("broker-a") is None
    assert running_nameservers() == []
    with pytest.raises(ServiceNotAvailableError, match="'broker-a' does not run"):
        ActorRef("broker-a").call("describe")


def test_a_restart_is_read_without_a_warning_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        """A context of Ray whose property warns, as Ray's own does."""

        @property
        def was_current_actor_reconstructed(self) -> bool:
            warnings.warn("This API is deprecated", RayDeprecationWarning, stacklevel=2)
            return True

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert was_restarted()
