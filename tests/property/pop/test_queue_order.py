"""Tests of the order in which receives read their queues: with random topics, each queue is read once, and each level
of a PRIORITY topic is read first within the promised number of receives."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis.strategies import booleans, dictionaries, integers, lists, sampled_from

from actors.core.pop.queue_order import COUNTS_MAX, RETRIES_FIRST, QueueOrder
from actors.core.pop.receive import TopicQueue
from raymq.client.consumer.levels import STRICT_TURNS
from raymq.common.names import retry_topic
from tests.support.cases import examples

GROUP, RETRY = "g", retry_topic("g")
SEEDS = integers(0, 2**32)


def drawn_by(seed: int) -> QueueOrder:
    return QueueOrder(random.Random(seed).randrange)


def queues_of(topic: str, count: int) -> list[TopicQueue]:
    return [(topic, queue_id) for queue_id in range(count)]


def levels_of(order: list[TopicQueue], topic: str = "tasks") -> list[int]:
    return [queue_id for name, queue_id in order if name == topic]


@settings(max_examples=examples(300), deadline=None)
@given(
    topics=dictionaries(sampled_from(["a", "b", "c", "d"]), integers(0, 12), max_size=4),
    leveled=lists(sampled_from(["a", "b", "c", "d"]), unique=True),
    retries=integers(0, 3),
    leases=lists(booleans(), min_size=1, max_size=30),
    seed=SEEDS,
)
def test_each_queue_is_read_once_and_the_retry_topic_first_or_last(
    topics: dict[str, int], leveled: list[str], retries: int, leases: list[bool], seed: int
) -> None:
    order = drawn_by(seed)
    others = [queue for topic, count in topics.items() for queue in queues_of(topic, count)]
    every = others + queues_of(RETRY, retries)
    for leased in leases:
        found = order.order(GROUP, every, leveled)
        assert sorted(found) == sorted(every)
        at = [place for place, queue in enumerate(found) if queue[0] == RETRY]
        assert at in (list(range(retries)), list(range(len(others), len(every))))
        rest = [queue for queue in found if queue[0] != RETRY]
        # the topics take their places from a random queue on, whichever of them have levels
        places = [topic for topic, _ in rest]
        names = [topic for topic, _ in others]
        assert any(places == names[start:] + names[:start] for start in range(len(others) or 1))
        if leased:
            order.leased(GROUP, leveled)


@settings(max_examples=examples(300), deadline=None)
@given(levels=integers(1, 12), receives=integers(0, 100), seed=SEEDS)
def test_of_four_turns_three_are_strict_and_each_level_is_first_in_time(levels: int, receives: int, seed: int) -> None:
    order = drawn_by(seed)
    every = queues_of("tasks", levels) + queues_of(RETRY, 1)
    descending = list(range(levels - 1, -1, -1))
    for _ in range(receives):
        order.leased(GROUP, ["tasks"])
    firsts: list[int] = []
    fair: list[int] = []
    for turn in range(2 * (STRICT_TURNS + 1) * max(levels - 1, 1)):
        found = order.order(GROUP, every, ["tasks"])
        places = levels_of(found)
        firsts.append(places[0])
        if places != descending:
            fair.append(turn)
            assert [level for level in descending if level != places[0]] == places[1:]
            assert found[-1][0] == RETRY, "a fair turn must not spend its receive on retries"
        order.leased(GROUP, ["tasks"])
    assert all(later - earlier == STRICT_TURNS + 1 for earlier, later in pairwise(fair))
    bound = max((STRICT_TURNS + 1) * (levels - 1), 1)
    for start in range(len(firsts) - bound + 1):
        assert set(firsts[start : start + bound]) == set(range(levels))


@settings(max_examples=examples(200), deadline=None)
@given(busy=lists(booleans(), min_size=2, max_size=10), batch=integers(1, 32), seed=SEEDS)
def test_no_level_starves_and_the_highest_level_with_messages_gets_most(
    busy: list[bool], batch: int, seed: int
) -> None:
    """Levels that are `busy` always have more messages than a receive takes; the other levels are empty."""
    order, levels = drawn_by(seed), len(busy)
    if not any(busy):
        return
    every = queues_of("tasks", levels)
    served: Counter[int] = Counter()
    laps = 5
    receives = laps * (STRICT_TURNS + 1) * (levels - 1)
    for _ in range(receives):
        first = next(level for level in levels_of(order.order(GROUP, every, ["tasks"])) if busy[level])
        served[first] += batch
        order.leased(GROUP, ["tasks"])
    highest = max(level for level in range(levels) if busy[level])
    assert served[highest] * (STRICT_TURNS + 1) >= receives * batch * STRICT_TURNS
    assert all(served[level] >= laps * batch for level in range(levels) if busy[level])


@given(seed=SEEDS)
@settings(max_examples=examples(50), deadline=None)
def test_a_receive_that_leases_nothing_is_no_turn(seed: int) -> None:
    order = drawn_by(seed)
    every = queues_of("tasks", 10)
    assert len({tuple(order.order(GROUP, every, ["tasks"])) for _ in range(20)}) == 1


def test_groups_and_topics_count_their_turns_apart() -> None:
    order = drawn_by(1)
    every = queues_of("tasks", 10) + queues_of("mails", 10)
    before = [order.order(group, every, ["tasks", "mails"]) for group in ("g", "h")]
    for _ in range(STRICT_TURNS + 1):
        order.leased("g", ["tasks"])
    assert levels_of(order.order("h", every, ["tasks", "mails"])) == levels_of(before[1])
    assert levels_of(order.order("g", every, ["tasks", "mails"]), "mails") == levels_of(before[0], "mails")


def test_the_counts_are_bounded_and_a_forgotten_count_does_not_begin_with_strict_turns_only() -> None:
    order = drawn_by(2)
    for number in range(COUNTS_MAX + 100):
        order.leased(f"group-{number}", ["tasks"])
    assert len(order._turns) == COUNTS_MAX
    fair = 0
    for _ in range(4000):
        order._turns.clear()
        fair += levels_of(order.order(GROUP, queues_of("tasks", 10), ["tasks"]))[0] != 9
    assert 800 < fair < 1200


def test_an_ordinary_topic_begins_at_each_queue_and_one_receive_of_five_begins_with_retries() -> None:
    order = drawn_by(3)
    found = [order.order(GROUP, queues_of("orders", 4) + queues_of(RETRY, 1), []) for _ in range(5000)]
    retries = sum(one[0][0] == RETRY for one in found)
    assert 800 < retries < 1200
    assert RETRIES_FIRST == 5
    starts = Counter(levels_of(one, "orders")[0] for one in found)
    assert all(1000 < starts[queue_id] < 1500 for queue_id in range(4))
