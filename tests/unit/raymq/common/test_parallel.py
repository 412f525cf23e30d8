"""Tests of running several calls in parallel: every call completes."""

from __future__ import annotations

import subprocess
import sys
import threading
from textwrap import dedent

import pytest

from raymq.common.parallel import map_parallel
from tests.support.clients.fakes import AT_SHUTDOWN

WAIT_S = 60.0


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
