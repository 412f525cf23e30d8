"""Tests of the order in which a consumer that owns queues reads the levels of PRIORITY topics."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, sampled_from, sets

from raymq.client.consumer.levels import STRICT_TURNS, LevelTurns
from raymq.common.message import MessageQueue
from tests.support.cases import examples

TOPICS = ("orders", "tasks", "mails")


def queue(topic: str, broker_name: str, level: int) -> MessageQueue:
    return MessageQueue(topic, broker_name, level)


def order(turns: LevelTurns, ready: list[MessageQueue], held: list[MessageQueue]) -> list[MessageQueue]:
    return turns.order(ready, lambda one: one, held)


QUEUES = sets(
    sampled_from([queue(topic, broker, level) for topic in TOPICS for broker in "ab" for level in range(5)]),
    max_size=20,
)


@settings(max_examples=examples(200), deadline=None)
@given(held=QUEUES, empty=QUEUES, leveled=sets(sampled_from(TOPICS)), seed=integers(0, 2**32), turns=integers(1, 40))
def test_each_queue_is_read_once_and_other_topics_keep_their_places(
    held: set[MessageQueue], empty: set[MessageQueue], leveled: set[str], seed: int, turns: int
) -> None:
    chance = random.Random(seed)
    ready = sorted(held - empty)
    chance.shuffle(ready)
    levels = LevelTurns(chance.randrange)
    for topic in leveled:
        levels.set(topic, has_levels=True)
    assert bool(levels) is bool(leveled)
    for _ in range(turns):
        found = order(levels, ready, sorted(held))
        assert sorted(found) == sorted(ready)
        assert [one.topic for one in found] == [one.topic for one in ready]
        assert [one for one in found if one.topic not in leveled] == [one for one in ready if one.topic not in leveled]
        levels.took(TOPICS)


@settings(max_examples=examples(200), deadline=None)
@given(busy=lists(booleans(), min_size=2, max_size=10), seed=integers(0, 2**32))
def test_three_turns_of_four_begin_with_the_highest_level_and_no_level_starves(busy: list[bool], seed: int) -> None:
    held = [queue("tasks", broker, level) for broker in "ab" for level in range(len(busy))]
    ready = [one for one in held if busy[one.queue_id]]
    levels = LevelTurns(random.Random(seed).randrange)
    levels.set("tasks", has_levels=True)
    bound = (STRICT_TURNS + 1) * (len(busy) - 1)
    firsts = []
    for _ in range(bound if ready else 0):
        found = [one.queue_id for one in order(levels, ready, held)]
        firsts.append(found[0])
        rest = [level for level in found if level != found[0]]
        assert rest == sorted(rest, reverse=True)
        assert found.count(found[0]) == 2, "the queues of a level in both broker groups follow one another"
        levels.took(["tasks"])
    if ready:
        highest = max(level for level, is_busy in enumerate(busy) if is_busy)
        assert set(firsts) == {level for level, is_busy in enumerate(busy) if is_busy}
        assert firsts.count(highest) >= bound * STRICT_TURNS // (STRICT_TURNS + 1)


def test_queues_of_one_level_keep_their_order_and_a_topic_may_lose_its_levels() -> None:
    held = [queue("tasks", broker, level) for broker in "ba" for level in range(2)]
    levels = LevelTurns(lambda count: 0)
    levels.set("tasks", has_levels=True)
    levels.set("tasks", has_levels=True)
    assert order(levels, held, held) == [held[1], held[3], held[0], held[2]]
    levels.set("tasks", has_levels=False)
    assert not levels
    assert order(levels, held, held) == held


@pytest.mark.parametrize("topics", [[], ["orders"]])
def test_a_turn_without_messages_of_the_topic_does_not_count(topics: list[str]) -> None:
    held = [queue("tasks", "a", level) for level in range(2)]
    levels = LevelTurns(lambda count: 0)
    levels.set("tasks", has_levels=True)
    for _ in range(8):
        levels.took(topics)
        assert order(levels, held, held)[0].queue_id == 1
