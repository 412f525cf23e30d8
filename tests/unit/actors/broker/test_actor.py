"""The broker's threads: each goes on whatever fails in it, and whatever the others wait for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from actors.broker import actor as module
from actors.broker.actor import Broker
from actors.core.replica.orders import GroupLeader
from raymq.errors import ServiceNotAvailableError

ROUNDS = 5


def broker_that(monkeypatch: pytest.MonkeyPatch, *, is_ready: bool, fails: Exception) -> Any:
    """A broker of which nothing is real but its threads' work, all of which fails. It ends after ROUNDS pauses."""
    for pause in ("LOOK_AGAIN_S", "BROKER_HEARTBEAT_INTERVAL_S"):
        monkeypatch.setattr(module, pause, 0.0)
    for interval in ("STATS_INTERVAL_S", "STATE_SNAPSHOT_INTERVAL_S", "PROTECT_INTERVAL_S"):
        monkeypatch.setattr(module, interval, 0.0)
    broker: Any = object.__new__(Broker)
    broker.calls = []

    def task(name: str) -> Any:
        def call() -> None:
            broker.calls.append(name)
            raise fails

        call.__name__ = name
        return call

    class Stopping(threading.Event):
        pauses = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.pauses += 1
            if self.pauses == ROUNDS:
                self.set()
            return self.is_set()

    broker.look_for_master = task("look")
    broker._settings = SimpleNamespace(replicas=3, broker_name="broker-a")
    broker._stopping, broker._epoch = Stopping(), 1
    broker._another_leads = SimpleNamespace(wait=broker._stopping.wait, clear=lambda: None)
    broker._read_master = task("read")
    broker._log = SimpleNamespace(is_ready=is_ready, snapshot=task("snapshot"))
    broker._registrar = SimpleNamespace(beat=task("beat"))
    broker._watch = SimpleNamespace(
        sample=task("sample"), protect=task("protect"), note_deletions=task("note_deletions")
    )
    return broker


@pytest.mark.parametrize("fails", [ServiceNotAvailableError("broker-a is starting"), ValueError("a bug")])
@pytest.mark.parametrize(
    ("thread", "tasks"),
    [
        ("_look", ["look"]),
        ("_follow", ["read"]),
        ("_register", ["beat"]),
        ("_keep", ["sample", "note_deletions", "snapshot", "protect"]),
    ],
)
def test_no_failure_ends_a_thread(monkeypatch, caplog, fails, thread, tasks):
    broker = broker_that(monkeypatch, is_ready=True, fails=fails)
    getattr(broker, thread)()
    assert broker.calls == tasks * ROUNDS
    assert f"{tasks[0]} failed and is tried again later" in caplog.text


def test_nothing_is_told_nor_kept_before_the_masters_state_is_read(monkeypatch):
    broker = broker_that(monkeypatch, is_ready=False, fails=ServiceNotAvailableError("broker-a is starting"))
    for thread in (broker._look, broker._register, broker._keep):
        thread()
        broker._stopping.clear()
        broker._stopping.pauses = 0
    assert broker.calls == ["look"] * ROUNDS


def test_the_next_master_is_found_while_a_change_holds_up_the_move_to_the_one_before(monkeypatch):
    """The change may be on its way to a store that leads no more: it needs to hear of the next one in order to end."""
    leaders = iter([GroupLeader("broker-a", 1, 5, ""), GroupLeader("broker-a", 2, 6, "")])
    answer = SimpleNamespace(call=lambda *args, **kwargs: next(leaders))
    monkeypatch.setattr(module, "ActorRef", lambda name: answer)
    moving, ended = threading.Event(), threading.Event()

    def move(storage: Any, copies: Any) -> None:
        moving.set()
        assert ended.wait(30)

    broker: Any = object.__new__(Broker)
    broker._settings = SimpleNamespace(replicas=3, broker_name="broker-a")
    broker._replicas = [f"storage-broker-a-{replica}" for replica in range(3)]
    broker._storages = SimpleNamespace(get=lambda name: SimpleNamespace(name=name, control=print))
    broker._master_lock, broker._another_leads = threading.Lock(), threading.Event()
    broker._epoch, broker._read_from = 0, (None, 0)
    broker._log = SimpleNamespace(is_ready=True, move=move, load=lambda agree: None)
    broker._registrar = SimpleNamespace(register=lambda: None)
    broker.look_for_master()
    reader = threading.Thread(target=broker._read_master)
    reader.start()
    assert moving.wait(30)
    broker.look_for_master()
    assert (broker._storage_name, broker._epoch) == ("storage-broker-a-2", 6)
    ended.set()
    reader.join(30)
    assert broker._read_from[0].name == "storage-broker-a-1"
    broker._read_master()
    assert broker._read_from[0].name == "storage-broker-a-2"
