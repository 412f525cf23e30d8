"""An instance gets its queues and loses them, as a member of its group or in BROADCASTING."""

from __future__ import annotations

import pytest

from actors.pull.group_member import BroadcastMember, GroupMember
from actors.pull.instance_state import InstanceState
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import RequestTimeoutError, TopicNotExistError
from raymq.message import MessageModel, MessageQueue
from raymq.protocol.membership import AllocateStrategy, Allocation, GroupAssignment
from raymq.protocol.route import BrokerData, QueueData, TopicRoute
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.members import QuickClient
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
        self.member = GroupMember(self.instance, QuickClient(self.group.heartbeat), "node-1", self._reset)
        self.instance.on_released = self.member.wake_member
        self.joined = False

    def join(self) -> None:
        self.joined = True
        self.member.join()

    def _reset(self) -> None:
        self.resets += 1

    def beats(self, count: int = 2) -> None:
        """Wait for so many more heartbeats, with turns of the actor's thread in between."""
        target = len(self.group.heard) + count

        def turned() -> bool:
            self.member.fence_when_late()
            self.instance.release()
            return len(self.group.heard) >= target

        eventually(turned, "heartbeats", WAIT_S)


@pytest.fixture
def scene():
    made = Scene()
    yield made
    if made.joined:
        made.member.leave()


def test_queues_come_and_go_with_the_assignment_and_the_member_says_what_it_holds(scene):
    scene.group.queues = set(QUEUES)
    scene.join()
    scene.beats()
    assert scene.group.heard[-1].holding == set(QUEUES)
    first = scene.group.heard[0]
    assert (first.member, first.node, first.allocation) == ("pull-billing-0", "node-1", SETTINGS.allocation)
    assert first.topics == {"orders", "%RETRY%billing"}
    assert {process_queue.generation for process_queue in scene.instance.core.process_queues()} == {9}
    scene.group.queues.discard(QUEUES[0])
    eventually(lambda: scene.beats() or scene.group.heard[-1].holding == set(QUEUES[1:]), "the rest", WAIT_S)


def test_only_a_new_version_of_the_offsets_is_a_reset(scene):
    scene.join()
    scene.beats()
    assert scene.resets == 0
    scene.group.version = 2
    scene.beats()
    assert scene.resets == 1


def test_a_member_that_its_group_does_not_hear_drops_its_queues(scene, monkeypatch):
    scene.group.queues = set(QUEUES)
    scene.join()
    scene.beats()
    scene.group.fails = True
    scene.beats()
    assert scene.instance.holding() == set(QUEUES)  # its lease is not over
    scene.member._lease_until_s = 0.0
    scene.beats()
    assert scene.instance.holding() == frozenset()


def test_at_its_end_it_leaves_and_takes_no_more_queues(scene):
    scene.group.queues = set(QUEUES[:1])
    scene.join()
    scene.beats()
    scene.instance.stopping.set()
    scene.group.queues = set(QUEUES)
    scene.beats()
    assert scene.instance.holding() == set(QUEUES[:1])
    scene.instance.drop_all()
    scene.member.leave()
    scene.joined = False
    last = scene.group.heard[-1]
    assert (last.leaving, last.holding) == (True, frozenset())


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

    def follow() -> frozenset[MessageQueue]:
        member.follow_routes()
        instance.release()
        return instance.holding()

    assert follow() == set(QUEUES[:2])
    routes.queues = 3
    assert follow() == set(QUEUES)
    routes.gone = True
    assert follow() == set(QUEUES)
    routes.gone = False
    routes.queues = 1
    assert follow() == set(QUEUES[:1])
    instance.stopping.set()
    routes.queues = 3
    assert follow() == set(QUEUES[:1])
