"""Tests of `raymq tail` with a fake Admin."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raymq.client.admin.messages import Arrived
from raymq.common.errors import TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.tools.cli import browsing
from tests.support.console.fake_cluster import fake_message

QUEUE = MessageQueue("orders", "broker-a", 0)


class Admin:
    """Fake Admin with a topic. Each read of the topic returns the next tuple of messages from `arrivals`. After the
    last tuple, reads return no messages."""

    def __init__(self) -> None:
        self.arrivals: list[Arrived] = []
        self.asked: list[Any] = []

    def tail(self, topic: str, positions: Any = None, *, max_messages: int = 100) -> Arrived:
        if topic != "orders":
            raise TopicNotExistError(topic)
        self.asked.append(positions)
        if positions is None:
            return Arrived((), {QUEUE: 7})
        return self.arrivals.pop(0) if self.arrivals else Arrived((), positions)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    clock = iter(range(10**6))
    monkeypatch.setattr(browsing.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(browsing.time, "monotonic", lambda: float(next(clock)))
    return Admin()


def arrived(*bodies: bytes, end: int, skipped: int = 0) -> Arrived:
    messages = tuple(fake_message(body=body, queue_offset=n) for n, body in enumerate(bodies))
    return Arrived(messages, {QUEUE: end}, skipped)


def test_new_messages_are_printed_until_none_arrives_for_the_timeout(run: Any, admin: Admin) -> None:
    admin.arrivals = [arrived(b"one", end=8), Arrived((), {QUEUE: 8}), arrived(b"two", b"three", end=10)]
    done = run("tail", "orders", "--timeout", "5")
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["one", "two", "three"]
    assert admin.asked[:4] == [None, {QUEUE: 7}, {QUEUE: 8}, {QUEUE: 8}]
    assert done.stderr == ""


def test_tail_ends_after_the_wanted_number_of_messages(run: Any, admin: Admin) -> None:
    admin.arrivals = [arrived(b"one", end=8), arrived(b"two", b"three", end=10)]
    done = run("tail", "orders", "--max", "2", "--json")
    assert [json.loads(line)["body"] for line in done.stdout.splitlines()] == ["one", "two"]
    assert len(admin.asked) == 3


def test_skipped_messages_are_counted_on_standard_error(run: Any, admin: Admin) -> None:
    admin.arrivals = [arrived(b"one", end=800, skipped=12)]
    done = run("tail", "orders", "--max", "1")
    assert "skipped 12 messages" in done.stderr
    assert "skipped" not in done.stdout


def test_an_unknown_topic_is_an_error(run: Any, admin: Admin) -> None:
    assert isinstance(run("tail", "ordrs", code=1).exception, TopicNotExistError)
