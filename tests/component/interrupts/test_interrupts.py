"""Tests of interrupted client calls: a signal handler raises at each point of each call. Afterwards send, poll and
close must work.

Most public methods of client objects run in a helper thread, in which no signal handler runs. All others are listed in
DIRECT, and these tests interrupt them at each of their points.
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
from tests.support.cases import chaos_seed, rounds
from tests.unit.raymq.test_forks import kinds

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 600

DIRECT = {
    "Producer": {"send", "send_async", "send_oneway", "send_batch", "request_statistics"},
    "Client": {"async_pull_consumer", "async_simple_consumer"},
    "PullConsumer": {"poll", "poll_table", "assignment", "acknowledge", "position", "paused"},
    "AsyncPullConsumer": {"assignment", "acknowledge", "position", "paused"},
}
"""By class, the public methods that run in the caller's thread, not in a helper thread."""
NOTHING_ASIDE = {"AsyncProducer", "AsyncPullConsumer", "AsyncSimpleConsumer", "NamespacedCalls"}
"""Classes of client objects that have no cases in the test program `aside_program`. All their calls are coroutines, or
are tested with another class."""
WAITS = 2
"""Number of interrupts of a caller that waits for a helper thread: one before the helper thread runs the function, and
one after it."""
MAKES_AN_OBJECT = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""Predicates for functions that only create a coroutine, a generator or an async generator. The created object does the
work later."""


def run_program(name: str, *arguments: object) -> str:
    """Run a test program of this folder. Returns its output."""
    command = [sys.executable, "-m", f"tests.component.interrupts.{name}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def points(program: str, *arguments: object) -> dict[str, Any]:
    """Run a test program of this folder. Returns, for each of the program's calls, the number of points at which the
    program interrupted the call."""
    found: dict[str, Any] = json.loads(run_program(program, *arguments).splitlines()[-1])
    print(total(found), "points:", found)
    return found


def total(found: Any) -> int:
    """Return the sum of all numbers in nested dictionaries."""
    return sum(map(total, found.values())) if isinstance(found, dict) else found


@pytest.mark.long
def test_a_producer_works_after_an_interrupt_at_any_point(tmp_path: Path) -> None:
    found = points("producer_program", tmp_path / "store", 1)
    assert len(found) == 10
    assert all(found.values()), "a call has no points: nothing was tried"
    assert found["send"] > 20


@pytest.mark.long
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_pull_consumer_works_and_skips_nothing_after_an_interrupt_at_any_point(tmp_path: Path, where: str) -> None:
    found = points("pull_program", tmp_path / "store", 1, where)
    assert len(found) == 19
    assert all(found.values()), "a call has no points: nothing was tried"


@pytest.mark.long
def test_a_caller_that_is_interrupted_while_a_helper_makes_its_call_leaves_nothing_taken(tmp_path: Path) -> None:
    """Some public methods run in a helper thread while their caller waits. The test interrupts the callers of all these
    methods, for every kind of client object. All resources are released afterwards. raymq runs in the test program's
    process."""
    found = points("aside_program", tmp_path)
    assert {kind.__name__ for kind in kinds()} - set(found) == NOTHING_ASIDE
    for kind, calls in found.items():
        assert all(count > WAITS for count in calls.values()), f"{kind}: a call has no points of its own: {calls}"
    assert sum(len(calls) for calls in found.values()) > 140


@pytest.mark.long
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_an_async_client_works_and_skips_nothing_after_a_cancellation_or_interrupt(tmp_path: Path, where: str) -> None:
    found = points("async_program", tmp_path, where, rounds(5, 1), chaos_seed())
    counts = {kind: len(calls) for kind, calls in found.items()}
    assert counts == {"AsyncProducer": 11, "AsyncPullConsumer": 17, "AsyncSimpleConsumer": 9}
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
    """The poll methods have no wrapper. If C code called a wrapper around the poll, Python would run signal handlers
    after the poll. The polled messages would then be lost, although the consumer counts them as returned."""
    assert not hasattr(getattr(PullConsumer, method), "__wrapped__")


def test_a_call_of_another_thread_runs_in_that_thread() -> None:
    """A call from a thread other than the main thread uses no helper thread, because signal handlers run only in the
    main thread."""
    threads: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: aside(lambda: threads.append(threading.current_thread())))
    thread.start()
    thread.join()
    assert threads == [thread]
    aside(lambda: threads.append(threading.current_thread()))
    assert threads[1] is not threading.main_thread()
    assert Producer.flush.__wrapped__ is not None
