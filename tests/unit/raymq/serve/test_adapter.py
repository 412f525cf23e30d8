"""Tests of RaymqTaskProcessorAdapter, raymq's task processor for Ray Serve, without Ray: its nine methods and its five
coroutine methods."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._common.utils import import_attr
from ray.serve.schema import TaskProcessorAdapter, TaskProcessorConfig, TaskResult
from ray.serve.task_consumer import instantiate_adapter_from_config

from raymq.common.errors import (
    ClientStateError,
    ClusterNotFoundError,
    ConfigError,
    InvalidArgumentError,
    ServiceNotAvailableError,
)
from raymq.serve import RaymqAdapterConfig, RaymqTaskProcessorAdapter, adapter as adapter_module
from tests.support.clients.fakes import WAIT_S, no_thread_starts
from tests.support.clients.task_queues import FakeTaskQueue
from tests.support.history.waiting import eventually

CALLS = {
    "enqueue_task": ("add", [1], {"y": 2}),
    "get_task_status": ("t1",),
    "cancel_task": ("t1",),
    "get_metrics": (),
    "health_check": (),
}
"""Methods of the adapter that users' programs call, each with arguments."""
DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> FakeTaskQueue:
    """Return the fake task queue to which the adapters connect at their first call."""
    tasks = FakeTaskQueue(RaymqTaskProcessorAdapter(config())._settings)
    monkeypatch.setattr(adapter_module.TaskConnection, "open", lambda settings: tasks)
    return tasks


def config(**fields: Any) -> TaskProcessorConfig:
    defaults = {"queue_name": "jobs", "adapter": RaymqTaskProcessorAdapter, "adapter_config": RaymqAdapterConfig()}
    return TaskProcessorConfig(**defaults | {"max_retries": 0} | fields)


@pytest.fixture
def adapter() -> Iterator[RaymqTaskProcessorAdapter]:
    adapter = RaymqTaskProcessorAdapter(config())
    adapter.initialize(2)
    adapter.register_task_handle(lambda x, y=0: x + y, "add")
    yield adapter
    adapter.stop_consumer(WAIT_S)


def ended(adapter: RaymqTaskProcessorAdapter, task: TaskResult) -> TaskResult:
    """Wait until a task has ended. Returns its final state."""

    def end() -> TaskResult | None:
        result = adapter.get_task_status_sync(task.id)
        return result if result.status in ("SUCCESS", "FAILURE") else None

    return eventually(end, "the task's end", WAIT_S)


# Tests of the methods, configuration and connection of RaymqTaskProcessorAdapter


def test_the_adapter_has_every_method_of_rays_interface():
    assert issubclass(RaymqTaskProcessorAdapter, TaskProcessorAdapter)
    assert not RaymqTaskProcessorAdapter.__abstractmethods__
    methods = dict(inspect.getmembers(TaskProcessorAdapter, inspect.isfunction))
    del methods["__init__"]
    assert len(methods) == 9 + len(CALLS)
    for name, method in methods.items():
        assert name in vars(RaymqTaskProcessorAdapter), f"{name} is not ours"
        ours = inspect.signature(getattr(RaymqTaskProcessorAdapter, name)).parameters
        assert list(ours) == list(inspect.signature(method).parameters), name


def test_the_adapter_can_be_imported_by_its_name():
    assert import_attr("raymq.serve.RaymqTaskProcessorAdapter") is RaymqTaskProcessorAdapter


@pytest.mark.parametrize("given", [RaymqAdapterConfig(group="serve-jobs"), {"group": "serve-jobs"}, None])
def test_the_adapter_config_may_be_a_mapping_or_left_out(given):
    RaymqTaskProcessorAdapter(config(adapter_config=given))


def test_another_adapters_config_is_refused():
    with pytest.raises(ConfigError, match="broker_url"):
        RaymqTaskProcessorAdapter(config(adapter_config={"broker_url": "redis://"}))


def test_calls_before_initialize_raise_with_a_remedy():
    adapter = RaymqTaskProcessorAdapter(config())
    for name in ("enqueue_task", "get_task_status", "cancel_task", "get_metrics"):
        with pytest.raises(ClientStateError, match="initialize"):
            getattr(adapter, f"{name}_sync")(*CALLS[name])
    with pytest.raises(ClientStateError, match="initialize"):
        adapter.start_consumer()
    assert adapter.health_check_sync() == [{"serve-jobs": {"error": "initialize() was not called"}}]
    adapter.stop_consumer()


def test_initialize_without_a_raymq_raises_a_clear_error(monkeypatch):
    def missing(settings):
        raise ClusterNotFoundError("start it with `raymq up`")

    monkeypatch.setattr(adapter_module.TaskConnection, "open", missing)
    with pytest.raises(ClusterNotFoundError, match="raymq up"):
        RaymqTaskProcessorAdapter(config()).initialize()
    with pytest.raises(RuntimeError, match=r"Failed to initialize RaymqTaskProcessorAdapter: .*raymq up"):
        instantiate_adapter_from_config(config())
    with pytest.raises(InvalidArgumentError, match="consumer_concurrency must be 1 to"):
        RaymqTaskProcessorAdapter(config()).initialize(0)


def test_the_connection_is_closed_when_nobody_has_the_adapter(tasks):
    adapter = RaymqTaskProcessorAdapter(config())
    adapter.initialize()
    adapter.initialize()
    assert not tasks.closed
    del adapter
    gc.collect()
    eventually(lambda: tasks.closed, "the end of the connection", WAIT_S)


def test_a_closed_adapter_has_no_connection_until_it_is_initialized_again(adapter, tasks):
    adapter.start_consumer()
    adapter.close()
    adapter.close()
    assert (tasks.closed, adapter._worker) == (True, None)
    with pytest.raises(ClientStateError, match="initialize"):
        adapter.enqueue_task_sync("add")
    adapter.initialize()
    assert adapter.enqueue_task_sync("add").status == "PENDING"


# Tests of task handlers


def test_a_handler_has_its_own_name_unless_it_is_given_one(adapter):
    def halve(x):
        return x / 2

    adapter.register_task_handle(halve)
    adapter.register_task_handle(halve, "half")
    adapter.register_task_handle(halve)
    adapter.start_consumer()
    assert ended(adapter, adapter.enqueue_task_sync("halve", [3])).result == 1.5
    assert ended(adapter, adapter.enqueue_task_sync("half", [5])).result == 2.5


def test_two_handlers_with_one_name_are_refused(adapter):
    with pytest.raises(InvalidArgumentError, match="register this handler under another name"):
        adapter.register_task_handle(lambda: 1, "add")


# Tests of programs that enqueue and cancel tasks


def test_a_program_makes_an_adapter_of_the_config_of_a_deployment():
    made = instantiate_adapter_from_config(config(adapter="raymq.serve.RaymqTaskProcessorAdapter"))
    assert isinstance(made, RaymqTaskProcessorAdapter)
    assert made.enqueue_task_sync("add").status == "PENDING"


def test_a_task_is_pending_until_a_consumer_runs_it(adapter):
    before_s = time.time()
    task = adapter.enqueue_task_sync("add", [1], {"y": 2})
    assert (task.status, task.result) == ("PENDING", None)
    assert before_s <= task.created_at <= time.time()
    assert adapter.get_task_status_sync(task.id) == task
    adapter.start_consumer()
    assert ended(adapter, task) == TaskResult(id=task.id, status="SUCCESS", created_at=task.created_at, result=3)


def test_a_failed_task_has_its_error(adapter):
    adapter.start_consumer()
    task = ended(adapter, adapter.enqueue_task_sync("add", ["text"]))
    assert task.status == "FAILURE"
    assert task.result.startswith("TypeError: ")


def test_other_tasks_are_unknown(adapter):
    assert adapter.get_task_status_sync("other") == TaskResult(id="other", status="PENDING", result=None)
    for bad in ("", "a b", None):
        with pytest.raises(InvalidArgumentError, match="is not the id of a task"):
            adapter.get_task_status_sync(bad)


def test_a_task_may_wait_for_its_time(adapter, tasks):
    now_ms = time.time() * 1000
    adapter.enqueue_task_sync("add", [1], delay_s=60)
    adapter.enqueue_task_sync("add", [2], deliver_at_ms=round(now_ms) + DAY_MS)
    [(first_ms, _), (second_ms, _)] = tasks.waiting
    assert now_ms + 60_000 - 1 <= first_ms <= time.time() * 1000 + 60_000 + 1
    assert second_ms == round(now_ms) + DAY_MS


def test_tasks_of_one_sharding_key_go_to_one_queue(adapter, tasks):
    adapter.enqueue_task_sync("add", [1], sharding_key="user-9")
    adapter.enqueue_task_sync("add", [1])
    assert tasks.sharding_keys == ["user-9", None]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"priority": 5}, "the tasks of this queue have no priorities: set priorities=True"),
        ({"countdown": 5}, "no option countdown; its options are delay_s"),
        ({"delay_s": -1}, "delay_s must be"),
        ({"delay_s": "5"}, "delay_s must be"),
        ({"delay_s": True}, "delay_s must be"),
        ({"delay_s": 1, "deliver_at_ms": 1}, "pass only one"),
    ],
)
def test_other_options_are_refused(adapter, tasks, options, reason):
    with pytest.raises(InvalidArgumentError, match=reason):
        adapter.enqueue_task_sync("add", [1], **options)
    assert tasks.waiting == []


def test_tasks_of_a_queue_with_priorities_have_one_and_nothing_else(tasks):
    options = RaymqAdapterConfig(priorities=True, consume_mode="share")
    adapter = RaymqTaskProcessorAdapter(config(adapter_config=options))
    adapter.initialize(2)
    for given in ({}, {"priority": 9}, {"priority": 0}, {"priority": None}):
        adapter.enqueue_task_sync("add", [1], **given)
    assert tasks.priorities == [0, 9, 0, 0]
    for bad in (-1, 10, "5", True):
        with pytest.raises(InvalidArgumentError, match="priority must be"):
            adapter.enqueue_task_sync("add", [1], priority=bad)
    for other in ({"delay_s": 5}, {"deliver_at_ms": 1_700_000_000_000}, {"sharding_key": "user-9"}):
        with pytest.raises(InvalidArgumentError, match="neither a delay nor a sharding_key"):
            adapter.enqueue_task_sync("add", [1], **other)
    assert len(tasks.priorities) == 4


def test_arguments_that_json_cannot_represent_are_refused(adapter, tasks):
    with pytest.raises(InvalidArgumentError, match="cannot be written as JSON"):
        adapter.enqueue_task_sync("add", [object()])
    assert tasks.waiting == []


def test_a_cancelled_task_does_not_run(adapter, tasks):
    task = adapter.enqueue_task_sync("add", [1])
    assert adapter.cancel_task_sync(task.id).status == "REVOKED"
    assert adapter.cancel_task_sync(task.id).status == "REVOKED"
    adapter.start_consumer()
    eventually(lambda: not tasks.waiting and not tasks.unacknowledged, "it is passed", WAIT_S)
    assert tasks.words(task.id) == ["PENDING", "REVOKED"]


def test_a_task_that_ended_is_not_cancelled_and_one_that_is_not_known_is(adapter, tasks):
    adapter.start_consumer()
    task = adapter.enqueue_task_sync("add", [1])
    ended(adapter, task)
    assert adapter.cancel_task_sync(task.id).status == "SUCCESS"
    assert tasks.words(task.id)[-1] == "SUCCESS"
    assert adapter.cancel_task_sync("later").status == "REVOKED"
    assert adapter.get_task_status_sync("later").status == "REVOKED"


def test_the_figures_are_the_queues_and_the_workers(adapter):
    adapter.enqueue_task_sync("add", [1])
    queue = {"queue": "jobs", "group": "serve-jobs", "lag": 1, "lag_ms": 5, "retry_lag": 0, "dead_letters": 0}
    assert adapter.get_metrics_sync() == {**queue, "worker": None}
    adapter.start_consumer()
    eventually(lambda: adapter.get_metrics_sync()["lag"] == 0, "no lag", WAIT_S)
    told = {"in_hand": 0, "concurrency": 2, "told": {"STARTED": 1, "SUCCESS": 1}}
    eventually(lambda: adapter.get_metrics_sync()["worker"] == told, "nothing in hand", WAIT_S)


def test_health_is_an_answer_and_a_consumer_that_takes_tasks(adapter, tasks):
    assert adapter.health_check_sync() == [{tasks.name: {"ok": "pong"}}]
    tasks.failures["summary"] = [ServiceNotAvailableError("no broker")]
    assert adapter.health_check_sync() == [{tasks.name: {"error": "no broker"}}]
    adapter.start_consumer()
    assert adapter.health_check_sync() == [{tasks.name: {"ok": "pong"}}]
    adapter._worker.stop(WAIT_S)
    assert "no longer accepts tasks" in adapter.health_check_sync()[0][tasks.name]["error"]


# Tests of Ray Serve replicas that run tasks


def test_start_and_stop_may_be_called_again(adapter):
    adapter.stop_consumer()
    adapter.start_consumer()
    adapter.start_consumer()
    adapter.stop_consumer(WAIT_S)
    adapter.stop_consumer(WAIT_S)
    task = adapter.enqueue_task_sync("add", [1])
    adapter.start_consumer()
    assert ended(adapter, task).status == "SUCCESS"
    with pytest.raises(InvalidArgumentError, match="no arguments queues"):
        adapter.start_consumer(queues=["a"])


def test_inside_an_event_loop_the_calls_of_serve_work_too(tasks):
    async def serve() -> RaymqTaskProcessorAdapter:
        adapter = RaymqTaskProcessorAdapter(config())
        adapter.initialize(2)
        adapter.register_task_handle(lambda: threading.current_thread().name, "where")
        adapter.start_consumer()
        task = await adapter.enqueue_task_async("where")
        while (await adapter.get_task_status_async(task.id)).status != "SUCCESS":
            await asyncio.sleep(0.01)
        adapter.stop_consumer(WAIT_S)
        return adapter

    adapter = asyncio.run(serve())
    assert adapter._worker is None


@pytest.mark.parametrize("name", CALLS)
def test_each_call_of_a_program_has_a_twin_for_coroutines(adapter, tasks, name):
    answer = asyncio.run(getattr(adapter, f"{name}_async")(*CALLS[name]))
    expected = getattr(adapter, f"{name}_sync")(*CALLS[name])
    if name == "enqueue_task":
        assert (answer.status, len(tasks.waiting)) == ("PENDING", 2)
    elif name == "cancel_task":
        assert tasks.words("t1") == ["REVOKED"]
        assert answer == expected
    else:
        assert answer == expected


AT_EXIT = """
from ray.serve.schema import TaskProcessorConfig
from raymq.serve import RaymqTaskProcessorAdapter, adapter as module
from tests.support.clients.task_queues import FakeTaskConsumer, FakeTaskQueue

close = FakeTaskConsumer.close
FakeTaskConsumer.close = lambda self: (close(self), print("left the group", flush=True))
config = TaskProcessorConfig(queue_name="jobs", adapter=RaymqTaskProcessorAdapter, adapter_config=None)
adapter = RaymqTaskProcessorAdapter(config)
tasks = FakeTaskQueue(adapter._settings)
module.TaskConnection.open = lambda settings: tasks
adapter.initialize()
adapter.start_consumer()
"""


def test_a_program_that_ends_leaves_the_group():
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], cwd=root, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "left the group\n"), done.stderr


def test_a_connection_that_is_collected_at_the_exit_is_left_to_the_clients_exit_handler(
    tasks: FakeTaskQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    one = RaymqTaskProcessorAdapter(config())
    one.initialize()
    with no_thread_starts():
        del one
        gc.collect()
    assert capsys.readouterr().err == ""


def test_a_consumer_that_cannot_start_can_be_started_again(adapter, tasks, monkeypatch):
    def fail(worker):
        raise ClientStateError("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(adapter_module.TaskWorker, "start", fail)
        with pytest.raises(ClientStateError, match="no thread"):
            adapter.start_consumer()
    adapter.start_consumer()
    assert ended(adapter, adapter.enqueue_task_sync("add", [1], {"y": 2})).result == 3
