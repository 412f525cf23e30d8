"""Tests of the STICKY strategy over several topics, compared with all possible assignments (plans) for small groups,
and with the AVG strategy for large groups.

Three numbers judge each plan, the first with the highest priority: whether the members' shares of any topic differ by
more than one, the sum of the squares of the members' totals, and the number of moved queues. STICKY must reach the
minimum of all plans.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings, strategies as st

from actors.core.rebalance.allocation import allocate_averagely
from actors.core.rebalance.sticky import allocate_sticky
from raymq.common.message import MessageQueue
from tests.support.cases import examples

Queues = dict[str, list[MessageQueue]]
Subscribers = dict[str, list[str]]
Owners = dict[MessageQueue, str]


def make_queues(counts: dict[str, int]) -> Queues:
    return {name: [MessageQueue(name, "b", number) for number in range(count)] for name, count in counts.items()}


@st.composite
def groups(draw, topics: int, members: int, queues: int) -> tuple[Queues, Subscribers, Owners]:
    """Hypothesis strategy for topics, their subscribers, and the present owner of each queue. An owner may have left
    the group, and a queue may have no owner."""
    names = [f"t{number}" for number in range(draw(st.integers(1, topics)))]
    people = [f"m{number}" for number in range(draw(st.integers(1, members)))]
    by_topic = make_queues({name: draw(st.integers(1, queues)) for name in names})
    subscribers = {
        name: sorted(draw(st.sets(st.sampled_from(people), min_size=1, max_size=len(people)))) for name in names
    }
    everyone = st.sampled_from([*people, "gone", ""])
    present = {queue: draw(everyone) for some in by_topic.values() for queue in some}
    return by_topic, subscribers, {queue: member for queue, member in present.items() if member}


def owners(shares: dict[str, list[MessageQueue]]) -> Owners:
    return {queue: member for member, share in shares.items() for queue in share}


def uneven(counts: Counter[str], members: list[str]) -> int:
    sizes = [counts[member] for member in members]
    return max(sizes) - min(sizes)


def moved(after: Owners, present: Owners) -> int:
    """Return the number of queues whose present owner loses the queue. Queues without an owner do not count, because
    every plan assigns them."""
    return sum(after[queue] != member for queue, member in present.items())


def squares(totals: Counter[str]) -> int:
    return sum(total * total for total in totals.values())


def best_of_all_plans(queues: Queues, subscribers: Subscribers, present: Owners) -> tuple[int, int]:
    """Return the smallest pair (sum of squares, moves) among all assignment plans that are balanced in each topic.

    In each topic a plan chooses the members that get one queue more than the others. The sum adds the squares of the
    members' numbers of queues. A plan's moves are the number of queues that members hold beyond their new shares.
    """
    choices = []
    for name, some in queues.items():
        size, over = divmod(len(some), len(subscribers[name]))
        held = Counter(present.get(queue) for queue in some)
        options = []
        for extra in combinations(subscribers[name], over):
            share = Counter({member: size + (member in extra) for member in subscribers[name]})
            kept = sum(min(held[member], share[member]) for member in subscribers[name])
            options.append((share, sum(queue in present for queue in some) - kept))
        choices.append(options)
    plans = []
    for plan in product(*choices):
        totals: Counter[str] = Counter()
        for share, _ in plan:
            totals.update(share)
        plans.append((squares(totals), sum(moves for _, moves in plan)))
    return min(plans)


def judge(after: Owners, subscribers: Subscribers, present: Owners) -> tuple[int, int]:
    return squares(Counter(after.values())), moved(after, present)


@settings(max_examples=examples(600), deadline=None, derandomize=True)
@given(groups(topics=3, members=4, queues=6))
def test_no_equally_even_plan_moves_fewer_queues(group):
    queues, subscribers, present = group
    after = owners(allocate_sticky(queues, subscribers, present, {}))
    assert judge(after, subscribers, present) == best_of_all_plans(queues, subscribers, present)


def test_the_count_of_all_plans_equals_trying_each_single_assignment():
    """`best_of_all_plans` returns the best plan although it only counts the queues of each member. The test tries every
    assignment of each single queue to a subscriber, and compares the best of these assignments with the function's
    result."""
    chance = random.Random(7)
    for _ in range(60):
        queues = make_queues({"t0": chance.randint(1, 4), "t1": chance.randint(1, 3)})
        subscribers = {name: chance.sample(["m0", "m1", "m2"], chance.randint(1, 3)) for name in queues}
        flat = [queue for some in queues.values() for queue in some]
        present = {queue: chance.choice(["m0", "m1", "m2", "gone"]) for queue in flat if chance.random() < 0.8}
        verdicts = []
        for plan in product(*(subscribers[queue.topic] for queue in flat)):
            after = dict(zip(flat, plan, strict=True))
            if all(
                uneven(Counter(after[queue] for queue in some), subscribers[name]) <= 1 for name, some in queues.items()
            ):
                verdicts.append(judge(after, subscribers, present))
        assert min(verdicts) == best_of_all_plans(queues, subscribers, present)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(groups(topics=6, members=8, queues=20))
def test_every_queue_has_one_owner_that_subscribes_and_shares_are_even_in_every_topic(group):
    queues, subscribers, present = group
    shares = allocate_sticky(queues, subscribers, present, {})
    given_out = sorted(queue for share in shares.values() for queue in share)
    assert given_out == sorted(queue for some in queues.values() for queue in some)
    after = owners(shares)
    for name, some in queues.items():
        counts = Counter(after[queue] for queue in some)
        assert set(counts) <= set(subscribers[name])
        assert uneven(counts, subscribers[name]) <= 1


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(groups(topics=6, members=8, queues=20))
def test_totals_are_at_least_as_even_as_averagely(group):
    queues, subscribers, present = group
    averagely: Counter[str] = Counter()
    for name, some in queues.items():
        averagely.update({member: len(share) for member, share in allocate_averagely(some, subscribers[name]).items()})
    after = Counter(owners(allocate_sticky(queues, subscribers, present, {})).values())
    assert squares(after) <= squares(averagely)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(groups(topics=6, members=8, queues=20))
def test_totals_differ_by_one_at_most_if_all_members_subscribe_to_the_same_topics(group):
    queues, _, present = group
    everyone = ["m0", "m1", "m2", "m3", "m4"]
    after = Counter(owners(allocate_sticky(queues, dict.fromkeys(queues, everyone), present, {})).values())
    assert uneven(after, everyone) <= 1


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(groups(topics=5, members=6, queues=12), st.randoms(use_true_random=False))
def test_the_plan_does_not_change_while_it_is_carried_out(group, chance: random.Random):
    """The assignment plan stays the same while members carry it out. The test computes the plan again when some queues
    have their new owner, some have no owner, and some have the old owner."""
    queues, subscribers, present = group
    plan = owners(allocate_sticky(queues, subscribers, present, {}))
    now = dict(present)
    for queue in sorted(plan):
        match chance.randrange(3):
            case 0 if plan[queue] != present.get(queue):
                now.pop(queue, None)
            case 1:
                now[queue] = plan[queue]
    assert owners(allocate_sticky(queues, subscribers, now, plan)) == plan


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(groups(topics=5, members=6, queues=12), st.randoms(use_true_random=False))
def test_the_order_of_topics_queues_and_members_does_not_matter(group, chance: random.Random):
    queues, subscribers, present = group
    names = list(queues)
    chance.shuffle(names)
    shuffled = {name: chance.sample(queues[name], len(queues[name])) for name in names}
    people = {name: chance.sample(subscribers[name], len(subscribers[name])) for name in names}
    assert allocate_sticky(shuffled, people, present, {}) == allocate_sticky(queues, subscribers, present, {})


@pytest.mark.parametrize("members", [3, 10, 40])
def test_a_join_and_a_death_move_the_minimum_number_of_queues(members):
    """A join moves only as many queues as the new member's share, and a death moves only the dead member's
    queues."""
    queues = make_queues({"orders": members * 7 + 3})
    people = [f"m{number:02}" for number in range(members)]
    before = owners(allocate_sticky(queues, {"orders": people}, {}, {}))
    joined = owners(allocate_sticky(queues, {"orders": [*people, "new"]}, before, before))
    assert moved(joined, before) == len(queues["orders"]) // (members + 1)
    left = {queue: member for queue, member in before.items() if member != people[0]}
    died = owners(allocate_sticky(queues, {"orders": people[1:]}, left, before))
    assert moved(died, left) == 0
