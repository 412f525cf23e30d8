"""Tests of a broker's metrics for a known broker state. The broker calls the store only twice, for any number of topics
and groups."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from actors.broker import broker_metrics
from actors.broker.broker_metrics import BrokerMetrics, Clients
from actors.broker.monitor import TOPIC_CREATION, BacklogWatch, BrokerMonitor
from actors.core.broker.state import BrokerState
from actors.core.broker.stats import GROUP_GET_NUMS, SNDBCK2DLQ_TIMES, SNDBCK_PUT_NUMS
from raymq.common.config.cluster import BrokerOptions
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.clients import ConsumerConnection, ConsumerData, ProducerConnection
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.route import TopicConfig
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.store import QueuePosition
from raymq.telemetry.metrics.reporter import Reporter
from tests.support.metrics.fake_ray import FakeMetrics

NOW_MS = time.time_ns() // 1_000_000
WAITING = RequestFigures("client", 2, 10.0, 8, 900.0, 3, 70.0, 5, 6)


class Store:
    """Fake store in which each queue has the offsets 2 to 9. Each queue's first message was stored a minute ago, and
    each further message 1 ms after the previous message."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.away = False

    def queue_bounds_many(self, topics: Any, timeout_s: float) -> list[list[tuple[int, int]]]:
        if self.away:
            raise ServiceNotAvailableError("the store does not answer")
        self.calls.append("bounds")
        return [[(2, 10)] * queues for _, queues in topics]

    def stored_times(self, positions: Any, timeout_s: float) -> list[int]:
        self.calls.append(sorted(positions))
        return [NOW_MS - 60_000 + offset for _, _, offset in positions]


@pytest.fixture
def ray_metrics(monkeypatch):
    fake = FakeMetrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", fake.module())
    return fake


class Log:
    """Fake state log of a broker. It has no broker state until the test's `World` object provides one."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def is_ready(self) -> bool:
        return self._world.ready

    @property
    def position(self) -> int:
        return self._world.position

    def ready(self) -> BrokerState:
        return self._world.state

    def read(self, ask: Any) -> Any:
        return ask(self._world.state)


class World:
    """A broker's state, store and client connections, which a test sets, and the broker's metrics that result from
    them."""

    def __init__(self) -> None:
        self.state, self.store = BrokerState(), Store()
        self.ready = True
        self.position = 0
        self.clients = Clients([], [])
        for topic, queues in {"orders": 4, "%RETRY%g": 1, "%DLQ%g": 1, "rmq_sys_x": 1}.items():
            self.state.topics[topic] = TopicConfig(topic, queues, queues)
        for group in ("g", "idle"):
            self.state.groups[group] = GroupConfig(group)
        log: Any = Log(self)
        store: Any = self.store
        self.monitor = BrokerMonitor(log, lambda: store, BrokerOptions(), print)
        self.direct: tuple[dict[str, int], int, int] = ({}, 0, 0)
        self.backlogs = BacklogWatch("broker-a", log, lambda: store, print)
        self.metrics = BrokerMetrics(
            *(log, self.monitor, lambda: store, lambda: self.clients, "1.2.3", lambda: [WAITING], self.backlogs),
            lambda: self.direct,
        )
        self.reporter = Reporter("c", "broker-a")

    def commit(self, topic: str, offsets: dict[int, int], group: str = "g") -> None:
        self.position += 1
        self.state.offsets.set(group, topic, offsets, {})


@pytest.fixture
def world():
    return World()


def test_lag_is_reported_for_some_groups_without_lag_and_for_groups_that_caught_up(world, ray_metrics, monkeypatch):
    monkeypatch.setattr(broker_metrics, "KEPT_UP_MAX", 1)
    for number in range(3):
        world.state.topics[f"t{number}"] = TopicConfig(f"t{number}", 1, 1)
        world.commit(f"t{number}", {0: 10})
    world.commit("orders", {0: 10})

    def reported() -> dict[str, float]:
        ray_metrics.values.clear()
        world.metrics.report_lags(world.reporter)
        topics = ("orders", "t0", "t1", "t2")
        found = {topic: ray_metrics.series("raymq_consumer_lag_messages", topic=topic) for topic in topics}
        return {topic: value for topic, series in found.items() for value in series}

    assert reported() == {"orders": 24, "t0": 0}
    world.commit("orders", dict.fromkeys(range(4), 10))
    assert reported() == {"orders": 0, "t0": 0}
    assert reported() == {"t0": 0}


def test_lag_in_messages_and_in_time(world, ray_metrics):
    world.commit("orders", {0: 10, 1: 7, 2: 0})
    world.commit("%RETRY%g", {0: 10})
    world.metrics.report_lags(world.reporter)
    lag = {"consumer_group": "g", "is_system": "false"}
    orders = {**lag, "topic": "orders", "is_retry": "false"}
    assert ray_metrics.value("raymq_consumer_lag_messages", **orders) == 0 + 3 + 8 + 8
    age_ms = ray_metrics.value("raymq_consumer_lag_latency_milliseconds", **orders)
    assert 59_998 <= age_ms <= 60_000 + time.time_ns() // 1_000_000 - NOW_MS
    retries = {**lag, "topic": "%RETRY%g", "is_retry": "true"}
    assert ray_metrics.value("raymq_consumer_lag_messages", **retries) == 0
    assert not ray_metrics.series("raymq_consumer_lag_latency_milliseconds", **retries)
    world.commit("orders", dict.fromkeys(range(4), 10))
    world.metrics.report_lags(world.reporter)
    assert ray_metrics.value("raymq_consumer_lag_latency_milliseconds", **orders) == 0
    assert not ray_metrics.series("raymq_consumer_lag_messages", topic="%DLQ%g")


def test_a_report_is_one_call_and_times_are_asked_for_once(world):
    world.commit("orders", {0: 10, 1: 7, 2: 10, 3: 10})
    for _ in range(2):
        world.metrics.report_lags(world.reporter)
    world.commit("orders", {1: 8})
    world.metrics.report_lags(world.reporter)
    first, second = [QueuePosition("orders", 1, offset) for offset in (7, 8)]
    assert world.store.calls == ["bounds", [first], "bounds", "bounds", [second]]


def test_replayed_dead_letters_do_not_count(world, ray_metrics):
    world.metrics.report_lags(world.reporter)
    assert ray_metrics.value("raymq_dead_letters", consumer_group="g") == 8
    world.commit("%DLQ%g", {0: 7})
    world.metrics.report_lags(world.reporter)
    assert ray_metrics.value("raymq_dead_letters", consumer_group="g") == 3
    assert not ray_metrics.series("raymq_dead_letters", consumer_group="idle")


def test_numbers_and_counters(world, ray_metrics):
    for kind, count in {GROUP_GET_NUMS: 400, SNDBCK_PUT_NUMS: 3, SNDBCK2DLQ_TIMES: 1}.items():
        world.monitor.count(kind, "orders@g", count)
    for _ in range(2):
        world.metrics.report(world.reporter)
    assert ray_metrics.value("raymq_topic_number") == 1
    assert ray_metrics.value("raymq_consumer_group_number") == 2
    assert ray_metrics.value("raymq_broker_permission") == 6
    of = {"topic": "orders", "consumer_group": "g"}
    assert ray_metrics.value("raymq_messages_out", is_retry="false", **of) == 400
    assert ray_metrics.value("raymq_send_back_messages", **of) == 3
    assert ray_metrics.value("raymq_send_to_dlq_messages", **of) == 1


def test_clients(world, ray_metrics):
    consumers = [ConsumerConnection(f"c{n}", "h", n, ConsumerData("g", "PUSH"), 0.0) for n in range(3)]
    world.clients = Clients([ProducerConnection("p", "h", 1, "pg", 0.0)], consumers)
    world.metrics.report(world.reporter)
    assert ray_metrics.value("raymq_producer_connections", language="PYTHON", version="1.2.3") == 1
    assert ray_metrics.value("raymq_consumer_connections", consumer_group="g", consume_mode="push") == 3


def test_versions_of_other_libraries_are_no_labels(world, ray_metrics):
    datas = [ConsumerData("g", "POP", language="JAVA", version=f"5.0.{n}") for n in range(3)]
    world.clients = Clients([], [ConsumerConnection("c", "h", 1, data, 0.0) for data in datas])
    world.metrics.report(world.reporter)
    labels = {"consumer_group": "g", "language": "JAVA", "version": "other"}
    assert ray_metrics.value("raymq_consumer_connections", **labels) == 3


def test_creations_are_timed(world, ray_metrics):
    with world.monitor.creations.measure(TOPIC_CREATION):
        pass
    with pytest.raises(InvalidArgumentError), world.monitor.creations.measure(TOPIC_CREATION):
        raise InvalidArgumentError("no queues")
    world.metrics.report(world.reporter)
    for status in ("success", "failure"):
        assert ray_metrics.value(f"{TOPIC_CREATION}_count", invocation_status=status) == 1


def test_requests_that_are_not_stored_are_reported_after_the_first_of_them(world, ray_metrics):
    world.reporter.report(world.metrics.report, world.metrics.report_lags)
    assert not ray_metrics.series("raymq_direct_requests_open")
    world.direct = ({"replied": 7, "no_listener": 1}, 2, 3)
    world.reporter.report(world.metrics.report, world.metrics.report_lags)
    assert ray_metrics.value("raymq_direct_requests", result="replied") == 7
    assert ray_metrics.value("raymq_direct_requests", result="no_listener") == 1
    assert ray_metrics.value("raymq_direct_requests_open") == 2
    assert ray_metrics.value("raymq_direct_request_threads") == 3


def test_before_the_state_is_read_only_the_lane_has_figures(world, ray_metrics):
    world.ready = False
    world.reporter.report(world.metrics.report, world.metrics.report_lags)
    assert ray_metrics.value("raymq_processor_watermark", processor="client") == 2
    assert ray_metrics.value("raymq_requests_refused", processor="client", reason="late") == 6
    assert not ray_metrics.series("raymq_topic_number")


def test_a_broker_without_its_store_reports_metrics_that_need_no_store(world, ray_metrics):
    world.commit("orders", {0: 3})
    world.store.away = True
    world.reporter.report(world.metrics.report, world.metrics.report_lags)
    assert ray_metrics.value("raymq_topic_number") == 1
    assert not ray_metrics.series("raymq_consumer_lag_messages")
