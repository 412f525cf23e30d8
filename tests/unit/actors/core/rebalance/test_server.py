"""Tests of many groups at one Rebalance actor. Groups share no state, and the actor serves a group only while it holds
the lease of the group's slot."""

from __future__ import annotations

import tracemalloc

import pytest

from actors.core.rebalance import server as module
from actors.core.rebalance.server import IDLE_GROUP_S, RebalanceServer, TopicQueues
from raymq.common.message import MessageQueue
from raymq.common.protocol.membership import (
    GroupAssignment,
    GroupFailure,
    GroupHeartbeat,
    GroupRefusal,
    OtherServer,
    slot_of,
)

QUEUE = MessageQueue("orders", "broker-a", 0)
SESSION_S = 15.0


class Holding:
    """Fake lease of a slot (a share of all groups). The test sets whether the lease is held."""

    def __init__(self) -> None:
        self.held, self.epoch, self.version, self.grants_from_s = True, 1, 1000, 0.0
        self.holder = "rebalance-1"

    @property
    def claim(self):
        return self

    def valid(self, now_s: float) -> bool:
        return self.held

    def waits_for_old_leases(self, now_s: float) -> bool:
        return now_s < self.grants_from_s


@pytest.fixture
def lease() -> Holding:
    return Holding()


@pytest.fixture
def server(lease) -> RebalanceServer:
    server = RebalanceServer(0, 2, "life", session_timeout_s=SESSION_S)
    server.leases = dict.fromkeys(server.leases, lease)
    server.set_queues("orders", TopicQueues((QUEUE,)))
    return server


def beat(
    server: RebalanceServer,
    group: str = "billing",
    *holding: MessageQueue,
    name: str = "m",
    topics=("orders",),
    now_s: float = 0.0,
    generation: int = 0,
):
    """Send two heartbeats of a member: the first opens the member's session, the second uses this session. Returns the
    answer to the second. If the first opens no session, its answer is returned, and the second is not sent."""

    def send(session: int, sequence: int):
        heartbeat = GroupHeartbeat(
            name, frozenset(topics), frozenset(holding), session=session, sequence=sequence, generation=generation
        )
        return server.heartbeat(group, heartbeat, now_s)

    first = send(0, 1)
    return send(first.session, 2) if isinstance(first, GroupAssignment) else first


def test_each_group_has_its_own_members_and_queues(server):
    assert beat(server, "billing").queues == {QUEUE}
    assert beat(server, "audit").queues == {QUEUE}
    assert server.groups() == ["audit", "billing"]
    assert beat(server, "billing", name="other").queues == frozenset()


def test_a_server_without_the_slot_names_its_holder(server, lease):
    lease.held = False
    assert beat(server) == OtherServer("rebalance-1")
    assert server.offsets_reset("billing", 0.0) == OtherServer("rebalance-1")
    assert server.describe_group("billing", 0.0) == OtherServer("rebalance-1")
    assert server.conflict("billing", "b", {"orders": "paid"}, 0.0) == OtherServer("rebalance-1")


def test_an_error_of_one_group_does_not_affect_other_groups(server, monkeypatch):
    beat(server, "billing")
    monkeypatch.setattr(server._entries["billing"].core, "heartbeat", lambda heartbeat, now_s: 1 / 0)
    answer = beat(server, "billing")
    assert isinstance(answer, GroupFailure)
    assert "ZeroDivisionError" in answer.error
    assert beat(server, "audit").queues == {QUEUE}


def test_after_a_take_over_queues_that_nobody_reports_wait_and_reported_ones_do_not(server, lease):
    lease.grants_from_s = 20.0
    two = MessageQueue("orders", "broker-a", 1)
    server.set_queues("orders", TopicQueues((QUEUE, two)))
    assert beat(server, "billing", QUEUE, generation=17).queues == {QUEUE}
    assert beat(server, "billing", QUEUE, now_s=19.9).queues == {QUEUE}
    assert beat(server, "billing", QUEUE, now_s=20.0).queues == {QUEUE, two}


def test_groups_of_an_earlier_epoch_are_forgotten(server, lease):
    beat(server, "billing")
    lease.epoch, lease.version, lease.grants_from_s = 3, 5000, 50.0
    server.sweep(1.0)
    assert server.groups() == []
    answer = beat(server, "billing", name="other", now_s=1.0)
    assert answer.queues == frozenset()
    assert answer.generation >= 5000


def test_an_unknown_topic_is_looked_up_and_the_assignment_is_incomplete(server):
    answer = beat(server, topics=("orders", "new"))
    assert (answer.queues, answer.incomplete) == ({QUEUE}, True)
    assert server.unknown_topics() == {"new"}
    server.set_queues("new", None)  # None means that no NameServer has a route for the topic
    assert server.unknown_topics() == frozenset()
    assert not beat(server, topics=("orders", "new")).incomplete
    new = MessageQueue("new", "broker-a", 0)
    server.set_queues("new", TopicQueues((new,)))
    assert beat(server, "billing", QUEUE, topics=("orders", "new")).queues == {QUEUE, new}


def test_members_keep_their_queues_while_the_route_is_unknown(server):
    lost = MessageQueue("lost", "broker-a", 0)
    server.set_queues("lost", None)
    assert beat(server, "billing", lost, topics=("lost",)).queues == {lost}
    assert beat(server, "billing", name="other", topics=("lost",)).queues == frozenset()


def test_topics_that_nobody_uses_are_forgotten(server):
    beat(server, topics=("orders",))
    server.set_queues("unused", TopicQueues(()))
    server.forget_topics(server.topics())
    assert server._topics.keys() == {"orders"}


def test_an_idle_group_is_dropped_and_recreated_with_a_newer_generation(server):
    before = beat(server, "billing").generation
    server.sweep(SESSION_S + 1)
    assert server.groups() == ["billing"]
    assert server.describe_group("billing", SESSION_S + 1)["members"] == []
    server.sweep(IDLE_GROUP_S + 1)
    assert server.groups() == []
    again = beat(server, "billing", now_s=IDLE_GROUP_S + 2, generation=before)
    assert again.generation > before
    assert again.queues == {QUEUE}


def test_a_slot_is_given_up_only_without_members(server):
    slot = slot_of("billing")
    assert server.releasable(slot)
    beat(server, "billing")
    assert not server.releasable(slot)


def test_a_filter_is_compared_with_the_filters_of_the_other_living_members(server):
    beat(server, "billing", name="a", topics=("orders", "rain"))
    assert server.conflict("billing", "b", {"orders": "paid", "snow": "x"}, 0.0) == GroupRefusal(
        "orders", "paid", "a", "*"
    )
    assert server.conflict("billing", "b", {"orders": "*", "snow": "x"}, 0.0) is None
    assert server.conflict("billing", "a", {"orders": "paid"}, 0.0) is None
    assert server.conflict("audit", "b", {"orders": "paid"}, 0.0) is None
    assert server.groups() == ["billing"]  # a comparison creates no group
    assert server.conflict("billing", "b", {"orders": "paid"}, SESSION_S + 1) is None


def test_a_reset_is_known_to_the_group(server):
    version = beat(server).offsets_version
    assert server.offsets_reset("billing", 0.0) == version + 1
    assert server.offsets_reset("nobody", 0.0) == 0


def test_a_thousand_groups_take_little_memory(server):
    tracemalloc.start()
    for number in range(1000):
        beat(server, f"group-{number}")
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(server.groups()) == 1000
    assert used < 1000 * (64 << 10)


def test_groups_are_spread_over_the_slots():
    # The number of a group's slot (a share of all groups) must never change, because processes of different raymq
    # versions compute it.
    assert slot_of("billing") == 2
    assert {slot_of(f"group-{number}") for number in range(100)} == set(range(module.REBALANCE_SLOTS))
