"""Tests of the tasks of a replica in the consume mode "share": leases, send-backs, the return of unfinished tasks."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, cast

import pytest

from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.message import MessageExt
from raymq.serve.shared_tasks import TASK_LEASE_S, SharedTasks
from tests.support.history.leases import leased_messages, offsets_of


class Engine:
    """Fake engine of a simple consumer, which notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.waiting = leased_messages(40, 3)
        self.failure: Exception | None = None
        self.closed = False

    def receive(self, max_messages: int, invisible_s: float, wait_s: float) -> list[ReceivedMessage]:
        self.calls.append(("receive", max_messages, invisible_s, wait_s))
        given, self.waiting = self.waiting[:max_messages], self.waiting[max_messages:]
        return given

    def ack(self, messages: Iterable[ReceivedMessage]) -> None:
        self._note("ack", offsets_of(list(messages)))

    def change_invisible(self, messages: Iterable[ReceivedMessage], invisible_s: float, *, counted: bool) -> None:
        self._note("change", offsets_of(list(messages)), invisible_s, counted)

    def send_back(self, message: MessageExt, delay_level: int, max_reconsume_times: int) -> None:
        self._note("send_back", message.queue_offset, delay_level, max_reconsume_times)

    def close(self) -> None:
        self.closed = True

    def _note(self, *call: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append(call)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def tasks(engine: Engine) -> SharedTasks:
    return SharedTasks(cast("SimpleEngine", engine))


def test_a_copy_of_a_received_task_is_sent_back_and_acknowledged(engine: Engine, tasks: SharedTasks) -> None:
    [first, second] = tasks.poll(2, 0.5)
    tasks.send_back(copy(first), delay_level=3, max_reconsume_times=9)
    tasks.acknowledge([copy(first)])
    tasks.acknowledge([copy(second)])
    assert engine.calls == [
        ("receive", 2, TASK_LEASE_S, 0.5),
        ("send_back", 40, 3, 9),
        ("ack", [40]),
        ("ack", [41]),
    ]


def test_a_close_returns_the_unfinished_tasks_uncounted(engine: Engine, tasks: SharedTasks) -> None:
    [_, second, _] = tasks.poll(3)
    tasks.acknowledge([second])
    tasks.close()
    assert engine.calls[-1] == ("change", [40, 42], 0.0, False)
    assert engine.closed
    tasks.close()
    assert engine.calls[-1] == ("change", [40, 42], 0.0, False)


def test_a_failed_acknowledgement_keeps_the_task_for_the_return(engine: Engine, tasks: SharedTasks) -> None:
    [one] = tasks.poll(1)
    engine.failure = ServiceNotAvailableError("the broker restarts")
    with pytest.raises(ServiceNotAvailableError):
        tasks.acknowledge([one])
    engine.failure = None
    tasks.close()
    assert engine.calls[-1] == ("change", [40], 0.0, False)


def test_a_close_without_a_broker_still_closes(engine: Engine, tasks: SharedTasks) -> None:
    tasks.poll(1)
    engine.failure = ServiceNotAvailableError("the broker restarts")
    tasks.close()
    assert engine.closed


def test_only_received_messages_are_acknowledged(tasks: SharedTasks) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a message that receive"):
        tasks.acknowledge([cast("MessageExt", object())])
