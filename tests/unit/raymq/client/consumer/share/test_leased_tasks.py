"""Tests of what a share-mode instance does with each leased message: acknowledge it, return it, or store a letter."""

from __future__ import annotations

import pytest

from raymq.client.consumer.share.leased_tasks import LeasedTask, LeasedTasks, Settlement
from raymq.client.consumer.share.prefetch import Prefetch
from raymq.common.protocol.consume_result import ConsumeReport, Failure
from tests.support.history.leases import leased_messages, offsets_of


def tasks_of(*, ordered: bool = False) -> LeasedTasks:
    return LeasedTasks(Prefetch(20, 4096, 1 << 20), ordered=ordered)


def later_of(settlement: Settlement) -> list[tuple[list[int], int, bool]]:
    return [(offsets_of(one.messages), one.invisible_ms, one.counted) for one in settlement.later]


def one_task(tasks: LeasedTasks, **how: object) -> LeasedTask:
    [task] = tasks.leased(leased_messages(40, 3, **how))  # type: ignore[arg-type]
    return task


def test_consumed_messages_are_acknowledged_as_their_calls_end() -> None:
    tasks = tasks_of()
    task = one_task(tasks, size_bytes=300)
    assert (tasks.held, tasks.held_bytes, task.key) == (3, 300, None)
    first = tasks.reported(task, ConsumeReport(unfinished=(1,), ended=False), 1.0)
    assert (offsets_of(first.acks), first.count, first.size_bytes) == ([40, 42], 2, 200)
    last = tasks.reported(task, ConsumeReport(), 2.0)
    assert (offsets_of(last.acks), last.size_bytes, last.later) == ([41], 100, [])
    assert (tasks.consumed, tasks.held) == (3, 3)
    tasks.settled(first.count + last.count, first.size_bytes + last.size_bytes)
    assert (tasks.held, tasks.held_bytes) == (0, 0)


def test_a_repeated_report_settles_nothing_twice() -> None:
    tasks = tasks_of()
    task = one_task(tasks)
    report = ConsumeReport(unfinished=(1, 2), failures=(Failure(0, 1, "no"),), ended=False)
    assert later_of(tasks.reported(task, report, 1.0)) == [([40], 10_000, True)]
    assert tasks.reported(task, report, 1.1).count == 0


def test_messages_that_no_call_has_begun_go_back_uncounted() -> None:
    tasks = tasks_of()
    settlement = tasks.reported(one_task(tasks), ConsumeReport(unfinished=(1, 2)), 1.0)
    assert offsets_of(settlement.acks) == [40]
    assert later_of(settlement) == [([41, 42], 0, False)]
    assert (tasks.consumed, tasks.failures) == (1, 0)


@pytest.mark.parametrize(
    ("failure", "attempts", "after_ms"),
    [
        (Failure(1, 1, "no"), 1, 10_000),
        (Failure(1, 1, "no"), 2, 30_000),
        (Failure(1, 1, "no"), 9, 30_000),
        (Failure(1, 1, "no", delay_level=1), 2, 1_000),
        (Failure(1, 1, "late", delay_level=3, timed_out=True), 2, 30_000),
        (Failure(1, 1, "no", suspend_ms=500), 1, 10_000),
    ],
)
def test_a_failed_message_waits_for_the_groups_interval_or_the_listeners_level(
    failure: Failure, attempts: int, after_ms: int
) -> None:
    tasks = tasks_of()
    settlement = tasks.reported(one_task(tasks, attempts=attempts), ConsumeReport(failures=(failure,)), 1.0)
    assert offsets_of(settlement.acks) == [40, 42]
    assert later_of(settlement) == [([41], after_ms, True)]
    assert (tasks.consumed, tasks.failures) == (2, 1)


@pytest.mark.parametrize(("attempts", "failure"), [(3, Failure(1, 1, "no")), (1, Failure(1, 1, "no", delay_level=-1))])
def test_after_the_last_attempt_or_on_demand_the_message_becomes_a_letter(attempts: int, failure: Failure) -> None:
    tasks = tasks_of()
    task = one_task(tasks, attempts=attempts, retry_max_times=2)
    settlement = tasks.reported(task, ConsumeReport(failures=(failure,)), 1.0)
    [letter] = settlement.letters
    assert (letter.message.queue_offset, letter.attempts, letter.failure) == (41, attempts, "no")
    assert (settlement.later, settlement.count) == ([], 3)


def test_the_last_but_one_attempt_is_repeated() -> None:
    tasks = tasks_of()
    task = one_task(tasks, attempts=2, retry_max_times=2)
    assert tasks.reported(task, ConsumeReport(failures=(Failure(1, 1, "no"),)), 1.0).letters == []


def test_in_order_each_message_group_is_a_task_of_its_own() -> None:
    tasks = tasks_of(ordered=True)
    messages = leased_messages(40, 4, groups=["a", "b", "a", "b"])
    messages += leased_messages(44, 1, groups=["a"], attempts=2)
    messages += leased_messages(40, 1, queue_id=5, groups=["a"])
    made = tasks.leased(messages)
    assert [offsets_of(task.messages) for task in made] == [[40, 42, 44], [41, 43], [40]]
    assert len({task.key for task in made}) == 3
    assert [len(task.receipts) for task in made] == [2, 1, 1]


def test_in_order_without_message_groups_a_queue_is_one_task() -> None:
    [task] = tasks_of(ordered=True).leased(leased_messages(40, 4))
    assert offsets_of(task.messages) == [40, 41, 42, 43]


def test_in_order_a_failure_holds_back_the_rest_of_its_group_uncounted() -> None:
    tasks = tasks_of(ordered=True)
    [task] = tasks.leased(leased_messages(40, 4, attempts=2))
    failure = ConsumeReport(unfinished=(2, 3), failures=(Failure(1, 1, "no"),))
    settlement = tasks.reported(task, failure, 1.0)
    assert offsets_of(settlement.acks) == [40]
    assert later_of(settlement) == [([42, 43], 30_000, False), ([41], 30_000, True)]


def test_in_order_the_rest_waits_as_long_if_the_end_is_reported_later() -> None:
    tasks = tasks_of(ordered=True)
    [task] = tasks.leased(leased_messages(40, 3))
    failed = ConsumeReport(unfinished=(1, 2), failures=(Failure(0, 1, "no", suspend_ms=70_000),), ended=False)
    assert later_of(tasks.reported(task, failed, 1.0)) == [([40], 30_000, True)]
    assert later_of(tasks.reported(task, ConsumeReport(unfinished=(1, 2)), 1.1)) == [([41, 42], 30_000, False)]


def test_in_order_a_letter_lets_the_rest_of_its_group_go_on_at_once() -> None:
    tasks = tasks_of(ordered=True)
    [task] = tasks.leased(leased_messages(40, 3, attempts=17, retry_max_times=16))
    settlement = tasks.reported(task, ConsumeReport(unfinished=(1, 2), failures=(Failure(0, 1, "no"),)), 1.0)
    assert [letter.message.queue_offset for letter in settlement.letters] == [40]
    assert later_of(settlement) == [([41, 42], 0, False)]


def test_the_sizes_of_a_lease_are_shared_out_whole() -> None:
    tasks = tasks_of(ordered=True)
    made = tasks.leased(leased_messages(40, 3, groups=["a", "b", "a"], size_bytes=300))
    assert [task.size_bytes for task in made] == [200, 100]
    sizes = [tasks.reported(task, ConsumeReport(), 1.0).size_bytes for task in made]
    tasks.settled(3, sum(sizes))
    assert (tasks.held, tasks.held_bytes) == (0, 0)
