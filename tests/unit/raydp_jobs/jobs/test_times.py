"""Tests of the job options that are points in time."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from raydp_jobs.jobs.times import Period, every_option, period_options
from raymq.common.errors import InvalidArgumentError


@click.command()
@every_option("1m")
@period_options
def command(every_s: int, period: Period) -> None:
    click.echo(f"{every_s} {period.start_ms} {period.end_ms}")


def test_a_period_and_a_stretch_are_parsed() -> None:
    arguments = ["--from", "2026-03-01T12:00:00+00:00", "--every", "2h"]
    assert CliRunner().invoke(command, arguments).output == "7200 1772366400000 None\n"
    assert CliRunner().invoke(command, []).output == "60 None None\n"


def test_a_period_has_its_first_moment_and_not_its_last() -> None:
    period = Period(10, 20)
    assert [period.has(time) for time in (9, 10, 19, 20)] == [False, True, True, False]
    assert Period().has(0)


def test_a_period_without_length_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--from must be before --to"):
        Period(10, 10)


@pytest.mark.parametrize("text", ["1", "1x", "1m 2m", "soon", "0s"])
def test_another_form_of_a_length_is_wrong_usage(text: str) -> None:
    result = CliRunner().invoke(command, ["--every", text])
    assert result.exit_code == 2
    assert f"Invalid value for '--every': {text!r} is not a length of time" in result.output
