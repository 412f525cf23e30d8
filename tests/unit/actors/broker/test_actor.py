"""Tests of the broker's remote methods and threads: a thread continues if its task fails, and also if another thread
blocks."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from actors.actor_class import actor_class
from actors.broker import actor as module, master_store
from actors.broker.actor import Broker
from actors.broker.live.methods import SettingsMethods
from actors.broker.master_store import MasterStore
from actors.core.replica.orders import GroupLeader
from raymq.common.config.cluster import BrokerSettings, ReplicationOptions
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.identity import SIGNED
from raymq.common.protocol.route import NewTopic

ROUNDS = 5
THREE = ReplicationOptions(replicas=3)
STORES = frozenset({"store-1"})
REMOTE_METHODS = {
    *(
        "create_topic",
        "create_topics",
        "update_topic",
        "auto_create_topic",
        "delete_topic",
        "topic_config",
        "topic_stats",
    ),
    *("ensure_group", "group_config", "check_broadcast", "update_group", "update_groups", "delete_group", "groups"),
    *("forbid_topic", "forbidden_topics", "delete_offsets"),
    *("answer_question", "ask_client"),
    *(
        "reset_offsets",
        "committed_offsets",
        "start_offset",
        "start_offsets",
        "group_topics",
        "group_progress",
    ),
    *(
        "send_back",
        "replay",
        "group_stats",
        "readings",
        "topic_offsets",
        "start_rebalance",
        "start_pull",
        "send",
        "pull",
    ),
    "start_receiving",
    *("take_transaction_checks", "take_group_checks", "leave_transaction_checks"),
    *("heartbeat", "unregister_client", "knows_client", "producer_connections", "consumer_connections"),
    *("config", "set_config", "unset_config"),
    *("users", "change_access", "auth_state"),
    *("describe", "status", "look_for_master", "close"),
}
"""Names of the broker's methods that clients, other actors and placement call."""


def test_the_actor_has_the_methods_that_others_call_and_no_more():
    made = actor_class(Broker)
    assert {name for name in vars(made) if not name.startswith(("_", SIGNED))} == REMOTE_METHODS


def broker_that(monkeypatch: pytest.MonkeyPatch, *, is_ready: bool, fails: Exception) -> Any:
    """Return a broker with real threads. Each task of the broker raises the error `fails`. The broker's threads end
    after ROUNDS pauses."""
    for pause in ("NOT_READY_INTERVAL_S", "BROKER_HEARTBEAT_INTERVAL_S"):
        monkeypatch.setattr(module, pause, 0.0)
    for interval in ("STATS_INTERVAL_S", "STATE_SNAPSHOT_INTERVAL_S", "PROTECT_INTERVAL_S"):
        monkeypatch.setattr(module, interval, 0.0)
    monkeypatch.setattr(module, "SETTINGS_INTERVAL_S", 0.0)
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
    options = SimpleNamespace(transaction_check_interval_ms=0, offset_sweep_interval_ms=0)
    broker._settings = SimpleNamespace(replication=THREE, broker_name="broker-a", options=options)
    broker._check_transactions = task("check_transactions")
    broker._keep_settings = task("keep_settings")
    broker._sweep_offsets = task("sweep_offsets")
    broker._stopping, broker._store = Stopping(), SimpleNamespace(epoch=1)
    broker._another_leads = SimpleNamespace(wait=broker._stopping.wait, clear=lambda: None)
    broker._read_master = task("read")
    broker._log = SimpleNamespace(is_ready=is_ready, snapshot=task("snapshot"))
    broker._registrar = SimpleNamespace(beat=task("beat"))
    broker._backlogs = SimpleNamespace(measure_backlogs=task("measure"), interval_s=0.0)
    broker._monitor = SimpleNamespace(
        sample=task("sample"), protect=task("protect"), note_deletions=task("note_deletions")
    )
    return broker


@pytest.mark.parametrize("fails", [ServiceNotAvailableError("broker-a is starting"), ValueError("a bug")])
@pytest.mark.parametrize(
    ("thread", "tasks"),
    [
        ("_follow_masters", ["look"]),
        ("_read_masters", ["read"]),
        ("_stay_registered", ["beat"]),
        ("_do_housekeeping", ["sample", "note_deletions", "snapshot", "protect", "keep_settings", "sweep_offsets"]),
        ("_do_checks", ["check_transactions"]),
        ("_limit_topics", ["measure"]),
    ],
)
def test_no_failure_ends_a_thread(monkeypatch, caplog, fails, thread, tasks):
    broker = broker_that(monkeypatch, is_ready=True, fails=fails)
    getattr(broker, thread)()
    assert broker.calls == tasks * ROUNDS
    assert f"{tasks[0]} failed, retrying later" in caplog.text


def test_a_bound_is_in_every_replicas_snapshot_and_in_force_before_the_change_returns(monkeypatch):
    broker = broker_that(monkeypatch, is_ready=True, fails=ServiceNotAvailableError("the store is starting"))
    broker._monitor.creations = SimpleNamespace(measure=lambda name: nullcontext())
    broker._change = lambda decide: broker.calls.append("change")
    bounded = {"backlog.max.messages": "10"}
    broker.create_topics([NewTopic("orders", 1, "", {}), NewTopic("frames", 1, "", bounded)])
    broker.create_topic("frames", 1, 1, "", bounded)
    broker.update_topic("frames", attributes={"backlog.max.messages": ""})
    assert broker.calls == ["change", "snapshot", "measure"] * 3
    broker.calls.clear()
    broker.create_topics([NewTopic("orders", 1, "", {})])
    broker.update_topic("orders", attributes={"message.type": "FIFO"})
    assert broker.calls == ["change", "change"]


def test_before_the_masters_state_is_read_nothing_is_registered_and_no_housekeeping_done(monkeypatch):
    broker = broker_that(monkeypatch, is_ready=False, fails=ServiceNotAvailableError("broker-a is starting"))
    threads = (broker._follow_masters, broker._stay_registered, broker._do_housekeeping, broker._do_checks)
    for thread in (*threads, broker._limit_topics):
        thread()
        broker._stopping.clear()
        broker._stopping.pauses = 0
    assert broker.calls == ["look"] * ROUNDS


def test_a_slow_move_to_a_master_does_not_block_the_search_for_the_next(monkeypatch):
    """A broker finds the next master even while it still moves its state log to the previous master. In this test, the
    move ends only after the next master is found."""
    led = ((1, 5), (2, 6))
    leaders = iter([GroupLeader("broker-a", master, epoch, "", (0, 1, 2), STORES) for master, epoch in led])
    answer = SimpleNamespace(call=lambda *args, **kwargs: next(leaders))
    monkeypatch.setattr(master_store, "ActorRef", lambda name: answer)
    moving, ended = threading.Event(), threading.Event()

    def move(storage: Any, copies: Any) -> None:
        moving.set()
        assert ended.wait(30)

    broker: Any = object.__new__(Broker)
    broker._settings = SimpleNamespace(replication=THREE, broker_name="broker-a")
    storages: Any = SimpleNamespace(get=lambda name: SimpleNamespace(name=name, control=print))
    broker._store = MasterStore("broker-a", range(3), storages)
    broker._another_leads, broker._read_from = threading.Event(), (None, 0)
    broker._copied = broker._store.replicas, broker._store.stores
    copied = []
    broker._log = SimpleNamespace(is_ready=True, move=move, load=lambda agree: None, change_copies=copied.append)
    broker._registrar = SimpleNamespace(register=lambda: None)
    broker.look_for_master()
    reader = threading.Thread(target=broker._read_master)
    reader.start()
    assert moving.wait(30)
    broker.look_for_master()
    assert (broker._store.storage.name, broker._store.epoch) == ("storage-broker-a-2", 6)
    assert len(copied) == 1, "the snapshot is written anew only when the replicas or their directories change"
    ended.set()
    reader.join(30)
    assert broker._read_from[0].name == "storage-broker-a-1"
    broker._read_master()
    assert broker._read_from[0].name == "storage-broker-a-2"


def test_the_settings_have_the_numbers_of_replicas_that_the_controller_has(monkeypatch):
    name = "replication.min_in_sync_replicas"
    answers: list[Any] = [{}, {"min_in_sync_replicas": 2}, ServiceNotAvailableError("the Controller restarts")]

    def leader(*args: Any, **kwargs: Any) -> GroupLeader:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return GroupLeader("broker-a", 0, 0, "", (0, 1, 2), STORES, answer)

    monkeypatch.setattr(master_store, "ActorRef", lambda name: SimpleNamespace(call=leader))
    broker: Any = object.__new__(Broker)
    storages: Any = SimpleNamespace(get=lambda name: SimpleNamespace(name=name))
    broker._settings = BrokerSettings("c", "broker-a", (), replicas=(0, 1, 2), replication=THREE)
    broker._store = MasterStore("broker-a", range(3), storages)
    SettingsMethods.__init__(broker, broker._settings, broker._store, storages)
    broker._copied = None
    state = SimpleNamespace(settings={})
    broker._log = SimpleNamespace(is_ready=True, ready=lambda: state, change_copies=lambda copies: None)
    for least, ordered in ((1, {}), (2, {name: 2}), (2, {name: 2})):
        found = broker.config()
        assert (found.effective[name], found.started[name], found.ordered) == (least, 1, ordered)
    assert broker._differing(broker._ordered()) == {name: 2}
