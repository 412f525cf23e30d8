"""Tests of how the process with a listener keeps its push-consumer instance running. The Listener makes the Pull actor
of a node host the instance. If the Pull actor does not run, the Listener asks a broker to start it."""

from __future__ import annotations

import pytest

from raymq.client.consumer.push import hosting as module
from raymq.client.consumer.push.hosting import HostAnswer, Hosted, Hosting, Instance
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import ServiceNotAvailableError
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

NODE = "3f9a2c" + 50 * "0"
PULL = "pull-3f9a2c0000000000"
SETTINGS = PushSettings("billing", (Subscription.parse("orders"),))
INSTANCE = Instance("pull-billing-0", "key", ("broker-a", "broker-b"))


class Cluster:
    """Fake cluster with a Pull actor, which runs only if `runs` is True, and with brokers that start the Pull
    actor."""

    def __init__(self) -> None:
        self.runs = False
        self.brokers_up = {"broker-b"}
        self.hosted: list[Hosting] = []
        self.answer = HostAnswer(True)
        self.failures: list[Exception] = []

    def ref(self, name: str) -> Ref:
        return Ref(self, name)


class Ref:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def handle(self):
        if not self.cluster.runs:
            raise ServiceNotAvailableError("there is no such actor")

    def call(self, method, argument, *, timeout_s):
        cluster = self.cluster
        if method == "start_pull":
            assert argument == NODE
            if self.name not in cluster.brokers_up:
                raise ServiceNotAvailableError(f"{self.name} is down")
            cluster.runs = True
            return PULL
        assert (method, self.name) == ("host", PULL)
        self.handle()
        if cluster.failures:
            raise cluster.failures.pop()
        cluster.hosted.append(argument)
        return cluster.answer


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(module, "ActorRef", cluster.ref)
    monkeypatch.setattr(module, "HOST_INTERVAL_S", 0.005)
    monkeypatch.setattr(module, "RETRY_S", 0.005)
    yield cluster
    cluster.runs, cluster.answer = True, HostAnswer(False)


@pytest.fixture
def kept() -> list[object]:
    return []


@pytest.fixture
def hosted(cluster, kept) -> Hosted:
    def make_call(life: str) -> Hosting:
        return Hosting(INSTANCE, SETTINGS, "handle", life, "", kept[-1] if kept else None)

    return Hosted(INSTANCE, NODE, make_call, kept.append)


def test_the_pull_actor_of_the_node_is_started_by_a_broker_that_answers(cluster, hosted):
    hosted.start()
    assert hosted.where(WAIT_S) == PULL
    assert cluster.hosted[0].instance == INSTANCE


def test_hosting_calls_repeat_with_the_same_process_id(cluster, hosted):
    hosted.start()
    hosted.start()
    eventually(lambda: len(cluster.hosted) > 3, "calls", WAIT_S)
    assert len({call.life for call in cluster.hosted}) == 1


def test_a_pull_actor_that_is_gone_is_started_again(cluster, hosted):
    hosted.start()
    hosted.where(WAIT_S)
    cluster.runs = False
    eventually(lambda: cluster.runs, "another", WAIT_S)
    count = len(cluster.hosted)
    eventually(lambda: len(cluster.hosted) > count, "its calls", WAIT_S)


def test_while_no_pull_actor_answers_it_is_nowhere(cluster, hosted):
    cluster.brokers_up = set()
    hosted.start()
    assert hosted.where(0.05) == ""
    cluster.brokers_up = {"broker-a"}
    assert hosted.where(WAIT_S) == PULL


def test_a_call_that_fails_is_made_again(cluster, hosted):
    cluster.runs = True
    cluster.failures = [ServiceNotAvailableError("restarting")] * 3
    hosted.start()
    assert hosted.where(WAIT_S) == PULL


def test_the_state_of_the_pull_actor_is_kept_and_sent_again(cluster, hosted, kept):
    cluster.answer = HostAnswer(True, keep=(True, frozenset()))
    hosted.start()
    eventually(lambda: any(call.kept == (True, frozenset()) for call in cluster.hosted), "the state", WAIT_S)


def test_an_instance_that_was_stopped_calls_no_more(cluster, hosted):
    cluster.runs, cluster.answer = True, HostAnswer(False)
    hosted.start()
    assert hosted._thread is not None
    hosted._thread.join(WAIT_S)
    assert len(cluster.hosted) == 1
