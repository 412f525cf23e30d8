"""Tests of running many cases in one test: every case is checked, and each failure names its case."""

from __future__ import annotations

import pytest

from tests.support.cases import QUICK_EXAMPLES, check_all, examples


def test_every_case_is_checked_and_all_failures_are_raised_together() -> None:
    checked = []

    def is_even(number: int) -> None:
        checked.append(number)
        if number == 3:
            pytest.fail("three")
        assert number % 2 == 0

    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases") as caught:
        check_all([1, 2, 3, 4], is_even)
    assert checked == [1, 2, 3, 4]
    assert [(type(error), error.__notes__) for error in caught.value.exceptions] == [
        (AssertionError, ["case: 1"]),
        (pytest.fail.Exception, ["case: 3"]),
    ]
    check_all([2, 4], is_even)


def test_no_case_at_all_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="no case"):
        check_all([], lambda case: None)


def test_quick_runs_have_fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYMQ_QUICK", raising=False)
    assert [examples(number) for number in (30, 300)] == [30, 300]
    monkeypatch.setenv("RAYMQ_QUICK", "1")
    assert [examples(number) for number in (30, 300)] == [30, QUICK_EXAMPLES]
