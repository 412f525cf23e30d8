"""Tests of requests for facts about a queue, such as its offset bounds. For some time, the queue's storage actors are
unreachable."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raymq.client.consumer.queue_lookup import QueueLookup
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import QueueBounds
from tests.support.clients.fakes import FakeRoutes, topic_route

Q0, Q1 = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0)


class Stores:
    """Fake storage actors by name. `failures`: for each storage actor, the number of first calls that fail."""

    def __init__(self) -> None:
        self.failures = 0
        self.asked: list[tuple[str, str, int]] = []

    def get(self, name: str):
        return SimpleNamespace(
            queue_bounds=lambda topic, queue_id, timeout_s: self.answer(name, topic, queue_id, QueueBounds(3, 9, 3)),
            offset_by_time=lambda topic, queue_id, at_ms, timeout_s: self.answer(name, topic, queue_id, at_ms // 1000),
        )

    def answer(self, name, topic, queue_id, value):
        self.asked.append((name, topic, queue_id))
        if self.failures:
            self.failures -= 1
            raise ServiceNotAvailableError("restarting")
        return value


@pytest.fixture
def stores():
    return Stores()


@pytest.fixture
def routes():
    return FakeRoutes(topic_route(a=1, b=1))


@pytest.fixture
def lookup(routes, stores):
    return QueueLookup(routes, stores)


def test_each_queue_is_asked_for_at_its_own_store(lookup, stores):
    assert lookup.begin_offsets([Q0, Q1]) == {Q0: 3, Q1: 3}
    assert lookup.end_offsets([Q1]) == {Q1: 9}
    assert lookup.offsets_for_times({Q0: 5000, Q1: 7000}) == {Q0: 5, Q1: 7}
    assert [name for name, _, _ in stores.asked] == [f"storage-{name}-0" for name in ("a", "b", "b", "a", "b")]


def test_a_store_that_restarts_is_asked_again(lookup, stores):
    stores.failures = 2
    assert lookup.bounds(Q0) == QueueBounds(3, 9, 3)
    assert len(stores.asked) == 3


def test_queues_are_looked_up_without_the_cache(lookup, routes):
    assert lookup.queues("orders") == [Q0, Q1]
    assert routes.invalidated == ["orders"]


def test_a_queue_the_known_route_lacks_is_looked_for_in_the_route_of_now(lookup, routes):
    new = MessageQueue("orders", "a", 1)
    with pytest.raises(InvalidArgumentError, match=r"orders@a:1 does not exist: topic 'orders' has 2 queues"):
        lookup.bounds(new)
    routes.invalidate = lambda topic: routes.routes.update(orders=topic_route(a=2, b=1))
    assert lookup.check(new) == new
