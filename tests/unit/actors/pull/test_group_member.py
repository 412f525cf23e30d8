"""An instance gets its queues and loses them, as a member of its group or in BROADCASTING."""

from __future__ import annotations

import threading

import pytest

from actors.pull import group_member as pull_member
from actors.pull.group_member import BroadcastMember, GroupMember
from actors.pull.instance_state import InstanceState
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import RequestTimeoutError, TopicNotExistError
from raymq.message import MessageModel, MessageQueue
from raymq.protocol.membership import AllocateStrategy, Allocation, GroupAssignment
from raymq.protocol.route import BrokerData, QueueData, TopicRoute
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually

QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(3)]
SETTINGS = PushSettings("billing", (Subscription.parse("orders"),), allocation=Allocation(AllocateStrategy.STICKY))


class Group:
    """The Rebalance actor's side: answers with `queues`, or fails."""

    def __init__(self) -> None:
        self.heard = []
        self.queues: set[MessageQueue] = set()
        self.version = 1
        self.fails = False

    def heartbeat(self, heartbeat) -> GroupAssignment:
        self.heard.append(heartbeat)
        if self.fails:
            raise RequestTimeoutError("rebalance-billing", 5.0)
        return GroupAssignment(9, frozenset(self.queues), 1, self.version)


class Scene:
    def __init__(self) -> None:
        self.instance = InstanceState("pull-billing-0", SETTINGS)
        self.group = Group()
        self.resets = 0
        self.member = GroupMember(self.instance, self.group, "node-1", self._reset)
        self.instance.on_released = self.member.wake_member
        self.thread = threading.Thread(target=self.member.run, daemon=True)

    def _reset(self) -> None:
        self.resets += 1

    def beats(self, count: int = 2) -> None:
        """Wait for so many more heartbeats."""
        target = len(self.group.heard) + count
        eventually(lambda: self.member.wake_member() or len(self.group.heard) >= target, "heartbeats", WAIT_S)


@pytest.fixture
def scene():
    made = Scene()
    yield made
    made.instance.stopping.set()
    made.member.wake_member()
    if made.thread.ident is not None:
        made.thread.join(WAIT_S)


def test_queues_come_and_go_with_the_assignment_and_the_member_says_what_it_holds(scene):
    scene.group.queues = set(QUEUES)
    scene.thread.start()
    scene.beats()
    assert scene.group.heard[-1].holding == set(QUEUES)
    first = scene.group.heard[0]
    assert (first.member, first.node, first.allocation) == ("pull-billing-0", "node-1", SETTINGS.allocation)
    assert first.topics == {"orders", "%RETRY%billing"}
    assert {process_queue.generation for process_queue in scene.instance.core.process_queues()} == {9}
    scene.group.queues.discard(QUEUES[0])
    scene.beats()
    assert scene.group.heard[-1].holding == set(QUEUES[1:])


def test_only_a_new_version_of_the_offsets_is_a_reset(scene):
    scene.thread.start()
    scene.beats()
    assert scene.resets == 0
    scene.group.version = 2
    scene.beats()
    assert scene.resets == 1


def test_a_member_that_its_group_does_not_hear_drops_its_queues(scene, monkeypatch):
    scene.group.queues = set(QUEUES)
    scene.thread.start()
    scene.beats()
    scene.group.fails = True
    scene.beats()
    assert scene.instance.holding() == set(QUEUES)  # its lease is not over
    scene.member._lease_until_s = 0.0
    scene.beats()
    assert scene.instance.holding() == frozenset()


def test_at_its_end_it_lets_go_of_everything_and_leaves(scene):
    scene.group.queues = set(QUEUES)
    scene.thread.start()
    scene.beats()
    scene.instance.stopping.set()
    scene.member.wake_member()
    scene.thread.join(WAIT_S)
    last = scene.group.heard[-1]
    assert (last.leaving, last.holding) == (True, frozenset())


def test_a_task_that_never_ends_does_not_keep_it_from_leaving(scene, monkeypatch):
    monkeypatch.setattr(pull_member, "LEAVE_TIMEOUT_S", 0.2)
    scene.group.queues = set(QUEUES)
    scene.thread.start()
    scene.beats()
    with scene.instance.lock:
        monkeypatch.setattr(scene.instance.core, "released", lambda now_s: [])
    scene.instance.stopping.set()
    scene.member.wake_member()
    scene.thread.join(WAIT_S)
    assert scene.group.heard[-1].leaving
    assert scene.instance.holding() == frozenset()


class FewRoutes:
    def __init__(self, queues: int) -> None:
        self.queues = queues
        self.gone = False

    def get(self, topic: str) -> TopicRoute:
        if self.gone:
            raise TopicNotExistError(topic)
        data = {"broker-a": BrokerData("c", "broker-a", {0: "storage-broker-a-0"})}
        return TopicRoute(topic, data, (QueueData("broker-a", self.queues, self.queues, 6),))

    def invalidate(self, topic: str) -> None:
        pass


def test_in_broadcasting_all_queues_of_the_route_are_taken_and_kept_while_there_is_none():
    settings = PushSettings("billing", (Subscription.parse("orders"),), message_model=MessageModel.BROADCASTING)
    instance, routes = InstanceState("pull-billing-0", settings), FewRoutes(2)
    member = BroadcastMember(instance, routes)
    instance.on_released = member.wake_member
    thread = threading.Thread(target=member.run, daemon=True)
    thread.start()
    eventually(lambda: instance.holding() == set(QUEUES[:2]), "two queues", WAIT_S)
    routes.queues = 3
    eventually(lambda: member.wake_member() or instance.holding() == set(QUEUES), "three queues", WAIT_S)
    routes.gone = True
    member.wake_member()
    routes.gone = False
    routes.queues = 1
    eventually(lambda: member.wake_member() or instance.holding() == set(QUEUES[:1]), "one queue", WAIT_S)
    instance.stopping.set()
    member.wake_member()
    thread.join(WAIT_S)
    assert instance.holding() == frozenset()
