"""Tests of a broker's readings (statistics per topic and group). A small, fixed number of store calls suffices for any
number of topics and groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.broker import readings as module
from actors.broker.readings import take_readings
from actors.core.broker.offsets import OffsetTable
from raymq.common.names import dlq_topic, retry_topic
from raymq.common.protocol.stats import Figures, GroupReading, GroupTotals, TopicReading, TopicStats
from raymq.common.protocol.store import QueueBounds, StoreStatistics, TopicPuts


class Store:
    """Fake store in which each queue has the offsets 0 to 9, although its messages are deleted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def control(self, method: str) -> StoreStatistics:
        self.calls.append(method)
        return StoreStatistics({}, {"orders": TopicPuts(40, 4000), "gone": TopicPuts(1, 1)}, ())

    def bounds_of_queues(self, queues: Any) -> list[QueueBounds]:
        self.calls.append("bounds")
        return [QueueBounds(0, 10, 0) for _ in queues]

    def call(self, call: Any) -> Any:
        return call(self, 1.0)

    def stored_times(self, positions: Any, timeout_s: float) -> list[int]:
        self.calls.append(f"times {len(positions)}")
        return [0 for _ in positions]


def stats(topic: str) -> TopicStats:
    return TopicStats(Figures(minute_tps=2.0), Figures(minute_tps=200.0))


def state_of(groups: int) -> Any:
    offsets = OffsetTable()
    topics = {name: SimpleNamespace(read_queue_nums=4, perm=6) for name in ("orders", "idle", "rmq_sys_x", "%RETRY%g0")}
    for number in range(groups):
        offsets.set(f"g{number}", "orders", {0: 10, 1: 4}, {})
    offsets.set("g0", "%RETRY%g0", {0: 1}, {})
    offsets.set("g0", "%LMQ%light", {0: 1}, {})
    configs = {f"g{number}": SimpleNamespace(consume_enable=number != 1) for number in range(groups)}
    return SimpleNamespace(topics=topics, offsets=offsets, groups=configs)


def test_topics_and_groups_are_read_in_few_calls():
    store = Store()
    found = take_readings(state_of(50), store, {("g3", "orders"): 17}, stats)  # type: ignore[arg-type]  # a stand-in
    assert found.topics == {
        "orders": TopicReading(40, 4000, 4, 6, 40, 2.0, 200.0),
        "idle": TopicReading(0, 0, 4, 6, 40, 2.0, 200.0),
    }
    assert len(found.groups) == 50
    # The group's delay is None: its oldest unread message is deleted, so the message's store time is unknown.
    assert found.groups["g3", "orders"] == GroupReading(17, 0 + 6 + 10 + 10, None)
    assert found.left_out == 0
    assert store.calls == ["statistics", "bounds", "times 50"]


@pytest.mark.parametrize(("groups", "left_out", "asked"), [(7, 2, 3), (2, 0, 2)])
def test_too_many_groups_are_left_out_and_counted(monkeypatch, groups, left_out, asked):
    monkeypatch.setattr(module, "PAIRS_MAX", 5)
    monkeypatch.setattr(module, "OLDEST_MAX", 3)
    store = Store()
    found = take_readings(state_of(groups), store, {}, stats)  # type: ignore[arg-type]  # a stand-in
    assert found.left_out == left_out
    assert store.calls[-1] == f"times {asked}"


def test_without_the_pairs_the_totals_are_the_same():
    arguments = state_of(7), Store(), {("g3", "orders"): 17}, stats
    whole, totals = take_readings(*arguments), take_readings(*arguments, with_pairs=False)  # type: ignore[arg-type]  # a stand-in
    assert whole.groups
    assert not totals.groups
    assert (totals.topics, totals.group_totals) == (whole.topics, whole.group_totals)


def test_totals_of_a_group_include_all_topics_and_waiting_retries():
    state = state_of(3)
    state.topics |= {name: SimpleNamespace(read_queue_nums=1, perm=6) for name in (retry_topic("g1"), dlq_topic("g1"))}
    found = take_readings(state, Store(), {("g1", "orders"): 17, ("g1", retry_topic("g1")): 3}, stats)  # type: ignore[arg-type]  # a stand-in
    assert found.group_totals == {
        # group g0 has committed no offsets in its topics, only in its retry topic
        "g0": GroupTotals(0, 26, None, 9 + 10 + 10 + 10, 0, True),
        "g1": GroupTotals(20, 26, None, 10, 10, False),
        "g2": GroupTotals(0, 26, None, 0, 0, True),
    }


def test_readings_have_the_age_of_the_first_unread_message(monkeypatch):
    store = Store()
    store.stored_times = lambda positions, timeout_s: [1_000 for _ in positions]  # type: ignore[method-assign]  # a stand-in
    monkeypatch.setattr(module.time, "time_ns", lambda: 5_000_000_000)
    found = take_readings(state_of(1), store, {}, stats)  # type: ignore[arg-type]  # a stand-in
    assert found.groups["g0", "orders"].behind_ms == 4_000
    assert found.group_totals["g0"].lag_ms == 4_000
