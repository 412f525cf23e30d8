"""Tests of a broker's counters and of its protection against slow consumer groups, on a separate store."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import datetime
from types import SimpleNamespace

import pytest

from actors.broker.monitor import BOUNDS_INTERVAL_S, FULL_INTERVAL_S, BacklogWatch, BrokerMonitor
from actors.core.broker.state import BrokerState
from actors.core.replica.topic_bounds import TopicBounds
from raymq.common.config.cluster import BrokerOptions
from raymq.common.errors import TopicFullError
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.stats import Figures
from storage.retention import cleaner
from tests.support.stores.stores import make_batch, open_store


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store = open_store(tmp_path / "store")
    yield store
    store.close()


def watch_over(store, changed: list[GroupConfig] | None = None, **options):
    state = BrokerState()
    for change in [state.decide_topic("orders", 1, 1), *state.decide_group("slow"), *state.decide_group("quick")]:
        state.apply(change, 0)
    answers = {
        "statistics": store.statistics,
        "deleted_young": store.cleaner.deleted_young,
        "status": lambda: asdict(store.status()),
    }
    storage = SimpleNamespace(
        control=lambda method, timeout_s: answers[method](),
        fetch=lambda requests, max_bytes, wait_s, timeout_s: store.fetch(requests, max_bytes=max_bytes, wait_s=wait_s),
    )
    changed = [] if changed is None else changed
    log = SimpleNamespace(ready=lambda: state)
    return BrokerMonitor(log, lambda: storage, BrokerOptions(**options), changed.append), state


def test_puts_are_counted_by_the_stores_own_counters(store):
    watch, _ = watch_over(store)
    store.append([make_batch([b"a", b"b"]), make_batch([b"x"], topic="internal")])
    watch.sample()
    assert watch.topic_stats("orders").messages.total == 2
    assert watch.topic_stats("orders").bytes.total > 0
    assert watch.topic_stats("internal").messages == Figures()
    watch.forget(topic="orders")
    assert watch.topic_stats("orders").messages == Figures()


def test_fetched_and_returned_messages_of_a_group_are_counted_by_topic(store):
    watch, _ = watch_over(store)
    watch.count("GROUP_GET_NUMS", "orders@slow", 5)
    watch.count("SNDBCK_PUT_NUMS", "bills@slow", 1)
    watch.count("GROUP_GET_NUMS", "orders@quick", 9)
    stats = watch.group_stats("slow")
    assert {topic: (one.messages.total, one.sent_back.total) for topic, one in stats.items()} == {
        "bills": (0, 1),
        "orders": (5, 0),
    }


def fall_behind(store, state) -> None:
    """Set the committed offset of group "slow" to the first of ten messages, and of group "quick" to the end."""
    store.append([make_batch([b"x" * 1000 for _ in range(10)])])
    for group, offset in (("slow", 0), ("quick", 10)):
        state.offsets.set(group, "orders", {0: offset}, {})


def test_a_group_over_the_lag_threshold_is_disabled_if_configured(store):
    changed: list[GroupConfig] = []
    watch, state = watch_over(
        store, changed, disable_consume_if_consumer_read_slowly=True, consumer_fallbehind_threshold_bytes=10_000
    )
    fall_behind(store, state)
    watch.protect()
    assert changed == [GroupConfig("slow", consume_enable=False)]


@pytest.mark.parametrize("options", [{}, {"consumer_fallbehind_threshold_bytes": 10_000},
                                     {"disable_consume_if_consumer_read_slowly": True}])  # fmt: skip
def test_otherwise_no_group_is_touched(store, options):
    changed: list[GroupConfig] = []
    watch, state = watch_over(store, changed, **options)
    fall_behind(store, state)
    watch.protect()
    assert changed == []


def test_message_at_returns_the_message_at_an_offset_or_none(store):
    watch, _ = watch_over(store)
    store.append([make_batch([b"a", b"b"])])
    assert watch.message_at("orders", 0, 1).body == b"b"
    assert watch.message_at("orders", 0, 2) is None
    assert watch.message_at("orders", 7, 0) is None


def test_groups_that_lost_unread_messages_to_a_full_disk_are_reported(tmp_path, no_flushes, monkeypatch, caplog):
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.87)
    store = open_store(tmp_path / "store", clean_file_forcibly_enable=True)
    watch, state = watch_over(store)
    store.append([make_batch([b"x" * 1000 for _ in range(300)])])
    state.offsets.set("slow", "orders", {0: 10}, {})
    state.offsets.set("quick", "orders", {0: 290}, {})
    watch.note_deletions()
    assert watch.unread() == []
    assert store.cleaner.run_once(datetime.now()) > 0
    first = store.queues.bounds("orders", 0).min_offset
    assert 10 < first < 290
    # Commit the first existing offset for group `slow`, as its consumer does after it finds that retention deleted
    # messages.
    state.offsets.set("slow", "orders", {0: first}, {})
    for _ in range(2):
        watch.note_deletions()
        assert watch.unread() == [{"group": "slow", "topic": "orders", "messages": first - 10}]
    assert caplog.text.count(f"group slow has lost messages 10 to {first - 1} of queue orders:0") == 1
    watch.forget(group="slow")
    assert watch.unread() == []
    store.close()


def test_no_lost_messages_are_reported_without_early_deletions(store):
    watch, state = watch_over(store)
    fall_behind(store, state)
    watch.note_deletions()
    assert (store.cleaner.deleted_young(), watch.unread()) == (None, [])


class BoundedStore:
    """A store with the bounds of a storage actor, and a broker's state with a bounded topic."""

    def __init__(self, store, **attributes: str) -> None:
        self.store, self.state = store, BrokerState()
        changes = [self.state.decide_topic("orders", 2, 2, "", attributes), *self.state.decide_group("slow")]
        for change in changes:
            self.state.apply(change, 0)
        self.bounds = TopicBounds(lambda: ["orders"], lambda batch: False)
        self.calls = 0
        storage = SimpleNamespace(control=self.control)
        log = SimpleNamespace(ready=lambda: self.state)
        self.watch = BacklogWatch("broker-a", log, lambda: storage, self.change)

    def control(self, method, bounds, timeout_s):
        assert method == "limit_topics"
        self.calls += 1
        counters = self.bounds.counters(0)
        backlogs = self.store.queues.backlogs(bounds)
        return self.bounds.change(bounds, backlogs, counters, 0, time.monotonic())

    def change(self, decide):
        change = decide(self.state)
        if change is not None:
            self.state.apply(change, 0)

    def send(self, *bodies: bytes, queue_id: int = 0) -> bool:
        batch = make_batch(bodies, queue_id=queue_id, producer=("p", 0, 0))
        batch.producer = None
        try:
            self.bounds.append([batch], 0, time.monotonic(), lambda: self.store.append([batch]))
        except TopicFullError:
            return False
        return True

    def commit(self, queue_id: int, offset: int) -> None:
        self.state.apply({"kind": "offsets", "group": "slow", "topic": "orders", "offsets": {str(queue_id): offset}}, 0)


LIMITED = {"backlog.max.messages": "6", "backlog.groups": "slow"}


def test_a_bounded_topic_is_full_until_its_group_commits(store):
    bounded = BoundedStore(store, **LIMITED)
    bounded.watch.measure_backlogs()
    [(_, backlog)] = bounded.watch.backlogs()
    assert (backlog.group, backlog.messages) == ("slow", 0), "the error names the group also if it had consumed all"
    assert bounded.send(*[b"x"] * 4)
    assert bounded.send(*[b"x"] * 2, queue_id=1)
    assert not bounded.send(b"x")
    bounded.watch.measure_backlogs()
    assert bounded.watch.interval_s == FULL_INTERVAL_S
    bounded.commit(0, 3)
    bounded.watch.measure_backlogs()
    assert bounded.send(*[b"x"] * 3)
    bounded.watch.measure_backlogs()
    assert bounded.watch.interval_s == BOUNDS_INTERVAL_S
    [(_, backlog)] = bounded.watch.backlogs()
    assert (backlog.group, backlog.messages) == ("slow", 6)


def test_a_topic_that_refuses_is_measured_often(store):
    bounded = BoundedStore(store, **LIMITED, **{"backlog.policy": "refuse"})
    bounded.watch.measure_backlogs()
    assert bounded.send(*[b"x"] * 6)
    assert not bounded.send(b"x")
    bounded.watch.measure_backlogs()
    assert bounded.watch.interval_s == FULL_INTERVAL_S
    bounded.watch.measure_backlogs()
    assert bounded.watch.interval_s == BOUNDS_INTERVAL_S


def test_a_limit_in_bytes_counts_the_records_that_a_group_has_not_committed(store):
    bounded = BoundedStore(store, **{"backlog.max.bytes": "4096"})
    bounded.watch.measure_backlogs()
    while bounded.send(b"x" * 900):
        pass
    bounded.watch.measure_backlogs()
    [(_, backlog)] = bounded.watch.backlogs()
    assert 3000 < backlog.bytes <= 4096
    assert backlog.group == ""


def test_a_full_topic_with_the_policy_drop_moves_the_group_and_deletes_nothing(store):
    bounded = BoundedStore(store, **LIMITED, **{"backlog.policy": "drop"})
    bounded.watch.measure_backlogs()
    assert bounded.send(*[b"x"] * 20)
    bounded.watch.measure_backlogs()
    assert bounded.state.offsets.committed("slow", "orders") == {0: 15}
    assert bounded.watch.skipped() == {("slow", "orders"): 15}
    assert store.queues.bounds("orders", 0).min_offset == 0
    bounded.watch.measure_backlogs()
    assert bounded.watch.skipped() == {("slow", "orders"): 15}
    bounded.watch.forget(topic="orders")
    assert bounded.watch.skipped() == {}


def test_a_broker_without_bounded_topics_tells_its_store_only_now_and_then(store):
    bounded = BoundedStore(store)
    for _ in range(3):
        bounded.watch.measure_backlogs()
    assert bounded.calls == 1
    assert bounded.send(*[b"x"] * 100), "the store's file named a topic whose limit was removed"
