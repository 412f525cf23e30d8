"""Tests of the function that formats a duration for a command's output."""

from __future__ import annotations

import pytest

from raymq.tools.cli.terminal.output import duration


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 s"),
        (850, "850 ms"),
        (12_400, "12 s"),
        (185_000, "3 m 5 s"),
        (7_800_000, "2 h 10 m"),
        (356_400_000, "4 d 3 h"),
    ],
)
def test_lengths_of_time_are_formatted_for_people(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text
