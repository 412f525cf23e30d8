"""Tests of raymq.Queue over a topic in memory: the behaviour of `ray.util.queue.Queue`, and what is kept, given back or
delivered again if a call is refused, interrupted or cancelled."""

from __future__ import annotations

import asyncio
import logging
import pickle
import queue as standard
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray.util.queue

from raymq.common.errors import (
    ClientStateError,
    InvalidArgumentError,
    NoPermissionError,
    RequestTimeoutError,
    TopicExistsError,
    TopicFullError,
    TopicNotExistError,
)
from raymq.common.protocol.bounds import BacklogPolicy
from raymq.queue import Empty, Full, Queue, link as link_module, queue as module

WAIT_S = 60.0


class FakeTopics:
    """The topics of a cluster in memory, and the client, the admin, the producer and the engine of a Queue."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, Any]] = {}
        self.changed = threading.Condition()
        self.connects: list[str] = []
        self.ack_fails: BaseException | None = None
        self.acks_before = False
        """True if the answer of each acknowledgement is lost, and the repeated request acknowledges nothing."""
        self.sends = 0
        self.unseen_room: set[int] = set()
        """Numbers of the sends that the store refuses, because it has not seen the newest acknowledgements."""
        self.dead: list[bytes] = []

    def connect(self, namespace: str) -> FakeTopics:
        self.connects.append(namespace)
        return self

    # The client
    @property
    def admin(self) -> FakeTopics:
        return self

    def producer(self, name: str) -> Any:
        settings = SimpleNamespace(send_timeout_s=30.0)
        return SimpleNamespace(settings=settings, send=self.send, send_batch=self.send_batch, close=self.close)

    def _simple_engine(self, name: str, options: Any, gives_up: bool) -> Any:
        def receive(count: int, lease_s: float, wait_s: float) -> list[Any]:
            assert subscribed == [name]
            return self.receive(name, count, wait_s)

        subscribed: list[str] = []
        assert not gives_up, "an item that was returned often would become a dead letter"
        return SimpleNamespace(
            subscribe=lambda topic, expression: subscribed.append(topic),
            receive=receive,
            ack=self.ack,
            change_invisible=self.give_back,
            dead_letter=self.dead_letter,
            close=self.close,
        )

    def close(self) -> None:
        pass

    # The admin
    def create_group(self, name: str) -> None:
        pass

    def create_topic(self, name: str, queues: int, max_backlog: int, **bound: Any) -> None:
        assert queues == 1
        assert bound == ({"backlog_policy": "refuse", "backlog_groups": [name]} if max_backlog else {})
        if name in self.topics:
            raise TopicExistsError(name, "with another bound")
        self.topics[name] = {"limit": max_backlog, "items": [], "leased": [], "queues": 1}

    def topic_route(self, name: str) -> Any:
        if name not in self.topics:
            raise TopicNotExistError(name)
        topic = self.topics[name]
        bound = SimpleNamespace(max_messages=topic["limit"], policy=topic.get("policy", BacklogPolicy.REFUSE))
        attributes = SimpleNamespace(bound=bound if topic["limit"] else None)
        return SimpleNamespace(attributes=attributes, queue_counts=lambda: {"broker-a": topic["queues"]})

    def describe_group(self, name: str) -> list[Any]:
        topic = self.topics[name]
        size, leased = len(topic["items"]), len(topic["leased"])
        return [SimpleNamespace(queue=SimpleNamespace(topic=name), lag=size + leased, in_flight=leased)]

    def delete_topic(self, name: str) -> None:
        del self.topics[name]

    def delete_group(self, name: str, dead_letters: bool) -> None:
        assert dead_letters == name.startswith("queue-")

    # The producer and the engine
    def send(self, message: Any, timeout_s: float) -> None:
        self.send_batch([message], timeout_s)

    def send_batch(self, messages: list[Any], timeout_s: float) -> None:
        with self.changed:
            self.sends += 1
            topic = self.topics[messages[0].topic]
            size = len(topic["items"]) + len(topic["leased"])
            if self.sends in self.unseen_room or (topic["limit"] and size + len(messages) > topic["limit"]):
                raise TopicFullError(messages[0].topic, "g", "the limit", False, 1, 0.1)
            topic["items"] += [SimpleNamespace(topic=one.topic, body=one.body, attempt=1) for one in messages]
            self.changed.notify_all()

    def receive(self, name: str, count: int, wait_s: float) -> list[Any]:
        with self.changed:
            topic = self.topics[name]
            self.changed.wait_for(lambda: topic["items"], wait_s)
            got, topic["items"] = topic["items"][:count], topic["items"][count:]
            topic["leased"] += got
            return got

    def ack(self, messages: list[Any]) -> int:
        with self.changed:
            for message in messages:
                self.topics[message.topic]["leased"].remove(message)
        if self.ack_fails is not None:
            raise self.ack_fails
        return 0 if self.acks_before else len(messages)

    def dead_letter(self, message: Any, attempts: int, failure: str) -> bool:
        assert (message.attempt, "cannot be unpickled" in failure) == (attempts, True)
        self.topics[message.topic]["leased"].remove(message)
        self.dead.append(message.body)
        return True

    def give_back(self, messages: list[Any], invisible_s: float, *, counted: bool) -> None:
        assert not counted
        with self.changed:
            topic = self.topics[messages[0].topic]
            topic["leased"] = [one for one in topic["leased"] if one not in messages]
            topic["items"] = [*messages, *topic["items"]]
            self.changed.notify_all()

    def put_bytes(self, name: str, body: bytes, attempt: int = 1) -> None:
        with self.changed:
            self.topics[name]["items"].append(SimpleNamespace(topic=name, body=body, attempt=attempt))


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTopics]:
    topics = FakeTopics()
    monkeypatch.setattr(link_module, "attach_ray", lambda address: False)
    monkeypatch.setattr(link_module, "connect", topics.connect)
    monkeypatch.setattr(module, "PUT_AGAIN_S", 0.01)
    # A machine that stands still must not end the time in which the store sees new room.
    monkeypatch.setattr(module, "FRESH_S", WAIT_S)
    yield topics
    link_module._links.clear()
    link_module._connections.clear()


def test_items_come_in_order_and_sizes_are_right(topics: FakeTopics) -> None:
    queue = Queue("work")
    assert (queue.qsize(), len(queue), queue.size(), queue.empty(), queue.full()) == (0, 0, 0, True, False)
    for item in ["a", None, {"b": [1]}]:
        queue.put(item)
    assert (queue.qsize(), queue.empty(), queue.full()) == (3, False, False)
    assert [queue.get(), queue.get(timeout=1), queue.get_nowait()] == ["a", None, {"b": [1]}]
    assert queue.empty()


def test_an_empty_queue_raises_rays_and_pythons_empty(topics: FakeTopics) -> None:
    queue = Queue("work")
    for call in (queue.get_nowait, lambda: queue.get(block=False), lambda: queue.get(timeout=0.05)):
        with pytest.raises(Empty) as caught:
            call()
        assert isinstance(caught.value, standard.Empty)
        assert isinstance(caught.value, ray.util.queue.Empty)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="non-negative"):
            queue.get(timeout=wrong)


def test_a_full_queue_raises_full_and_lets_put_wait(topics: FakeTopics) -> None:
    queue = Queue("work", maxsize=1)
    queue.put(1)
    assert queue.full()
    for call in (lambda: queue.put_nowait(2), lambda: queue.put(2, timeout=0.05)):
        with pytest.raises(Full):
            call()
    with pytest.raises(ValueError, match="non-negative"):
        queue.put(2, timeout=-1)
    threading.Timer(0.05, queue.get).start()
    queue.put(2)
    assert queue.get() == 2


def test_put_nowait_waits_until_the_store_knows_of_the_room(topics: FakeTopics) -> None:
    queue = Queue("work", maxsize=1)
    topics.unseen_room = {1, 2, 3}
    queue.put_nowait(1)
    assert queue.get_nowait() == 1


def test_batches_are_put_and_got_as_a_whole_or_not_at_all(topics: FakeTopics) -> None:
    queue = Queue("work", maxsize=4)
    queue.put_nowait_batch(range(3))
    queue.put_nowait_batch([])
    with pytest.raises(Full, match="Cannot add 2 items to queue of size 3 and maxsize 4"):
        queue.put_nowait_batch([3, 4])
    with pytest.raises(Empty, match="Cannot get 4 items from queue of size 3"):
        queue.get_nowait_batch(4)
    assert queue.get_nowait_batch(0) == []
    assert queue.get_nowait_batch(2) == [0, 1]
    assert queue.qsize() == 1
    with pytest.raises(TypeError):
        queue.put_nowait_batch(1)  # type: ignore[arg-type]  # the test is about this
    for wrong in ("1", -1, 5000):
        with pytest.raises((TypeError, ValueError)):
            queue.get_nowait_batch(wrong)  # type: ignore[arg-type]  # the test is about this


def test_asyncio_calls_wait_for_each_other(topics: FakeTopics) -> None:
    async def run() -> list[int]:
        queue = Queue("work", maxsize=1)
        gets = [asyncio.create_task(queue.get_async()) for _ in range(5)]
        for number in range(5):
            await queue.put_async(number)
        got = await asyncio.gather(*gets)
        with pytest.raises(Empty):
            await queue.get_async(block=False)
        await queue.put_async(5, timeout=1)
        with pytest.raises(Full):
            await queue.put_async(6, block=False)
        return [*got, await queue.get_async(timeout=1)]

    assert sorted(asyncio.run(run())) == [0, 1, 2, 3, 4, 5]


def test_a_cancelled_get_loses_no_item(topics: FakeTopics) -> None:
    queue = Queue("work")

    async def cancel() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.get_async(), 0.05)

    asyncio.run(cancel())
    queue.put("kept")
    assert queue.get(timeout=WAIT_S) == "kept"
    assert queue.qsize() == 0


def test_an_interrupted_get_keeps_a_removed_item_for_the_next(topics: FakeTopics) -> None:
    queue = Queue("work")
    queue.put_nowait_batch([1, 2])
    topics.ack_fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        queue.get()
    topics.ack_fails = None
    assert queue.qsize() == 2
    assert queue.get_nowait_batch(2) == [1, 2]


def test_an_unknown_acknowledgement_returns_the_item(topics: FakeTopics) -> None:
    queue = Queue("work")
    queue.put(1)
    topics.ack_fails = RequestTimeoutError("acknowledging", 1.0)
    assert queue.get() == 1


def test_a_refused_acknowledgement_is_raised(topics: FakeTopics) -> None:
    queue = Queue("work")
    queue.put(1)
    topics.ack_fails = NoPermissionError("group work may not consume")
    with pytest.raises(NoPermissionError):
        queue.get()


def test_an_acknowledgement_whose_answer_was_lost_returns_the_item(topics: FakeTopics) -> None:
    queue = Queue("work")
    queue.put_nowait_batch([1, 2, 3])
    topics.acks_before = True
    assert queue.get() == 1
    assert queue.get_nowait_batch(2) == [2, 3]


def test_items_of_a_lease_that_had_ended_are_left_to_others(
    topics: FakeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue("work")
    queue.put(1)
    topics.acks_before = True
    monkeypatch.setattr(link_module, "LEASE_S", -1.0)
    with pytest.raises(Empty):
        queue.get_nowait()


def test_an_item_that_cannot_be_unpickled_stays_leased(topics: FakeTopics) -> None:
    queue = Queue("work")
    topics.put_bytes("work", b"not a pickle")
    with pytest.raises(pickle.UnpicklingError):
        queue.get()
    assert len(topics.topics["work"]["leased"]) == 1
    assert topics.dead == []


def test_an_item_that_cannot_be_unpickled_becomes_a_dead_letter_in_the_end(topics: FakeTopics) -> None:
    queue = Queue("work")
    topics.put_bytes("work", b"not a pickle", attempt=link_module.ATTEMPTS_MAX)
    queue.put("next")
    with pytest.raises(pickle.UnpicklingError):
        queue.get()
    assert topics.dead == [b"not a pickle"]
    assert queue.get() == "next"


def test_a_batch_with_an_item_that_cannot_be_unpickled_loses_no_other_item(topics: FakeTopics) -> None:
    queue = Queue("work")
    queue.put_nowait_batch([1, 2])
    topics.ack_fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        queue.get()
    topics.ack_fails = None
    topics.put_bytes("work", b"not a pickle")
    queue.put(3)
    # The first item is kept in this process, and the second and the last one are leased with the broken one.
    with pytest.raises(pickle.UnpicklingError):
        queue.get_nowait_batch(4)
    assert queue.get_nowait_batch(3) == [1, 2, 3]


def test_a_large_batch_is_stored_once_if_the_store_refuses_a_part_of_it(topics: FakeTopics) -> None:
    queue = Queue("work", maxsize=5000)
    topics.unseen_room = {2, 3}
    queue.put_nowait_batch(range(2500))
    assert queue.get_nowait_batch(2500) == list(range(2500))
    assert queue.qsize() == 0
    queue.put_nowait_batch([b"x" * 600_000] * 3)
    assert topics.sends == 8, "each request is smaller than the store's limit"


def test_a_pickled_queue_is_the_same_queue(topics: FakeTopics) -> None:
    queue = Queue("work", maxsize=3)
    copy = pickle.loads(pickle.dumps(queue))
    copy.put(1)
    assert (copy.name, copy.maxsize, queue.get()) == ("work", 3, 1)
    assert Queue("work").maxsize == 3, "a queue that exists keeps its maximum"


def test_a_queue_that_exists_is_not_another_one(topics: FakeTopics) -> None:
    Queue("work", maxsize=3)
    for other in (0, 4):
        with pytest.raises(TopicExistsError, match="with maxsize 3"):
            Queue("work", maxsize=other)
    assert Queue("work", maxsize=3).maxsize == 3
    topics.topics["orders"] = {"limit": 0, "items": [], "leased": [], "queues": 4}
    with pytest.raises(TopicExistsError, match=r"with 4 queues, so it is no raymq\.Queue"):
        Queue("orders")
    topics.topics["work"]["policy"] = BacklogPolicy.DROP
    with pytest.raises(TopicExistsError, match="with the backlog policy drop"):
        Queue("work")


def test_a_queue_that_another_process_creates_at_the_same_time_keeps_its_maximum(
    topics: FakeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    Queue("work", maxsize=3)
    looks: list[str] = []

    def topic_route(name: str) -> Any:
        looks.append(name)
        if len(looks) == 1:
            raise TopicNotExistError(name)
        return FakeTopics.topic_route(topics, name)

    monkeypatch.setattr(topics, "topic_route", topic_route)
    assert Queue("work").maxsize == 3


def test_the_constructor_of_ray_works(topics: FakeTopics) -> None:
    queue = Queue(2)
    assert (queue.maxsize, queue.name.startswith("queue-")) == (2, True)
    assert Queue(maxsize=0, actor_options={"num_cpus": 1}).maxsize == 0
    assert Queue(-1).maxsize == 0
    assert Queue().maxsize == 0
    for named in (Queue(5, {"name": "shared"}), Queue(actor_options={"name": "shared", "get_if_exists": True})):
        assert (named.name, named.maxsize) == ("shared", 5)
    with pytest.raises(InvalidArgumentError):
        Queue("work", maxsize="3")  # type: ignore[arg-type]  # the test is about this


def test_queues_share_a_client_and_a_pickled_queue_has_its_namespace(
    topics: FakeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYMQ_NAMESPACE", "team")
    queue, other = Queue("work"), Queue("other")
    assert topics.connects == ["team"]
    pickled = pickle.dumps(queue)
    monkeypatch.delenv("RAYMQ_NAMESPACE")
    pickle.loads(pickled).put(1)
    assert (queue.get(), other.qsize()) == (1, 0)
    assert topics.connects == ["team"]
    kept = Queue("work")
    assert topics.connects == ["team", ""]
    monkeypatch.setattr(link_module, "_session", lambda: ("another node", "another job"))
    assert Queue("work").name == kept.name
    assert topics.connects == ["team", "", ""], "a new connection to Ray needs a new client"


def test_waiting_gets_do_not_delay_puts(topics: FakeTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GET_WAIT_S", 1000.0)
    count = module.QUEUE_THREADS_MAX + 6
    queue = Queue("work")

    async def run() -> list[int]:
        gets = [asyncio.create_task(queue.get_async()) for _ in range(count)]
        await asyncio.sleep(0)
        for number in range(count):
            await asyncio.wait_for(queue.put_async(number), WAIT_S)
        return await asyncio.wait_for(asyncio.gather(*gets), WAIT_S)

    assert sorted(asyncio.run(run())) == list(range(count))


def test_a_cancelled_get_may_outlive_its_event_loop(
    topics: FakeTopics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = ThreadPoolExecutor(1)
    monkeypatch.setattr(module, "_GET_THREADS", threads)
    monkeypatch.setattr(module, "GET_WAIT_S", 0.5)
    queue = Queue("work")

    async def cancel() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.get_async(), 0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(cancel())
        threads.shutdown()
    assert caplog.records == []


def test_a_queue_without_a_name_is_deleted_at_exit_while_ray_runs(
    topics: FakeTopics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    queue._delete_at_exit()
    assert f"queue {queue.name} was not deleted, because Ray was shut down" in caplog.text
    assert list(topics.topics) == [queue.name]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(link_module, "_session", lambda: ())
    queue._delete_at_exit()
    assert topics.topics == {}


def test_shutdown_deletes_the_queue(topics: FakeTopics) -> None:
    queue = Queue("work")
    queue.shutdown()
    queue.shutdown(force=True, grace_period_s=1)
    assert topics.topics == {}
    with pytest.raises(ClientStateError, match="was shut down"):
        queue.put(1)


def test_many_threads_get_each_item_once(topics: FakeTopics) -> None:
    queue = Queue("work", maxsize=3)
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.extend(queue.get() for _ in range(10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(40):
        queue.put(number)
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert sorted(got) == list(range(40))
