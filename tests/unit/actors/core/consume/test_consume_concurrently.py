"""Tests of ConsumeConcurrently: a message that is slow, fails, or kills the listener's process delays only the
committed offset, and no other message."""

from __future__ import annotations

from actors.core.consume.consume_concurrently import MANY_REASONS, SUSPECT_DEATHS, TRIALS_MAX, WAYS_MAX
from actors.core.consume.consume_service import MEND_AGAIN_S, SEND_BACK_RETRY_S, TASKS_MAX, SendBack
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
    return make_process_queues(*(queues or (Q,)), **settings)


def sent_offsets(sent: SendBack) -> list[int]:
    return list(sent.messages.offsets)


def commit_point(core: ProcessQueues) -> int:
    return process_queue_of(core, Q).commit_offset


def paced(core: ProcessQueues, seconds_per_message: float) -> None:
    """Report one completed task with a consume time of `seconds_per_message`, from which `core` estimates the time of
    later tasks."""
    fetch(core, Q, 0)
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(consume_s=seconds_per_message), 0.0)


def test_several_tasks_of_a_queue_are_in_flight_and_a_slow_one_holds_only_the_commit_point():
    core = table()
    fetch(core, Q, *range(200))
    slow, quick, *others = core.deliverable(0.0)
    assert offsets_of(slow)[-1] + 1 == offsets_of(quick)[0]
    core.reported(quick, DONE, 0.0)
    assert commit_point(core) == 0
    core.reported(slow, ConsumeReport(unfinished=(3,), ended=False), 0.0)
    assert commit_point(core) == 3
    assert core.deliverable(0.0)
    for task in others:
        core.reported(task, DONE, 0.0)
    assert commit_point(core) == 3
    core.reported(slow, DONE, 0.0)
    assert commit_point(core) == 128  # the offset to commit is the first offset that is still in flight


def test_a_task_has_as_many_messages_as_the_threads_do_in_a_tenth_of_a_second():
    for pace_s, size in ((1e-6, 512), (0.01, 200), (0.1, 20), (10.0, 1)):
        core = table(threads=20)
        paced(core, pace_s)
        fetch(core, Q, *range(1, 1000))
        assert len(core.deliverable(0.0)[0].messages) == size


def test_messages_in_flight_are_bounded_by_threads_and_tasks():
    core = table(threads=4)
    paced(core, 1.0)
    fetch(core, Q, *range(1, 1000))
    tasks = core.deliverable(0.0)
    assert sum(len(task.messages) for task in tasks) == 8
    core = table(threads=1000)
    for offset in range(1000):
        fetch(core, Q, offset)
    assert len(core.deliverable(0.0)) <= TASKS_MAX


def test_queues_take_turns_when_not_all_can_be_served():
    core = table(Q, P, threads=1)
    for queue in (Q, P):
        fetch(core, queue, *range(2))
    first = core.deliverable(0.0)
    assert {task.queue for task in first} == {Q, P}


def test_tasks_of_a_priority_topic_are_delivered_by_level_and_no_level_starves():
    levels = [MessageQueue("orders", "broker-a", level) for level in (0, 4, 9)]
    core = table(*levels, threads=1, leveled=frozenset({"orders"}))
    paced_queue = levels[-1]
    fetch(core, paced_queue, 0)
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(consume_s=1.0), 0.0)
    for queue in levels:
        first = 1 if queue is paced_queue else 0
        fetch(core, queue, *range(first, first + 40))
    delivered = []
    flying = core.deliverable(0.0)
    while len(delivered) < 32:
        assert sum(len(task.messages) for task in flying) <= 4, "one message per task"
        task = flying.pop(0)
        delivered.append(task.queue.queue_id)
        core.reported(task, DONE, 0.0)
        flying += core.deliverable(0.0)
    # each fourth task is a fair turn, of level 4 or of level 0
    assert sorted(delivered[:32]) == [*[0] * 4, *[4] * 4, *[9] * 24]


def test_failed_messages_are_sent_back_with_their_own_reasons_up_to_a_bound():
    core = table(max_reconsume_times=5)
    fetch(core, Q, *range(30))
    [task] = core.deliverable(0.0)
    failures = tuple(Failure(index, 1, f"error {index}") for index in range(30))
    sent = core.reported(task, ConsumeReport(failures=failures), 0.0).send_backs
    reasons = {index: one.reason for one in sent for index in one.indices}
    assert len(sent) == WAYS_MAX + 1
    assert [reasons[index] for index in range(WAYS_MAX)] == [f"error {index}" for index in range(WAYS_MAX)]
    assert {reasons[index] for index in range(WAYS_MAX, 30)} == {MANY_REASONS}


def test_failed_messages_are_sent_back_by_level_and_the_others_are_done():
    core = table(max_reconsume_times=5)
    fetch(core, Q, *range(10))
    [task] = core.deliverable(0.0)
    failures = (Failure(2, 1, "a"), Failure(4, 2, "b", delay_level=9), Failure(8, 1, "a"))
    reaction = core.reported(task, ConsumeReport(failures=failures), 0.0)
    assert (reaction.ok, reaction.failed) == (6, 4)
    sent = {sent.delay_level: sent for sent in reaction.send_backs}
    assert {level: sent_offsets(one) for level, one in sent.items()} == {0: [2, 8], 9: [4, 5]}
    assert {one.max_reconsume_times for one in sent.values()} == {5}
    assert commit_point(core) == 2
    core.sent_back(sent[0])
    assert commit_point(core) == 4
    core.sent_back(sent[9])
    assert commit_point(core) == 10


def test_a_message_that_cannot_be_sent_back_is_redelivered_after_five_seconds():
    core = table()
    fetch(core, Q, 0, 1, 2)
    [task] = core.deliverable(0.0)
    [sent] = core.reported(task, ConsumeReport(failures=(Failure(1, 1, "x"),)), 0.0).send_backs
    core.send_back_failed(sent, 10.0)
    assert commit_point(core) == 1
    assert core.next_time_s() == 10.0 + SEND_BACK_RETRY_S
    assert core.deliverable(10.0 + SEND_BACK_RETRY_S - 0.1) == []
    [again] = core.deliverable(10.0 + SEND_BACK_RETRY_S)
    assert (offsets_of(again), again.messages.reconsume_times(0)) == ([1], 1)
    core.reported(again, DONE, 20.0)
    assert commit_point(core) == 3


def test_in_broadcasting_a_failure_is_skipped():
    core = table(message_model=MessageModel.BROADCASTING)
    fetch(core, Q, 0, 1)
    [task] = core.deliverable(0.0)
    reaction = core.reported(task, ConsumeReport(failures=(Failure(0, 1, "x"),)), 0.0)
    assert (reaction.ok, reaction.failed, reaction.send_backs) == (1, 1, [])
    assert commit_point(core) == 2


def test_a_queue_that_is_being_sent_back_from_is_not_released():
    core = table()
    fetch(core, Q, 0)
    [task] = core.deliverable(0.0)
    [sent] = core.reported(task, ConsumeReport(failures=(Failure(0, 1, "x"),)), 0.0).send_backs
    core.revoke([Q], 0.0)
    assert core.release(0.0) == []
    # The failed message cannot be sent back to the broker. So this member releases the revoked queue, and the queue's
    # next owner delivers the message again.
    core.send_back_failed(sent, 0.0)
    assert core.release(0.0) == [Q]
    assert core.deliverable(100.0) == []


def test_messages_of_a_revoked_task_are_delivered_again():
    core = table()
    fetch(core, Q, 0, 1, 2)
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(unfinished=(1, 2)), 0.0)
    [again] = core.deliverable(0.0)
    assert (offsets_of(again), again.deaths) == ([1, 2], 0)


def test_much_that_is_finished_and_not_committed_holds_the_delivery():
    core = table(consume_concurrently_max_span=100)
    paced(core, 1e-6)
    core.commit_answered(core.uncommitted("broker-a"), CommitAnswer())
    fetch(core, Q, *range(1, 101))
    for task in core.deliverable(0.0):
        core.reported(task, DONE, 0.0)
    assert core.commit_is_urgent()
    fetch(core, Q, 101)
    assert core.deliverable(0.0) == []
    core.commit_answered(core.uncommitted("broker-a"), CommitAnswer())
    assert [offsets_of(task) for task in core.deliverable(0.0)] == [[101]]


# Tests of a listener whose process dies


def test_messages_in_flight_are_redelivered_unchanged_after_a_listener_death():
    core = table()
    fetch(core, Q, 0, 1, 2)
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(unfinished=(1, 2), ended=False), 0.0)
    assert core.died(task, 0.0).send_backs == []
    [again] = core.deliverable(0.0)
    assert (offsets_of(again), again.messages.reconsume_times(0)) == ([1, 2], 0)


def die_until_sent_back(core: ProcessQueues, deadly: int, limit: int = 100) -> tuple[SendBack, int, list[int]]:
    """Let the listener's process die at each delivery of the message at offset `deadly`, until that message is sent
    back. Returns the send-back, the number of deaths, and the offsets that were consumed before."""
    deaths, consumed = 0, []
    for _ in range(limit):
        tasks = core.deliverable(0.0)
        if any(deadly in offsets_of(task) for task in tasks):
            deaths += 1
            for task in tasks:
                for sent in core.died(task, 0.0).send_backs:
                    return sent, deaths, consumed
        else:
            for task in tasks:
                consumed += offsets_of(task)
                core.reported(task, DONE, 0.0)
    raise AssertionError("it was never sent back")


def test_the_message_that_kills_the_listener_is_found_and_sent_back_and_no_other():
    core = table()
    fetch(core, Q, *range(40))
    sent, deaths, consumed = die_until_sent_back(core, deadly=17)
    assert (sent_offsets(sent), sent.delay_level) == ([17], 0)
    assert deaths == SUSPECT_DEATHS + TRIALS_MAX
    assert "died 4 times while it consumed the message at offset 17" in sent.reason
    core.sent_back(sent)
    while tasks := core.deliverable(0.0):
        for task in tasks:
            consumed += offsets_of(task)
            core.reported(task, DONE, 0.0)
    assert sorted(consumed) == [offset for offset in range(40) if offset != 17]
    assert commit_point(core) == 40


def test_a_redelivered_message_that_kills_the_listener_is_a_dead_letter():
    core = table()
    fetch(core, Q, 0, reconsume_times=1)
    sent, _, _ = die_until_sent_back(core, deadly=0)
    assert sent.delay_level == -1


def test_in_broadcasting_a_deadly_message_is_skipped():
    core = table(message_model=MessageModel.BROADCASTING)
    fetch(core, Q, 0)
    for _ in range(SUSPECT_DEATHS + TRIALS_MAX):
        [task] = core.deliverable(0.0)
        assert core.died(task, 0.0).send_backs == []
    assert commit_point(core) == 1


def test_suspect_messages_are_delivered_one_at_a_time_beside_other_messages():
    core = table(Q, P)
    fetch(core, Q, 0, 1, 2)
    for _ in range(SUSPECT_DEATHS):
        [task] = core.deliverable(0.0)
        core.died(task, 0.0)
    fetch(core, P, 0)
    assert sorted(offsets_of(task) for task in core.deliverable(0.0)) == [[0], [0]]
    assert core.deliverable(0.0) == []


def test_messages_that_cannot_be_read_are_dead_at_once_and_damaged_records_are_skipped():
    core = table()
    fetch(core, Q, *range(6))
    [task] = core.deliverable(0.0)
    failures = (
        Failure(1, 1, "crc", unreadable="its body's CRC is wrong"),
        Failure(2, 1, "magic", unreadable="no magic", record_damaged=True),
        Failure(4, 1, "raised"),
    )
    reaction = core.reported(task, ConsumeReport(failures=failures), 0.0)
    assert (reaction.ok, reaction.failed) == (3, 3)
    ways = {tuple(sent_offsets(sent)): (sent.delay_level, sent.unreadable) for sent in reaction.send_backs}
    assert ways == {(1,): (-1, "its body's CRC is wrong"), (4,): (0, "")}
    for sent in reaction.send_backs:
        core.sent_back(sent)
    assert commit_point(core) == 6
    assert (process_queue_of(core, Q).skipped, process_queue_of(core, Q).last_skipped) == (1, "magic")


def test_a_broadcasting_consumer_skips_unreadable_messages():
    core = table(message_model=MessageModel.BROADCASTING)
    fetch(core, Q, *range(3))
    [task] = core.deliverable(0.0)
    failures = (Failure(0, 1, "x", unreadable="no magic", record_damaged=True), Failure(1, 1, "y", unreadable="crc"))
    assert core.reported(task, ConsumeReport(failures=failures), 0.0).send_backs == []
    assert commit_point(core) == 3


def damaged(first: int) -> Failure:
    return Failure(first, 1, "damaged", unreadable="damaged", record_damaged=True)


def test_a_damaged_message_that_may_be_repaired_is_delivered_again():
    core = table()
    asked: list[tuple[MessageQueue, int]] = []
    core.service.is_mending = lambda queue, offset: asked.append((queue, offset)) or offset != 5
    fetch(core, Q, *range(8))
    [task] = core.deliverable(0.0)
    reaction = core.reported(task, ConsumeReport(failures=(damaged(3), damaged(5))), 0.0)
    assert asked == [(Q, 3), (Q, 5)]
    assert (reaction.ok, reaction.failed, reaction.send_backs) == (6, 1, [])
    assert process_queue_of(core, Q).skipped == 1
    assert commit_point(core) == 3
    assert core.deliverable(0.0) == []
    [again] = core.deliverable(MEND_AGAIN_S)
    assert offsets_of(again) == [3]
    assert again.messages.reconsume_times(0) == 0
    core.reported(again, DONE, MEND_AGAIN_S)
    assert commit_point(core) == 8


def test_the_repaired_record_replaces_the_copy_of_the_damaged_one():
    core = table()
    core.service.is_mending = lambda queue, offset: True
    fetch(core, Q, *range(8))
    [task] = core.deliverable(0.0)
    core.reported(task, ConsumeReport(failures=(damaged(3),)), 0.0)
    intact = records_of([3], reconsume_times=7)
    core.repaired(Q, 3, intact)
    core.repaired(Q, 4, intact)
    core.repaired(P, 3, intact)
    [again] = core.deliverable(MEND_AGAIN_S)
    assert again.messages.in_memory() == intact


def test_a_message_that_fails_for_another_reason_is_not_asked_about():
    core = table()
    core.service.is_mending = lambda queue, offset: 1 / 0
    fetch(core, Q, *range(3))
    [task] = core.deliverable(0.0)
    failures = (Failure(0, 1, "refused"), Failure(1, 1, "lies", unreadable="the body does not decompress"))
    assert len(core.reported(task, ConsumeReport(failures=failures), 0.0).send_backs) == 2
