"""Tests of how a producer takes a topic's queues in turn, and of the destinations that a message can name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymq.client.producer.queue_selector import (
    TURN_MAX_MESSAGES,
    TURN_MAX_S,
    Destination,
    QueueTurns,
    select_queue_by_hash,
    select_queue_by_random,
)
from raymq.client.producer.senders.latency_fault import BrokerFaults
from raymq.common.errors import InvalidArgumentError, NoPermissionError, ServiceNotAvailableError
from raymq.common.message import Message, MessageQueue
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from tests.support.clients.fakes import topic_route

MESSAGE = Message("orders", b"x")


@pytest.fixture
def faults():
    return BrokerFaults(latency_enabled=True)


def turns(
    faults: BrokerFaults, route: TopicRoute, count: int, step_s: float = 1.0, size: int = 1
) -> list[MessageQueue]:
    turn = QueueTurns(faults)
    return [turn.next(route, size, number * step_s) for number in range(count)]


def test_a_turn_is_many_messages_long(faults):
    chosen = turns(faults, topic_route(a=3), TURN_MAX_MESSAGES * 6, step_s=0.0)
    turns_taken = [chosen[start : start + TURN_MAX_MESSAGES] for start in range(0, len(chosen), TURN_MAX_MESSAGES)]
    assert all(len(set(turn)) == 1 for turn in turns_taken)
    order = [turn[0].queue_id for turn in turns_taken]
    assert sorted(order[:3]) == [0, 1, 2]
    assert order[:3] == order[3:]


def test_a_batch_uses_up_its_length_of_a_turn(faults):
    chosen = turns(faults, topic_route(a=3), 6, step_s=0.0, size=TURN_MAX_MESSAGES // 2)
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3] != chosen[4]


def test_a_slow_sender_spreads_its_messages_one_by_one(faults):
    chosen = turns(faults, topic_route(a=3), 9, step_s=TURN_MAX_S)
    assert chosen[:3] == chosen[3:6] == chosen[6:]
    assert len(set(chosen[:3])) == 3


def test_a_turn_ends_when_the_route_changes(faults):
    turn = QueueTurns(faults)
    turn.next(topic_route(a=1), 1, 0.0)
    assert turn.next(topic_route(b=1), 1, 0.0).broker_name == "b"


def test_producers_do_not_all_start_with_the_same_queue(faults):
    assert len({turns(faults, topic_route(a=8), 1)[0] for _ in range(100)}) > 1


def test_an_unavailable_broker_is_left_out_while_there_are_others(faults):
    faults.answered("a", 15000.0, 0.0)
    chosen = turns(faults, topic_route(a=2, b=2), 8)
    assert {queue.broker_name for queue in chosen} == {"b"}
    assert len(set(chosen)) == 2


def test_the_rows_of_a_table_go_to_the_queue_with_the_fewest_of_an_available_broker(faults):
    route = topic_route(a=2, b=2)
    rows = {queue: 10 + number for number, queue in enumerate(route.publish_queues)}
    turn = QueueTurns(faults)
    assert turn.fewest(route, rows, 0.0) == route.publish_queues[0]
    faults.failed(route.publish_queues[0].broker_name, 0.0)
    assert turn.fewest(route, rows, 0.0) == route.publish_queues[2]


def test_a_slow_broker_is_better_than_one_without_an_answer_and_any_is_better_than_none(faults):
    faults.failed("a", 0.0)
    faults.answered("b", 15000.0, 0.0)
    assert {queue.broker_name for queue in turns(faults, topic_route(a=2, b=2), 8, step_s=0.5)} == {"b"}
    faults.failed("b", 0.0)
    assert {queue.broker_name for queue in turns(faults, topic_route(a=2, b=2), 4, step_s=0.5)} == {"a", "b"}


def test_another_broker_is_reachable_and_not_the_failed_broker(faults):
    turn, route = QueueTurns(faults), topic_route(a=2, b=2, c=2)
    for _ in range(20):
        assert turn.next_at_another_broker(route, "a", 0.0).broker_name in ("b", "c")
    faults.answered("b", 15000.0, 0.0)
    for _ in range(20):
        assert turn.next_at_another_broker(route, "a", 0.0).broker_name == "c"
    faults.failed("c", 0.0)
    assert turn.next_at_another_broker(route, "a", 0.0).broker_name == "b"
    faults.failed("b", 0.0)
    assert turn.next_at_another_broker(route, "a", 0.0) is None
    assert turn.next_at_another_broker(topic_route(a=2), "a", 0.0) is None


# Tests of the destinations that a message can name


@pytest.mark.parametrize(
    ("key", "hashed"),
    [(2**31 - 1, 2**31 - 1), (-(2**31), 2**31), (2**31, 2**31), (2**32, 1), (2**32 + 5, 4), (-(2**63), 2**31)],
)
def test_a_number_counts_as_javas_integer_or_long(key, hashed):
    queues = topic_route(a=7).publish_queues
    assert select_queue_by_hash(queues, MESSAGE, key).queue_id == hashed % 7


@pytest.mark.parametrize("key", [1.5, True, b"x", 2**63])
def test_a_key_of_another_type_is_refused(key):
    with pytest.raises(InvalidArgumentError, match="sharding_key must be"):
        Destination(sharding_key=key).select(topic_route(a=7), MESSAGE)


def test_the_random_selector_chooses_any_queue():
    queues = topic_route(a=3).publish_queues
    assert {select_queue_by_random(queues, MESSAGE, None) for _ in range(200)} == set(queues)


def test_a_selector_gets_the_queues_the_message_and_the_argument():
    route, seen = topic_route(a=3), []

    def last(queues, message, argument):
        seen.append((queues, message, argument))
        return queues[-1]

    assert Destination(selector=last, argument=9).select(route, MESSAGE) == MessageQueue("orders", "a", 2)
    assert seen == [(route.publish_queues, MESSAGE, 9)]


@pytest.mark.parametrize("chosen", [None, MessageQueue("orders", "a", 3), MessageQueue("other", "a", 0), "a"])
def test_a_selector_that_chooses_none_of_the_queues_is_an_error(chosen):
    with pytest.raises(InvalidArgumentError, match="not one of the queues"):
        Destination(selector=lambda *arguments: chosen).select(topic_route(a=3), MESSAGE)


def test_a_queue_can_be_named():
    queue = MessageQueue("orders", "b", 1)
    assert Destination(queue=queue).select(topic_route(a=3, b=2), MESSAGE) == queue


@pytest.mark.parametrize(
    ("queue", "error", "what"),
    [
        (MessageQueue("other", "a", 0), InvalidArgumentError, "belongs to another topic"),
        (MessageQueue("orders", "a", 3), InvalidArgumentError, "does not exist: the topic has 3"),
        (MessageQueue("orders", "a", -1), InvalidArgumentError, "queue_id must be 0 to"),
        (MessageQueue("orders", "z", 0), ServiceNotAvailableError, "no running broker"),
        (MessageQueue("orders", "r", 0), NoPermissionError, "is not writable"),
    ],
)
def test_a_queue_that_cannot_be_written_is_refused(queue, error, what):
    brokers = {name: BrokerData("raymq", name, {0: f"storage-{name}-0"}) for name in "ar"}
    route = TopicRoute("orders", brokers, (QueueData("a", 3, 3, 6), QueueData("r", 3, 3, 4)))
    with pytest.raises(error, match=what):
        Destination(queue=queue).select(route, MESSAGE)


def test_a_topic_that_may_only_be_read_is_refused(faults):
    route = TopicRoute("orders", {"a": BrokerData("c", "a", {0: "s"})}, (QueueData("a", 3, 3, 4),))
    for attempt in (
        lambda: QueueTurns(faults).next(route, 1, 0.0),
        lambda: Destination(sharding_key="x").select(route, MESSAGE),
    ):
        with pytest.raises(NoPermissionError, match="is not writable"):
            attempt()
    away = TopicRoute("orders", {"a": BrokerData("c", "a", {1: "s"})}, (QueueData("a", 3, 3, 6),))
    with pytest.raises(ServiceNotAvailableError, match="no writable queue now"):
        QueueTurns(faults).next(away, 1, 0.0)


def test_two_destinations_are_one_too_many():
    with pytest.raises(InvalidArgumentError, match="pass only one of them"):
        Destination(sharding_key="x", queue=MessageQueue("orders", "a", 0))
    with pytest.raises(InvalidArgumentError, match="passed to a selector"):
        Destination(argument=1)


@pytest.mark.parametrize("present", ["a", "b", "ab"])
def test_a_key_has_one_queue_whichever_brokers_a_route_lists(present):
    whole = topic_route(a=3, b=2)
    partial = replace(
        topic_route(**{name: {"a": 3, "b": 2}[name] for name in present}), layout="a:3;b:2", complete=False
    )
    for number in range(50):
        destination = Destination(sharding_key=f"user-{number}")
        assert destination.select(partial, MESSAGE) == destination.select(whole, MESSAGE)
    seen = []
    Destination(selector=lambda queues, *_: seen.append(queues) or queues[0]).select(partial, MESSAGE)
    assert seen == [whole.publish_queues]
    queue = MessageQueue("orders", "b", 1)
    assert Destination(queue=queue).select(partial, MESSAGE) == queue


def test_queues_of_a_broker_that_is_away_take_no_turns(faults):
    partial = replace(topic_route(b=2), layout="a:3;b:2")
    assert {queue.broker_name for queue in turns(faults, partial, 20)} == {"b"}


def test_while_it_is_not_known_which_queues_a_topic_has_no_key_is_given_one():
    partial = replace(topic_route(a=3), complete=False)
    for destination in (Destination(sharding_key="x"), Destination(selector=select_queue_by_random)):
        with pytest.raises(ServiceNotAvailableError, match="are not known yet"):
            destination.select(partial, MESSAGE)
    assert Destination(queue=MessageQueue("orders", "a", 0)).select(partial, MESSAGE).queue_id == 0


def test_a_key_whose_broker_must_not_be_written_is_refused_and_goes_nowhere_else():
    route = replace(topic_route(a=1, b=1), queues=(QueueData("a", 1, 1, 4), QueueData("b", 1, 1, 6)), layout="a:1;b:1")
    outcomes = []
    for key in range(2):
        try:
            outcomes.append(Destination(sharding_key=key).select(route, MESSAGE).broker_name)
        except NoPermissionError:
            outcomes.append("refused")
    assert outcomes == ["refused", "b"]
