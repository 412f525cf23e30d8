"""Tests of the user in whose name a Spark worker calls raymq: the driver's user, as long as the worker runs that user's
tasks."""

from __future__ import annotations

from typing import Any

import pytest

from raydp_jobs import worker_client as module
from raydp_jobs.worker_client import ClusterAddress, worker_client
from raymq.common import identity
from raymq.common.identity import Identity
from tests.support.clients.forks import in_child

ALICE, BOB = Identity("alice", b"a"), Identity("bob", b"b")


class FakeClient:
    """Fake client that uses the process's user, as a real client does."""

    def __init__(self) -> None:
        self.user = identity.present()
        self.is_closed = False
        if self.user is not None:
            identity.take(self.user)

    def close(self) -> None:
        self.is_closed = True
        if self.user is not None:
            identity.give_back(self.user)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[FakeClient] = []
    monkeypatch.setattr(module, "connect", lambda address, namespace: made.append(FakeClient()) or made[-1])
    monkeypatch.setattr(module, "spare_collections", lambda: None)
    monkeypatch.setattr(module, "spare_archives", lambda: None)
    yield made
    for one in module._kept.values():
        one.close()
    module._kept.clear()
    assert identity.present() is None


def test_tasks_of_one_user_share_a_client_and_another_user_ends_it(made: list[FakeClient]) -> None:
    first = worker_client(ClusterAddress("a:1", ALICE))
    assert worker_client(ClusterAddress("a:1", ALICE)) is first
    assert identity.present() == ALICE
    worker_client(ClusterAddress("a:1", BOB))
    assert identity.present() == BOB
    worker_client(ClusterAddress("a:1", None))
    assert identity.present() is None
    assert [(one.user, one.is_closed) for one in made] == [(ALICE, True), (BOB, True), (None, False)]


def test_an_address_prints_no_key() -> None:
    assert "b'a'" not in repr(ClusterAddress("a:1", ALICE))


def test_a_forked_child_makes_a_client_of_its_own(made: list[FakeClient]) -> None:
    """A forked child process makes its own client. Spark's daemon forks its workers, and a user's function may fork a
    worker again."""
    at = ClusterAddress("a:1", None)
    worker_client(at)
    assert in_child(lambda: [worker_client(at) is made[1], made[0].is_closed]) == [True, False]
    assert worker_client(at) is made[0]
