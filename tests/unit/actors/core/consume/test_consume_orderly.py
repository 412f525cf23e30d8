"""Tests of ConsumeOrderly: messages of a queue are consumed one after another, a failed message is retried before later
messages, and a crash repeats at most one task."""

from __future__ import annotations

import pytest

from actors.core.consume.consume_orderly import DEATH_PAUSE_MAX_S
from actors.core.consume.consume_service import MEND_AGAIN_S
from actors.core.consume.process_queues import ProcessQueues
from raymq.common.message import MessageModel, MessageQueue
from raymq.common.protocol.consume_result import ConsumeReport, Failure
from raymq.common.protocol.group import CommitAnswer
from tests.support.clients.process_queues import fetch, make_process_queues, offsets_of, process_queue_of
from tests.support.clients.records import records_of

Q = MessageQueue("orders", "broker-a", 0)
P = MessageQueue("orders", "broker-a", 1)
DONE = ConsumeReport()


def table(*queues: MessageQueue, **settings) -> ProcessQueues:
    return make_process_queues(*(queues or (Q,)), orderly=True, **settings)


def commit_point(core: ProcessQueues) -> int:
    return process_queue_of(core, Q).commit_offset


def commit(core: ProcessQueues) -> None:
    core.commit_answered(core.uncommitted("broker-a"), CommitAnswer())


def fail(core: ProcessQueues, index: int, now_s: float = 0.0, **how):
    """Report that the listener failed at message number `index` of the only task in flight."""
    [task] = core.deliverable(now_s)
    rest = tuple(range(index + 1, len(task.messages)))
    return core.reported(task, ConsumeReport(unfinished=rest, failures=(Failure(index, 1, "x", **how),)), now_s)


def test_one_task_of_a_queue_is_in_flight_and_queues_do_not_wait_for_each_other():
    core = table(Q, P)
    fetch(core, Q, *range(100))
    fetch(core, P, 0)
    tasks = {task.queue: task for task in core.deliverable(0.0)}
    assert set(tasks) == {Q, P}
    assert core.deliverable(0.0) == []
    core.reported(tasks[Q], DONE, 0.0)
    [following] = core.deliverable(0.0)
    assert offsets_of(following)[0] == offsets_of(tasks[Q])[-1] + 1


def test_a_failed_message_is_redelivered_after_the_pause_before_later_messages():
    core = table()
    fetch(core, Q, *range(6))
    reaction = fail(core, 3)
    assert (reaction.ok, reaction.failed, reaction.send_backs) == (3, 1, [])
    assert commit_point(core) == 3
    assert core.next_time_s() == 1.0
    assert core.deliverable(0.99) == []
    [again] = core.deliverable(1.0)
    assert offsets_of(again) == [3, 4, 5]
    assert [again.messages.reconsume_times(index) for index in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("setting", "answer", "pause_s"),
    [(1000, -1, 1.0), (1000, 500, 0.5), (1000, 1, 0.01), (1000, 10**6, 30.0), (5, -1, 0.01), (10**6, -1, 30.0)],
)
def test_the_pause_is_the_answers_or_the_settings_within_bounds(setting, answer, pause_s):
    core = table(suspend_current_queue_time_ms=setting)
    fetch(core, Q, 0)
    fail(core, 0, suspend_ms=answer)
    assert core.next_time_s() == pause_s


def test_by_default_a_failing_message_is_delivered_for_ever():
    core = table()
    fetch(core, Q, 0, 1)
    for attempt in range(50):
        now_s = attempt * 10.0
        assert fail(core, 0, now_s).send_backs == []
    assert commit_point(core) == 0


def test_at_the_retry_limit_the_message_is_sent_back_and_the_queue_continues():
    core = table(max_reconsume_times=2)
    fetch(core, Q, 0, 1, 2)
    assert fail(core, 1, 0.0).send_backs == []
    assert fail(core, 0, 10.0).send_backs == []
    [sent] = fail(core, 0, 20.0).send_backs
    assert (list(sent.messages.offsets), sent.max_reconsume_times, sent.delay_level) == ([1], 2, 0)
    assert sent.messages.reconsume_times(0) == 2
    assert core.deliverable(30.0) == []
    core.sent_back(sent)
    assert commit_point(core) == 2
    [task] = core.deliverable(30.0)
    assert offsets_of(task) == [2]


def test_a_message_that_cannot_be_sent_back_is_first_again():
    core = table(max_reconsume_times=0)
    fetch(core, Q, 0, 1)
    [sent] = fail(core, 0).send_backs
    core.send_back_failed(sent, 5.0)
    assert core.deliverable(5.9) == []
    [task] = core.deliverable(6.0)
    assert (offsets_of(task), task.messages.reconsume_times(0)) == ([0], 1)
    core.reported(task, DONE, 6.0)
    [rest] = core.deliverable(6.0)
    assert offsets_of(rest) == [1]


def test_in_broadcasting_a_message_at_its_limit_is_skipped():
    core = table(max_reconsume_times=0, message_model=MessageModel.BROADCASTING)
    fetch(core, Q, 0, 1)
    assert fail(core, 0).send_backs == []
    [task] = core.deliverable(0.0)
    assert offsets_of(task) == [1]


def test_a_list_that_fails_counts_for_all_its_messages():
    core = table(consume_message_batch_max_size=2)
    fetch(core, Q, 0, 1, 2)
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(unfinished=(2,), failures=(Failure(0, 2, "x"),)), 0.0)
    [again] = core.deliverable(1.0)
    assert [again.messages.reconsume_times(index) for index in range(3)] == [1, 1, 0]


def test_consumed_and_not_committed_and_in_flight_are_one_full_task_at_most():
    core = table(pull_batch_size=100)
    fetch(core, Q, *range(32))
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(consume_s=1e-4), 0.0)
    commit(core)
    fetch(core, Q, *range(32, 500))
    [first] = core.deliverable(0.0)
    assert len(first.messages) == 50
    core.reported(first, DONE, 0.0)
    assert core.commit_is_urgent()
    [second] = core.deliverable(0.0)
    assert len(second.messages) == 50
    core.reported(second, DONE, 0.0)
    assert core.deliverable(0.0) == []
    commit(core)
    assert len(core.deliverable(0.0)) == 1


def test_repeated_listener_deaths_delay_the_redelivery():
    core = table()
    fetch(core, Q, *range(4))
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(unfinished=(2, 3), ended=False), 0.0)
    core.died(task, 0.0)
    assert commit_point(core) == 2
    now_s, pauses = 0.0, []
    for _ in range(9):
        [task] = core.deliverable(now_s)
        assert (offsets_of(task), task.messages.reconsume_times(0)) == ([2, 3], 0)
        core.died(task, now_s)
        pauses.append(core.next_time_s() - now_s)
        now_s = core.next_time_s()
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == DEATH_PAUSE_MAX_S


def test_the_messages_of_a_revoked_task_are_next_again():
    core = table()
    fetch(core, Q, 0, 1, 2)
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(unfinished=(1, 2)), 0.0)
    [again] = core.deliverable(0.0)
    assert offsets_of(again) == [1, 2]


def test_an_unreadable_message_is_a_dead_letter_and_the_queue_continues():
    core = table()
    fetch(core, Q, *range(4))
    [sent] = fail(core, 1, unreadable="its body's CRC is wrong").send_backs
    assert (sent.delay_level, sent.unreadable, list(sent.messages.offsets)) == (-1, "its body's CRC is wrong", [1])
    assert core.deliverable(0.0) == [], "the queue waits for the broker"
    core.sent_back(sent)
    [rest] = core.deliverable(0.0)
    assert offsets_of(rest) == [2, 3]
    assert commit_point(core) == 2


def test_a_damaged_record_is_skipped_and_named():
    core = table()
    fetch(core, Q, *range(4))
    reaction = fail(core, 1, unreadable="no magic", record_damaged=True)
    assert (reaction.failed, reaction.send_backs) == (1, [])
    [rest] = core.deliverable(0.0)
    assert offsets_of(rest) == [2, 3]
    assert commit_point(core) == 2
    assert (process_queue_of(core, Q).skipped, process_queue_of(core, Q).last_skipped) == (1, "x")


def test_a_damaged_record_that_may_be_repaired_is_delivered_again_before_later_messages():
    core = table()
    core.service.is_mending = lambda queue, offset: True
    fetch(core, Q, *range(5))
    [task] = core.deliverable(0.0)
    failure = Failure(2, 1, "damaged", unreadable="damaged", record_damaged=True)
    reaction = core.reported(task, ConsumeReport(failures=(failure,), unfinished=(3, 4)), 0.0)
    assert (reaction.ok, reaction.failed, reaction.send_backs) == (2, 0, [])
    assert core.deliverable(0.0) == []
    [again] = core.deliverable(MEND_AGAIN_S)
    assert offsets_of(again) == [2, 3, 4]
    assert again.messages.reconsume_times(0) == 0
    core.service.is_mending = lambda queue, offset: False
    core.reported(again, ConsumeReport(), MEND_AGAIN_S)
    [process_queue] = core.process_queues()
    assert process_queue.commit_offset == 5


def test_a_repaired_record_replaces_its_copy_among_later_messages():
    core = table()
    core.service.is_mending = lambda queue, offset: True
    fetch(core, Q, *range(5))
    [task] = core.deliverable(0.0)
    failure = Failure(2, 1, "damaged", unreadable="damaged", record_damaged=True)
    core.reported(task, ConsumeReport(failures=(failure,), unfinished=(3, 4)), 0.0)
    intact = records_of([3], reconsume_times=9)
    core.repaired(Q, 3, intact)
    [again] = core.deliverable(MEND_AGAIN_S)
    assert [again.messages.reconsume_times(index) for index in range(3)] == [0, 9, 0]
    assert again.messages.part(1, 2) == intact
