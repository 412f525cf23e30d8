"""Tests of raymq.Queue on a cluster: tasks and actors put and get, the maximum size holds, and the items survive the
process that put them."""

from __future__ import annotations

import asyncio
import os
import pickle
from itertools import chain
from typing import Any

import pytest
import ray

import raymq
from raymq.queue import Empty, Full, Queue
from tests.support.history.waiting import eventually

ITEMS = 30


@pytest.fixture
def queue(mq: raymq.Client, group: str) -> Queue:
    """Create a queue of at most five items. Returns the queue."""
    return Queue(group[:100], maxsize=5)


def stored(queue: Queue, items: list[Any]) -> bool:
    """Put a batch. Returns False if the queue has no room for it."""
    try:
        queue.put_nowait_batch(items)
    except Full:
        return False
    return True


def test_a_queue_has_the_behaviour_of_rays_queue(queue: Queue) -> None:
    for number in range(5):
        queue.put_nowait(number)
    assert (queue.qsize(), queue.full(), queue.empty()) == (5, True, False)
    with pytest.raises(Full):
        queue.put_nowait("no room")
    with pytest.raises(Full):
        queue.put("no room", timeout=0.3)
    assert queue.get_nowait() == 0
    # The store learns of the room a moment later.
    queue.put(5, timeout=120)
    with pytest.raises(Empty):
        queue.get_nowait_batch(6)
    with pytest.raises(Full):
        queue.put_nowait_batch([6])
    assert queue.get_nowait_batch(4) == [1, 2, 3, 4]
    eventually(lambda: stored(queue, ["a", "b"]), "the store learns of the room")
    assert [queue.get() for _ in range(3)] == [5, "a", "b"]
    for empty in (queue.get_nowait, lambda: queue.get(timeout=0.2)):
        with pytest.raises(Empty):
            empty()
    assert queue.qsize() == 0


def test_a_queue_of_the_same_name_is_empty_after_a_shutdown(queue: Queue) -> None:
    for number in range(3):
        queue.put(number, timeout=120)
    assert queue.get(timeout=120) == 0
    copy = pickle.loads(pickle.dumps(queue))
    assert copy.qsize() == 2
    queue.shutdown()
    queue.shutdown()
    with pytest.raises(raymq.RaymqError):
        copy.put(3)
    again = Queue(queue.name, maxsize=2)
    assert again.empty()
    again.put("new", timeout=120)
    assert again.get(timeout=120) == "new"
    again.shutdown()


def test_tasks_and_actors_share_a_queue(queue: Queue) -> None:
    items = ITEMS

    @ray.remote(num_cpus=0)
    def put_all(queue: Any, first: int) -> int:
        for number in range(first, first + items):
            queue.put(number, timeout=120)
        return os.getpid()

    @ray.remote(num_cpus=0)
    class Getter:
        async def get_all(self, queue: Any) -> list[int]:
            got = []
            while (item := await queue.get_async(timeout=120)) is not None:
                got.append(item)
            return got

    getters = [Getter.remote() for _ in range(2)]
    got = [getter.get_all.remote(queue) for getter in getters]
    pids = ray.get([put_all.remote(queue, first) for first in (0, items)], timeout=240)
    assert os.getpid() not in pids
    for _ in getters:
        queue.put(None, timeout=120)
    assert sorted(chain.from_iterable(ray.get(got, timeout=240))) == list(range(2 * items))
    eventually(queue.empty, "the queue is empty")
    for getter in getters:
        ray.kill(getter)


def test_items_survive_the_process_that_put_them(queue: Queue) -> None:
    name = queue.name

    @ray.remote(num_cpus=0, max_retries=0)
    def put_and_die() -> None:
        from raymq import Queue

        Queue(name, maxsize=5).put({"step": 1})
        os._exit(1)

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(put_and_die.remote(), timeout=120)
    assert Queue(name).maxsize == 5
    assert Queue(name).get(timeout=60) == {"step": 1}


def test_a_cancelled_get_leaves_the_item_for_the_next(queue: Queue) -> None:
    async def run() -> Any:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.get_async(), 0.3)
        await queue.put_async("kept", timeout=60)
        return await queue.get_async(timeout=60)

    assert asyncio.run(run()) == "kept"
    assert queue.qsize() == 0
