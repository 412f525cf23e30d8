"""Tests that each numeric option of a command shows its limits, and that an absurd number is a usage error."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from raymq.common.names import REPLICAS_OF_GROUP_MAX
from raymq.common.numbers import NumberRange
from raymq.tools.cli import cli
from raymq.tools.cli.terminal.number_type import NumberType, RateType


def parameters(command: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Parameter]]:
    """Yield the options and arguments of all commands, each with the full name of its command."""
    for parameter in command.params:
        yield " ".join(path), parameter
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from parameters(below, (*path, name))


ALL = list(parameters())
NUMBERS = [
    (words, parameter, parameter.type)
    for words, parameter in ALL
    if isinstance(parameter.type, NumberType) and isinstance(parameter, click.Option)
]
IDS = [f"{words} {parameter.opts[0]}" for words, parameter, _ in NUMBERS]


def test_every_number_of_a_command_has_bounds() -> None:
    plain = (click.types.IntParamType, click.types.FloatParamType)
    without = [
        f"{words} {parameter.opts[0]}"
        for words, parameter in ALL
        if isinstance(parameter.type, plain) and not isinstance(parameter.type, NumberType)
    ]
    assert not without, f"give these options a NumberType: {without}"
    assert len(NUMBERS) > 35


@pytest.mark.parametrize(("words", "parameter", "type_"), NUMBERS, ids=IDS)
def test_an_absurd_number_is_wrong_usage_that_names_the_bounds(
    words: str, parameter: click.Parameter, type_: NumberType
) -> None:
    bounds = type_.bounds
    texts = ["x", "", "nan", "inf", "-inf", "1e999", "9" * 5000, str(2**63), "-1e-9", "True", "²", "0x10"]
    texts += [str(bounds.low - 1), str(bounds.high * 2 + 1), *(["1.5"] if type_.is_whole else [])]
    for text in texts:
        if text == str(bounds.otherwise):
            continue
        result = CliRunner().invoke(cli, [*words.split(), f"{parameter.opts[0]}={text}"], catch_exceptions=False)
        output = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2, (text, output)
        assert f"'{parameter.opts[0]}'" in output, (text, output)
        assert str(bounds) in output, (text, output)
        assert len(output) < 1000


@pytest.mark.parametrize("text", ["x", "", "nan", "inf", "9" * 5000, "-1", "0", "1.5", "True", "²", "0x10", "1000000"])
def test_an_absurd_number_of_replicas_is_wrong_usage(text: str) -> None:
    result = CliRunner().invoke(cli, ["broker", "replicas", "broker-a", "--", text], catch_exceptions=False)
    output = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2, output
    assert f"1 to {REPLICAS_OF_GROUP_MAX}" in output, output


@pytest.mark.parametrize(("words", "parameter", "type_"), NUMBERS, ids=IDS)
def test_the_bounds_themselves_and_the_default_are_taken(
    words: str, parameter: click.Parameter, type_: NumberType
) -> None:
    for number in (type_.bounds.low, type_.bounds.high):
        if number < 2**53:  # a float may not represent a larger integer exactly
            assert type_.convert(str(number), parameter, None) == number
    if isinstance(parameter.default, int | float):
        assert type_.convert(parameter.default, parameter, None) == parameter.default


def test_a_rate_may_have_the_suffix_per_second() -> None:
    assert [RateType().convert(text, None, None) for text in ("500/s", "0.5", 50)] == [500.0, 0.5, 50.0]


def test_a_value_outside_of_the_range_that_has_a_meaning_is_taken() -> None:
    assert NumberType(NumberRange(1, 5, otherwise=-1)).convert("-1", None, None) == -1
