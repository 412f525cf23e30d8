"""Tests that each of RocketMQ's golden facts has a test with the fact's number, or is listed as a behaviour that raymq
does not have.

For each such fact, the table of docs/coming-from-rocketmq.md also names the test of the behaviour that raymq has
instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = {*range(1, 118), *range(159, 165)}
NO_TEST = {*range(73, 77)}
"""Numbers of golden facts without a test: they concern Bloom filters, which raymq does not have."""


def rows() -> list[tuple[set[int], str]]:
    """Return the rows of the last table in docs/coming-from-rocketmq.md: the numbers of golden facts, and the table
    cell that names their tests."""
    text = (ROOT / "docs" / "coming-from-rocketmq.md").read_text().partition("## The facts, one by one")[2]
    found = []
    for numbers, held in re.findall(r"^\| ([\d–, ]+) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE):
        ranges = [part.partition("–") for part in numbers.split(", ")]
        found.append(({n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}, held))
    return found


def numbers_in(path: Path) -> set[int]:
    """Return the numbers of golden facts that a test file may mention: all numbers that are not part of a word or of
    another number, including the ends of ranges such as "85 to 101"."""
    text = path.read_text()
    alone = {
        int(number) for number in re.findall(r"(?<![\w.])(?:golden[-_ ])?(\d{1,3})(?!\d|\.\d)", text, re.IGNORECASE)
    }
    named = {int(number) for number in re.findall(r"golden[-_](\d{1,3})", text)}
    return alone | named


def test_every_fact_is_in_one_row() -> None:
    listed = [number for numbers, _ in rows() for number in numbers]
    assert sorted(listed) == sorted(NUMBERS)


@pytest.mark.parametrize(
    ("numbers", "held"), rows(), ids=lambda value: str(min(value)) if value and isinstance(value, set) else ""
)
def test_the_test_that_is_named_has_the_number(numbers: set[int], held: str) -> None:
    files = re.findall(r"`([^`]+)`", held)
    assert all((ROOT / name).is_file() for name in files)
    assert files or numbers <= NO_TEST
    if "not taken over" not in held:
        known = set().union(*(numbers_in(ROOT / name) for name in files))
        assert numbers <= known, f"{sorted(numbers - known)} are not named in {files}"
