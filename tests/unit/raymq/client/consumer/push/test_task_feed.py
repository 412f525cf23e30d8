"""Tests of consume tasks in a listener's process: the messages of a task, the task's calls of the listener, and the
reports about the task."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from unittest.mock import ANY

import msgspec
import pytest

from raymq.client.consumer.push import task_feed as module
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.push.task_feed import TaskFeed
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.protocol.consume_result import ConsumeReport, ShippedTask, TaskBatch
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.tasks import task_of
from tests.support.history.waiting import eventually


@pytest.fixture
def received(monkeypatch) -> list[object]:
    """Return the list in which the test's listeners record their messages. By default, the feed sends no interim
    reports: it reports a task only after the task has ended. A test may change the interval of interim reports."""
    monkeypatch.setattr(module, "REPORT_S", WAIT_S)
    return []


def feed_of(handler, *, takes_batch=False, batch_max=1, tags="*", orderly=True, hooks=()) -> TaskFeed:
    settings = PushSettings(
        "billing", (Subscription.parse("orders", tags),), consume_message_batch_max_size=batch_max, orderly=orderly
    )
    return TaskFeed(handler, settings, takes_batch=takes_batch, hooks=hooks)


def reports_of(feed: TaskFeed) -> dict[int, ConsumeReport]:
    """Return the reports about tasks that the TaskFeed must send now, by task number."""
    feed.look()
    feed.heard()
    return dict(feed.take_reports()[1])


def report_about(feed: TaskFeed, number: int) -> ConsumeReport:
    """Wait for the next report about task `number`, and return the report."""
    return eventually(lambda: reports_of(feed).get(number), "a report", WAIT_S)


def consume(feed: TaskFeed, task: ShippedTask) -> ConsumeReport:
    feed.begin(TaskBatch(1, feed.got + 1, (task,)))
    return report_about(feed, task.number)


def test_messages_reach_the_listener_one_by_one_or_in_lists(received):
    assert consume(feed_of(lambda message: received.append(message.body)), task_of(b"a", b"b")).ended
    assert received == [b"a", b"b"]
    received.clear()
    feed = feed_of(
        lambda messages: received.append([message.body for message in messages]), takes_batch=True, batch_max=2
    )
    assert consume(feed, task_of(b"a", b"b", b"c")) == replace(ConsumeReport(), consume_s=ANY)
    assert received == [[b"a", b"b"], [b"c"]]


def test_a_message_with_only_the_same_tag_code_is_finished_without_a_call(received):
    report = consume(feed_of(received.append, tags="AaAa"), task_of(b"a", tags="BBBB"))
    assert (report.ended, report.unfinished, report.failures) == (True, (), ())
    assert received == []


def test_a_message_of_the_retry_topic_has_its_own_topic_and_every_tag(received):
    task = task_of(b"a", tags="other", topic="%RETRY%billing", extra_properties={"RETRY_TOPIC": "orders"})
    assert consume(feed_of(received.append, tags="paid"), task).failures == ()
    [message] = received
    assert (message.topic, message.tags, message.body) == ("orders", "other", b"a")


def test_the_messages_know_their_broker(received):
    consume(feed_of(received.append), task_of(b"a"))
    assert received[0].broker_name == "broker-b"


def test_an_exception_is_reported_with_the_users_traceback():
    def handle_payment(message):
        raise KeyError("amount")

    [failure] = consume(feed_of(handle_payment), task_of(b"a")).failures
    assert "in handle_payment" in failure.error
    assert "KeyError: 'amount'" in failure.error


@pytest.mark.parametrize("takes_batch", [False, True])
def test_a_damaged_record_fails_and_the_others_are_consumed(received, takes_batch):
    task = task_of(b"aaaa", b"bbbb", b"cccc")
    damaged = msgspec.structs.replace(task, records=task.records.replace(b"bbbb", b"bxbb"))

    def handle(messages):
        received.extend(message.body for message in (messages if takes_batch else [messages]))

    report = consume(
        feed_of(handle, orderly=False, takes_batch=takes_batch, batch_max=3 if takes_batch else 1), damaged
    )
    assert [(failure.first, failure.count) for failure in report.failures] == [(1, 1)]
    assert report.failures[0].unreadable == "the body's CRC is wrong"
    assert not report.failures[0].record_damaged
    assert received == [b"aaaa", b"cccc"]


def test_records_that_nobody_can_read_fail_and_the_next_task_is_consumed(received):
    feed = feed_of(received.append)
    task = task_of(b"a", b"b")
    torn = msgspec.structs.replace(task, records=task.records[:-1])
    feed.begin(TaskBatch(1, 1, (torn, task_of(b"c", number=2))))
    reports: dict[int, ConsumeReport] = {}

    def are_both_there() -> bool:
        # collect the reports of several calls, because each call returns only the reports that no earlier call returned
        reports.update(reports_of(feed))
        return len(reports) == 2

    eventually(are_both_there, "both reports", WAIT_S)
    [failure] = reports[1].failures
    assert (failure.first, failure.count) == (0, 2)
    assert reports[2].failures == ()


def test_a_task_that_takes_long_is_reported_in_parts(received, monkeypatch):
    monkeypatch.setattr(module, "REPORT_S", 0.05)
    gate = threading.Event()

    def handle(message):
        if message.body == b"b":
            assert gate.wait(WAIT_S)
        received.append(message.body)

    feed = feed_of(handle)
    feed.begin(TaskBatch(1, 1, (task_of(b"a", b"b", b"c", number=4),)))
    unfinished = ConsumeReport(unfinished=(1, 2), ended=False)
    eventually(lambda: reports_of(feed).get(4) == unfinished, "a report without the first", WAIT_S)
    gate.set()
    report = eventually(lambda: (again := reports_of(feed).get(4)) and again.ended and again, "the end", WAIT_S)
    assert (report.unfinished, received) == ((), [b"a", b"b", b"c"])
    time.sleep(0.06)
    # The task feed has already returned the final report of task 4, so it has nothing more to report.
    assert reports_of(feed) == {}


def test_a_hand_over_that_comes_twice_is_consumed_once(received):
    feed = feed_of(received.append)
    batch = TaskBatch(1, 1, (task_of(b"a"),))
    feed.begin(batch)
    assert report_about(feed, 1).ended
    feed.begin(batch)
    assert reports_of(feed) == {}
    assert len(received) == 1


def test_a_task_that_is_repeated_during_its_call_is_consumed_once(received):
    gate = threading.Event()

    def handle(message):
        received.append(message.body)
        assert gate.wait(WAIT_S)

    feed = feed_of(handle)
    feed.begin(TaskBatch(1, 1, (task_of(b"a"),)))
    feed.begin(TaskBatch(1, 2, (task_of(b"a"),)))
    gate.set()
    assert report_about(feed, 1).ended
    assert received == [b"a"]


def test_a_new_life_of_the_pull_actor_takes_the_old_ones_tasks_away(received):
    gate = threading.Event()

    def handle(message):
        received.append(message.body)
        assert gate.wait(WAIT_S)

    feed = feed_of(handle)
    feed.begin(TaskBatch(1, 5, (task_of(b"a", b"b"),)))
    eventually(lambda: received == [b"a"], "the first call", WAIT_S)
    feed.begin(TaskBatch(2, 1, (task_of(b"a", b"b"),)))
    # a late task batch that was sent to the previous incarnation of the process
    feed.begin(TaskBatch(1, 6, (task_of(b"x"),)))
    gate.set()
    assert report_about(feed, 1).ended
    assert feed.take_reports()[0] == 2
    assert received == [b"a", b"a", b"b"]


def test_a_task_that_has_ended_does_not_wait_for_one_that_takes_long(received):
    gate = threading.Event()

    def handle(message):
        received.append(message.body)
        assert message.body != b"slow" or gate.wait(WAIT_S)

    feed = feed_of(handle)
    feed.begin(TaskBatch(1, 1, (task_of(b"slow", number=1), task_of(b"a", b"b", number=2, queue_id=7))))
    assert report_about(feed, 2).ended
    gate.set()
    assert report_about(feed, 1).ended


# Tests of the threads that a TaskFeed uses to receive tasks and to report results


class Pull:
    """Fake Pull actor that returns tasks. Its first calls fail, as if they were lost."""

    def __init__(self, *tasks: ShippedTask) -> None:
        self.tasks = list(tasks)
        self.asked: list[tuple[int, int]] = []
        self.reports: dict[int, ConsumeReport] = {}
        self.failures = 2

    def next_tasks(self, epoch, got):
        self.asked.append((epoch, got))
        if len(self.asked) <= 2:
            raise ServiceNotAvailableError("it is just starting")
        if not self.tasks:
            time.sleep(0.05)
            return TaskBatch(1, got)
        return TaskBatch(1, got + 1, (self.tasks.pop(0),))

    def report(self, epoch, reports):
        if self.failures:
            self.failures -= 1
            raise ServiceNotAvailableError("the lane broke")
        self.reports.update(reports)


def test_tasks_are_taken_and_reported_though_calls_fail(received, monkeypatch):
    monkeypatch.setattr(module, "FEED_RETRY_S", 0.01)
    feed, pull = feed_of(received.append, orderly=False), Pull(task_of(b"a"), task_of(b"b", number=2))
    feed.start(pull, lambda wait_s: "pull-here")
    eventually(lambda: pull.reports.keys() == {1, 2}, "both reports", WAIT_S)
    assert all(report.ended for report in pull.reports.values())
    assert len(received) == 2
    eventually(lambda: (1, 2) in pull.asked, "what it has", WAIT_S)
    feed.close()
