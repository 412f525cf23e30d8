"""Tests of a Replicator that waits for the master to send a chunk of the log."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from actors.core.replica.orders import Following
from actors.replica import replicator_actor as module
from actors.replica.replicator_actor import Replicator
from raymq.common.errors import RequestTimeoutError
from raymq.common.names import StorageName

CHUNK = object()
FOLLOWING = Following(0, 7, "store", 100, learner=False)


class Slave:
    """Fake slave that reports which master it follows."""

    def __init__(self, *answers: Following | None) -> None:
        self.answers = list(answers)

    def call(self, method: str, wait_s: float, *, timeout_s: float) -> Following | None:
        assert (method, wait_s) == ("following", 0.0)
        return self.answers.pop(0)


def replicator_of(monkeypatch: pytest.MonkeyPatch, slave: Slave, *, late: int) -> Replicator:
    """Return a slave's Replicator whose loop does not run. Its wait for a chunk times out `late` times before the chunk
    arrives.

    Only these waits advance the test's clock.
    """
    made: Any = object.__new__(Replicator)
    made._name, made._slave, made._stopping = StorageName("broker-a", 1), slave, threading.Event()
    waits = iter([False] * late + [True])
    now_s = 0.0

    def wait(references: list[object], *, timeout: float, fetch_local: bool) -> tuple[list[object], list[object]]:
        nonlocal now_s
        now_s += timeout
        return (references, []) if next(waits) else ([], references)

    monkeypatch.setattr(module.ray, "wait", wait)
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    replicator: Replicator = made
    return replicator


def test_a_chunk_that_comes_in_time_costs_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replicator_of(monkeypatch, Slave(), late=0)._await_answer(CHUNK, FOLLOWING, 2.5)


def test_a_chunk_that_is_late_is_waited_for_while_the_slave_follows_the_same_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slave = Slave(FOLLOWING, FOLLOWING)
    assert replicator_of(monkeypatch, slave, late=2)._await_answer(CHUNK, FOLLOWING, 2.5)
    assert slave.answers == []


@pytest.mark.parametrize(
    "now",
    [None, Following(2, 8, "store", None, learner=False), Following(0, 8, "store", None, learner=False)],
    ids=["nobody", "another", "another epoch"],
)
def test_a_master_that_stands_still_is_left_as_soon_as_the_slave_follows_another(
    monkeypatch: pytest.MonkeyPatch, now: Following | None
) -> None:
    assert not replicator_of(monkeypatch, Slave(FOLLOWING, now), late=99)._await_answer(CHUNK, FOLLOWING, 2.5)


def test_a_master_that_is_still_followed_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestTimeoutError):
        replicator_of(monkeypatch, Slave(*[FOLLOWING] * 99), late=99)._await_answer(CHUNK, FOLLOWING, 2.5)
