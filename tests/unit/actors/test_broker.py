"""The broker's thread: it looks for the group's next master, whatever else fails in it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from actors import broker as module
from actors.broker import Broker
from raymq.errors import ServiceNotAvailableError

ROUNDS = 5


def broker_that(monkeypatch: pytest.MonkeyPatch, *, is_ready: bool, fails: Exception) -> Any:
    """A broker of which nothing is real but its thread's work. It ends when it has looked for a master ROUNDS times."""
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 0.0)
    broker: Any = object.__new__(Broker)
    broker.looked = broker.beats = 0

    def look() -> None:
        broker.looked += 1
        if broker.looked == ROUNDS:
            broker._stopping.set()

    def beat() -> None:
        broker.beats += 1
        raise fails

    def sample() -> None:
        raise fails

    broker.look_for_master = look
    broker._settings = SimpleNamespace(replicas=3, broker_name="broker-a")
    broker._epoch, broker._stopping = 1, threading.Event()
    broker._log = SimpleNamespace(is_ready=is_ready, snapshot=sample)
    broker._registrar = SimpleNamespace(beat=beat)
    broker._watch = SimpleNamespace(sample=sample, protect=sample, note_deletions=sample)
    return broker


@pytest.mark.parametrize("fails", [ServiceNotAvailableError("broker-a is starting"), ValueError("a bug")])
def test_no_failure_ends_the_search_for_the_next_master(monkeypatch, caplog, fails):
    broker = broker_that(monkeypatch, is_ready=True, fails=fails)
    broker._run()
    assert (broker.looked, broker.beats) == (ROUNDS, ROUNDS)
    assert "beat failed and is tried again later" in caplog.text


def test_nothing_is_told_before_the_masters_state_is_read(monkeypatch):
    broker = broker_that(monkeypatch, is_ready=False, fails=ServiceNotAvailableError("broker-a is starting"))
    broker._run()
    assert (broker.looked, broker.beats) == (ROUNDS, 0)
