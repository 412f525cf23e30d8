"""The plan of a filter expression: a tree of operations that decides whether a message matches.

Truth values (`Truth`) are TRUE, FALSE or NULL; operands (`Operand`) are values. The functions of this module raise
`RefusedError` for expressions that RocketMQ's grammar allows but RocketMQ's parser rejects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from raymq.records.filters.values import Number, Value, ValueKind, compare


class RefusedError(Exception):
    """RocketMQ would not compile this combination of an operator and its operands. The error text states the reason,
    and how to correct the expression."""


class Order(Enum):
    """A comparison operator for order: `>`, `>=`, `<` or `<=`."""

    GREATER = ">"
    GREATER_OR_EQUAL = ">="
    LESS = "<"
    LESS_OR_EQUAL = "<="

    def holds(self, comparison: int) -> bool:
        """True if the result of a comparison satisfies this operator. `comparison`: a result of `compare` (negative,
        zero or positive)."""
        if self is Order.GREATER:
            return comparison > 0
        if self is Order.GREATER_OR_EQUAL:
            return comparison >= 0
        return comparison < 0 if self is Order.LESS else comparison <= 0


class TextTest(Enum):
    """An operator that searches for a text in another text: CONTAINS, STARTSWITH or ENDSWITH."""

    CONTAINS = "CONTAINS"
    STARTSWITH = "STARTSWITH"
    ENDSWITH = "ENDSWITH"


@dataclass(frozen=True, slots=True)
class Name:
    """Operand: the value of a message property. NULL if the message does not have the property."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """Operand: a constant. The constants TRUE, FALSE and NULL are also truth values."""

    value: Value


@dataclass(frozen=True, slots=True)
class Negative:
    """Operand: the negated value of the inner operand. NULL if the inner operand is not a number."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Equal:
    """The comparison `left = right`. IS NULL is represented as `left = NULL`."""

    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class Compare:
    """The comparison `left > right`, or a comparison with another order operator (`>=`, `<`, `<=`)."""

    order: Order
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class In:
    """The condition `name IN (texts)`: the property's text is one of the given texts."""

    name: Name
    texts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Find:
    """The condition `operand [NOT] CONTAINS 'text'`, or the same condition with STARTSWITH or ENDSWITH. It is never
    NULL: if the operand is not a text, both the plain form and the NOT form are FALSE."""

    test: TextTest
    operand: Operand
    text: str
    negated: bool


@dataclass(frozen=True, slots=True)
class IsPresent:
    """A property name used as a condition. The condition is NULL if the message does not have the property. Otherwise
    it is FALSE, whatever the property's text is."""

    name: Name


@dataclass(frozen=True, slots=True)
class Not:
    """Negation: the opposite truth value of a condition; NULL stays NULL."""

    operand: Truth


@dataclass(frozen=True, slots=True)
class And:
    """Conjunction: FALSE if an operand is FALSE, else NULL if an operand is NULL. Operands after the first FALSE are
    not evaluated."""

    operands: tuple[Truth, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Disjunction: TRUE if an operand is TRUE, else NULL if an operand is NULL. Operands after the first TRUE are not
    evaluated."""

    operands: tuple[Truth, ...]


Truth = Equal | Compare | In | Find | IsPresent | Not | And | Or | Literal
Operand = Name | Negative | Truth

_ORDERED_NUMBERS = "only numbers can be ordered: write the number without quotes, as in price > 5"


def truth(operand: Operand) -> Truth:
    """Convert an operand of AND, OR or NOT, or the whole expression, into a condition. Raises RefusedError for a number
    or text constant, and for a negated operand."""
    if isinstance(operand, Name):
        return IsPresent(operand)
    if isinstance(operand, Negative):
        raise RefusedError("a number is neither true nor false: compare it, as in price = 5")
    if isinstance(operand, Literal) and isinstance(operand.value, str | Number):
        raise RefusedError("a literal alone is neither true nor false: compare it with a property, as in price = 5")
    return operand


def both(left: Operand, right: Operand) -> And:
    """Build the condition `left AND right`."""
    first = truth(left)
    return And((*(first.operands if isinstance(first, And) else (first,)), truth(right)))


def either(left: Operand, right: Operand) -> Or:
    """Build the condition `left OR right`."""
    first = truth(left)
    return Or((*(first.operands if isinstance(first, Or) else (first,)), truth(right)))


def equal(left: Operand, right: Operand) -> Equal:
    """Build the condition `left = right`."""
    for side in (left, right):
        if isinstance(side, Literal) and side.value is None:
            raise RefusedError("a comparison with NULL is never true: write IS NULL or IS NOT NULL")
    match left, right:
        case Literal(bool()), Literal(str() | Number()):
            raise RefusedError("TRUE or FALSE cannot be compared with another kind of literal")
    return Equal(left, right)


def is_null(operand: Operand) -> Equal:
    """Build the condition `operand IS NULL`."""
    return Equal(operand, Literal(None))


def ordered(order: Order, left: Operand, right: Operand) -> Compare:
    """Build the condition `left > right`, or a comparison with another order operator (`>=`, `<`, `<=`)."""
    for side in (left, right):
        if isinstance(side, Literal):
            if not isinstance(side.value, Number):
                raise RefusedError(_ORDERED_NUMBERS)
        elif not isinstance(side, Name | Negative):
            raise RefusedError("true and false cannot be ordered: combine comparisons with AND or OR")
    return Compare(order, left, right)


def between(operand: Operand, low: Operand, high: Operand) -> And:
    """Build the condition `operand BETWEEN low AND high`."""
    plan = And((ordered(Order.GREATER_OR_EQUAL, operand, low), ordered(Order.LESS_OR_EQUAL, operand, high)))
    if isinstance(low, Literal) and isinstance(high, Literal) and compare(low.value, high.value) > 0:
        raise RefusedError("the range is empty: write the lower number first")
    return plan


def not_between(operand: Operand, low: Operand, high: Operand) -> Or:
    """Build the condition `operand NOT BETWEEN low AND high`."""
    return Or((ordered(Order.LESS, operand, low), ordered(Order.GREATER, operand, high)))


def one_of(operand: Operand, texts: frozenset[str]) -> In:
    """Build the condition `operand IN (texts)`."""
    if not isinstance(operand, Name):
        raise RefusedError("IN needs a property on its left: write region IN ('eu', 'us')")
    return In(operand, texts)


def negative(number: Number) -> Number:
    """Return a number with the opposite sign and the same type."""
    if number.kind is ValueKind.DOUBLE:
        return Number(-number.value, number.kind)
    bits = 32 if number.kind is ValueKind.INTEGER else 64
    return Number((int(-number.value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1), number.kind)


def children(node: Operand) -> tuple[Operand, ...]:
    """Return the operands of a node in the plan of a filter expression."""
    if isinstance(node, And | Or):
        return node.operands
    if isinstance(node, Equal | Compare):
        return (node.left, node.right)
    if isinstance(node, Negative | Not | Find):
        return (node.operand,)
    return (node.name,) if isinstance(node, In | IsPresent) else ()


def walk(plan: Operand) -> Iterator[tuple[Operand, int]]:
    """Yield all nodes of a plan, each with its depth, counted from 1. The function does not recurse, so a plan of any
    depth is allowed."""
    left: list[tuple[Operand, int]] = [(plan, 1)]
    while left:
        node, depth = left.pop()
        yield node, depth
        left += [(child, depth + 1) for child in reversed(children(node))]
