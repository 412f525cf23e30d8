"""Tests of the messages of tasks: the web hook of a task is found beside the task's states."""

from __future__ import annotations

import pytest

from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import MessageExt
from raymq.common.protocol.route import TopicRoute
from raymq.serve.states import StateRecord, TaskState
from raymq.serve.task_messages import (
    WEBHOOK_KEY_SUFFIX,
    TaskWebhook,
    state_message,
    task_history,
    task_webhook,
    webhook_message,
)
from tests.support.clients.fakes import topic_route
from tests.support.console.fake_cluster import fake_message

RESULTS = "jobs-results"
WEBHOOK = TaskWebhook("hook-7", "https://hooks.example.org/a", "jobs")


class FakeResults:
    """A result topic on the broker groups `a` and `b`. `stored`: the broker group, the key and the body of each
    message. `asked`: the broker group of each query."""

    def __init__(self) -> None:
        self.route = topic_route(RESULTS, a=1, b=1)
        self.stored: list[tuple[str, str, bytes]] = []
        self.asked: list[str | None] = []

    def wait(self, topic: str, timeout_s: float) -> TopicRoute:
        assert topic == RESULTS
        return self.route

    def query_by_key(
        self, topic: str, key: str, *, max_messages: int, broker_name: str | None = None
    ) -> list[MessageExt]:
        self.asked.append(broker_name)
        return [
            fake_message(topic, body, queue_offset=offset, broker_name=broker)
            for offset, (broker, own, body) in enumerate(self.stored)
            if own == key and broker_name in (None, broker)
        ]

    def webhook(self, task_id: str = WEBHOOK.task_id) -> TaskWebhook | None:
        return task_webhook(self, self, RESULTS, task_id)


@pytest.mark.parametrize("broker", ["a", "b"])
def test_a_web_hook_is_found_at_every_broker_group_and_is_no_state(broker: str) -> None:
    results = FakeResults()
    message = webhook_message(RESULTS, WEBHOOK)
    assert list(message.keys) == [WEBHOOK.task_id + WEBHOOK_KEY_SUFFIX]
    state = StateRecord(WEBHOOK.task_id, TaskState.PENDING, 1.0)
    told = state_message(RESULTS, state, state.encode())
    results.stored = [(broker, key, one.body) for one in (message, told) for key in one.keys]
    assert results.webhook() == WEBHOOK
    assert task_history(results, results, RESULTS, WEBHOOK.task_id).latest == state


def test_a_task_without_a_web_hook_has_none() -> None:
    results = FakeResults()
    key = WEBHOOK.task_id + WEBHOOK_KEY_SUFFIX
    bodies = [b"", b"[]", b"{}", b'{"task_id": "hook-7", "url": 7, "queue": "jobs"}', webhook_message(
        RESULTS, TaskWebhook("hook-8", WEBHOOK.url, "jobs")
    ).body]  # fmt: skip
    results.stored = [("a", key, body) for body in bodies]
    assert results.webhook() is None
    assert results.asked[-1] is None, "all broker groups were asked"


def test_a_web_hook_of_a_broker_group_that_is_away_is_no_missing_web_hook() -> None:
    results = FakeResults()
    results.route.brokers.clear()
    with pytest.raises(ServiceNotAvailableError, match="hook-7"):
        results.webhook()
