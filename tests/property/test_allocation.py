"""The laws of every strategy that shares queues: one owner each, shares that differ by one, and no role for order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.allocation import allocate_averagely
from raymq.message import MessageQueue

QUEUES = st.sets(
    st.builds(MessageQueue, st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 99)), max_size=40
)
MEMBERS = st.sets(st.text("abc-0123", min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(QUEUES, MEMBERS)
def test_every_queue_has_exactly_one_owner_and_shares_differ_by_at_most_one(queues, members):
    shares = allocate_averagely(list(queues), list(members))
    assert set(shares) == members
    assert sorted(queue for share in shares.values() for queue in share) == sorted(queues)
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(QUEUES, MEMBERS, st.randoms(use_true_random=False))
def test_the_order_of_queues_and_members_does_not_matter(queues, members, chance: random.Random):
    shuffled_queues, shuffled_members = sorted(queues), sorted(members)
    chance.shuffle(shuffled_queues)
    chance.shuffle(shuffled_members)
    assert allocate_averagely(shuffled_queues, shuffled_members) == allocate_averagely(sorted(queues), sorted(members))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(QUEUES, MEMBERS)
def test_shares_are_contiguous_and_the_first_members_take_the_larger_ones(queues, members):
    shares = allocate_averagely(list(queues), list(members))
    in_order = [shares[member] for member in sorted(members)]
    assert [queue for share in in_order for queue in share] == sorted(queues)
    assert [len(share) for share in in_order] == sorted(map(len, in_order), reverse=True)
