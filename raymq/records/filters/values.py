"""Values of a filter expression, and their comparison by the rules of the Java types in RocketMQ.

A property is a string. A literal is a string, a boolean, NULL, or a number of one of three types (`ValueKind`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from math import copysign, isnan
from typing import Final

LONG_MAX: Final = 2**63 - 1
INTEGER_MAX: Final = 2**31 - 1


class ValueKind(IntEnum):
    """The type of a number in a filter expression. Two numbers are compared as the wider of their two types."""

    INTEGER = 0
    """A signed integer of 32 bits."""
    LONG = 1
    """A signed integer of 64 bits."""
    DOUBLE = 2
    """A floating-point number of 64 bits."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a filter expression, with its type."""

    value: int | float
    kind: ValueKind


Value = bool | str | Number | None
"""A value of a filter expression. None is SQL's NULL: the property is absent, or the expression contains the literal
NULL."""


class IncomparableError(Exception):
    """Two values in a filter expression cannot be compared, for example a number and the text "abc". The expression
    then does not match the message."""


_WHOLE: Final = re.compile(r"[+-]?[0-9]+")
_DOUBLE: Final = re.compile(r"([+-]?)(?:(NaN|Infinity)|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?)")
_HEX_DOUBLE: Final = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")
_BLANKS: Final = "".join(map(chr, range(0x21)))
"""The characters that Java's `trim` removes."""


def read_number(text: str, kind: ValueKind) -> int | float:
    """Parse a text as a number of type `kind`. Raises IncomparableError if the text is not a number, or is out of the
    type's range."""
    if kind is ValueKind.DOUBLE:
        return read_double(text)
    if not _WHOLE.fullmatch(text):
        raise IncomparableError(f"{text!r} is not a whole number")
    sign, digits = ("-" if text[0] == "-" else ""), text.lstrip("+-").lstrip("0")
    if len(digits) > 19:
        raise IncomparableError(f"{text!r} is too large")
    number = int(sign + (digits or "0"))
    most = INTEGER_MAX if kind is ValueKind.INTEGER else LONG_MAX
    if not -most - 1 <= number <= most:
        raise IncomparableError(f"{text!r} is too large")
    return number


def read_double(text: str) -> float:
    """Parse a text as a double, as Java's `Double.valueOf` does. Raises IncomparableError if the text is not a
    double."""
    text = text.strip(_BLANKS)
    if found := _DOUBLE.fullmatch(text):
        sign, word, digits = found.groups()
        return float(sign + ({"NaN": "nan", "Infinity": "inf"}[word] if word else digits))
    if found := _HEX_DOUBLE.fullmatch(text):
        try:
            return float.fromhex(found[1])
        except OverflowError:
            return float("-inf" if text[0] == "-" else "inf")
    raise IncomparableError(f"{text!r} is not a number")


def is_true_text(text: str) -> bool:
    """Convert a text to a boolean: True for "true" in upper, lower or mixed case, False for every other text."""
    return len(text) == 4 and text.lower() == "true"


def compare(left: Value, right: Value) -> int:
    """Compare two values that are not NULL: the result is negative, 0 or positive. If unequal values have no order, the
    result is -1.

    Raises IncomparableError for the two comparisons that raise an error in RocketMQ. One compares a number with a text
    that is not a number. The other has a boolean on the left and a text on the right.
    """
    if isinstance(left, str):
        return _compare_text(left, right)
    if isinstance(left, bool):
        if isinstance(right, str):
            raise IncomparableError(f"a boolean cannot be compared with the text {right!r} on its right")
        return left - right if isinstance(right, bool) else -1
    assert isinstance(left, Number)
    if isinstance(right, str):
        return _order(left.value, read_number(right, left.kind), left.kind)
    if isinstance(right, Number):
        kind = max(left.kind, right.kind)
        return _order(left.value, right.value, kind)
    return -1


def compare_as_doubles(left: str, right: str) -> int:
    """Compare two texts as doubles. Raises IncomparableError if one of the texts is not a number."""
    return _order(read_double(left), read_double(right), ValueKind.DOUBLE)


def _compare_text(left: str, right: Value) -> int:
    if isinstance(right, str):
        return (left > right) - (left < right)
    if isinstance(right, bool):
        return is_true_text(left) - right
    assert isinstance(right, Number)
    return _order(read_number(left, right.kind), right.value, right.kind)


def _order(left: float, right: float, kind: ValueKind) -> int:
    if kind is not ValueKind.DOUBLE:
        return (left > right) - (left < right)
    first, second = double_rank(float(left)), double_rank(float(right))
    return (first > second) - (first < second)


def double_rank(number: float) -> tuple[bool, float, float]:
    """Return a key that sorts doubles as Java does: NaN last and equal to itself, -0.0 before 0.0."""
    return (True, 0.0, 0.0) if isnan(number) else (False, number, copysign(1.0, number))
