"""Evaluates a filter expression for many messages at once, from the bytes of their records.

Only the properties that the expression names are read, as columns; bodies are not read. The result for each message
equals the result of `matches` in sql.py, which is the reference. Truth values are small integers, so that AND and OR
are table lookups.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raymq.records.filters.plan import (
    And,
    Compare,
    Equal,
    Find,
    In,
    IsPresent,
    Literal,
    Name,
    Negative,
    Not,
    Operand,
    Or,
    Truth,
    negative,
)
from raymq.records.filters.sql import SqlFilter, value_of
from raymq.records.filters.text_columns import Numbers, TextColumn
from raymq.records.filters.values import IncomparableError, Number, ValueKind, compare, is_true_text
from raymq.records.format.layout import RecordError
from raymq.records.kernels.fields import find_fields
from raymq.records.kernels.property_columns import find_properties

Ints = NDArray[np.int64]
Truths = NDArray[np.uint8]
"""Array with the truth value of each message: FALSE, TRUE, NULL or RAISES; shape (n,)."""

_Scalar = str | Number
_Operand = TextColumn | Truths | _Scalar

FALSE, TRUE, NULL, RAISES = range(4)

_NOT: Final = np.array([TRUE, FALSE, NULL, RAISES], np.uint8)
# Truth tables of AND and OR: the row is the left operand, the column the right operand. The right operand is not
# evaluated if the left operand decides the result: FALSE for AND, TRUE for OR.
_AND: Final = np.array(
    [
        [FALSE, FALSE, FALSE, FALSE],
        [FALSE, TRUE, NULL, RAISES],
        [FALSE, NULL, NULL, RAISES],
        [RAISES, RAISES, RAISES, RAISES],
    ],
    np.uint8,
)
_OR: Final = np.array(
    [
        [FALSE, TRUE, NULL, RAISES],
        [TRUE, TRUE, TRUE, TRUE],
        [NULL, TRUE, NULL, RAISES],
        [RAISES, RAISES, RAISES, RAISES],
    ],
    np.uint8,
)


def matching(data: memoryview | bytes, starts: Ints, expression: SqlFilter) -> NDArray[np.bool_]:
    """Return a mask, shape (n,), that is True for the records at `starts` in `data` that match the expression.

    The mask is also True for an unreadable record: the reader of its body reports the damage.
    """
    if not len(starts):
        return np.zeros(0, np.bool_)
    records = np.frombuffer(data, np.uint8)
    try:
        fields = find_fields(records, starts)
    except RecordError:
        if len(starts) == 1:
            return np.ones(1, np.bool_)
        half = len(starts) // 2
        return np.concatenate([matching(data, part, expression) for part in (starts[:half], starts[half:])])
    names = expression.names
    found = find_properties(records, fields.properties_at, fields.properties_size, [name.encode() for name in names])
    columns = {name: TextColumn(values) for name, values in zip(names, found, strict=True)}
    passes: NDArray[np.bool_] = Evaluation(columns, len(starts)).truths(expression.plan) == TRUE
    return passes


class Evaluation:
    """Evaluates plans of filter expressions for `count` messages. The messages' properties are given as one column per
    property name."""

    def __init__(self, columns: dict[str, TextColumn], count: int) -> None:
        self._columns, self._count = columns, count

    def truths(self, plan: Truth) -> Truths:
        """Return the truth value of a filter expression's plan for each message."""
        match plan:
            case Literal(value):
                return self._constant(value is True if value is not None else None)
            case And(operands):
                return self._joined(operands, _AND)
            case Or(operands):
                return self._joined(operands, _OR)
            case Not(operand):
                return _taken(_NOT, self.truths(operand))
            case Equal(left, right):
                return self._equal(self._operand(left), self._operand(right))
            case Compare(_, left, right):
                return self._compared(plan, self._operand(left), self._operand(right))
            case In(Name(name), texts):
                column = self._columns[name]
                return np.where(column.present, column.is_one_of(texts), NULL).astype(np.uint8)
            case IsPresent(Name(name)):
                return np.where(self._columns[name].present, FALSE, NULL).astype(np.uint8)
            case Find():
                return self._found(plan, self._operand(plan.operand))

    def _operand(self, node: Operand) -> _Operand:
        """Return the values of an operand of a filter expression: a constant, a column of texts, or truth
        values."""
        match node:
            case Name(name):
                return self._columns[name]
            case Negative(operand):
                value = self._operand(operand)
                return negative(value) if isinstance(value, Number) else _raising(self._constant(None), value)
            case Literal(str() | Number() as constant):
                return constant
            case _:
                return self.truths(node)

    def _constant(self, value: bool | None) -> Truths:
        return np.full(self._count, NULL if value is None else int(value), np.uint8)

    def _joined(self, operands: tuple[Truth, ...], table: NDArray[np.uint8]) -> Truths:
        result = self.truths(operands[0])
        for operand in operands[1:]:
            result = _taken(table.reshape(-1), result * len(table) + self.truths(operand))
        return result

    def _present(self, operand: _Operand) -> NDArray[np.bool_]:
        if isinstance(operand, TextColumn):
            return operand.present
        return operand != NULL if isinstance(operand, np.ndarray) else np.ones(self._count, np.bool_)

    def _equal(self, left: _Operand, right: _Operand) -> Truths:
        left_present, right_present = self._present(left), self._present(right)
        compared = _equal_values(left, right)
        lone = np.where(right_present, NULL, np.where(left_present, FALSE, TRUE))
        return _raising(np.where(left_present & right_present, compared, lone), left, right)

    def _compared(self, plan: Compare, left: _Operand, right: _Operand) -> Truths:
        # An operand of a comparison by order is an array (of truth values) only if it negates a text that is not a
        # number. The comparison then gives NULL, or RAISES.
        if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            return _raising(self._constant(None), left, right)
        comparison, raises = _comparison(left, right)
        holds = np.array([plan.order.holds(sign) for sign in (-1, 0, 1)])[comparison + 1]
        absent = ~(self._present(left) & self._present(right))
        return np.where(absent, NULL, np.where(raises, RAISES, holds)).astype(np.uint8)

    def _found(self, plan: Find, operand: _Operand) -> Truths:
        """Evaluate a search (CONTAINS, STARTSWITH or ENDSWITH) for each message. The result is FALSE if the operand is
        not a text, and RAISES if the operand raises an error. It is never NULL."""
        if isinstance(operand, np.ndarray):
            return _raising(self._constant(False), operand)
        if isinstance(operand, Number) or not plan.text:
            return self._constant(False)
        if isinstance(operand, str):
            return self._constant(value_of(plan, {}) is True)
        found = operand.finds(plan.test, plan.text)
        return (operand.present & (~found if plan.negated else found)).astype(np.uint8)


def _taken(table: Truths, numbers: Truths) -> Truths:
    taken: Truths = table.take(numbers)
    return taken


def _equal_values(left: _Operand, right: _Operand) -> Truths | int:
    """Compare two operands for equality. The result is valid only for messages in which neither operand is
    NULL."""
    if isinstance(left, TextColumn):
        return _equal_texts(left, right)
    if isinstance(left, np.ndarray):
        if isinstance(right, Number):
            return FALSE
        return (left == right).astype(np.uint8) if isinstance(right, np.ndarray) else RAISES
    if isinstance(right, TextColumn):
        # `=` between a text column and a constant is symmetric, so swap the operands
        return _equal_texts(right, left)
    if isinstance(right, np.ndarray):
        return ((right == TRUE) == is_true_text(left)).astype(np.uint8) if isinstance(left, str) else FALSE
    return _equal_constants(left, right)


def _equal_texts(left: TextColumn, right: _Operand) -> Truths:
    if isinstance(right, Number):
        comparison, raises = _comparison(left, right)
        return np.where(raises, RAISES, comparison == 0).astype(np.uint8)
    if isinstance(right, TextColumn):
        same = left.is_same(right)
    else:
        same = left.equals(right) if isinstance(right, str) else left.is_true() == (right == TRUE)
    return same.astype(np.uint8)


def _equal_constants(left: _Scalar, right: _Scalar) -> int:
    try:
        return TRUE if compare(left, right) == 0 else FALSE
    except IncomparableError:
        return RAISES


def _raising(truths: NDArray[Any], *operands: _Operand) -> Truths:
    """Return a copy of `truths`, the truth values of an expression, one per message. If an operand of the expression is
    RAISES for a message, so is the message's truth value."""
    for operand in operands:
        if isinstance(operand, np.ndarray):
            truths = np.where(operand == RAISES, RAISES, truths)
    return truths.astype(np.uint8)


def _comparison(left: _Scalar | TextColumn, right: _Scalar | TextColumn) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """Compare the two operands of a filter expression. Returns for each message -1, 0 or 1 (left operand less, equal or
    greater), and a mask of the messages whose comparison raises an error. Two texts are compared as doubles."""
    kind = left.kind if isinstance(left, Number) else right.kind if isinstance(right, Number) else ValueKind.DOUBLE
    if isinstance(left, Number) and isinstance(right, Number):
        return np.array([compare(left, right)], np.int8), np.zeros(1, np.bool_)
    first, first_readable = _numbers(left, kind)
    second, second_readable = _numbers(right, kind)
    more, less = first > second, first < second
    # Java orders doubles so: NaN is greater than all other doubles, and -0.0 is less than 0.0.
    if kind is ValueKind.DOUBLE:
        first_nan, second_nan = np.isnan(first), np.isnan(second)
        zeros = (first == 0) & (second == 0)
        more |= (first_nan & ~second_nan) | (zeros & np.signbit(second) & ~np.signbit(first))
        less |= (second_nan & ~first_nan) | (zeros & np.signbit(first) & ~np.signbit(second))
    return more.astype(np.int8) - less.astype(np.int8), ~(first_readable & second_readable)


def _numbers(operand: _Scalar | TextColumn, kind: ValueKind) -> Numbers:
    if isinstance(operand, TextColumn):
        return operand.numbers(kind)
    assert isinstance(operand, Number)
    return np.array([operand.value], np.float64 if kind is ValueKind.DOUBLE else np.int64), np.ones(1, np.bool_)
