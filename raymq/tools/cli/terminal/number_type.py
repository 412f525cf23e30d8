"""NumberType: the type of every command-line option that is a number. Error messages and help texts show the option's
bounds."""

from __future__ import annotations

from typing import Any

import click

from raymq.common.numbers import LONGEST_TIME_S, NUMBER_MAX, RATE, NumberRange


class NumberType(click.FloatRange):
    """Command-line option type for a number from `bounds.low` to `bounds.high`. The number is a float if the lower
    bound is a float, otherwise an integer.

    Any other value, including NaN, is a usage error with exit code 2: "--max must be 1 to 1000, not 0".
    """

    name = "number"

    def __init__(self, bounds: NumberRange) -> None:
        # The option's help shows no upper bound if the bound is so high that it limits nothing in practice.
        is_open = bounds.high in (NUMBER_MAX, LONGEST_TIME_S)
        super().__init__(min=bounds.low, max=None if is_open else bounds.high)
        self.bounds = bounds
        self.is_whole = not isinstance(bounds.low, float)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return an option's value as a number. Raises BadParameter if it is not a number within the bounds."""
        kind = "a whole number, " if self.is_whole else "a number, "
        number: float
        try:
            number = int(value) if self.is_whole else float(value)
        except ValueError:
            self.fail(f"must be {kind}{self.bounds}, not {str(value)[:80]!r}", param, ctx)
        if not self.bounds.has(number):
            self.fail(f"must be {self.bounds}, not {str(value)[:80]}", param, ctx)
        return number


class RateType(NumberType):
    """Command-line option type for a rate per second, given as "50" or "50/s"."""

    name = "rate"

    def __init__(self) -> None:
        super().__init__(RATE)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return an option's value as a rate per second. Raises BadParameter if the text is not a rate within the
        bounds."""
        return super().convert(value.removesuffix("/s") if isinstance(value, str) else value, param, ctx)
