"""Tests of the deliveries of web hooks: group calls, ends of tasks and a sender in memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from raymq.client.producer.async_producer import AsyncProducer
from raymq.common.config.webhook_hosts import WebhookHosts
from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.protocol.group import GroupConfig
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.webhooks import deliveries as module
from raymq.gateway.webhooks.deliveries import ACCEPTED, CALLS_OF_TOPIC_MAX, WebhookDeliveries
from raymq.gateway.webhooks.ends import WEBHOOK_GROUP
from raymq.gateway.webhooks.event import WebhookEvent
from raymq.gateway.webhooks.sender import REFUSED, STATUS, WebhookFailedError
from raymq.serve.states import StateRecord, TaskHistory, TaskState
from raymq.serve.task_messages import TaskWebhook, state_message
from raymq.telemetry.metrics.reporter import Reporter
from tests.support.clients.fakes import FakeStore, topic_route
from tests.support.clients.producers import MakeProducer, producers_of_fakes
from tests.support.console.fake_cluster import fake_message
from tests.support.gateway.fake_group_calls import FakeGroupCalls
from tests.support.gateway.gateway_client import ANSWER_S, FakeAnnouncer, FakeGroups, FakeQueues, FakeTransactions
from tests.support.metrics.fake_ray import FakeMetrics

TOPIC = "jobs-results"
URL = "https://hooks.example.org/a"


def ended(task_id: str, state: TaskState = TaskState.SUCCESS, at_s: float = 7.0) -> StateRecord:
    return StateRecord(task_id, state, at_s, 1.0, 0, "the result")


@dataclass
class FakeEnds:
    """Ends of tasks in memory. `failures`: the errors of the next questions about a task, the first one first."""

    known: set[str] = field(default_factory=lambda: {TOPIC})
    histories: dict[str, TaskHistory] = field(default_factory=dict)
    webhooks: dict[str, TaskWebhook] = field(default_factory=dict)
    failures: list[RaymqError] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def topics(self) -> set[str]:
        return set(self.known)

    def register(self, topic: str) -> None:
        self.known.add(topic)

    def history(self, topic: str, task_id: str) -> TaskHistory:
        self.asked.append(topic)
        if self.failures:
            raise self.failures.pop(0)
        return self.histories.get(task_id, TaskHistory())

    def webhook(self, topic: str, task_id: str) -> TaskWebhook | None:
        return self.webhooks.get(task_id, TaskWebhook(task_id, URL, "jobs"))


class FakeSender:
    """A sender that keeps the calls. `failures`: the errors of the next calls. While `accepts` is clear, calls wait."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, WebhookEvent]] = []
        self.failures: list[WebhookFailedError] = []
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.is_closed = False

    async def send(self, url: str, event: WebhookEvent) -> None:
        self.calls.append((url, event))
        await self.accepts.wait()
        if self.failures:
            raise self.failures.pop(0)

    def key_error(self) -> str:
        return "no key"

    async def close(self) -> None:
        self.is_closed = True


class Deliveries:
    """The deliveries on fakes. `run` runs a scenario while they run."""

    def __init__(self, make: MakeProducer) -> None:
        self._make = make
        self.ends, self.sender, self.group = FakeEnds(), FakeSender(), FakeGroupCalls(WEBHOOK_GROUP)
        self.config = GroupConfig(WEBHOOK_GROUP, retry_max_times=2)
        self.object: WebhookDeliveries
        self._count = 0

    def put(self, state: StateRecord) -> None:
        self.put_body(state.encode(), state)

    def put_body(self, body: bytes, state: StateRecord) -> None:
        tags = state_message(TOPIC, state, body).tags
        message = fake_message(TOPIC, body, queue_offset=self._count, broker_name="a", tags=tags)
        self._count += 1
        self.group.put("a", body, message=message)

    def states(self) -> list[tuple[str, str]]:
        return [(event.data.id, event.data.state) for _, event in self.sender.calls]

    def settled(self) -> int:
        return self.group.settled()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(ANSWER_S):
            while not condition():
                await asyncio.sleep(0.005)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            producer = self._make(FakeStore(), route=topic_route(a=1), send_timeout_s=30.0)
            for topic in (TOPIC, "other-results"):
                producer.test_routes.routes[topic] = topic_route(topic, a=1)
            async with AsyncProducer(producer) as sender:
                cluster = GatewayCluster(
                    *(producer.test_routes, FakeGroups(self.config), sender, lambda group, names: self.group),
                    *(FakeTransactions(), FakeAnnouncer(), FakeQueues()),
                    send_timeout_s=30.0,
                )
                hosts = WebhookHosts.parse(["hooks.example.org"])
                self.object = WebhookDeliveries(cluster, self.ends, self.sender, lambda threads: self.group, hosts)
                running = asyncio.create_task(self.object.run())
                try:
                    await scenario()
                    assert not running.done()
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
                    await self.object.close()
                    await cluster.finish()
                    cluster.close()
                assert self.sender.is_closed

        asyncio.run(main())


@pytest.fixture
def deliveries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deliveries]:
    monkeypatch.setattr(module, "TOPICS_INTERVAL_S", 0.02)
    with producers_of_fakes() as make:
        yield Deliveries(make)


def test_an_end_is_reported_once_and_acknowledged(deliveries: Deliveries) -> None:
    async def scenario() -> None:
        deliveries.put(ended("hook-1"))
        await deliveries.until(lambda: deliveries.settled() == 1)
        deliveries.put(ended("hook-2", TaskState.REVOKED))
        await deliveries.until(lambda: deliveries.settled() == 2)

    deliveries.run(scenario)
    assert deliveries.states() == [("hook-1", "SUCCESS"), ("hook-2", "REVOKED")]
    [(url, event), _] = deliveries.sender.calls
    assert (url, event.data.queue, event.data.result) == (URL, "jobs", "the result")
    assert deliveries.object.outcomes == {ACCEPTED: 2}


def test_a_failed_call_is_repeated_then_it_is_a_dead_letter(deliveries: Deliveries) -> None:
    failure = WebhookFailedError(STATUS, "https://hooks.example.org answered with the status 500")
    deliveries.sender.failures = [failure] * 2

    async def scenario() -> None:
        deliveries.put(ended("hook-1"))
        await deliveries.until(lambda: deliveries.settled() == 1)
        assert len(deliveries.sender.calls) == 3, "two calls failed"
        assert [counted for _, counted in deliveries.group.returned] == [True, True]
        deliveries.sender.failures = [WebhookFailedError(REFUSED, "no")] * 3
        deliveries.put(ended("hook-2"))
        await deliveries.until(lambda: len(deliveries.group.letters) == 1)

    deliveries.run(scenario)
    assert len(deliveries.sender.calls) == 6
    assert deliveries.object.outcomes == {STATUS: 2, ACCEPTED: 1, REFUSED: 3}
    assert deliveries.object.dead_letters == 1
    [(_, attempts)] = deliveries.group.letters
    assert attempts == 3


def test_the_stored_status_of_the_task_is_reported(deliveries: Deliveries) -> None:
    late = ended("hook-1", TaskState.SUCCESS, 9.0)
    deliveries.ends.histories = {
        "hook-1": TaskHistory(late),  # the handler succeeded, although the task had been cancelled
        "hook-2": TaskHistory(StateRecord("hook-2", TaskState.STARTED, 9.0)),  # a replayed task runs again
    }

    async def scenario() -> None:
        deliveries.put(ended("hook-1", TaskState.REVOKED))
        deliveries.put(ended("hook-2", TaskState.FAILURE))
        await deliveries.until(lambda: deliveries.settled() == 2)

    deliveries.run(scenario)
    [(_, event)] = deliveries.sender.calls
    assert (event.data.id, event.data.state, event.data.ended_at_s) == ("hook-1", "SUCCESS", 9.0)


def test_what_needs_no_call_is_acknowledged(deliveries: Deliveries) -> None:
    deliveries.ends.webhooks = {"hook-gone": None}  # type: ignore[dict-item]  # retention has deleted it

    async def scenario() -> None:
        deliveries.put(ended("no-hook"))
        deliveries.put(ended("hook-1", TaskState.RETRY))
        deliveries.put_body(b"no state", ended("hook-1"))
        deliveries.put(ended("hook-gone"))
        await deliveries.until(lambda: deliveries.settled() == 4)

    deliveries.run(scenario)
    assert not deliveries.sender.calls


def test_a_task_that_cannot_be_read_now_is_reported_later(
    deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_MS", 0)
    deliveries.ends.failures = [ServiceNotAvailableError("the broker is away")] * 5

    async def scenario() -> None:
        deliveries.put(ended("hook-1"))
        await deliveries.until(lambda: deliveries.settled() == 1)

    deliveries.run(scenario)
    assert deliveries.states() == [("hook-1", "SUCCESS")]
    assert [counted for _, counted in deliveries.group.returned] == [False] * 5, "no attempt of the web hook"


def test_calls_at_the_same_time_are_bounded(deliveries: Deliveries) -> None:
    more = 7

    async def scenario() -> None:
        deliveries.sender.accepts.clear()
        for number in range(CALLS_OF_TOPIC_MAX + more):
            deliveries.put(ended(f"hook-{number}"))
        await deliveries.until(lambda: len(deliveries.sender.calls) == CALLS_OF_TOPIC_MAX)
        assert deliveries.object.running == CALLS_OF_TOPIC_MAX
        assert deliveries.group.leased() == CALLS_OF_TOPIC_MAX, "other ends stay visible to other gateways"
        deliveries.sender.accepts.set()
        await deliveries.until(lambda: deliveries.settled() == CALLS_OF_TOPIC_MAX + more)

    deliveries.run(scenario)


def test_a_gateway_that_stops_during_a_call_acknowledges_nothing(deliveries: Deliveries) -> None:
    async def scenario() -> None:
        deliveries.sender.accepts.clear()
        deliveries.put(ended("hook-1"))
        await deliveries.until(lambda: len(deliveries.sender.calls) == 1)

    deliveries.run(scenario)
    assert deliveries.settled() == 0
    assert deliveries.object.outcomes == {}


def test_a_topic_that_another_gateway_registered_is_found(deliveries: Deliveries) -> None:
    deliveries.ends.known = set()

    async def scenario() -> None:
        deliveries.put(ended("hook-1"))
        await deliveries.object.register("other-results")
        await deliveries.until(lambda: deliveries.settled() == 1)
        assert deliveries.ends.asked == ["other-results"]
        deliveries.ends.known.add(TOPIC)
        deliveries.put(ended("hook-2"))
        await deliveries.until(lambda: deliveries.settled() == 2)

    deliveries.run(scenario)


def test_web_hooks_go_on_after_their_brokers_were_away(deliveries: Deliveries) -> None:
    deliveries.group.failures["a"] = ServiceNotAvailableError("away")

    async def scenario() -> None:
        deliveries.put(ended("hook-1"))
        await deliveries.group.wait_for_receives(2)
        del deliveries.group.failures["a"]
        await deliveries.until(lambda: deliveries.settled() == 1)

    deliveries.run(scenario)


def test_the_figures_are_reported(deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch) -> None:
    ray_metrics = FakeMetrics()
    monkeypatch.setitem(sys.modules, "ray.util.metrics", ray_metrics.module())

    async def scenario() -> None:
        deliveries.put(ended("hook-1"))
        await deliveries.until(lambda: deliveries.settled() == 1)
        assert deliveries.object.key_error() == "no key"

    deliveries.run(scenario)
    Reporter("c").report(deliveries.object.report)
    assert ray_metrics.value("raymq_gateway_webhook_calls", outcome=ACCEPTED) == 1
    assert ray_metrics.value("raymq_gateway_webhooks_running") == 0
