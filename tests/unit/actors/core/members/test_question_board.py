"""Tests of the queue of a broker's requests to clients. A polling client takes each request once. Requests can be
withdrawn, are bounded in number, and are dropped if the client no longer polls."""

from __future__ import annotations

import pytest

from actors.core.members.question_board import LISTENS_S, QUESTIONS_WAITING_MAX, QuestionBoard
from raymq.common.errors import SystemBusyError
from raymq.common.members.questions import Question


def question(ticket: str) -> Question:
    return Question("running", "billing", ticket=ticket)


def test_a_question_waits_for_a_client_that_listens_and_is_taken_once():
    board = QuestionBoard()
    assert not board.put("c", question("1"), 0.0), "it has never asked"
    assert board.take("c", 0.0) == []
    assert board.put("c", question("1"), 1.0)
    assert not board.put("other", question("2"), 1.0)
    assert board.take("c", 2.0) == [question("1")]
    assert board.take("c", 2.0) == []


def test_only_the_client_that_was_asked_answers_and_once():
    board = QuestionBoard()
    board.take("c", 0.0)
    board.put("c", question("1"), 0.0)
    assert not board.answered("another", "1")
    assert board.answered("c", "1")
    assert not board.answered("c", "1")
    assert not board.answered("c", "never asked")


def test_a_withdrawn_question_is_gone():
    board = QuestionBoard()
    board.take("c", 0.0)
    for ticket in "12":
        board.put("c", question(ticket), 0.0)
    board.withdraw("1")
    board.withdraw("unknown")
    assert board.take("c", 0.0) == [question("2")]
    assert not board.answered("c", "1")


def test_few_questions_wait_for_a_client():
    board = QuestionBoard()
    board.take("c", 0.0)
    for number in range(QUESTIONS_WAITING_MAX):
        assert board.put("c", question(str(number)), 0.0)
    with pytest.raises(SystemBusyError, match="client c"):
        board.put("c", question("more"), 0.0)
    assert not board.answered("c", "more")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_that_is_silent_or_has_ended_does_not_listen(leaves):
    board = QuestionBoard()
    board.take("c", 0.0)
    board.put("c", question("1"), 0.0)
    if leaves:
        board.leave("c")
    board.take("other", LISTENS_S)
    assert not board.put("c", question("2"), LISTENS_S)
    assert board.take("c", LISTENS_S) == [], "what waited for it is gone with it"
