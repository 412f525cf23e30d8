"""Tests of the reporter that converts a process's totals and durations to Prometheus series. The number of labels is
limited."""

import re
import sys

import pytest

from raymq.telemetry.metrics.histogram import Histogram
from raymq.telemetry.metrics.instruments import INSTRUMENTS, InstrumentKind
from raymq.telemetry.metrics.reporter import FORGET_AFTER_REPORTS, Reporter
from tests.support.metrics.fake_ray import FakeMetrics

IN = {"message_type": "normal", "is_system": False}


@pytest.fixture
def ray_metrics(monkeypatch):
    fake = FakeMetrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", fake.module())
    return fake


def _reporter(**options):
    return Reporter("c", "broker-a", "storage-broker-a-0", **options)


def test_the_table_has_prometheus_names_with_their_labels():
    for name, instrument in INSTRUMENTS.items():
        assert re.fullmatch(r"raymq_[a-z0-9_]+", name)
        assert instrument.name == name
        assert instrument.labels[:2] == ("cluster", "broker")
        assert len(set(instrument.labels)) == len(instrument.labels)
        assert instrument.description.endswith(".")
        assert (instrument.kind is InstrumentKind.HISTOGRAM) == bool(instrument.bounds)
        assert list(instrument.bounds) == sorted(set(instrument.bounds))
        assert instrument.unit != "ms" or name.endswith("_milliseconds")
        assert instrument.unit != "s" or name.endswith("_seconds")


def test_a_counter_adds_the_increase_of_a_total(ray_metrics):
    reporter = _reporter()
    for total in (0, 10, 10, 25):
        reporter.count("raymq_messages_in", total, topic="t", **IN)
    assert ray_metrics.value("raymq_messages_in", topic="t", storage="storage-broker-a-0", is_system="false") == 25


def test_a_total_that_decreased_has_restarted(ray_metrics):
    reporter = _reporter()
    for total in (10, 3, 4):
        reporter.count("raymq_messages_in", total, topic="t", **IN)
    assert ray_metrics.value("raymq_messages_in") == 14


def test_a_series_begins_with_its_first_event(ray_metrics):
    _reporter().count("raymq_messages_in", 0, topic="t", **IN)
    assert not ray_metrics.values


def test_a_histogram_is_cumulative_with_an_exact_sum(ray_metrics):
    histogram = Histogram("raymq_put_latency_milliseconds")
    histogram.add(0.5)
    histogram.add(5, times=3)
    histogram.add_many([70, 20_000])
    reporter = _reporter()
    reporter.buckets("raymq_put_latency_milliseconds", histogram.figures())
    assert [ray_metrics.value("raymq_put_latency_milliseconds_bucket", le=le) for le in ("1", "5", "10", "100")] == [
        *(1, 4, 4, 5)
    ]
    assert ray_metrics.value("raymq_put_latency_milliseconds_bucket", le="+Inf") == 6
    assert ray_metrics.value("raymq_put_latency_milliseconds_count") == 6
    assert ray_metrics.value("raymq_put_latency_milliseconds_sum") == 20_085.5


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("raymq_messages_inn", {"topic": "t", **IN}),
        ("raymq_messages_in", {"topic": "t"}),
        ("raymq_messages_in", {"topic": "t", "client_id": "x", **IN}),
        ("raymq_topic_number", {}),
    ],
)
def test_an_unknown_name_or_label_is_refused(ray_metrics, name, labels):
    with pytest.raises((KeyError, ValueError)):
        _reporter().count(name, 1, **labels)
    assert not ray_metrics.values


def test_topics_beyond_the_limit_are_summed(ray_metrics):
    reporter = _reporter(per_topic_max=2)

    def source(reporter):
        for number in range(5):
            reporter.count("raymq_messages_in", 10, topic=f"t{number}", **IN)
            reporter.gauge("raymq_timing_messages", number, topic=f"t{number}")

    for _ in range(2):
        reporter.report(source)
        assert ray_metrics.value("raymq_messages_in", topic="t1") == 10
        assert ray_metrics.value("raymq_messages_in", topic="(other)") == 30
        assert ray_metrics.value("raymq_timing_messages", topic="(other)") == 2 + 3 + 4


def test_an_error_shows_the_largest_time_beyond_the_limit(ray_metrics):
    def source(reporter):
        for number in range(4):
            lag = {"consumer_group": f"g{number}", "topic": "t", "is_retry": False, "is_system": False}
            reporter.gauge("raymq_consumer_lag_latency_milliseconds", number * 10, **lag)

    _reporter(per_group_max=1).report(source)
    assert ray_metrics.value("raymq_consumer_lag_latency_milliseconds", consumer_group="(other)") == 30


def test_a_deleted_topic_makes_room_for_another(ray_metrics):
    reporter = _reporter(per_topic_max=1)
    reporter.report(lambda one: one.gauge("raymq_timing_messages", 1, topic="old"))
    for _ in range(FORGET_AFTER_REPORTS + 2):
        reporter.report(lambda one: one.gauge("raymq_topic_number", 1))
    reporter.report(lambda one: one.gauge("raymq_timing_messages", 1, topic="new"))
    assert ray_metrics.value("raymq_timing_messages", topic="new") == 1


def test_a_source_that_fails_stops_no_other_and_is_logged_once(ray_metrics, caplog):
    def failing(reporter):
        raise OSError("no store")

    reporter = _reporter()
    for _ in range(3):
        reporter.report(failing, lambda one: one.gauge("raymq_topic_number", 7))
    assert ray_metrics.value("raymq_topic_number") == 7
    assert len(caplog.records) == 1


def test_a_failure_of_ray_does_not_reach_the_caller(ray_metrics):
    reporter = _reporter()

    def source(reporter):
        reporter.count("raymq_messages_in", 8, topic="t", **IN)

    ray_metrics.failing = True
    reporter.report(source)
    ray_metrics.failing = False
    reporter.report(source)
    assert ray_metrics.value("raymq_messages_in") == 8


def test_nothing_is_reported_when_metrics_are_off(ray_metrics):
    _reporter(enable=False).report(lambda one: one.gauge("raymq_topic_number", 7))
    assert not ray_metrics.values
