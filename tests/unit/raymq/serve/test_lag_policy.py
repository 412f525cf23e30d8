"""Tests of the policy that scales Ray Serve replicas by a group's lag: how many replicas it requests, and how it
queries the lag."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from raymq.client import client as client_module
from raymq.common.errors import GroupNotExistError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import GroupQueueProgress, GroupSummary
from raymq.serve import RaymqLagPolicy
from tests.support.clients.fakes import WAIT_S, no_thread_starts
from tests.support.history.waiting import eventually


class Cluster:
    """Fake raymq cluster that returns a group's lag, or raises an error."""

    def __init__(self) -> None:
        self.lag, self.retry_lag = 0, 0
        self.failure: Exception | None = None
        self.gate = threading.Event()
        """Each query of the lag waits until a test sets this event."""
        self.gate.set()
        self.asked: list[str] = []
        self.addresses: list[str | None] = []
        self.closed = threading.Event()

    def connect(self, address: str | None, namespace: str | None = None) -> Any:
        self.addresses.append(address)
        return SimpleNamespace(admin=SimpleNamespace(group_summary=self.group_summary), close=self.closed.set)

    def group_summary(self, group: str) -> GroupSummary:
        self.asked.append(group)
        assert self.gate.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        progress = GroupQueueProgress(group, MessageQueue("jobs", "a", 0), 0, 0, self.lag)
        return GroupSummary(group, (progress,), self.lag, 0, self.retry_lag, 0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(client_module, "connect", cluster.connect)
    return cluster


def context(replicas: int, requests: float = 0.0) -> SimpleNamespace:
    config = AutoscalingConfig(target_ongoing_requests=2)
    return SimpleNamespace(current_num_replicas=replicas, total_num_requests=requests, config=config)


def wants(policy: RaymqLagPolicy, replicas: int, *, lag: int, requests: float = 0.0) -> float:
    """Return the number of Serve replicas that the autoscaling policy requests after it has received the lag
    `lag`."""

    def heard() -> bool:
        return policy(context(replicas))[1] == {"lag": lag}

    eventually(heard, f"a lag of {lag}", WAIT_S)
    return policy(context(replicas, requests))[0]


def test_each_task_counts_as_an_ongoing_request(cluster):
    cluster.lag, cluster.retry_lag = 9, 1
    policy = RaymqLagPolicy("jobs", poll_interval_s=0.0)
    assert wants(policy, 1, lag=10) == 5
    assert wants(policy, 3, lag=10, requests=2) == 6
    cluster.lag = cluster.retry_lag = 0
    assert wants(policy, 3, lag=0) == 0
    assert set(cluster.asked) == {"serve-jobs"}


def test_from_nothing_one_replica_is_wanted_if_there_is_work(cluster):
    policy = RaymqLagPolicy("jobs", group="workers", address="head:6379", poll_interval_s=0.0)
    assert policy(context(0)) == (0, {"lag": 0})
    assert policy(context(0, requests=0.5))[0] == 1
    cluster.lag = 100
    assert wants(policy, 0, lag=100) == 1
    assert (set(cluster.asked), cluster.addresses) == ({"workers"}, ["head:6379"])


def test_the_lag_policy_does_not_block_and_sends_one_query_at_a_time(cluster):
    cluster.gate.clear()
    cluster.lag = 4
    policy = RaymqLagPolicy("jobs", poll_interval_s=0.0)
    assert [policy(context(1))[0] for _ in range(5)] == [0] * 5
    eventually(lambda: cluster.asked, "a question", WAIT_S)
    assert len(cluster.asked) == 1
    cluster.gate.set()
    assert wants(policy, 1, lag=4) == 2


def test_the_lag_policy_asks_no_more_often_than_configured(cluster):
    policy = RaymqLagPolicy("jobs", poll_interval_s=3600.0)
    cluster.lag = 4
    assert wants(policy, 1, lag=4) == 2
    cluster.lag = 8
    assert wants(policy, 1, lag=4) == 2
    assert len(cluster.asked) == 1


def test_the_last_lag_is_used_without_an_answer_and_unknown_groups_have_none(cluster):
    policy = RaymqLagPolicy("jobs", poll_interval_s=0.0)
    cluster.lag = 4
    assert wants(policy, 1, lag=4) == 2
    cluster.failure = ServiceNotAvailableError("restarting")
    count = len(cluster.asked)
    eventually(lambda: policy(context(1)) and len(cluster.asked) > count + 1, "more questions", WAIT_S)
    assert wants(policy, 1, lag=4) == 2
    cluster.failure = GroupNotExistError("serve-jobs")
    assert wants(policy, 1, lag=0) == 0


def test_the_connection_closes_with_the_lag_policy(cluster):
    policy = RaymqLagPolicy("jobs", poll_interval_s=3600.0)
    policy(context(1))
    assert policy._asking is not None
    policy._asking.join(WAIT_S)
    assert not cluster.closed.is_set()
    del policy
    gc.collect()
    assert cluster.closed.wait(WAIT_S)


@pytest.mark.parametrize(
    "given", [RaymqLagPolicy, "raymq.serve:RaymqLagPolicy", "raymq.serve.lag_policy:RaymqLagPolicy"]
)
def test_serve_takes_it_by_class_and_by_name(cluster, given):
    cluster.lag = 6
    pickled = AutoscalingPolicy(policy_function=given, policy_kwargs={"queue_name": "jobs", "poll_interval_s": 0.0})
    made = AutoscalingPolicy.from_serialized_policy_def(
        {"policy_function": pickled.policy_function}, pickled.get_serialized_policy_def()
    )
    policy = made.get_policy()(**pickled.policy_kwargs)
    assert type(policy).__name__ == "RaymqLagPolicy"
    assert wants(policy, 1, lag=6) == 3


def test_a_policy_that_is_dropped_at_the_exit_prints_no_error(cluster, capsys):
    policy = RaymqLagPolicy("jobs", poll_interval_s=3600.0)
    policy(context(1))
    assert policy._asking is not None
    policy._asking.join(WAIT_S)
    with no_thread_starts():
        del policy
        gc.collect()
    assert capsys.readouterr().err == ""
