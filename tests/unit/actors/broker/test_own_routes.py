"""Tests of the topic routes that the producers inside a broker actor use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.broker.master_store import OwnRoutes
from actors.core.broker.state import BrokerState
from raymq.common.errors import NoPermissionError, TopicNotExistError
from raymq.common.protocol.attributes import TopicMessageType
from raymq.common.protocol.route import MASTER_ID, PERM_READ, TopicConfig


class OwnGroup:
    """Fake routes of broker-a: topic `orders` with 4 queues and topic `read-only` with 2 queues. Records each topic
    creation."""

    def __init__(self) -> None:
        self.state = BrokerState(
            {"orders": TopicConfig("orders", 4, 4), "read-only": TopicConfig("read-only", 2, 2, PERM_READ)}
        )
        self.store = SimpleNamespace(storage=SimpleNamespace(name="storage-broker-a-0"))
        settings: Any = SimpleNamespace(broker_name="broker-a", cluster="raymq")
        self.routes = OwnRoutes(settings, self.store, lambda: self.state, self.create)  # type: ignore[arg-type]  # a fake
        self.created: list[tuple[str, int]] = []

    def create(self, topic: str, queue_nums: int) -> None:
        self.created.append((topic, queue_nums))
        self.state.topics[topic] = TopicConfig(topic, queue_nums, queue_nums)


@pytest.fixture
def own():
    return OwnGroup()


def test_a_route_names_this_broker_group_alone_and_the_present_masters_store(own):
    route = own.routes.get("orders")
    assert {name: data.storages for name, data in route.brokers.items()} == {
        "broker-a": {MASTER_ID: "storage-broker-a-0"}
    }
    assert [(queue.broker_name, queue.queue_id) for queue in route.publish_queues] == [
        ("broker-a", n) for n in range(4)
    ]
    own.store.storage = SimpleNamespace(name="storage-broker-a-1")
    assert own.routes.get("orders").brokers["broker-a"].storages == {MASTER_ID: "storage-broker-a-1"}


def test_a_topic_that_is_not_here_or_may_not_be_written_has_no_route(own):
    with pytest.raises(TopicNotExistError):
        own.routes.get("nowhere")
    with pytest.raises(NoPermissionError):
        own.routes.get("read-only")


def test_only_a_missing_topic_is_created(own):
    assert len(own.routes.get_or_create("orders", 8).publish_queues) == 4
    assert own.created == []
    assert len(own.routes.get_or_create("new", 8).publish_queues) == 8
    assert own.created == [("new", 8)]


def test_a_route_has_the_message_type_of_the_topic(own):
    own.state.topics["orders"] = TopicConfig("orders", 1, 1, attributes={"message.type": "FIFO"})
    assert own.routes.get("orders").attributes.message_type is TopicMessageType.FIFO
