"""Tests of the worker in a Ray Serve replica. Its threads receive, run, complete and acknowledge tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.common import parallel
from raymq.common.errors import ClientStateError, ServiceNotAvailableError, StoreCorruptError
from raymq.serve.config import TaskSettings
from raymq.serve.decisions import DEAD, TaskRules
from raymq.serve.states import StateRecord, TaskState
from raymq.serve.task import Task
from raymq.serve.worker import TaskWorker
from tests.support.clients.fakes import WAIT_S
from tests.support.clients.task_queues import FakeTaskQueue
from tests.support.history.waiting import eventually
from tests.unit.raymq.serve.test_config import settings as settings_of

AWAY = ServiceNotAvailableError("restarting")
Start = Callable[..., TaskWorker]


@pytest.fixture
def settings() -> TaskSettings:
    return settings_of(max_retries=1, failed_task_queue_name="failed", unprocessable_task_queue_name="odd")


@pytest.fixture
def tasks(settings: TaskSettings) -> FakeTaskQueue:
    return FakeTaskQueue(settings)


@pytest.fixture
def start(tasks: FakeTaskQueue) -> Iterator[Start]:
    """Yield a function that starts workers. The workers are stopped after the test."""
    workers = []

    def start(*, concurrency: int = 2, poll_max: int | None = None, **handlers: Callable[..., Any]) -> TaskWorker:
        rules = TaskRules(tasks.settings, "w")
        worker = TaskWorker(tasks.consumer(), tasks, rules, handlers, concurrency=concurrency, poll_max=poll_max)
        workers.append(worker)
        worker.start()
        return worker

    yield start
    for worker in workers:
        assert worker.stop(WAIT_S)


def put(tasks: FakeTaskQueue, name: str, *args: Any, task_id: str = "t1", **kwargs: Any) -> int:
    return tasks.put(Task.of(task_id, name, args, kwargs, 1.0).encode())


def wait_for_states(tasks: FakeTaskQueue, *words: str, task_id: str = "t1") -> Any:
    """Wait until a task has reported the states in `words` and its message is acknowledged. Returns the result in the
    last state."""

    def done() -> bool:
        return tasks.words(task_id) == list(words) and not tasks.unacknowledged

    eventually(done, f"{words}, not {tasks.words(task_id)}", WAIT_S)
    return tasks.states[task_id][-1].result


def test_a_task_is_run_reported_and_acknowledged(tasks, start):
    start(add=lambda x, y=0: x + y)
    put(tasks, "add", 1, y=2)
    assert wait_for_states(tasks, "STARTED", "SUCCESS") == 3


def test_a_coroutine_runs_on_a_loop(tasks, start):
    loops = set()

    async def slow(value):
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return value

    worker = start(slow=slow)
    for number in range(4):
        put(tasks, "slow", number, task_id=f"t{number}")
    for number in range(4):
        assert wait_for_states(tasks, "STARTED", "SUCCESS", task_id=f"t{number}") == number
    [loop] = loops
    assert worker.stop(WAIT_S)
    eventually(loop.is_closed, "the loop's end", WAIT_S)


def test_a_task_that_fails_is_sent_back_and_in_the_end_dead(tasks, start):
    def fail():
        raise ValueError("no")

    start(fail=fail)
    first = put(tasks, "fail")
    assert wait_for_states(tasks, "STARTED", "RETRY", "STARTED", "FAILURE") == "ValueError: no"
    assert tasks.returned == [(first, 1), (first + 1, DEAD)]
    [(message, error)] = tasks.copies["failed"]
    assert (message.reconsume_times, error, tasks.dead) == (1, "ValueError: no", [message])


async def _cancelled() -> None:
    raise asyncio.CancelledError


def _exit() -> None:
    raise SystemExit(3)


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def _mute() -> None:
    raise MuteError


@pytest.mark.parametrize("handler", [_cancelled, _exit, _mute], ids=["cancelled", "exits", "mute"])
def test_a_handler_that_would_end_its_thread_has_failed(tasks, start, handler):
    start(handler=handler, add=lambda: 1, concurrency=1)
    put(tasks, "handler")
    wait_for_states(tasks, "STARTED", "RETRY", "STARTED", "FAILURE")
    put(tasks, "add", task_id="t2")
    assert wait_for_states(tasks, "STARTED", "SUCCESS", task_id="t2") == 1


def test_a_message_that_is_not_a_runnable_task_is_moved_aside(tasks, start):
    start()
    tasks.put(b"no task")
    put(tasks, "unheard")
    wait_for_states(tasks, "FAILURE")
    eventually(lambda: len(tasks.copies.get("odd", [])) == 2, "both aside", WAIT_S)
    assert tasks.returned == []


@pytest.mark.parametrize("state", [TaskState.REVOKED, TaskState.SUCCESS])
def test_a_task_that_was_cancelled_or_is_done_does_not_run(tasks, start, state):
    tasks.states["t1"] = [StateRecord("t1", state, 1.0)]
    ran = []
    start(run=ran.append)
    put(tasks, "run", 1)
    put(tasks, "run", 2, task_id="t2")
    wait_for_states(tasks, "STARTED", "SUCCESS", task_id="t2")
    wait_for_states(tasks, state.value)
    assert ran == [2]


def test_no_more_tasks_are_in_hand_than_run_at_the_same_time(tasks, start):
    gate, running = threading.Semaphore(0), []

    def wait(number):
        running.append(number)
        gate.acquire()

    worker = start(wait=wait, concurrency=2)
    for number in range(5):
        put(tasks, "wait", number, task_id=f"t{number}")
    eventually(lambda: len(running) == 2, "two run", WAIT_S)
    assert (len(tasks.unacknowledged), len(tasks.waiting)) == (2, 3)
    assert worker.figures() == {"in_hand": 2, "concurrency": 2, "told": {"STARTED": 2}}
    gate.release()
    eventually(lambda: len(running) == 3, "the next", WAIT_S)
    assert len(tasks.unacknowledged) == 2
    gate.release(4)
    for number in range(5):
        wait_for_states(tasks, "STARTED", "SUCCESS", task_id=f"t{number}")
    eventually(lambda: worker.figures()["in_hand"] == 0, "none in hand", WAIT_S)
    assert max(tasks.taken_at_once) == 2


def test_a_poll_takes_no_more_than_is_set(tasks, start):
    start(add=lambda: 1, concurrency=4, poll_max=3)
    put(tasks, "add")
    wait_for_states(tasks, "STARTED", "SUCCESS")
    assert max(tasks.taken_at_once) == 3


@pytest.mark.parametrize("method", ["poll", "history", "copy", "send_back"])
def test_calls_that_fail_are_repeated(tasks, start, method):
    tasks.failures[method] = [AWAY, StoreCorruptError("damaged")]

    def fail():
        raise ValueError("no")

    start(fail=fail)
    put(tasks, "fail")
    wait_for_states(tasks, "STARTED", "RETRY", "STARTED", "FAILURE")
    assert tasks.failures[method] == []
    assert len(tasks.dead) == 1


def test_storing_the_end_of_a_task_is_retried_but_not_its_start(tasks, start):
    tasks.failures["tell"] = [AWAY, AWAY]
    start(add=lambda: 1)
    put(tasks, "add")
    assert wait_for_states(tasks, "SUCCESS") == 1


def test_a_worker_that_stops_waits_for_handlers_and_takes_no_more(tasks, start):
    gate, entered = threading.Event(), threading.Event()

    def wait():
        entered.set()
        assert gate.wait(WAIT_S)
        return "done"

    worker = start(wait=wait, concurrency=1)
    put(tasks, "wait")
    put(tasks, "wait", task_id="t2")
    assert entered.wait(WAIT_S)
    stopping = threading.Thread(target=worker.stop, args=(WAIT_S,))
    stopping.start()
    eventually(lambda: not worker.running, "it stops", WAIT_S)
    gate.set()
    stopping.join(WAIT_S)
    assert wait_for_states(tasks, "STARTED", "SUCCESS") == "done"
    assert (tasks.words("t2"), len(tasks.waiting)) == ([], 1)
    assert worker.stop(0.0), "again"


def test_the_task_of_a_handler_that_does_not_end_goes_to_another_worker(tasks, start):
    gates = [threading.Event(), threading.Event()]
    entered = threading.Semaphore(0)
    gates[1].set()
    runs = iter(gates)

    def wait():
        gate = next(runs)
        entered.release()
        assert gate.wait(WAIT_S)

    first = start(wait=wait)
    put(tasks, "wait")
    assert entered.acquire(timeout=WAIT_S)
    assert not first.stop(0.0)
    start(wait=wait)
    wait_for_states(tasks, "STARTED", "STARTED", "SUCCESS")
    gates[0].set()
    eventually(lambda: first.stop(0.0), "the first handler's end", WAIT_S)
    assert tasks.words("t1") == ["STARTED", "STARTED", "SUCCESS"], "it came too late"


def test_a_coroutine_that_does_not_end_is_cancelled_when_the_worker_has_stopped(tasks, start):
    entered, cancelled = threading.Event(), threading.Event()

    async def wait():
        entered.set()
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            cancelled.set()

    worker = start(wait=wait)
    put(tasks, "wait")
    assert entered.wait(WAIT_S)
    assert not worker.stop(0.0)
    assert cancelled.wait(WAIT_S)
    assert tasks.words("t1") == ["STARTED"]
    eventually(lambda: worker.stop(0.0), "its threads' end", WAIT_S)


def test_a_consumer_that_cannot_be_closed_does_not_keep_a_worker(tasks, start):
    tasks.failures["close"] = [AWAY]
    worker = start()
    assert worker.stop(WAIT_S)
    assert not worker.running


@pytest.mark.parametrize("started", range(4))
def test_a_worker_that_cannot_start_its_threads_leaves_its_group_and_has_no_thread(tasks, monkeypatch, started):
    real, threads = parallel.start_thread, []

    def start_thread(thread):
        if len(threads) == started:
            return False
        threads.append(thread)
        return real(thread)

    monkeypatch.setattr(parallel, "start_thread", start_thread)
    consumer = tasks.consumer()
    worker = TaskWorker(consumer, tasks, TaskRules(tasks.settings, "w"), {}, concurrency=2)
    put(tasks, "add")
    with pytest.raises(ClientStateError, match="a worker of tasks needs a new thread"):
        worker.start()
    assert (consumer.closed, worker.running) == (True, False)
    assert tasks.waiting
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert worker._loop.is_closed()
