"""The programs of docs/tutorials.md and docs/programs.md: each prints the output that its page shows."""

from __future__ import annotations

import re

import pytest

import raymq
from tests.support.clusters.page_example import DOCS, assert_prints_what_it_says, run_program

PROGRAM = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.M | re.S)
TUTORIALS = {
    title: (program, printed) for title, program, printed in PROGRAM.findall((DOCS / "tutorials.md").read_text())
}


@pytest.mark.parametrize("title", TUTORIALS)
def test_a_tutorial_prints_what_it_says(mq: raymq.Client, title: str) -> None:
    program, printed = TUTORIALS[title]
    assert run_program(program) == printed


def test_a_program_with_nothing_but_ray_prints_what_it_says(mq: raymq.Client) -> None:
    assert_prints_what_it_says("programs.md")


def test_each_program_of_the_tutorials_has_a_title_and_an_output() -> None:
    text = (DOCS / "tutorials.md").read_text()
    assert len(TUTORIALS) == len(re.findall(r"^```python$", text, re.M)) >= 5
