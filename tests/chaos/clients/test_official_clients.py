"""Tests of a gateway with RocketMQ's official clients for Python and Node, each in a process of its own.

Each test has a topic and a group of its own for each client. All topics are at two broker groups.

RAYMQ_CHAOS_KILLS (default 2, 40 by `make soak`) sets the number of times that the gateway is killed under load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

import raymq
from raymq.gateway.wire.enums import Code
from tests.support.cases import SUMMARY
from tests.support.gateway.gateways import RunningGateway
from tests.support.gateway.official_client import OfficialClient, OfficialError
from tests.support.gateway.official_place import ARRIVES_S, LANGUAGES, Place, check_load, refused
from tests.support.history.waiting import eventually

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
pytestmark = pytest.mark.timeout(3600 if SOAK else 900)  # The first run installs the clients.

BODY_MAX = 4 << 20
NAMESPACE = "official"
KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "40" if SOAK else "2"))
MESSAGES_BETWEEN_KILLS = 20


def test_a_message_arrives_with_all_its_values(place: Place) -> None:
    place.create()
    producer, consumer = place.open("producer"), place.open("simple")
    fields = {"tag": "paid", "key": "k-1", "properties": {"price": "7", "ä": "ö"}}
    [message_id] = place.send(producer, "hällo", **fields)
    [got] = place.receive(consumer, 1)
    assert (got["id"], got["body"], got["tag"], got["keys"]) == (message_id, "hällo", "paid", ["k-1"])
    assert (got["properties"], got["attempt"], got["corrupted"]) == ({"price": "7", "ä": "ö"}, 1, False)
    place.ack(consumer, [got])
    assert place.client.call("receive", name=consumer) == []
    place.settled()


def test_a_client_has_the_topics_and_groups_of_its_namespace(place: Place) -> None:
    topic, group = place.topic, place.group
    place.topic, place.group = f"{NAMESPACE}%{topic}", f"{NAMESPACE}%{group}"
    place.create()
    place.topic, place.group = topic, group
    producer, consumer = place.open("producer", namespace=NAMESPACE), place.open("simple", namespace=NAMESPACE)
    [message_id] = place.send(producer, "ours")
    [got] = place.receive(consumer, 1)
    assert (got["id"], got["body"], got["topic"]) == (message_id, "ours", topic)
    place.ack(consumer, [got])
    place.group = f"{NAMESPACE}%{group}"
    place.settled()


def test_refused_sends_have_their_codes(place: Place) -> None:
    place.create()
    producer = place.open("producer")

    def code(**fields: Any) -> int | None:
        message = {"topic": place.topic, "body": "x", **fields}
        return refused(place.client, "send", name=producer, messages=[message])

    assert code(key="two words") == Code.ILLEGAL_MESSAGE_KEY
    # the Python client writes the code to its log only
    unknown = None if place.client.language == "python" else Code.TOPIC_NOT_FOUND
    assert code(topic=f"{place.topic}-unknown") == unknown
    # both clients see from the topic's route that it takes no ordered messages
    assert code(group="g") is None


def test_a_body_may_have_4_mib_and_may_be_compressed(place: Place, clients: Callable[[str], OfficialClient]) -> None:
    place.create()
    producer = place.open("producer")
    place.send(producer, "x", times=BODY_MAX)
    larger = {"topic": place.topic, "body": "x", "times": BODY_MAX + 1}
    # both clients refuse the body themselves, by the limit in the gateway's settings
    assert refused(place.client, "send", name=producer, messages=[larger]) is None
    # Node's gRPC receives at most 4 MiB in all, so the Python client receives the messages of both
    reader = place.beside(clients("python"))
    consumer = reader.open("simple")
    [got] = reader.receive(consumer, 1)
    assert (got["size"], got["corrupted"]) == (BODY_MAX, False)
    reader.ack(consumer, [got])
    if place.client.language == "python":
        sent = place.client.call("send_compressed", name=producer, topic=place.topic, body="small again")
        assert sent == Code.OK
        [got] = reader.receive(consumer, 1)
        assert (got["body"], got["corrupted"]) == ("small again", False)


def test_a_lease_is_changed_ends_and_is_settled_twice(place: Place) -> None:
    place.create()
    producer, consumer = place.open("producer"), place.open("simple")
    place.send(producer, "again")
    [first] = place.receive(consumer, 1)
    changed = place.client.call("change_invisible", name=consumer, handle=first["handle"], seconds=1)
    assert changed != first["handle"]
    [second] = place.receive(consumer, 1, invisible_s=1)
    [third] = place.receive(consumer, 1)
    assert [one["attempt"] for one in (first, second, third)] == [1, 2, 3]
    place.ack(consumer, [third])
    place.ack(consumer, [third])
    code = refused(place.client, "ack", name=consumer, handle=third["handle"], other="rubbish")
    assert code == Code.INVALID_RECEIPT_HANDLE
    place.settled()


def test_a_message_without_an_ack_becomes_a_dead_letter(place: Place) -> None:
    place.create(retry_max_times=1)
    producer, consumer = place.open("producer"), place.open("simple")
    place.send(producer, "bad")
    for attempt in (1, 2):
        [got] = place.receive(consumer, 1, invisible_s=1)
        assert got["attempt"] == attempt
    assert place.client.call("receive", name=consumer) == []
    place.settled(dead_letters=1)
    [letter] = place.mq.admin.dead_letters(place.group).letters()
    assert letter.message.body == b"bad"


def test_filters_select_messages(place: Place) -> None:
    place.create()
    producer = place.open("producer")
    for number in range(9):
        place.send(producer, f"{number}", tag="abc"[number % 3], properties={"n": f"{number}"})
    wanted = {"a || c": [0, 2, 3, 5, 6, 8], "*": list(range(9)), "n > 5": [6, 7, 8]}
    for index, (expression, numbers) in enumerate(wanted.items()):
        place.group = f"{place.topic}-g{index}"
        consumer = place.open("simple", expression=expression, sql="n" in expression)
        got = place.receive(consumer, len(numbers))
        assert sorted(int(one["body"]) for one in got) == numbers
        place.ack(consumer, got)


def test_a_simple_consumer_receives_a_message_group_in_order(place: Place) -> None:
    place.create("FIFO")
    producer, consumer = place.open("producer"), place.open("simple")
    numbers = [f"{number}" for number in range(20)]
    place.send(producer, *numbers, group="customer-7")
    got: list[str] = []

    def arrived() -> bool:
        part = place.client.call("receive", name=consumer, count=5)
        assert {one["group"] for one in part} <= {"customer-7"}
        got.extend(one["body"] for one in part)
        place.ack(consumer, part)
        return len(got) >= len(numbers)

    eventually(arrived, "20 messages", ARRIVES_S)
    assert got == numbers


def test_a_push_consumer_gets_each_message_once(place: Place) -> None:
    place.create()
    producer, consumer = place.open("producer"), place.open("push")
    bodies = [f"{number}" for number in range(100)]
    place.send(producer, *bodies)
    place.consumed(consumer, len(bodies))
    place.settled()
    got = place.client.call("records", name=consumer)
    assert sorted(one["body"] for one in got) == sorted(bodies)
    assert {one["attempt"] for one in got} == {1}


def test_a_push_consumer_that_fails_gets_a_message_again_until_it_is_a_dead_letter(place: Place) -> None:
    place.create(retry_max_times=2, retry_intervals_s=(1.0,))
    # the listener fails at each message's first attempt, and the other one at each attempt
    producer, consumer = place.open("producer"), place.open("push", failures=1)
    place.send(producer, "late")
    got = place.consumed(consumer, 2)
    assert [(one["body"], one["attempt"]) for one in got] == [("late", 1), ("late", 2)]
    place.settled()
    other = Place(place.mq, place.client, place.endpoints, "dead-letter")
    other.create(retry_max_times=2, retry_intervals_s=(1.0,))
    producer, consumer = other.open("producer"), other.open("push", failures=99)
    other.send(producer, "never")
    other.settled(dead_letters=1)
    got = other.client.call("records", name=consumer)
    assert [(one["body"], one["attempt"]) for one in got] == [("never", 1), ("never", 2), ("never", 3)]


def test_a_push_consumer_gets_each_message_group_in_order(place: Place) -> None:
    place.create("FIFO")
    producer, consumer = place.open("producer"), place.open("push")
    for number in range(30):
        place.send(producer, f"{number}", group="abc"[number % 3])
    got = place.consumed(consumer, 30)
    for group in range(3):
        assert [int(one["body"]) for one in got if one["group"] == "abc"[group]] == list(range(group, 30, 3))
    place.settled()


def test_a_message_that_fails_keeps_its_place_in_its_group_until_it_succeeds_or_is_a_dead_letter(place: Place) -> None:
    """Both clients repeat a failed message of a message group themselves, before the group's next message."""
    dead = Place(place.mq, place.client, place.endpoints, "fifo-dead-letters")
    for one, failures in ((place, 1), (dead, 99)):
        one.create("FIFO", retry_max_times=1, retry_intervals_s=(1.0,))
        one.send(one.open("producer"), "0", "1", group="customer-7")
        one.open("push", failures=failures)
    for one, letters in ((place, 0), (dead, 2)):
        got = one.consumed(f"{one.topic}-push", 4)
        assert [record["body"] for record in got] == ["0", "0", "1", "1"]
        one.settled(dead_letters=letters)


def test_a_message_waits_until_the_former_message_of_its_group_is_settled(place: Place) -> None:
    place.create("FIFO")
    producer, consumer = place.open("producer"), place.open("simple")
    place.send(producer, "0", "1", group="customer-7")
    second = f"{place.topic}-second"
    where = {"endpoints": place.endpoints, "group": place.group, "topic": place.topic}
    place.client.call("open_simple", name=second, **where)
    [first] = place.receive(consumer, 1, count=1)
    assert first["body"] == "0"
    assert place.client.call("receive", name=second) == []
    place.ack(consumer, [first])
    [got] = place.receive(second, 1)
    assert (got["body"], got["attempt"]) == ("1", 1)
    place.ack(second, [got])
    place.settled()


def test_a_delayed_message_is_due_and_another_one_is_recalled(place: Place) -> None:
    place.create("DELAY")
    producer, consumer = place.open("producer"), place.open("simple")
    due_s = int(time.time()) + 3
    times = {"later": due_s, "never": due_s + 3600}
    messages = [{"topic": place.topic, "body": body, "deliver_at_s": at_s} for body, at_s in times.items()]
    later, never = place.client.call("send", name=producer, messages=messages)
    recall = {"name": producer, "topic": place.topic, "handle": never["recall"]}
    # a client that got no answer recalls the message again
    assert [place.client.call("recall", **recall) for _ in range(2)] == [never["id"]] * 2
    [got] = place.receive(consumer, 1)
    assert (got["id"], got["body"]) == (later["id"], "later")
    assert got["at_ms"] >= due_s * 1000
    place.ack(consumer, [got])
    with pytest.raises(OfficialError):
        place.client.call("recall", name=producer, topic=place.topic, handle=later["recall"])
    place.settled()


def test_transactions_are_committed_rolled_back_and_checked(
    mq: raymq.Client, gateway: RunningGateway, clients: Callable[[str], OfficialClient]
) -> None:
    """The checks of both clients take about 30 s, at the same time. The Python producer commits, the Node producer
    rolls back."""
    places = [Place(mq, clients(language), gateway.endpoints, "transactions") for language in LANGUAGES]
    outcomes = {"python": "COMMIT", "node": "ROLLBACK"}
    for place in places:
        place.create("TRANSACTION")
        producer = place.open("producer", outcome=outcomes[place.client.language])
        place.open("simple")
        for body, end in (("committed", "commit"), ("dropped", "rollback"), ("open", None)):
            message = {"topic": place.topic, "body": body}
            place.client.call("transact", name=producer, message=message, end=end)
    for place in places:
        producer, consumer = f"{place.topic}-producer", f"{place.topic}-simple"
        assert place.consumed(producer, 1)[0] == "open"
        wanted = {"committed", "open"} if place.client.language == "python" else {"committed"}
        got = place.receive(consumer, len(wanted))
        assert {one["body"] for one in got} == wanted
        place.ack(consumer, got)
        assert place.client.call("receive", name=consumer) == []
        assert set(place.client.call("records", name=producer)) == {"open"}


def test_no_message_is_lost_when_a_gateway_is_killed_under_load(
    mq: raymq.Client,
    gateway: RunningGateway,
    clients: Callable[[str], OfficialClient],
    record_property: Callable[[str, object], None],
) -> None:
    """A message may arrive twice only if it was sent or consumed while a gateway was killed."""
    places = [Place(mq, clients(language), gateway.endpoints, "killed") for language in LANGUAGES]
    for place in places:
        place.start_load()

    def more_arrive() -> None:
        """Wait until each consumer has new messages."""
        for place in places:
            place.more_consumed(MESSAGES_BETWEEN_KILLS)

    outages = []
    for _ in range(KILLS):
        more_arrive()
        outages.append(gateway.kill())
    more_arrive()
    report = [check_load(place, outages) for place in places]
    gaps = ", ".join(f"{(served - killed) / 1000:.1f} s" for killed, served in outages)
    record_property(SUMMARY, f"{'; '.join(report)}; another process served after {gaps}")
