"""Tests of RebalanceClient. Members find their Rebalance actor, open a session, continue after the session is lost, and
share one call with other members."""

from __future__ import annotations

import threading
import time

import pytest

from actors.core.rebalance.group import HeartbeatSender, RebalanceGroup
from actors.core.rebalance.server import RebalanceServer, TopicQueues
from actors.core.rebalance.slot_lease import Get, Put
from raymq.client.consumer import rebalance_client as module
from raymq.client.consumer.rebalance_client import RebalanceClient, call_holder, check_expressions, offsets_reset
from raymq.common.errors import RequestTimeoutError, ServiceNotAvailableError, SubscriptionConflictError
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import (
    GroupAssignment,
    GroupHeartbeat,
    Heartbeat,
    OtherServer,
    SteadyHeartbeat,
    slot_of,
)
from raymq.remoting.actor_ref import ActorGoneError, ActorMethodMissingError
from tests.support.clients.fakes import AT_SHUTDOWN, WAIT_S
from tests.support.history.waiting import eventually

QUEUE = MessageQueue("orders", "broker-a", 0)
NAMES = ["rebalance-0", "rebalance-1"]
HOME = NAMES[slot_of("g") % 2]
OTHER = NAMES[1 - slot_of("g") % 2]


class Cluster:
    """Simulated Rebalance actors by name, which share one register, and simulated brokers."""

    def __init__(self) -> None:
        self.register: dict[str, str] = {}
        self.servers: dict[str, RebalanceServer] = {}
        self.broker_names = ["broker-a", "broker-b"]
        self.brokers_up = {"broker-a", "broker-b"}
        self.calls: list[str] = []
        self.batches: list[list[str]] = []
        self.heard: list[Heartbeat] = []
        self.failures: list[Exception] = []
        self.answers: list[object] = []
        self.hangs: set[str] = set()
        self.lock = threading.Lock()

    def start(self, *names: str) -> None:
        for name in names or NAMES:
            index = NAMES.index(name)
            server = RebalanceServer(index, 2, f"{name}-{time.monotonic_ns()}", session_timeout_s=15.0)
            server.set_queues("orders", TopicQueues((QUEUE,)))
            self.servers[name] = server
            self.look(name)

    def look(self, name: str) -> None:
        for lease in self.servers[name].leases.values():
            look, answer = lease.look(time.monotonic, time.time_ns), None
            try:
                while True:
                    answer = self._carry_out(look.send(answer))
            except StopIteration:
                pass

    def _carry_out(self, call):
        if isinstance(call, Get):
            return self.register.get(call.key)
        assert isinstance(call, Put)
        if not call.overwrite and call.key in self.register:
            return False
        self.register[call.key] = call.value
        return True

    def brokers(self):
        if not self.broker_names:
            raise ServiceNotAvailableError("no NameServer answers")
        return dict.fromkeys(self.broker_names)

    def ref(self, name: str) -> Ref:
        return Ref(self, name)

    def holder(self) -> RebalanceServer:
        return next(server for server in self.servers.values() if server.other_server("g", time.monotonic()) is None)


class Ref:
    """Fake ActorRef, which calls a simulated actor."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def handle(self):
        if self.name not in self.cluster.servers:
            raise ServiceNotAvailableError("there is no such actor")

    def call(self, method, *args, timeout_s):
        cluster = self.cluster
        with cluster.lock:
            cluster.calls.append(f"{self.name}.{method}")
            if cluster.failures:
                raise cluster.failures.pop(0)
        if self.name in cluster.hangs:
            raise RequestTimeoutError(f"{self.name}.{method}", timeout_s)
        if method == "start_rebalance":
            if self.name not in cluster.brokers_up:
                raise ServiceNotAvailableError(f"{self.name} is down")
            cluster.start()
            return NAMES
        if self.name not in cluster.servers:
            raise ActorGoneError("dead")
        server, now_s = cluster.servers[self.name], time.monotonic()
        if method == "heartbeats":
            cluster.batches.append([group for group, _ in args[0]])
            cluster.heard += [heartbeat for _, heartbeat in args[0]]
            return [cluster.answers.pop(0) if cluster.answers else server.heartbeat(*one, now_s) for one in args[0]]
        return getattr(server, method)(*args, now_s)


class Source:
    """Fake group member that holds its assigned queues."""

    def __init__(self, name: str = "m") -> None:
        self.name = name
        self.held: frozenset[MessageQueue] = frozenset()
        self.assignments: list[GroupAssignment] = []
        self.errors: list[Exception] = []
        self.refusals: list[SubscriptionConflictError] = []
        self.expressions: dict[str, str] = {}
        self.silent = False

    def next_heartbeat(self):
        return (
            None
            if self.silent
            else GroupHeartbeat(self.name, frozenset({"orders"}), self.held, expressions=self.expressions)
        )

    def assigned(self, assignment, sent_s) -> None:
        self.held = assignment.queues
        self.assignments.append(assignment)

    def unanswered(self, error) -> None:
        self.errors.append(error)

    def refused(self, error) -> None:
        self.refusals.append(error)

    @property
    def farewell(self) -> GroupHeartbeat:
        return GroupHeartbeat(self.name, frozenset(), frozenset(), leaving=True)

    def holds(self, *queues: MessageQueue) -> None:
        eventually(lambda: self.held == set(queues), f"{queues} at {self.name}, not {self.held}", WAIT_S)

    def hears_more(self) -> None:
        count = len(self.assignments)
        eventually(lambda: len(self.assignments) > count, "another answer", WAIT_S)


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(module, "ActorRef", cluster.ref)
    monkeypatch.setattr(module, "MEMBER_HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    return cluster


@pytest.fixture
def client(cluster):
    client = RebalanceClient(cluster)
    yield client
    client.close()


def test_the_first_heartbeat_starts_the_actors_and_introduces_the_member(cluster, client):
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)
    assert cluster.calls[:3] == ["broker-a.start_rebalance", f"{HOME}.heartbeats", f"{HOME}.heartbeats"]


def test_actors_that_run_are_not_asked_for_at_a_broker(cluster, client):
    cluster.start()
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)
    assert set(cluster.calls) == {f"{HOME}.heartbeats"}


def test_a_broker_that_is_down_is_passed_over(cluster, client):
    cluster.brokers_up = {"broker-b"}
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)


def test_members_of_all_groups_of_an_actor_share_one_call(cluster, client):
    cluster.start()
    groups = [name for name in map(str, range(40)) if NAMES[slot_of(name) % 2] == HOME]
    sources = [Source() for _ in groups]
    for group, source in zip(groups, sources, strict=True):
        client.join(group, source)
    eventually(lambda: any(sorted(batch) == sorted(groups) for batch in cluster.batches), "one call for all", WAIT_S)
    for source in sources:
        source.holds(QUEUE)


def test_a_member_without_a_heartbeat_is_left_out(cluster, client):
    cluster.start()
    quiet, other = Source("quiet"), Source("other")
    quiet.silent = True
    client.join("g", quiet)
    client.join("g", other)
    other.holds(QUEUE)
    assert quiet.assignments == []


def test_a_member_whose_code_fails_costs_the_others_nothing(cluster, client):
    cluster.start()
    bad, good = Source("bad"), Source("good")
    bad.assigned = lambda assignment, sent_s: 1 / 0
    client.join("g", bad)
    client.join("g", good)
    eventually(lambda: good.assignments, "an answer", WAIT_S)
    good.hears_more()


def test_a_hanging_actor_is_replaced_by_the_actor_that_holds_the_group(cluster, client):
    cluster.start()
    cluster.hangs = {HOME}
    source = Source()
    client.join("g", source)
    eventually(lambda: f"{OTHER}.heartbeats" in cluster.calls, "the question to the other", WAIT_S)
    assert source.assignments == []
    cluster.hangs = set()
    source.holds(QUEUE)
    assert cluster.holder().name == HOME


def test_a_group_that_was_taken_over_is_found_at_its_new_actor(cluster, client):
    cluster.start()
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)
    cluster.hangs = {HOME}
    lease = cluster.servers[OTHER].leases[slot_of("g")]
    cluster.look(OTHER)
    lease._seen_since_s -= 60.0
    cluster.look(OTHER)
    assert lease.held
    eventually(lambda: f"{OTHER}.heartbeats" in cluster.calls, "the new one", WAIT_S)
    source.hears_more()
    # The member reports that it still holds the queue, so the new Rebalance actor need not wait until old grants
    # expire.
    source.holds(QUEUE)
    assert source.assignments[-1].generation > source.assignments[0].generation


def test_an_assignment_older_than_one_seen_is_not_followed(cluster, client):
    cluster.start()
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)
    newest = source.assignments[-1]
    cluster.answers = [GroupAssignment(newest.generation - 1, frozenset(), 1, 0, newest.session)]
    source.hears_more()
    eventually(lambda: not cluster.answers, "the old answer", WAIT_S)
    source.hears_more()
    assert all(assignment.queues == {QUEUE} for assignment in source.assignments)


def test_a_dead_actor_is_started_again_also_while_no_name_server_answers(cluster, client):
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)
    cluster.broker_names = []
    cluster.servers.clear()
    cluster.register.clear()
    eventually(lambda: cluster.servers, "actors", WAIT_S)
    source.hears_more()
    source.holds(QUEUE)


def test_a_client_without_brokers_reports_why_no_actor_can_start(cluster, client, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.0)
    cluster.broker_names = []
    source = Source()
    client.join("g", source)
    eventually(lambda: source.errors, "the reason", WAIT_S)
    assert "no NameServer answers" in str(source.errors[0])


def test_a_member_may_leave_and_come_back(cluster, client):
    cluster.start()
    source = Source()
    membership = client.join("g", source)
    source.holds(QUEUE)
    membership.leave(source.farewell)
    assert cluster.holder().describe_group("g", time.monotonic())["members"] == []
    again = Source()
    client.join("g", again)
    again.holds(QUEUE)


def test_leaving_ends_though_no_actor_answers(cluster, client):
    cluster.start()
    source = Source()
    membership = client.join("g", source)
    source.holds(QUEUE)
    cluster.hangs = set(NAMES)
    membership.leave(source.farewell, timeout_s=0.1)
    before = len(source.assignments)
    cluster.hangs = set()
    other = Source("other")
    client.join("g", other)
    other.hears_more()
    assert len(source.assignments) == before


def test_an_actor_that_names_ever_new_sessions_is_not_called_without_a_pause(cluster, client, monkeypatch):
    cluster.start()
    monkeypatch.setattr(RebalanceGroup, "_sender", lambda self, heartbeat: HeartbeatSender.STRANGER)
    monkeypatch.setattr(module, "AGAIN_S", 3600.0)
    source = Source()
    client.join("g", source)
    eventually(lambda: len(cluster.calls) == module.TURNS_MAX, "the turns", WAIT_S)
    other = Source()
    client.join("g", other)
    eventually(lambda: len(cluster.calls) == 2 * module.TURNS_MAX, "the other's turns, and no more", WAIT_S)
    assert source.assignments == []


def steady(cluster: Cluster) -> bool:
    """Return whether the last three heartbeats were short heartbeats. Members send short heartbeats while nothing
    changes."""
    return len(cluster.heard) > 3 and all(isinstance(one, SteadyHeartbeat) for one in cluster.heard[-3:])


def test_an_unchanged_member_sends_short_heartbeats_and_keeps_its_lease(cluster, client):
    cluster.start()
    source = Source()
    client.join("g", source)
    eventually(lambda: steady(cluster), "short heartbeats", WAIT_S)
    source.hears_more()
    assert source.assignments[-1].queues == {QUEUE}
    member = cluster.holder().describe_group("g", time.monotonic())["members"][0]
    assert member["last_heartbeat_age_s"] < WAIT_S


def test_news_end_the_short_heartbeats_on_both_sides(cluster, client):
    cluster.start()
    source = Source("m1")
    client.join("g", source)
    eventually(lambda: steady(cluster), "short heartbeats", WAIT_S)
    joined = Source("m0")
    client.join("g", joined)
    joined.holds(QUEUE)  # the joined member's name sorts first, so it is assigned the only queue
    assert source.held == frozenset()
    eventually(lambda: steady(cluster), "short heartbeats of both", WAIT_S)
    offsets_reset("g")
    for one in (source, joined):
        before = one.assignments[0].offsets_version
        eventually(lambda one=one, before=before: one.assignments[-1].offsets_version == before + 1, "it", WAIT_S)


def test_a_restarted_actor_receives_a_full_heartbeat(cluster, client):
    cluster.start()
    source = Source()
    client.join("g", source)
    eventually(lambda: steady(cluster), "short heartbeats", WAIT_S)
    first = source.assignments[-1].generation
    cluster.start()
    eventually(lambda: source.assignments[-1].generation > first, "an answer of the next process", WAIT_S)
    source.holds(QUEUE)
    eventually(lambda: steady(cluster), "short heartbeats again", WAIT_S)


def test_after_a_failed_call_the_next_heartbeat_is_full(cluster, client):
    cluster.start()
    source = Source()
    client.join("g", source)
    eventually(lambda: steady(cluster), "short heartbeats", WAIT_S)
    said = len(cluster.heard)
    cluster.failures = [RequestTimeoutError("rebalance.heartbeats", 3.0)]
    eventually(lambda: any(isinstance(one, GroupHeartbeat) for one in cluster.heard[said:]), "a full one", WAIT_S)
    source.holds(QUEUE)


def test_a_reset_is_reported_to_the_rebalance_actor(cluster, client):
    cluster.start()
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)
    before = source.assignments[-1].offsets_version
    offsets_reset("g")
    eventually(lambda: source.assignments[-1].offsets_version == before + 1, "the news", WAIT_S)


def test_a_cluster_without_actors_needs_no_telling(cluster):
    offsets_reset("g")
    assert cluster.calls == []


def test_a_reset_is_reported_again_when_the_answer_is_lost(cluster):
    cluster.start()
    cluster.failures = [RequestTimeoutError("offsets_reset", 1.0)]
    offsets_reset("g")
    assert len(cluster.calls) > 1


def test_the_holder_is_found_from_any_actor(cluster, monkeypatch):
    cluster.start()
    monkeypatch.setattr(module.ServerChoice, "server", lambda self, names: self._name or OTHER)
    assert call_holder("g", "describe_group", 1.0)["group"] == "g"
    assert cluster.calls == [f"{OTHER}.describe_group", f"{HOME}.describe_group"]


def test_a_group_that_nobody_holds_is_an_error(cluster, monkeypatch):
    cluster.start()
    monkeypatch.setattr(RebalanceServer, "other_server", lambda self, group, now_s: OtherServer(""))
    with pytest.raises(ServiceNotAvailableError, match="no Rebalance actor serves"):
        offsets_reset("g", timeout_s=0.05)


def test_an_actor_that_does_not_answer_is_an_error(cluster):
    cluster.start()
    cluster.hangs = set(NAMES)
    with pytest.raises(RequestTimeoutError):
        offsets_reset("g", timeout_s=0.05)


def test_a_member_with_another_expression_is_refused_until_others_leave(cluster, client):
    cluster.start()
    first, second = Source("a"), Source("b")
    second.expressions = {"orders": "SQL92: price > 5"}
    membership = client.join("g", first)
    first.holds(QUEUE)
    client.join("g", second)
    eventually(lambda: len(second.refusals) > 1, "refusals", WAIT_S)
    assert second.refusals[0].args == ("g", "orders", "SQL92: price > 5", "a", "*")
    assert second.assignments == second.errors == []
    membership.leave(first.farewell)
    second.holds(QUEUE)


def test_a_conflicting_expression_is_detected_before_joining(cluster, client, monkeypatch):
    cluster.start()
    monkeypatch.setattr(module, "running_servers", lambda: tuple(NAMES))
    source = Source("a")
    source.expressions = {"orders": "paid"}
    client.join("g", source)
    source.holds(QUEUE)
    check_expressions("g", "b", {"orders": "paid", "rain": "x"})
    # no conflict: the check compares member a's new expression only with the expressions of other members
    check_expressions("g", "a", {"orders": "*"})
    check_expressions("other", "b", {"orders": "*"})
    with pytest.raises(SubscriptionConflictError) as caught:
        check_expressions("g", "b", {"orders": "*"})
    assert "'paid'" in str(caught.value)
    assert "'*'" in str(caught.value)
    monkeypatch.setattr(module, "running_servers", tuple)
    check_expressions("g", "b", {"orders": "*"})  # no Rebalance actor runs, so the expression is not checked


def test_each_check_is_one_small_call_if_the_actors_are_known(cluster, client, monkeypatch):
    cluster.start()
    source = Source("a")
    client.join("g", source)
    source.holds(QUEUE)
    lookups = []
    monkeypatch.setattr(module, "running_servers", lambda: lookups.append("lookup") or tuple(NAMES))
    answers = []
    conflict = RebalanceServer.conflict
    monkeypatch.setattr(
        RebalanceServer, "conflict", lambda *arguments: answers.append(conflict(*arguments)) or answers[-1]
    )
    for number in range(20):
        client.check("g", "a", {f"topic-{number}": "*"})
    assert [call for call in cluster.calls if not call.endswith(".heartbeats")] == [f"{HOME}.conflict"] * 20
    assert lookups == []
    assert answers == [None] * 20  # the answer does not contain the group's members and queues


def test_a_check_finds_the_actors_again_after_a_known_actor_has_ended(cluster, client):
    cluster.start()
    source = Source("a")
    client.join("g", source)
    source.holds(QUEUE)
    with pytest.raises(SubscriptionConflictError):
        check_expressions("g", "b", {"orders": "paid"}, WAIT_S, known={"rebalance-3": cluster.ref("rebalance-3")})


def test_a_check_passes_at_once_if_the_actor_lacks_the_method(cluster):
    cluster.start()
    cluster.failures = [ActorMethodMissingError("the actor runs another version of raymq")]
    check_expressions("g", "b", {"orders": "paid"}, WAIT_S, known={name: cluster.ref(name) for name in NAMES})
    assert cluster.calls == [f"{HOME}.conflict"]


@pytest.mark.parametrize("error", [AT_SHUTDOWN, "can't start new thread"])
def test_a_member_keeps_its_thread_while_no_thread_starts_for_its_new_actor(cluster, client, monkeypatch, error):
    refused: list[str] = []
    start = threading.Thread.start

    def start_if_first(thread: threading.Thread) -> None:
        if thread.name == "heartbeats-start" or len(refused) > 2:
            start(thread)
            return
        refused.append(thread.name)
        raise RuntimeError(error)

    monkeypatch.setattr(threading.Thread, "start", start_if_first)
    source = Source()
    client.join("g", source)
    source.holds(QUEUE)
    assert refused == [f"heartbeats-{HOME}"] * 3
