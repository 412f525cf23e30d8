"""Tests of LargeFrames, which decides which connection may send a large frame, in which order, and which connection
must retry later."""

from __future__ import annotations

from raymq.remoting.lane.turns import FIRST_SPEED, LargeFrames, Turn


def test_frames_are_granted_up_to_the_limit_and_then_in_the_order_of_asking():
    frames = LargeFrames(100, longest_wait_s=1.0)
    assert frames.ask("a", 60, 0.0) is Turn.GRANTED
    assert frames.ask("b", 60, 0.0) is Turn.WAITING
    assert frames.ask("c", 10, 0.0) is Turn.WAITING  # c's frame would fit below the limit, but b is next
    assert (frames.granted_bytes, frames.waiting_bytes) == (60, 70)
    assert frames.finish("a", 1.0) == ["b", "c"]
    assert (frames.granted_bytes, frames.waiting_bytes) == (70, 0)
    assert frames.finish("b", 2.0) == frames.finish("c", 2.0) == []
    assert len(frames) == 0


def test_a_frame_larger_than_the_limit_is_granted_alone():
    frames = LargeFrames(100, longest_wait_s=1.0)
    assert frames.ask("a", 500, 0.0) is Turn.GRANTED
    assert frames.ask("b", 1, 0.0) is Turn.WAITING
    assert frames.finish("a", 0.1) == ["b"]
    assert frames.ask("c", 500, 0.1) is Turn.WAITING
    assert frames.finish("b", 0.2) == ["c"]


def test_one_who_leaves_gives_up_its_turn_or_its_place():
    frames = LargeFrames(100, longest_wait_s=1.0)
    frames.ask("a", 100, 0.0)
    frames.ask("b", 100, 0.0)
    frames.ask("c", 100, 0.0)
    assert frames.leave("b", 0.1) == []
    assert frames.leave("a", 0.2) == ["c"]
    assert frames.leave("nobody", 0.3) == []
    assert (frames.granted_bytes, frames.waiting_bytes) == (100, 0)


def test_when_the_wait_would_be_long_a_frame_is_refused():
    size = int(FIRST_SPEED)
    frames = LargeFrames(size, longest_wait_s=1.5)
    assert frames.ask("a", size, 0.0) is Turn.GRANTED
    assert frames.wait_s() == 1.0
    assert frames.ask("b", size, 0.0) is Turn.WAITING
    assert frames.wait_s() == 2.0
    assert frames.ask("c", 1, 0.0) is Turn.REFUSED
    assert len(frames) == 2


def test_the_wait_is_reckoned_from_the_speed_of_late():
    frames = LargeFrames(1000, longest_wait_s=1.0)
    now_s = 0.0
    for _ in range(100):  # the connection sends at 10 MB/s
        assert frames.ask("a", 1_000_000, now_s) is Turn.GRANTED
        now_s += 0.1
        frames.finish("a", now_s)
        now_s += 5.0  # the pause between two large frames does not count for the rate at which the connection sends
    frames.ask("a", 5_000_000, now_s)
    assert 0.49 < frames.wait_s() < 0.51


def test_clients_that_wait_too_long_are_removed():
    frames = LargeFrames(100, longest_wait_s=1.0)
    assert frames.next_overdue_s() is None
    frames.ask("a", 100, 0.0)
    frames.ask("b", 10, 2.0)
    frames.ask("c", 10, 2.5)
    assert frames.next_overdue_s() == 3.0
    assert frames.take_overdue(3.0) == []
    assert frames.take_overdue(3.1) == ["b"]
    assert (frames.waiting_bytes, frames.next_overdue_s()) == (10, 3.5)
    assert frames.finish("a", 3.2) == ["c"]
