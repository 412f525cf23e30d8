"""Tests of the tasks in flight of one instance: the batches for its Listener, their confirmation, and reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.core.access.meter import ReadLimit
from actors.core.consume.process_queue import ConsumeTask
from actors.pull import tasks_in_flight as module
from actors.pull.tasks_in_flight import BYTES_FOR_S, TasksInFlight
from raymq.client.consumer.push.feed_client import read_task_batch
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import ShippedTask

NOW_S = 1000.0
EPOCH = 7


class Records(list[int]):
    """Stand-in for the records of a task. Each record has 10 bytes."""

    @property
    def size_bytes(self) -> int:
        return 10 * len(self)


def make_task(number: int, count: int = 1) -> ConsumeTask:
    """Return a stand-in for a ConsumeTask with `count` messages."""
    queue = MessageQueue("orders", "broker-a", 0)
    return cast(ConsumeTask, SimpleNamespace(number=number, queue=queue, messages=Records(range(count))))


@pytest.fixture(autouse=True)
def _ship(monkeypatch: pytest.MonkeyPatch) -> None:
    def ship(task: Any, *, in_place: bool) -> ShippedTask:
        return ShippedTask(task.number, task.queue, len(task.messages), b"" if in_place else b"bytes")

    monkeypatch.setattr(module, "ship_task", ship)


def flight(*tasks: ConsumeTask) -> TasksInFlight:
    made = TasksInFlight(EPOCH)
    made.add(tasks)
    return made


def shipped(payload: bytes) -> list[tuple[int, bytes]]:
    """Return the number and the bytes of each task in a batch."""
    return [(task.number, task.records) for task in read_task_batch(payload).tasks]


@pytest.mark.parametrize(
    ("portion", "numbers"),
    [
        (None, [1, 2, 3]),
        (ReadLimit(0, 0), [1, 2, 3]),
        (ReadLimit(40, 0), [1, 2]),
        (ReadLimit(0, 3), [1]),
        (ReadLimit(1, 1), [1]),
    ],
)
def test_a_batch_has_the_first_tasks_up_to_its_limit_and_at_least_one(
    portion: ReadLimit | None, numbers: list[int]
) -> None:
    tasks = flight(make_task(1, 2), make_task(2, 2), make_task(3, 2))
    batch = tasks.next_batch(portion, NOW_S)
    assert batch is not None
    assert [number for number, _ in shipped(batch.payload)] == numbers
    assert (batch.size_bytes, batch.messages) == (20 * len(numbers), 2 * len(numbers))
    rest = tasks.next_batch(None, NOW_S)
    assert ([] if rest is None else [number for number, _ in shipped(rest.payload)]) == [
        number for number in (1, 2, 3) if number not in numbers
    ]


def test_a_batch_is_sent_again_until_it_is_confirmed() -> None:
    tasks = flight(make_task(1))
    assert tasks.lost_batch(EPOCH, 0) is None
    batch = tasks.next_batch(None, NOW_S)
    assert batch is not None
    assert tasks.lost_batch(EPOCH, 0) == batch.payload
    assert tasks.lost_batch(EPOCH - 1, 1) == batch.payload
    assert tasks.lost_batch(EPOCH, 1) is None
    assert tasks.lost_batch(EPOCH, 0) is None
    assert tasks.next_batch(None, NOW_S) is None
    empty = read_task_batch(tasks.empty_batch())
    assert (empty.epoch, empty.number, empty.tasks) == (EPOCH, 1, ())


def test_a_task_that_the_listener_cannot_read_is_sent_as_bytes_and_so_are_the_others_for_a_while() -> None:
    first = make_task(1)
    tasks = flight(first)
    tasks.next_batch(None, NOW_S)
    for _ in range(2):
        tasks.note_unread(first, NOW_S)
    tasks.add([make_task(2)])
    batch = tasks.next_batch(None, NOW_S)
    assert batch is not None
    assert shipped(batch.payload) == [(1, b"bytes"), (2, b"bytes")]
    tasks.add([make_task(3)])
    later = tasks.next_batch(None, NOW_S + BYTES_FOR_S)
    assert later is not None
    assert shipped(later.payload) == [(3, b"")]


def test_a_task_that_cannot_be_encoded_stays_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = flight(make_task(1))
    with monkeypatch.context() as patch:
        patch.setattr(module, "ship_task", None)
        with pytest.raises(TypeError):
            tasks.next_batch(None, NOW_S)
    batch = tasks.next_batch(None, NOW_S)
    assert batch is not None
    assert read_task_batch(batch.payload).number == 1


def test_the_listener_is_silent_since_its_last_report() -> None:
    first, second = make_task(1), make_task(2)
    tasks = flight(first, second)
    assert tasks.silent_s(NOW_S) == 0.0
    tasks.next_batch(None, NOW_S)
    tasks.note_report(first, NOW_S + 2, ended=False)
    assert tasks.silent_s(NOW_S + 3) == 3.0
    tasks.note_report(second, NOW_S + 3, ended=True)
    assert tasks.silent_s(NOW_S + 3) == 1.0
    assert (tasks.get(1), tasks.get(2)) == (first, None)


def test_a_listener_that_has_ended_leaves_nothing_in_flight() -> None:
    given = [make_task(number) for number in range(3)]
    tasks = flight(*given)
    tasks.next_batch(ReadLimit(1, 1), NOW_S)
    tasks.note_unread(given[0], NOW_S)
    assert tasks.lose_all() == given
    assert tasks.lost_batch(EPOCH, 0) is None
    assert tasks.next_batch(None, NOW_S) is None
    assert tasks.silent_s(NOW_S) == 0.0
    tasks.add([make_task(4)])
    batch = tasks.next_batch(None, NOW_S)
    assert batch is not None
    assert shipped(batch.payload) == [(4, b"")]
