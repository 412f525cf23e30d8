"""Tests that a consumer instance in BROADCASTING mode consumes all queues in the routes of its topics."""

from __future__ import annotations

from actors.pull.broadcast_member import BroadcastMember
from actors.pull.instance_state import InstanceState
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import TopicNotExistError
from raymq.common.message import MessageModel, MessageQueue
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute

QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(3)]


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


def test_broadcasting_keeps_all_queues_while_the_route_is_unknown():
    settings = PushSettings("billing", (Subscription.parse("orders"),), message_model=MessageModel.BROADCASTING)
    instance, routes = InstanceState("pull-billing-0", settings), FewRoutes(2)
    member = BroadcastMember(instance, routes)

    def follow() -> frozenset[MessageQueue]:
        member.follow_routes()
        member.release()
        return instance.holding()

    assert follow() == set(QUEUES[:2])
    routes.queues = 3
    assert follow() == set(QUEUES)
    routes.gone = True
    assert follow() == set(QUEUES)
    routes.gone = False
    routes.queues = 1
    assert follow() == set(QUEUES[:1])
    instance.stop()
    routes.queues = 3
    assert follow() == frozenset()
