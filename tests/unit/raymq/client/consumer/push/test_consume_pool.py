"""Tests of the thread pool in a listener's process: quick calls share one thread, slow calls use all threads, and calls
that exceed their timeout are abandoned."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from raymq.client.consumer.push import consume_pool
from raymq.client.consumer.push.consume_pool import ConsumePool, ConsumeRequest
from raymq.client.consumer.push.hook import ConsumeContext
from raymq.common.message import ConsumeStatus
from raymq.common.protocol.consume_result import ConsumeLater, ConsumeReport
from raymq.common.protocol.request_reply import reply
from raymq.telemetry.metrics.client_figures import PROCESS_TIME
from tests.support.clients.fakes import WAIT_S, no_thread_starts
from tests.support.history.waiting import eventually
from tests.support.metrics.counted import Counted


class Scripted:
    """Listener that records the message name and the thread of each call. If the test has set a gate for the name, the
    listener waits until the gate opens."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.seen: list[str] = []
        self.threads: set[int] = set()
        self.running = 0
        self.most = 0
        self.gates: dict[str, threading.Event] = {}
        self.answers: dict[str, object] = {}

    def __call__(self, messages):
        name = ",".join(message.name for message in messages) if isinstance(messages, list) else messages.name
        with self.changed:
            self.seen.append(name)
            self.threads.add(threading.get_ident())
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()
        try:
            if name in self.gates:
                assert self.gates[name].wait(WAIT_S)
            answer = self.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            with self.changed:
                self.running -= 1

    def gate(self, *names: str) -> None:
        self.gates |= {name: threading.Event() for name in names}

    def open(self) -> None:
        for gate in self.gates.values():
            gate.set()

    def wait_seen(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(names) <= set(self.seen), WAIT_S), self.seen


@pytest.fixture
def listener():
    scripted = Scripted()
    yield scripted
    scripted.open()


def pool_of(listener, *, threads=4, timeout_s=3600.0, **more) -> ConsumePool:
    return ConsumePool(listener, threads=threads, timeout_s=timeout_s, **more)


def request_of(*names: str, key: str | None = None, size: int = 1) -> ConsumeRequest:
    messages = [SimpleNamespace(name=name) for name in names]
    firsts = range(0, len(messages), size)
    return ConsumeRequest(messages if size == 1 else [messages[first : first + size] for first in firsts], firsts, key)


def wait(pool: ConsumePool, request: ConsumeRequest, wait_s: float) -> ConsumeReport:
    """Run the thread pool, as its owner does, until a consume request is done, for at most `wait_s`. Returns the report
    of the request."""
    until_s = time.monotonic() + wait_s
    while True:
        pool.renew_leases()
        left_s = until_s - time.monotonic()
        if left_s <= 0 or request.done.wait(min(left_s, pool.look(), 0.05)):
            return pool.report(request)


def run(pool: ConsumePool, request: ConsumeRequest) -> ConsumeReport:
    pool.submit(request)
    return wait(pool, request, WAIT_S)


def test_messages_are_handed_over_one_by_one_in_order(listener):
    report = run(pool_of(listener), request_of("a", "b", "c", key="q"))
    assert (report.ended, report.unfinished, report.failures) == (True, (), ())
    assert listener.seen == ["a", "b", "c"]
    assert listener.most == 1


def test_lists_have_at_most_the_size_asked_for(listener):
    run(pool_of(listener), request_of("a", "b", "c", key="q", size=2))
    assert listener.seen == ["a,b", "c"]


def test_a_work_without_calls_has_ended(listener):
    assert run(pool_of(listener), request_of()).ended


def test_quick_calls_need_one_thread(listener, monkeypatch):
    monkeypatch.setattr(consume_pool, "JOIN_AFTER_S", 3600.0)
    pool = pool_of(listener)
    for _ in range(20):
        assert run(pool, request_of(*"abcdefgh")).ended
    assert len(listener.threads) == 1


def test_a_slow_call_does_not_keep_its_neighbours_waiting(listener):
    listener.gate("slow")
    pool = pool_of(listener)
    request = request_of("a", "slow", "b", "c")
    pool.submit(request)
    eventually(lambda: wait(pool, request, 0.01).unfinished == (1,), "the others' end", WAIT_S)
    assert not wait(pool, request, 0.0).ended
    listener.open()
    assert wait(pool, request, WAIT_S).ended


def test_as_many_calls_run_at_a_time_as_there_are_threads(listener):
    names = [f"m{index}" for index in range(20)]
    listener.gate(*names)
    pool = pool_of(listener, threads=3)
    requests = [request_of(*names[:10]), request_of(*names[10:])]
    for request in requests:
        pool.submit(request)
    waiting = [threading.Thread(target=wait, args=(pool, request, WAIT_S)) for request in requests]
    for thread in waiting:
        thread.start()
    eventually(lambda: listener.running == 3, "three calls at a time", WAIT_S)
    listener.open()
    for thread in waiting:
        thread.join(WAIT_S)
    assert listener.most == 3
    assert sorted(listener.seen) == sorted(names)


@pytest.mark.parametrize(
    ("answer", "level", "suspend_ms"),
    [
        (ConsumeStatus.RECONSUME_LATER, 0, -1),
        (ConsumeLater(), 0, -1),
        (ConsumeLater(delay_level=-1), -1, -1),
        (ConsumeLater(delay_level=7, suspend_ms=50), 7, 50),
    ],
)
def test_consume_later_fails_one_message_with_its_delay(listener, answer, level, suspend_ms):
    listener.answers["b"] = answer
    report = run(pool_of(listener), request_of("a", "b", "c"))
    [failure] = report.failures
    assert (failure.first, failure.count, failure.delay_level, failure.suspend_ms) == (1, 1, level, suspend_ms)
    assert report.ended
    assert report.unfinished == ()
    assert sorted(listener.seen) == ["a", "b", "c"]


@pytest.mark.parametrize("answer", [None, ConsumeStatus.CONSUME_SUCCESS])
def test_none_and_success_mean_consumed(listener, answer):
    listener.answers["a"] = answer
    assert run(pool_of(listener), request_of("a")).failures == ()


class NoRepr:
    def __repr__(self) -> str:
        raise ValueError("a user's bug")


UNKNOWN = [True, False, 0, 1, 2, "yes", b"", {}, ConsumeLater, ConsumeStatus, NoRepr(), "x" * 1000]


@pytest.mark.parametrize("key", [None, "a queue"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("answer", UNKNOWN, ids=lambda answer: type(answer).__name__)
def test_an_invalid_answer_fails_the_message_with_a_reason(listener, caplog, answer, size, key):
    names = ["a", "b"][:size]
    listener.answers[",".join(names)] = answer
    [failure] = run(pool_of(listener), request_of(*names, size=size, key=key)).failures
    assert (failure.first, failure.count, failure.unknown) == (0, size, True)
    assert f"({type(answer).__name__}), which is not a valid answer" in failure.error
    assert len(failure.error) < 600
    assert failure.error in caplog.text


def test_a_generator_that_a_plain_function_returns_fails_the_message():
    pool = pool_of(lambda message: (number for number in range(3)))
    [failure] = run(pool, request_of("a")).failures
    assert "(generator), which is not a valid answer" in failure.error


def test_consume_later_with_an_unknown_message_is_a_clear_failure(listener):
    listener.answers["a"] = ConsumeLater(first=1)
    [failure] = run(pool_of(listener), request_of("a")).failures
    assert (failure.first, failure.count) == (0, 1)
    assert "called with 1 message(s)" in failure.error


@pytest.mark.parametrize("error", [KeyError("amount"), SystemExit(3), GeneratorExit()])
def test_an_exception_fails_the_message_with_the_users_traceback(listener, error):
    listener.answers["a"] = error
    [failure] = run(pool_of(listener), request_of("a")).failures
    assert type(error).__name__ in failure.error
    assert "in __call__" in failure.error


def test_a_list_may_be_done_up_to_a_message(listener):
    listener.answers["b,c,d"] = ConsumeLater(first=1)
    [failure] = run(pool_of(listener), request_of("b", "c", "d", size=3)).failures
    assert (failure.first, failure.count) == (1, 2)


def test_a_message_that_cannot_be_shown_fails_without_a_call(listener):
    request = ConsumeRequest([SimpleNamespace(name="a"), ValueError("torn")], [0, 1], None, damaged=True)
    [failure] = run(pool_of(listener), request).failures
    assert (failure.first, failure.count, failure.error) == (1, 1, "the message cannot be decoded: torn")
    assert listener.seen == ["a"]


def test_a_failure_of_an_orderly_request_is_reported_with_its_end() -> None:
    """The moment between the end of the failed call and the end of its request is set by hand."""
    request = ConsumeRequest([SimpleNamespace(name=name) for name in "abc"], [0, 1, 2], "queue 0")
    request.failures[1] = request.failure(1, "out of stock")
    request.ended += [0, 1]
    early = request.report(0)
    assert (early.ended, early.failures, set(early.unfinished)) == (False, (), {1, 2})
    request.done.set()
    end = request.report(0)
    assert (end.ended, [one.first for one in end.failures], set(end.unfinished)) == (True, [1], {2})


def test_in_order_the_first_failure_ends_the_work(listener):
    listener.answers["b"] = ConsumeStatus.RECONSUME_LATER
    report = run(pool_of(listener), request_of("a", "b", "c", "d", key="q"))
    assert (report.ended, report.unfinished, [failure.first for failure in report.failures]) == (True, (2, 3), [1])
    assert listener.seen == ["a", "b"]


# Tests of listener calls that take too long


def test_a_call_that_takes_too_long_is_given_up_and_its_thread_replaced(listener, monkeypatch):
    passed_s = 0.0
    monkeypatch.setattr(consume_pool, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    listener.gate("stuck")
    pool = pool_of(listener, threads=1)
    request = request_of("stuck", "a", "b")
    pool.submit(request)
    listener.wait_seen("stuck")
    passed_s = 3600.0
    report = wait(pool, request, WAIT_S)
    assert report.ended
    assert set(listener.seen) == {"stuck", "a", "b"}
    assert report.stuck == 1
    listener.open()
    eventually(lambda: wait(pool, request, 0.0).stuck == 0, "the stuck call's return", WAIT_S)
    assert run(pool, request_of("c")).failures == ()


def test_a_given_up_call_is_reported_as_failed_at_level_three(listener):
    listener.gate("stuck")
    pool = pool_of(listener, timeout_s=0.1)
    request = request_of("stuck")
    report = run(pool, request)
    [failure] = report.failures
    assert (failure.first, failure.timed_out, failure.delay_level) == (0, True, 3)
    assert report.ended
    assert "0.1 s" in failure.error


def test_when_all_threads_and_their_replacements_are_stuck_the_rest_waits_for_one_to_return(listener):
    stuck = [f"stuck{index}" for index in range(4)]
    listener.gate(*stuck)
    pool = pool_of(listener, threads=2, timeout_s=0.1)
    for name in stuck:
        request = request_of(name)
        report = run(pool, request)
        assert report.ended
    assert report.stuck == 4
    late = request_of("a")
    pool.submit(late)
    assert not wait(pool, late, 0.2).ended
    listener.gates["stuck0"].set()
    assert wait(pool, late, WAIT_S).ended


def test_in_order_no_call_is_given_up(listener):
    listener.gate("slow")
    pool = pool_of(listener, timeout_s=0.1)
    request = request_of("slow", "a", key="q")
    pool.submit(request)
    assert wait(pool, request, 0.3) == ConsumeReport(unfinished=(0, 1), ended=False)
    listener.open()
    assert wait(pool, request, WAIT_S).failures == ()


# Tests of consume requests that are withdrawn from the thread pool


def test_a_cancelled_work_begins_no_further_call(listener):
    listener.gate("a")
    pool = pool_of(listener)
    request = request_of("a", "b", "c", key="q")
    pool.submit(request)
    listener.wait_seen("a")
    pool.cancel(request)
    listener.open()
    report = wait(pool, request, WAIT_S)
    assert (report.ended, report.unfinished) == (True, (1, 2))


def test_in_order_a_new_work_takes_the_old_one_away_and_waits_for_its_call(listener):
    listener.gate("a")
    pool = pool_of(listener)
    old, between, new = request_of("a", "b", key="q"), request_of("x", key="q"), request_of("a2", "b2", key="q")
    pool.submit(old)
    listener.wait_seen("a")
    pool.submit(between)
    pool.submit(new)
    assert not wait(pool, new, 0.1).ended
    assert listener.seen == ["a"]
    assert wait(pool, between, 0.0) == ConsumeReport(unfinished=(0,))
    listener.open()
    assert wait(pool, new, WAIT_S).unfinished == ()
    assert listener.seen == ["a", "a2", "b2"]
    assert wait(pool, old, WAIT_S).unfinished == (1,)


def test_other_queues_do_not_wait_for_each_other(listener):
    listener.gate("a")
    pool = pool_of(listener)
    pool.submit(request_of("a", key="q"))
    assert run(pool, request_of("b", key="p")).ended


def test_a_work_that_nobody_asks_about_is_taken_away(listener, monkeypatch):
    listener.gate("a")
    pool = pool_of(listener)
    request = request_of("a", "b", key="q")
    pool.submit(request)
    listener.wait_seen("a")
    monkeypatch.setattr(consume_pool, "HANDLER_LEASE_S", 0.0)
    pool.renew_leases()
    listener.open()
    assert request.done.wait(WAIT_S)
    assert listener.seen == ["a"]


# Tests of consume hooks


class Hook:
    def __init__(self, log, fails=False) -> None:
        self.log, self.fails = log, fails

    def before(self, context: ConsumeContext) -> None:
        context.properties["seen"] = True
        self.log.append(("before", [message.name for message in context.messages]))
        if self.fails:
            raise ValueError("a hook's bug")

    def after(self, context: ConsumeContext) -> None:
        self.log.append(("after", context.group, context.success, bool(context.error), context.properties))
        if self.fails:
            raise ValueError("a hook's bug")


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_called_around_each_call_and_decide_nothing(listener, fails):
    log: list[object] = []
    listener.answers["b"] = ConsumeStatus.RECONSUME_LATER
    pool = pool_of(listener, group="billing", hooks=[Hook(log, fails)])
    report = run(pool, request_of("a", "b", key="q"))
    assert [failure.first for failure in report.failures] == [1]
    assert log == [
        ("before", ["a"]),
        ("after", "billing", True, False, {"seen": True}),
        ("before", ["b"]),
        ("after", "billing", False, True, {"seen": True}),
    ]


class Replier:
    """Fake replier that records the replies to messages. It reports the reply for message "wrong" as invalid."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[str], object]] = []

    def answer(self, messages, answer):
        self.seen.append(([message.name for message in messages], answer))
        return "no reply" if messages[0].name == "wrong" else ""

    def statistics(self):
        raise AssertionError("nobody asks")


@pytest.mark.parametrize("key", [None, "a queue"])
def test_replies_are_sent_before_their_message_counts_as_consumed(key):
    replier, listener = Replier(), Scripted()
    one, two = reply(b"1"), [reply(b"2"), None]
    listener.answers = {"a": one, "b,c": two, "wrong": one}
    pool = ConsumePool(listener, threads=1, timeout_s=WAIT_S, replier=replier)
    calls = [
        SimpleNamespace(name="a"),
        [SimpleNamespace(name="b"), SimpleNamespace(name="c")],
        SimpleNamespace(name="x"),
    ]
    request = ConsumeRequest([*calls, SimpleNamespace(name="wrong")], [0, 1, 3, 4], key)
    pool.submit(request)
    assert request.done.wait(WAIT_S)
    assert replier.seen == [(["a"], one), (["b", "c"], two), (["wrong"], one)]
    assert [(failure.first, failure.error) for failure in pool.report(request).failures] == [(4, "no reply")]


def test_calls_are_counted_by_how_long_they_took_and_if_they_failed(listener, monkeypatch):
    counted = Counted()
    monkeypatch.setattr(consume_pool, "CLIENT_FIGURES", counted)
    # With QUICK_CALL_S = one hour, every listener call counts as quick. The pool then reports the successful calls
    # together, and the failed call separately.
    monkeypatch.setattr(consume_pool, "QUICK_CALL_S", 3600.0)
    listener.answers["bad"] = ValueError("no")
    request = request_of("a", "b", "bad", "c")
    request.topic = "orders"
    run(pool_of(listener, group="g"), request)
    assert counted.values(PROCESS_TIME) == {("orders", "g", "success"): 3, ("orders", "g", "failure"): 1}
    # With QUICK_CALL_S = 0 no listener call counts as quick, so the pool reports each call's duration separately.
    monkeypatch.setattr(consume_pool, "QUICK_CALL_S", 0.0)
    more = request_of("d", "e")
    more.topic = "orders"
    run(pool_of(listener, group="g"), more)
    assert counted.values(PROCESS_TIME) == {("orders", "g", "success"): 5, ("orders", "g", "failure"): 1}


def test_a_call_that_was_given_up_is_counted_once_as_a_failure(listener, monkeypatch):
    counted = Counted()
    monkeypatch.setattr(consume_pool, "CLIENT_FIGURES", counted)
    listener.gate("late")
    pool, request = pool_of(listener, timeout_s=0.05), request_of("late")
    assert run(pool, request).failures
    listener.open()
    eventually(lambda: not listener.running, "the late call's end", WAIT_S)
    assert counted.values(PROCESS_TIME) == {("", "", "failure"): 1}


def test_a_thread_that_cannot_start_takes_no_other_threads_place(listener):
    pool = pool_of(listener, threads=1)
    with no_thread_starts():
        pool.submit(request_of("a"))
    assert run(pool, request_of("b")).ended
    listener.wait_seen("a", "b")
