"""Tests of the bound of messages that a share-mode instance leases ahead of its listener."""

from __future__ import annotations

from raymq.client.consumer.share.prefetch import Prefetch, Room

MIB = 1 << 20


def test_a_slow_listener_leases_only_what_its_threads_can_begin() -> None:
    prefetch = Prefetch(2, 4096, MIB)
    assert prefetch.room(0, 0) == Room(2, MIB)
    assert prefetch.room(1, 1000) == Room(1, MIB - 1000)
    assert prefetch.room(2, 2000) == Room(0, 0)
    for second in range(10):
        prefetch.consumed(1, float(second))
    assert prefetch.bound == 2


def test_a_quick_listener_leases_what_it_consumes_in_half_a_second() -> None:
    prefetch = Prefetch(2, 4096, MIB)
    prefetch.consumed(0, 10.0)
    prefetch.consumed(1000, 10.5)
    assert prefetch.bound == 1000
    prefetch.consumed(100_000, 11.0)
    assert prefetch.bound == 4096
    prefetch.consumed(1, 12.0)
    assert prefetch.bound == 2


def test_a_receive_asks_for_a_part_of_the_bound_unless_a_thread_is_idle() -> None:
    prefetch = Prefetch(2, 4096, MIB)
    prefetch.consumed(0, 10.0)
    prefetch.consumed(1000, 10.5)
    assert prefetch.room(900, 0) == Room(0, 0)
    assert prefetch.room(750, 0) == Room(250, MIB)
    assert prefetch.room(1, 0) == Room(999, MIB)


def test_bytes_bound_the_lease_too() -> None:
    prefetch = Prefetch(8, 4096, MIB)
    assert prefetch.room(1, MIB) == Room(0, 0)
    assert prefetch.room(1, MIB - 1) == Room(7, 1)


def test_the_bound_of_messages_limits_the_threads_too() -> None:
    assert Prefetch(10_000, 100, MIB).room(0, 0) == Room(100, MIB)
    assert Prefetch(10_000, 60_000, MIB).room(0, 0) == Room(4096, MIB)
