"""Calls at the same time, of which each ends."""

from __future__ import annotations

import threading

import pytest

from raymq.parallel import map_parallel

WAIT_S = 60.0


def test_results_have_the_order_of_the_items_with_fewer_threads_than_items() -> None:
    assert map_parallel(str, range(20), threads_max=3, name="test") == [str(number) for number in range(20)]
    assert map_parallel(str, [], threads_max=3, name="test") == []


def test_calls_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=WAIT_S)
    assert len(map_parallel(lambda number: together.wait(), range(3), threads_max=3, name="test")) == 3


def test_no_more_than_threads_max_run_at_the_same_time() -> None:
    lock = threading.Lock()
    now: list[int] = []
    most: list[int] = []
    pair = threading.Barrier(2, timeout=WAIT_S)

    def call(number: int) -> None:
        with lock:
            now.append(number)
            most.append(len(now))
        pair.wait()
        with lock:
            now.remove(number)
        pair.wait()

    map_parallel(call, range(6), threads_max=2, name="test")
    assert max(most) == 2


def test_the_first_failure_is_raised_when_all_calls_have_ended() -> None:
    ended: list[int] = []

    def call(number: int) -> None:
        ended.append(number)
        if number % 2:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        map_parallel(call, range(6), threads_max=2, name="test")
    assert sorted(ended) == list(range(6))
