"""Tests that an option with a form, such as a time or a queue, refuses any other text as wrong usage."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from raymq.common.message import MessageQueue
from raymq.tools.cli import cli
from raymq.tools.cli.options import DURATION, POSITION, TIME, ParsedType, queue_of
from tests.unit.raymq.tools.cli.terminal.test_cli_numbers import ALL

PARSED = [(words, parameter) for words, parameter in ALL if isinstance(parameter.type, ParsedType)]
IDS = [f"{words} {parameter.opts[0]}" for words, parameter in PARSED]


def test_every_option_that_shows_a_form_checks_the_form() -> None:
    unchecked = [
        f"{words} {parameter.opts[0]}"
        for words, parameter in ALL
        if isinstance(parameter, click.Option)
        and (parameter.metavar in ("TIME", "TARGET") or (parameter.metavar or "").startswith("BROKER:QUEUE"))
        and not isinstance(parameter.type, ParsedType)
    ]
    assert not unchecked, f"give these options a ParsedType: {unchecked}"
    assert len(PARSED) > 15


@pytest.mark.parametrize(("words", "parameter"), PARSED, ids=IDS)
def test_another_form_is_wrong_usage_that_names_the_option(words: str, parameter: click.Parameter) -> None:
    for text in ("someday", "1x", "-1 h", "5 apples", "a:1:x"):
        result = CliRunner().invoke(cli, [*words.split(), f"{parameter.opts[0]}={text}"], catch_exceptions=False)
        output = " ".join(result.output.split())
        assert result.exit_code == 2, (text, output)
        assert f"Invalid value for '{parameter.opts[0]}': " in output, (text, output)
        assert f"{text!r} is not" in output or f"{text[1:]!r} is not" in output, (text, output)


def test_the_value_of_each_form() -> None:
    assert DURATION.convert("2h", None, None) == 7200
    assert TIME.convert("2026-03-01T12:00:00+00:00", None, None) == 1_772_366_400_000
    assert POSITION.convert("b:c:0:17", None, None) == (MessageQueue("", "b:c", 0), 17)
    assert queue_of("orders", MessageQueue("", "broker-a", 3)) == MessageQueue("orders", "broker-a", 3)
    assert queue_of("orders", None) is None


def test_a_target_of_a_reset_may_be_a_word_an_offset_or_a_time() -> None:
    result = CliRunner().invoke(cli, ["group", "reset-offset", "billing", "orders", "--to", "someday"])
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert "'someday' is not a time: write ISO 8601" in output
    assert "earliest, latest or an offset" in output
