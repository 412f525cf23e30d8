"""Tests of predicates (Python filter functions) of consumers that run on other nodes or in the cluster. Runner actors
beside the store apply the predicates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import raymq
from raymq.common.names import INSTANCES
from raymq.remoting.storage_client import StorageClient
from tests.support.clusters.page_example import assert_prints_what_it_says
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process unable to read the store's files, like a process on another node."""
    monkeypatch.setattr(StorageClient, "reader", lambda self: None)


@pytest.fixture
def prices(mq: raymq.Client, topic: str) -> str:
    """Create a topic with one message for each price from 0 to 99. Returns the topic's name."""
    with mq.producer() as producer:
        messages = [raymq.Message(topic, b"%d" % price, properties={"price": str(price)}) for price in range(100)]
        producer.send_batch(messages)
    return topic


@pytest.fixture
def runners() -> Iterator[dict[str, ray.actor.ActorHandle]]:
    """Yield a mapping of the new runner actors by name; `runners_now` fills it. At the end of the test all new runner
    actors are killed."""
    before = _names()
    yield {}
    for name in _names() - before:
        ray.kill(ray.get_actor(name, namespace=INSTANCES))


def _names() -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in actors if one["namespace"] == INSTANCES and one["name"].startswith("predicate-")}


def poll(consumer: raymq.PullConsumer, count: int) -> list[int]:
    found: list[int] = []

    def enough() -> bool:
        found.extend(int(message.body) for message in consumer.poll(timeout_s=0.5))
        return len(found) >= count

    eventually(enough, f"{count} messages")
    return sorted(found)


def test_the_examples_of_the_page_print_the_documented_output(mq: raymq.Client) -> None:
    assert_prints_what_it_says("predicates.md")


@pytest.mark.usefixtures("elsewhere", "runners")
def test_the_function_runs_in_a_process_of_its_own_beside_the_store(mq: raymq.Client, prices: str, group: str) -> None:
    pid = os.getpid()
    predicate = raymq.predicate(
        lambda message: float(message.properties["price"]) >= 90 and __import__("os").getpid() != pid, name="dear"
    )
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(prices, predicate)
        assert poll(consumer, 10) == list(range(90, 100))
        names = [name for name in _names() if f"-{group}-" in name]
        assert names
        runner, child = ray.get(ray.get_actor(names[0], namespace=INSTANCES).pids.remote(), timeout=30)
        assert len({pid, runner, child}) == 3
        with mq.producer() as producer:
            producer.send_batch(
                [raymq.Message(prices, str(price).encode(), properties={"price": str(price)}) for price in (5, 95)]
            )
        assert poll(consumer, 1) == [95]
        # Kill the runner actors, so that the next fetch must start another runner.
        for name in names:
            ray.kill(ray.get_actor(name, namespace=INSTANCES))
        with mq.producer() as producer:
            producer.send(raymq.Message(prices, b"96", properties={"price": "96"}))
        assert poll(consumer, 1) == [96]


@pytest.mark.usefixtures("elsewhere", "runners")
def test_a_call_that_hangs_is_an_error_that_names_the_message(mq: raymq.Client, topic: str, group: str) -> None:
    def hangs_once(message: raymq.MessageExt) -> bool:
        while message.body == b"hang":
            pass
        return True

    with mq.producer() as producer:
        for body in (b"1", b"hang", b"2"):
            queue = producer.send(raymq.Message(topic, body), sharding_key="one queue").queue
    with mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.assign([queue], raymq.predicate(hangs_once, timeout_s=0.5))
        assert poll(consumer, 1) == [1]

        def failure() -> str:
            try:
                consumer.poll(timeout_s=0.5)
            except raymq.PredicateFailedError as error:
                return str(error)
            return ""

        assert "offset 1 of" in (said := eventually(failure, "the error"))
        assert "time limit of 0.5 s" in said
        consumer.seek(queue, 2)
        assert poll(consumer, 1) == [2]


@pytest.mark.usefixtures("runners")
def test_a_push_consumers_predicate_decides_before_its_listener(
    mq: raymq.Client, prices: str, group: str, tmp_path: Path
) -> None:
    def listen(message: raymq.MessageExt) -> None:
        (tmp_path / message.body.decode()).touch()

    predicate = raymq.predicate(lambda message: int(message.properties["price"]) % 10 == 7)
    consumer = mq.push_consumer(group, consume_from=FIRST).subscribe(prices, predicate).on_message(listen)
    with consumer.start(instances=1) as subscription:
        eventually(lambda: len(os.listdir(tmp_path)) >= 10, "ten calls of the listener")
        eventually(lambda: subscription.status()[0].buffered == 0, "the end of what is there")
    assert sorted(map(int, os.listdir(tmp_path))) == list(range(7, 100, 10))


@pytest.mark.usefixtures("elsewhere", "runners")
def test_a_runner_ends_when_nobody_fetches(mq: raymq.Client, prices: str, group: str) -> None:
    from raymq.client.predicates.runner import PredicateRunnerActor

    storage = mq.routes.get(prices).pull_storages(next(iter(mq.routes.brokers())))[0]
    predicate = raymq.predicate(lambda message: True)
    name = f"predicate-{group}"
    PredicateRunnerActor.options(name=name, namespace=INSTANCES).remote(storage, predicate, 0.1)
    eventually(lambda: name not in _names(), "its end")
