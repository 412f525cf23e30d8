"""A push consumer's queues: one batch at a time, nothing skipped, nothing let go too early."""

from __future__ import annotations

import pytest

from actors.core.process_queues import RETRY_PAUSE_MAX_S, ProcessQueues
from raymq.message import MessageQueue

Q = MessageQueue("orders", "broker-a", 0)
P = MessageQueue("orders", "broker-a", 1)


@pytest.fixture
def queues():
    core = ProcessQueues(threshold_count=10, threshold_bytes=1000)
    core.add(Q, 5)
    return core


def test_a_new_queue_is_read_from_its_start_offset_and_has_nothing_to_commit(queues):
    assert queues.wanted() == {Q: 5}
    assert queues.uncommitted() == {}
    assert queues.holding == {Q}


def test_one_batch_per_queue_is_in_flight_at_a_time_and_in_order(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.fetched(Q, 6, b"two", 1, 7)
    [first] = queues.deliverable(0.0)
    assert (first.records, first.attempt) == (b"one", 0)
    assert queues.deliverable(0.0) == []
    queues.consumed(first)
    assert [batch.records for batch in queues.deliverable(0.0)] == [b"two"]


def test_queues_do_not_wait_for_each_other(queues):
    queues.add(P, 0)
    queues.fetched(Q, 5, b"q", 1, 6)
    queues.fetched(P, 0, b"p", 1, 1)
    assert {batch.queue for batch in queues.deliverable(0.0)} == {P, Q}


def test_only_what_was_consumed_is_committed(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.fetched(Q, 6, b"two", 1, 7)
    [first] = queues.deliverable(0.0)
    assert queues.uncommitted() == {}
    queues.consumed(first)
    assert queues.uncommitted() == {Q: 6}
    queues.committed(Q, 6)
    assert queues.uncommitted() == {}


def test_messages_that_the_tags_excluded_are_committed_once_all_before_them_is_consumed(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.fetched(Q, 6, b"", 0, 20)
    assert queues.uncommitted() == {}
    [batch] = queues.deliverable(0.0)
    queues.consumed(batch)
    assert queues.uncommitted() == {Q: 20}
    queues.fetched(Q, 20, b"", 0, 30)
    assert queues.uncommitted() == {Q: 30}


def test_an_answer_to_an_outdated_question_is_ignored(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.fetched(Q, 4, b"zero", 1, 5)
    queues.fetched(P, 0, b"p", 1, 1)
    assert queues.lag_buffered() == {Q: 1}
    assert queues.wanted() == {Q: 6}


def test_a_failed_batch_comes_again_whole_after_a_pause_that_grows(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    now_s, pauses = 100.0, []
    for attempt in range(8):
        [batch] = queues.deliverable(now_s)
        assert (batch.records, batch.attempt) == (b"one", attempt)
        queues.failed(batch, now_s)
        retry_at_s = queues.next_retry_s()
        pauses.append(retry_at_s - now_s)
        assert queues.deliverable(retry_at_s - 0.01) == []
        now_s = retry_at_s
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, RETRY_PAUSE_MAX_S)
    [batch] = queues.deliverable(now_s)
    queues.consumed(batch)
    queues.fetched(Q, 6, b"two", 1, 7)
    assert queues.deliverable(now_s)[0].attempt == 0


@pytest.mark.parametrize(("records", "count"), [(b"x", 10), (b"x" * 1000, 1)])
def test_a_full_queue_is_not_read_until_the_listener_has_caught_up(queues, records, count):
    queues.fetched(Q, 5, records, count, 15)
    assert queues.wanted() == {}
    queues.consumed(queues.deliverable(0.0)[0])
    assert queues.wanted() == {Q: 15}


def test_a_revoked_queue_is_released_after_its_batch_has_ended_and_is_committed(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.fetched(Q, 6, b"two", 1, 7)
    [batch] = queues.deliverable(0.0)
    queues.revoke(Q)
    assert queues.wanted() == {}
    assert queues.released() == []
    queues.consumed(batch)
    assert queues.deliverable(0.0) == []
    assert queues.released() == []
    assert queues.uncommitted() == {Q: 6}
    queues.committed(Q, 6)
    assert queues.released() == [Q]
    queues.drop(Q)
    assert queues.holding == frozenset()


def test_a_revoked_queue_whose_batch_fails_is_released_without_it(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    [batch] = queues.deliverable(0.0)
    queues.revoke(Q)
    queues.failed(batch, 0.0)
    assert queues.next_retry_s() is None
    assert queues.released() == [Q]


def test_a_queue_that_is_granted_again_goes_on_from_what_was_committed_after_its_old_batch_has_ended(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    [old] = queues.deliverable(0.0)
    queues.drop(Q)  # fenced while the listener works
    queues.add(Q, 5)
    queues.fetched(Q, 5, b"one", 1, 6)
    assert queues.deliverable(0.0) == []
    queues.consumed(old)
    assert queues.uncommitted() == {}
    [batch] = queues.deliverable(0.0)
    queues.consumed(batch)
    assert queues.uncommitted() == {Q: 6}


def test_a_queue_is_added_once(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.add(Q, 0)
    assert queues.wanted() == {Q: 6}


def test_where_messages_are_gone_reading_goes_on_behind_the_gap(queues):
    queues.jump(Q, 5, 100)
    assert queues.wanted() == {Q: 100}
    assert queues.uncommitted() == {Q: 100}


def test_what_was_read_before_a_gap_is_delivered_first(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    [batch] = queues.deliverable(0.0)
    queues.jump(Q, 6, 100)
    assert queues.wanted() == {Q: 100}  # asking for offset 6 again and again would not bring it back
    assert queues.uncommitted() == {}
    queues.fetched(Q, 100, b"two", 1, 101)
    queues.consumed(batch)
    assert queues.uncommitted() == {Q: 6}
    queues.consumed(queues.deliverable(0.0)[0])
    assert queues.uncommitted() == {Q: 101}


def test_a_jump_back_waits_until_nothing_is_left_of_what_was_read(queues):
    queues.fetched(Q, 5, b"one", 1, 6)
    queues.jump(Q, 6, 3)
    assert queues.wanted() == {Q: 6}
    queues.consumed(queues.deliverable(0.0)[0])
    queues.jump(Q, 6, 3)
    assert queues.wanted() == {Q: 3}
    assert queues.uncommitted() == {Q: 3}


def test_a_jump_from_elsewhere_or_of_a_revoked_queue_is_ignored(queues):
    queues.jump(Q, 4, 100)
    assert queues.wanted() == {Q: 5}
    queues.revoke(Q)
    queues.jump(Q, 5, 100)
    assert queues.uncommitted() == {}
