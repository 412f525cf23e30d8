"""Tests of the process queues of a push-consumer instance: flow control, commits, offset resets, and revoked
queues."""

from __future__ import annotations

import pytest

from actors.core.consume.process_queues import RELEASE_PATIENCE_S, ProcessQueues, PullState
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import ConsumeReport
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from tests.support.clients.process_queues import fetch, grant, make_process_queues, process_queue_of
from tests.support.clients.records import RECORD_BYTES, records_of

Q = MessageQueue("orders", "broker-a", 0)
P = MessageQueue("orders", "broker-a", 1)
R = MessageQueue("orders", "broker-b", 0)
DONE = ConsumeReport()


def table(*queues: MessageQueue, **settings) -> ProcessQueues:
    return make_process_queues(*(queues or (Q,)), start=5, reset_version=2, **settings)


def commit_of(offset: int | None, *, backwards: bool = False) -> OffsetCommit:
    return OffsetCommit(offset, 7, 2, backwards)


def consume(core: ProcessQueues) -> list[int]:
    """Deliver all messages to the listener, and report success for each message. Returns the consumed offsets."""
    seen = []
    while tasks := core.deliverable(0.0):
        for task in tasks:
            seen += task.messages.offsets
            core.reported(task, DONE, 0.0)
        for broker_name in {queue.broker_name for queue in core.holding}:
            core.commit_answered(core.uncommitted(broker_name), CommitAnswer())
    return seen


def test_a_granted_queue_is_held_at_once_and_read_when_its_start_is_known():
    core = ProcessQueues(PushSettings("billing", (Subscription.parse("orders"),)))
    grant(core, Q)
    assert (core.holding, core.wanted(0.0), core.uncommitted("broker-a")) == ({Q}, {}, {})
    assert core.starting("broker-b") == []
    [process_queue] = core.starting("broker-a")
    core.started(process_queue, QueueOffset(5, 2))
    assert core.wanted(0.0) == {Q: 5}
    assert core.uncommitted("broker-a") == {}
    grant(core, Q, generation=8)  # the consumer already holds the queue, so a second grant changes nothing
    assert core.wanted(0.0) == {Q: 5}


@pytest.mark.parametrize("orderly", [False, True])
def test_consumed_messages_are_committed_with_generation_and_reset_version(orderly):
    core = table(orderly=orderly)
    fetch(core, Q, 5, 6, 7)
    [task] = core.deliverable(0.0)
    assert core.uncommitted("broker-a") == {}
    core.reported(task, ConsumeReport(unfinished=(1, 2), ended=False), 0.0)
    assert core.uncommitted("broker-a") == {Q: commit_of(6)}
    core.reported(task, DONE, 0.0)
    commits = core.uncommitted("broker-a")
    assert commits == {Q: commit_of(8)}
    assert core.uncommitted("broker-b") == {}
    core.commit_answered(commits, CommitAnswer())
    assert core.uncommitted("broker-a") == {}
    assert core.reset_queries("broker-a") == {Q: commit_of(None)}


def test_messages_that_the_tags_excluded_are_committed_once_all_before_them_is_consumed():
    core = table()
    fetch(core, Q, 5)
    core.fetched(Q, 6, records_of([]), 20, 0.0)
    assert core.uncommitted("broker-a") == {}
    consume(core)
    assert process_queue_of(core, Q).committed == 20


def test_an_answer_to_an_outdated_question_is_ignored():
    core = table()
    for from_offset, offset in ((5, 5), (5, 5), (4, 4)):
        core.fetched(Q, from_offset, records_of([offset]), offset + 1, 0.0)
    core.fetched(P, 0, records_of([0]), 1, 0.0)
    assert process_queue_of(core, Q).count == 1
    assert core.wanted(0.0) == {Q: 6}


# Tests of flow control


def test_more_messages_than_the_threshold_pause_the_reading_until_enough_are_consumed():
    core = table(pull_threshold_for_queue=3)
    fetch(core, Q, 5, 6, 7)
    assert core.wanted(0.0) == {Q: 8}
    fetch(core, Q, 8)
    assert core.pull_state(process_queue_of(core, Q)) is PullState.TOO_MANY_MESSAGES
    assert core.wanted(0.0) == {}
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(unfinished=(0, 2, 3), ended=False), 0.0)  # one of four messages is consumed
    assert core.wanted(0.0) == {Q: 9}


def test_more_bytes_than_the_threshold_pause_the_reading():
    core = table(
        pull_threshold_size_for_queue_mib=1, pull_threshold_for_queue=65535, consume_concurrently_max_span=65535
    )
    count = (1 << 20) // RECORD_BYTES
    fetch(core, Q, *range(5, 5 + count))
    assert core.pull_state(process_queue_of(core, Q)) is PullState.PULLING
    fetch(core, Q, 5 + count, 6 + count)
    assert core.pull_state(process_queue_of(core, Q)) is PullState.TOO_MANY_BYTES


@pytest.mark.parametrize(("orderly", "state"), [(False, PullState.TOO_WIDE_A_SPAN), (True, PullState.PULLING)])
def test_a_span_wider_than_the_limit_pauses_a_concurrent_consumer_only(orderly, state):
    core = table(orderly=orderly, consume_concurrently_max_span=10)
    fetch(core, Q, 5, 15)
    assert core.pull_state(process_queue_of(core, Q)) is PullState.PULLING
    fetch(core, Q, 16)
    assert core.pull_state(process_queue_of(core, Q)) is state


def test_fact_34_a_topics_threshold_is_divided_by_its_queues_here():
    core = table(Q, P, R, pull_threshold_for_topic=1000)
    fetch(core, Q, *range(5, 5 + 333))
    assert core.pull_state(process_queue_of(core, Q)) is PullState.PULLING
    fetch(core, Q, 338)
    assert core.pull_state(process_queue_of(core, Q)) is PullState.TOO_MANY_MESSAGES
    core.lose([R])
    assert core.pull_state(process_queue_of(core, Q)) is PullState.PULLING
    small = table(Q, P, R, pull_threshold_for_topic=2)
    fetch(small, Q, 5)
    assert small.pull_state(process_queue_of(small, Q)) is PullState.PULLING
    fetch(small, Q, 6)
    assert small.pull_state(process_queue_of(small, Q)) is PullState.TOO_MANY_MESSAGES


def test_a_topics_bytes_are_divided_too():
    core = table(Q, P, pull_threshold_size_for_topic_mib=2, pull_threshold_for_queue=65535)
    fetch(core, Q, *range(5, 5 + (1 << 20) // RECORD_BYTES + 1))
    assert core.pull_state(process_queue_of(core, Q)) is PullState.TOO_MANY_BYTES


def test_pull_state_is_the_first_state_that_applies():
    core = table(pull_threshold_for_queue=1)
    process_queue = process_queue_of(core, Q)
    fetch(core, Q, 5, 6)
    assert core.pull_state(process_queue) is PullState.TOO_MANY_MESSAGES
    core.pause([Q])
    assert core.pull_state(process_queue) is PullState.PAUSED
    core.suspend(True)
    assert core.pull_state(process_queue) is PullState.SUSPENDED
    core.revoke([Q], 0.0)
    assert core.pull_state(process_queue) is PullState.REVOKED


def test_a_suspended_consumer_and_a_paused_queue_get_nothing_and_are_not_read():
    core = table(Q, P)
    fetch(core, Q, 5)
    fetch(core, P, 5)
    core.suspend(True)
    assert (core.wanted(0.0), core.deliverable(0.0)) == ({}, [])
    core.suspend(False)
    core.pause([Q])
    assert core.wanted(0.0) == {P: 6}
    assert [task.queue for task in core.deliverable(0.0)] == [P]
    core.resume([Q])
    assert [task.queue for task in core.deliverable(0.0)] == [Q]


def test_a_pull_interval_is_kept_after_messages():
    core = table(pull_interval_ms=500)
    fetch(core, Q, 5)
    assert core.wanted(0.4) == {}
    assert core.next_time_s() == 0.5
    assert core.wanted(0.5) == {Q: 6}


def test_nothing_is_delivered_while_the_listener_is_away():
    core = table()
    fetch(core, Q, 5)
    core.listener_lost()
    assert core.deliverable(0.0) == []


# Tests of queues in which offsets are missing, for example because retention deleted messages


def test_reading_continues_after_a_gap_of_deleted_messages():
    core = table()
    core.jump(Q, 5, 100)
    assert core.wanted(0.0) == {Q: 100}
    assert core.uncommitted("broker-a") == {Q: commit_of(100)}


def test_messages_before_a_gap_are_delivered_first():
    core = table()
    fetch(core, Q, 5)
    core.jump(Q, 6, 100)
    fetch(core, Q, 100)
    assert core.uncommitted("broker-a") == {}
    assert consume(core) == [5, 100]
    assert process_queue_of(core, Q).committed == 101


def test_a_jump_back_waits_until_nothing_is_held_and_is_committed_as_one():
    core = table()
    fetch(core, Q, 5)
    core.jump(Q, 6, 3)
    assert core.wanted(0.0) == {Q: 6}
    consume(core)
    core.jump(Q, 6, 3)
    assert core.wanted(0.0) == {Q: 3}
    commits = core.uncommitted("broker-a")
    assert commits == {Q: commit_of(3, backwards=True)}
    core.commit_answered(commits, CommitAnswer())
    fetch(core, Q, 3)
    consume(core)
    assert core.uncommitted("broker-a") == {}


def test_a_jump_from_elsewhere_or_of_a_revoked_queue_is_ignored():
    core = table()
    core.jump(Q, 4, 100)
    assert core.wanted(0.0) == {Q: 5}
    core.revoke([Q], 0.0)
    core.jump(Q, 5, 100)
    assert core.uncommitted("broker-a") == {}


# Tests of the broker's answers to an offset commit


@pytest.mark.parametrize("answer", [CommitAnswer(fenced=frozenset({Q})), CommitAnswer(gone=frozenset({Q}))])
def test_a_fenced_or_deleted_queue_is_dropped_and_its_outcome_not_heeded(answer):
    core = table()
    fetch(core, Q, 5, 6)
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(unfinished=(1,), ended=False), 0.0)
    core.commit_answered(core.uncommitted("broker-a"), answer)
    assert core.holding == frozenset()
    assert core.reported(task, DONE, 0.0).send_backs == []


@pytest.mark.parametrize("orderly", [False, True])
def test_a_forbidden_queue_stops_and_continues_where_it_stopped(orderly):
    core = table(orderly=orderly)
    fetch(core, Q, 5, 6)
    [task] = core.deliverable(0.0)
    fetch(core, Q, 7)
    core.commit_answered(core.reset_queries("broker-a"), CommitAnswer(stopped={Q: "forbidden to read"}))
    assert core.pull_state(process_queue_of(core, Q)) is PullState.FORBIDDEN
    assert (core.wanted(0.0), core.holding) == ({}, frozenset({Q}))
    core.reported(task, DONE, 0.0)
    commits = core.uncommitted("broker-a")
    assert commits[Q].queue_offset == 7, "what was with the listener is committed"
    assert core.commit_answered(commits, CommitAnswer(stopped={Q: "forbidden to read"})) == {Q: 7}
    assert core.deliverable(0.0) == []
    core.commit_answered(core.reset_queries("broker-a"), CommitAnswer())
    [task] = core.deliverable(0.0)
    assert list(task.messages.offsets) == [7]
    assert core.wanted(0.0) == {Q: 8}


@pytest.mark.parametrize("orderly", [False, True])
def test_a_reset_drops_held_messages_and_continues_at_its_offset(orderly):
    core = table(orderly=orderly)
    fetch(core, Q, *range(5, 25))
    [old] = core.deliverable(0.0)
    core.commit_answered(core.reset_queries("broker-a"), CommitAnswer(reset={Q: QueueOffset(2, 3)}))
    assert core.wanted(0.0) == {Q: 2}
    assert process_queue_of(core, Q).count == 0
    fetch(core, Q, 2)
    if orderly:
        assert core.deliverable(0.0) == []  # the listener still works on the task from before the reset
    core.reported(old, DONE, 0.0)
    assert core.uncommitted("broker-a") == {}
    [task] = core.deliverable(0.0)
    assert list(task.messages.offsets) == [2]
    core.reported(task, DONE, 0.0)
    assert core.uncommitted("broker-a") == {Q: OffsetCommit(3, 7, 3)}


# Tests of moving queues to another consumer


@pytest.mark.parametrize("orderly", [False, True])
def test_a_revoked_queue_is_released_after_its_tasks_have_ended_and_are_committed(orderly):
    core = table(orderly=orderly)
    fetch(core, Q, *range(5, 55))
    [task] = core.deliverable(0.0)[:1]
    core.revoke([Q], 0.0)
    assert core.wanted(0.0) == {}
    assert core.release(1.0) == []
    core.reported(task, DONE, 0.0)
    assert core.deliverable(0.0) == []
    assert core.release(1.0) == []
    commits = core.uncommitted("broker-a")
    assert commits == {Q: commit_of(5 + len(task.messages))}
    core.commit_answered(commits, CommitAnswer())
    if not orderly:  # in concurrent mode the test has delivered a second task, which may still be in flight
        assert core.release(1.0) in ([], [Q])
    else:
        assert core.release(1.0) == [Q]
        assert core.holding == frozenset()


@pytest.mark.parametrize(("orderly", "released"), [(False, [Q]), (True, [])])
def test_a_slow_message_holds_a_revoked_queue_back_for_ever_only_in_order(orderly, released):
    core = table(orderly=orderly)
    fetch(core, Q, 5, 6)
    core.deliverable(0.0)
    core.revoke([Q], 0.0)
    assert core.release(RELEASE_PATIENCE_S) == []
    assert core.release(RELEASE_PATIENCE_S + 0.1) == released


def test_in_order_a_queue_that_is_granted_again_waits_for_its_old_task():
    core = table(orderly=True)
    fetch(core, Q, 5)
    [old] = core.deliverable(0.0)
    core.lose([Q])  # the queue is fenced while the listener works on its messages
    grant(core, Q, generation=8)
    core.started(core.starting("broker-a")[0], QueueOffset(5))
    fetch(core, Q, 5)
    assert core.deliverable(0.0) == []
    core.died(old, 0.0)
    assert core.uncommitted("broker-a") == {}
    [task] = core.deliverable(0.0)
    core.reported(task, DONE, 0.0)
    assert core.uncommitted("broker-a") == {Q: OffsetCommit(6, 8, 0)}
