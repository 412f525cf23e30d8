"""Tests of `raymq topic`: the calls that the commands make to a fake Admin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raymq.common.protocol.attributes import TopicAttributes


class Admin:
    """Fake Admin that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def update_topic(self, topic: str, **changes: Any) -> None:
        self.asked.append((topic, changes))

    def create_topic(self, topic: str, queues: int | None, **options: Any) -> None:
        self.asked.append((topic, options if queues is None else {"queues": queues, **options}))

    def topic_route(self, topic: str) -> Any:
        attributes = TopicAttributes.parse({"backlog.max.messages": "9"})
        return SimpleNamespace(attributes=attributes, queue_counts=lambda: {"broker-a": 10, "broker-b": 10})


@pytest.fixture
def admin() -> Admin:
    return Admin()


def test_a_topic_gets_queues_and_a_permission(run: Any, admin: Admin) -> None:
    run("topic", "update", "orders", "--queues", "16", "--perm", "R")
    assert admin.asked == [("orders", {"queues": 16, "perm": 4})]
    run("topic", "update", "orders", code=2)
    run("topic", "update", "orders", "--type", "fifo")
    run("topic", "update", "orders", "--retention", "12h")
    run("topic", "update", "orders", "--retention", "0")
    assert admin.asked[1:] == [
        ("orders", {"message_type": "fifo"}),
        ("orders", {"reserve_time_s": 43_200.0}),
        ("orders", {"reserve_time_s": 0.0}),
    ]


def test_a_new_topic_gets_the_number_of_queues_of_its_type_and_the_command_prints_it(run: Any, admin: Admin) -> None:
    printed = run("topic", "create", "tasks", "--type", "priority").output
    assert "topic tasks has 20 queues" in printed
    run("topic", "create", "orders", "--queues", "8")
    assert admin.asked == [("tasks", {"message_type": "priority"}), ("orders", {"queues": 8})]


def test_a_topic_gets_a_bound(run: Any, admin: Admin) -> None:
    text = run("topic", "create", "orders", "--max-backlog", "9", "--backlog-groups", "billing, audit")
    assert "backlog.max.messages 9" in text.output
    run("topic", "update", "orders", "--max-backlog-bytes", "8192", "--backlog-policy", "refuse")
    run("topic", "update", "orders", "--max-backlog", "0")
    assert admin.asked == [
        ("orders", {"max_backlog": 9, "backlog_groups": ["billing", "audit"]}),
        ("orders", {"max_backlog_bytes": 8192, "backlog_policy": "refuse"}),
        ("orders", {"max_backlog": 0}),
    ]
    run("topic", "update", "orders", "--max-backlog-bytes", "1", code=2)
    run("topic", "update", "orders", "--backlog-policy", "wait", code=2)
