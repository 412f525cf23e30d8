"""Tests of RocketMQ's official clients with topics at two broker groups: message groups, transactions and recalls."""

from __future__ import annotations

import time

import pytest

from raymq.common.protocol.recall import RecallHandle
from tests.support.gateway.official_place import Place

pytestmark = pytest.mark.timeout(900)  # The first run installs the clients.

BROKERS = {"broker-a", "broker-b"}
MESSAGE_GROUPS = 8
MESSAGES_OF_GROUP = 4
MESSAGES = 8
"""Number of transactions, and of delayed messages."""


def storing_brokers(place: Place) -> set[str]:
    """Return the broker groups that have messages of a place's topic."""
    return {one.queue.broker_name for one in place.mq.admin.describe_topic(place.topic) if one.max_offset}


def test_message_groups_of_both_broker_groups_keep_their_order(place: Place) -> None:
    place.create("FIFO")
    producer, consumer = place.open("producer"), place.open("push")
    for number in range(MESSAGES_OF_GROUP):
        for group in range(MESSAGE_GROUPS):
            place.send(producer, f"{number}", group=f"customer-{group}")
    got = place.consumed(consumer, MESSAGES_OF_GROUP * MESSAGE_GROUPS)
    assert storing_brokers(place) == BROKERS
    for group in range(MESSAGE_GROUPS):
        numbers = [int(one["body"]) for one in got if one["group"] == f"customer-{group}"]
        assert numbers == list(range(MESSAGES_OF_GROUP))
    place.settled()


def test_transactions_end_at_the_broker_group_of_their_message(place: Place) -> None:
    place.create("TRANSACTION")
    producer, consumer = place.open("producer"), place.open("simple")
    for number in range(MESSAGES):
        message = {"topic": place.topic, "body": f"{number}"}
        place.client.call("transact", name=producer, message=message, end="rollback" if number % 4 == 0 else "commit")
    wanted = [f"{number}" for number in range(MESSAGES) if number % 4]
    got = place.receive(consumer, len(wanted))
    assert sorted(one["body"] for one in got) == wanted
    assert storing_brokers(place) == BROKERS
    place.ack(consumer, got)
    assert place.client.call("receive", name=consumer) == []
    place.settled()


def test_delayed_messages_of_both_broker_groups_are_recalled(place: Place) -> None:
    place.create("DELAY")
    producer, consumer = place.open("producer"), place.open("simple")
    due_s = int(time.time()) + 3600
    delayed = [{"topic": place.topic, "body": f"{number}", "deliver_at_s": due_s} for number in range(MESSAGES)]
    sent = place.client.call("send", name=producer, messages=delayed)
    assert {RecallHandle.parse(one["recall"]).broker_name for one in sent} == BROKERS
    for one in sent:
        assert place.client.call("recall", name=producer, topic=place.topic, handle=one["recall"]) == one["id"]
    soon = [{"topic": place.topic, "body": "soon", "deliver_at_s": int(time.time()) + 1} for _ in range(MESSAGES)]
    ids = {one["id"] for one in place.client.call("send", name=producer, messages=soon)}
    got = place.receive(consumer, MESSAGES)
    assert {one["id"] for one in got} == ids
    assert storing_brokers(place) == BROKERS
    place.ack(consumer, got)
    place.settled()
