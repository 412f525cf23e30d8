"""Tests of running several calls in parallel: every call completes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from textwrap import dedent

import pytest

from raymq.common import parallel
from raymq.common.parallel import map_parallel, submit
from tests.support.clients.fakes import AT_SHUTDOWN, WAIT_S, main_thread_has_finished, no_thread_starts


def test_results_have_the_order_of_the_items_with_fewer_threads_than_items() -> None:
    assert map_parallel(str, range(20), threads_max=3, name="test") == [str(number) for number in range(20)]
    assert map_parallel(str, [], threads_max=3, name="test") == []


def test_calls_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=WAIT_S)
    assert len(map_parallel(lambda number: together.wait(), range(3), threads_max=3, name="test")) == 3


def test_no_more_than_threads_max_run_at_the_same_time() -> None:
    lock = threading.Lock()
    now: list[int] = []
    most: list[int] = []
    pair = threading.Barrier(2, timeout=WAIT_S)

    def call(number: int) -> None:
        with lock:
            now.append(number)
            most.append(len(now))
        pair.wait()
        with lock:
            now.remove(number)
        pair.wait()

    map_parallel(call, range(6), threads_max=2, name="test")
    assert max(most) == 2


def test_the_first_failure_is_raised_when_all_calls_have_ended() -> None:
    ended: list[int] = []

    def call(number: int) -> None:
        ended.append(number)
        if number % 2:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        map_parallel(call, range(6), threads_max=2, name="test")
    assert sorted(ended) == list(range(6))


def aside_in_main(code: str) -> str:
    """Run `code` as a program in a new process. Its main thread makes calls through `aside`, which runs a call in a
    helper thread. Returns the program's output."""
    program = f"import threading\nfrom raymq import parallel\nfrom raymq.common.parallel import aside\n{dedent(code)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=True)
    return done.stdout.strip()


def test_a_call_for_which_no_thread_can_be_started_raises_the_reason() -> None:
    assert (
        aside_in_main("""
        def refuse(self): raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
        try:
            aside(print)
        except RuntimeError as error:
            print(error)
        """)
        == "can't start new thread"
    )


def test_a_call_is_made_though_no_further_helper_can_be_started() -> None:
    assert (
        aside_in_main("""
        start = threading.Thread.start
        def once(self):
            threading.Thread.start = refuse
            start(self)
        def refuse(self): raise RuntimeError("can't start new thread")
        threading.Thread.start = once
        print(aside(int, "1"), aside(int, "2"))
        """)
        == "1 2"
    )


def test_a_signal_that_comes_just_before_the_wait_is_handled_soon() -> None:
    """The main thread handles a signal soon, whether the signal arrives before or during the wait for the helper
    thread. The test sends the signal from the helper thread, so either case may occur."""
    assert (
        aside_in_main("""
        import signal, time
        parallel.SIGNAL_LOOK_S = 0.01
        def handle(number, frame): raise KeyboardInterrupt
        signal.signal(signal.SIGUSR1, handle)
        def call():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            never.wait()
        never, raised = threading.Event(), 0
        for _ in range(200):
            try:
                aside(call)
            except KeyboardInterrupt:
                raised += 1
        print(raised)
        """)
        == "200"
    )


def test_calls_at_the_interpreters_exit_are_made() -> None:
    assert (
        aside_in_main("""
        import atexit
        from raymq.common.parallel import map_parallel
        atexit.register(lambda: print(aside(int, "7")))
        atexit.register(lambda: print(map_parallel(int, ["1", "2", "3"], threads_max=2, name="exit")))
        """)
        == "[1, 2, 3]\n7"
    )


def test_the_calling_thread_makes_a_call_if_no_thread_can_be_started_at_the_exit() -> None:
    assert (
        aside_in_main(f"""
        from raymq.common import parallel as real
        def refuse(*arguments): raise RuntimeError({AT_SHUTDOWN!r})
        real.start_new_thread = refuse
        print(aside(int, "7"), aside(threading.current_thread).name)
        """)
        == "7 MainThread"
    )


@pytest.mark.parametrize("startable", [0, 1])
def test_results_are_complete_if_threads_cannot_be_started_at_the_exit(
    monkeypatch: pytest.MonkeyPatch, startable: int
) -> None:
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(started) == startable:
            raise RuntimeError(AT_SHUTDOWN)
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert map_parallel(str, range(20), threads_max=4, name="exit") == [str(number) for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        map_parallel(lambda number: 1 // number, [1, 0], threads_max=4, name="exit")


# Calls of a pool that refuses them, because the main thread has finished


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_an_event_loop_that_outlives_the_main_thread_does_not_make_a_pools_call_itself() -> None:
    """The call ends when the loop runs a callback, so a loop that makes the call itself stands still. In Python 3.12 no
    thread can make the call, so there the test only shows that the call ends."""
    can_start = sys.version_info[:2] != (3, 12)
    answer = aside_in_main(f"""
        import asyncio, concurrent.futures.thread as pools, time
        from raymq.common.parallel import submit
        pool = pools.ThreadPoolExecutor(2)
        async def call():
            called = threading.Event()
            asyncio.get_running_loop().call_soon(called.set)
            print(await asyncio.wrap_future(submit(pool, lambda: called.wait({WAIT_S / 2 if can_start else 0}))))
        def late():
            while not pools._shutdown:
                time.sleep(0.001)
            asyncio.run(call())
        threading.Thread(target=late).start()
        """)
    assert answer == "True" or (not can_start and answer == "False")


def test_refused_calls_run_in_as_many_threads_as_the_pool_has(pool: ThreadPoolExecutor) -> None:
    started, release = [threading.Event() for _ in range(3)], threading.Event()

    def call(number: int) -> str:
        started[number].set()
        assert release.wait(WAIT_S)
        return threading.current_thread().name

    with main_thread_has_finished():
        made = [submit(pool, partial(call, number)) for number in range(3)]
        assert started[0].wait(WAIT_S)
        assert started[1].wait(WAIT_S)
        assert not started[2].wait(0.05)
        release.set()
        names = {future.result(WAIT_S) for future in made}
    assert len(names) <= 2
    assert all(name.endswith("-late") for name in names)


def test_a_refused_call_that_fails_or_is_cancelled_ends_no_other_call() -> None:
    entered, release = threading.Event(), threading.Event()

    def leave() -> None:
        entered.set()
        assert release.wait(WAIT_S)
        raise SystemExit(3)

    with ThreadPoolExecutor(1) as one, main_thread_has_finished():
        left = submit(one, leave)
        assert entered.wait(WAIT_S)
        cancelled, later = submit(one, lambda: 1), submit(one, lambda: 2)
        assert cancelled.cancel()
        release.set()
        with pytest.raises(SystemExit):
            left.result(WAIT_S)
        with pytest.raises(CancelledError):
            cancelled.result(WAIT_S)
        assert later.result(WAIT_S) == 2


def test_the_threads_of_refused_calls_end_when_idle_and_start_again(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "HELPER_IDLE_S", 0.01)
    with main_thread_has_finished():
        for _ in range(3):
            thread = submit(pool, threading.current_thread).result(WAIT_S)
            assert thread.daemon
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_the_caller_makes_a_refused_call_only_if_no_thread_can_serve_the_pool(pool: ThreadPoolExecutor) -> None:
    with main_thread_has_finished(), no_thread_starts():
        assert submit(pool, threading.current_thread).result(0) is threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            submit(pool, lambda: 1 // 0).result(0)
    with main_thread_has_finished():
        thread = submit(pool, threading.current_thread).result(WAIT_S)
        with no_thread_starts():
            assert submit(pool, threading.current_thread).result(WAIT_S) is thread


def test_a_refused_call_is_reported_if_the_process_has_too_many_threads(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with main_thread_has_finished():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                submit(pool, lambda: 1)
        assert submit(pool, lambda: 2).result(WAIT_S) == 2


def test_a_pool_that_was_shut_down_still_refuses_calls() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with main_thread_has_finished(), pytest.raises(RuntimeError, match="after shutdown"):
        submit(pool, lambda: 1)
