"""The bound on what waits in a producer, its line, and its flushes."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from raymq.errors import InvalidArgumentError, SystemBusyError
from raymq.producer.buffer_pool import BufferPool
from tests.support.clients.fakes import WAIT_S


@dataclass
class Item:
    cost_bytes: int
    generation: int


def test_bytes_and_messages_are_bounded():
    buffer = BufferPool(100, 3)
    assert buffer.try_take(60, 1) is not None
    assert buffer.try_take(41, 1) is None
    assert buffer.try_take(1, 3) is None
    assert buffer.try_take(40, 2) is not None
    assert buffer.try_take(0, 1) is None


def test_what_is_larger_than_the_buffer_passes_alone():
    buffer = BufferPool(100, 3)
    generation = buffer.try_take(1000, 50)
    assert generation is not None
    assert buffer.try_take(1, 1) is None
    buffer.give_back(1000, 50, generation)
    assert buffer.try_take(1, 1) is not None


def test_the_line_is_served_in_order_and_nobody_passes_it():
    buffer = BufferPool(100, 100)
    first = Item(80, buffer.try_take(80, 1))
    large, small = buffer.line_up(50, 1), buffer.line_up(10, 1)
    assert buffer.try_take(1, 1) is None
    assert not small.granted.done()
    buffer.give([first])
    assert large.granted.done()
    assert small.granted.done()
    assert buffer.try_take(40, 1) is not None


def test_who_leaves_the_line_lets_the_next_one_in():
    buffer = BufferPool(100, 100)
    buffer.try_take(80, 1)
    large, small = buffer.line_up(50, 1), buffer.line_up(10, 1)
    buffer.leave(large)
    assert small.granted.done()
    assert not large.granted.done()


@pytest.mark.parametrize("cancelled", [False, True])
def test_who_leaves_after_room_was_granted_gives_it_back(cancelled):
    buffer = BufferPool(100, 100)
    first = Item(80, buffer.try_take(80, 1))
    place = buffer.line_up(50, 1)
    if cancelled:
        place.granted.cancel()
    buffer.give([first])
    buffer.leave(place)
    assert buffer.flushed().done()
    assert buffer.try_take(100, 1) is not None


def test_taking_blocks_until_there_is_room_and_not_longer_than_said():
    buffer = BufferPool(100, 100)
    first = Item(80, buffer.take(80, 1, 0.0))
    with pytest.raises(SystemBusyError, match=r"stayed full for 0\.01 s"):
        buffer.take(50, 1, 0.01)
    with pytest.raises(SystemBusyError, match="is full"):
        buffer.take(50, 1, 0.0)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(buffer.take(50, 1, WAIT_S)))
    thread.start()
    buffer.give([first])
    thread.join(WAIT_S)
    assert taken == [0]


def test_a_flush_waits_for_what_came_before_and_not_for_what_comes_after():
    buffer = BufferPool(1000, 1000)
    old = [Item(10, buffer.try_take(10, 1)) for _ in range(2)]
    first = buffer.flushed()
    young = Item(10, buffer.try_take(10, 1))
    second = buffer.flushed()
    youngest = Item(10, buffer.try_take(10, 1))
    buffer.give([youngest, old[0]])
    assert not first.done()
    buffer.give([old[1]])
    assert first.done()
    assert not second.done()
    buffer.give([young])
    assert second.done()
    assert buffer.flushed().done()


def test_after_a_flush_counting_goes_on():
    buffer = BufferPool(1000, 1000)
    for _ in range(3):
        item = Item(10, buffer.try_take(10, 1))
        flush = buffer.flushed()
        assert not flush.done()
        buffer.give([item])
        assert flush.done()
    assert buffer.try_take(1000, 1000) is not None


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), (-1, 1)])
def test_a_buffer_without_room_is_refused(limits):
    with pytest.raises(InvalidArgumentError):
        BufferPool(*limits)
