"""Tests of listeners that are coroutine functions. They run on one event loop, and have the same limits, timeouts,
order and failures as plain listeners."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
from types import SimpleNamespace

import pytest

from raymq.client.consumer.push.consume_pool import ConsumePool
from raymq.client.consumer.push.listener import ship, ship_hook
from raymq.common.errors import ListenerError
from raymq.common.message import ConsumeStatus
from raymq.common.protocol.consume_result import ConsumeLater
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.unit.raymq.client.consumer.push.test_consume_pool import Hook, pool_of, request_of, run, wait

AWAKE = contextvars.ContextVar("AWAKE", default="")


class Awaited:
    """Coroutine listener that records its messages. If the test has set a gate for a message, the listener waits until
    the gate opens."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.loops: set[int] = set()
        self.running = self.most = 0
        self.cancelled: list[str] = []
        self.answers: dict[str, object] = {}
        self.gated: set[str] = set()
        self.open = threading.Event()

    async def __call__(self, messages):
        name = ",".join(message.name for message in messages) if isinstance(messages, list) else messages.name
        self.seen.append(name)
        self.loops.add(id(asyncio.get_running_loop()))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            while name in self.gated and not self.open.is_set():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
            answer = self.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.running -= 1


@pytest.fixture
def listener():
    awaited = Awaited()
    yield awaited
    awaited.open.set()


async def function(seen, message):
    await asyncio.sleep(0)
    seen.append(message.name)


class Method:
    def __init__(self, seen) -> None:
        self.seen = seen

    async def handle(self, message):
        await function(self.seen, message)

    __call__ = handle


def plain(seen, message):
    return function(seen, message)


class Own:
    """An object that can be awaited, but is not a coroutine."""

    def __init__(self, seen, message) -> None:
        self.seen, self.message = seen, message

    def __await__(self):
        return function(self.seen, self.message).__await__()


@pytest.mark.parametrize("kind", ["partial", "method", "plain", "awaitable", "lambda"])
def test_a_listener_of_any_kind_that_gives_an_awaitable_is_awaited(kind):
    seen: list[str] = []
    listener = {
        "partial": functools.partial(function, seen),
        "method": Method(seen).handle,
        "plain": functools.partial(plain, seen),
        "awaitable": functools.partial(Own, seen),
        "lambda": lambda message: function(seen, message),
    }[kind]
    report = run(pool_of(listener), request_of("a", "b", key="q"))
    assert (report.failures, report.unfinished, seen) == ((), (), ["a", "b"])


def test_as_many_coroutines_run_at_a_time_as_there_are_threads_on_one_loop(listener):
    names = [f"m{index}" for index in range(20)]
    listener.gated |= set(names)
    pool, request = pool_of(listener, threads=3), request_of(*names)
    pool.submit(request)
    thread = threading.Thread(target=wait, args=(pool, request, WAIT_S))
    thread.start()
    eventually(lambda: listener.running == 3, "three coroutines at a time", WAIT_S)
    listener.open.set()
    thread.join(WAIT_S)
    assert (listener.most, len(listener.loops)) == (3, 1)
    assert sorted(listener.seen) == sorted(names)


def test_in_order_one_coroutine_of_a_queue_runs_at_a_time_and_the_first_failure_ends_the_work(listener):
    listener.answers["c"] = ConsumeStatus.RECONSUME_LATER
    report = run(pool_of(listener), request_of("a", "b", "c", "d", key="q"))
    assert (listener.seen, listener.most) == (["a", "b", "c"], 1)
    assert ([failure.first for failure in report.failures], report.unfinished) == ([2], (3,))


@pytest.mark.parametrize("answer", [ConsumeStatus.RECONSUME_LATER, ConsumeLater(delay_level=5), False, KeyError("x")])
@pytest.mark.parametrize("hooked", [False, True])
def test_an_awaited_answer_counts_as_a_plain_one(listener, answer, hooked):
    listener.answers["b"] = answer
    log: list[object] = []
    pool = pool_of(listener, hooks=[Hook(log)] if hooked else [])
    [failure] = run(pool, request_of("a", "b", "c")).failures
    assert failure.first == 1
    assert failure.raised == isinstance(answer, KeyError)
    assert failure.unknown == (answer is False)
    if hooked:
        assert sorted(entry[2] for entry in log if entry[0] == "after") == [False, True, True]


def test_a_list_is_awaited_once_and_may_be_done_up_to_a_message(listener):
    listener.answers["a,b,c"] = ConsumeLater(first=1)
    [failure] = run(pool_of(listener), request_of("a", "b", "c", size=3)).failures
    assert (failure.first, failure.count, listener.seen) == (1, 2, ["a,b,c"])


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_an_error_that_would_end_the_loop_fails_only_its_own_message(listener, error):
    listener.answers["a"] = error
    pool = pool_of(listener)
    [failure] = run(pool, request_of("a")).failures
    assert type(error).__name__ in failure.error
    assert run(pool, request_of("b")).failures == ()
    assert len(listener.loops) == 1


def test_a_callback_that_exits_does_not_end_the_loop():
    async def listener(message):
        if message.name == "a":
            asyncio.get_running_loop().call_soon(sys.exit)
        await asyncio.sleep(0.01)

    pool = pool_of(listener)
    assert run(pool, request_of("a", "b", key="q")).failures == ()


def test_a_coroutine_that_takes_too_long_is_cancelled_and_frees_its_thread(listener):
    listener.gated.add("late")
    pool = pool_of(listener, threads=1, timeout_s=0.1)
    request = request_of("late", "a")
    report = run(pool, request)
    [failure] = report.failures
    assert (failure.first, failure.timed_out, failure.delay_level) == (0, True, 3)
    eventually(lambda: wait(pool, request, 0.0).stuck == 0, "the cancelled coroutine's end", WAIT_S)
    assert listener.cancelled == ["late"]
    assert "a" in listener.seen


def test_a_coroutine_that_ignores_its_cancellation_counts_as_stuck():
    go = threading.Event()

    async def stubborn(message):
        while not go.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                continue

    pool = pool_of(stubborn, threads=1, timeout_s=0.05)
    request = request_of("a")
    assert run(pool, request).stuck == 1
    go.set()
    eventually(lambda: wait(pool, request, 0.0).stuck == 0, "the coroutine's end", WAIT_S)


def test_a_coroutine_sees_the_context_of_its_hooks():
    class Sets:
        def before(self, context):
            AWAKE.set(context.messages[0].name)

        def after(self, context):
            AWAKE.set("")

    seen = []

    async def listener(message):
        seen.append((message.name, AWAKE.get()))

    run(pool_of(listener, hooks=[Sets()]), request_of("a", "b", key="q"))
    assert seen == [("a", "a"), ("b", "b")]


def test_an_administrators_call_awaits_too_and_is_cancelled_after_the_timeout(listener):
    message = SimpleNamespace(name="a", topic="orders")
    listener.answers["a"] = False
    status, reason, _ = ConsumePool(listener, threads=1, timeout_s=WAIT_S).call_directly(message)
    assert (status, "False (bool), which is not a valid answer" in reason) == ("RECONSUME_LATER", True)
    listener.gated.add("a")
    status, reason, _ = ConsumePool(listener, threads=1, timeout_s=0.05).call_directly(message)
    assert (status, "has not returned after 0.05 s" in reason) == ("EXCEPTION", True)
    eventually(lambda: listener.cancelled == ["a"], "the coroutine's end", WAIT_S)


# Tests of listeners and settings that are refused at the start


def generator(message):
    yield message


async def async_generator(message):
    yield message


class Generates:
    def __call__(self, message):
        yield message


class GeneratesLater:
    async def __call__(self, message):
        yield message


REFUSED = [
    generator,
    async_generator,
    Generates(),
    GeneratesLater(),
    functools.partial(generator),
    Generates().__call__,
]


@pytest.mark.parametrize("listener", REFUSED)
@pytest.mark.parametrize("takes_batch", [False, True])
def test_a_generator_function_is_refused(listener, takes_batch):
    with pytest.raises(ListenerError, match=r"generator function, so calling it runs none of its code. Remove `yield`"):
        ship(listener, takes_batch=takes_batch)


def test_a_coroutine_function_is_accepted():
    for listener in (function, Method([]).handle, Method([]), functools.partial(function, [])):
        assert ship(listener, takes_batch=False).payload


def test_a_hook_that_would_never_run_is_refused():
    class Later:
        async def before(self, context):
            raise AssertionError("nobody awaits it")

        def after(self, context):
            pass

    with pytest.raises(ListenerError, match=r"before of the consume hook is a coroutine function"):
        ship_hook(Later())
