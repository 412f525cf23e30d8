"""Tests of the check that sends a message to each broker group and reads the message back. A message arrives, is
missing, or fails. Producer and queue are fakes."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.admin.upkeep.send_check import SendCheck, check_queue
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import MessageQueue

QUEUE = MessageQueue("raymq-check", "broker-a", 0)


class Stored:
    """Fake queue that stores and returns messages, except messages in `lost` and in `refused`."""

    def __init__(self, lost: tuple[int, ...] = (), refused: tuple[int, ...] = ()) -> None:
        self.bodies: list[bytes] = []
        self.lost, self.refused = lost, refused
        self.calls = count()

    def send(self, message: Any, *, queue: MessageQueue) -> Any:
        assert queue == QUEUE
        if next(self.calls) in self.refused:
            raise ServiceNotAvailableError("broker-a is away")
        self.bodies.append(message.body)
        return SimpleNamespace(queue_offset=len(self.bodies) - 1)

    def pull(self, queue: MessageQueue, offset: int) -> Any:
        body = b"another" if offset in self.lost else self.bodies[offset]
        return SimpleNamespace(messages=[SimpleNamespace(body=body)])

    def check(self, messages: int, size_bytes: int = 16) -> SendCheck:
        ticks = count()
        return check_queue(
            QUEUE, self.send, self.pull, count=messages, size_bytes=size_bytes, clock_s=lambda: next(ticks) * 0.002
        )


def test_messages_that_come_back_are_timed():
    stored = Stored()
    assert stored.check(5) == SendCheck("broker-a", 5, 0, *(pytest.approx(ms) for ms in (2, 2, 4, 4)))
    assert [len(body) for body in stored.bodies] == [16] * 5
    assert len(set(stored.bodies)) == 5


def test_failed_and_changed_messages_are_counted_and_not_sent_again():
    stored = Stored(lost=(1,), refused=(3,))
    checked = stored.check(5)
    assert (checked.sent, checked.failed, checked.error) == (3, 2, "broker-a is away")
    assert len(stored.bodies) == 4


def test_a_broker_that_is_away_has_no_times():
    assert Stored(refused=(0, 1)).check(2) == SendCheck("broker-a", 0, 2, error="broker-a is away")


def test_a_body_may_be_shorter_than_its_number():
    stored = Stored()
    assert stored.check(12, size_bytes=1).failed == 0
    assert {len(body) for body in stored.bodies} == {1}
