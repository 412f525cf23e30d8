"""Tests of Ray Serve tasks on raymq: a `@task_consumer` deployment with three replicas runs tasks while a replica is
killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import serve
from ray.serve.schema import TaskProcessorConfig
from ray.serve.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler

import raymq
from raymq.common.names import WEBHOOK_GROUP
from raymq.serve import RaymqAdapterConfig, RaymqTaskProcessorAdapter
from tests.support.clusters.cluster import descendants, poll_until, title
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.gateway.gateways import HOST, running_gateway
from tests.support.gateway.webhook_receiver import WEBHOOK_ANSWER_S, send_task, webhook_receiver
from tests.support.history.waiting import eventually
from tests.support.ports import free_port

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
REPLICAS = 3
TASKS = 2000
QUEUE = "jobs"
CONFIG = TaskProcessorConfig(
    queue_name=QUEUE,
    adapter="raymq.serve.RaymqTaskProcessorAdapter",
    adapter_config=RaymqAdapterConfig(),
    max_retries=1,
    failed_task_queue_name="jobs-failed",
    unprocessable_task_queue_name="jobs-odd",
)


def application() -> Any:
    """Return the Ray Serve deployment. Its class is nested so that it is pickled by value, because the deployment's
    replicas cannot import test modules."""

    @serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=8, ray_actor_options={"num_cpus": 0})
    @task_consumer(task_processor_config=CONFIG)
    class Jobs:
        @task_handler
        def double(self, number: int) -> int:
            return 2 * number

        @task_handler(name="note")
        async def note_later(self, path: str, line: str) -> str:
            import asyncio

            await asyncio.sleep(0)
            with open(path, "a") as file:
                file.write(line + "\n")
            return line

        @task_handler
        def flaky(self, path: str) -> str:
            from pathlib import Path

            if not Path(path).exists():
                Path(path).touch()
                raise RuntimeError("not yet")
            return "at last"

        @task_handler
        def broken(self, *, code: int) -> None:
            raise ValueError(f"code {code}")

    return Jobs.bind()


@pytest.fixture(scope="module")
def adapter(mq: raymq.Client) -> Iterator[RaymqTaskProcessorAdapter]:
    """Yield the task adapter with which a user's program sends tasks, while the deployment runs."""
    serve.start(proxy_location="Disabled")
    try:
        serve.run(application(), name="jobs", route_prefix=None)
        adapter = instantiate_adapter_from_config(CONFIG)
        yield adapter
        adapter.close()
    finally:
        serve.shutdown()


def state(adapter: RaymqTaskProcessorAdapter, task_id: str) -> str:
    return adapter.get_task_status_sync(task_id).status


def ends_as(adapter: RaymqTaskProcessorAdapter, task_id: str, wanted: str) -> Any:
    """Wait until a task is in the state `wanted`. Returns the task's result."""
    eventually(lambda: state(adapter, task_id) == wanted, f"task {task_id} {wanted}")
    return adapter.get_task_status_sync(task_id).result


def replicas() -> list[psutil.Process]:
    return [process for process in descendants() if title(process).startswith("ray::ServeReplica:jobs:Jobs")]


@pytest.mark.long
def test_every_task_succeeds_although_a_replica_is_killed(adapter: RaymqTaskProcessorAdapter, mq: raymq.Client) -> None:
    victim = replicas()[0]
    with mq.pull_consumer("watch", consume_from=FIRST) as results:
        results.subscribe("jobs-results", "SUCCESS")
        numbers = {}

        def send(number: int) -> None:
            numbers[adapter.enqueue_task_sync("double", [number]).id] = number

        with ThreadPoolExecutor(16) as senders:
            list(senders.map(send, range(TASKS // 2)))
            victim.kill()
            list(senders.map(send, range(TASKS // 2, TASKS)))
        ended: set[str] = set()
        begun_s = time.monotonic()

        def all_ended() -> bool:
            ended.update(message.keys[0] for message in results.poll(timeout_s=0.5))
            return ended >= numbers.keys()

        eventually(all_ended, "all tasks SUCCESS", 120.0)
        print(f"{TASKS} tasks done {time.monotonic() - begun_s:.1f} s after the last was sent")
    for task_id in list(numbers)[:: TASKS // 20]:
        assert adapter.get_task_status_sync(task_id).result == 2 * numbers[task_id]
    eventually(lambda: adapter.get_metrics_sync()["lag"] == 0, "everything committed")


def test_failures_are_retried_and_end_in_the_dead_queues(
    adapter: RaymqTaskProcessorAdapter, mq: raymq.Client, box: Any
) -> None:
    flaky = adapter.enqueue_task_sync("flaky", kwargs={"path": str(box.root / "flaky")})
    broken = adapter.enqueue_task_sync("broken", kwargs={"code": 7})
    unknown = adapter.enqueue_task_sync("unheard")
    with mq.producer() as producer:
        producer.send(raymq.Message(QUEUE, b"\x80 no JSON", keys="odd"))
    assert ends_as(adapter, flaky.id, "SUCCESS") == "at last"
    assert ends_as(adapter, broken.id, "FAILURE") == "ValueError: code 7"
    assert ends_as(adapter, unknown.id, "FAILURE") == "no handler is registered for task 'unheard'"
    with mq.pull_consumer("morgue", consume_from=FIRST) as consumer:
        consumer.subscribe("jobs-failed")
        [dead] = poll_until(consumer, 1)
        assert (dead.keys, dead.properties["error"]) == ((broken.id,), "ValueError: code 7")
        consumer.subscribe("jobs-odd")
        odd = poll_until(consumer, 2)
    assert {message.keys[0] for message in odd} == {unknown.id, "odd"}
    [letter] = eventually(lambda: mq.admin.dead_letters(f"serve-{QUEUE}").letters(), "the dead letter")
    assert letter.message.keys == (broken.id,)


def test_a_delayed_task_waits_and_a_cancelled_one_never_runs(adapter: RaymqTaskProcessorAdapter, box: Any) -> None:
    path = box.root / "notes"
    cancelled = adapter.enqueue_task_sync("note", [str(path), "cancelled"], delay_s=2.0)
    due_s = time.time() + 3.0
    delayed = adapter.enqueue_task_sync("note", [str(path), "delayed"], deliver_at_ms=round(due_s * 1000))
    assert adapter.cancel_task_sync(cancelled.id).status == "REVOKED"
    assert state(adapter, delayed.id) == "PENDING"
    assert ends_as(adapter, delayed.id, "SUCCESS") == "delayed"
    assert time.time() >= due_s
    assert Path(path).read_text() == "delayed\n"
    assert state(adapter, cancelled.id) == "REVOKED"
    eventually(lambda: adapter.get_metrics_sync()["lag"] == 0, "the cancelled task is passed")


def test_the_adapter_reports_metrics_and_health(adapter: RaymqTaskProcessorAdapter) -> None:
    [health] = adapter.health_check_sync()
    assert health == {f"serve-{QUEUE}@{os.uname().nodename}-{os.getpid()}": {"ok": "pong"}}
    figures = adapter.get_metrics_sync()
    assert (figures["queue"], figures["worker"], figures["dead_letters"]) == (QUEUE, None, 1)


SHARED = TaskProcessorConfig(
    queue_name="shared-jobs",
    adapter="raymq.serve.RaymqTaskProcessorAdapter",
    adapter_config=RaymqAdapterConfig(queues=1, consume_mode="share", retry_intervals_s=(0.2,)),
    max_retries=1,
)


def shared_application() -> Any:
    """Return a deployment whose replicas share single tasks. Nested for the same reason as in `application`."""

    @serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=1, ray_actor_options={"num_cpus": 0})
    @task_consumer(task_processor_config=SHARED)
    class SharedJobs:
        @task_handler
        def work(self) -> int:
            import os
            import time

            time.sleep(0.3)
            return os.getpid()

        @task_handler
        def broken(self) -> None:
            raise ValueError("no")

    return SharedJobs.bind()


def test_in_the_mode_share_all_replicas_work_on_one_queue(adapter: RaymqTaskProcessorAdapter, mq: raymq.Client) -> None:
    serve.run(shared_application(), name="shared", route_prefix=None)
    try:
        shared = instantiate_adapter_from_config(SHARED)
        # Replicas need some time to connect. The tasks last until all replicas have connected.
        done: dict[str, Any] = {}

        def all_work() -> bool:
            tasks = [shared.enqueue_task_sync("work").id for _ in range(10)]
            done.update((task, ends_as(shared, task, "SUCCESS")) for task in tasks)
            return len(set(done.values())) == REPLICAS

        eventually(all_work, "work in every replica")
        failed = shared.enqueue_task_sync("broken").id
        assert ends_as(shared, failed, "FAILURE") == "ValueError: no"
        eventually(lambda: shared.get_metrics_sync()["lag"] == 0, "all acknowledgements")
        assert shared.get_metrics_sync()["dead_letters"] == 1
        assert mq.admin.group_config("serve-shared-jobs").retry_intervals_s == (0.2,)
        modes = {one.consumer.consume_mode for one in mq.admin.consumer_connections("serve-shared-jobs")}
        assert modes == {"share"}
        shared.close()
    finally:
        serve.delete("shared")


URGENT = TaskProcessorConfig(
    queue_name="urgent-jobs",
    adapter="raymq.serve.RaymqTaskProcessorAdapter",
    adapter_config=RaymqAdapterConfig(priorities=True, consume_mode="share"),
    max_retries=1,
)


def urgent_application() -> Any:
    """Return a deployment that runs one task at a time. Nested for the same reason as in `application`."""

    @serve.deployment(num_replicas=1, max_ongoing_requests=1, ray_actor_options={"num_cpus": 0})
    @task_consumer(task_processor_config=URGENT)
    class UrgentJobs:
        @task_handler
        def note(self, path: str, word: str) -> None:
            with open(path, "a") as file:
                file.write(word + "\n")

    return UrgentJobs.bind()


@pytest.mark.usefixtures("adapter")
def test_tasks_with_a_high_priority_run_first(mq: raymq.Client, tmp_path: Path) -> None:
    # The order concerns one broker, so the tasks are in one broker group.
    mq.admin.create_topic("urgent-jobs", message_type="priority", brokers=["broker-a"])
    urgent, notes = instantiate_adapter_from_config(URGENT), tmp_path / "notes"
    given: tuple[tuple[str, dict[str, int]], ...] = (("low", {}), ("high", {"priority": 9}))
    tasks = [
        urgent.enqueue_task_sync("note", [str(notes), word], **options).id for _ in range(10) for word, options in given
    ]
    serve.run(urgent_application(), name="urgent", route_prefix=None)
    try:
        for task in tasks:
            ends_as(urgent, task, "SUCCESS")
        urgent.close()
    finally:
        serve.delete("urgent")
    words = notes.read_text().split()
    assert sorted(words) == ["high"] * 10 + ["low"] * 10
    # Each receive takes one task. Of 36 receives, one begins with the lowest level.
    assert words[:11].count("high") == 10


def test_the_example_of_the_page_prints_the_documented_output(adapter: RaymqTaskProcessorAdapter) -> None:
    assert_prints_what_it_says("ray-serve.md")


def test_a_web_hook_gets_what_a_replica_returns_or_raises(
    adapter: RaymqTaskProcessorAdapter, mq: raymq.Client, tmp_path: Path
) -> None:
    port = free_port()
    options = f', http_port: {port}, webhook_hosts: ["http://{HOST}"]'
    with running_gateway(tmp_path, options), webhook_receiver() as receiver:

        def sent(name: str, **arguments: Any) -> str:
            status, task = send_task(f"{HOST}:{port}", QUEUE, name=name, webhook=receiver.url, **arguments)
            assert status == 202, task
            return str(task["id"])

        ends = {sent("double", args=[21]): ("SUCCESS", 42)}
        ends[sent("broken", kwargs={"code": 9})] = ("FAILURE", "ValueError: code 9")
        for task, end in ends.items():
            [(_, data), *_] = eventually(partial(receiver.of, task), "the call of the web hook", WEBHOOK_ANSWER_S)
            assert (data["state"], data["result"]) == end
            assert state(adapter, task) == data["state"]
        eventually(lambda: mq.admin.group_summary(WEBHOOK_GROUP).lag == 0, "the end of the deliveries")
