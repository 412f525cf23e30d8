"""Tests of the client that all tasks of a process share: it is made once, and closed when no task has used it for some
time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raymq.common import identity
from raymq.common.errors import ClientStateError
from raymq.common.identity import Identity
from raymq.data.shared_client import SharedClient, worker_client
from tests.support.clients.forks import in_child, outcome
from tests.support.history.waiting import eventually


class FakeClient:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Connections:
    """Fake connect function. It makes fake clients and keeps a list of them."""

    def __init__(self) -> None:
        self.made: list[FakeClient] = []

    def __call__(self, namespace: str) -> Any:
        self.made.append(FakeClient())
        return self.made[-1]


def test_the_next_task_uses_the_client_of_the_last_one() -> None:
    connections = Connections()
    shared = SharedClient(connections, idle_s=60.0)
    with shared.use() as first:
        assert first is connections.made[0]
    with shared.use() as second, shared.use() as third:
        assert second is third is first
    assert len(connections.made) == 1
    assert not connections.made[0].closed.is_set()


def test_an_idle_client_is_closed_and_the_next_task_connects_again() -> None:
    connections = Connections()
    shared = SharedClient(connections, idle_s=0.01)
    with shared.use(), shared.use():
        pass
    assert connections.made[0].closed.wait(10.0)
    with shared.use() as again:
        assert again is connections.made[1]


def test_a_client_in_use_is_not_closed() -> None:
    connections = Connections()
    shared = SharedClient(connections, idle_s=0.0)
    with shared.use():
        with shared.use():
            pass  # the outer block still uses the client, so the end of this inner block must not start the idle timer
        assert not connections.made[0].closed.wait(0.1)
    assert connections.made[0].closed.wait(10.0)


def test_a_client_whose_reader_stops_early_is_left_too() -> None:
    connections = Connections()
    shared = SharedClient(connections, idle_s=0.01)

    def read() -> Any:
        with shared.use():
            yield from range(10)

    reader = read()
    next(reader)
    reader.close()
    assert connections.made[0].closed.wait(10.0)


def test_the_idle_timer_does_not_keep_a_worker_alive() -> None:
    before = set(threading.enumerate())
    shared = SharedClient(Connections(), idle_s=60.0)
    with shared.use():
        pass
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)


def test_a_client_that_cannot_be_closed_is_logged_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeClient):
        def close(self) -> None:
            raise RuntimeError("no")

    made: list[Any] = []
    shared = SharedClient(lambda namespace: made.append(Broken()) or made[-1], idle_s=0.01)  # type: ignore[func-returns-value]  # append
    with shared.use():
        pass
    eventually(lambda: "cannot close the raymq client" in caplog.text, "the warning")
    with shared.use() as again:
        assert again is made[1]


ALICE, BOB = Identity("alice", b"a"), Identity("bob", b"b")


def test_a_user_ends_with_its_tasks() -> None:
    seen: list[Identity | None] = []

    def connect(namespace: str) -> Any:
        seen.append(identity.present())
        return connections(namespace)

    connections = Connections()
    shared = SharedClient(connect, idle_s=60.0)
    for user in (ALICE, ALICE, BOB, None):
        with shared.use(user):
            pass
    assert seen == [ALICE, BOB, None]
    assert [one.closed.is_set() for one in connections.made] == [True, True, False]


def test_a_task_of_another_user_does_not_get_a_client_in_use() -> None:
    shared = SharedClient(Connections(), idle_s=60.0)
    with shared.use(ALICE), pytest.raises(ClientStateError, match="another raymq user"), shared.use(BOB):
        pass
    with shared.use(BOB):
        pass


# Tests of the shared client in a forked child process


def test_a_child_connects_again_while_the_parent_uses_the_client() -> None:
    connections = Connections()
    shared = SharedClient(connections, idle_s=60.0)

    def use() -> list[bool]:
        # While ALICE uses the shared client in the parent process, BOB uses it in the forked child
        with shared.use(BOB) as own:
            return [own is connections.made[1], connections.made[0].closed.is_set(), own.closed.is_set()]

    with shared.use(ALICE) as client, shared._lock:
        assert in_child(use) == [True, False, False]
    with shared.use(ALICE) as again:
        assert again is client, "the parent's client has changed"


def test_a_child_that_leaves_a_block_of_its_parent_closes_its_own_client_when_that_is_idle() -> None:
    connections = Connections()
    shared = SharedClient(connections, idle_s=0.01)

    def read() -> Any:
        with shared.use():
            yield from range(10)

    reader = read()
    next(reader)

    def leave_and_use() -> list[bool]:
        reader.close()
        with shared.use():
            pass
        return [connections.made[1].closed.wait(10.0), connections.made[0].closed.is_set()]

    assert in_child(leave_and_use) == [True, False]
    assert not connections.made[0].closed.is_set()
    reader.close()
    assert connections.made[0].closed.wait(10.0)


def test_the_child_of_a_worker_that_is_connected_to_ray_gets_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(core_worker=object())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray._private.worker, "global_worker", worker)

    def use() -> None:
        with worker_client().use():
            pytest.fail("a child uses its parent's connection to Ray")

    assert "ClientStateError" in (text := in_child(lambda: outcome(use)))
    assert "forked from a process that is connected to Ray" in text
