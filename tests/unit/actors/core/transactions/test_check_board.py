"""Tests of a broker's transaction checks, which wait until a producer polls for them, and of the list of live
producers."""

from __future__ import annotations

from actors.core.transactions.check_board import CHECKS_TAKEN_MAX, CHECKS_WAITING_MAX, LIVE_S, CheckBoard
from raymq.common.protocol.transactions import TransactionCheck


def check(number: int, times: int = 1, group: str = "g") -> TransactionCheck:
    return TransactionCheck(group, f"T{number}", number, number * 100, times, b"")


def test_a_group_is_live_while_a_producer_of_it_asks():
    board = CheckBoard()
    assert board.live_groups(0.0) == []
    board.take(["g"], "one", 100.0)
    board.take(["g"], "two", 105.0)
    assert board.live_groups(100.0 + LIVE_S) == ["g"]
    assert board.live_groups(105.0 + LIVE_S) == []


def test_a_producer_that_has_left_is_not_live():
    board = CheckBoard()
    board.take(["g"], "one", 100.0)
    board.leave("g", "one")
    board.leave("unknown", "one")
    assert board.live_groups(100.0) == []


def test_each_check_goes_to_exactly_one_polling_producer():
    board = CheckBoard()
    board.put([check(number) for number in range(CHECKS_TAKEN_MAX + 2)] + [check(1, group="other")])
    first, second = board.take(["g"], "one", 1.0), board.take(["g"], "two", 1.0)
    assert [one.transaction_id for one in first + second] == [f"T{number}" for number in range(CHECKS_TAKEN_MAX + 2)]
    assert len(first) == CHECKS_TAKEN_MAX
    assert board.take(["g"], "one", 1.0) == []
    assert [one.producer_group for one in board.take(["other"], "three", 1.0)] == ["other"]


def test_a_check_of_the_next_round_takes_the_place_of_one_that_nobody_took():
    board = CheckBoard()
    board.put([check(1)])
    board.put([check(1, times=2)])
    assert [one.times for one in board.take(["g"], "one", 1.0)] == [2]


def test_a_check_that_was_taken_by_a_producer_that_died_comes_to_another_in_the_next_round():
    board = CheckBoard()
    board.put([check(1)])
    board.take(["g"], "dies", 1.0)
    board.put([check(1, times=2)])
    assert [one.times for one in board.take(["g"], "lives", 2.0)] == [2]


def test_the_checks_of_a_group_are_bounded():
    board = CheckBoard()
    board.put([check(number) for number in range(CHECKS_WAITING_MAX + 5)])
    assert board.take(["g"], "one", 1.0)[0].transaction_id == "T5"


def test_the_checks_of_a_group_without_a_producer_are_dropped():
    board = CheckBoard()
    board.take(["g"], "one", 1.0)
    board.put([check(1)])
    board.live_groups(1.0 + LIVE_S)
    assert board.take(["g"], "two", 100.0) == []


def test_a_client_that_answers_for_several_groups_keeps_all_of_them_live_and_gets_a_bounded_number_of_checks():
    board = CheckBoard()
    board.put([check(number) for number in range(CHECKS_TAKEN_MAX - 1)] + [check(n, group="h") for n in range(2)])
    first = board.take(["g", "h", "i"], "gateway", 1.0)
    assert len(first) == CHECKS_TAKEN_MAX
    assert [one.transaction_id for one in first if one.producer_group == "h"] == ["T0"]
    assert sorted(board.live_groups(2.0)) == ["g", "h", "i"]
    assert [one.transaction_id for one in board.take(["h"], "gateway", 2.0)] == ["T1"]
