"""A member finds its Rebalance actor, opens a session, and goes on when the actor or its node is gone."""

from __future__ import annotations

import pytest

from actors.core.rebalance.group import RebalanceGroup, Sender
from raymq.consumer import rebalance_client as module
from raymq.consumer.rebalance_client import INTRODUCTIONS_MAX, RebalanceClient, offsets_reset
from raymq.errors import RequestTimeoutError, ServiceNotAvailableError
from raymq.message import MessageQueue
from raymq.protocol.membership import GroupAssignment, GroupHeartbeat
from raymq.remoting.actor_ref import ActorGoneError

QUEUE = MessageQueue("orders", "broker-a", 0)


def new_core() -> RebalanceGroup:
    core = RebalanceGroup(0.0, session_timeout_s=15.0, grace=False, first_version=1000)
    core.set_queues("orders", [QUEUE])
    return core


class Cluster:
    """Its actors by name, and its NameServers. `core` is the Rebalance actor's; None when none runs."""

    def __init__(self) -> None:
        self.core: RebalanceGroup | None = None
        self.broker_names = ["broker-a", "broker-b"]
        self.brokers_up = {"broker-a", "broker-b"}
        self.calls: list[str] = []
        self.timeouts_s: list[float] = []
        self.failures: list[Exception] = []

    def brokers(self):
        if not self.broker_names:
            raise ServiceNotAvailableError("no NameServer answers")
        return dict.fromkeys(self.broker_names)

    def ref(self, name: str) -> Ref:
        return Ref(self, name)


class Ref:
    """Stands for ActorRef."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def handle(self):
        if self.name == "rebalance-g" and self.cluster.core is None:
            raise ServiceNotAvailableError("there is no such actor")

    def drop_handle(self) -> None:
        pass

    def call(self, method, *args, timeout_s):
        cluster = self.cluster
        cluster.timeouts_s.append(timeout_s)
        cluster.calls.append(f"{self.name}.{method}")
        if cluster.failures:
            raise cluster.failures.pop(0)
        if method == "open_group":
            if self.name not in cluster.brokers_up:
                raise ServiceNotAvailableError(f"{self.name} is down")
            cluster.core = new_core()
            return None
        if cluster.core is None:
            raise ActorGoneError("dead")
        return cluster.core.heartbeat(args[0], 1.0) if method == "heartbeat" else cluster.core.offsets_reset()


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(module, "ActorRef", cluster.ref)
    return cluster


def beat(client: RebalanceClient, *holding: MessageQueue, leaving: bool = False) -> GroupAssignment:
    return client.heartbeat(GroupHeartbeat("m", frozenset({"orders"}), frozenset(holding), leaving))


def test_the_first_heartbeat_starts_the_actor_and_introduces_the_member(cluster):
    assert beat(RebalanceClient("g", cluster)).queues == {QUEUE}
    assert cluster.calls == ["broker-a.open_group", "rebalance-g.heartbeat", "rebalance-g.heartbeat"]


def test_an_actor_that_may_just_have_been_started_is_given_longer(cluster):
    client = RebalanceClient("g", cluster)
    beat(client)
    beat(client, QUEUE)
    assert cluster.timeouts_s == [
        module.REBALANCE_CALL_TIMEOUT_S,
        module.REBALANCE_FIRST_TIMEOUT_S,
        *[module.REBALANCE_CALL_TIMEOUT_S] * 2,
    ]


def test_an_actor_that_runs_is_not_asked_for_at_a_broker(cluster):
    cluster.core = new_core()
    beat(RebalanceClient("g", cluster))
    assert cluster.calls == ["rebalance-g.heartbeat", "rebalance-g.heartbeat"]


def test_later_heartbeats_are_one_call_each(cluster):
    client = RebalanceClient("g", cluster)
    beat(client)
    cluster.calls.clear()
    beat(client, QUEUE)
    assert cluster.calls == ["rebalance-g.heartbeat"]


def test_a_broker_that_is_down_is_passed_over(cluster):
    cluster.brokers_up = {"broker-b"}
    assert beat(RebalanceClient("g", cluster)).queues == {QUEUE}


def test_a_dead_actor_is_started_again_also_while_no_name_server_answers(cluster):
    client = RebalanceClient("g", cluster)
    beat(client)
    cluster.core, cluster.broker_names = None, []
    with pytest.raises(ActorGoneError):
        beat(client, QUEUE)
    beat(client, QUEUE)
    assert cluster.core.holders() == {QUEUE: "m"}


def test_a_client_that_never_saw_a_broker_says_why_it_cannot_start_the_actor(cluster):
    cluster.broker_names = []
    with pytest.raises(ServiceNotAvailableError, match="no NameServer answers"):
        beat(RebalanceClient("g", cluster))


def test_a_new_actor_hears_of_the_generation_of_the_one_before(cluster):
    client = RebalanceClient("g", cluster)
    beat(client)
    cluster.core = RebalanceGroup(0.0, session_timeout_s=15.0, grace=False, first_version=10)
    assert beat(client, QUEUE).generation > 1000


def test_a_farewell_is_not_followed_by_an_introduction(cluster):
    cluster.core = new_core()
    beat(RebalanceClient("g", cluster), leaving=True)
    assert cluster.calls == ["rebalance-g.heartbeat"]
    assert cluster.core.members == ()


def test_a_member_may_leave_and_come_back(cluster):
    client = RebalanceClient("g", cluster)
    beat(client)
    beat(client, leaving=True)
    assert cluster.core.members == ()
    assert beat(client).queues == {QUEUE}


def test_an_actor_that_names_ever_new_sessions_is_given_up(cluster, monkeypatch):
    cluster.core = new_core()
    monkeypatch.setattr(cluster.core, "_sender", lambda heartbeat: Sender.STRANGER)
    with pytest.raises(ServiceNotAvailableError, match="does not take up a member"):
        beat(RebalanceClient("g", cluster))
    assert len(cluster.calls) == INTRODUCTIONS_MAX


def test_a_reset_is_told_to_the_actor_that_runs(cluster):
    cluster.core = new_core()
    offsets_reset("g")
    assert cluster.core.offsets_version == 1001


def test_a_group_without_an_actor_needs_no_telling(cluster):
    offsets_reset("g")
    assert cluster.calls == []


def test_a_reset_is_told_again_when_the_answer_is_lost(cluster):
    cluster.core = new_core()
    cluster.failures = [RequestTimeoutError("offsets_reset", 1.0)]
    offsets_reset("g")
    assert cluster.core.offsets_version == 1001


def test_an_actor_that_does_not_answer_is_an_error(cluster):
    cluster.core = new_core()
    cluster.failures = [RequestTimeoutError("offsets_reset", 1.0)] * 9
    with pytest.raises(RequestTimeoutError):
        offsets_reset("g", timeout_s=0.05)
