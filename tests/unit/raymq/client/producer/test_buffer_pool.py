"""Tests of a producer's BufferPool: its size limits, the callers that wait for space, and its flushes."""

from __future__ import annotations

import threading

import pytest

from raymq.client.producer.buffer_pool import BufferPool, BufferWaiter
from raymq.common.errors import InvalidArgumentError, SystemBusyError
from tests.support.clients.fakes import WAIT_S


def test_bytes_and_messages_are_bounded():
    pool = BufferPool(100, 3)
    assert pool.try_allocate(60, 1) is not None
    assert pool.try_allocate(41, 1) is None
    assert pool.try_allocate(1, 3) is None
    assert pool.try_allocate(40, 2) is not None
    assert pool.try_allocate(0, 1) is None


def test_a_send_larger_than_the_pool_is_allocated_alone():
    pool = BufferPool(100, 3)
    generation = pool.try_allocate(1000, 50)
    assert generation is not None
    assert pool.try_allocate(1, 1) is None
    pool.deallocate(1000, 50, generation)
    assert pool.try_allocate(1, 1) is not None


def test_waiters_get_space_in_order_and_nobody_overtakes_them():
    pool = BufferPool(100, 100)
    first = pool.try_allocate(80, 1)
    large, small = pool.add_waiter(50, 1), pool.add_waiter(10, 1)
    assert pool.try_allocate(1, 1) is None
    assert not small.granted.done()
    pool.deallocate(80, 1, first)
    assert large.granted.done()
    assert small.granted.done()
    assert pool.try_allocate(40, 1) is not None


def test_a_waiter_that_is_removed_lets_the_next_one_in():
    pool = BufferPool(100, 100)
    pool.try_allocate(80, 1)
    large, small = pool.add_waiter(50, 1), pool.add_waiter(10, 1)
    pool.remove_waiter(large)
    assert small.granted.done()
    assert not large.granted.done()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_waiter_that_is_removed_after_it_was_granted_frees_its_space(cancelled):
    pool = BufferPool(100, 100)
    first = pool.try_allocate(80, 1)
    waiter = pool.add_waiter(50, 1)
    if cancelled:
        waiter.granted.cancel()
    pool.deallocate(80, 1, first)
    pool.remove_waiter(waiter)
    assert pool.flushed().done()
    assert pool.try_allocate(100, 1) is not None


def test_allocating_blocks_until_there_is_space_and_not_longer_than_the_timeout():
    pool = BufferPool(100, 100)
    first = pool.allocate(80, 1, 0.0)
    with pytest.raises(SystemBusyError, match=r"stayed full for 0\.01 s"):
        pool.allocate(50, 1, 0.01)
    with pytest.raises(SystemBusyError, match="is full"):
        pool.allocate(50, 1, 0.0)
    allocated = []
    thread = threading.Thread(target=lambda: allocated.append(pool.allocate(50, 1, WAIT_S)))
    thread.start()
    pool.deallocate(80, 1, first)
    thread.join(WAIT_S)
    assert allocated == [0]


def test_a_flush_waits_for_messages_allocated_before_and_not_for_later_ones():
    pool = BufferPool(1000, 1000)
    old = [pool.try_allocate(10, 1) for _ in range(2)]
    first = pool.flushed()
    young = pool.try_allocate(10, 1)
    second = pool.flushed()
    youngest = pool.try_allocate(10, 1)
    pool.deallocate(10, 1, youngest)
    pool.deallocate(10, 1, old[0])
    assert not first.done()
    pool.deallocate(10, 1, old[1])
    assert first.done()
    assert not second.done()
    pool.deallocate(10, 1, young)
    assert second.done()
    assert pool.flushed().done()


def test_counting_continues_after_a_flush():
    pool = BufferPool(1000, 1000)
    for _ in range(3):
        item = pool.try_allocate(10, 1)
        flush = pool.flushed()
        assert not flush.done()
        pool.deallocate(10, 1, item)
        assert flush.done()
    assert pool.try_allocate(1000, 1000) is not None


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), (-1, 1)])
def test_a_pool_without_space_is_refused(limits):
    with pytest.raises(InvalidArgumentError):
        BufferPool(*limits)


def test_a_waiter_that_was_removed_before_it_is_enqueued_does_not_wait():
    pool = BufferPool(100, 10)
    waiter = BufferWaiter(50, 1)
    pool.remove_waiter(waiter)
    pool.enqueue(waiter)
    assert (pool._bytes, pool._count, waiter.granted.done()) == (0, 0, False)
    assert pool.try_allocate(100, 1) is not None


def test_space_that_was_taken_over_is_not_freed_with_its_waiter():
    pool = BufferPool(100, 10)
    waiter = pool.add_waiter(50, 1)
    generation = pool.take(waiter)
    assert generation is not None
    pool.remove_waiter(waiter)
    assert pool.take(waiter) is None
    assert (pool._bytes, pool._count) == (50, 1)
    pool.deallocate(50, 1, generation)
    assert (pool._bytes, pool._count) == (0, 0)


def test_a_waiter_that_is_removed_twice_frees_its_space_once():
    pool = BufferPool(100, 10)
    waiter = pool.add_waiter(50, 1)
    for _ in range(2):
        pool.remove_waiter(waiter)
        assert (pool._bytes, pool._count, pool.take(waiter)) == (0, 0, None)
