"""Test of Ray Serve tasks while raymq's servers are killed: each task ends in the state SUCCESS, and the workers resume
by themselves."""

from __future__ import annotations

import threading
from collections import Counter

from ray.serve.schema import TaskProcessorConfig

import raymq
from raymq.serve import RaymqTaskProcessorAdapter
from tests.support.clusters.cluster import kill_actors
from tests.support.history.waiting import eventually

TASKS = 600
CONFIG = TaskProcessorConfig(
    queue_name="jobs", adapter="raymq.serve.RaymqTaskProcessorAdapter", adapter_config=None, max_retries=0
)


def test_every_task_succeeds_although_the_servers_are_killed(mq: raymq.Client) -> None:
    runs: Counter[int] = Counter()
    lock = threading.Lock()

    def note(number: int) -> int:
        with lock:
            runs[number] += 1
        return number

    workers = [RaymqTaskProcessorAdapter(CONFIG) for _ in range(2)]
    program = RaymqTaskProcessorAdapter(CONFIG)
    program.initialize()
    try:
        for worker in workers:
            worker.initialize(4)
            worker.register_task_handle(note)
            worker.start_consumer()
        sent: dict[str, int] = {}
        killed = iter(["Storage", "Broker", "Rebalance"])
        for number in range(TASKS):
            sent[program.enqueue_task_sync("note", [number]).id] = number
            if number % (TASKS // 4) == TASKS // 8 and (victim := next(killed, None)) is not None:
                eventually(lambda number=number: len(runs) > number // 2, "half of the tasks")
                kill_actors(victim)
        for task_id, number in sent.items():
            eventually(
                lambda task_id=task_id: program.get_task_status_sync(task_id).status == "SUCCESS", f"task {number}"
            )
        assert sorted(runs) == list(range(TASKS))
        print(f"{sum(runs.values()) - TASKS} of {TASKS} tasks ran more than once")
        eventually(lambda: program.get_metrics_sync()["lag"] == 0, "everything committed")
    finally:
        for adapter in (*workers, program):
            adapter.close()
