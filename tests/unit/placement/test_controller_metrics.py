"""Tests of the metrics that the Controller reports about its broker groups, and of its estimate of their clocks."""

import itertools
import random
import sys

import pytest

from placement.controller_metrics import READINGS_MAX, ControllerMetrics, SkewEstimate
from placement.election import Record
from raymq.telemetry.metrics.reporter import Reporter
from storage.replication.epochs import SyncStateSet
from tests.support.metrics.fake_ray import FakeMetrics

START_MS = 1_700_000_000_000


@pytest.fixture
def ray_metrics(monkeypatch):
    fake = FakeMetrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", fake.module())
    return fake


def _record(epoch, master):
    return Record("broker-a", epoch, master, SyncStateSet(epoch, 0, {0: "a", 1: "b"}))


def _status(master=0, reason=""):
    replicas = [
        {"replica": 0, "role": "MASTER", "lag_bytes": 0, "lag_s": 0.0},
        {"replica": 1, "role": "SLAVE", "lag_bytes": 4096, "lag_s": 1.5, "clock_skew_s": -600.25},
        {"replica": 2, "role": "SILENT", "lag_bytes": None, "lag_s": None, "clock_skew_s": 9.0},
    ]
    group = {"broker": "broker-a", "master": master, "epoch": 7, "in_sync": [0, 1], "reason": reason}
    return {"groups": [{**group, "replicas": replicas, "learners": []}]}


def test_the_controller_reports_metrics_of_a_broker_group(ray_metrics):
    ControllerMetrics().report(Reporter("c"), _status)
    broker = {"cluster": "c", "broker": "broker-a"}
    assert ray_metrics.value("raymq_broker_has_master", **broker) == 1
    assert ray_metrics.value("raymq_broker_epoch", **broker) == 7
    assert ray_metrics.value("raymq_replicas", **broker) == 3
    assert ray_metrics.value("raymq_in_sync_replicas", **broker) == 2
    slave = {"storage": "storage-broker-a-1", "role": "slave"}
    assert ray_metrics.value("raymq_replica_lag_bytes", **slave) == 4096
    assert ray_metrics.value("raymq_replica_lag_milliseconds", **slave) == 1500
    assert not ray_metrics.series("raymq_replica_lag_bytes", storage="storage-broker-a-2")
    assert ray_metrics.value("raymq_clock_skew_seconds", storage="storage-broker-a-1") == -600.25
    assert not ray_metrics.series("raymq_clock_skew_seconds", storage="storage-broker-a-0")
    assert not ray_metrics.series("raymq_clock_skew_seconds", storage="storage-broker-a-2")
    assert ray_metrics.value("raymq_active_broker_num") == 1


def test_learners_are_never_in_sync_and_are_not_missed(ray_metrics):
    status = _status()
    status["groups"][0]["learners"] = [2]
    ControllerMetrics().report(Reporter("c"), lambda: status)
    assert ray_metrics.value("raymq_replicas") == ray_metrics.value("raymq_in_sync_replicas") == 2


@pytest.mark.parametrize("status", [_status(master=None), _status(reason="no replica is in sync")])
def test_a_group_that_nobody_leads(ray_metrics, status):
    ControllerMetrics().report(Reporter("c"), lambda: status)
    assert ray_metrics.value("raymq_broker_has_master") == 0
    assert ray_metrics.value("raymq_active_broker_num") == 0


def test_only_a_new_epoch_counts_as_an_election(ray_metrics):
    metrics, reporter = ControllerMetrics(), Reporter("c")
    decisions = [None, _record(1, 0), _record(1, 0), _record(2, 1), _record(3, None)]
    for before, after in itertools.pairwise(decisions):
        metrics.note(before, after)
    for _ in range(2):
        metrics.report(reporter, _status)
    assert ray_metrics.value("raymq_election", election_result="new_master_elected", broker="broker-a") == 2
    assert ray_metrics.value("raymq_election", election_result="no_master_elected") == 1


def test_without_an_answer_the_difference_is_unknown():
    assert SkewEstimate().best() is None


@pytest.mark.parametrize("ahead_ms", [-86_400_000, -600_000, 0, 600_000, 86_400_000])
def test_the_estimate_is_right_within_its_error_and_follows_steps(ahead_ms):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice, estimate, now_ms = random.Random(seed), SkewEstimate(), START_MS
    for wrong_ms in (0, ahead_ms, 0):
        for _ in range(2 * READINGS_MAX):
            asked_ms = now_ms
            read_ms = asked_ms + dice.choice((0, 1, 20, 3000))
            now_ms = read_ms + dice.choice((0, 1, 20, 3000))
            estimate.note(read_ms + wrong_ms, asked_ms, now_ms)
            skew = estimate.best()
            assert skew is not None
            assert abs(skew.skew_s * 1000 - wrong_ms) <= skew.error_s * 1000 + 1


def test_a_slow_answer_does_not_replace_a_quick_one():
    estimate = SkewEstimate()
    estimate.note(START_MS + 5, START_MS, START_MS + 10)
    for _ in range(READINGS_MAX - 1):
        estimate.note(START_MS + 4000, START_MS, START_MS + 5000)
    assert estimate.best() == (0.0, 0.005)


def test_a_reading_is_ignored_if_the_controllers_clock_was_set_back_during_the_call():
    estimate = SkewEstimate()
    estimate.note(START_MS, START_MS + 10, START_MS)
    assert estimate.best() is None
