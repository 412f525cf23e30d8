"""Tests of a group member. It receives its queues in the answers to its heartbeats, and releases revoked
queues."""

from __future__ import annotations

import threading
import traceback
from unittest.mock import Mock

import pytest

from raymq.client.consumer.assignment import group_member as module
from raymq.client.consumer.assignment.group_member import GroupMember
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import RaymqError, RequestTimeoutError
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, QueueOffset
from raymq.common.protocol.membership import AllocateStrategy, Allocation, GroupAssignment
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.members import QuickClient
from tests.support.history.waiting import eventually

QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(3)]
STICKY = Allocation(AllocateStrategy.STICKY)


class Group:
    """Fake Rebalance actor that assigns `queues` to the member, or fails."""

    def __init__(self) -> None:
        self.heard = []
        self.queues: set[MessageQueue] = set()
        self.version = 1
        self.fails = False
        self.members = 1

    def heartbeat(self, heartbeat) -> GroupAssignment:
        self.heard.append(heartbeat)
        if self.fails:
            raise RequestTimeoutError("rebalance-billing", 5.0)
        return GroupAssignment(9, frozenset(self.queues), self.members, self.version)


class CheckingClient(QuickClient):
    """A QuickClient that records the checks of subscriptions."""

    def __init__(self, answer) -> None:
        super().__init__(answer)
        self.checked = []

    def check(self, group, member, expressions) -> None:
        self.checked.append(expressions)


class Scene:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.core = SubscriptionState(PullSettings("billing"), 0.0)
        self.core.subscribe(Subscription.parse("orders"))
        self.core.poll_begins(0.0)  # record that the program has begun a poll
        self.group = Group()
        self.on_assigned, self.on_reset = Mock(), Mock()
        self.client = CheckingClient(self.group.heartbeat)
        self.member = GroupMember(
            self.core,
            self.lock,
            self.client,
            group="billing",
            name="billing-0",
            node_id="node-1",
            allocation=STICKY,
            on_assigned=self.on_assigned,
            on_reset=self.on_reset,
        )
        self.joined = False

    def join(self, *queues: MessageQueue) -> None:
        self.group.queues = set(queues)
        self.joined = True
        self.member.join()
        self.beats()

    def beats(self, count: int = 2) -> None:
        """Wait until the member has sent `count` more heartbeats."""
        target = len(self.group.heard) + count
        eventually(lambda: len(self.group.heard) >= target, "heartbeats", WAIT_S)

    def holding(self) -> frozenset[MessageQueue]:
        with self.lock:
            return self.core.holding


@pytest.fixture
def scene():
    made = Scene()
    yield made
    if made.joined:
        made.member.leave()


def test_queues_follow_the_assignment_and_heartbeats_list_held_queues(scene):
    scene.join(*QUEUES)
    assert scene.group.heard[-1].holding == set(QUEUES)
    first = scene.group.heard[0]
    assert (first.member, first.node, first.allocation, first.topics) == ("billing-0", "node-1", STICKY, {"orders"})
    assert scene.on_assigned.called
    with scene.lock:
        assert {assigned.generation for assigned in scene.core.starting()} == {9}
    scene.group.queues.discard(QUEUES[0])
    eventually(lambda: scene.group.heard[-1].holding == set(QUEUES[1:]), "the release of a queue not begun", WAIT_S)


def test_a_queue_is_released_once_its_commit_is_answered(scene):
    scene.join(QUEUES[0])
    with scene.lock:
        [assigned] = scene.core.starting()
        scene.core.started(assigned, QueueOffset(7))
        scene.core.seek(QUEUES[0], 9)
    scene.group.queues.clear()
    scene.beats(3)
    assert scene.holding() == {QUEUES[0]}
    with scene.lock:
        scene.core.commit_answered(scene.core.uncommitted(), CommitAnswer())
    scene.member.release()
    eventually(lambda: scene.group.heard[-1].holding == frozenset(), "the release", WAIT_S)


def test_only_a_new_version_of_the_offsets_is_a_reset(scene):
    scene.join()
    assert not scene.on_reset.called
    scene.group.version = 2
    scene.beats()
    scene.on_reset.assert_called_once()


def test_a_member_without_an_answer_releases_its_queues_when_its_lease_ends(scene):
    scene.join(*QUEUES)
    scene.group.fails = True
    scene.beats()
    assert scene.holding() == set(QUEUES)
    with scene.lock:
        scene.core._lease_until_s = 0.0
    scene.beats()
    assert scene.holding() == frozenset()


def test_the_failure_of_a_member_that_never_joined_is_raised_again_and_again_without_growing(scene):
    scene.group.fails = True
    scene.join()
    depths = set()
    for _ in range(3):
        with pytest.raises(RaymqError) as caught:
            scene.member.raise_failure()
        depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1


def test_at_its_end_it_leaves_and_holds_nothing(scene):
    scene.join(*QUEUES)
    scene.member.leave()
    scene.joined = False
    last = scene.group.heard[-1]
    assert (last.leaving, last.holding, scene.holding()) == (True, frozenset(), frozenset())


def test_only_a_member_that_may_have_company_compares_its_subscriptions_with_the_group(scene, monkeypatch):
    def check(topic: str) -> bool:
        """Check a subscription. Returns True if the check made a call."""
        scene.client.checked.clear()
        scene.member.check({topic: "*"})
        return scene.client.checked == [{topic: "*"}]

    assert check("orders")  # the member has not joined, so it does not know if the group has other members
    scene.join()
    # A heartbeat may be slow on a loaded machine. So the time for which its answer is valid is long in this test.
    monkeypatch.setattr(module, "ALONE_S", 3600.0)
    scene.beats()
    assert [check(f"topic-{number}") for number in range(20)] == [False] * 20
    scene.group.members = 2
    scene.beats()
    assert check("rain")
    scene.group.members = 1
    monkeypatch.setattr(module, "ALONE_S", 0.0)
    scene.beats()
    assert check("snow")  # the answer is too old
