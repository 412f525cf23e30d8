"""Tests of `raymq topic`: the calls that the commands make to a fake Admin."""

from __future__ import annotations

from typing import Any

import pytest


class Admin:
    """Fake Admin that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def update_topic(self, topic: str, **changes: Any) -> None:
        self.asked.append((topic, changes))


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
