"""Test of autoscaling: the number of replicas of a `@task_consumer` deployment grows with its queue's lag from one to
three, and then falls to one."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import TaskProcessorConfig
from ray.serve.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler

import raymq
from raymq.serve import RaymqLagPolicy
from tests.support.clusters.cluster import descendants, title
from tests.support.history.waiting import eventually

CONFIG = TaskProcessorConfig(queue_name="jobs", adapter="raymq.serve.RaymqTaskProcessorAdapter", adapter_config=None)
SCALING = AutoscalingConfig(
    min_replicas=1,
    max_replicas=3,
    target_ongoing_requests=2,
    upscale_delay_s=1.0,
    downscale_delay_s=2.0,
    policy=AutoscalingPolicy(
        policy_function=RaymqLagPolicy, policy_kwargs={"queue_name": "jobs", "poll_interval_s": 0.5}
    ),
)


def application() -> Any:
    """Return the Ray Serve deployment. Its class is nested so that it is pickled by value, because the deployment's
    replicas cannot import test modules."""

    @serve.deployment(autoscaling_config=SCALING, max_ongoing_requests=2, ray_actor_options={"num_cpus": 0})
    @task_consumer(task_processor_config=CONFIG)
    class Jobs:
        @task_handler
        def wait_for(self, gate: str, notes: str) -> None:
            import os
            import time

            with open(notes, "a") as file:
                file.write(f"{os.getpid()}\n")
            deadline_s = time.monotonic() + 120
            while not os.path.exists(gate) and time.monotonic() < deadline_s:
                time.sleep(0.05)

    return Jobs.bind()


def replicas() -> int:
    return sum(title(process).startswith("ray::ServeReplica:jobs:Jobs") for process in descendants())


def test_replicas_follow_the_lag(mq: raymq.Client, box: Any) -> None:
    gate, notes = box.root / "gate", box.root / "notes"
    serve.start(proxy_location="Disabled")
    try:
        serve.run(application(), name="jobs", route_prefix=None)
        assert replicas() == 1
        adapter = instantiate_adapter_from_config(CONFIG)
        tasks = [adapter.enqueue_task_sync("wait_for", [str(gate), str(notes)]).id for _ in range(30)]
        eventually(lambda: replicas() == 3, "three replicas", 90.0)
        eventually(lambda: len(set(notes.read_text().split())) == 3, "a task at each of them", 90.0)
        gate.touch()
        for task in tasks:
            eventually(lambda task=task: adapter.get_task_status_sync(task).status == "SUCCESS", "success", 90.0)
        adapter.close()
        eventually(lambda: replicas() == 1, "one replica again", 90.0)
    finally:
        serve.shutdown()
