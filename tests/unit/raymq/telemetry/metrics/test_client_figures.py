"""Tests of the metrics of a process's clients. All clients share one set of metrics. It needs no thread of its own: a
thread that already exists for another purpose reports the metrics."""

from __future__ import annotations

import sys
import time

import pytest

from raymq.telemetry.metrics.client_figures import SERIES_MAX, ClientFigures, ClientMetrics, ConsumerFigures
from raymq.telemetry.metrics.instruments import REPORT_INTERVAL_S
from tests.support.metrics.fake_ray import FakeMetrics

UP = {"cluster": "shop", "broker": "", "role": "pull"}
SEND = "raymq_send_cost_time_milliseconds"


class Scene:
    """Client metrics with a clock and a Ray cluster that the test sets."""

    def __init__(self, ray_metrics):
        self.ray, self.now_s, self.worker = ray_metrics, 100.0, "w1"
        self.figures = ClientFigures(worker=lambda: self.worker, clock=lambda: self.now_s)

    def report(self, after_s=REPORT_INTERVAL_S):
        self.now_s += after_s
        self.ray.values = {key: value for key, value in self.ray.values.items() if "throughput" in key[0]}
        self.figures.report_if_due()

    def value(self, name, **tags):
        return self.ray.value(name, **tags)


@pytest.fixture
def scene(monkeypatch):
    fake = FakeMetrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", fake.module())
    scene = Scene(fake)
    scene.figures.told(ClientMetrics("shop"))
    return scene


def test_sends_are_counted_with_their_messages_and_outcome(scene):
    scene.figures.sent("orders", 3.0, 100, ok=True)
    scene.figures.sent("orders", 700.0, 2, ok=False)
    scene.report()
    good, bad = ({"topic": "orders", "invocation_status": status} for status in ("success", "failure"))
    assert scene.value(f"{SEND}_count", cluster="shop", broker="", **good) == 100
    assert scene.value(f"{SEND}_sum", **good) == 300
    assert scene.value(f"{SEND}_bucket", le="1", **good) == 0
    assert scene.value(f"{SEND}_bucket", le="5", **good) == 100
    assert scene.value(f"{SEND}_bucket", le="500", **bad) == 0
    assert scene.value(f"{SEND}_bucket", le="+Inf", **bad) == 2


def test_consumers_count_latency_bytes_waits_and_calls(scene):
    now_ms = time.time_ns() // 1_000_000
    scene.figures.delivered("orders", "g", now_ms - 60_000, 10, 4000)
    # The store's clock is ahead of this process's clock.
    scene.figures.delivered("orders", "g", now_ms + 60_000, 5, 1000)
    scene.figures.awaited("orders", "g", 50.0, 10)
    scene.figures.processed("orders", "g", 0.5, 9, ok=True)
    scene.figures.processed("orders", "g", 20.0, 1, ok=False)
    scene.report()
    labels = {"topic": "orders", "consumer_group": "g"}
    assert scene.value("raymq_throughput_out", **labels) == 5000
    assert scene.value("raymq_delivery_latency_milliseconds_bucket", le="500", **labels) == 5
    assert scene.value("raymq_delivery_latency_milliseconds_count", **labels) == 15
    assert scene.value("raymq_await_time_milliseconds_sum", **labels) == 500
    assert scene.value("raymq_process_time_milliseconds_count", invocation_status="success", **labels) == 9
    assert scene.value("raymq_process_time_milliseconds_bucket", le="10", invocation_status="failure", **labels) == 0
    assert scene.value("raymq_process_time_milliseconds_bucket", le="100", invocation_status="failure", **labels) == 1


def test_gauges_add_up_the_consumers_of_a_group_and_vanish_with_them(scene):
    one, other = object(), object()
    scene.figures.add(one, lambda: [ConsumerFigures("orders", "g", 10, 20, 300, 4, 400)])
    scene.figures.add(other, lambda: [ConsumerFigures("orders", "g", 1, 2, 500, 3, 40)])
    scene.report()
    labels = {"topic": "orders", "consumer_group": "g"}
    assert scene.value("raymq_consumer_inflight_messages", is_retry="false", is_system="false", **labels) == 11
    assert scene.value("raymq_consumer_ready_messages", **labels) == 22
    assert scene.value("raymq_consumer_queueing_latency_milliseconds", **labels) == 500
    assert scene.value("raymq_consumer_cached_messages", **labels) == 7
    assert scene.value("raymq_consumer_cached_bytes", **labels) == 440
    scene.figures.remove(one)
    scene.figures.remove(other)
    scene.figures.remove(other)
    scene.report()
    assert not scene.ray.values


def test_a_retry_topic_is_marked(scene):
    scene.figures.add(scene, lambda: [ConsumerFigures("%RETRY%g", "g", inflight=1)])
    scene.report()
    assert scene.value("raymq_consumer_inflight_messages", topic="%RETRY%g", is_retry="true") == 1


def test_an_idle_consumer_reports_zero_once(scene):
    state = [ConsumerFigures("orders", "g", inflight=1)]
    scene.figures.add(scene, lambda: state)
    scene.report()
    state[0] = ConsumerFigures("orders", "g")
    scene.report()
    assert scene.value("raymq_consumer_inflight_messages") == 0
    scene.report()
    assert not scene.ray.values
    state[0] = ConsumerFigures("orders", "g", ready=1)
    scene.report()
    assert scene.value("raymq_consumer_ready_messages") == 1


def test_a_consumer_that_fails_does_not_take_the_counts_along(scene, caplog):
    scene.figures.sent("orders", 3.0, 1, ok=True)
    scene.figures.add(scene, lambda: 1 / 0)
    scene.report()
    assert scene.value(f"{SEND}_count") == 1
    assert "ZeroDivisionError" in caplog.text


def test_reports_come_every_ten_seconds_whoever_asks(scene):
    scene.figures.sent("orders", 3.0, 1, ok=True)
    scene.report(0.0)  # the first report is immediate, because a broker has just announced that metrics are on
    assert scene.ray.values
    scene.report(REPORT_INTERVAL_S / 2)
    assert not scene.ray.values
    scene.report(REPORT_INTERVAL_S / 2)
    assert scene.ray.values


def test_no_metrics_are_reported_without_ray_or_before_a_broker_answered(scene):
    scene.figures.sent("orders", 3.0, 1, ok=True)
    scene.worker = ""
    scene.report()
    assert not scene.ray.values
    untold = ClientFigures(worker=lambda: "w", clock=lambda: 1e9)
    untold.sent("orders", 3.0, 1, ok=True)
    untold.report_if_due()
    assert not scene.ray.values


def test_nothing_is_counted_once_metrics_are_switched_off(scene):
    scene.figures.told(ClientMetrics("shop", enable=False))
    scene.figures.sent("orders", 3.0, 1, ok=True)
    scene.figures.add(scene, lambda: [ConsumerFigures("orders", "g", inflight=1)])
    scene.report()
    assert not scene.ray.values
    scene.figures.told(ClientMetrics("shop"))
    scene.report()
    assert not scene.ray.series(f"{SEND}_count")


def test_another_ray_cluster_gets_only_its_own_metrics(scene):
    scene.figures.sent("orders", 3.0, 1, ok=True)
    scene.report()
    scene.worker = "w2"
    scene.report()
    assert not scene.ray.values
    scene.figures.sent("orders", 3.0, 5, ok=True)
    scene.report()
    assert scene.value(f"{SEND}_count") == 5


def test_topics_without_number_do_not_fill_the_memory(scene):
    for number in range(SERIES_MAX + 10):
        scene.figures.sent(f"t{number}", 3.0, 1, ok=True)
        scene.figures.delivered(f"t{number}", "g", 0, 1, 10)
    assert len(scene.figures._histograms) <= SERIES_MAX + 2
    assert len(scene.figures._out_bytes) <= SERIES_MAX + 1


def test_an_actor_of_raymq_reports_the_metric_up(scene):
    scene.figures.identify("pull", "pull-1")
    scene.report()
    assert scene.ray.values == {("raymq_up", frozenset({**UP, "name": "pull-1"}.items())): 1}
