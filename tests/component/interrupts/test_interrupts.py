"""Tests that interrupt each client call at each point by a signal handler that raises; afterwards send, poll and close
work.

Every public method of a client object either runs in a helper thread, in which no signal handler runs, or is listed in
DIRECT and is interrupted by these tests at each of its points.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from raymq.client.consumer.pull.consumer import PullConsumer
from raymq.client.producer.producer import Producer
from raymq.common.closing import OfProcess
from raymq.common.parallel import aside
from tests.unit.raymq.test_forks import kinds

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 600

DIRECT = {
    "Producer": {"send", "send_async", "send_oneway", "send_batch", "request_statistics"},
    "Client": {"async_pull_consumer", "async_simple_consumer"},
    "PullConsumer": {"poll", "poll_table", "assignment", "acknowledge", "position", "paused"},
    "AsyncPullConsumer": {"assignment", "acknowledge", "position", "paused"},
}
"""Public methods that run in the caller's thread instead of a helper thread, by class."""
NOTHING_ASIDE = {"AsyncProducer", "AsyncPullConsumer", "AsyncSimpleConsumer", "NamespacedCalls"}
"""Kinds of objects that aside_program does not test: all their calls are coroutines, or belong to another kind."""
WAITS = 2
"""Number of interrupts of a caller that waits for a helper thread: one before the helper runs the function, and one
after."""
MAKES_AN_OBJECT = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""Kinds of functions that only create a coroutine, generator or async generator; the work runs later in that
object."""


def run_program(name: str, *arguments: object) -> str:
    """Run a program of this folder. Returns its output."""
    command = [sys.executable, "-m", f"tests.component.interrupts.{name}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def points(program: str, *arguments: object) -> dict[str, Any]:
    """Run a test program of this folder. Returns the number of points that the program interrupted, by call."""
    found: dict[str, Any] = json.loads(run_program(program, *arguments).splitlines()[-1])
    print(total(found), "points:", found)
    return found


def total(found: Any) -> int:
    """Return the sum of all numbers in nested dictionaries."""
    return sum(map(total, found.values())) if isinstance(found, dict) else found


def test_a_producer_works_after_an_interrupt_at_any_point(tmp_path: Path) -> None:
    found = points("producer_program", tmp_path / "store", 1)
    assert len(found) == 10
    assert all(found.values()), "a call has no points: nothing was tried"
    assert found["send"] > 20


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_pull_consumer_works_and_skips_nothing_after_an_interrupt_at_any_point(tmp_path: Path, where: str) -> None:
    found = points("pull_program", tmp_path / "store", 1, where)
    assert len(found) == 19
    assert all(found.values()), "a call has no points: nothing was tried"


def test_a_caller_that_is_interrupted_while_a_helper_makes_its_call_leaves_nothing_taken(tmp_path: Path) -> None:
    """Tests every public method that runs in a helper thread, of every kind of object. raymq runs in the test program's
    process."""
    found = points("aside_program", tmp_path)
    assert {kind.__name__ for kind in kinds()} - set(found) == NOTHING_ASIDE
    for kind, calls in found.items():
        assert all(count > WAITS for count in calls.values()), f"{kind}: a call has no points of its own: {calls}"
    assert sum(len(calls) for calls in found.values()) > 140


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_an_async_client_works_and_skips_nothing_after_a_cancellation_or_interrupt(tmp_path: Path, where: str) -> None:
    found = points("async_program", tmp_path, where)
    counts = {kind: len(calls) for kind, calls in found.items()}
    assert counts == {"AsyncProducer": 11, "AsyncPullConsumer": 17, "AsyncSimpleConsumer": 6}
    assert all(all(calls.values()) for calls in found.values()), "a call has no points: nothing was tried"


def test_a_process_that_ends_waits_for_a_close_whose_caller_was_interrupted(tmp_path: Path) -> None:
    assert run_program("exit_program", tmp_path).splitlines() == ["close was interrupted", "all is closed"]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_public_method_runs_beside_the_main_thread_or_is_tried_here(kind: type[OfProcess]) -> None:
    direct = set()
    for name, member in inspect.getmembers(kind, inspect.isfunction):
        later = any(is_of(inspect.unwrap(member)) for is_of in MAKES_AN_OBJECT)
        if not (name.startswith("_") or later or hasattr(member, "is_aside")):
            direct.add(name)
    assert direct == DIRECT.get(kind.__name__, set())


@pytest.mark.parametrize("method", ["poll", "poll_table"])
def test_no_handler_runs_between_the_end_of_a_poll_and_its_caller(method: str) -> None:
    """If C code called a function around the poll, Python would check for signals after that call. The polled messages
    would be lost, although they count as returned."""
    assert not hasattr(getattr(PullConsumer, method), "__wrapped__")


def test_a_call_of_another_thread_runs_in_that_thread() -> None:
    """Signal handlers run in the main thread only, so calls of other threads need no helper thread."""
    threads: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: aside(lambda: threads.append(threading.current_thread())))
    thread.start()
    thread.join()
    assert threads == [thread]
    aside(lambda: threads.append(threading.current_thread()))
    assert threads[1] is not threading.main_thread()
    assert Producer.flush.__wrapped__ is not None
