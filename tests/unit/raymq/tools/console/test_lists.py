"""Tests of the console's lists of topics and groups, with a fake Admin. A list needs few calls, and shows the data of
the brokers that answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.admin.topics import QueueDescription
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import MessageQueue
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.common.protocol.stats import BrokerReadings, GroupReading, GroupTotals, TopicReading
from raymq.tools.console.pages.topics import TopicGroup, topic_view
from raymq.tools.console.web.lists import (
    NO_ANSWER,
    GroupRow,
    NoAnswer,
    TopicRow,
    cluster_figures,
    list_groups,
    list_topics,
)

QUEUE = MessageQueue("orders", "broker-a", 0)
ROUTE = TopicRoute(
    "orders", {"broker-a": BrokerData("c", "broker-a", {0: "storage-broker-a-0"})}, (QueueData("broker-a", 1, 1, 6),)
)


def readings(held: int, lag: int, behind_ms: int | None) -> BrokerReadings:
    return BrokerReadings(
        {"orders": TopicReading(100, 9000, 4, 6, held, 2.5, 225.0), "idle": TopicReading(queues=1, perm=4)},
        {("billing", "orders"): GroupReading(60, lag, behind_ms)},
        0,
        {"billing": GroupTotals(60, lag, behind_ms, 2, 1), "new": GroupTotals(consume_enable=lag == 0)},
    )


class Admin:
    """Fake Admin for two brokers. `calls`: the names of the methods that the code under test has called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, BrokerReadings | None] = {
            "broker-a": readings(30, 7, 4_000), "broker-b": readings(12, 3, None),
        }  # fmt: skip
        self.error: Exception | None = None

    def readings(self, timeout_s: float, *, with_pairs: bool) -> dict[str, BrokerReadings | None]:
        self.calls.append("readings")
        return self.answers

    def topic_attributes(self, topics: set[str]) -> dict[str, TopicAttributes]:
        self.calls.append("topic_attributes")
        return {"orders": TopicAttributes.parse({"message.type": "FIFO"})}

    def consumer_connections(self) -> list[Any]:
        self.calls.append("consumer_connections")
        consumer = SimpleNamespace(
            group="billing", consume_type="PUSH", message_model=SimpleNamespace(value="CLUSTERING")
        )
        return [SimpleNamespace(consumer=consumer)] * 2

    def delayed(self, begin_ms: int, end_ms: int, *, limit: int) -> Any:
        return SimpleNamespace(levels={"level 3": 4, "deliver_at": 5})

    def topic_route(self, topic: str) -> TopicRoute:
        self.calls.append("topic_route")
        return ROUTE

    def describe_topic(self, topic: str) -> list[QueueDescription]:
        self.calls.append("describe_topic")
        if self.error is not None:
            raise self.error
        return [QueueDescription(QUEUE, 10, 52)]

    def kept_since(self, topic: str) -> dict[MessageQueue, int | None]:
        self.calls.append("kept_since")
        return {QUEUE: 1_700}


@pytest.fixture
def admin() -> Admin:
    return Admin()


def test_the_list_of_topics_is_one_call_to_each_broker(admin: Admin) -> None:
    listing = list_topics(admin)
    assert listing.rows == (
        TopicRow("idle", 2, "R", 0, 0.0, 0),
        TopicRow("orders", 8, "RW", 42, 5.0, 1, {"message.type": "FIFO"}),
    )
    assert listing.missing == ()
    assert admin.calls == ["readings", "topic_attributes"]


def test_groups_have_the_sums_of_all_brokers_and_their_members(admin: Admin) -> None:
    assert list_groups(admin).rows == (
        GroupRow("billing", "PUSH", "CLUSTERING", 2, 10, 4_000, 4, 2),
        GroupRow("new", "", "", 0, 0, 0, 0, 0, consume_enable=False),
    )


def test_a_broker_that_does_not_answer_is_named_and_its_rows_are_missing(admin: Admin) -> None:
    admin.answers["broker-b"] = None
    listing = list_topics(admin)
    assert [(row.topic, row.messages) for row in listing.rows] == [("idle", 0), ("orders", 30)]
    assert listing.missing == (NoAnswer("broker-b", NO_ANSWER),)
    assert topic_view(admin, "orders").missing == [f"broker-b: {NO_ANSWER}"]
    with pytest.raises(ServiceNotAvailableError, match="broker-b"):
        # Broker-b does not answer, so `cluster_figures` raises an error. A total without broker-b's messages would be
        # smaller than the last total, as if a server had restarted.
        cluster_figures(admin, 1_000)


def test_figures_are_sums_with_each_topic_and_group(admin: Admin) -> None:
    found = cluster_figures(admin, 1_000)
    assert (found.messages_in, found.messages_out, found.bytes_in) == (200, 120, 18_000)
    assert (found.dead_letters, found.delayed) == (2, 9)
    assert (found.topic_messages, found.group_lags) == ({"idle": 0, "orders": 200}, {"billing": 10, "new": 0})


def test_the_page_of_a_topic_takes_the_same_calls_whatever_the_number_of_groups(admin: Admin) -> None:
    view = topic_view(admin, "orders")
    assert view.groups == [TopicGroup("billing", 2, 10, 4_000)]
    assert (view.queues, view.since_ms) == ([QueueDescription(QUEUE, 10, 52)], {QUEUE: 1_700})
    assert (view.rate, view.bytes_rate, view.error, view.missing) == (5.0, 450.0, "", [])
    assert view.route == ROUTE
    assert sorted(admin.calls) == sorted(
        ["topic_route", "readings", "kept_since", "describe_topic", "consumer_connections"]
    )


def test_a_store_that_is_away_makes_its_queues_rows_with_the_reason(admin: Admin) -> None:
    admin.error = ServiceNotAvailableError("the store is away")
    view = topic_view(admin, "orders")
    assert (view.queues, view.error) == ([QueueDescription(QUEUE, 0, 0)], "the store is away")
    assert view.missing == ["the store is away"]
    assert [one.group for one in view.groups] == ["billing"]
