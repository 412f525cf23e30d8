"""Shipping listeners by value, and running them."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from unittest.mock import ANY

import cloudpickle
import pytest

from raymq.consumer.push import listener as listener_module
from raymq.consumer.push.listener import Listener, ShippedTask, ship, ship_hook
from raymq.consumer.push.settings import PushSettings
from raymq.consumer.subscription import Subscription
from raymq.errors import ListenerError
from raymq.message import MessageQueue
from raymq.protocol.consume_result import ConsumeReport
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch

MODULE = """
    import functools

    FACTOR = 3

    def helper(value):
        return value * FACTOR

    def handle(message):
        return helper(message)

    def handle_with(factor, message):
        return factor * message

    class Handler:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, message):
            return helper(message) * self.factor

        def method(self, message):
            return helper(message) + self.factor

    def decorated(function):
        @functools.wraps(function)
        def inner(message):
            return function(message) + 1
        return inner

    @decorated
    def wrapped(message):
        return helper(message)
"""

ELSEWHERE = """
import sys, pickle
for line in sys.stdin.buffer.read().split(b"\\n--\\n"):
    print(pickle.loads(line)(2))
print("users_listeners" in sys.modules)
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    """A module of the user's, importable here and nowhere else."""
    (tmp_path / "users_listeners.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    import users_listeners

    yield users_listeners
    del sys.modules["users_listeners"]


def run_elsewhere(payloads: list[bytes]) -> list[str]:
    """The results of the shipped functions for 2 in a process that cannot import the user's module."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=b"\n--\n".join(payloads), capture_output=True, cwd="/", check=False
    )
    return done.stdout.decode().split() or [done.stderr.decode()]


def test_a_users_listener_of_any_kind_goes_by_value(users):
    handlers = [
        users.handle,
        users.Handler(5),
        users.Handler(5).method,
        functools.partial(users.handle_with, 7),
        functools.partial(functools.partial(users.handle_with), 8),
        users.wrapped,
        lambda message: message + 100,
    ]
    payloads = [ship(handler, takes_batch=False).payload for handler in handlers]
    assert run_elsewhere(payloads) == ["6", "30", "11", "14", "16", "7", "102", "False"]


def test_what_is_installed_goes_by_reference(users):
    payload = ship(json.dumps, takes_batch=False).payload
    assert len(payload) < 100
    assert pickle.loads(payload) is json.dumps
    assert pickle.loads(ship(pytest.approx, takes_batch=False).payload) is pytest.approx
    assert pickle.loads(ship(print, takes_batch=False).payload) is print


def test_shipping_leaves_no_trace_in_the_users_process(users):
    ship(users.handle, takes_batch=False)
    assert cloudpickle.list_registry_pickle_by_value() == set()
    cloudpickle.register_pickle_by_value(users)
    try:
        ship(users.handle, takes_batch=False)
        assert cloudpickle.list_registry_pickle_by_value() == {"users_listeners"}
    finally:
        cloudpickle.unregister_pickle_by_value(users)


def test_what_is_not_callable_is_refused():
    for thing in (None, 5, "handle", object()):
        with pytest.raises(ListenerError, match="must be callable"):
            ship(thing, takes_batch=False)


def test_a_listener_that_holds_what_cannot_travel_is_refused_with_advice(users):
    lock = threading.Lock()
    with pytest.raises(ListenerError, match=r"cannot be shipped to its actor: .*lock.* It must not hold locks"):
        ship(lambda message: lock, takes_batch=False)
    users.handle.lock = lock
    with pytest.raises(ListenerError):
        ship(users.handle, takes_batch=False)
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_the_name_is_the_users(users):
    assert ship(users.Handler(1), takes_batch=False).name == "Handler"
    assert ship(users.handle, takes_batch=True).name == "handle"
    assert ship(users.handle, takes_batch=True).takes_batch


# Running


def listener(handler, *, takes_batch=False, batch_max=1, tags="*", orderly=True) -> Listener:
    settings = PushSettings(
        "billing", (Subscription.parse("orders", tags),), consume_message_batch_max_size=batch_max, orderly=orderly
    )
    return Listener(ship(handler, takes_batch=takes_batch), settings)


def task_of(*bodies: bytes, tags: str | None = None, topic: str = "orders", number: int = 1, epoch: int = 1, **more):
    records = bytes(make_batch(bodies, tags=tags, topic=topic, **more).records)
    return ShippedTask(epoch, number, MessageQueue(topic, "broker-b", 0), records)


RECEIVED: list[object] = []


@pytest.fixture(autouse=True)
def received(monkeypatch):
    """The notes of the listeners. They report when a task has ended, unless a test says otherwise."""
    monkeypatch.setattr(listener_module, "REPORT_S", WAIT_S)
    RECEIVED.clear()
    return RECEIVED


def by_reference(handler, **how) -> Listener:
    """A Listener whose handler is this very object, so that a test sees its effects."""
    made = listener(print, **how)
    made._pool._handler = handler
    return made


OTHER_QUEUE = MessageQueue("orders", "broker-b", 7)


def consume(made: Listener, task: ShippedTask) -> ConsumeReport:
    [report] = made.consume_all([task])
    return report


def progress(made: Listener, epoch: int, number: int) -> ConsumeReport | None:
    [report] = made.progress_all(epoch, [number])
    return report


def test_messages_reach_the_listener_one_by_one_or_in_lists(received):
    assert consume(by_reference(lambda message: received.append(message.body)), task_of(b"a", b"b")).ended
    assert received == [b"a", b"b"]
    received.clear()
    made = by_reference(
        lambda messages: received.append([message.body for message in messages]), takes_batch=True, batch_max=2
    )
    assert consume(made, task_of(b"a", b"b", b"c")) == replace(ConsumeReport(), consume_s=ANY)
    assert received == [[b"a", b"b"], [b"c"]]


def test_what_only_shares_the_tags_code_is_finished_without_a_call(received):
    made = by_reference(received.append, tags="AaAa")
    report = consume(made, task_of(b"a", tags="BBBB"))
    assert (report.ended, report.unfinished, report.failures) == (True, (), ())
    assert received == []


def test_a_message_of_the_retry_topic_has_its_own_topic_and_every_tag(received):
    made = by_reference(received.append, tags="paid")
    task = task_of(b"a", tags="other", topic="%RETRY%billing", extra_properties={"RETRY_TOPIC": "orders"})
    assert consume(made, task).failures == ()
    [message] = received
    assert (message.topic, message.tags, message.body) == ("orders", "other", b"a")


def test_the_messages_know_their_broker(received):
    consume(by_reference(received.append), task_of(b"a"))
    assert received[0].broker_name == "broker-b"


def test_an_exception_is_reported_with_the_users_traceback():
    def handle_payment(message):
        raise KeyError("amount")

    [failure] = consume(by_reference(handle_payment), task_of(b"a")).failures
    assert "in handle_payment" in failure.error
    assert "KeyError: 'amount'" in failure.error


def test_a_damaged_record_fails_and_the_others_are_consumed(received):
    task = task_of(b"aaaa", b"bbbb", b"cccc")
    damaged = replace(task, records=task.records.replace(b"bbbb", b"bxbb"))
    report = consume(by_reference(lambda message: received.append(message.body), orderly=False), damaged)
    assert [(failure.first, failure.count) for failure in report.failures] == [(1, 1)]
    assert "cannot be decoded" in report.failures[0].error
    assert received == [b"aaaa", b"cccc"]


def test_a_listener_that_cannot_be_loaded_says_why(users):
    broken = replace(ship(users.handle, takes_batch=False), payload=pickle.dumps(print)[:-5])
    made = Listener(broken, PushSettings("billing", (Subscription.parse("orders"),)))
    assert "Traceback" in made.ready()
    assert listener(print).ready() == ""


def test_a_task_that_takes_long_is_reported_in_parts(received, monkeypatch):
    monkeypatch.setattr(listener_module, "REPORT_S", 0.05)
    gate = threading.Event()

    def handle(message):
        if message.body == b"b":
            assert gate.wait(WAIT_S)
        received.append(message.body)

    made = by_reference(handle)
    assert not consume(made, task_of(b"a", b"b", b"c", number=4)).ended
    unfinished = ConsumeReport(unfinished=(1, 2), ended=False)
    eventually(lambda: progress(made, 1, 4) == unfinished, "a report without the first", WAIT_S)
    gate.set()
    report = eventually(lambda: (again := progress(made, 1, 4)) and again.ended and again, "the end", WAIT_S)
    assert (report.unfinished, received) == ((), [b"a", b"b", b"c"])
    assert progress(made, 1, 4) is None  # reported to its end


def test_a_task_of_another_process_is_not_known():
    assert progress(listener(print), 1, 1) is None


def test_a_new_life_of_the_pull_actor_takes_the_old_ones_tasks_away(received, monkeypatch):
    monkeypatch.setattr(listener_module, "REPORT_S", 0.05)
    gate = threading.Event()

    def handle(message):
        received.append(message.body)
        assert gate.wait(WAIT_S)

    made = by_reference(handle)
    assert not consume(made, task_of(b"a", b"b", epoch=1)).ended
    eventually(lambda: received == [b"a"], "the first call", WAIT_S)
    assert not consume(made, task_of(b"a", b"b", epoch=2)).ended
    assert progress(made, 1, 1) is None
    gate.set()
    eventually(lambda: progress(made, 2, 1).ended, "the end of the new task", WAIT_S)
    assert received == [b"a", b"a", b"b"]


def test_what_the_pull_actor_wants_kept_is_kept():
    made = listener(print)
    assert made.kept() is None
    made.keep((True, frozenset()))
    assert made.kept() == (True, frozenset())


class CountingHook:
    def before(self, context):
        RECEIVED.append("before")

    def after(self, context):
        RECEIVED.append(context.success)


def test_hooks_travel_with_the_listener_and_what_is_none_is_refused():
    settings = PushSettings("billing", (Subscription.parse("orders"),))
    made = Listener(ship(print, takes_batch=False), settings, (ship_hook(CountingHook()),))
    assert made.ready() == ""
    assert consume(made, task_of(b"a")).failures == ()
    for thing in (print, None, object()):
        with pytest.raises(ListenerError, match="must have the methods before"):
            ship_hook(thing)


def test_tasks_that_have_ended_do_not_wait_for_one_that_takes_long(received):
    gate = threading.Event()

    def handle(message):
        received.append(message.body)
        assert message.body != b"slow" or gate.wait(WAIT_S)

    made = by_reference(handle)
    tasks = [task_of(b"slow", number=1), replace(task_of(b"a", b"b", number=2), queue=OTHER_QUEUE)]
    slow, quick = made.consume_all(tasks)
    assert (slow.ended, slow.unfinished, quick.ended) == (False, (0,), True)
    assert made.progress_all(1, [2]) == [None]
    gate.set()
    eventually(lambda: progress(made, 1, 1).ended, "the end of the slow one", WAIT_S)
