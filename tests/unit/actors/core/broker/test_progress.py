"""Tests of a consumer group's lag in a topic."""

from __future__ import annotations

from hypothesis import given, strategies as st

from actors.core.broker.progress import Lag, lag_in
from raymq.common.protocol.store import QueueBounds


def test_lag_counts_uncommitted_messages_and_names_the_largest_queue():
    bounds = {0: QueueBounds(0, 100, 0), 1: QueueBounds(40, 100, 0), 2: QueueBounds(0, 10, 0)}
    assert lag_in({0: 90, 1: 30}, bounds) == Lag(10 + 60 + 10, 1, 40)


def test_without_a_lag_no_queue_is_named():
    assert lag_in({0: 7}, {0: QueueBounds(0, 7, 0)}) == Lag(0)
    # a committed offset after the queue's end counts as no lag
    assert lag_in({0: 9}, {0: QueueBounds(0, 7, 0)}) == Lag(0)
    assert lag_in({}, {}) == Lag(0)


@given(
    st.dictionaries(st.integers(0, 3), st.integers(0, 20)),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4),
)
def test_the_lag_counts_the_offsets_one_by_one(committed, ends):
    bounds = {number: QueueBounds(min(pair), max(pair), 0) for number, pair in enumerate(ends)}
    unread = [
        [at for at in range(held.min_offset, held.max_offset) if at >= committed.get(number, 0)]
        for number, held in bounds.items()
    ]
    lag = lag_in(committed, bounds)
    assert lag.messages == sum(map(len, unread))
    assert max(map(len, unread), default=0) == (len(unread[lag.queue_id]) if lag.messages else 0)
    assert not lag.messages or unread[lag.queue_id][0] == lag.offset
