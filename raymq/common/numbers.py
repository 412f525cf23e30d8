"""Checks of numbers that programs pass to raymq. A number is accepted, or refused with an error that names its bounds.

    one value     whole_number, real_number, seconds, number_in; number_of_text for typed text
    arguments     checked: every argument that is annotated as int or float
                  bounded: the ranges of arguments, if annotation and name do not define them
    fields        check_fields: the numbers of a settings object

A program may pass anything as a number: text from an environment variable, NaN, a numpy number, a bool. If no range is
given, an int must fit in 64 bits with its sign. In this case a time in ms (`…_ms`) must not be negative, and a time in
seconds (`…_s`) is at most 31 years. So no accepted number overflows a record, a lock or a poll.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, iscoroutinefunction, signature
from numbers import Integral, Real
from typing import Any, Final, NamedTuple, TypeVar

from raymq.common.errors import InvalidArgumentError

NUMBER_MAX: Final = 2**63 - 1
"""The greatest number that an argument may have. The least number is the negative of this number."""
INT32_MAX: Final = 2**31 - 1
LONGEST_TIME_S: Final = 1e9
"""Maximum value of a time argument, in seconds: about 31 years."""
_DIGITS_MAX: Final = 19
"""Number of decimal digits of NUMBER_MAX."""
_SHOWN_CHARS: Final = 80
"""Maximum number of characters of a refused value that an error shows."""
_NUMBER: Final = re.compile(r"(?P<mapping>(?:Mapping|dict)\[.+, )?(?P<kind>int|float)\]?(?P<optional> \| None)?")
"""Pattern of the annotations whose arguments are checked: a number, or a mapping to numbers; both may allow
None."""

F = TypeVar("F", bound=Callable[..., Any])


class NumberRange(NamedTuple):
    """The allowed values of a number: `low` to `high`, both included, and also the value `otherwise` if it is
    not None."""

    low: float = -NUMBER_MAX
    high: float = NUMBER_MAX
    otherwise: int | None = None

    def __str__(self) -> str:
        text = f"{_shown_bound(self.low)} to {_shown_bound(self.high)}"
        return text if self.otherwise is None else f"{text}, or {self.otherwise}"

    def has(self, value: float) -> bool:
        """True if the range contains `value`. False if `value` is NaN."""
        return self.low <= value <= self.high or value == self.otherwise


ANY_NUMBER: Final = NumberRange()
TIME_S: Final = NumberRange(0.0, LONGEST_TIME_S)
TIME_MS: Final = NumberRange(0, NUMBER_MAX)
POINT_IN_TIME_MS: Final = NumberRange(978_307_200_000, NUMBER_MAX, otherwise=0)
"""Allowed points in time, in ms since 1970: 0, or the year 2001 and later. A present time in seconds is smaller than
this range. It is refused, because read as ms it would be a day of January 1970."""
SECONDS_HINT: Final = "is it in milliseconds?"
"""Last words of the error message for a point in time that is out of range. The words ask if the value is in
milliseconds, because the caller may have passed seconds."""
POSITIVE: Final = NumberRange(1, NUMBER_MAX)
NOT_NEGATIVE: Final = NumberRange(0, NUMBER_MAX)
RATE: Final = NumberRange(0.001, 1e9)
"""Allowed rates, in messages per second. With a rate below the lower bound, each message would wait longer than a
quarter of an hour."""


def whole_number(name: str, value: object, low: float = -NUMBER_MAX, high: float = NUMBER_MAX) -> int:
    """Return the value of the argument `name` as an int from `low` to `high`. Numpy numbers are accepted; bools are
    not. Raises InvalidArgumentError if `value` is not such a number."""
    return _whole(name, value, NumberRange(low, high))


def real_number(name: str, value: object, low: float = -NUMBER_MAX, high: float = NUMBER_MAX) -> float:
    """Return the value of the argument `name` as an int or a float from `low` to `high`. Numpy numbers are accepted;
    bools and NaN are not. Raises InvalidArgumentError if `value` is not such a number."""
    return _real(name, value, NumberRange(low, high))


def seconds(name: str, value: object, low: float = 0.0) -> float:
    """Return the value of the argument `name` as a time in seconds, from `low` to LONGEST_TIME_S. Raises
    InvalidArgumentError if `value` is not such a time."""
    return _real(name, value, NumberRange(low, LONGEST_TIME_S))


def number_of_text(name: str, text: str, bounds: NumberRange = NOT_NEGATIVE) -> int:
    """Parse an integer in decimal digits that a user typed. Raises InvalidArgumentError if `text` is not an integer
    within `bounds`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX):
        raise InvalidArgumentError(f"{name} must be a whole number, {bounds}, not {shown(text)}")
    return _whole(name, int(text), bounds)


def bounded(**ranges: NumberRange) -> Callable[[F], F]:
    """Decorate a function with the allowed ranges of its number arguments. `checked` checks the arguments against these
    ranges at each call."""

    def mark(function: F) -> F:
        function.number_ranges = ranges  # type: ignore[attr-defined]
        return function

    return mark


def number_checks(function: Callable[..., Any]) -> dict[str, tuple[Callable[[object], Any], bool]]:
    """Return the checks of a function's number arguments, by argument name. Each value is a pair: the function that
    checks the argument, and True if the argument may be None."""
    ranges: Mapping[str, NumberRange] = getattr(function, "number_ranges", {})
    checks: dict[str, tuple[Callable[[object], Any], bool]] = {}
    for name, parameter in signature(function).parameters.items():
        match = _NUMBER.fullmatch(str(parameter.annotation))
        if match is not None and parameter.kind is not Parameter.VAR_KEYWORD:
            check = _check_of(name, match["kind"], ranges.get(name), is_mapping=match["mapping"] is not None)
            checks[name] = check, match["optional"] is not None
    if unknown := ranges.keys() - checks.keys():
        raise TypeError(f"{function.__qualname__} has no number parameters named {', '.join(sorted(unknown))}")
    return checks


def checked(function: F) -> F:
    """Return `function` with checks of its number arguments. If a number is outside its range, a call raises
    InvalidArgumentError before the function begins."""
    found = number_checks(function)
    if not found:
        return function
    parameters = signature(function).parameters.values()
    # A keyword-only parameter has no position. Python itself refuses the positional arguments that are too many.
    positions = {one.name: at for at, one in enumerate(parameters) if one.kind is not Parameter.KEYWORD_ONLY}

    def check(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        for name, (number_of, optional) in found.items():
            if name in keywords:
                if not (optional and keywords[name] is None):
                    keywords[name] = number_of(keywords[name])
                continue
            at = positions.get(name)
            if at is not None and at < len(arguments) and not (optional and arguments[at] is None):
                arguments = (*arguments[:at], number_of(arguments[at]), *arguments[at + 1 :])
        return arguments

    if iscoroutinefunction(function):

        @wraps(function)
        async def call_async(*arguments: Any, **keywords: Any) -> Any:
            return await function(*check(arguments, keywords), **keywords)

        return call_async  # type: ignore[return-value]

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*check(arguments, keywords), **keywords)

    return call  # type: ignore[return-value]


def check_fields(settings: object, ranges: Mapping[str, NumberRange]) -> None:
    """Check the number fields of a frozen settings object, and convert each field to a plain int or float. A field is a
    real number if the lower bound of its range is a float, else an integer. Raises InvalidArgumentError if a field is
    out of its range."""
    for name, bounds in ranges.items():
        object.__setattr__(settings, name, number_in(name, getattr(settings, name), bounds))


# The return type is Any, because the result is an int, or a float if `bounds` is a range of real numbers.
def number_in(name: str, value: object, bounds: NumberRange) -> Any:
    """Return the value of the argument `name` as a number within `bounds`. The result is a real number if the lower
    bound is a float, else an integer. Raises InvalidArgumentError if `value` is not such a number."""
    return (_real if isinstance(bounds.low, float) else _whole)(name, value, bounds)


def shown(value: object, chars_max: int = _SHOWN_CHARS) -> str:
    """Return a refused value as text for an error. Long text is truncated. An int with thousands of digits is described
    instead, because Python refuses to print it."""
    try:
        text = repr(value)
    except ValueError:
        return "a number with thousands of digits"
    return text if len(text) <= chars_max else f"{text[:chars_max]}…"


def _check_of(name: str, kind: str, bounds: NumberRange | None, *, is_mapping: bool) -> Callable[[object], Any]:
    number = _whole if kind == "int" else _real
    if bounds is None:
        default = TIME_S if name.endswith("_s") and kind == "float" else ANY_NUMBER
        bounds = TIME_MS if name.endswith("_ms") else default
    if not is_mapping:
        return lambda value: number(name, value, bounds)

    def check_all(values: object) -> dict[Any, Any]:
        if not isinstance(values, Mapping):
            raise InvalidArgumentError(f"{name} must map names to numbers, {bounds}, not {shown(values)}")
        for key in values:
            _whole(f"{name} of {shown(key)}: queue_id", getattr(key, "queue_id", 0), NOT_NEGATIVE)
        return {key: number(f"{name} of {key}", value, bounds) for key, value in values.items()}

    return check_all


def _whole(name: str, value: object, bounds: NumberRange) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidArgumentError(f"{name} must be a whole number{_told(bounds)}, not {shown(value)}")
        value = int(value)
    if not bounds.has(value):
        hint = f" ({SECONDS_HINT})" if bounds == POINT_IN_TIME_MS and 0 < value < bounds.low else ""
        raise InvalidArgumentError(f"{name} must be {bounds}, not {shown(value)}{hint}")
    return value


def _real(name: str, value: object, bounds: NumberRange) -> float:
    if type(value) is not float and type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidArgumentError(f"{name} must be a number{_told(bounds)}, not {shown(value)}")
        try:
            value = float(value)
        except OverflowError:  # `value` is a number, such as a Fraction, that is too large for a float
            raise InvalidArgumentError(f"{name} must be {bounds}, not {shown(value)}") from None
    if not bounds.has(value):
        raise InvalidArgumentError(f"{name} must be {bounds}, not {shown(value)}")
    return value


def _told(bounds: NumberRange) -> str:
    """Return the bounds as part of an error about a value that is no number; empty if 64 bits are the only bound."""
    return "" if bounds == ANY_NUMBER else f", {bounds}"


def _shown_bound(bound: float) -> str:
    if abs(bound) == NUMBER_MAX:
        return "2^63 - 1" if bound > 0 else "-(2^63 - 1)"
    return f"{bound:g}" if bound != int(bound) else str(int(bound))
