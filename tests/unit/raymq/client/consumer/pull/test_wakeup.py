"""Tests of Wakeup, a wait that ends when another thread wakes the waiting thread, or when a file descriptor is
ready."""

from __future__ import annotations

import os
import threading

import pytest

from raymq.client.consumer.pull.poll_turn import Wakeup
from tests.support.clients.fakes import WAIT_S


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def waits(wakeup: Wakeup, *descriptors: int) -> threading.Thread:
    thread = threading.Thread(target=lambda: wakeup.wait(descriptors, 3600.0))
    thread.start()
    return thread


def test_a_wait_ends_when_it_is_set_by_another_thread(pipe):
    wakeup = Wakeup()
    thread = waits(wakeup, pipe[0])
    wakeup.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_wait_ends_when_a_descriptor_is_readable(pipe):
    thread = waits(Wakeup(), pipe[0])
    os.write(pipe[1], b"!")
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_wakeup_before_the_wait_ends_the_wait_until_it_is_cleared():
    wakeup = Wakeup()
    wakeup.set()
    wakeup.set()
    wakeup.wait((), 3600.0)
    wakeup.wait((), 3600.0)
    wakeup.clear()
    thread = waits(wakeup)
    thread.join(0.05)
    assert thread.is_alive()
    wakeup.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_no_call_is_lost_between_clearing_and_waiting():
    """No call of `Wakeup.set` is lost between `clear` and `wait`. One thread calls `set` many times, and the waiting
    thread must notice the last call."""
    wakeup, count, seen = Wakeup(), 2000, 0
    told = [0]

    def tell() -> None:
        for number in range(1, count + 1):
            told[0] = number
            wakeup.set()

    thread = threading.Thread(target=tell)
    thread.start()
    while seen < count:
        wakeup.clear()
        seen = told[0]
        if seen < count:
            wakeup.wait((), WAIT_S)
    thread.join(WAIT_S)
    assert seen == count
